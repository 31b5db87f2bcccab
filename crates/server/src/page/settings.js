// The settings: what they are called in a request, where they are kept, what is wrong with them.
import { Problem, at, currentKey, make, setKey } from "./common.js";

const KEPT = "qwill.settings";
/// Numbers that go into the request under a name of their own.
const NUMBERS = {
  temperature: "temperature", "top-p": "top_p", "top-k": "top_k", "min-p": "min_p",
  "presence-penalty": "presence_penalty", "frequency-penalty": "frequency_penalty",
  "repetition-penalty": "repetition_penalty", "max-tokens": "max_tokens", seed: "seed", "thinking-budget": "thinking_budget",
};
const FIELDS = [...Object.keys(NUMBERS), "model", "thinking", "effort", "system", "format", "schema", "tools"];

const labelOf = (id) => document.querySelector(`label[for="${id}"]`).textContent;
const valueOf = (id) => at(id).value.trim();

/** Reads what was kept and keeps what changes. `onKey`: the key changed. */
export function startSettings(onKey) {
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(KEPT)) ?? {}; } catch { /* nothing was kept, or nothing of ours */ }
  for (const id of FIELDS) {
    if (typeof kept[id] === "string" && id !== "model") at(id).value = kept[id];
    at(id).addEventListener("change", () => { keep(); check(id); });
  }
  if (typeof kept.model === "string") at("model").dataset.wanted = kept.model;
  at("api-key").value = currentKey();
  at("api-key").addEventListener("change", () => { setKey(at("api-key").value); onKey(); });
  at("settings-reset").addEventListener("click", () => {
    for (const id of FIELDS) { at(id).value = ""; check(id); }
    keep();
  });
  at("settings-toggle").addEventListener("click", () => openSettings());
  at("settings-close").addEventListener("click", () => at("settings").close());
  // A press beside the panel closes it; inside, the target is something in it.
  at("settings").addEventListener("click", (event) => { if (event.target === at("settings")) at("settings").close(); });
  at("format").addEventListener("change", showSchema);
  showSchema();
}
function showSchema() { at("schema-row").hidden = at("format").value !== "json_schema"; }
function keep() {
  const values = Object.fromEntries(FIELDS.map((id) => [id, at(id).value]).filter(([, value]) => value !== ""));
  try { localStorage.setItem(KEPT, JSON.stringify(values)); } catch { /* until the page is left */ }
  showSchema();
}

/** Opens the panel, at a field. */
export function openSettings(field) {
  if (!at("settings").open) at("settings").showModal();
  if (field) { at(field).focus(); at(field).scrollIntoView({ block: "center" }); }
}
/** The field that sets a parameter of the API, if there is one. */
export function fieldOf(param) {
  const name = param.split(/[.[]/)[0];
  const [id] = Object.entries(NUMBERS).find(([, known]) => known === name) ?? [];
  return id ?? { model: "model", tools: "tools", response_format: "schema", chat_template_kwargs: "thinking", reasoning_effort: "effort" }[name];
}

/** The names that the model goes by. */
export function offerModels(names) {
  const select = at("model");
  const wanted = select.value || select.dataset.wanted;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  select.value = names.includes(wanted) ? wanted : names[0];
  at("model-row").hidden = names.length < 2;
}

/// Shows what is wrong with a field, in the field and below it; returns its problem.
function check(id) {
  let message = "";
  try { read(id); } catch (error) { message = error.message; }
  at(id).setAttribute("aria-invalid", String(Boolean(message)));
  at(id).setCustomValidity(message);
  const row = at(id).parentNode;
  row.querySelector(".field-problem")?.remove();
  if (message) row.append(make("p", { className: "field-problem" }, message));
  return message;
}
/// What a field says; undefined when it says nothing.
function read(id) {
  const field = at(id);
  if (id in NUMBERS) {
    field.setCustomValidity("");
    const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = field.validity;
    if (badInput || rangeUnderflow || rangeOverflow || stepMismatch) {
      const [from, to] = [field.min, field.max];
      throw new Problem(labelOf(id) + " must be a " + (field.step === "1" ? "whole number" : "number") + (from && to ? " from " + from + " to " + to : from ? " of at least " + from : "") + ".");
    }
    return field.value === "" ? undefined : Number(field.value);
  }
  if (id === "tools" || (id === "schema" && at("format").value === "json_schema")) {
    const text = valueOf(id);
    if (id === "tools" && !text) return undefined;
    return id === "tools" ? readTools(text) : readSchema(text);
  }
  return valueOf(id) || undefined;
}
function readJson(text, what) {
  try { return JSON.parse(text); } catch (error) { throw new Problem(what + " is not JSON: " + error.message + "."); }
}
function readSchema(text) {
  const schema = readJson(text, "The schema");
  if (schema === null || typeof schema !== "object") throw new Problem("The schema must be a JSON object.");
  return schema;
}
/// Whole tools, or the functions alone.
function readTools(text) {
  const tools = [readJson(text, "The list of tools")].flat();
  return tools.map((tool) => {
    const whole = tool?.function ? tool : { type: "function", function: tool };
    if (typeof whole.function?.name !== "string") throw new Problem("Every tool needs a name.");
    return whole;
  });
}

/** The settings' part of a request. */
export function settingsBody() {
  for (const id of FIELDS) {
    const message = check(id);
    if (message) throw Object.assign(new Problem(message, { advice: "Change it in the settings." }), { field: id });
  }
  const body = {};
  for (const [id, name] of Object.entries(NUMBERS)) if (read(id) !== undefined) body[name] = read(id);
  if (valueOf("model")) body.model = valueOf("model");
  if (valueOf("thinking")) body.chat_template_kwargs = { enable_thinking: valueOf("thinking") === "on" };
  if (valueOf("effort")) body.reasoning_effort = valueOf("effort");
  if (read("tools")) body.tools = read("tools");
  if (valueOf("format") === "json_object") body.response_format = { type: "json_object" };
  if (valueOf("format") === "json_schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: read("schema"), strict: true } };
  }
  return body;
}
export const systemPrompt = () => valueOf("system");
