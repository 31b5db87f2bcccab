//! `POST /v1/chat/completions`.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::body::read_object;
use crate::choice::Delta;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Update};
use crate::known;
use crate::log::Record;
use crate::logprobs::ChatLogprobs;
use crate::messages::{take_messages, take_tools};
use crate::params::{Params, take_params, take_top_logprobs};
use crate::prompt::{Conversation, Prompt, encode_chat, fit, take_template_kwargs};
use crate::random::random_id;
use crate::request_id::RequestId;
use crate::sse::{self, Chunks, json};
use crate::types::chat::{
    ChatBody, ChatChoice, ChatChunk, ChatChunkChoice, Message, MessageDelta, Reasoning,
};
use crate::types::{ChunkUsage, Head, unix_seconds};

/// The handler.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let record = Record::new(&app, "/v1/chat/completions", request_id);
    match answer(&app, &record, &headers, body).await {
        Ok(response) => response,
        Err(error) => {
            record.fail(&error);
            error.into_response()
        }
    }
}

struct ChatRequest {
    model: String,
    conversation: Conversation,
    params: Params,
}

async fn answer(
    app: &Arc<App>,
    record: &Arc<Record>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let fields = read_object(&app.options, headers, body).await?;
    let request = parse(app, Fields::new(fields))?;
    let ChatRequest { model, conversation, params } = request;
    {
        let mut facts = record.facts();
        facts.model.clone_from(&model);
        facts.stream = params.stream;
    }
    app.check_ready()?;
    let (ids, opens_reasoning) = encode_chat(app, conversation).await?;
    let prompt = fit(app, "messages", ids, opens_reasoning, &params, app.options.defaults.max_tokens)?;
    let id = random_id("chatcmpl-");
    let generation =
        Generation::start(app, Arc::clone(record), &id, std::slice::from_ref(&prompt), &params, None)?;
    let object = if params.stream { "chat.completion.chunk" } else { "chat.completion" };
    let system_fingerprint = app.facts().numerics.clone();
    let head = Head { id, object, created: unix_seconds(), model, system_fingerprint };
    let shape = Shape::new(app, params, prompt);
    if shape.params.stream {
        let begun = vec![false; generation.choice_count()];
        Ok(sse::respond(app, generation, ChatChunks { head, shape, begun }))
    } else {
        Ok(Json(collect(generation, head, &shape).await?).into_response())
    }
}

fn parse(app: &App, mut fields: Fields) -> Result<ChatRequest, ApiError> {
    let asked = fields.string("model")?;
    let model = app.check_model(asked)?;
    let messages = take_messages(app, &mut fields)?;
    let tools = take_tools(&mut fields)?;
    let kwargs = take_template_kwargs(app, &mut fields)?;
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    let mut params = take_params(app, &mut fields)?;
    if params.max_tokens == Some(0) {
        return Err(ApiError::value("max_tokens", "at least 1 in a chat", &0.into()));
    }
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = take_top_logprobs(&mut fields, "top_logprobs")?;
    if !wanted && top.is_some_and(|count| count > 0) {
        let message = "`top_logprobs` needs `logprobs`: true";
        return Err(ApiError::field("top_logprobs", message).with_code("invalid_value"));
    }
    params.sampling.logprobs = wanted.then(|| top.unwrap_or(0));
    if fields.boolean("echo")?.unwrap_or(false) {
        let message = "`echo` is for /v1/completions: leave it out, got true";
        return Err(ApiError::field("echo", message).with_code("unsupported_parameter"));
    }
    known::settle(app, &fields)?;
    let conversation = Conversation { messages, tools, add_generation_prompt, kwargs };
    Ok(ChatRequest { model, conversation, params })
}

/// What an answer is made with.
struct Shape {
    app: Arc<App>,
    params: Params,
    prompt: Prompt,
}

impl Shape {
    fn new(app: &Arc<App>, params: Params, prompt: Prompt) -> Self {
        Self { app: Arc::clone(app), params, prompt }
    }

    fn logprobs(&self, delta: &Delta) -> Option<ChatLogprobs> {
        let asked = self.params.sampling.logprobs.is_some();
        asked.then(|| ChatLogprobs::new(&self.app.text.tokenizer, &delta.tokens))
    }

    fn token_ids(&self, delta: &Delta) -> Option<Vec<u32>> {
        let asked = self.params.output.return_token_ids;
        asked.then(|| delta.tokens.iter().map(|token| token.id).collect())
    }
}

