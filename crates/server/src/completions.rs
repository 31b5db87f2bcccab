//! `POST /v1/completions`.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use qwill_contract::PromptToken;
use qwill_text::{Markers, Tokenizer};
use serde_json::{Map, Value};

use crate::app::App;
use crate::body::read_object;
use crate::choice::Delta;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Update};
use crate::known;
use crate::log::Record;
use crate::logprobs::CompletionLogprobs;
use crate::params::{Params, parse_token_ids, take_params, take_top_logprobs};
use crate::prompt::{Prompt, fit, prepare};
use crate::random::random_id;
use crate::request_id::RequestId;
use crate::sse::{self, Chunks, json};
use crate::types::completions::{CompletionBody, CompletionChoice, CompletionChunk};
use crate::types::{ChunkUsage, Head, unix_seconds};

const PROMPTS_LIMIT: usize = 64;
/// What `OpenAI` documents for a completion that does not say how long it may become.
const DEFAULT_MAX_TOKENS: usize = 16;

/// The handler.
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let record = Record::new(&app, "/v1/completions", request_id);
    match answer(&app, &record, &headers, body).await {
        Ok(response) => response,
        Err(error) => {
            record.fail(&error);
            error.into_response()
        }
    }
}

/// A prompt as the client gave it.
enum Given {
    Text(String),
    Ids(Vec<u32>),
}

struct CompletionRequest {
    model: String,
    /// Each with its path in the body.
    prompts: Vec<(String, Given)>,
    echo: bool,
    params: Params,
}

async fn answer(
    app: &Arc<App>,
    record: &Arc<Record>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let fields = read_object(&app.options, headers, body).await?;
    let CompletionRequest { model, prompts, echo, params } = parse(app, fields)?;
    {
        let mut facts = record.facts();
        facts.model.clone_from(&model);
        facts.stream = params.stream;
    }
    app.check_ready()?;
    let (echoes, prompts) = encode(app, prompts, &params).await?;
    let id = random_id("cmpl-");
    let prompt_logprobs = params.sampling.logprobs.filter(|_| echo);
    let generation = Generation::start(app, Arc::clone(record), &id, &prompts, &params, prompt_logprobs)?;
    let system_fingerprint = app.facts().numerics.clone();
    let head = Head { id, object: "text_completion", created: unix_seconds(), model, system_fingerprint };
    let prompt_logprobs = vec![Vec::new(); prompts.len()];
    let stream = params.stream;
    let shape =
        Shape { tokenizer: Arc::clone(&app.text.tokenizer), params, prompts, echoes, echo, prompt_logprobs };
    if stream {
        let begun = vec![false; generation.choice_count()];
        Ok(sse::respond(app, generation, CompletionChunks { head, shape, begun }))
    } else {
        Ok(Json(collect(generation, head, shape).await?).into_response())
    }
}

fn parse(app: &App, fields: Map<String, Value>) -> Result<CompletionRequest, ApiError> {
    let mut fields = Fields::new(fields);
    let asked = fields.string("model")?;
    let model = app.check_model(asked)?;
    let prompts = take_prompts(app, &mut fields)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let mut params = take_params(app, &mut fields)?;
    if params.max_tokens == Some(0) && !echo {
        return Err(ApiError::value("max_tokens", "at least 1 without `echo`", &0.into()));
    }
    params.sampling.logprobs = take_top_logprobs(&mut fields, "logprobs")?;
    known::settle(app, &fields)?;
    Ok(CompletionRequest { model, prompts, echo, params })
}

/// A string, a list of strings, a list of token ids, or a list of such lists.
fn take_prompts(app: &App, fields: &mut Fields) -> Result<Vec<(String, Given)>, ApiError> {
    let vocab_size = app.facts().vocab_size;
    let expected = "a string, a list of strings, a list of token ids, or a list of lists of token ids";
    let Some(value) = fields.take("prompt") else {
        return Err(ApiError::field("prompt", format!("`prompt` is missing: {expected}")));
    };
    let items = match value {
        Value::String(text) => return Ok(vec![("prompt".into(), Given::Text(text))]),
        Value::Array(items) if !items.is_empty() => items,
        other => return Err(ApiError::value("prompt", expected, &other)),
    };
    if items[0].is_number() {
        let ids = parse_token_ids(&items, "prompt", vocab_size)?;
        return Ok(vec![("prompt".into(), Given::Ids(ids))]);
    }
    if items.len() > PROMPTS_LIMIT {
        let message = format!("`prompt` has {} prompts, the limit is {PROMPTS_LIMIT}", items.len());
        return Err(ApiError::field("prompt", message).with_code("invalid_value"));
    }
    let give = |(index, item): (usize, Value)| {
        let path = format!("prompt[{index}]");
        let given = match item {
            Value::String(text) => Given::Text(text),
            Value::Array(ids) => Given::Ids(parse_token_ids(&ids, &path, vocab_size)?),
            other => return Err(ApiError::value(path, "a string or a list of token ids", &other)),
        };
        Ok((path, given))
    };
    items.into_iter().enumerate().map(give).collect()
}

