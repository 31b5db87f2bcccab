//! An engine that says what a test tells it to.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use qwill_contract::{
    EngineFacts, EngineHandle, EngineInbox, EngineState, Event, FinishReason, Request, Submission,
    TokenLogprobs, TokenOut, engine_channel,
};

pub(crate) const VOCAB: usize = 8192;
pub(crate) const END_OF_TURN: u32 = 8168;
pub(crate) const CACHED_TOKENS: usize = 2;
/// Nothing here takes this long unless it is broken.
const PATIENCE: Duration = Duration::from_secs(20);

/// What happens to a choice next.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// A step with these tokens.
    Step(Vec<u32>),
    /// Nothing, until the gate is opened or the request cancelled.
    Hold,
    /// The engine fails on the request.
    Fail(&'static str),
    /// The logits are not numbers.
    Unsound,
    /// The engine gives the request up.
    GiveUp,
    /// The engine ends without a word.
    Vanish,
}

/// The acts of one choice of a request; after them comes the end-of-turn token.
pub(crate) type Script = Arc<dyn Fn(&Request, usize) -> Vec<Act> + Send + Sync>;

/// What tests look at and turn.
#[derive(Default)]
pub(crate) struct Stage {
    pub(crate) requests: Mutex<Vec<Request>>,
    pub(crate) cancelled: AtomicUsize,
    /// Choices that were cancelled alone, with how many tokens each had sent.
    pub(crate) cancelled_choices: Mutex<Vec<(usize, usize)>>,
    pub(crate) ended: AtomicUsize,
    pub(crate) tokens_sent: AtomicUsize,
    pub(crate) flushes: AtomicUsize,
    /// Requests are not taken from the queue while this is set; the engine says when it knows.
    pause_wanted: AtomicBool,
    paused: AtomicBool,
    gate: AtomicBool,
    changed: Condvar,
    lock: Mutex<()>,
}

impl Stage {
    /// Stops taking requests from the queue; nothing is taken after this returns.
    pub(crate) fn pause(&self) {
        self.pause_wanted.store(true, Ordering::SeqCst);
        self.wait("the engine to pause", |stage| stage.paused.load(Ordering::SeqCst));
    }

    pub(crate) fn go_on(&self) {
        self.pause_wanted.store(false, Ordering::SeqCst);
    }

    pub(crate) fn open_gate(&self) {
        self.gate.store(true, Ordering::SeqCst);
    }

    /// Waits until `done` holds.
    pub(crate) fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        let mut guard = self.lock.lock().unwrap();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "waited in vain for: {what}");
            guard = self.changed.wait_timeout(guard, Duration::from_millis(2)).unwrap().0;
        }
    }

    pub(crate) fn wait_cancelled(&self, count: usize) {
        self.wait("cancelled requests", |stage| stage.cancelled.load(Ordering::SeqCst) == count);
    }

    pub(crate) fn wait_requests(&self, count: usize) {
        self.wait("requests", |stage| stage.requests.lock().unwrap().len() >= count);
    }

    pub(crate) fn last_request(&self) -> Request {
        self.requests.lock().unwrap().last().cloned().expect("the engine saw no request")
    }

    fn count(&self, counter: &AtomicUsize) {
        counter.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_all();
    }
}

pub(crate) fn facts() -> EngineFacts {
    EngineFacts {
        model_names: vec!["tiny".into(), "team/alias".into()],
        max_context_tokens: 256,
        vocab_size: VOCAB,
        eos_token_ids: vec![END_OF_TURN, 8166],
        max_sequences: 4,
        kv_capacity_tokens: 1024,
        queue_capacity: 4,
        numerics: "f32 scripted".into(),
    }
}

/// Starts the engine's thread; it ends when the handles are gone.
pub(crate) fn start(facts: EngineFacts, script: Script) -> (EngineHandle, Arc<Stage>) {
    let (handle, inbox) = engine_channel(facts);
    let stage = Arc::new(Stage::default());
    inbox.load.pages_total.store(16, Ordering::SeqCst);
    inbox.load.set_state(EngineState::Ready);
    let for_thread = Arc::clone(&stage);
    std::thread::spawn(move || run(&inbox, &for_thread, &script));
    (handle, stage)
}

