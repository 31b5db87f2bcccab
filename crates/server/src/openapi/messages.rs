//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

use serde_json::{Value, json};

use super::schema::{
    Field, always, any_object, any_of, anything, boolean, count, field, list, needed, nullable, object,
    one_of, reference, some, some_text, sometimes, text,
};

/// Schemas with names.
pub(super) fn components() -> Vec<(&'static str, Value)> {
    vec![
        ("ClaudeMessage", message()),
        ("ClaudeBlock", block()),
        ("ClaudeTool", tool()),
        ("ClaudeAnswer", answer()),
        ("ClaudeEvent", event()),
        ("ClaudeError", error()),
        ("ClaudeTokens", object([always("input_tokens", count(0), "")])),
    ]
}

/// Fields of a message alone.
pub(super) fn fields() -> Vec<Field> {
    let example = json!([
        {"role": "user", "content": [{"type": "text", "text": "The weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "rain", "is_error": false},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}, "title": "t",
             "context": "c"}]},
    ]);
    let tools = json!([{"name": "weather", "description": "Tells the weather", "input_schema": {"type": "object"},
        "strict": false, "type": "custom"}]);
    let choice = object([
        needed("type", one_of(["auto", "any", "tool", "none"]), "auto", ""),
        field("name", text(), "weather", "Of `tool`"),
        field("disable_parallel_tool_use", boolean(), false, ""),
    ]);
    vec![
        needed("messages", some(reference("ClaudeMessage")), example, "The conversation so far"),
        field("system", any_of([text(), list(any_object())]), "Be brief.", "What comes before it"),
        field("stop_sequences", list(some_text()), json!(["END"]), "Texts that end the answer"),
        field("tools", list(reference("ClaudeTool")), tools, "What the model may call"),
        field("tool_choice", choice, json!({"type": "auto"}), "Whether it may or must call them"),
        field("thinking", any_object(), json!({"type": "disabled"}), "Whether and how long to think"),
        field(
            "output_config",
            any_object(),
            json!({"effort": "low"}),
            "How much to think; the form of the answer",
        ),
        field("output_format", any_object(), Value::Null, "The form of the answer"),
    ]
}

fn message() -> Value {
    object([
        needed("role", one_of(["user", "assistant", "system"]), "user", "Who speaks"),
        needed("content", any_of([text(), list(reference("ClaudeBlock"))]), "Hello", ""),
    ])
}

fn block() -> Value {
    let source = object([
        needed("type", one_of(["text"]), "text", ""),
        field("media_type", text(), "text/plain", ""),
        needed("data", text(), "x", ""),
    ]);
    object([
        needed("type", text(), "text", "`text`, `thinking`, `tool_use`, `tool_result` or `document`"),
        field("text", text(), "Hello", ""),
        field("thinking", text(), "Hm.", ""),
        field("signature", text(), "", "Has no effect"),
        field("id", text(), "t1", "Of a call"),
        field("name", text(), "weather", "Of a call"),
        field("input", any_object(), json!({}), "Of a call"),
        field("tool_use_id", text(), "t1", "Of a result"),
        field("content", anything(), "rain", "Of a result: a text or blocks"),
        field("is_error", boolean(), false, "Of a result"),
        field("source", source, json!({"type": "text", "data": "x"}), "Of a document"),
        field("title", text(), "t", "Of a document"),
        field("context", text(), "c", "Of a document"),
    ])
}

fn tool() -> Value {
    object([
        field("type", text(), "custom", "Others than `custom` are left out of the prompt"),
        needed("name", some_text(), "weather", ""),
        field("description", text(), "Tells the weather", ""),
        field("input_schema", any_object(), json!({"type": "object"}), "JSON Schema of its input"),
        field("strict", boolean(), false, "Whether input must meet the schema"),
    ])
}

fn answer() -> Value {
    let reasons = ["end_turn", "max_tokens", "stop_sequence", "tool_use"].map(Value::from);
    object([
        always("id", text(), ""),
        always("type", one_of(["message"]), ""),
        always("role", one_of(["assistant"]), ""),
        always("model", text(), ""),
        always("content", list(answer_block()), ""),
        always("stop_reason", one_of(reasons.into_iter().chain([Value::Null])), "Why the answer ended"),
        always("stop_sequence", nullable(text()), "Which of them it was"),
        always("usage", usage(), ""),
    ])
}

fn answer_block() -> Value {
    object([
        always("type", one_of(["text", "thinking", "tool_use"]), ""),
        sometimes("text", text(), ""),
        sometimes("thinking", text(), ""),
        sometimes("signature", text(), ""),
        sometimes("id", text(), "Of a call"),
        sometimes("name", text(), "Of a call"),
        sometimes("input", any_object(), "Of a call"),
    ])
}

fn usage() -> Value {
    object(
        ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"]
            .map(|name| always(name, count(0), "")),
    )
}

fn event() -> Value {
    object([
        always("type", text(), "As the event's name"),
        sometimes("message", reference("ClaudeAnswer"), "Of `message_start`"),
        sometimes("index", count(0), "Of blocks"),
        sometimes("content_block", any_object(), "Of `content_block_start`"),
        sometimes("delta", any_object(), "What is new"),
        sometimes("usage", any_object(), "Of `message_delta`"),
        sometimes("error", any_object(), "Of `error`"),
    ])
}

fn error() -> Value {
    let detail = object([always("type", text(), ""), always("message", text(), "")]);
    object([
        always("type", one_of(["error"]), ""),
        always("error", detail, ""),
        sometimes("request_id", text(), ""),
    ])
}
