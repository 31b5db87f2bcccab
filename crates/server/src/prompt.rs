//! Prompts: rendering, tokenising, and whether they fit.

use std::sync::Arc;

use axum::http::StatusCode;
use qwill_contract::EngineFacts;
use qwill_text::{ChatInput, ChatTemplate, Rendered, TextError, prompt_opens_reasoning};
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::messages::{gather_system, has_late_system};
use crate::params::{Params, Truncation};

/// KV is handed out in pages of this many tokens; several choices each round up to whole pages.
pub(crate) const KV_PAGE_TOKENS: usize = 64;

/// A prompt, ready for the engine.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub(crate) ids: Arc<[u32]>,
    /// Whether the answer begins inside a thinking section that the prompt opened.
    pub(crate) opens_reasoning: bool,
    /// Most tokens to generate.
    pub(crate) max_tokens: usize,
    /// How much the model was asked to think, for the log; none where there is no template.
    pub(crate) effort: Option<String>,
}

/// A conversation to be rendered.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) ending: Ending,
    pub(crate) kwargs: Map<String, Value>,
}

/// What follows the last message.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The assistant's turn begins.
    #[default]
    Turn,
    /// The last message, one of the assistant's, goes on.
    Continuation,
    /// Nothing.
    End,
}

impl Ending {
    /// The assistant goes on with what it has begun to say, and answers everything else.
    pub(crate) fn after(messages: &[Value]) -> Self {
        if messages.last().is_some_and(can_go_on) { Self::Continuation } else { Self::Turn }
    }
}

/// `add_generation_prompt` and `continue_final_message`; without either the messages decide.
pub(crate) fn take_ending(fields: &mut Fields, messages: &[Value]) -> Result<Ending, ApiError> {
    const CONTINUE: &str = "continue_final_message";
    let begins = fields.boolean("add_generation_prompt")?;
    match (fields.boolean(CONTINUE)?, begins) {
        (Some(true), Some(true)) => {
            let message = format!("`{CONTINUE}` and `add_generation_prompt` exclude each other: send one");
            Err(ApiError::field(CONTINUE, message).with_code("invalid_value"))
        }
        (Some(true), _) if messages.last().is_some_and(can_go_on) => Ok(Ending::Continuation),
        (Some(true), _) => {
            let message = format!(
                "`{CONTINUE}` needs a last message of the assistant's without tool calls: there is nothing to continue"
            );
            Err(ApiError::field(CONTINUE, message).with_code("invalid_value"))
        }
        (_, Some(false)) => Ok(Ending::End),
        (Some(false), _) | (_, Some(true)) => Ok(Ending::Turn),
        (None, None) => Ok(Ending::after(messages)),
    }
}

/// Whether a message is one of the assistant's with words that can go on: those before a call cannot.
fn can_go_on(message: &Value) -> bool {
    message["role"] == "assistant" && message.get("tool_calls").is_none()
}

/// A conversation as the model reads it.
pub(crate) struct Encoded {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    /// Whether the text opens a thinking section.
    pub(crate) opens_reasoning: bool,
    /// How much thinking the text asks for.
    effort: String,
}

/// Renders and tokenises a conversation.
pub(crate) async fn encode_chat(app: &App, conversation: Conversation) -> Result<Encoded, ApiError> {
    let Some(template) = app.text.template.clone() else {
        let message = "this model has no chat template: use /v1/completions or another model directory";
        return Err(ApiError::new(StatusCode::BAD_REQUEST, message).with_code("no_chat_template"));
    };
    let tokenizer = Arc::clone(&app.text.tokenizer);
    prepare(app, move || {
        let asked = conversation.kwargs.get("reasoning_effort").and_then(Value::as_str).map(str::to_owned);
        let (rendered, opens_reasoning) = render_to_its_end(&template, conversation)?;
        let effort = match asked {
            _ if !opens_reasoning => "off".to_owned(),
            Some(level) if template.source().contains("reasoning_effort") => level,
            _ => "default".to_owned(),
        };
        Ok(Encoded { ids: rendered.encode(&tokenizer), text: rendered.text, opens_reasoning, effort })
    })
    .await
}

/// The prompt of a conversation that is to be answered; `path` is where the client gave it.
pub(crate) async fn prepare_chat(
    app: &App,
    path: &str,
    conversation: Conversation,
    params: &Params,
) -> Result<Vec<Prompt>, ApiError> {
    let Encoded { ids, opens_reasoning, effort, .. } = encode_chat(app, conversation).await?;
    let prompt = fit(app, path, ids, opens_reasoning, params, app.options.defaults.max_tokens)?;
    Ok(vec![Prompt { effort: Some(effort), ..prompt }])
}

