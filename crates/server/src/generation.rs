//! Drives the engine requests of one HTTP request and turns their events into pieces of answers. All endpoints,
//! streaming or not, read the same updates: a streamed text is the text.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use qwill_contract::{
    CancelFlag, Event, FinishReason, PromptToken, Request, SamplingParams, SinkClosed, SubmitError,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::app::{App, Ending};
use crate::choice::{CallRules, Choice, Delta, Finish};
use crate::error::{ApiError, whole_seconds};
use crate::form::Guides;
use crate::live::{LivePrompt, LiveRequest, Registration};
use crate::log::Record;
use crate::params::Params;
use crate::prompt::Prompt;
use crate::random::random_u64;
use crate::time_limits::{Over, TimeLimits};
use crate::types::{CompletionDetails, PromptDetails, PromptProgress, Timings, Usage};

/// News of a generation. `index` counts the choices of all prompts: prompt by prompt, `n` each.
#[derive(Debug, PartialEq)]
pub(crate) enum Update {
    /// Once for each prompt: the engine begins with it.
    Started { prompt: usize },
    /// More of a prompt is processed.
    Progress { prompt: usize },
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
    ending: watch::Receiver<Option<Ending>>,
    live: Registration,
    limits: TimeLimits,
    /// The time was over before the answer was.
    timed_out: bool,
    app: Arc<App>,
    record: Arc<Record>,
    cached_tokens: usize,
    prompt_tokens: usize,
}

struct EngineRequest {
    cached_tokens: usize,
    processed_tokens: usize,
    cancel: CancelFlag,
    /// By choice.
    choice_cancel: Vec<CancelFlag>,
    /// Choices that are not finished.
    open_choices: usize,
    prompt_tokens: usize,
    started: bool,
}

struct ChoiceState {
    choice: Choice,
    /// Tokens that brought no text yet.
    held: Delta,
    /// All of its text, where that is logged.
    said: Option<String>,
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel_open();
    }
}

