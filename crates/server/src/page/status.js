// The status page: asks for numbers every two seconds, as long as somebody can see it.
import { at, bytes, count, currentKey, make, plural, request, seconds, setKey, themeButton } from "./common.js";
import { bar, drawLine } from "./chart.js";

const EVERY_MS = 2000;
/// Seconds that the lines go back.
const SPAN_S = 300;

const percent = (part, whole) => (whole > 0 ? (100 * part / whole).toFixed(part > 0 && part < whole / 10 ? 1 : 0) + "%" : "–");
const facts = (list) => list.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
function table(columns, rows) {
  const cell = (tag, value, column) => make(tag, { className: column.number ? "number" : "" }, value);
  return make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map((column) => cell("th", column.name, column)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((value, index) => cell("td", value, columns[index]))))));
}
const none = (text) => make("p", { className: "none" }, text);
const clock = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleTimeString();

function draw(status) {
  const { health, requests } = status;
  const good = health.ready && health.can_generate;
  showState(status.models[0] + " · " + (health.reason ?? (good ? "ready" : health.state)), good ? "ready" : "down");
  drawRates(status);
  at("requests-now").textContent = count(requests.running) + " of " + count(requests.max_running) + " running · "
    + count(requests.waiting) + " of " + count(requests.max_waiting) + " waiting";
  drawCaches(status);
  drawMemory(status.memory);
  at("server").replaceChildren(...facts([
    ["version", status.version], ["names", status.models.join(", ")], ["numerics", status.numerics],
    ["context", plural(status.context_tokens, "token")], ["up for", seconds(1000 * status.uptime_s)],
    ["generated", plural(status.tokens.generated, "token")], ["prompts", plural(status.tokens.prompt, "token")],
    ["prompts, cached", plural(status.tokens.cached, "token")],
    ["drafts accepted", percent(status.tokens.accepted, status.tokens.drafted) + " of " + count(status.tokens.drafted)],
  ]));
  at("errors").replaceChildren(status.errors.length
    ? table([{ name: "time" }, { name: "status", number: true }, { name: "endpoint" }, { name: "what" }],
      status.errors.map((error) => [clock(error.time), String(error.status), error.endpoint, error.message]))
    : none("none since the start"));
}

function drawRates({ rates }) {
  const show = (id, value) => {
    const points = rates.filter((rate) => rate.age_s <= SPAN_S).map((rate) => ({ age: rate.age_s, value: value(rate) }));
    drawLine(at(id), points, SPAN_S);
    const now = (points.at(-1)?.value ?? 0).toFixed(0) + " tokens/s";
    at(id + "-now").textContent = now;
    at(id).setAttribute("aria-label", id + " tokens a second, last five minutes; now " + now);
  };
  show("generated", (rate) => rate.generated);
  show("prompt", (rate) => rate.prompt + rate.cached);
}

function drawCaches({ kv, states, cache, tokens }) {
  const missed = Object.entries(cache.misses).filter(([, misses]) => misses > 0);
  const gauge = (name, { used, total }, unit) => [
    make("div", { className: "bar-label" }, make("span", {}, name),
      make("span", {}, total ? count(used) + " of " + plural(total, unit) + " · " + percent(used, total) : "none")),
    bar([{ share: total ? used / total : 0, name: percent(used, total) }]),
  ];
  at("caches").replaceChildren(
    ...gauge("KV", kv, "page"), ...gauge("States", states, "slot"), ...gauge("Host cache", cache.host_granules, "granule"),
    make("dl", { className: "facts" }, ...facts([
      ["prompt tokens found", percent(tokens.cached, tokens.cached + tokens.prompt)],
      ["requests with a hit", count(cache.hits)],
      ["less than possible", missed.length ? missed.map(([reason, misses]) => count(misses) + " " + reason.replaceAll("_", " ")).join(", ") : "never"],
      ["snapshots", count(cache.snapshots) + " of " + plural(cache.tokens, "token")],
      ["evicted", count(cache.evictions)],
      ["on disk", cache.disk_bytes ? bytes(cache.disk_bytes) + ", read " + plural(cache.disk_loads, "time") : "nothing"],
    ])));
}

