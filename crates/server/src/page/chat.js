// The chat page: which chat is shown, which answers run, and what the keys do.
import { Problem, at, button, count, make, request, themeButton } from "./common.js";
import { fieldOf, offerModels, openSettings, settingsBody, startSettings, systemPrompt } from "./settings.js";
import { Run } from "./run.js";
import { Sidebar } from "./sidebar.js";
import { Store, addNode, messagesOf, newChat, pathOf, showBranch, titleOf, variantsOf } from "./store.js";
import { viewOf } from "./turns.js";

/// Which chat this tab shows, for when it is loaded again.
const OPEN = "qwill.open";
const store = new Store();
const runs = new Map();     // chat id: the answer that is being made in it
let chat = newChat();       // the one on the screen; kept from its first question on
let views = new Map();      // places of its turns: their views

const runOf = (node) => { for (const run of runs.values()) if (run.node === node) return run; };
const isRunning = (which = chat) => runs.has(which.id);

// ---- the screen ----
const nearBottom = () => { const s = at("scroll"); return s.scrollHeight - s.scrollTop - s.clientHeight < 80; };
const toBottom = () => { at("scroll").scrollTop = at("scroll").scrollHeight; };

const actions = {
  runOf, isRunning,
  variants: (place) => variantsOf(chat, place),
  isLast: (place) => chat.leaf === place,
  focus: () => at("ask").focus(),
  show(place) { if (!isRunning()) { showBranch(chat, place); save(chat); drawTalk(); } },
  askInstead(place, text) { if (!isRunning()) ask(text, chat.nodes[place].parent); },
  again(place) {
    const { parent, content, reasoning, calls } = chat.nodes[place];
    // Where nothing came there is nothing to keep beside the next attempt.
    if (!isRunning()) answer(parent, content || reasoning || calls ? {} : { place });
  },
  goOn(place) { if (!isRunning()) answer(chat.nodes[place].parent, { place, goesOn: true }); },
  keepBottom(draw) { const follow = nearBottom(); draw(); if (follow) toBottom(); },
  sendResults(place, results) { if (!isRunning()) answer(addNode(chat, place, { role: "tool", results })); },
};

function drawTalk() {
  views = new Map(pathOf(chat).map((place) => [place, viewOf(chat.nodes[place], place, actions)]));
  at("talk").replaceChildren(...[...views.values()].map((view) => view.root));
  at("welcome").hidden = views.size > 0;
  at("title").textContent = titleOf(chat);
  drawState();
  toBottom();
}
function drawState() {
  const running = isRunning();
  at("send").hidden = running;
  at("stop").hidden = !running;
  sidebar.draw(chat);
}
function open(which) {
  chat = which;
  try { sessionStorage.setItem(OPEN, chat.id); } catch { /* a reload begins anew */ }
  drawTalk();
  at("ask").focus();
}
function say(text) { at("said").textContent = text; }
function tell(problem) {
  const close = button("✕", () => { at("notice").hidden = true; }, { className: "plain", ariaLabel: "Close" });
  at("notice").replaceChildren(make("span", {}, problem.message + (problem.advice ? " " + problem.advice : "")), close);
  at("notice").hidden = false;
}
function save(which) {
  try { store.save(which); } catch (problem) { tell(problem); }
}

const sidebar = new Sidebar(store, {
  open, isRunning, save, tell,
  drawAll: () => drawTalk(),
  removed(id) {
    runs.get(id)?.stop();
    if (id === chat.id) { open(newChat()); return; }
    drawState();
    at("new").focus();
  },
});

// ---- asking ----
function ask(text, parent = chat.leaf) {
  if (isRunning() || !text.trim()) return;
  answer(addNode(chat, parent, { role: "user", content: text }));
}

