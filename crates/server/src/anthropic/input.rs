//! Bodies of Anthropic's API, brought to the form that templates expect.

use serde_json::{Map, Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::known;
use crate::tools::{AskedChoice, Tool, ToolChoice, ToolSettings, check_distinct};

/// What a coding client puts in front of its instructions for billing. It differs with every request, so that no two
/// prompts would begin alike.
const VOLATILE_BLOCK: &str = "x-anthropic-billing-header:";
/// Fields of blocks that have no place in a prompt.
const IGNORED: &[&str] = &["cache_control", "citations", "caller"];

/// `system` and `messages`.
pub(super) fn take_messages(app: &App, fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        let parts: Vec<Value> = take_texts(app, "system", system)?
            .into_iter()
            .filter(|text| !text.trim_start().starts_with(VOLATILE_BLOCK))
            .map(text_part)
            .collect();
        if !parts.is_empty() {
            messages.push(json!({"role": "system", "content": parts}));
        }
    }
    let items = fields.list("messages")?.unwrap_or_default();
    if items.is_empty() {
        let message = "`messages` is missing: a list of at least one message";
        return Err(ApiError::field("messages", message));
    }
    for (index, item) in items.into_iter().enumerate() {
        take_message(app, &format!("messages[{index}]"), item, &mut messages)?;
    }
    Ok(messages)
}

fn take_message(app: &App, path: &str, item: Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let role = fields.string("role")?;
    let content_path = fields.path("content");
    let blocks = match fields.take("content") {
        Some(Value::String(text)) => vec![json!({"type": "text", "text": text})],
        Some(Value::Array(blocks)) => blocks,
        other => {
            let found = other.unwrap_or_default();
            return Err(ApiError::value(content_path, "a string or a list of content blocks", &found));
        }
    };
    settle(app, &fields)?;
    let blocks = blocks.into_iter().enumerate().map(|(at, block)| (format!("{content_path}[{at}]"), block));
    match role.as_deref() {
        Some("user") => take_user_blocks(app, blocks, messages),
        Some("assistant") => take_assistant_blocks(app, blocks, messages),
        // Not of the API's first days, but clients send it.
        Some("system") => {
            let texts = blocks.map(|(path, block)| take_text_block(app, &path, block));
            let parts: Vec<Value> = texts.map(|text| text.map(text_part)).collect::<Result<_, _>>()?;
            messages.push(json!({"role": "system", "content": parts}));
            Ok(())
        }
        found => {
            let found = found.map_or(Value::Null, Value::from);
            Err(ApiError::value(fields.path("role"), "one of user, assistant, system", &found))
        }
    }
}

/// Results of tools become messages of their own, in place.
fn take_user_blocks(
    app: &App,
    blocks: impl Iterator<Item = (String, Value)>,
    messages: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let before = messages.len();
    let mut texts: Vec<Value> = Vec::new();
    let user = |texts: &mut Vec<Value>| json!({"role": "user", "content": std::mem::take(texts)});
    for (path, block) in blocks {
        match block["type"].as_str() {
            Some("tool_result") => {
                if !texts.is_empty() {
                    messages.push(user(&mut texts));
                }
                messages.push(take_tool_result(app, &path, block)?);
            }
            Some("document") => texts.push(text_part(take_document(app, &path, block)?)),
            _ => texts.push(text_part(take_text_block(app, &path, block)?)),
        }
    }
    if !texts.is_empty() || messages.len() == before {
        messages.push(user(&mut texts));
    }
    Ok(())
}

fn take_tool_result(app: &App, path: &str, block: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::nested(path, block)?;
    fields.take("type");
    let id = needed(&mut fields, "tool_use_id")?;
    let content_path = fields.path("content");
    let mut texts = match fields.take("content") {
        None => Vec::new(),
        Some(content) => take_texts(app, &content_path, content)?,
    };
    if fields.boolean("is_error")?.unwrap_or(false) {
        // The template has no other way to say it.
        texts.insert(0, if texts.is_empty() { "Error".into() } else { "Error: ".into() });
    }
    settle(app, &fields)?;
    let parts: Vec<Value> = texts.into_iter().map(text_part).collect();
    Ok(json!({"role": "tool", "tool_call_id": id, "content": parts}))
}