fn run(inbox: &EngineInbox, stage: &Arc<Stage>, script: &Script) {
    let pause = Duration::from_millis(1);
    loop {
        if let Some(flush) = inbox.load.cache.flush_to_do() {
            stage.flushes.fetch_add(1, Ordering::SeqCst);
            inbox.load.cache.flush_done(flush);
        }
        let pausing = stage.pause_wanted.load(Ordering::SeqCst);
        stage.paused.store(pausing, Ordering::SeqCst);
        if pausing {
            std::thread::sleep(pause);
            continue;
        }
        match inbox.submissions.recv_timeout(pause) {
            Ok(submission) => {
                let (load, stage, script) = (Arc::clone(&inbox.load), Arc::clone(stage), Arc::clone(script));
                load.waiting.fetch_sub(1, Ordering::SeqCst);
                load.running.fetch_add(1, Ordering::SeqCst);
                load.prompt_tokens.fetch_add(submission.request.prompt.len() as u64, Ordering::SeqCst);
                std::thread::spawn(move || {
                    let sent = perform(submission, &stage, &script);
                    load.generated_tokens.fetch_add(sent as u64, Ordering::SeqCst);
                    load.running.fetch_sub(1, Ordering::SeqCst);
                    stage.count(&stage.ended);
                });
            }
            Err(error) if error.is_timeout() => {}
            Err(_) => return,
        }
    }
}

/// Plays one request; tells how many tokens were sent.
fn perform(submission: Submission, stage: &Stage, script: &Script) -> usize {
    let Submission { request, mut sink, .. } = submission;
    stage.requests.lock().unwrap().push(request.clone());
    stage.changed.notify_all();
    let mut choices: Vec<_> =
        (0..request.choices).map(|index| Some(script(&request, index).into_iter())).collect();
    let mut sent = vec![0; request.choices];
    let mut send = |event| {
        // A closed sink is a cancelled request.
        if sink.send(event).is_err() {
            request.cancel.cancel();
        }
    };
    send(Event::Started { cached_tokens: CACHED_TOKENS.min(request.prompt.len() - 1) });
    send(Event::Progress { processed_tokens: request.prompt.len() });
    if let Some(top) = request.prompt_logprobs {
        let first_has_none = |(index, &id): (usize, &u32)| (index > 0).then(|| logprobs_of(id, top));
        send(Event::PromptLogprobs(request.prompt.iter().enumerate().map(first_has_none).collect()));
    }
    while choices.iter().any(Option::is_some) {
        for choice in 0..request.choices {
            let Some(acts) = &mut choices[choice] else { continue };
            let act = acts.next().unwrap_or_else(|| Act::Step(vec![END_OF_TURN]));
            if matches!(act, Act::Hold) {
                while !stage.gate.load(Ordering::SeqCst) && !request.choice_is_cancelled(choice) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            if request.choice_is_cancelled(choice) {
                send(Event::End { choice, reason: FinishReason::Cancelled });
                stage.cancelled_choices.lock().unwrap().push((choice, sent[choice]));
                choices[choice] = None;
                if request.cancel.is_cancelled() || choices.iter().all(Option::is_none) {
                    stage.count(&stage.cancelled);
                    return sent.iter().sum();
                }
                continue;
            }
            let room = request.sampling.max_tokens - sent[choice];
            let end = match act {
                Act::Hold => None,
                Act::Fail(message) => Some(FinishReason::Error { message: message.into() }),
                Act::Unsound => Some(FinishReason::Unsound { message: "not numbers".into() }),
                Act::GiveUp => Some(FinishReason::Cancelled),
                Act::Vanish => return sent.iter().sum(),
                Act::Step(mut ids) => {
                    ids.truncate(room);
                    sent[choice] += ids.len();
                    stage.tokens_sent.fetch_add(ids.len(), Ordering::SeqCst);
                    let stopped = ids.last().copied().filter(|id| stops(&request, *id));
                    let top = request.sampling.logprobs;
                    let out = |id| TokenOut { id, logprobs: top.map(|top| logprobs_of(id, top)) };
                    if !ids.is_empty() {
                        send(Event::Tokens { choice, tokens: ids.into_iter().map(out).collect() });
                    }
                    let full = sent[choice] == request.sampling.max_tokens;
                    stopped
                        .map(|token| FinishReason::Stop { token })
                        .or_else(|| full.then_some(FinishReason::Length))
                }
            };
            if let Some(reason) = end {
                send(Event::End { choice, reason });
                choices[choice] = None;
            }
        }
    }
    sent.iter().sum()
}

fn stops(request: &Request, id: u32) -> bool {
    let sampling = &request.sampling;
    sampling.stop_token_ids.contains(&id) || (!sampling.ignore_eos && [END_OF_TURN, 8166].contains(&id))
}

/// Made-up log-probabilities with many digits; the token itself is the likeliest.
pub(crate) fn logprobs_of(id: u32, top: usize) -> TokenLogprobs {
    let own = -(id as f32).sqrt() / 97.3;
    let other = |rank: usize| ((id as usize + rank * 31) as u32 % VOCAB as u32, own - rank as f32 * 0.731);
    TokenLogprobs { logprob: own, top: (0..top).map(other).collect() }
}