async fn collect(mut generation: Generation, head: Head, shape: &Shape) -> Result<ChatBody, ApiError> {
    let mut answers: Vec<(Delta, Option<&'static str>)> =
        (0..generation.choice_count()).map(|_| (Delta::default(), None)).collect();
    while let Some(update) = generation.next().await {
        match update? {
            Update::PromptLogprobs { .. } => {}
            Update::Delta { index, delta } => answers[index].0.append(delta),
            Update::Finished { index, finish } => answers[index].1 = Some(finish.name()),
        }
    }
    let choice = |(index, (delta, finish_reason)): (usize, (Delta, Option<&'static str>))| ChatChoice {
        index,
        logprobs: shape.logprobs(&delta),
        token_ids: shape.token_ids(&delta),
        message: Message {
            role: "assistant",
            content: delta.content,
            reasoning: Reasoning::new(delta.reasoning),
        },
        finish_reason,
    };
    let prompt_token_ids = shape.params.output.return_token_ids.then(|| shape.prompt.ids.to_vec());
    Ok(ChatBody {
        head,
        choices: answers.into_iter().enumerate().map(choice).collect(),
        usage: generation.usage(),
        prompt_token_ids,
    })
}

/// A streamed answer: role, thinking, content, finish; then usage.
struct ChatChunks {
    head: Head,
    shape: Shape,
    /// Whether a choice has had its role.
    begun: Vec<bool>,
}

impl ChatChunks {
    fn chunk(&self, choice: ChatChunkChoice, first: bool) -> String {
        let with_ids = first && self.shape.params.output.return_token_ids;
        json(&ChatChunk {
            head: &self.head,
            choices: vec![choice],
            usage: ChunkUsage::pending(self.shape.params.include_usage),
            prompt_token_ids: with_ids.then_some(&self.shape.prompt.ids),
        })
    }

    fn begin(&mut self, index: usize, chunks: &mut VecDeque<String>) {
        if !std::mem::replace(&mut self.begun[index], true) {
            let delta =
                MessageDelta { role: Some("assistant"), content: Some(String::new()), reasoning: None };
            chunks.push_back(self.chunk(ChatChunkChoice { index, delta, ..Default::default() }, true));
        }
    }

    /// Thinking and content go into chunks of their own; tokens go with the last.
    fn tell(&self, index: usize, mut delta: Delta, chunks: &mut VecDeque<String>) {
        let reasoning = Reasoning::new(std::mem::take(&mut delta.reasoning));
        let content = std::mem::take(&mut delta.content);
        let split = reasoning.is_some() && !content.is_empty();
        let mut choice = ChatChunkChoice {
            index,
            logprobs: self.shape.logprobs(&delta),
            token_ids: self.shape.token_ids(&delta),
            ..Default::default()
        };
        if split {
            let delta = MessageDelta { reasoning, ..Default::default() };
            chunks.push_back(self.chunk(ChatChunkChoice { index, delta, ..Default::default() }, false));
        } else {
            choice.delta.reasoning = reasoning;
        }
        if choice.delta.reasoning.is_none() {
            choice.delta.content = Some(content);
        }
        chunks.push_back(self.chunk(choice, false));
    }
}

impl Chunks for ChatChunks {
    fn update(&mut self, _generation: &Generation, update: Update, chunks: &mut VecDeque<String>) {
        match update {
            Update::PromptLogprobs { .. } => {}
            Update::Delta { index, delta } => {
                self.begin(index, chunks);
                let with_tokens = self.shape.params.sampling.logprobs.is_some()
                    || self.shape.params.output.return_token_ids;
                if delta.has_text() || with_tokens {
                    self.tell(index, delta, chunks);
                }
            }
            Update::Finished { index, finish } => {
                self.begin(index, chunks);
                let finish_reason = Some(finish.name());
                chunks.push_back(
                    self.chunk(ChatChunkChoice { index, finish_reason, ..Default::default() }, false),
                );
            }
        }
    }

    fn end(&mut self, generation: &Generation, chunks: &mut VecDeque<String>) {
        if self.shape.params.include_usage {
            let usage = ChunkUsage::Final(generation.usage());
            let last = ChatChunk { head: &self.head, choices: Vec::new(), usage, prompt_token_ids: None };
            chunks.push_back(json(&last));
        }
    }
}
