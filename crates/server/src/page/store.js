// Conversations: trees of turns, kept in this browser's localStorage, one entry each.
//
// A turn is {parent, role, ...}; `parent` is the place of the turn before it in `nodes`, -1 for a beginning. Asking
// differently or again adds a turn beside the old one, and `leaf` says which branch is shown.
import { Problem, count } from "./common.js";

const PREFIX = "qwill.chat.";
/// Browsers give a site five million characters; other pages of this server's address share them.
export const MOST_CHARS = 4_000_000;
const MOST_CHATS = 500;
const FORMAT = "qwill-chats";

export class Store {
  constructor() {
    this.chats = new Map();
    this.chars = new Map();   // of each entry, for the bound
    this.damaged = 0;
    try {
      for (const name of Object.keys(localStorage)) if (name.startsWith(PREFIX)) this.read(name);
    } catch { /* no storage: saving will say so */ }
  }
  /** Takes an entry as it is in the storage now; what cannot be read is left alone. */
  read(name) {
    const id = name.slice(PREFIX.length);
    const text = localStorage.getItem(name);
    this.chars.delete(id);
    if (text === null) { this.chats.delete(id); return; }
    this.chars.set(id, text.length);
    try {
      this.chats.set(id, checkChat(JSON.parse(text), id));
    } catch {
      this.damaged += 1;
    }
  }
  isEntry(name) { return name.startsWith(PREFIX); }
  /** The chats, the one that was used last first. */
  all() { return [...this.chats.values()].sort((one, other) => other.updated - one.updated); }
  usedChars() { return [...this.chars.values()].reduce((sum, chars) => sum + chars, 0); }

  /** Keeps a chat. Nothing is dropped to make room: what does not fit is a Problem. */
  save(chat) {
    this.chats.set(chat.id, chat);
    const text = JSON.stringify(chat);
    const others = this.usedChars() - (this.chars.get(chat.id) ?? 0);
    const isNew = !this.chars.has(chat.id);
    if (others + text.length > MOST_CHARS || (isNew && this.chars.size >= MOST_CHATS)) throw this.full();
    try {
      localStorage.setItem(PREFIX + chat.id, text);
    } catch (error) {
      if (error.name === "QuotaExceededError") throw this.full();
      throw new Problem("This browser keeps nothing for this page.", { advice: "Export what you want to keep before you leave." });
    }
    this.chars.set(chat.id, text.length);
  }
  full() {
    return new Problem("There is no room for more in this browser, so the last turns are not kept.", {
      advice: "Chats take " + count(this.usedChars()) + " of at most " + count(MOST_CHARS) + " characters. Export some and "
        + "delete them: this one goes on, and is kept as soon as there is room.",
    });
  }
  remove(id) {
    this.chats.delete(id);
    this.chars.delete(id);
    try { localStorage.removeItem(PREFIX + id); } catch { /* nothing was kept */ }
  }
}

// ---- chats ----
export function newChat() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, nodes: [], leaf: -1 };
}
const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
export const titleOf = (chat) => chat.title || shorten(chat.nodes.find((node) => node.role === "user")?.content ?? "") || "New chat";
const shorten = (text) => {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? line.slice(0, 59) + "…" : line;
};

/** Adds a turn after `parent` and shows it; returns its place. */
export function addNode(chat, parent, node) {
  chat.nodes.push({ parent, ...node });
  chat.leaf = chat.nodes.length - 1;
  chat.updated = Date.now();
  return chat.leaf;
}
/** Places of the turns that are shown, first to last. */
export function pathOf(chat, leaf = chat.leaf) {
  const path = [];
  for (let at = leaf; at >= 0; at = chat.nodes[at].parent) path.push(at);
  return path.reverse();
}
/** Places of a turn and of those that stand in its stead on other branches. */
export function variantsOf(chat, at) {
  const { parent } = chat.nodes[at];
  return [...chat.nodes.keys()].filter((other) => chat.nodes[other].parent === parent);
}
/** Shows the branch of a turn that was led last. */
export function showBranch(chat, at) {
  for (let last = chat.nodes.length - 1; last >= at; last--) {
    if (pathOf(chat, last).includes(at)) { chat.leaf = last; return; }
  }
}
/** Whether a turn of the model has anything to go on from. */
export const isAnswer = (node) => node.role === "assistant" && Boolean(node.content || node.calls?.length);