/// Token ids of all prompts, and the text that an echo gives back for each.
async fn encode(
    app: &Arc<App>,
    given: Vec<(String, Given)>,
    params: &Params,
) -> Result<(Vec<String>, Vec<Prompt>), ApiError> {
    let tokenizer = Arc::clone(&app.text.tokenizer);
    let encoded = prepare(app, move || {
        let encode = |(path, given)| match given {
            // A raw prompt is written by whoever wants control: markers in it are markers.
            Given::Text(text) => (path, tokenizer.encode(&text, Markers::All), text),
            Given::Ids(ids) => {
                let text = tokenizer.decode(&ids, false);
                (path, ids, text)
            }
        };
        Ok(given.into_iter().map(encode).collect::<Vec<_>>())
    })
    .await?;
    let fallback = app.options.defaults.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
    let mut echoes = Vec::with_capacity(encoded.len());
    let mut prompts = Vec::with_capacity(encoded.len());
    for (path, ids, text) in encoded {
        prompts.push(fit(app, &path, ids, false, params, Some(fallback))?);
        echoes.push(text);
    }
    Ok((echoes, prompts))
}

/// What an answer is made with.
struct Shape {
    tokenizer: Arc<Tokenizer>,
    params: Params,
    prompts: Vec<Prompt>,
    echoes: Vec<String>,
    echo: bool,
    prompt_logprobs: Vec<Vec<PromptToken>>,
}

impl Shape {
    /// What comes before a choice's generated text: the prompt, if it is to be echoed.
    fn beginning(&self, index: usize, prompt: usize) -> CompletionChoice {
        let ids = &self.prompts[prompt].ids;
        let mut choice = CompletionChoice { index, ..Default::default() };
        if self.echo {
            choice.text.clone_from(&self.echoes[prompt]);
        }
        if self.params.sampling.logprobs.is_some() {
            let mut logprobs = CompletionLogprobs::default();
            if self.echo {
                logprobs.add_prompt(&self.tokenizer, ids, &self.prompt_logprobs[prompt]);
            }
            choice.logprobs = Some(logprobs);
        }
        if self.params.output.return_token_ids {
            choice.token_ids = Some(Vec::new());
            choice.prompt_token_ids = Some(ids.to_vec());
        }
        choice
    }

    /// Adds generated text to a choice.
    fn add(&self, choice: &mut CompletionChoice, prompt: usize, delta: &Delta) {
        choice.text.push_str(&delta.content);
        if self.params.sampling.logprobs.is_some() {
            let offset_chars = if self.echo { self.echoes[prompt].chars().count() } else { 0 };
            let logprobs = choice.logprobs.get_or_insert_default();
            logprobs.add_answer(&self.tokenizer, &delta.tokens, offset_chars);
        }
        if self.params.output.return_token_ids {
            choice.token_ids.get_or_insert_default().extend(delta.tokens.iter().map(|token| token.id));
        }
    }
}

async fn collect(
    mut generation: Generation,
    head: Head,
    mut shape: Shape,
) -> Result<CompletionBody, ApiError> {
    let mut choices: Vec<Option<CompletionChoice>> = (0..generation.choice_count()).map(|_| None).collect();
    while let Some(update) = generation.next().await {
        match update? {
            Update::PromptLogprobs { prompt, tokens } => shape.prompt_logprobs[prompt] = tokens,
            Update::Delta { index, delta } => {
                let prompt = generation.prompt_of(index);
                let choice = choices[index].get_or_insert_with(|| shape.beginning(index, prompt));
                shape.add(choice, prompt, &delta);
            }
            Update::Finished { index, finish } => {
                let prompt = generation.prompt_of(index);
                let choice = choices[index].get_or_insert_with(|| shape.beginning(index, prompt));
                choice.finish_reason = Some(finish.name());
            }
        }
    }
    let choices = choices.into_iter().flatten().collect();
    Ok(CompletionBody { head, choices, usage: generation.usage() })
}

/// A streamed answer: echo, text, finish; then usage.
struct CompletionChunks {
    head: Head,
    shape: Shape,
    /// Whether a choice has had its echo.
    begun: Vec<bool>,
}

impl CompletionChunks {
    fn chunk(&self, choice: CompletionChoice) -> String {
        let usage = ChunkUsage::pending(self.shape.params.include_usage);
        json(&CompletionChunk { head: &self.head, choices: vec![choice], usage })
    }

    /// What comes before the first text of a choice, if anything does.
    fn begin(&mut self, index: usize, prompt: usize, chunks: &mut VecDeque<String>) {
        let first = !std::mem::replace(&mut self.begun[index], true);
        if first && (self.shape.echo || self.shape.params.output.return_token_ids) {
            chunks.push_back(self.chunk(self.shape.beginning(index, prompt)));
        }
    }
}

impl Chunks for CompletionChunks {
    fn update(&mut self, generation: &Generation, update: Update, chunks: &mut VecDeque<String>) {
        match update {
            Update::PromptLogprobs { prompt, tokens } => self.shape.prompt_logprobs[prompt] = tokens,
            Update::Delta { index, delta } => {
                let prompt = generation.prompt_of(index);
                self.begin(index, prompt, chunks);
                let with_tokens = self.shape.params.sampling.logprobs.is_some()
                    || self.shape.params.output.return_token_ids;
                if delta.has_text() || with_tokens {
                    let mut choice = CompletionChoice { index, ..Default::default() };
                    self.shape.add(&mut choice, prompt, &delta);
                    chunks.push_back(self.chunk(choice));
                }
            }
            Update::Finished { index, finish } => {
                self.begin(index, generation.prompt_of(index), chunks);
                let finish_reason = Some(finish.name());
                chunks.push_back(self.chunk(CompletionChoice { index, finish_reason, ..Default::default() }));
            }
        }
    }

    fn end(&mut self, generation: &Generation, chunks: &mut VecDeque<String>) {
        if self.shape.params.include_usage {
            let usage = ChunkUsage::Final(generation.usage());
            chunks.push_back(json(&CompletionChunk { head: &self.head, choices: Vec::new(), usage }));
        }
    }
}
