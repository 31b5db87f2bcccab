//! `POST /v1/completions`.

use std::sync::Arc;

use qwill_contract::PromptToken;
use qwill_text::{Markers, Tokenizer};
use serde_json::Value;

use crate::app::App;
use crate::choice::Delta;
use crate::endpoint::{Answer, Endpoint};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Update};
use crate::known;
use crate::logprobs::{CompletionLogprobs, prompt_logprobs};
use crate::params::{Params, parse_token_ids, take_params, take_top_logprobs};
use crate::prompt::{Prompt, fit, prepare};
use crate::sse::Events;
use crate::types::completions::{CompletionBody, CompletionChoice, CompletionChunk};
use crate::types::{ChunkUsage, Head, PromptProgress, Timings};

const PROMPTS_LIMIT: usize = 64;
/// What `OpenAI` documents for a completion that does not say how long it may become.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A prompt as the client gave it.
enum Given {
    Text(String),
    Ids(Vec<u32>),
}

/// A request for continuations, read and checked.
pub(crate) struct CompletionRequest {
    model: String,
    /// Each with its path in the body.
    given: Vec<(String, Given)>,
    /// The text that an echo gives back for each prompt.
    echoes: Vec<String>,
    echo: bool,
    params: Params,
}

impl Endpoint for CompletionRequest {
    const PATH: &'static str = "/v1/completions";
    const ID_PREFIX: &'static str = "cmpl-";
    type Answer = CompletionAnswer;

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
        let given = std::mem::take(&mut self.given);
        let (echoes, prompts) = encode(app, given, &self.params).await?;
        self.echoes = echoes;
        Ok(prompts)
    }

    fn answer(self, app: &Arc<App>, id: String, prompts: Vec<Prompt>) -> CompletionAnswer {
        let Self { model, echoes, echo, params, .. } = self;
        CompletionAnswer {
            head: Head::new(app, id, "text_completion", model),
            tokenizer: Arc::clone(&app.text.tokenizer),
            begun: vec![false; prompts.len() * params.choices],
            prompt_logprobs: vec![Vec::new(); prompts.len()],
            params,
            prompts,
            echoes,
            echo,
            timings: None,
        }
    }
}

fn parse(app: &App, mut fields: Fields) -> Result<CompletionRequest, ApiError> {
    let asked = fields.string("model")?;
    let model = app.check_model(asked)?;
    let given = take_prompts(app, &mut fields)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let mut params = take_params(app, &mut fields)?;
    if params.max_tokens == Some(0) && !echo {
        return Err(ApiError::value(&params.max_tokens_path, "at least 1 without `echo`", &0.into()));
    }
    params.sampling.logprobs = take_top_logprobs(&mut fields, "logprobs")?;
    params.echo_logprobs = params.sampling.logprobs.filter(|_| echo);
    known::settle(app, &fields)?;
    Ok(CompletionRequest { model, given, echoes: Vec::new(), echo, params })
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
        let given_tokens = ids.len();
        let prompt = fit(app, &path, ids, false, params, Some(fallback))?;
        let was_cut = prompt.ids.len() < given_tokens;
        echoes.push(if was_cut { app.text.tokenizer.decode(&prompt.ids, false) } else { text });
        prompts.push(prompt);
    }
    Ok((echoes, prompts))
}

/// Makes the answer: as a stream echo, text, finish; then usage.
pub(crate) struct CompletionAnswer {
    head: Head,
    tokenizer: Arc<Tokenizer>,
    params: Params,
    prompts: Vec<Prompt>,
    echoes: Vec<String>,
    echo: bool,
    prompt_logprobs: Vec<Vec<PromptToken>>,
    /// Whether a choice has had its echo.
    begun: Vec<bool>,
    /// What the next chunk tells of them.
    timings: Option<Timings>,
}

