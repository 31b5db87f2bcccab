// Markdown as nodes. What it is not sure of stays text: HTML, images, anything unclosed.
//
// A text that grows is drawn as it comes: blocks that are over are never touched again.
import { copyButton, make } from "./common.js";
import { highlight } from "./highlight.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|)$/;
const DELIMITERS = /^ *\|?(?: *:?-+:? *\|)* *:?-+:? *\|? *$/;
/// Quotes in lists in quotes: what is deeper than this is text.
const MOST_DEEP = 12;

/** A view of a text that grows at its end. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.settled = 0;   // characters whose blocks are drawn for good
    this.open = [];     // nodes of what follows them
    this.openCode = null;
  }
  /** Draws `text`; `whole`: nothing more will follow. */
  update(text, whole = false) {
    // A line that is not complete may still become anything; so may the last block of those that are.
    const complete = whole ? text.length : text.lastIndexOf("\n") + 1;
    const over = splitBlocks(text.slice(this.settled, complete));
    if (!whole) over.pop();
    if (over.length || whole) {
      this.clear();
      this.root.append(...over.map((block) => draw(block, 0)));
      this.settled = whole ? text.length : this.settled + over.at(-1).end;
    }
    if (whole) return;
    const blocks = splitBlocks(text.slice(this.settled));
    const [only] = blocks;
    if (blocks.length === 1 && only.kind === "code" && this.openCode?.language === only.language) {
      this.openCode.node.querySelector("code").textContent = only.text;
      return;
    }
    this.clear();
    this.open = blocks.map((block) => draw(block, 0, true));
    this.openCode = blocks.length === 1 && only.kind === "code" ? { language: only.language, node: this.open[0] } : null;
    this.root.append(...this.open);
  }
  clear() {
    for (const node of this.open) node.remove();
    this.open = [];
    this.openCode = null;
  }
}

/** The nodes of a whole text. */
export function markdown(text) {
  return splitBlocks(text).map((block) => draw(block, 0));
}

// ---- blocks ----
const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;
const withoutTabs = (line) => line.replace(/^[ \t]+/, (indent) => indent.replaceAll("\t", "    "));
/// The next line from `at` on that is not blank; -1: there is none.
function nextFull(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at < lines.length ? at : -1;
}
const beginsBlock = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || interruptingItem(line);
/// A number in the middle of a paragraph is one, unless it is 1.
function interruptingItem(line) {
  const item = ITEM.exec(line);
  return item !== null && !isBlank(item[4] ?? "") && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
}
const beginsTable = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DELIMITERS.test(lines[at + 1])
  && cells(lines[at]).length === cells(lines[at + 1]).length;

/** The blocks of a text; `end` is where each ends in it. */
function splitBlocks(text) {
  const lines = text.split("\n");
  if (lines.at(-1) === "") lines.pop();
  const blocks = [];
  let at = 0, offset = 0;
  while (at < lines.length) {
    const begin = at;
    if (isBlank(lines[at])) { offset += lines[at].length + 1; at += 1; continue; }
    const block = takeBlock(lines, at);
    at = block.next;
    for (let line = begin; line < at; line++) offset += lines[line].length + 1;
    blocks.push({ ...block, end: Math.min(offset, text.length) });
  }
  return blocks;
}

function takeBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return takeCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2], next: at + 1 };
  if (RULE.test(line)) return { kind: "rule", next: at + 1 };
  if (QUOTE.test(line)) return takeQuote(lines, at);
  if (ITEM.test(line)) return takeList(lines, at);
  if (beginsTable(lines, at)) return takeTable(lines, at);
  return takeParagraph(lines, at);
}

function takeCode(lines, at, [opening, marks, info]) {
  const indent = indentOf(opening);
  const closing = new RegExp("^ {0,3}" + marks[0] + "{" + marks.length + ",}[ \t]*$");
  let next = at + 1;
  while (next < lines.length && !closing.test(lines[next])) next += 1;
  const strip = (line) => line.slice(Math.min(indent, indentOf(line)));
  const text = lines.slice(at + 1, next).map((line) => strip(line) + "\n").join("");
  return { kind: "code", language: info.trim().split(/\s/)[0], text, next: Math.min(next + 1, lines.length) };
}

function takeQuote(lines, at) {
  const inner = [];
  let next = at;
  while (next < lines.length && !isBlank(lines[next]) && (QUOTE.test(lines[next]) || !beginsBlock(lines[next]))) {
    inner.push(lines[next].replace(/^ {0,3}> ?/, ""));
    next += 1;
  }
  return { kind: "quote", text: inner.join("\n"), next };
}