/// Runs work on a prompt where it holds up nobody, and not too much of it at once.
pub(crate) async fn prepare<T: Send + 'static>(
    app: &App,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permit = Arc::clone(&app.preparing).acquire_owned().await;
    let permit = permit.map_err(|error| ApiError::internal(error.to_string()))?;
    tokio::task::spawn_blocking(move || {
        let result = work();
        drop(permit);
        result
    })
    .await
    .map_err(|error| ApiError::internal(format!("preparing the prompt failed: {error}")))?
}

/// The prompt, and whether it opens a thinking section.
fn render_to_its_end(
    template: &ChatTemplate,
    mut conversation: Conversation,
) -> Result<(Rendered, bool), ApiError> {
    if conversation.ending == Ending::Continuation {
        if let Some(place) = conversation.messages.last_mut().and_then(Place::of) {
            return continue_last(template, &mut conversation, place);
        }
        // A message without a word is a turn that has not begun.
        conversation.messages.pop();
        conversation.ending = Ending::Turn;
    }
    let rendered = render(template, &conversation).map_err(template_error)?;
    let opens_reasoning = prompt_opens_reasoning(&rendered.text);
    Ok((rendered, opens_reasoning))
}

/// Where the assistant's last message goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Content,
    Reasoning,
}

impl Place {
    /// Behind its content or, when it has got no further than that, its thinking.
    fn of(message: &mut Value) -> Option<Self> {
        let has_text = |place: &Self| place.text(message).is_some_and(|text| !text.is_empty());
        [Self::Content, Self::Reasoning].into_iter().find(has_text)
    }

    fn text(self, message: &mut Value) -> Option<&mut String> {
        let value = match self {
            Self::Reasoning => message.get_mut("reasoning_content")?,
            Self::Content => match message.get_mut("content")? {
                Value::Array(parts) => parts.last_mut()?.get_mut("text")?,
                content => content,
            },
        };
        match value {
            Value::String(text) => Some(text),
            _ => None,
        }
    }
}

/// The prompt up to the end of the last message's text. A mark that occurs nowhere else shows where that is, through
/// whatever the template does to the text around it.
fn continue_last(
    template: &ChatTemplate,
    conversation: &mut Conversation,
    place: Place,
) -> Result<(Rendered, bool), ApiError> {
    let refused = || {
        let message =
            "the last message cannot be continued: the chat template does not show the end of its text";
        ApiError::field("messages", message).with_code("template_error")
    };
    let text = serde_json::to_string(&conversation.messages).unwrap_or_default();
    let mark = ('\u{e000}'..='\u{f8ff}').find(|&mark| !text.contains(mark)).ok_or_else(refused)?;
    if let Some(text) = conversation.messages.last_mut().and_then(|message| place.text(message)) {
        text.push(mark);
    }
    let mut rendered = render(template, conversation).map_err(template_error)?;
    if !rendered.end_at(mark) {
        return Err(refused());
    }
    Ok((rendered, place == Place::Reasoning))
}

fn render(template: &ChatTemplate, conversation: &Conversation) -> Result<Rendered, TextError> {
    let render = |messages: &[Value]| {
        template.render(&ChatInput {
            messages,
            tools: conversation.tools.as_deref(),
            add_generation_prompt: conversation.ending == Ending::Turn,
            kwargs: &conversation.kwargs,
        })
    };
    match render(&conversation.messages) {
        // Agents put system messages anywhere, and some templates allow one place only.
        Err(refused @ TextError::Template { .. }) if has_late_system(&conversation.messages) => {
            render(&gather_system(&conversation.messages)).map_err(|_| refused)
        }
        other => other,
    }
}

fn template_error(error: TextError) -> ApiError {
    match error {
        TextError::Template { message } => {
            ApiError::field("messages", format!("the chat template refuses the conversation: {message}"))
                .with_code("template_error")
                .logged_as("the chat template refuses the conversation")
        }
        TextError::ReservedArgument { .. } => {
            ApiError::field("chat_template_kwargs", format!("`chat_template_kwargs`: {error}"))
        }
        other => ApiError::field("messages", other.to_string()).with_code("template_error"),
    }
}

/// Takes what a request tells the template: `chat_template_kwargs`, `enable_thinking`, `reasoning_effort`, on top
/// of the server's own.
pub(crate) fn take_template_kwargs(app: &App, fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut kwargs = app.options.chat_template_kwargs.clone();
    // The standard name first: a client that uses the template's own words as well means those.
    if let Some((name, value)) = take_reasoning_effort(fields)? {
        kwargs.insert(name.into(), value);
    }
    if let Some(thinking) = fields.boolean("enable_thinking")? {
        kwargs.insert("enable_thinking".into(), thinking.into());
    }
    kwargs.extend(fields.object("chat_template_kwargs")?.unwrap_or_default());
    Ok(kwargs)
}