/** The messages of the API up to a turn. A question that got no answer is replaced by the next one. */
export function messagesOf(chat, leaf) {
  const messages = [];
  for (const at of pathOf(chat, leaf)) {
    const node = chat.nodes[at];
    if (node.role === "user") {
      if (messages.at(-1)?.role === "user") messages.pop();
      messages.push({ role: "user", content: node.content });
    } else if (node.role === "tool") {
      for (const { id, content } of node.results) messages.push({ role: "tool", tool_call_id: id, content });
    } else if (isAnswer(node) || (at === leaf && node.reasoning)) {
      messages.push({
        role: "assistant",
        content: node.content,
        ...(node.reasoning && { reasoning_content: node.reasoning }),
        ...(node.calls?.length && { tool_calls: node.calls.map(callOf) }),
      });
    }
  }
  return messages;
}
const callOf = ({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } });

// ---- export and import ----
export const exportText = (chats) => JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);

/** The chats of an exported text, with ids that no other chat has. */
export function importChats(text) {
  let value;
  try { value = JSON.parse(text); } catch { throw new Problem("This file is not JSON."); }
  if (value?.format !== FORMAT || value.version !== 1 || !Array.isArray(value.chats)) {
    throw new Problem("This file holds no exported chats.");
  }
  return value.chats.map((chat, index) => {
    try { return checkChat(chat, newId()); } catch (error) { throw new Problem("Chat " + (index + 1) + " of the file: " + error.message + "."); }
  });
}

/// A chat with nothing in it but what a chat has, each part of its kind. Nothing that was kept or comes from a file is
/// trusted.
function checkChat(value, id) {
  const want = (good, what) => { if (!good) throw new Error(what); };
  const text = (part, what) => { want(typeof part === "string", what + " is no text"); return part; };
  const optional = (part, what) => (part === undefined ? {} : { [what]: text(part, what) });
  const time = (part) => (Number.isFinite(part) ? part : Date.now());
  want(value !== null && typeof value === "object" && Array.isArray(value.nodes), "it has no turns");
  const nodes = value.nodes.map((node, at) => {
    want(node !== null && typeof node === "object", "turn " + at + " is none");
    want(Number.isInteger(node.parent) && node.parent >= -1 && node.parent < at, "turn " + at + " follows no earlier one");
    const { parent, role } = node;
    if (role === "user") return { parent, role, content: text(node.content, "content") };
    if (role === "tool") {
      want(Array.isArray(node.results), "turn " + at + " has no results");
      return { parent, role, results: node.results.map((result) => ({ id: text(result?.id, "id"), name: text(result?.name, "name"), content: text(result?.content, "content") })) };
    }
    want(role === "assistant", "turn " + at + " is nobody's");
    want(node.calls === undefined || Array.isArray(node.calls), "turn " + at + " has calls of another kind");
    const calls = node.calls?.map((call) => ({ id: text(call?.id, "id"), name: text(call?.name, "name"), arguments: text(call?.arguments, "arguments") }));
    const numbers = Object.entries(node.stats ?? {}).filter(([, number]) => Number.isFinite(number));
    return {
      parent, role, content: text(node.content, "content"), ...optional(node.reasoning, "reasoning"),
      ...(calls && { calls }), ...optional(node.finish, "finish"), ...optional(node.problem, "problem"),
      stats: Object.fromEntries(numbers),
    };
  });
  const leaf = Number.isInteger(value.leaf) && value.leaf < nodes.length && value.leaf >= -1 ? value.leaf : nodes.length - 1;
  return { id, title: text(value.title ?? "", "title"), created: time(value.created), updated: time(value.updated), nodes, leaf };
}
