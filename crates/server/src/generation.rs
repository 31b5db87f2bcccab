//! Drives the engine requests of one HTTP request and turns their events into pieces of answers. All endpoints,
//! streaming or not, read the same updates: a streamed text is the text.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::http::StatusCode;
use qwill_contract::{CancelFlag, Event, FinishReason, PromptToken, Request, SamplingParams, SinkClosed};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::app::App;
use crate::choice::{Choice, Delta, Finish};
use crate::error::ApiError;
use crate::log::Record;
use crate::params::Params;
use crate::prompt::Prompt;
use crate::random::random_u64;
use crate::types::{CompletionDetails, PromptDetails, Usage};

/// News of a generation. `index` counts the choices of all prompts: prompt by prompt, `n` each.
#[derive(Debug, PartialEq)]
pub(crate) enum Update {
    /// Once for each prompt that asked, before its first text.
    PromptLogprobs { prompt: usize, tokens: Vec<PromptToken> },
    /// Text or tokens of a choice.
    Delta { index: usize, delta: Delta },
    /// The choice is over.
    Finished { index: usize, finish: Finish },
}

/// Running engine requests. Dropping it cancels what still runs.
pub(crate) struct Generation {
    /// Events with the number of their prompt. What may pile up here is bounded by the requests' `max_tokens`.
    events: UnboundedReceiver<(usize, Event)>,
    requests: Vec<EngineRequest>,
    choices: Vec<ChoiceState>,
    choices_per_prompt: usize,
    updates: VecDeque<Update>,
    aborted: watch::Receiver<bool>,
    record: Arc<Record>,
    cached_tokens: usize,
    prompt_tokens: usize,
}

struct EngineRequest {
    cancel: CancelFlag,
    /// By choice.
    choice_cancel: Vec<CancelFlag>,
    /// Choices that are not finished.
    open_choices: usize,
}

struct ChoiceState {
    choice: Choice,
    /// Tokens that brought no text yet.
    held: Delta,
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel_open();
    }
}

impl Generation {
    /// Submits one engine request for each prompt; when one is not taken, none runs. `id` names them in the engine.
    pub(crate) fn start(
        app: &App,
        record: Arc<Record>,
        id: &str,
        prompts: &[Prompt],
        params: &Params,
    ) -> Result<Self, ApiError> {
        app.check_ready()?;
        let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        record.admit(prompt_tokens)?;
        let (sender, events) = unbounded_channel();
        let mut generation = Self {
            events,
            requests: Vec::with_capacity(prompts.len()),
            choices: choices(app, prompts, params),
            choices_per_prompt: params.choices,
            updates: VecDeque::new(),
            aborted: app.aborted(),
            record,
            cached_tokens: 0,
            prompt_tokens,
        };
        for (index, prompt) in prompts.iter().enumerate() {
            let cancel = CancelFlag::default();
            let choice_cancel: Vec<_> = (0..params.choices).map(|_| CancelFlag::default()).collect();
            let request = Request {
                id: format!("{id}-{index}"),
                prompt: Arc::clone(&prompt.ids),
                cache_salt: params.cache_salt.clone(),
                priority: params.priority,
                sampling: SamplingParams {
                    max_tokens: prompt.max_tokens,
                    seed: params.seed.unwrap_or_else(random_u64),
                    ..params.sampling.clone()
                },
                choices: params.choices,
                guide: None,
                prompt_logprobs: params.prompt_logprobs,
                cancel: cancel.clone(),
                choice_cancel: choice_cancel.clone(),
            };
            app.engine.submit(request, Box::new(sink(sender.clone(), index)))?;
            generation.requests.push(EngineRequest { cancel, choice_cancel, open_choices: params.choices });
        }
        Ok(generation)
    }

    /// The next piece of news; `None` when all choices are finished. After an error nothing more follows.
    pub(crate) async fn next(&mut self) -> Option<Result<Update, ApiError>> {
        loop {
            if let Some(update) = self.updates.pop_front() {
                return Some(Ok(update));
            }
            if self.requests.iter().all(|request| request.open_choices == 0) {
                self.note_finish();
                return None;
            }
            if let Err(error) = self.wait_for_event().await {
                return Some(Err(self.fail(error)));
            }
        }
    }

    async fn wait_for_event(&mut self) -> Result<(), ApiError> {
        let event = tokio::select! {
            event = self.events.recv() => event,
            _ = self.aborted.wait_for(|aborted| *aborted) => return Err(ApiError::draining()),
        };
        match event {
            Some((prompt, event)) => self.take_event(prompt, event),
            None => Err(ApiError::internal("the engine ended before the answer was complete")),
        }
    }