/// Makes an answer to the turn at `parent`: a new one, or the one at `place`, anew or going on.
async function answer(parent, { place, goesOn = false } = {}) {
  const which = chat;
  at("notice").hidden = true;
  place ??= addNode(which, parent, { role: "assistant", content: "" });
  which.leaf = place;
  let body;
  try {
    body = settingsBody();
  } catch (problem) {
    // The question stays: once the setting is right, "Try again" asks it.
    which.nodes[place].problem = problem.message;
    save(which);
    drawTalk();
    openSettings(problem.field);
    return;
  }
  const messages = messagesOf(which, goesOn ? place : parent);
  const system = systemPrompt();
  if (system) messages.unshift({ role: "system", content: system });
  Object.assign(body, { messages, stream: true, stream_options: { include_usage: true } });
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });

  const node = which.nodes[place];
  const viewNow = () => (which === chat ? views.get(place) : undefined);
  const run = new Run(node, () => viewNow()?.schedule());
  runs.set(which.id, run);
  save(which);
  drawTalk();
  say("Answering …");
  const problem = await run.go(body);
  runs.delete(which.id);
  // Deleted meanwhile: it stays so.
  if (store.chats.has(which.id)) save(which);
  if (which !== chat) { drawState(); return; }
  actions.keepBottom(() => viewNow()?.finish(problem?.advice));
  drawState();
  say(problem ? problem.message : "The answer is complete. " + node.content.slice(0, 2000));
  if (problem?.status === 404) findModel();
  if (problem?.status === 401) openSettings("api-key");
  else if (problem && fieldOf(problem.param)) offerField(place, fieldOf(problem.param));
  else if (node.calls?.length) document.querySelector("#talk .result")?.focus();
  else at("ask").focus();
}
/// The request was refused for a setting: a way to it.
function offerField(place, field) {
  views.get(place)?.problem.append(button("Change it in the settings", () => openSettings(field), { className: "small" }));
  at("ask").focus();
}

// ---- the server ----
let asking = 0;   // only the last of several overlapping attempts counts
async function findModel() {
  const attempt = asking += 1;
  const show = (text, state, label) => {
    at("model-name").textContent = text;
    at("health").className = state;
    at("health").setAttribute("aria-label", label);
  };
  try {
    const { data } = await (await request("v1/models")).json();
    if (attempt !== asking) return;
    const [first] = data;
    const context = first.max_model_len ?? first.context_length;
    show(first.id + (context ? " · " + count(context) + " tokens of context" : ""), "ready", "ready");
    document.title = first.id + " – Qwill";
    offerModels(data.map((model) => model.id));
  } catch (problem) {
    if (attempt !== asking) return;
    show(problem.message, "down", "not reachable");
    if (problem.status === 401) openSettings("api-key");
    // A key that is missing or wrong stays so until somebody types one.
    else setTimeout(() => { if (attempt === asking) findModel(); }, 3000);
  }
}

// ---- keys and buttons ----
function grow() { const field = at("ask"); field.style.height = "auto"; field.style.height = field.scrollHeight + 2 + "px"; }
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("ask").value;
  if (isRunning() || !text.trim()) return;
  at("ask").value = "";
  grow();
  ask(text);
});
at("ask").addEventListener("input", grow);
at("ask").addEventListener("keydown", (event) => {
  // While an input method composes a character, the keys belong to it.
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("form").requestSubmit(); }
  if (event.key === "ArrowUp" && !at("ask").value) {
    const last = pathOf(chat).findLast((place) => chat.nodes[place].role === "user");
    if (last !== undefined) { event.preventDefault(); views.get(last).edit(); }
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("settings").open) {
    if (document.body.classList.contains("with-sidebar")) { sidebar.show(false); at("ask").focus(); }
    else runs.get(chat.id)?.stop();
  }
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    at("settings").close();
    begin();
  }
});
function begin() { sidebar.show(false); open(newChat()); }
at("stop").addEventListener("click", () => runs.get(chat.id)?.stop());
at("new").addEventListener("click", begin);
for (const example of at("examples").children) example.addEventListener("click", () => ask(example.textContent));
at("settings").addEventListener("close", () => at("ask").focus());
themeButton(at("theme"));
startSettings(findModel);

// Another tab kept, changed or deleted a chat.
addEventListener("storage", (event) => {
  if (event.key === null || !store.isEntry(event.key)) return;
  const running = [...runs.values()].map((run) => run.node);
  const before = store.chats.get(event.key.slice("qwill.chat.".length));
  if (before?.nodes.some((node) => running.includes(node))) return;
  store.read(event.key);
  if (before && before.id === chat.id && store.chats.has(chat.id)) { chat = store.chats.get(chat.id); drawTalk(); } else drawState();
});
// What has come of an answer is kept when the page goes.
addEventListener("pagehide", () => {
  for (const [id, run] of runs) {
    run.node.finish = "stopped";
    const which = store.chats.get(id);
    if (which) save(which);
  }
});

try { chat = store.chats.get(sessionStorage.getItem(OPEN)) ?? chat; } catch { /* a new one */ }
if (store.damaged) tell(new Problem(store.damaged + " of the kept chats cannot be read; they are left as they are."));
open(chat);
findModel();