fn take_document(app: &App, path: &str, block: Value) -> Result<String, ApiError> {
    let mut fields = Fields::nested(path, block)?;
    fields.take("type");
    let source_path = fields.path("source");
    let mut source = Fields::nested(&source_path, fields.take("source").unwrap_or_default())?;
    let kind = source.string("type")?.unwrap_or_default();
    if kind != "text" {
        let message = format!("`{source_path}.type` is {kind:?}, but this server is text only");
        return Err(ApiError::field(source.path("type"), message).with_code("unsupported_content"));
    }
    source.string("media_type")?;
    let text = needed(&mut source, "data")?;
    let title = fields.string("title")?;
    let context = fields.string("context")?;
    settle(app, &source)?;
    settle(app, &fields)?;
    let lines: Vec<String> = [title, context, Some(text)].into_iter().flatten().collect();
    Ok(lines.join("\n"))
}

fn take_assistant_blocks(
    app: &App,
    blocks: impl Iterator<Item = (String, Value)>,
    messages: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let mut reasoning = String::new();
    let mut texts: Vec<Value> = Vec::new();
    let mut calls: Vec<Value> = Vec::new();
    for (path, block) in blocks {
        match block["type"].as_str() {
            Some("thinking") => {
                let mut fields = Fields::nested(&path, block)?;
                fields.take("type");
                reasoning.push_str(&fields.string("thinking")?.unwrap_or_default());
                // It proves nothing here: thinking is believed.
                fields.string("signature")?;
                settle(app, &fields)?;
            }
            // Nobody but its maker can read it.
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(take_tool_use(app, &path, block)?),
            _ => texts.push(text_part(take_text_block(app, &path, block)?)),
        }
    }
    let mut message = Map::new();
    message.insert("role".into(), "assistant".into());
    message.insert("content".into(), texts.into());
    if !reasoning.is_empty() {
        message.insert("reasoning_content".into(), reasoning.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    messages.push(message.into());
    Ok(())
}

fn take_tool_use(app: &App, path: &str, block: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::nested(path, block)?;
    fields.take("type");
    let id = needed(&mut fields, "id")?;
    let name = needed(&mut fields, "name")?;
    let input = fields.object("input")?.unwrap_or_default();
    settle(app, &fields)?;
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}))
}

/// A string, or a list of blocks with text.
fn take_texts(app: &App, path: &str, value: Value) -> Result<Vec<String>, ApiError> {
    match value {
        Value::String(text) => Ok(vec![text]),
        Value::Array(blocks) => {
            let take = |(at, block)| take_text_block(app, &format!("{path}[{at}]"), block);
            blocks.into_iter().enumerate().map(take).collect()
        }
        other => Err(ApiError::value(path, "a string or a list of text blocks", &other)),
    }
}

fn take_text_block(app: &App, path: &str, block: Value) -> Result<String, ApiError> {
    let mut fields = Fields::nested(path, block)?;
    let kind = fields.string("type")?.unwrap_or_default();
    match kind.as_str() {
        "text" => {}
        "image" | "document" => {
            let message = format!("`{path}.type` is {kind:?}, but this server is text only");
            return Err(ApiError::field(fields.path("type"), message).with_code("unsupported_content"));
        }
        _ => {
            return Err(ApiError::value(
                fields.path("type"),
                "a block that has a place here, as \"text\"",
                &kind.into(),
            ));
        }
    }
    let text = needed(&mut fields, "text")?;
    settle(app, &fields)?;
    Ok(text)
}

fn text_part(text: String) -> Value {
    let mut part = json!({"type": "text"});
    part["text"] = text.into();
    part
}

/// A string that has to be there.
fn needed(fields: &mut Fields, name: &str) -> Result<String, ApiError> {
    fields.string(name)?.ok_or_else(|| ApiError::value(fields.path(name), "a string", &Value::Null))
}

/// Deals with what was not taken.
fn settle(app: &App, fields: &Fields) -> Result<(), ApiError> {
    for (name, value) in fields.rest() {
        if !IGNORED.contains(&name) && !value.is_null() {
            known::unknown(app, &known::without_positions(&fields.path(name)))?;
        }
    }
    Ok(())
}