    pub(crate) fn usage(&self) -> Usage {
        let count = |tokens: fn(&Choice) -> usize| -> usize {
            self.choices.iter().map(|state| tokens(&state.choice)).sum()
        };
        let completion_tokens = count(|choice| choice.generated_tokens);
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens,
            total_tokens: self.prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: self.cached_tokens },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: count(|choice| choice.reasoning_tokens),
            },
        }
    }

    pub(crate) fn choice_count(&self) -> usize {
        self.choices.len()
    }

    /// The prompt that a choice continues.
    pub(crate) fn prompt_of(&self, index: usize) -> usize {
        index / self.choices_per_prompt
    }

    fn take_event(&mut self, prompt: usize, event: Event) -> Result<(), ApiError> {
        match event {
            Event::Started { cached_tokens } => {
                self.cached_tokens += cached_tokens;
                self.record.note_started(cached_tokens);
            }
            Event::Progress { .. } => {}
            Event::PromptLogprobs(tokens) => {
                self.updates.push_back(Update::PromptLogprobs { prompt, tokens });
            }
            Event::Tokens { choice, tokens } => {
                let index = self.index_of(prompt, choice)?;
                if self.choices[index].choice.finish.is_none() {
                    let delta = self.choices[index].choice.push(tokens);
                    self.record.note_tokens(delta.tokens.len());
                    self.advance(index, delta);
                }
            }
            Event::End { choice, reason } => {
                let index = self.index_of(prompt, choice)?;
                if self.choices[index].choice.finish.is_none() {
                    let delta = self.choices[index].choice.end(finish_of(reason)?);
                    self.advance(index, delta);
                }
            }
        }
        Ok(())
    }

    /// Queues what a delta brings, and the end if that was it.
    fn advance(&mut self, index: usize, delta: Delta) {
        let (prompt, choice) = (self.prompt_of(index), index % self.choices_per_prompt);
        let state = &mut self.choices[index];
        state.held.append(delta);
        let finish = state.choice.finish;
        let worth_telling = state.held.has_text() || (finish.is_some() && !state.held.tokens.is_empty());
        if worth_telling {
            let delta = std::mem::take(&mut state.held);
            self.updates.push_back(Update::Delta { index, delta });
        }
        if let Some(finish) = finish {
            self.updates.push_back(Update::Finished { index, finish });
            let request = &mut self.requests[prompt];
            request.open_choices -= 1;
            // After a stop string the engine would go on.
            request.choice_cancel[choice].cancel();
        }
    }

    fn index_of(&self, prompt: usize, choice: usize) -> Result<usize, ApiError> {
        if choice < self.choices_per_prompt {
            Ok(prompt * self.choices_per_prompt + choice)
        } else {
            Err(ApiError::internal(format!(
                "the engine answered with a choice {choice} that nobody asked for"
            )))
        }
    }

    fn note_finish(&self) {
        let is_length = |state: &ChoiceState| state.choice.finish == Some(Finish::Length);
        let finish = if self.choices.iter().any(is_length) { Finish::Length } else { Finish::Stop };
        let mut facts = self.record.facts();
        facts.finish = Some(finish.name());
        facts.status = Some(StatusCode::OK);
    }

    fn fail(&mut self, error: ApiError) -> ApiError {
        self.record.fail(&error);
        self.cancel_open();
        for request in &mut self.requests {
            request.open_choices = 0;
        }
        error
    }

    fn cancel_open(&self) {
        for request in self.requests.iter().filter(|request| request.open_choices > 0) {
            request.cancel.cancel();
        }
    }
}

fn choices(app: &App, prompts: &[Prompt], params: &Params) -> Vec<ChoiceState> {
    let sampling = &params.sampling;
    let end_of_turn = app.facts().eos_token_ids.iter().filter(|_| !sampling.ignore_eos);
    let ending_tokens: Arc<[u32]> = sampling.stop_token_ids.iter().chain(end_of_turn).copied().collect();
    let new = |prompt: &Prompt| ChoiceState {
        choice: Choice::new(
            &app.text.tokenizer,
            &params.output,
            Arc::clone(&ending_tokens),
            prompt.opens_reasoning,
        ),
        held: Delta::default(),
    };
    prompts.iter().flat_map(|prompt| (0..params.choices).map(move |_| new(prompt))).collect()
}

fn sink(
    sender: UnboundedSender<(usize, Event)>,
    prompt: usize,
) -> impl FnMut(Event) -> Result<(), SinkClosed> + Send {
    move |event| sender.send((prompt, event)).map_err(|_| SinkClosed)
}

fn finish_of(reason: FinishReason) -> Result<Finish, ApiError> {
    match reason {
        FinishReason::Stop { .. } => Ok(Finish::Stop),
        FinishReason::Length => Ok(Finish::Length),
        FinishReason::Cancelled => {
            let message = "the engine gave the request up";
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("cancelled").retry())
        }
        FinishReason::Guide { message } => Err(ApiError::internal(message).with_code("constraint_failed")),
        FinishReason::Error { message } => Err(ApiError::internal(message).with_code("engine_error")),
    }
}