/// Everybody's names for how much to think, as the template argument that says the same.
fn take_reasoning_effort(fields: &mut Fields) -> Result<Option<(&'static str, Value)>, ApiError> {
    let path = fields.path("reasoning_effort");
    let Some(effort) = fields.string("reasoning_effort")? else { return Ok(None) };
    let level = match effort.to_ascii_lowercase().as_str() {
        "none" | "off" => return Ok(Some(("enable_thinking", false.into()))),
        "minimal" | "low" => "low",
        "medium" => "medium",
        "high" | "xhigh" | "max" => "xhigh",
        _ => {
            let expected = "one of none, off, minimal, low, medium, high, xhigh, max";
            return Err(ApiError::value(path, expected, &effort.into()));
        }
    };
    Ok(Some(("reasoning_effort", level.into())))
}

/// Longest prompt and answer of one choice, tokens.
pub(crate) fn context_limit(facts: &EngineFacts, choices: usize) -> usize {
    let share = match choices {
        1 => facts.kv_capacity_tokens,
        // An upper bound on what choices can take, as if none of their prompt were shared.
        _ => facts.kv_capacity_tokens / choices / KV_PAGE_TOKENS * KV_PAGE_TOKENS,
    };
    facts.max_context_tokens.min(share)
}

/// Checks that prompt and answer fit, and settles how long the answer may become. `fallback` is for requests that
/// do not say; without one they get what fits.
pub(crate) fn fit(
    app: &App,
    param: &str,
    mut ids: Vec<u32>,
    opens_reasoning: bool,
    params: &Params,
    fallback: Option<usize>,
) -> Result<Prompt, ApiError> {
    let limit = context_limit(app.facts(), params.choices);
    let keep = match params.truncation {
        Truncation::Refuse => ids.len(),
        Truncation::ToFit => limit.saturating_sub(params.max_tokens.unwrap_or(1)),
        Truncation::To(tokens) => tokens,
    };
    ids.drain(..ids.len().saturating_sub(keep));
    if ids.is_empty() {
        let message = format!("`{param}` is empty: at least one token is needed");
        return Err(ApiError::field(param, message).with_code("invalid_value"));
    }
    let vocab_size = app.facts().vocab_size;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
        let message =
            format!("`{param}` has the token {id}, but the model's tokens end at {}", vocab_size - 1);
        return Err(ApiError::field(param, message).with_code("invalid_value"));
    }
    let prompt_tokens = ids.len();
    let least = params.max_tokens.unwrap_or(1).min(1);
    if prompt_tokens + least > limit {
        return Err(too_long(param, prompt_tokens, limit, params, limit.saturating_sub(least)));
    }
    let room = limit - prompt_tokens;
    let max_tokens = match params.max_tokens {
        Some(asked) if asked > room => {
            let message = format!(
                "the prompt has {prompt_tokens} tokens and `{}` asks for {asked} more, but prompt and answer \
                 together must not exceed {limit} tokens{}: at most {room} tokens fit after this prompt",
                params.max_tokens_path,
                each_choice(params)
            );
            return Err(
                ApiError::field(&params.max_tokens_path, message).with_code("context_length_exceeded")
            );
        }
        Some(asked) => asked,
        None => fallback.map_or(room, |tokens| tokens.min(room)),
    };
    if params.sampling.min_tokens > max_tokens {
        let least = params.sampling.min_tokens;
        let message = format!("`min_tokens` is {least}, but only {max_tokens} tokens may be generated");
        return Err(ApiError::field("min_tokens", message).with_code("invalid_value"));
    }
    Ok(Prompt { ids: ids.into(), opens_reasoning, max_tokens, effort: None })
}

fn too_long(param: &str, prompt_tokens: usize, limit: usize, params: &Params, fitting: usize) -> ApiError {
    if prompt_tokens == limit {
        let message = format!(
            "the prompt has {prompt_tokens} tokens and fills the context{} to its end: there is no room to generate \
             even one token, a prompt of at most {fitting} tokens fits",
            each_choice(params)
        );
        return ApiError::field(param, message).with_code("context_length_exceeded");
    }
    let message = format!(
        "the prompt has {prompt_tokens} tokens, but prompt and answer together must not exceed {limit} tokens{}: a \
         prompt of at most {fitting} tokens fits, this one is {} too long",
        each_choice(params),
        prompt_tokens - fitting
    );
    ApiError::field(param, message).with_code("context_length_exceeded")
}

fn each_choice(params: &Params) -> String {
    if params.choices == 1 { String::new() } else { format!(" for each of {} choices", params.choices) }
}
