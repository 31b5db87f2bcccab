//! `OpenAI`'s newer API: `POST /v1/responses`, and what was kept of earlier responses.

mod answer;
mod input;
mod routes;
mod store;
mod tools;
mod types;

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::endpoint::Endpoint;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::known;
use crate::params::{Params, take_params, take_top_logprobs};
use crate::parts::Parts;
use crate::prompt::{Conversation, Ending, Prompt, prepare_chat, take_template_kwargs};
use crate::render::Converses;
use crate::types::unix_seconds;

use answer::{Keep, ResponseAnswer};
use input::{Items, Shown};
use store::Stored;
use tools::Namespaces;

pub(crate) use routes::{input_items, remove, show};
pub(crate) use store::ResponseStore;

/// A request for a response, read and checked.
pub(crate) struct ResponsesRequest {
    model: String,
    conversation: Conversation,
    params: Params,
    namespaces: Namespaces,
    shown: Shown,
    echo: Map<String, Value>,
    keep: Option<Keep>,
}

impl Endpoint for ResponsesRequest {
    const PATH: &'static str = "/v1/responses";
    const ID_PREFIX: &'static str = "resp_";
    type Answer = ResponseAnswer;

    fn parse(app: &Arc<App>, caller: &str, mut fields: Fields) -> Result<Self, ApiError> {
        let mut echo = take_echo(&fields);
        let asked = fields.string("model")?;
        let model = app.check_model(asked)?;
        let before = take_previous(app, caller, &mut fields)?;
        let Some(input) = fields.take("input") else {
            return Err(ApiError::field("input", "`input` is missing: a string or a list of items"));
        };
        let (tools, namespaces) = tools::take_tools(app, &mut fields)?;
        let shown = input::take_reasoning_settings(&mut fields)?;
        input::take_text_settings(&mut fields)?;
        let wants_logprobs = input::take_include(&mut fields)?;
        let store = fields.boolean("store")?.unwrap_or(true);
        check_truncation(&mut fields)?;
        let instructions = fields.string("instructions")?;
        fields.rename("max_output_tokens", "max_tokens");
        let kwargs = take_template_kwargs(app, &mut fields)?;
        let mut params = take_params(app, &mut fields)?.single()?;
        if params.max_tokens == Some(0) {
            return Err(ApiError::value(&params.max_tokens_path, "at least 1", &0.into()));
        }
        let top = take_top_logprobs(&mut fields, "top_logprobs")?;
        params.sampling.logprobs = wants_logprobs.then(|| top.unwrap_or(0));
        known::settle(app, &fields)?;
        let history = take_items(app, &namespaces, before, &input)?;
        note_effective(&mut echo, &params, store);
        let messages = with_instructions(instructions, &history);
        let conversation =
            Conversation { messages, tools: tools.definitions(), ending: Ending::Turn, kwargs };
        params.tools = Arc::new(tools);
        let keep = store.then_some(Keep { owner: caller.to_owned(), input, history });
        Ok(Self { model, conversation, params, namespaces, shown, echo, keep })
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn params(&self) -> &Params {
        &self.params
    }

    async fn prompts(&mut self, app: &Arc<App>) -> Result<Vec<Prompt>, ApiError> {
        prepare_chat(app, "input", std::mem::take(&mut self.conversation), &self.params).await
    }

    fn answer(self, app: &Arc<App>, id: String, _prompts: Vec<Prompt>) -> ResponseAnswer {
        ResponseAnswer {
            app: Arc::clone(app),
            id,
            model: self.model,
            created_unix_s: unix_seconds(),
            echo: self.echo,
            shown: self.shown,
            namespaces: self.namespaces,
            logprobs: self.params.sampling.logprobs.is_some(),
            keep: self.keep,
            parts: Parts::default(),
            item_ids: Vec::new(),
            tokens: Vec::new(),
            finish: None,
            sequence_number: 0,
        }
    }
}

impl Converses for ResponsesRequest {
    fn into_conversation(self) -> Conversation {
        self.conversation
    }
}

/// What a response repeats of its request, with what holds where the request says nothing.
fn take_echo(fields: &Fields) -> Map<String, Value> {
    let defaults = [
        ("background", json!(false)),
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("max_tool_calls", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Value::Null),
        ("prompt_cache_key", Value::Null),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("safety_identifier", Value::Null),
        ("service_tier", json!("default")),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_logprobs", json!(0)),
        ("truncation", json!("disabled")),
        ("user", Value::Null),
    ];
    let said = |(name, default): (&str, Value)| {
        (name.to_owned(), fields.peek(name).filter(|value| !value.is_null()).cloned().unwrap_or(default))
    };
    defaults.into_iter().map(said).collect()
}

/// What holds after defaults were applied.
fn note_effective(echo: &mut Map<String, Value>, params: &Params, store: bool) {
    let sampling = &params.sampling;
    echo.insert("temperature".into(), sampling.temperature.into());
    echo.insert("top_p".into(), sampling.top_p.into());
    echo.insert("presence_penalty".into(), sampling.presence_penalty.into());
    echo.insert("frequency_penalty".into(), sampling.frequency_penalty.into());
    echo.insert("store".into(), store.into());
}

/// The conversation that the request goes on with.
fn take_previous(app: &App, caller: &str, fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let Some(id) = fields.string("previous_response_id")? else { return Ok(Vec::new()) };
    let stored = find(app, caller, &id).map_err(|mut error| {
        error.param = Some("previous_response_id".into());
        error
    })?;
    serde_json::from_str(&stored.history).map_err(|error| ApiError::internal(error.to_string()))
}

/// A response that was kept for this caller.
fn find(app: &App, caller: &str, id: &str) -> Result<Arc<Stored>, ApiError> {
    app.responses.find(caller, id).ok_or_else(|| {
        let shown: String = id.chars().take(80).collect();
        let message = format!(
            "there is no response `{shown}`: it was never kept here, or was deleted, or had to make room for newer \
             ones; send the whole conversation as `input`"
        );
        ApiError::new(StatusCode::NOT_FOUND, message).with_code("response_not_found")
    })
}

/// Nothing is ever cut here; a client that would allow it gets an error like any other when its input is too long.
fn check_truncation(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.string("truncation")?.as_deref() {
        None | Some("auto" | "disabled") => Ok(()),
        Some(other) => Err(ApiError::value("truncation", "auto or disabled", &other.into())),
    }
}

/// The conversation with the items of this request.
fn take_items(
    app: &App,
    namespaces: &Namespaces,
    mut history: Vec<Value>,
    input: &Value,
) -> Result<Vec<Value>, ApiError> {
    let mut items = Items::new(app, namespaces);
    items.take_input(input.clone())?;
    history.extend(items.finish());
    // Templates refuse a conversation in which nobody asks; clients send one to see whether the server is there.
    if history.iter().all(|message| message["role"] == "system") {
        history.push(json!({"role": "user", "content": ""}));
    }
    Ok(history)
}

fn with_instructions(instructions: Option<String>, history: &[Value]) -> Vec<Value> {
    let first = instructions.map(|text| json!({"role": "system", "content": text}));
    first.into_iter().chain(history.iter().cloned()).collect()
}
