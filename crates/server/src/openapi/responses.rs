//! The Responses API: `/v1/responses` and what was kept of earlier responses.

use serde_json::{Value, json};

use super::schema::{
    Field, always, any_number, any_object, any_of, anything, boolean, count, field, list, needed, nullable,
    object, one_of, reference, some_text, sometimes, text, whole,
};

/// Schemas with names.
pub(super) fn components() -> Vec<(&'static str, Value)> {
    vec![
        ("InputItem", input_item()),
        ("InputText", any_of([text(), list(input_part())])),
        ("ResponseTool", response_tool()),
        ("Response", response()),
        ("ResponseEvent", event()),
        ("OutputItem", output_item()),
        ("ResponseUsage", usage()),
        ("RemovedResponse", removed()),
        ("InputItems", input_items()),
    ]
}

/// Fields of a request for a response alone.
pub(super) fn fields() -> Vec<Field> {
    let reasoning = object([
        field("effort", text(), "low", "As `reasoning_effort`"),
        field(
            "summary",
            one_of(["none", "auto", "concise", "detailed"]),
            "auto",
            "Show thinking as a summary",
        ),
        field("generate_summary", one_of(["none", "auto", "concise", "detailed"]), "auto", "The older name"),
    ]);
    let shape = object([
        field("format", any_object(), json!({"type": "text"}), "The form of the answer"),
        field("verbosity", anything(), "low", "Has no effect"),
    ]);
    vec![
        needed(
            "input",
            any_of([text(), list(reference("InputItem"))]),
            input_example(),
            "A text, or the items so far",
        ),
        field("instructions", text(), "Be brief.", "A system message before all others"),
        field("previous_response_id", text(), Value::Null, "Goes on behind a response that was kept"),
        field("max_output_tokens", count(0), 5, "Most tokens to generate"),
        field("tools", list(reference("ResponseTool")), tools_example(), "What the model may call"),
        field("tool_choice", anything(), "auto", "Whether it may or must call them"),
        field("parallel_tool_calls", boolean(), true, "Whether one answer may have several calls"),
        field(
            "reasoning",
            reasoning,
            json!({"effort": "low", "summary": "auto"}),
            "How to think, and to show it",
        ),
        field(
            "text",
            shape,
            json!({"format": {"type": "text"}, "verbosity": "low"}),
            "The form of the answer",
        ),
        field("include", list(text()), json!(["message.output_text.logprobs"]), "What else to tell"),
        field(
            "store",
            boolean(),
            false,
            "Keep the response, so that others can go on with it; true if left out",
        ),
        field("truncation", one_of(["auto", "disabled"]), "disabled", "Has no effect: nothing is cut"),
        field(
            "top_logprobs",
            whole(0, 20),
            1,
            "With log-probabilities: of so many likely tokens at each place",
        ),
    ]
}

fn input_example() -> Value {
    json!([
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "The weather?"}], "id": "m1",
         "status": "completed"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": []},
        {"type": "function_call", "call_id": "c1", "name": "read", "namespace": "files", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"role": "user", "content": "Thanks."},
    ])
}

fn tools_example() -> Value {
    json!([
        {"type": "function", "name": "weather", "description": "Tells the weather", "strict": false,
         "parameters": {"type": "object"}},
        {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]},
        {"type": "web_search"},
    ])
}

fn input_part() -> Value {
    object([
        needed("type", text(), "input_text", "`input_text`, `output_text` and others that have text"),
        field("text", text(), "Hello", ""),
        field("refusal", text(), "No.", ""),
    ])
}

fn input_item() -> Value {
    let texts = || reference("InputText");
    object([
        field("type", text(), "message", "`message` if left out; `reasoning`, `function_call` and others"),
        field("id", text(), "m1", "Has no effect"),
        field("status", text(), "completed", "Has no effect"),
        field("role", one_of(["user", "assistant", "system", "developer"]), "user", "Of a message"),
        field("content", texts(), "Hello", "Of a message, or of thinking"),
        field("summary", texts(), "Hm.", "Of thinking"),
        field("call_id", text(), "c1", "Of a call and its output"),
        field("name", text(), "weather", "Of a call"),
        field("namespace", text(), "files", "Of a call"),
        field("arguments", any_of([text(), any_object()]), "{}", "Of a call, JSON of an object"),
        field("input", text(), "x", "Of a custom call"),
        field("output", texts(), "rain", "Of a call's output"),
    ])
}