function drawMemory(parts) {
  if (!parts.length) { at("memory").replaceChildren(none("not known")); return; }
  const all = parts.reduce((sum, part) => sum + part.bytes, 0);
  at("memory-all").textContent = bytes(all);
  const sections = [...Map.groupBy(parts, (part) => part.section)].map(([name, of]) => ({ name, of, bytes: of.reduce((sum, part) => sum + part.bytes, 0) }));
  const rows = sections.flatMap(({ name, of }, index) => of.map((part) => [
    make("span", {}, make("span", { className: "swatch part-" + (index % 5) }), name), part.name, bytes(part.bytes), percent(part.bytes, all)]));
  at("memory").replaceChildren(
    bar(sections.map((section) => ({ share: section.bytes / all, name: section.name + " " + bytes(section.bytes) }))),
    make("div", { className: "scroll" }, table([{ name: "for" }, { name: "part" }, { name: "bytes", number: true }, { name: "", number: true }], rows)));
}

function showState(text, state) {
  at("model-name").textContent = text;
  at("health").className = state;
  at("health").setAttribute("aria-label", state);
}
const SLOT_COLUMNS = [
  { name: "state" }, { name: "prompt", number: true }, { name: "cached", number: true }, { name: "generated", number: true },
  { name: "tokens/s", number: true }, { name: "waited", number: true }, { name: "age", number: true }, { name: "key" }, { name: "endpoint" }, { name: "id" },
];
function drawSlots(slots) {
  if (!slots) { at("slots").replaceChildren(none("the list is not available from this server")); return; }
  const row = (slot) => [
    slot.state,
    // A prompt that is being read shows how far.
    (slot.state === "prompt" ? count(slot.processed_tokens) + " of " : "") + count(slot.prompt_tokens),
    count(slot.cached_tokens), count(slot.generated_tokens) + " of " + count(slot.max_tokens * slot.choices),
    slot.tokens_per_s == null ? "" : slot.tokens_per_s.toFixed(1), seconds(1000 * slot.waited_s), seconds(1000 * slot.age_s),
    slot.key, slot.endpoint, slot.request_id,
  ];
  at("slots").replaceChildren(slots.length ? table(SLOT_COLUMNS, slots.map(row)) : none("none at the moment"));
}

let withSlots = true;   // until the server says that it has no such list
async function slotsNow() {
  if (!withSlots) return null;
  try {
    return await (await request("slots")).json();
  } catch (problem) {
    if (problem.status !== 404) throw problem;
    withSlots = false;
    return null;
  }
}

let timer, wanted = true;
async function poll() {
  clearTimeout(timer);
  try {
    const [status, slots] = await Promise.all([request("v1/status").then((response) => response.json()), slotsNow()]);
    at("trouble").hidden = true;
    draw(status);
    drawSlots(slots);
    wanted = true;
  } catch (problem) {
    showState(problem.message, "down");
    const needsKey = problem.status === 401;
    at("trouble-text").textContent = problem.message + " " + (needsKey ? problem.advice : "It is asked again every two seconds.");
    const appears = needsKey && at("key-form").hidden;
    at("key-form").hidden = !needsKey;
    at("trouble").hidden = false;
    if (appears) at("api-key").focus();
    // A key that is missing stays so until somebody types one.
    wanted = !needsKey;
  }
  clearTimeout(timer);
  if (wanted && document.visibilityState === "visible") timer = setTimeout(poll, EVERY_MS);
}
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible" && wanted) poll(); });
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("api-key").value);
  poll();
});
at("api-key").value = currentKey();
themeButton(at("theme"));
poll();
