//! `POST /v1/chat/completions`.

use std::sync::Arc;

use crate::app::App;
use crate::choice::{Delta, Finish};
use crate::endpoint::{Answer, Endpoint};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Update};
use crate::known;
use crate::logprobs::{ChatLogprobs, PromptLogprobs, prompt_logprobs};
use crate::messages::take_messages;
use crate::params::{Params, take_params, take_top_logprobs};
use crate::prompt::{Conversation, Prompt, prepare_chat, take_ending, take_template_kwargs};
use crate::render::Converses;
use crate::sse::Events;
use crate::tools::take_tools;
use crate::types::chat::{
    ChatBody, ChatChoice, ChatChunk, ChatChunkChoice, Message, MessageDelta, Reasoning, ToolCall,
};
use crate::types::{ChunkUsage, Head, PromptProgress, Timings};

/// A chat, read and checked.
pub(crate) struct ChatRequest {
    model: String,
    conversation: Conversation,
    params: Params,
}

impl Endpoint for ChatRequest {
    const PATH: &'static str = "/v1/chat/completions";
    const ID_PREFIX: &'static str = "chatcmpl-";
    type Answer = ChatAnswer;

    fn parse(app: &Arc<App>, _caller: &str, fields: Fields) -> Result<Self, ApiError> {
        parse(app, fields)
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn params(&self) -> &Params {
        &self.params
    }

    async fn prompts(&mut self, app: &Arc<App>) -> Result<Vec<Prompt>, ApiError> {
        prepare_chat(app, "messages", std::mem::take(&mut self.conversation), &self.params).await
    }

    fn answer(self, app: &Arc<App>, id: String, prompts: Vec<Prompt>) -> ChatAnswer {
        let Self { model, params, .. } = self;
        let object = if params.stream { "chat.completion.chunk" } else { "chat.completion" };
        let head = Head::new(app, id, object, model);
        ChatAnswer {
            head,
            app: Arc::clone(app),
            begun: vec![false; params.choices],
            params,
            prompts,
            prompt_logprobs: None,
            timings: None,
        }
    }
}

impl Converses for ChatRequest {
    fn into_conversation(self) -> Conversation {
        self.conversation
    }
}

fn parse(app: &App, mut fields: Fields) -> Result<ChatRequest, ApiError> {
    let asked = fields.string("model")?;
    let model = app.check_model(asked)?;
    let messages = take_messages(app, &mut fields)?;
    let tools = take_tools(&mut fields)?;
    take_reasoning_settings(app, &mut fields)?;
    let kwargs = take_template_kwargs(app, &mut fields)?;
    let ending = take_ending(&mut fields, &messages)?;
    let mut params = take_params(app, &mut fields)?;
    if params.max_tokens == Some(0) {
        return Err(ApiError::value(&params.max_tokens_path, "at least 1 in a chat", &0.into()));
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
    let conversation = Conversation { messages, tools: tools.definitions(), ending, kwargs };
    params.tools = Arc::new(tools);
    Ok(ChatRequest { model, conversation, params })
}

/// `reasoning`, an object in which some clients put all there is to say about thinking.
fn take_reasoning_settings(app: &App, fields: &mut Fields) -> Result<(), ApiError> {
    let Some(value) = fields.take("reasoning") else { return Ok(()) };
    let mut reasoning = Fields::nested("reasoning", value)?;
    for (theirs, ours) in [
        ("effort", "reasoning_effort"),
        ("enabled", "enable_thinking"),
        ("max_tokens", "thinking_token_budget"),
    ] {
        if let Some(value) = reasoning.take(theirs) {
            fields.put(ours, reasoning.path(theirs), value);
        }
    }
    if let Some(exclude) = reasoning.boolean("exclude")? {
        fields.put("include_reasoning", "reasoning.exclude".into(), (!exclude).into());
    }
    known::settle(app, &reasoning)
}

/// Makes the answer: as a stream role, thinking, content, finish; then usage.
pub(crate) struct ChatAnswer {
    app: Arc<App>,
    head: Head,
    params: Params,
    /// One.
    prompts: Vec<Prompt>,
    /// Whether a choice has had its role.
    begun: Vec<bool>,
    prompt_logprobs: Option<PromptLogprobs>,
    /// What the next chunk tells of them.
    timings: Option<Timings>,
}

impl ChatAnswer {
    fn logprobs(&self, delta: &Delta) -> Option<ChatLogprobs> {
        let asked = self.params.sampling.logprobs.is_some();
        asked.then(|| ChatLogprobs::new(&self.app.text.tokenizer, &delta.tokens))
    }

    fn token_ids(&self, delta: &Delta) -> Option<Vec<u32>> {
        let asked = self.params.output.return_token_ids;
        asked.then(|| delta.tokens.iter().map(|token| token.id).collect())
    }

    fn prompt_token_ids(&self) -> Option<Vec<u32>> {
        let asked = self.params.output.return_token_ids;
        asked.then(|| self.prompts.iter().flat_map(|prompt| prompt.ids.iter().copied()).collect())
    }

    fn choice(&self, index: usize, delta: Delta, finish_reason: Option<&'static str>) -> ChatChoice {
        let logprobs = self.logprobs(&delta);
        let token_ids = self.token_ids(&delta);
        let only_calls = delta.content.is_empty() && !delta.tool_calls.is_empty();
        let calls = delta.tool_calls.into_iter().map(ToolCall::from);
        let (tool_calls, function_call) = if self.params.tools.legacy {
            (Vec::new(), calls.map(|call| call.function).next())
        } else {
            (calls.collect(), None)
        };
        let message = Message {
            role: "assistant",
            content: (!only_calls).then_some(delta.content),
            reasoning: Reasoning::new(delta.reasoning),
            tool_calls,
            function_call,
        };
        ChatChoice { index, message, logprobs, finish_reason, token_ids }
    }

    fn finish_name(&self, finish: Finish) -> &'static str {
        match finish {
            Finish::ToolCalls if self.params.tools.legacy => "function_call",
            other => other.name(),
        }
    }

    fn chunk(&self, choice: ChatChunkChoice, prompt_token_ids: Option<Vec<u32>>, events: &mut Events) {
        events.data(&ChatChunk {
            choices: vec![choice],
            usage: ChunkUsage::pending(self.params.include_usage),
            prompt_token_ids,
            timings: self.timings,
            ..ChatChunk::empty(&self.head)
        });
    }

    fn tell_progress(&self, progress: PromptProgress, events: &mut Events) {
        events.data(&ChatChunk {
            usage: ChunkUsage::pending(self.params.include_usage),
            prompt_progress: Some(progress),
            ..ChatChunk::empty(&self.head)
        });
    }

    fn begin_choice(&mut self, index: usize, events: &mut Events) {
        if !std::mem::replace(&mut self.begun[index], true) {
            let delta = MessageDelta { role: Some("assistant"), ..MessageDelta::content(String::new()) };
            let choice = ChatChunkChoice { index, delta, ..Default::default() };
            self.chunk(choice, self.prompt_token_ids(), events);
        }
    }

    /// Thinking, content and each call go into chunks of their own; tokens go with the last.
    fn tell(&self, index: usize, delta: Delta, events: &mut Events) {
        let last = ChatChunkChoice {
            index,
            logprobs: self.logprobs(&delta),
            token_ids: self.token_ids(&delta),
            ..Default::default()
        };
        let mut parts = self.parts(delta);
        let delta = parts.pop().unwrap_or_else(|| MessageDelta::content(String::new()));
        for delta in parts {
            self.chunk(ChatChunkChoice { index, delta, ..Default::default() }, None, events);
        }
        self.chunk(ChatChunkChoice { delta, ..last }, None, events);
    }

    fn parts(&self, delta: Delta) -> Vec<MessageDelta> {
        let mut parts = Vec::new();
        let reasoning = Reasoning::new(delta.reasoning);
        if reasoning.is_some() {
            parts.push(MessageDelta { reasoning, ..Default::default() });
        }
        if !delta.content.is_empty() {
            parts.push(MessageDelta::content(delta.content));
        }
        let legacy = self.params.tools.legacy;
        parts.extend(delta.tool_calls.into_iter().map(|call| MessageDelta::call(call, legacy)));
        parts
    }
}

impl Answer for ChatAnswer {
    type Body = ChatBody;

