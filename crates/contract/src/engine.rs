use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use thiserror::Error;

use crate::{EventSink, Request};

/// What does not change while an engine runs.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineFacts {
    /// Names the model answers to; the first is its own.
    pub model_names: Vec<String>,
    /// Longest prompt + generation, tokens.
    pub max_context_tokens: usize,
    /// Ids below this have text and can be drawn.
    pub vocab_size: usize,
    /// End-of-turn tokens.
    pub eos_token_ids: Vec<u32>,
    /// Sequences that can run at once.
    pub max_sequences: usize,
    /// Tokens of KV that fit, over all sequences.
    pub kv_capacity_tokens: usize,
    /// Requests that may wait.
    pub queue_capacity: usize,
    /// Numerics mode, e.g. `w4a8 kv=bf16 state=f32 cpu`.
    pub numerics: String,
}

/// Life of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineState {
    /// Loading or warming up.
    Starting,
    /// Takes requests; a token was really generated at start.
    Ready,
    /// Finishes what it has, takes nothing new.
    Draining,
    /// Ended in order.
    Stopped,
    /// Ended by a failure; the message is for operators.
    Failed(String),
}

/// Live counters of an engine, written by its thread, read by anybody.
#[derive(Debug)]
pub struct Load {
    state: RwLock<EngineState>,
    started: Instant,
    draining: AtomicBool,
    /// Requests accepted but not admitted.
    pub waiting: AtomicUsize,
    /// Sequences admitted and not ended.
    pub running: AtomicUsize,
    /// KV pages in use.
    pub pages_used: AtomicUsize,
    /// KV pages in all.
    pub pages_total: AtomicUsize,
    /// State slots in use.
    pub slots_used: AtomicUsize,
    /// Steps completed.
    pub steps: AtomicU64,
    /// Tokens generated.
    pub generated_tokens: AtomicU64,
    /// Prompt tokens processed.
    pub prompt_tokens: AtomicU64,
    /// Choices that ended because their logits were no distribution.
    pub unsound: AtomicU64,
    /// What the prefix cache holds and did.
    pub cache: CacheLoad,
    /// How drafts did.
    pub speculation: SpeculationLoad,
    last_step_us: AtomicU64,
    /// Kind and members of the step that runs: see [`Load::step_begins`]; 0 between steps.
    step: AtomicU64,
    step_began_us: AtomicU64,
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// A slice of prompts.
    Slice,
    /// A round of running sequences.
    Round,
    /// A slice of what prompts to come may begin with, in idle time.
    Settle,
}

/// A step that has begun and not ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepInHand {
    /// What it does.
    pub kind: StepKind,
    /// Prompts or sequences in it.
    pub members: usize,
    /// Since when, seconds.
    pub running_s: f64,
}

/// Live counters of drafts.
#[derive(Debug, Default)]
pub struct SpeculationLoad {
    /// Rounds of a sequence with drafts.
    pub rounds: AtomicU64,
    /// Drafts verified.
    pub drafted: AtomicU64,
    /// Drafts accepted, by place in the chain.
    pub accepted: [AtomicU64; SpeculationLoad::PLACES],
}

impl SpeculationLoad {
    /// Drafts that a sequence has in a round at most.
    pub const PLACES: usize = 15;