fn response_tool() -> Value {
    object([
        needed("type", text(), "function", "`function` or `namespace`; others are left out of the prompt"),
        field("name", some_text(), "weather", ""),
        field("description", text(), "Tells the weather", ""),
        field("parameters", any_object(), json!({"type": "object"}), "JSON Schema of its arguments"),
        field("strict", boolean(), false, "Whether arguments must meet the schema"),
        field("tools", list(any_object()), json!([]), "Of a namespace"),
    ])
}

fn status() -> Value {
    one_of(["in_progress", "completed", "incomplete", "failed"])
}

fn response() -> Value {
    let incomplete = object([always("reason", text(), "")]);
    let error = object([always("code", text(), ""), always("message", text(), "")]);
    let head = [
        always("id", text(), ""),
        always("object", one_of(["response"]), ""),
        always("created_at", count(0), "Seconds since 1970"),
        always("completed_at", nullable(count(0)), "Seconds since 1970"),
        always("status", status(), ""),
        always("error", nullable(error), ""),
        always("incomplete_details", nullable(incomplete), ""),
        always("model", text(), ""),
        always("output", list(reference("OutputItem")), ""),
        always("usage", nullable(reference("ResponseUsage")), ""),
    ];
    let numbers = ["temperature", "top_p", "presence_penalty", "frequency_penalty"];
    let repeated = [
        "background",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt_cache_key",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
        "user",
    ];
    let numbers = numbers.map(|name| always(name, any_number(), "What was used"));
    let repeated = repeated.map(|name| always(name, anything(), "What the request said"));
    object(head.into_iter().chain(numbers).chain(repeated))
}

fn output_item() -> Value {
    object([
        always("type", one_of(["message", "reasoning", "function_call"]), ""),
        always("id", text(), ""),
        sometimes("status", status(), ""),
        sometimes("role", one_of(["assistant"]), "Of a message"),
        sometimes("phase", anything(), "Of a message"),
        sometimes("content", list(any_object()), "Of a message, or of thinking"),
        sometimes("summary", list(any_object()), "Of thinking"),
        sometimes("encrypted_content", anything(), "Of thinking"),
        sometimes("call_id", text(), "Of a call"),
        sometimes("name", text(), "Of a call"),
        sometimes("namespace", text(), "Of a call"),
        sometimes("arguments", text(), "Of a call, JSON"),
    ])
}

fn usage() -> Value {
    object([
        always("input_tokens", count(0), ""),
        always(
            "input_tokens_details",
            object([always("cached_tokens", count(0), ""), always("cache_write_tokens", count(0), "")]),
            "",
        ),
        always("output_tokens", count(0), ""),
        always("output_tokens_details", object([always("reasoning_tokens", count(0), "")]), ""),
        always("total_tokens", count(0), ""),
    ])
}

fn event() -> Value {
    object([
        always("type", text(), "As `response.output_text.delta`"),
        always("sequence_number", count(0), ""),
        sometimes("response", reference("Response"), "Of `response.created` and others"),
        sometimes("item", reference("OutputItem"), "Of `response.output_item.added` and others"),
        sometimes("output_index", count(0), "Which item"),
        sometimes("item_id", text(), "Which item"),
        sometimes("content_index", count(0), "Which part of it"),
        sometimes("summary_index", count(0), "Which part of it"),
        sometimes("part", any_object(), "Of `response.content_part.added` and others"),
        sometimes("delta", text(), "What is new"),
        sometimes("text", text(), "All of it, at its end"),
        sometimes("arguments", text(), "All of them, at their end"),
        sometimes("name", text(), "Of a call, at its end"),
        sometimes("logprobs", list(any_object()), "Of the text"),
    ])
}

fn removed() -> Value {
    object([always("id", text(), ""), always("object", text(), ""), always("deleted", boolean(), "")])
}

fn input_items() -> Value {
    object([
        always("object", one_of(["list"]), ""),
        always("data", list(any_object()), "The last one first"),
        always("first_id", nullable(text()), ""),
        always("last_id", nullable(text()), ""),
        always("has_more", boolean(), ""),
    ])
}
