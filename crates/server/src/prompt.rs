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
use crate::params::Params;

/// KV is handed out in pages of this many tokens; several choices each round up to whole pages.
pub(crate) const KV_PAGE_TOKENS: usize = 64;
/// Ends a thinking section that the prompt has opened.
const CLOSED_REASONING: &str = "\n</think>\n\n";

/// A prompt, ready for the engine.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub(crate) ids: Arc<[u32]>,
    /// Whether the answer begins inside a thinking section that the prompt opened.
    pub(crate) opens_reasoning: bool,
    /// Most tokens to generate.
    pub(crate) max_tokens: usize,
    /// The beginning of the answer, where the prompt has it already.
    pub(crate) lead: Option<String>,
}

/// A conversation to be rendered.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) add_generation_prompt: bool,
    /// What the answer is to begin with, after thinking that has no words.
    pub(crate) lead: Option<String>,
    pub(crate) kwargs: Map<String, Value>,
}

/// Token ids of a conversation, and whether its text opens a thinking section.
pub(crate) async fn encode_chat(app: &App, conversation: Conversation) -> Result<(Vec<u32>, bool), ApiError> {
    let Some(template) = app.text.template.clone() else {
        let message = "this model has no chat template: use /v1/completions or another model directory";
        return Err(ApiError::new(StatusCode::BAD_REQUEST, message).with_code("no_chat_template"));
    };
    let tokenizer = Arc::clone(&app.text.tokenizer);
    prepare(app, move || {
        let mut rendered = render(&template, &conversation).map_err(template_error)?;
        if let Some(lead) = &conversation.lead {
            if prompt_opens_reasoning(&rendered.text) {
                rendered.text.push_str(CLOSED_REASONING);
            }
            rendered.text.push_str(lead);
        }
        Ok((rendered.encode(&tokenizer), prompt_opens_reasoning(&rendered.text)))
    })
    .await
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

fn render(template: &ChatTemplate, conversation: &Conversation) -> Result<Rendered, TextError> {
    let render = |messages: &[Value]| {
        template.render(&ChatInput {
            messages,
            tools: conversation.tools.as_deref(),
            add_generation_prompt: conversation.add_generation_prompt,
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

/// `OpenAI`'s names for how much to think, as the template argument that says the same.
fn take_reasoning_effort(fields: &mut Fields) -> Result<Option<(&'static str, Value)>, ApiError> {
    let Some(effort) = fields.string("reasoning_effort")? else { return Ok(None) };
    let level = match effort.as_str() {
        "none" => return Ok(Some(("enable_thinking", false.into()))),
        "minimal" | "low" => "low",
        "medium" => "medium",
        "high" | "xhigh" | "max" => "xhigh",
        _ => {
            let expected = "one of none, minimal, low, medium, high, xhigh, max";
            return Err(ApiError::value("reasoning_effort", expected, &effort.into()));
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
    ids: Vec<u32>,
    opens_reasoning: bool,
    params: &Params,
    fallback: Option<usize>,
) -> Result<Prompt, ApiError> {
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
    let limit = context_limit(app.facts(), params.choices);
    let prompt_tokens = ids.len();
    let least = params.max_tokens.unwrap_or(1).min(1);
    if prompt_tokens + least > limit {
        return Err(too_long(param, prompt_tokens, limit, params, limit.saturating_sub(least)));
    }
    let room = limit - prompt_tokens;
    let max_tokens = match params.max_tokens {
        Some(asked) if asked > room => {
            let message = format!(
                "the prompt has {prompt_tokens} tokens and `max_tokens` asks for {asked} more, but prompt and answer \
                 together must not exceed {limit} tokens{}: at most {room} tokens fit after this prompt",
                each_choice(params)
            );
            return Err(ApiError::field("max_tokens", message).with_code("context_length_exceeded"));
        }
        Some(asked) => asked,
        None => fallback.map_or(room, |tokens| tokens.min(room)),
    };
    if params.sampling.min_tokens > max_tokens {
        let least = params.sampling.min_tokens;
        let message = format!("`min_tokens` is {least}, but only {max_tokens} tokens may be generated");
        return Err(ApiError::field("min_tokens", message).with_code("invalid_value"));
    }
    Ok(Prompt { ids: ids.into(), opens_reasoning, max_tokens, lead: None })
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
