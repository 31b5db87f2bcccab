//! The items of a response's input, brought to the form that templates expect.

use serde_json::{Map, Value, json};

use super::tools::Namespaces;
use crate::app::App;
use crate::error::{ApiError, show};
use crate::fields::Fields;
use crate::known;
use crate::messages::parse_arguments;

/// Types of content parts that are text.
const TEXT_PARTS: &[&str] =
    &["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"];
const MEDIA_PARTS: &[&str] = &["input_image", "input_file", "input_audio", "image", "file"];

/// Messages out of items. What the assistant thought, said and called in a row is one message of its own.
pub(super) struct Items<'a> {
    app: &'a App,
    namespaces: &'a Namespaces,
    messages: Vec<Value>,
    /// The assistant's message that is being put together.
    open: Option<Assistant>,
}

#[derive(Default)]
struct Assistant {
    reasoning: String,
    texts: Vec<Value>,
    calls: Vec<Value>,
}

impl Assistant {
    fn into_message(self) -> Value {
        assistant_message(self.reasoning, self.texts.into(), self.calls)
    }
}

/// A message of the assistant's, as templates expect it.
pub(super) fn assistant_message(reasoning: String, content: Value, calls: Vec<Value>) -> Value {
    let mut message = Map::new();
    message.insert("role".into(), "assistant".into());
    message.insert("content".into(), content);
    if !reasoning.is_empty() {
        message.insert("reasoning_content".into(), reasoning.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    message.into()
}

/// A call in such a message.
pub(super) fn call(id: &str, name: &str, arguments: Value) -> Value {
    let mut call = json!({"id": id, "type": "function", "function": {"name": name}});
    call["function"]["arguments"] = arguments;
    call
}

impl<'a> Items<'a> {
    pub(super) fn new(app: &'a App, namespaces: &'a Namespaces) -> Self {
        Self { app, namespaces, messages: Vec::new(), open: None }
    }

    /// `input`: a string, or a list of items.
    pub(super) fn take_input(&mut self, input: Value) -> Result<(), ApiError> {
        match input {
            Value::String(text) => self.messages.push(json!({"role": "user", "content": text})),
            Value::Array(items) => {
                for (index, item) in items.into_iter().enumerate() {
                    self.take(&format!("input[{index}]"), item)?;
                }
            }
            other => return Err(ApiError::value("input", "a string or a list of items", &other)),
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Vec<Value> {
        self.close();
        self.messages
    }

    fn take(&mut self, path: &str, item: Value) -> Result<(), ApiError> {
        let mut fields = Fields::nested(path, item)?;
        let kind = fields.string("type")?.unwrap_or_else(|| "message".into());
        fields.string("id")?;
        fields.string("status")?;
        match kind.as_str() {
            "message" => self.take_message(&mut fields)?,
            "reasoning" => self.take_reasoning(&mut fields)?,
            "function_call" => {
                let arguments_path = fields.path("arguments");
                let arguments = parse_arguments(arguments_path, fields.take("arguments"))?;
                self.take_call(&mut fields, arguments)?;
            }
            "custom_tool_call" => {
                let input = needed(&mut fields, "input")?;
                self.take_call(&mut fields, json!({"input": input}))?;
            }
            "function_call_output" | "custom_tool_call_output" => self.take_output(&mut fields)?,
            "item_reference" => {
                let message =
                    format!("`{path}` is a reference: send the item itself, or `previous_response_id`");
                return Err(ApiError::field(path, message).with_code("unsupported_parameter"));
            }
            // What other servers' tools left behind says nothing to a model that does not have them.
            other => known::unknown(self.app, &format!("input item of type {other}"))?,
        }
        Ok(())
    }

    fn take_message(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let role = needed(fields, "role")?;
        let path = fields.path("content");
        let content = take_texts(&path, fields.take("content").unwrap_or_default())?;
        match role.as_str() {
            "assistant" => {
                let is_new = |open: &Assistant| open.texts.is_empty() && open.calls.is_empty();
                if !self.open.as_ref().is_some_and(is_new) {
                    self.close();
                }
                self.open.get_or_insert_default().texts = content;
            }
            "user" | "system" | "developer" => {
                self.close();
                let role = if role == "developer" { "system" } else { role.as_str() };
                self.messages.push(json!({"role": role, "content": content}));
            }
            _ => {
                let expected = "one of user, assistant, system, developer";
                return Err(ApiError::value(fields.path("role"), expected, &role.into()));
            }
        }
        Ok(())
    }

    /// Thinking, from wherever the client has kept it.
    fn take_reasoning(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let mut take = |name: &str| -> Result<String, ApiError> {
            let path = fields.path(name);
            let Some(value) = fields.take(name) else { return Ok(String::new()) };
            Ok(take_texts(&path, value)?.iter().filter_map(|part| part["text"].as_str()).collect())
        };
        let (summary, content) = (take("summary")?, take("content")?);
        let begun = |open: &Assistant| !(open.texts.is_empty() && open.calls.is_empty());
        if self.open.as_ref().is_some_and(begun) {
            self.close();
        }
        let text = if content.is_empty() { summary } else { content };
        self.open.get_or_insert_default().reasoning.push_str(&text);
        Ok(())
    }

    fn take_call(&mut self, fields: &mut Fields, arguments: Value) -> Result<(), ApiError> {
        let id = needed(fields, "call_id")?;
        let name = needed(fields, "name")?;
        let namespace = fields.string("namespace")?;
        let shown = self.namespaces.join(namespace.as_deref(), &name);
        self.open.get_or_insert_default().calls.push(call(&id, &shown, arguments));
        Ok(())
    }

    fn take_output(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let id = needed(fields, "call_id")?;
        let path = fields.path("output");
        let content = match fields.take("output").unwrap_or_default() {
            output @ (Value::String(_) | Value::Array(_)) => take_texts(&path, output)?,
            other => return Err(ApiError::value(path, "a string or a list of text parts", &other)),
        };
        self.close();
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
        Ok(())
    }

    fn close(&mut self) {
        self.messages.extend(self.open.take().map(Assistant::into_message));
    }
}

/// A string, or a list of parts with text.
fn take_texts(path: &str, content: Value) -> Result<Vec<Value>, ApiError> {
    match content {
        Value::String(text) => Ok(vec![text_part(&text)]),
        Value::Array(parts) => {
            let take = |(index, part): (usize, Value)| take_text(&format!("{path}[{index}]"), &part);
            parts.into_iter().enumerate().map(take).collect()
        }
        other => Err(ApiError::value(path, "a string or a list of text parts", &other)),
    }
}

fn take_text(path: &str, part: &Value) -> Result<Value, ApiError> {
    let kind = part["type"].as_str().unwrap_or_default();
    if MEDIA_PARTS.contains(&kind) {
        let message = format!("`{path}.type` is {kind:?}, but this server is text only");
        return Err(ApiError::field(format!("{path}.type"), message).with_code("unsupported_content"));
    }
    if !TEXT_PARTS.contains(&kind) {
        return Err(ApiError::value(format!("{path}.type"), "a type of text part", &part["type"]));
    }
    let field = if kind == "refusal" { "refusal" } else { "text" };
    match part[field].as_str() {
        Some(text) => Ok(text_part(text)),
        None => Err(ApiError::value(format!("{path}.{field}"), "a string", &part[field])),
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn needed(fields: &mut Fields, name: &str) -> Result<String, ApiError> {
    fields.string(name)?.ok_or_else(|| ApiError::value(fields.path(name), "a string", &Value::Null))
}

/// Reads `text`: the format of the answer goes where chats have it.
pub(super) fn take_text_settings(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(value) = fields.take("text") else { return Ok(()) };
    let mut text = Fields::nested("text", value)?;
    // A hint that has no effect here.
    text.take("verbosity");
    if let Some(format) = text.take("format") {
        fields.put("response_format", "text.format".into(), format);
    }
    Ok(())
}

/// How thinking is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    /// As what it is.
    Text,
    /// In the place of a summary, for clients that asked for one: nothing else here could write it.
    Summary,
}

/// Reads `reasoning`: the effort goes where chats have it.
pub(super) fn take_reasoning_settings(fields: &mut Fields) -> Result<Shown, ApiError> {
    let Some(value) = fields.take("reasoning") else { return Ok(Shown::Text) };
    let mut reasoning = Fields::nested("reasoning", value)?;
    if let Some(effort) = reasoning.take("effort") {
        fields.put("reasoning_effort", "reasoning.effort".into(), effort);
    }
    let summary = reasoning.string("summary")?.or(reasoning.string("generate_summary")?);
    match summary.as_deref() {
        None | Some("none") => Ok(Shown::Text),
        Some("auto" | "concise" | "detailed") => Ok(Shown::Summary),
        Some(other) => {
            let expected = "one of auto, concise, detailed";
            Err(ApiError::value(reasoning.path("summary"), expected, &other.into()))
        }
    }
}

/// Reads `include`; whether log-probabilities are asked for. The rest has no effect here: there are no such items, and
/// thinking is never hidden.
pub(super) fn take_include(fields: &mut Fields) -> Result<bool, ApiError> {
    let mut logprobs = false;
    for (index, item) in fields.list("include")?.unwrap_or_default().iter().enumerate() {
        let Some(name) = item.as_str() else {
            let rule = format!("`include[{index}]` must be a string");
            let message = format!("{rule}, got {}", show(item));
            return Err(ApiError::field(format!("include[{index}]"), message).logged_as(rule));
        };
        logprobs |= name == "message.output_text.logprobs";
    }
    Ok(logprobs)
}
