//! The conversation of a chat request, checked and brought to the form that templates expect.

use serde_json::{Map, Value, json};

use crate::app::App;
use crate::error::{ApiError, show};
use crate::fields::Fields;
use crate::known;

/// Message fields that clients send back and that have no place in a prompt.
const IGNORED: &[&str] = &["refusal", "annotations", "audio", "cache_control", "id", "status"];
/// Content part types that name what a text model cannot read.
const MEDIA_PARTS: &[&str] =
    &["image_url", "image", "input_image", "input_audio", "audio", "audio_url", "video", "video_url", "file"];

/// The messages of a request, for a template: `developer` is `system`, arguments of tool calls are objects,
/// thinking is in `reasoning_content`.
pub(crate) fn take_messages(app: &App, fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let Some(items) = fields.list("messages")? else {
        return Err(ApiError::field("messages", "`messages` is missing: a list of at least one message"));
    };
    if items.is_empty() {
        return Err(ApiError::value("messages", "a list of at least one message", &json!([])));
    }
    let check = |(index, item)| check_message(app, &format!("messages[{index}]"), item);
    items.into_iter().enumerate().map(check).collect()
}

fn check_message(app: &App, path: &str, item: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let roles = "one of system, developer, user, assistant, tool";
    let role = match fields.take("role") {
        Some(Value::String(role)) => role,
        Some(other) => return Err(ApiError::value(fields.path("role"), roles, &other)),
        None => {
            let message = format!("`{path}.role` is missing: {roles}");
            return Err(ApiError::field(fields.path("role"), message));
        }
    };
    let role = match role.as_str() {
        "developer" => "system",
        // The older name of a tool's answer.
        "function" => "tool",
        "system" | "user" | "assistant" | "tool" => role.as_str(),
        _ => return Err(ApiError::value(fields.path("role"), roles, &Value::String(role))),
    };
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    let tool_calls = if role == "assistant" { take_tool_calls(app, &mut fields)? } else { None };
    let content = take_content(app, &mut fields, tool_calls.is_some())?;
    message.insert("content".into(), content);
    if role == "assistant" {
        take_reasoning(&mut fields, &mut message)?;
    }
    message.extend(tool_calls.map(|calls| ("tool_calls".into(), calls)));
    for name in ["name", "tool_call_id"] {
        message.extend(fields.string(name)?.map(|text| (name.into(), Value::String(text))));
    }
    settle(app, &fields)?;
    Ok(Value::Object(message))
}

/// Deals with what was not taken; values that ask for nothing are no concern.
fn settle(app: &App, fields: &Fields) -> Result<(), ApiError> {
    let is_empty = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    for (name, value) in fields.rest() {
        if !IGNORED.contains(&name) && !is_empty(value) {
            known::unknown(app, &known::without_positions(&fields.path(name)))?;
        }
    }
    Ok(())
}

fn take_content(app: &App, fields: &mut Fields, may_be_absent: bool) -> Result<Value, ApiError> {
    let path = fields.path("content");
    match fields.take("content") {
        Some(Value::String(text)) => Ok(Value::String(text)),
        Some(Value::Array(parts)) => {
            let check = |(index, part)| check_part(app, &format!("{path}[{index}]"), part);
            Ok(Value::Array(parts.into_iter().enumerate().map(check).collect::<Result<_, _>>()?))
        }
        Some(other) => Err(ApiError::value(path, "a string or a list of text parts", &other)),
        None if may_be_absent => Ok(Value::String(String::new())),
        None => {
            let message =
                format!("`{path}` is missing: a string or a list of text parts (only tool calls go without)");
            Err(ApiError::field(path, message))
        }
    }
}

fn check_part(app: &App, path: &str, part: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::nested(path, part)?;
    let kind = fields.string("type")?;
    match kind.as_deref() {
        Some("text") => {}
        Some(media) if MEDIA_PARTS.contains(&media) => {
            let message = format!("`{path}.type` is {media:?}, but this server is text only");
            return Err(ApiError::field(fields.path("type"), message).with_code("unsupported_content"));
        }
        found => {
            let found = found.map_or(Value::Null, Value::from);
            return Err(ApiError::value(fields.path("type"), "\"text\"", &found));
        }
    }
    let Some(text) = fields.string("text")? else {
        return Err(ApiError::value(fields.path("text"), "a string", &Value::Null));
    };
    settle(app, &fields)?;
    Ok(json!({"type": "text", "text": text}))
}

/// Thinking of an earlier turn, under either name.
fn take_reasoning(fields: &mut Fields, message: &mut Map<String, Value>) -> Result<(), ApiError> {
    let long_name = fields.string("reasoning_content")?;
    let short_name = fields.string("reasoning")?;
    message.extend(long_name.or(short_name).map(|text| ("reasoning_content".into(), Value::String(text))));
    Ok(())
}