    /// Notes a round of a sequence with drafts, the first ones of which were right.
    pub fn record(&self, drafted: usize, accepted: usize) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
        self.drafted.fetch_add(drafted as u64, Ordering::Relaxed);
        for place in self.accepted.iter().take(accepted) {
            place.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Live counters of a prefix cache.
#[derive(Debug, Default)]
pub struct CacheLoad {
    /// Requests that began at a snapshot.
    pub hits: AtomicU64,
    /// Requests that found less than they could have, by reason: see [`CacheLoad::MISS_REASONS`]. A hit that is less
    /// deep than possible counts here as well.
    pub misses: [AtomicU64; CacheLoad::MISS_REASONS.len()],
    /// Snapshots that had to make room for others.
    pub evictions: AtomicU64,
    /// Tokens that were processed in idle time, for requests to come.
    pub settled_tokens: AtomicU64,
    /// Snapshots held.
    pub snapshots: AtomicUsize,
    /// Tokens on the paths to them, common beginnings once.
    pub tokens: AtomicUsize,
    /// KV pages held on the device.
    pub device_pages: AtomicUsize,
    /// KV pages held in the host store.
    pub host_pages: AtomicUsize,
    /// Granules of the host store in use; a page takes one, a snapshot's state several.
    pub granules_used: AtomicUsize,
    /// Granules of the host store in all.
    pub granules_total: AtomicUsize,
    /// Requests whose prompts' beginnings were read from disk.
    pub disk_loads: AtomicU64,
    /// Bytes of the files on disk.
    pub disk_bytes: AtomicU64,
    flushes_asked: AtomicU64,
    flushes_done: AtomicU64,
}

impl CacheLoad {
    /// Why a request found less than it could have: the cache is off, or the request wants what only computing gives;
    /// a snapshot was there and had to make room; its tokens are known further on, but without a snapshot; they are
    /// known under another salt; they are not known.
    pub const MISS_REASONS: [&str; 5] = ["off", "evicted", "no_snapshot", "other_salt", "diverged"];

    /// Asks the engine to forget what it holds in memory. [`CacheLoad::is_flushed`] of the number says when it has.
    pub fn request_flush(&self) -> u64 {
        self.flushes_asked.fetch_add(1, Ordering::AcqRel) + 1
    }
    /// Whether the engine has done what [`CacheLoad::request_flush`] asked for.
    pub fn is_flushed(&self, flush: u64) -> bool {
        self.flushes_done.load(Ordering::Acquire) >= flush
    }
    /// For the engine: the last flush that was asked for and is still to be done.
    pub fn flush_to_do(&self) -> Option<u64> {
        let asked = self.flushes_asked.load(Ordering::Acquire);
        (asked > self.flushes_done.load(Ordering::Relaxed)).then_some(asked)
    }
    /// For the engine: it has done the flush, and those before it.
    pub fn flush_done(&self, flush: u64) {
        self.flushes_done.store(flush, Ordering::Release);
    }
}

/// A copy of [`Load`] at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadSnapshot {
    /// Life of the engine.
    pub state: EngineState,
    /// See [`Load::waiting`].
    pub waiting: usize,
    /// See [`Load::running`].
    pub running: usize,
    /// See [`Load::pages_used`].
    pub pages_used: usize,
    /// See [`Load::pages_total`].
    pub pages_total: usize,
    /// See [`Load::slots_used`].
    pub slots_used: usize,
    /// See [`Load::steps`].
    pub steps: u64,
    /// See [`Load::generated_tokens`].
    pub generated_tokens: u64,
    /// See [`Load::prompt_tokens`].
    pub prompt_tokens: u64,
    /// See [`Load::unsound`].
    pub unsound: u64,
    /// Seconds since the last completed step.
    pub idle_s: f64,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            state: RwLock::new(EngineState::Starting),
            started: Instant::now(),
            draining: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            pages_used: AtomicUsize::new(0),
            pages_total: AtomicUsize::new(0),
            slots_used: AtomicUsize::new(0),
            steps: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            unsound: AtomicU64::new(0),
            cache: CacheLoad::default(),
            speculation: SpeculationLoad::default(),
            last_step_us: AtomicU64::new(0),
            step: AtomicU64::new(0),
            step_began_us: AtomicU64::new(0),
        }
    }
}

