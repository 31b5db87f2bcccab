// What both pages share: nodes, the key, requests and what to do about their problems, light and dark, numbers.
//
// Text of people and models enters the pages as text nodes only. The policy of the pages forbids everything else:
// scripts run from files of this server alone, and no string can become markup.

export const at = (id) => document.getElementById(id);

/** A node with properties (or attributes, where there is no such property) and children. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (name in node) node[name] = value; else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A button that does something. */
export function button(label, action, properties = {}) {
  const node = make("button", { type: "button", ...properties }, label);
  node.addEventListener("click", action);
  return node;
}

/** A button that copies what `text` returns and says so. */
export function copyButton(text, label = "Copy") {
  const node = button(label, async () => {
    try {
      await navigator.clipboard.writeText(text());
      node.textContent = "Copied";
    } catch {
      node.textContent = "Copying is not allowed here";
    }
    setTimeout(() => { node.textContent = label; }, 2000);
  }, { className: "small copy" });
  return node;
}

// ---- the key: kept in this tab only, so that it does not outlive it ----
const KEY = "qwill.key";
let key = "";
try { key = sessionStorage.getItem(KEY) ?? ""; } catch { /* no storage: for as long as the page is open */ }
export const currentKey = () => key;
export function setKey(value) {
  key = value.trim();
  try { sessionStorage.setItem(KEY, key); } catch { /* as above */ }
}

/** Something went wrong; `advice` says what to do about it. */
export class Problem extends Error {
  constructor(message, { advice = "", status = 0, param = "" } = {}) {
    super(message);
    Object.assign(this, { advice, status, param });
  }
}

/** A request to this server; whatever is not a success is a Problem. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = "Bearer " + key;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (response.ok) return response;
  throw await problemOf(response);
}

export const unreachable = () =>
  new Problem("The server cannot be reached.", { advice: "Is it running, and at this address? Then try again." });

async function problemOf(response) {
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* not JSON: the status has to do */ }
  let message = error.message ?? (response.status + " " + response.statusText).trim();
  // The server tells programs how to send a key; people type it.
  if (response.status === 401) message = key ? "The server does not take this API key." : "The server asks for an API key.";
  const param = error.param ?? "";
  if (param && !message.includes(param)) message += " (" + param + ")";
  const wait = response.headers.get("retry-after");
  return new Problem(message, { advice: adviceFor(response.status, error, wait), status: response.status, param });
}

function adviceFor(status, error, wait) {
  const later = wait ? "Try again in " + wait + " s." : "Try again in a while.";
  if (error.code === "context_length_exceeded") return "Shorten the question, begin a new chat, or allow fewer tokens in the settings.";
  if (status === 401) return "Enter the key that the server was started with.";
  if (status === 404) return "Choose another model in the settings.";
  if (status === 429) return "The server has as much to do as it takes. " + later;
  if (status === 503) return later + " The status page says more.";
  if (status >= 500) return "Try again; the server's log says more.";
  return "";
}

// ---- light and dark ----
const THEMES = { "": ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
function showTheme(node) {
  const [symbol, name] = THEMES[document.documentElement.dataset.theme ?? ""];
  node.textContent = symbol;
  node.title = "Colours: " + name;
  node.setAttribute("aria-label", "Colours: " + name + ". Press to change");
}
/** Makes a button go from the system's colours to light, to dark, and back. */
export function themeButton(node) {
  const root = document.documentElement;
  const names = Object.keys(THEMES);
  if (!((root.dataset.theme ?? "") in THEMES)) delete root.dataset.theme;
  showTheme(node);
  node.addEventListener("click", () => {
    const next = names[(names.indexOf(root.dataset.theme ?? "") + 1) % names.length];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    try { localStorage.setItem("qwill.theme", next); } catch { /* no storage: until the page is left */ }
    showTheme(node);
  });
}

// ---- numbers as people read them ----
export const count = (value) => value.toLocaleString("en");
export const plural = (value, noun) => count(value) + " " + noun + (value === 1 ? "" : "s");
export function seconds(milliseconds) {
  const value = milliseconds / 1000;
  if (value < 10) return value.toFixed(value < 1 ? 2 : 1) + " s";
  if (value < 60) return value.toFixed(0) + " s";
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return minutes + " min " + Math.floor(value % 60) + " s";
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return hours + " h " + (minutes % 60) + " min";
  return plural(Math.floor(hours / 24), "day") + " " + (hours % 24) + " h";
}
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return value.toFixed(unit === 0 || value >= 100 ? 0 : 1) + " " + units[unit];
}
