// Turns on the screen. What a turn says is in its data; a view draws it, again and again while it grows.
import { button, copyButton, count, make, plural, seconds } from "./common.js";
import { MarkdownView } from "./markdown.js";

/** A view of a turn. `actions` is what can be done with it: see chat.js. */
export function viewOf(node, at, actions) {
  if (node.role === "user") return new Question(node, at, actions);
  if (node.role === "tool") return new Results(node, at, actions);
  return new Answer(node, at, actions);
}

/// Steps through the branches at a turn.
function branches(at, actions) {
  const variants = actions.variants(at);
  if (variants.length < 2) return [];
  const place = variants.indexOf(at);
  const step = (by, label, symbol) => button(symbol, () => actions.show(variants[place + by]), {
    className: "small", disabled: !(place + by in variants), ariaLabel: label,
  });
  return [make("span", { className: "branches" },
    step(-1, "The version before", "‹"), make("span", {}, (place + 1) + "/" + variants.length), step(1, "The next version", "›"))];
}

class Question {
  constructor(node, at, actions) {
    Object.assign(this, { node, at, actions });
    this.root = make("article", { className: "turn user", ariaLabel: "Question" });
    this.draw();
  }
  draw() {
    const { node, at, actions } = this;
    this.body = make("div", { className: "body" }, node.content);
    this.meta = make("div", { className: "meta" }, ...branches(at, actions),
      button("Edit", () => this.edit(), { className: "small edit" }), copyButton(() => node.content));
    this.root.replaceChildren(this.body, this.meta);
  }
  /** Puts a field in the question's place. */
  edit() {
    const { node, at, actions } = this;
    if (actions.isRunning()) return;
    const field = make("textarea", { className: "body", value: node.content, ariaLabel: "Change the question" });
    const back = () => { this.draw(); actions.focus(); };
    const send = () => { if (field.value.trim()) actions.askInstead(at, field.value); };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); back(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.root.replaceChildren(field, make("div", { className: "meta" },
      button("Send as a new branch", send, { className: "small" }), button("Cancel", back, { className: "small" })));
    field.style.height = field.scrollHeight + 4 + "px";
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

class Results {
  constructor(node, at, actions) {
    this.root = make("article", { className: "turn tool", ariaLabel: "Results of tools" });
    for (const { name, content } of node.results) {
      this.root.append(make("div", { className: "call" }, make("div", { className: "call-head" }, "Result of ", make("b", {}, name)), make("pre", { tabIndex: 0 }, content)));
    }
    this.root.append(make("div", { className: "meta" }, ...branches(at, actions)));
  }
}

class Answer {
  constructor(node, at, actions) {
    Object.assign(this, { node, at, actions });
    this.thinkingLabel = make("summary");
    this.thinkingText = make("div", { className: "prose" });
    this.thinking = make("details", { className: "thinking", hidden: true }, this.thinkingLabel, this.thinkingText);
    this.body = make("div", { className: "body" });
    this.markdown = new MarkdownView(this.body);
    this.calls = make("div", { className: "calls" });
    this.problem = make("div", { className: "problem", role: "alert", hidden: true });
    this.meta = make("div", { className: "meta" });
    this.root = make("article", { className: "turn assistant", ariaLabel: "Answer" }, this.thinking, this.body, this.calls, this.problem, this.meta);
    this.drawnReasoning = 0;
    if (actions.runOf(node)) this.grow(); else this.finish();
  }
  /** Many pieces may come within one frame: it is drawn once. */
  schedule() {
    this.frame ??= requestAnimationFrame(() => { this.frame = undefined; this.actions.keepBottom(() => this.grow()); });
  }
  grow() {
    const run = this.actions.runOf(this.node);
    if (!run) return;
    this.root.classList.add("growing");
    this.drawText(false);
    this.thinkingLabel.textContent = run.answeredAt ? this.thought(run.thought()) : "Thinking … " + seconds(run.thought());
    this.drawCalls(true);
    this.meta.replaceChildren(make("span", { className: "numbers" }, this.pace(run)));
  }
  /// How far it is, while it runs.
  pace(run) {
    const rate = run.rate();
    if (run.firstAt) return rate ? rate.toFixed(1) + " tokens/s" : "";
    const { processed, total } = run.progress ?? {};
    return processed < total ? "reading the prompt: " + count(processed) + " of " + plural(total, "token") + " …" : "waiting for the first token …";
  }
  /** Nothing more comes. */
  finish(advice = "") {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = undefined;
    const { node, at, actions } = this;
    this.root.classList.remove("growing");
    this.drawText(true);
    const { thoughtMs, reasoningTokens } = node.stats ?? {};
    this.thinkingLabel.textContent = this.thought(thoughtMs, reasoningTokens);
    this.drawCalls(false);
    this.problem.hidden = !node.problem;
    this.problem.replaceChildren(...(node.problem ? [make("p", {}, node.problem), ...(advice ? [make("p", {}, advice)] : [])] : []));
    const cut = (node.finish === "length" || node.finish === "stopped") && (node.content || node.reasoning) && !node.calls?.length;
    this.meta.replaceChildren(make("span", { className: "numbers" }, this.numbers()), ...branches(at, actions),
      ...(node.content ? [copyButton(() => node.content)] : []),
      button(node.problem ? "Try again" : "Another answer", () => actions.again(at), { className: "small again" }),
      ...(cut && actions.isLast(at) ? [button("Continue", () => actions.goOn(at), { className: "small go-on" })] : []));
  }
  drawText(whole) {
    const { node } = this;
    const reasoning = node.reasoning ?? "";
    this.thinking.hidden = !reasoning;
    // Text that is there stays there, so that it can be read and marked while more comes.
    this.thinkingText.append(reasoning.slice(this.drawnReasoning));
    this.drawnReasoning = reasoning.length;
    this.markdown.update(node.content, whole);
  }
  thought(milliseconds, tokens) {
    const { node } = this;
    const parts = ["Thought" + (milliseconds === undefined ? "" : " for " + seconds(milliseconds))];
    if (tokens) parts.push(plural(tokens, "token"));
    if (!this.actions.runOf(node) && !node.content && !node.calls?.length) parts.push("no answer");
    return parts.join(" · ");
  }
  numbers() {
    const { stats = {}, finish } = this.node;
    const parts = [];
    if (stats.tokens) parts.push(plural(stats.tokens, "token"));
    if (stats.tokensPerS) parts.push(stats.tokensPerS.toFixed(1) + " tokens/s");
    if (stats.firstMs !== undefined) parts.push("first after " + seconds(stats.firstMs));
    if (stats.promptTokens) parts.push(plural(stats.promptTokens, "prompt token") + (stats.cachedTokens ? ", " + count(stats.cachedTokens) + " cached" : ""));
    if (stats.draftTokens) parts.push(Math.round(100 * (stats.acceptedTokens ?? 0) / stats.draftTokens) + "% of drafts accepted");
    if (finish === "length") parts.push("cut off: no more tokens allowed");
    if (finish === "stopped") parts.push("stopped");
    return parts.join(" · ");
  }
  drawCalls(growing) {
    const { node, at, actions } = this;
    const calls = (node.calls ?? []).filter(Boolean);
    const boxes = [];
    this.calls.replaceChildren(...calls.map((call) => {
      const box = make("div", { className: "call" },
        make("div", { className: "call-head" }, "Calls ", make("b", {}, call.name || "…")),
        make("pre", { tabIndex: 0 }, growing ? call.arguments : pretty(call.arguments)));
      if (!growing && actions.isLast(at)) {
        const field = make("textarea", { className: "result mono", rows: 2, placeholder: "What it returns", ariaLabel: "Result of " + call.name });
        boxes.push({ call, field });
        box.append(field);
      }
      return box;
    }));
    if (!boxes.length) return;
    const send = () => actions.sendResults(at, boxes.map(({ call, field }) => ({ id: call.id, name: call.name, content: field.value })));
    for (const { field } of boxes) {
      field.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      });
    }
    this.calls.append(button(boxes.length === 1 ? "Send the result" : "Send the results", send, { className: "send-results" }));
  }
}
function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}
