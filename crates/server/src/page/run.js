// One answer in the making: the request, its events, and what they add to a turn.
import { Problem, request, unreachable } from "./common.js";

/** Yields the data of each server-sent event; comments (keep-alives) are skipped. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = /\r?\n\r?\n/.exec(rest)) !== null) {
      const lines = rest.slice(0, end.index).split(/\r?\n/);
      rest = rest.slice(end.index + end[0].length);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

/** Streams an answer into a turn. `changed` is called whenever the turn has more to show. */
export class Run {
  constructor(node, changed) {
    this.node = node;
    this.changed = changed;
    this.controller = new AbortController();
    this.started = performance.now();
    this.pieces = 0;
  }
  stop() { this.controller.abort(); }
  /** Milliseconds of thinking so far. */
  thought() { return (this.answeredAt ?? performance.now()) - (this.firstAt ?? performance.now()); }
  /** Tokens a second after the first. */
  rate(tokens = this.pieces) {
    const elapsed = (this.lastAt - this.firstAt) / 1000;
    return tokens > 1 && elapsed > 0 ? (tokens - 1) / elapsed : undefined;
  }
  /** Runs to the end, whatever it is; the turn says which. Returns the Problem, if that was it. */
  async go(body) {
    const { node } = this;
    let problem;
    delete node.problem;
    delete node.finish;
    try {
      const response = await request("v1/chat/completions", { method: "POST", body, signal: this.controller.signal });
      await this.read(response.body);
    } catch (error) {
      if (error.name === "AbortError") node.finish = "stopped";
      else {
        // A connection that breaks in the middle of an answer is a TypeError, or something of the decoder's.
        problem = error instanceof Problem ? error : unreachable();
        node.problem = problem.message;
      }
    }
    this.note();
    return problem;
  }
  async read(stream) {
    for await (const data of events(stream)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Problem(chunk.error.message, { advice: "Try again; the server's log says more." });
      this.usage = chunk.usage ?? this.usage;
      if (chunk.prompt_progress) { this.progress = chunk.prompt_progress; this.changed(); }
      this.timings = chunk.timings ?? this.timings;
      const choice = chunk.choices?.[0];
      if (choice?.delta) this.add(choice.delta);
      if (choice?.finish_reason) this.node.finish = choice.finish_reason;
    }
    throw new Problem("The connection ended before the answer did.", { advice: "Try again." });
  }
  add(delta) {
    const { node } = this;
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const content = delta.content ?? "";
    const calls = delta.tool_calls ?? [];
    if (!reasoning && !content && !calls.length) return;
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.pieces += 1;
    if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
    if (content || calls.length) this.answeredAt ??= this.lastAt;
    node.content += content;
    for (const part of calls) {
      node.calls ??= [];
      const call = (node.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name ||= part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    this.changed();
  }
  /// What is told below the answer. An answer that was continued has all its tokens, and the speed of its last part.
  note() {
    const { node, usage, timings } = this;
    const before = node.stats ?? {};
    const details = usage?.completion_tokens_details;
    const tokens = usage?.completion_tokens ?? this.pieces;
    const stats = {
      tokens: tokens + (before.tokens ?? 0),
      tokensPerS: this.rate(tokens),
      firstMs: before.firstMs ?? (this.firstAt && this.firstAt - this.started),
      promptTokens: usage?.prompt_tokens,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens,
      thoughtMs: node.reasoning ? (before.thoughtMs ?? 0) + this.thought() : undefined,
      reasoningTokens: details && details.reasoning_tokens + (before.reasoningTokens ?? 0),
      draftTokens: timings?.draft_n,
      acceptedTokens: timings?.draft_n_accepted,
    };
    node.stats = Object.fromEntries(Object.entries(stats).filter(([, value]) => Number.isFinite(value)));
  }
}