/// `tools` and `tool_choice`.
pub(super) fn take_tools(app: &App, fields: &mut Fields) -> Result<ToolSettings, ApiError> {
    let mut tools = Vec::new();
    for (index, item) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        tools.extend(take_tool(app, &format!("tools[{index}]"), item)?);
    }
    check_distinct("tools", &tools)?;
    let (asked, parallel) = take_tool_choice(app, fields)?;
    ToolSettings::new(tools, asked, parallel, "tool_choice")
}

/// A tool of the client's own; `None` for one that only Anthropic's servers can carry out.
fn take_tool(app: &App, path: &str, item: Value) -> Result<Option<Tool>, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let kind = fields.string("type")?.unwrap_or_else(|| "custom".into());
    if kind != "custom" {
        known::ignored_tool(app, &kind);
        return Ok(None);
    }
    let mut function = Map::new();
    for (theirs, ours) in [
        ("name", "name"),
        ("description", "description"),
        ("input_schema", "parameters"),
        ("strict", "strict"),
    ] {
        function.extend(fields.take(theirs).map(|value| (ours.to_owned(), value)));
    }
    if let Some(schema) = function.get("parameters").filter(|schema| !schema.is_object()) {
        return Err(ApiError::value(fields.path("input_schema"), "an object", schema));
    }
    Tool::new(path, function.into()).map(Some)
}

fn take_tool_choice(app: &App, fields: &mut Fields) -> Result<(Option<AskedChoice>, bool), ApiError> {
    let Some(value) = fields.take("tool_choice") else { return Ok((None, true)) };
    let mut fields = Fields::nested("tool_choice", value)?;
    let kind = fields.string("type")?.unwrap_or_default();
    let choice = match kind.as_str() {
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "none" => ToolChoice::None,
        "tool" => ToolChoice::Named(needed(&mut fields, "name")?),
        _ => {
            let expected = "one of auto, any, tool, none";
            return Err(ApiError::value(fields.path("type"), expected, &kind.into()));
        }
    };
    let single = fields.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    settle(app, &fields)?;
    Ok((Some(AskedChoice { choice, among: None }), !single))
}

/// What `thinking` and `output_config` tell the template. Without either there is no thinking, as the API has it,
/// unless the server was started with a word on it.
pub(super) fn take_thinking(app: &App, fields: &mut Fields) -> Result<(), ApiError> {
    let by_server = app.options.chat_template_kwargs.contains_key("enable_thinking");
    match fields.take("thinking") {
        None if by_server => {}
        None => put_thinking(fields, "thinking", false),
        Some(value) => {
            let mut thinking = Fields::nested("thinking", value)?;
            let kind = thinking.string("type")?.unwrap_or_default();
            match kind.as_str() {
                "enabled" | "adaptive" => put_thinking(fields, "thinking.type", true),
                "disabled" => put_thinking(fields, "thinking.type", false),
                _ => {
                    let expected = "one of enabled, adaptive, disabled";
                    return Err(ApiError::value(thinking.path("type"), expected, &kind.into()));
                }
            }
            if let Some(budget) = thinking.take("budget_tokens") {
                fields.put("thinking_token_budget", "thinking.budget_tokens".into(), budget);
            }
            // Thinking is never summarised; a client that does not want to see it can leave it unread.
            thinking.string("display")?;
            settle(app, &thinking)?;
        }
    }
    if let Some(value) = fields.take("output_config") {
        let mut config = Fields::nested("output_config", value)?;
        if let Some(effort) = config.take("effort") {
            fields.put("reasoning_effort", "output_config.effort".into(), effort);
        }
        if let Some(format) = config.take("format") {
            fields.put("response_format", "output_config.format".into(), format);
        }
        settle(app, &config)?;
    }
    fields.rename("output_format", "response_format");
    Ok(())
}

/// A request that uses the template's own words means those.
fn put_thinking(fields: &mut Fields, path: &str, thinking: bool) {
    if !fields.has("enable_thinking") {
        fields.put("enable_thinking", path.to_owned(), thinking.into());
    }
}