impl Generation {
    /// Submits one engine request for each prompt; when one is not taken, none runs. `id` names them in the engine.
    pub(crate) fn start(
        app: &Arc<App>,
        record: Arc<Record>,
        id: &str,
        prompts: &[Prompt],
        params: &Params,
        guides: &Guides,
    ) -> Result<Self, ApiError> {
        app.check_ready()?;
        let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        record.admit(prompt_tokens)?;
        log_prompts(app, id, prompts);
        let (sender, events) = unbounded_channel();
        let live_prompts: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                LivePrompt::new(prompt.ids.len(), prompt.max_tokens, params.choices, record.started)
            })
            .collect();
        let Record { origin, endpoint, started, .. } = &*record;
        let (stream, priority) = (params.stream, params.priority);
        let live = LiveRequest::new(id, origin, endpoint, stream, priority, live_prompts.clone());
        let most = [params.max_time, app.options.request_timeout].into_iter().flatten().min();
        let limits = TimeLimits::new(*started, most, app.options.queue_timeout);
        let mut generation = Self {
            events,
            requests: Vec::with_capacity(prompts.len()),
            choices: choices(app, prompts, params),
            choices_per_prompt: params.choices,
            updates: VecDeque::new(),
            ending: app.ending(),
            live: app.live.register(live),
            limits,
            timed_out: false,
            app: Arc::clone(app),
            record,
            cached_tokens: 0,
            prompt_tokens,
        };
        for (index, (prompt, live)) in prompts.iter().zip(live_prompts).enumerate() {
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
                guide: guides.guide(prompt),
                prompt_logprobs: params.prompt_logprobs.max(params.echo_logprobs),
                cancel: cancel.clone(),
                choice_cancel: choice_cancel.clone(),
            };
            let sink = sink(sender.clone(), index, live);
            app.engine.submit(request, Box::new(sink)).map_err(|error| refusal(app, error))?;
            generation.requests.push(EngineRequest {
                cancel,
                choice_cancel,
                open_choices: params.choices,
                prompt_tokens: prompt.ids.len(),
                cached_tokens: 0,
                processed_tokens: 0,
                started: false,
            });
        }
        generation.record.facts().submitted = true;
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
        let Self { events, ending, live, limits, .. } = self;
        tokio::select! {
            event = events.recv() => match event {
                Some((prompt, event)) => self.take_event(prompt, event),
                None => Err(ApiError::internal("the engine ended before the answer was complete")),
            },
            error = ended(ending) => Err(error),
            error = aborted(live.request()) => Err(error),
            over = limits.over() => self.time_is_over(over),
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

    /// How far a prompt is processed.
    pub(crate) fn progress(&self, prompt: usize) -> PromptProgress {
        let request = &self.requests[prompt];
        PromptProgress {
            total: request.prompt_tokens,
            cache: request.cached_tokens,
            processed: request.processed_tokens,
            time_ms: self.record.running_ms(),
        }
    }

    /// How long the answer has taken so far.
    pub(crate) fn timings(&self) -> Timings {
        self.record.timings()
    }

    /// The stop string that ended a choice.
    pub(crate) fn matched_stop(&self, index: usize) -> Option<&str> {
        self.choices.get(index)?.choice.matched_stop.as_deref()
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
                let request = &mut self.requests[prompt];
                request.started = true;
                request.cached_tokens = cached_tokens;
                request.processed_tokens = cached_tokens;
                self.record.note_started(request.prompt_tokens, cached_tokens);
                if self.requests.iter().all(|request| request.started) {
                    self.limits.waited();
                }
                let waiting = self.app.engine.load().waiting.load(Ordering::Relaxed);
                self.app.queue_pace.note_start(Instant::now(), waiting);
                self.updates.push_back(Update::Started { prompt });
            }
            Event::Progress { processed_tokens } => {
                self.requests[prompt].processed_tokens = processed_tokens;
                self.updates.push_back(Update::Progress { prompt });
            }
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
        if let Some(said) = &mut state.said {
            said.push_str(&delta.reasoning);
            said.push_str(&delta.content);
            for call in &delta.tool_calls {
                said.push_str(call.begin.as_ref().map_or("", |begin| begin.name.as_str()));
                said.push_str(&call.arguments);
            }
        }
        state.held.append(delta);
        let finish = state.choice.finish;
        let worth_telling = state.held.has_text() || (finish.is_some() && !state.held.tokens.is_empty());
        if worth_telling {
            let delta = std::mem::take(&mut state.held);
            self.updates.push_back(Update::Delta { index, delta });
        }
        if let Some(finish) = finish {
            if let Some(said) = state.said.take() {
                let id = &self.record.origin.request_id;
                tracing::info!(id, choice = index, text = said, "answer");
            }
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

    /// An answer that has begun ends where it is; one that has not is an error.
    fn time_is_over(&mut self, over: Over) -> Result<(), ApiError> {
        let begun = self.choices.iter().any(|state| state.choice.generated_tokens > 0);
        let limit = match over {
            Over::Queue(limit) => return Err(queue_timeout(&self.app, limit)),
            Over::Whole(limit) if !begun => limit,
            Over::Whole(_) => {
                self.timed_out = true;
                for index in 0..self.choices.len() {
                    let choice = &mut self.choices[index].choice;
                    if choice.finish.is_none() {
                        let delta = choice.end(Finish::Length);
                        self.advance(index, delta);
                    }
                }
                return Ok(());
            }
        };
        let waiting = self.requests.iter().any(|request| !request.started);
        let at = if waiting { "while it waited" } else { "while its prompt was processed" };
        let message = format!("the request's time of {} s was over {at}", limit.as_secs_f64());
        Err(ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).with_code("timeout"))
    }

    fn note_finish(&self) {
        let any = |finish| self.choices.iter().any(|state| state.choice.finish == Some(finish));
        let finish = [Finish::Length, Finish::ToolCalls].into_iter().find(|&finish| any(finish));
        let finish = finish.unwrap_or(Finish::Stop);
        let mut facts = self.record.facts();
        facts.finish = Some(if self.timed_out { "timeout" } else { finish.name() });
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
    let calls = CallRules::new(&params.tools);
    let new = |prompt: &Prompt| ChoiceState {
        choice: Choice::new(
            &app.text.tokenizer,
            &params.output,
            Arc::clone(&ending_tokens),
            calls.clone(),
            prompt,
        ),
        held: Delta::default(),
        said: app.options.log_prompts.then(String::new),
    };
    prompts.iter().flat_map(|prompt| (0..params.choices).map(move |_| new(prompt))).collect()
}

fn sink(
    sender: UnboundedSender<(usize, Event)>,
    prompt: usize,
    live: Arc<LivePrompt>,
) -> impl FnMut(Event) -> Result<(), SinkClosed> + Send {
    move |event| {
        live.note(&event);
        sender.send((prompt, event)).map_err(|_| SinkClosed)
    }
}

/// Only where somebody has asked for it.
fn log_prompts(app: &App, id: &str, prompts: &[Prompt]) {
    if app.options.log_prompts {
        for (index, prompt) in prompts.iter().enumerate() {
            let text = app.text.tokenizer.decode(&prompt.ids, false);
            tracing::info!(id = format!("{id}-{index}"), text, "prompt");
        }
    }
}

/// Why the engine takes no request, and when to come back.
fn refusal(app: &App, error: SubmitError) -> ApiError {
    let full = matches!(error, SubmitError::QueueFull { .. });
    let mut refusal = ApiError::from(error);
    if full {
        let wait = app.queue_pace.promise(Instant::now());
        let running = app.engine.load().running.load(Ordering::Relaxed);
        refusal.message = format!(
            "{}: {running} are running, a place should be free in {} s",
            refusal.message,
            whole_seconds(wait)
        );
        refusal.retry_after = Some(wait);
    }
    refusal
}

fn queue_timeout(app: &App, limit: Duration) -> ApiError {
    let seconds = limit.as_secs_f64();
    let message =
        format!("the server is busy: the request has waited for {seconds} s, the longest that one may");
    let mut error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("queue_timeout");
    error.retry_after = Some(app.queue_pace.promise(Instant::now()));
    error
}

/// Waits until everything has to end, and says why.
async fn ended(ending: &mut watch::Receiver<Option<Ending>>) -> ApiError {
    match ending.wait_for(Option::is_some).await.as_deref() {
        Ok(Some(ending)) => ending.error(),
        _ => Ending::Draining.error(),
    }
}

/// Waits until somebody wants the request to end.
async fn aborted(live: &LiveRequest) -> ApiError {
    let message = format!("the request was aborted by {}", live.aborted().await);
    ApiError::new(StatusCode::CONFLICT, message).with_code("aborted")
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
        FinishReason::Unsound { message } => Err(ApiError::internal(message).with_code("logits_not_numbers")),
        FinishReason::Error { message } => Err(ApiError::internal(message).with_code("engine_error")),
    }
}