impl CompletionAnswer {
    /// What comes before a choice's generated text: the prompt, if it is to be echoed.
    fn beginning(&self, index: usize, prompt: usize) -> CompletionChoice {
        let ids = &self.prompts[prompt].ids;
        let mut choice = CompletionChoice { index, ..Default::default() };
        if self.echo {
            choice.text.clone_from(&self.echoes[prompt]);
        }
        if let Some(top) = self.params.sampling.logprobs {
            let mut logprobs = CompletionLogprobs::default();
            if self.echo {
                logprobs.add_prompt(&self.tokenizer, ids, top, &self.prompt_logprobs[prompt]);
            }
            choice.logprobs = Some(logprobs);
        }
        if self.params.output.return_token_ids {
            choice.token_ids = Some(Vec::new());
            choice.prompt_token_ids = Some(ids.to_vec());
        }
        if let Some(top) = self.params.prompt_logprobs {
            let found = &self.prompt_logprobs[prompt];
            choice.prompt_logprobs = Some(prompt_logprobs(&self.tokenizer, ids, top, found));
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

    fn chunk(&self, choice: CompletionChoice, events: &mut Events) {
        events.data(&CompletionChunk {
            choices: vec![choice],
            usage: ChunkUsage::pending(self.params.include_usage),
            timings: self.timings,
            ..CompletionChunk::empty(&self.head)
        });
    }

    fn tell_progress(&self, progress: PromptProgress, events: &mut Events) {
        events.data(&CompletionChunk {
            usage: ChunkUsage::pending(self.params.include_usage),
            prompt_progress: Some(progress),
            ..CompletionChunk::empty(&self.head)
        });
    }

    /// What comes before the first text of a choice, if anything does.
    fn begin_choice(&mut self, index: usize, prompt: usize, events: &mut Events) {
        let first = !std::mem::replace(&mut self.begun[index], true);
        if first && (self.echo || self.params.output.return_token_ids) {
            self.chunk(self.beginning(index, prompt), events);
        }
    }
}

impl Answer for CompletionAnswer {
    type Body = CompletionBody;

    fn update(&mut self, generation: &Generation, update: Update, events: &mut Events) {
        self.timings = self.params.extras.timings_with(&update).then(|| generation.timings());
        match update {
            Update::Started { prompt } | Update::Progress { prompt } => {
                if self.params.extras.progress {
                    self.tell_progress(generation.progress(prompt), events);
                }
            }
            Update::PromptLogprobs { prompt, tokens } => self.prompt_logprobs[prompt] = tokens,
            Update::Delta { index, delta } => {
                let prompt = generation.prompt_of(index);
                self.begin_choice(index, prompt, events);
                if delta.has_text() || self.params.tells_tokens() {
                    let mut choice = CompletionChoice { index, ..Default::default() };
                    self.add(&mut choice, prompt, &delta);
                    self.chunk(choice, events);
                }
            }
            Update::Finished { index, finish } => {
                self.begin_choice(index, generation.prompt_of(index), events);
                let finish_reason = Some(finish.name());
                self.chunk(CompletionChoice { index, finish_reason, ..Default::default() }, events);
            }
        }
    }

    fn end(&mut self, generation: &Generation, events: &mut Events) {
        if self.params.include_usage {
            let usage = ChunkUsage::Final(generation.usage());
            events.data(&CompletionChunk { usage, ..CompletionChunk::empty(&self.head) });
        }
        events.done();
    }

    async fn collect(mut self, mut generation: Generation) -> Result<CompletionBody, ApiError> {
        let mut choices: Vec<Option<CompletionChoice>> =
            (0..generation.choice_count()).map(|_| None).collect();
        while let Some(update) = generation.next().await {
            match update? {
                Update::Started { .. } | Update::Progress { .. } => {}
                Update::PromptLogprobs { prompt, tokens } => self.prompt_logprobs[prompt] = tokens,
                Update::Delta { index, delta } => {
                    let prompt = generation.prompt_of(index);
                    let choice = choices[index].get_or_insert_with(|| self.beginning(index, prompt));
                    self.add(choice, prompt, &delta);
                }
                Update::Finished { index, finish } => {
                    let prompt = generation.prompt_of(index);
                    let choice = choices[index].get_or_insert_with(|| self.beginning(index, prompt));
                    choice.finish_reason = Some(finish.name());
                }
            }
        }
        let choices = choices.into_iter().flatten().collect();
        Ok(CompletionBody {
            usage: generation.usage(),
            choices,
            timings: self.params.extras.timings.then(|| generation.timings()),
            head: self.head,
        })
    }
}