/// Items at one indent with one kind of marker; what is indented below an item belongs to it.
function takeList(lines, at) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = (item) => /\d/.test(item[2]);
  const items = [];
  let next = at, loose = false;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || isOrdered(item) !== isOrdered(first) || RULE.test(lines[next])) break;
    const least = item[1].length + 2;
    const width = item[1].length + item[2].length + Math.min(item[3]?.length ?? 1, 4);
    const inner = [item[4] ?? ""];
    next += 1;
    while (next < lines.length) {
      const line = withoutTabs(lines[next]);
      if (isBlank(line)) {
        const after = nextFull(lines, next);
        if (after < 0 || indentOf(withoutTabs(lines[after])) < least) break;
        loose = true;
        while (next < after) { inner.push(""); next += 1; }
      } else if (indentOf(line) >= least) {
        inner.push(line.slice(Math.min(width, indentOf(line))));
        next += 1;
      } else if (ITEM.test(line) || beginsBlock(line) || isBlank(lines[next - 1])) {
        break;
      } else {
        inner.push(line.trimStart());
        next += 1;
      }
    }
    items.push(inner.join("\n"));
    // Blank lines between items belong to the list only if another item follows.
    const after = nextFull(lines, next);
    const another = after > next && ITEM.exec(lines[after]);
    if (another && isOrdered(another) === isOrdered(first) && another[1].length < least) { next = after; loose = true; }
  }
  return { kind: "list", ordered: isOrdered(first), start: parseInt(first[2], 10), items, loose, next };
}

function takeTable(lines, at) {
  const aligns = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "");
  const rows = [];
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|")) { rows.push(cells(lines[next])); next += 1; }
  return { kind: "table", head: cells(lines[at]), rows, aligns, next };
}
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function takeParagraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !beginsBlock(lines[next]) && !beginsTable(lines, next)) next += 1;
  return { kind: "paragraph", text: lines.slice(at, next).map((line) => line.trimStart()).join("\n"), next };
}

// ---- nodes of blocks ----
function draw(block, depth, open = false) {
  switch (block.kind) {
    case "code": return drawCode(block, open);
    // The page's own headings are levels 1 and 2.
    case "heading": return make("h" + Math.min(6, block.level + 2), {}, ...inline(block.text));
    case "rule": return make("hr");
    case "quote": return make("blockquote", {}, ...nested(block.text, depth));
    case "list": return drawList(block, depth);
    case "table": return drawTable(block);
    default: return make("p", {}, ...inline(block.text));
  }
}
function nested(text, depth) {
  if (depth >= MOST_DEEP) return [make("p", {}, text)];
  return splitBlocks(text).map((block) => draw(block, depth + 1));
}
function drawCode({ language, text }, open) {
  const code = make("code", {}, ...(open ? [text] : highlight(text, language)));
  const head = make("div", { className: "code-head" }, make("span", {}, language), copyButton(() => code.textContent));
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
}
function drawList({ ordered, start, items, loose }, depth) {
  const list = make(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {});
  for (const item of items) {
    const task = /^\[([ xX])\] /.exec(item);
    const nodes = nested(task ? item.slice(4) : item, depth);
    const tight = nodes.flatMap((node) => (node.tagName === "P" && !loose ? [...node.childNodes] : [node]));
    const box = task ? [task[1] === " " ? "☐ " : "☑ "] : [];
    list.append(make("li", task ? { className: "task" } : {}, ...box, ...tight));
  }
  return list;
}
function drawTable({ head, rows, aligns }) {
  const row = (tag, values) => make("tr", {}, ...head.map((_, column) =>
    make(tag, { className: aligns[column] ?? "" }, ...inline(values[column] ?? ""))));
  const table = make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...rows.map((values) => row("td", values))));
  return make("div", { className: "table", tabIndex: 0 }, table);
}