    fn update(&mut self, generation: &Generation, update: Update, events: &mut Events) {
        self.timings = self.params.extras.timings_with(&update).then(|| generation.timings());
        match update {
            Update::Started { prompt } | Update::Progress { prompt } => {
                if self.params.extras.progress {
                    self.tell_progress(generation.progress(prompt), events);
                }
            }
            Update::PromptLogprobs { .. } => {}
            Update::Delta { index, delta } => {
                self.begin_choice(index, events);
                if delta.has_text() || self.params.tells_tokens() {
                    self.tell(index, delta, events);
                }
            }
            Update::Finished { index, finish } => {
                self.begin_choice(index, events);
                let finish_reason = Some(self.finish_name(finish));
                self.chunk(ChatChunkChoice { index, finish_reason, ..Default::default() }, None, events);
            }
        }
    }

    fn end(&mut self, generation: &Generation, events: &mut Events) {
        if self.params.include_usage {
            let usage = ChunkUsage::Final(generation.usage());
            events.data(&ChatChunk { usage, ..ChatChunk::empty(&self.head) });
        }
        events.done();
    }

    async fn collect(mut self, mut generation: Generation) -> Result<ChatBody, ApiError> {
        let mut answers: Vec<(Delta, Option<&'static str>)> =
            (0..generation.choice_count()).map(|_| (Delta::default(), None)).collect();
        while let Some(update) = generation.next().await {
            match update? {
                Update::Started { .. } | Update::Progress { .. } => {}
                Update::PromptLogprobs { prompt, tokens } => {
                    let tokenizer = &self.app.text.tokenizer;
                    let told = |top| prompt_logprobs(tokenizer, &self.prompts[prompt].ids, top, &tokens);
                    self.prompt_logprobs = self.params.prompt_logprobs.map(told);
                }
                Update::Delta { index, delta } => answers[index].0.append(delta),
                Update::Finished { index, finish } => answers[index].1 = Some(self.finish_name(finish)),
            }
        }
        let choice = |(index, (delta, finish))| self.choice(index, delta, finish);
        let choices = answers.into_iter().enumerate().map(choice).collect();
        let prompt_token_ids = self.prompt_token_ids();
        Ok(ChatBody {
            choices,
            usage: generation.usage(),
            prompt_token_ids,
            prompt_logprobs: self.prompt_logprobs,
            timings: self.params.extras.timings.then(|| generation.timings()),
            head: self.head,
        })
    }
}