impl Load {
    /// Sets the state; `Stopped` and `Failed` are final.
    pub fn set_state(&self, state: EngineState) {
        let mut current = self.state.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !matches!(*current, EngineState::Stopped | EngineState::Failed(_)) {
            *current = state;
        }
    }
    /// The state now.
    pub fn state(&self) -> EngineState {
        self.state.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
    /// Notes that a step begins, with so many prompts or sequences.
    pub fn step_begins(&self, kind: StepKind, members: usize) {
        self.step_began_us.store(self.started.elapsed().as_micros() as u64, Ordering::Relaxed);
        self.step.store((members as u64) << 2 | (kind as u64 + 1), Ordering::Release);
    }
    /// Notes that the step has ended, whatever came of it.
    pub fn step_ends(&self) {
        self.step.store(0, Ordering::Relaxed);
    }
    /// The step that runs now.
    pub fn step_in_hand(&self) -> Option<StepInHand> {
        let step = self.step.load(Ordering::Acquire);
        let kinds = [StepKind::Slice, StepKind::Round, StepKind::Settle];
        let kind = *kinds.get((step as usize & 3).checked_sub(1)?)?;
        let began_us = self.step_began_us.load(Ordering::Relaxed);
        let running_s = self.started.elapsed().as_secs_f64() - began_us as f64 * 1e-6;
        Some(StepInHand { kind, members: (step >> 2) as usize, running_s: running_s.max(0.0) })
    }
    /// Notes a completed step.
    pub fn step_done(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.last_step_us.store(self.started.elapsed().as_micros() as u64, Ordering::Relaxed);
    }
    /// Asks the engine to finish what it has and stop.
    pub fn request_drain(&self) {
        self.draining.store(true, Ordering::Release);
    }
    /// Whether [`Load::request_drain`] was called.
    pub fn drain_requested(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
    /// All counters at once.
    pub fn snapshot(&self) -> LoadSnapshot {
        let now_us = self.started.elapsed().as_micros() as u64;
        LoadSnapshot {
            state: self.state(),
            waiting: self.waiting.load(Ordering::Relaxed),
            running: self.running.load(Ordering::Relaxed),
            pages_used: self.pages_used.load(Ordering::Relaxed),
            pages_total: self.pages_total.load(Ordering::Relaxed),
            slots_used: self.slots_used.load(Ordering::Relaxed),
            steps: self.steps.load(Ordering::Relaxed),
            generated_tokens: self.generated_tokens.load(Ordering::Relaxed),
            prompt_tokens: self.prompt_tokens.load(Ordering::Relaxed),
            unsound: self.unsound.load(Ordering::Relaxed),
            idle_s: now_us.saturating_sub(self.last_step_us.load(Ordering::Relaxed)) as f64 * 1e-6,
        }
    }
}

/// A request on its way to the engine.
pub struct Submission {
    /// The request.
    pub request: Request,
    /// Where its events go.
    pub sink: Box<dyn EventSink>,
    /// When it was submitted, for queue times.
    pub submitted: Instant,
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// The queue is full: try again later.
    #[error("{waiting} requests are waiting already, the queue holds {capacity}")]
    QueueFull {
        /// Requests waiting.
        waiting: usize,
        /// Most that may wait.
        capacity: usize,
    },
    /// The engine is shutting down.
    #[error("the server is shutting down")]
    Draining,
    /// The engine is not running.
    #[error("the engine is not running: {0}")]
    Down(String),
}

/// The server's end of an engine. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    submit: Sender<Submission>,
    load: Arc<Load>,
    facts: Arc<EngineFacts>,
}

/// The engine's end.
pub struct EngineInbox {
    /// New requests. Disconnected when every handle is gone.
    pub submissions: Receiver<Submission>,
    /// The counters to keep.
    pub load: Arc<Load>,
}

/// Connects a server and an engine. The channel holds `facts.queue_capacity` requests.
pub fn engine_channel(facts: EngineFacts) -> (EngineHandle, EngineInbox) {
    let (sender, receiver) = bounded(facts.queue_capacity.max(1));
    let load = Arc::new(Load::default());
    let handle = EngineHandle { submit: sender, load: Arc::clone(&load), facts: Arc::new(facts) };
    (handle, EngineInbox { submissions: receiver, load })
}

impl EngineHandle {
    /// What does not change.
    pub fn facts(&self) -> &EngineFacts {
        &self.facts
    }
    /// Live counters.
    pub fn load(&self) -> &Load {
        &self.load
    }
    /// Hands over a request without waiting.
    pub fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), SubmitError> {
        match self.load.state() {
            EngineState::Starting | EngineState::Ready => {}
            EngineState::Draining => return Err(SubmitError::Draining),
            EngineState::Stopped => return Err(SubmitError::Down("it has stopped".into())),
            EngineState::Failed(reason) => return Err(SubmitError::Down(reason)),
        }
        if self.load.drain_requested() {
            return Err(SubmitError::Draining);
        }
        // `waiting` counts channel and engine queue together, so the bound is one number for the client.
        let capacity = self.facts.queue_capacity;
        let waiting = self.load.waiting.fetch_add(1, Ordering::AcqRel);
        if waiting >= capacity {
            self.load.waiting.fetch_sub(1, Ordering::AcqRel);
            return Err(SubmitError::QueueFull { waiting, capacity });
        }
        let submission = Submission { request, sink, submitted: Instant::now() };
        self.submit.try_send(submission).map_err(|error| {
            self.load.waiting.fetch_sub(1, Ordering::AcqRel);
            match error {
                TrySendError::Full(_) => SubmitError::QueueFull { waiting, capacity },
                TrySendError::Disconnected(_) => SubmitError::Down("its thread has ended".into()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_in_hand_is_seen_until_it_ends() {
        let load = Load::default();
        assert_eq!(load.step_in_hand(), None);
        for (kind, members) in [(StepKind::Slice, 1), (StepKind::Round, 64), (StepKind::Settle, 0)] {
            load.step_begins(kind, members);
            let step = load.step_in_hand().expect("a step has begun");
            assert_eq!((step.kind, step.members), (kind, members));
            assert!((0.0..60.0).contains(&step.running_s));
            load.step_ends();
            assert_eq!(load.step_in_hand(), None);
        }
    }

    #[test]
    fn a_flush_does_all_that_were_asked_for_before() {
        let cache = CacheLoad::default();
        assert_eq!(cache.flush_to_do(), None);
        let (first, second) = (cache.request_flush(), cache.request_flush());
        let to_do = cache.flush_to_do().expect("two were asked for");
        let third = cache.request_flush();
        cache.flush_done(to_do);
        assert!(cache.is_flushed(first) && cache.is_flushed(second) && !cache.is_flushed(third));
        assert_eq!(cache.flush_to_do(), Some(third));
    }
}