fn take_tool_calls(app: &App, fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let old = fields.take("function_call");
    let Some(calls) = fields.list("tool_calls")?.filter(|calls| !calls.is_empty()) else {
        let call =
            old.map(|function| check_function(app, &fields.path("function_call"), function)).transpose()?;
        return Ok(call.map(|function| json!([{"type": "function", "function": function}])));
    };
    let path = fields.path("tool_calls");
    let check = |(index, call)| check_tool_call(app, &format!("{path}[{index}]"), call);
    Ok(Some(Value::Array(calls.into_iter().enumerate().map(check).collect::<Result<_, _>>()?)))
}

fn check_tool_call(app: &App, path: &str, call: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::nested(path, call)?;
    let kind = fields.string("type")?.unwrap_or_else(|| "function".into());
    if kind != "function" {
        return Err(ApiError::value(fields.path("type"), "\"function\"", &kind.into()));
    }
    let function_path = fields.path("function");
    let function = fields.take("function").unwrap_or_default();
    let function = check_function(app, &function_path, function)?;
    let id = fields.string("id")?;
    // The position of a call in the list is all that an index could say.
    fields.take("index");
    settle(app, &fields)?;
    let mut call = Map::new();
    call.extend(id.map(|id| ("id".into(), Value::String(id))));
    call.insert("type".into(), "function".into());
    call.insert("function".into(), function);
    Ok(Value::Object(call))
}

fn check_function(app: &App, path: &str, function: Value) -> Result<Value, ApiError> {
    let mut function = Fields::nested(path, function)?;
    let Some(name) = function.string("name")?.filter(|name| !name.is_empty()) else {
        return Err(ApiError::value(function.path("name"), "a string that is not empty", &Value::Null));
    };
    let arguments_path = function.path("arguments");
    let arguments = parse_arguments(arguments_path, function.take("arguments"))?;
    settle(app, &function)?;
    Ok(json!({"name": name, "arguments": arguments}))
}

/// Arguments come as a string of JSON; templates want the object, keys in the client's order.
pub(crate) fn parse_arguments(path: String, arguments: Option<Value>) -> Result<Value, ApiError> {
    let parsed = match arguments {
        None => return Ok(json!({})),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(json!({})),
        Some(Value::String(text)) => serde_json::from_str(&text).map_err(|error| {
            let rule = format!("`{path}` must be a string of JSON");
            let message = format!("{rule}, got {}: {error}", show(&Value::String(text)));
            ApiError::field(path.clone(), message).with_code("invalid_value").logged_as(rule)
        })?,
        Some(other) => other,
    };
    if parsed.is_object() { Ok(parsed) } else { Err(ApiError::value(path, "a JSON object", &parsed)) }
}

/// Puts all system messages into one at the start, for templates that allow no other place.
pub(crate) fn gather_system(messages: &[Value]) -> Vec<Value> {
    let is_system = |message: &&Value| message["role"] == "system";
    let texts: Vec<String> =
        messages.iter().filter(is_system).map(|message| plain_text(&message["content"])).collect();
    let first = json!({"role": "system", "content": texts.join("\n\n")});
    let others = messages.iter().filter(|message| !is_system(message)).cloned();
    std::iter::once(first).chain(others).collect()
}

/// Whether a system message stands anywhere but first.
pub(crate) fn has_late_system(messages: &[Value]) -> bool {
    messages.iter().skip(1).any(|message| message["role"] == "system")
}

fn plain_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_become_objects_in_their_order() {
        let parse = |arguments: Value| parse_arguments("p".into(), Some(arguments));
        assert_eq!(parse(json!("{\"b\":1,\"a\":2}")).unwrap().to_string(), r#"{"b":1,"a":2}"#);
        assert_eq!(parse(json!(" ")).unwrap(), json!({}));
        assert_eq!(parse(json!({"x": 1})).unwrap(), json!({"x": 1}));
        assert!(parse(json!("{\"a\": ")).unwrap_err().message.contains("string of JSON"));
        assert!(parse(json!("[1]")).unwrap_err().message.contains("JSON object, got [1]"));
    }

    #[test]
    fn system_messages_are_gathered() {
        let messages = [
            json!({"role": "user", "content": "u"}),
            json!({"role": "system", "content": "one"}),
            json!({"role": "system", "content": [{"type": "text", "text": "two"}]}),
        ];
        assert!(has_late_system(&messages));
        let gathered = gather_system(&messages);
        assert_eq!(gathered[0], json!({"role": "system", "content": "one\n\ntwo"}));
        assert_eq!(gathered[1], messages[0]);
        assert!(!has_late_system(&gathered));
    }
}