// ---- inline ----
const TOKEN = /\\[!-/:-@[-`{-~\n]|`+|!?\[|<https?:\/\/[^\s<>]+>|https?:\/\/[^\s<>]+|\*\*|__|~~|[*_]|\n/g;
const isSpace = (character) => character === undefined || /\s/.test(character);
const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

function inline(text) {
  return new Inline(text).range(0, text.length, 0);
}

class Inline {
  constructor(text) {
    this.text = text;
    this.spans = codeSpans(text);   // begin of each code span: its end, and the width of its marks
    this.brackets = closedBrackets(text, this.spans);
  }
  /// Nodes of a part of the text.
  range(from, to, depth) {
    const { text } = this;
    const nodes = [];
    const unclosed = new Set();     // marks that nothing closes from here on
    let done = from, at = from;
    const flush = (until) => { if (until > done) nodes.push(text.slice(done, until)); };
    const take = (end, ...made) => { flush(at); nodes.push(...made); done = at = end; };
    const token = new RegExp(TOKEN);
    for (;;) {
      token.lastIndex = at;
      const match = token.exec(text);
      if (!match || match.index >= to) break;
      at = match.index;
      const mark = match[0];
      if (mark === "\n") {
        const end = at + 1;
        at -= /[ \t]*$/.exec(text.slice(done, at))[0].length;
        take(end, make("br"));
      } else if (mark === "\\\n") take(at + 2, make("br"));
      else if (mark[0] === "\\") take(at + 2, mark[1]);
      else if (mark[0] === "`") {
        const span = this.spans.get(at);
        if (!span || span.end > to) at += mark.length;
        else take(span.end, make("code", {}, trimSpan(text.slice(at + span.width, span.end - span.width))));
      } else if (mark.endsWith("[")) {
        const link = depth < MOST_DEEP && this.link(at + mark.length, to);
        if (!link) at += mark.length;
        // Pictures would come from elsewhere: they are links to where they are.
        else take(link.end, anchor(link.url, this.range(at + mark.length, link.labelEnd, depth + 1)));
      } else if (mark[0] === "<") {
        const url = webAddress(mark.slice(1, -1));
        if (url) take(at + mark.length, anchor(url, [mark.slice(1, -1)])); else at += mark.length;
      } else if (mark[0] === "h") {
        const shown = trimAddress(mark.slice(0, to - at));
        const url = webAddress(shown);
        if (url && !isWord(text[at - 1])) take(at + shown.length, anchor(url, [shown])); else at += mark.length;
      } else {
        const close = depth < MOST_DEEP && !unclosed.has(mark) && this.opens(mark, at) ? this.closing(mark, at + mark.length, to) : -1;
        if (close < 0) { if (this.opens(mark, at)) unclosed.add(mark); at += mark.length; continue; }
        const tag = mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em";
        take(close + mark.length, make(tag, {}, ...this.range(at + mark.length, close, depth + 1)));
      }
    }
    flush(to);
    return nodes;
  }
  opens(mark, at) {
    return !isSpace(this.text[at + mark.length]) && (mark[0] !== "_" || !isWord(this.text[at - 1]));
  }
  /// Where `mark` is closed; -1: nowhere before `to`.
  closing(mark, from, to) {
    const { text } = this;
    let at = from;
    while (at < to) {
      if (text[at] === "\\") { at += 2; continue; }
      const span = this.spans.get(at);
      if (span) { at = span.end; continue; }
      if (text[at] !== mark[0]) { at += 1; continue; }
      let run = 1;
      while (at + run < to && text[at + run] === mark[0]) run += 1;
      const fits = mark.length === 2 ? run >= 2 : run % 2 === 1;
      const close = at + run - mark.length;
      if (fits && close > from && !isSpace(text[at - 1]) && (mark[0] !== "_" || !isWord(text[at + run]))) return close;
      at += run;
    }
    return -1;
  }
  /// `label](address)` from `from` on.
  link(from, to) {
    const { text } = this;
    const at = this.brackets.get(from - 1);
    if (at === undefined || at >= to || text[at + 1] !== "(") return null;
    const rest = /^\(\s*<?((?:[^\s()<>\\]|\\.|\([^\s()]*\))+)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(text.slice(at + 1, Math.min(to, at + 4000)));
    const url = rest && webAddress(rest[1]);
    return url ? { url, labelEnd: at, end: at + 1 + rest[0].length } : null;
  }
}

/// Code spans by where they begin: a run of backticks to the next run of as many.
function codeSpans(text) {
  const runs = [...text.matchAll(/\\`|`+/g)].filter((run) => run[0][0] === "`");
  const later = new Map();          // width: places of such runs, last first
  for (const run of runs.toReversed()) {
    if (!later.has(run[0].length)) later.set(run[0].length, []);
    later.get(run[0].length).push(run.index);
  }
  const spans = new Map();
  let end = 0;
  for (const { index, 0: { length: width } } of runs) {
    const places = later.get(width);
    while (places.length && places.at(-1) <= index) places.pop();
    if (index < end || !places.length) continue;
    end = places.at(-1) + width;
    spans.set(index, { end, width });
  }
  return spans;
}
/// Where each square bracket is closed.
function closedBrackets(text, spans) {
  const closed = new Map(), open = [];
  for (let at = 0; at < text.length; at++) {
    if (spans.has(at)) at = spans.get(at).end - 1;
    else if (text[at] === "\\") at += 1;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) closed.set(open.pop(), at);
  }
  return closed;
}
const trimSpan = (code) => (/^ .*[^ ].* $/s.test(code) ? code.slice(1, -1) : code).replaceAll("\n", " ");

/// A full stop after an address is the sentence's, and so is a bracket that it did not open.
function trimAddress(address) {
  for (;;) {
    const last = address.at(-1);
    const unopened = last === ")" && address.split(")").length > address.split("(").length;
    if (!unopened && !".,;:!?'\"*_~`]".includes(last)) return address;
    address = address.slice(0, -1);
  }
}
/// The address if it is one of the web: no scripts, no data, nothing of this server.
function webAddress(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try { return new URL(text).href; } catch { return null; }
}
function anchor(url, nodes) {
  const label = nodes.flatMap((node) => (node.tagName === "A" ? [...node.childNodes] : [node]));
  return make("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank", title: url }, ...label);
}
