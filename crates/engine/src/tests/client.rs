//! The client's side of an engine, for tests: collects events and checks the order that the contract promises.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, unbounded};
use qwill_contract::{
    CancelFlag, EngineHandle, Event, FinishReason, Load, PromptToken, Request, SamplingParams, SinkClosed,
    SubmitError, TokenOut,
};

pub(crate) fn request(prompt: &[u32], sampling: SamplingParams) -> Request {
    Request {
        id: "test".into(),
        prompt: prompt.into(),
        cache_salt: None,
        priority: 0,
        sampling,
        choices: 1,
        guide: None,
        prompt_logprobs: None,
        cancel: CancelFlag::default(),
        choice_cancel: Vec::new(),
    }
}

/// One choice's text and end.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ChoiceOutcome {
    pub(crate) tokens: Vec<TokenOut>,
    pub(crate) end: Option<FinishReason>,
}

/// All that a client learns of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    pub(crate) started: bool,
    pub(crate) cached_tokens: usize,
    pub(crate) processed_tokens: usize,
    pub(crate) prompt_logprobs: Option<Vec<PromptToken>>,
    pub(crate) choices: Vec<ChoiceOutcome>,
}

/// How much of a prompt others had left in the cache is not compared.
impl PartialEq for Outcome {
    fn eq(&self, other: &Self) -> bool {
        self.same_answer(other)
            && (self.started, self.processed_tokens) == (other.started, other.processed_tokens)
    }
}

impl Outcome {
    pub(crate) fn ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.end.is_some())
    }

    /// Whether the client got the same, slices aside: how often progress was reported is not part of the answer.
    pub(crate) fn same_answer(&self, other: &Self) -> bool {
        self.prompt_logprobs == other.prompt_logprobs && self.choices == other.choices
    }

    pub(crate) fn ids(&self, choice: usize) -> Vec<u32> {
        self.choices[choice].tokens.iter().map(|token| token.id).collect()
    }

    pub(crate) fn failed(&self) -> bool {
        self.choices.iter().any(|choice| {
            matches!(choice.end, Some(FinishReason::Error { .. } | FinishReason::Unsound { .. }))
        })
    }

    /// Takes an event in, checking the order that the contract promises.
    fn take(&mut self, event: Event) {
        match event {
            Event::Started { cached_tokens } => {
                assert!(!self.started);
                self.started = true;
                self.cached_tokens = cached_tokens;
            }
            Event::Progress { processed_tokens } => {
                assert!(self.started && processed_tokens > self.processed_tokens);
                self.processed_tokens = processed_tokens;
            }
            Event::PromptLogprobs(tokens) => {
                assert!(self.choices.iter().all(|choice| choice.tokens.is_empty() && choice.end.is_none()));
                assert!(self.prompt_logprobs.replace(tokens).is_none());
            }
            Event::Tokens { choice, tokens } => {
                assert!(self.started && self.choices[choice].end.is_none() && !tokens.is_empty());
                self.choices[choice].tokens.extend(tokens);
            }
            Event::End { choice, reason } => {
                assert!(self.choices[choice].end.replace(reason).is_none(), "a second end");
            }
        }
    }
}

/// The client's side of a submitted request.
pub(crate) struct Client {
    pub(crate) cancel: CancelFlag,
    events: Receiver<Event>,
    outcome: Outcome,
}

impl Client {
    pub(crate) fn submit(handle: &EngineHandle, request: Request) -> Result<Self, SubmitError> {
        let (sender, events) = unbounded();
        let choices = vec![ChoiceOutcome::default(); request.choices];
        let cancel = request.cancel.clone();
        let sink = move |event| sender.send(event).map_err(|_| SinkClosed);
        handle.submit(request, Box::new(sink))?;
        Ok(Self { cancel, events, outcome: Outcome { choices, ..Outcome::default() } })
    }

    /// What came so far.
    pub(crate) fn look(&mut self) -> &Outcome {
        while let Ok(event) = self.events.try_recv() {
            self.outcome.take(event);
        }
        &self.outcome
    }

    /// What came in the end.
    pub(crate) fn wait(mut self) -> Outcome {
        while !self.outcome.ended() {
            let event = self.events.recv_timeout(Duration::from_secs(30)).expect("every choice ends");
            self.outcome.take(event);
        }
        self.outcome
    }
}

/// Nothing waits, runs or is held.
pub(crate) fn assert_idle(load: &Load) {
    let counters = [&load.waiting, &load.running, &load.pages_used, &load.slots_used];
    assert_eq!(
        counters.map(|counter| counter.load(Ordering::SeqCst)),
        [0; 4],
        "waiting, running, pages, slots"
    );
}
