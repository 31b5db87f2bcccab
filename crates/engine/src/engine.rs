//! The engine's state and its loop: who waits, who runs, who has ended. The steps themselves are in `step`.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::TryRecvError;
use qwill_contract::{EngineInbox, EngineState, Event, FinishReason, Load, Request, StepKind, Submission};

use crate::admission::{Need, WaitingQueue};
use crate::caching::{Beginning, PromptPath};
use crate::chunks::ChunkRule;
use crate::disk_tier::DiskTier;
use crate::live::Live;
use crate::pace::SlicePace;
use crate::pages::PageAllocator;
use crate::prefix::{PrefixCache, SnapshotRule};
use crate::schedule::{RequestKey, Schedule, SequenceKey, SlicePart, Step};
use crate::sequence::{EndRule, Sequence};
use crate::settle::Settling;
use crate::slots::SlotAllocator;
use crate::speculation::{Acceptance, StepTimes};
use crate::{EngineOptions, StepModel};

/// How often an idle engine looks whether it is to stop: a drain is a flag, nothing wakes the channel.
const IDLE_LOOK: Duration = Duration::from_millis(20);

/// Waiting for another prompt's snapshot has to save so many tokens: those that a step computes in any case.
const LEAST_FOLLOWED_TOKENS: usize = 256;

/// A request that has come in.
pub(crate) struct Arrival {
    submission: Submission,
    pub(crate) path: PromptPath,
    follows: Option<Follows>,
}

/// What a request is set aside for: a prompt that begins alike is just being processed, and will leave a snapshot.
#[derive(Debug, Clone, Copy)]
struct Follows {
    leader: RequestKey,
    position: usize,
}

/// The engine, on its thread.
pub(crate) struct Engine<M> {
    pub(crate) model: M,
    pub(crate) options: EngineOptions,
    pub(crate) load: Arc<Load>,
    pub(crate) pages: PageAllocator,
    pub(crate) slots: SlotAllocator,
    pub(crate) live: BTreeMap<RequestKey, Live>,
    pub(crate) schedule: Schedule,
    /// How often drafts of all sequences were right.
    pub(crate) acceptance: Acceptance,
    pub(crate) step_times: StepTimes,
    slice_pace: SlicePace,
    pub(crate) cache: PrefixCache,
    pub(crate) chunk_rule: ChunkRule,
    pub(crate) snapshot_rule: SnapshotRule,
    pub(crate) settling: Settling,
    pub(crate) disk: Option<DiskTier>,
    waiting: WaitingQueue<Arrival>,
    next_key: RequestKey,
}

impl<M: StepModel> Engine<M> {
    pub(crate) fn new(model: M, options: EngineOptions, load: Arc<Load>) -> Self {
        let granules = if options.prefix_cache { model.host_granules() } else { 0 };
        // One is for what goes to the disk.
        let granules = granules.saturating_sub(usize::from(options.disk_cache.is_some()));
        let engine = Self {
            cache: PrefixCache::new(granules, model.state_granules()),
            model,
            load,
            pages: PageAllocator::new(options.pages),
            slots: SlotAllocator::new(options.max_sequences),
            live: BTreeMap::new(),
            schedule: Schedule::new(options.step_limits()),
            acceptance: Acceptance::of_server(),
            step_times: StepTimes::new(),
            slice_pace: SlicePace::default(),
            settling: Settling::default(),
            disk: None,
            waiting: WaitingQueue::new(),
            chunk_rule: options.chunk_rule(),
            snapshot_rule: options.snapshot_rule(),
            next_key: 0,
            options,
        };
        engine.load.pages_total.store(engine.pages.total(), Ordering::Relaxed);
        engine.publish();
        engine
    }

    /// Runs until a drain is asked for or every handle is gone, and all work is done. An error means that the
    /// device can no longer generate; what is live then is still to be ended.
    pub(crate) fn serve(&mut self, inbox: &EngineInbox) -> Result<(), String> {
        loop {
            let stopping = !self.receive(inbox) || self.load.drain_requested();
            if stopping {
                self.load.set_state(EngineState::Draining);
            }
            if self.turn()? {
                continue;
            }
            if stopping {
                return Ok(());
            }
            if let Ok(submission) = inbox.submissions.recv_timeout(IDLE_LOOK) {
                self.enqueue(submission);
            }
        }
    }

    /// Forgets who has gone, starts who can start, runs one step; where there is none, settles a slice. False where
    /// there was nothing to do; then nobody waits either, because whatever was not refused fits an empty engine.
    pub(crate) fn turn(&mut self) -> Result<bool, String> {
        self.receive_from_disk()?;
        self.flush_if_asked();
        self.drop_gone();
        self.admit()?;
        let Some(step) = self.next_step() else { return Ok(self.settle()? || self.work_for_disk()?) };
        self.run(&step)?;
        Ok(true)
    }

    /// Ends everything with an error.
    pub(crate) fn fail_all(&mut self, message: &str) {
        let reason = FinishReason::Error { message: message.to_owned() };
        let loading = self.disk.as_mut().map(DiskTier::take_arrivals).unwrap_or_default();
        for arrival in loading {
            refuse(&self.load, arrival.submission, &reason);
        }
        while let Some(arrival) = self.waiting.pop() {
            refuse(&self.load, arrival.submission, &reason);
        }
        while let Some((request, _)) = self.live.first_key_value() {
            self.end_request(*request, &reason);
        }
    }

    /// Takes what has come in, without waiting; false where nothing can come any more.
    pub(crate) fn receive(&mut self, inbox: &EngineInbox) -> bool {
        loop {
            match inbox.submissions.try_recv() {
                Ok(submission) => self.enqueue(submission),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn enqueue(&mut self, submission: Submission) {
        match Need::of(&submission.request, &self.options.limits()) {
            Ok(need) => {
                let path = PromptPath::of(&submission.request, &self.chunk_rule);
                if let Some(arrival) = self.load_first(need, Arrival { submission, path, follows: None }) {
                    self.push_waiting(need, arrival);
                }
            }
            Err(refusal) => {
                let reason = FinishReason::Error { message: refusal.to_string() };
                refuse(&self.load, submission, &reason);
            }
        }
    }

    pub(crate) fn push_waiting(&mut self, need: Need, arrival: Arrival) {
        let priority = arrival.submission.request.priority;
        self.waiting.push(priority, need, arrival);
    }

    /// Forgets requests, and single choices, that nobody waits for.
    fn drop_gone(&mut self) {
        let is_gone = |arrival: &Arrival| arrival.submission.request.cancel.is_cancelled();
        for arrival in self.waiting.take_where(is_gone) {
            refuse(&self.load, arrival.submission, &FinishReason::Cancelled);
        }
        let gone: Vec<(RequestKey, Vec<usize>)> = self
            .live
            .iter()
            .map(|(key, live)| (*key, live.gone_choices()))
            .filter(|(_, choices)| !choices.is_empty())
            .collect();
        for (request, choices) in gone {
            self.end(request, &choices, &FinishReason::Cancelled);
        }
    }

    /// Starts waiting requests, in order, as long as all that they can use is to be had.
    fn admit(&mut self) -> Result<(), String> {
        let live = &self.live;
        let has_passed = |Follows { leader, position }: Follows| {
            live.get(&leader)
                .is_none_or(|leader| leader.prompt_done() || leader.processed_tokens() >= position)
        };
        self.waiting.bring_back(|arrival| arrival.follows.is_none_or(has_passed));
        while let Some((need, arrival)) = self.waiting.first() {
            let path = arrival.path.clone();
            if let Some(follows) = self.leader_of(&path, arrival.follows) {
                self.waiting.set_first_aside(|arrival| arrival.follows = Some(follows));
                if let Some(leader) = self.live.get_mut(&follows.leader) {
                    leader.add_stop(follows.position);
                }
                continue;
            }
            match self.begin(&path, need.pages(), need.choices) {
                Ok(Some(beginning)) => self.start(&need, path, &beginning),
                // What settles in idle time makes room for what somebody waits for.
                Ok(None) if self.pause_settling() => {}
                Ok(None) => return Ok(()),
                Err(error) => {
                    if let Some(arrival) = self.waiting.pop() {
                        refuse(&self.load, arrival.submission, &failure_of_request(&error));
                    }
                    self.recover("begin", &error)?;
                }
            }
        }
        Ok(())
    }

    /// A prompt that is being processed and will leave a snapshot for this one that is worth waiting for: as many prompts
    /// that begin alike and come at once then cost little more than one. Whoever followed before goes further now, so that
    /// this ends.
    fn leader_of(&self, path: &PromptPath, before: Option<Follows>) -> Option<Follows> {
        if !self.cache.is_on() || !path.may_hit {
            return None;
        }
        let ends = self.live.iter().filter_map(|(key, live)| Some((live.shared_end(path)?, *key)));
        let (position, leader) = ends.max()?;
        let found = self.look_up(path).hit.map_or(0, |hit| hit.position);
        let least = (found + LEAST_FOLLOWED_TOKENS).max(before.map_or(0, |follows| follows.position + 1));
        (position >= least).then_some(Follows { leader, position })
    }

    /// Starts the first waiting request.
    fn start(&mut self, need: &Need, path: PromptPath, beginning: &Beginning) {
        let Some(Arrival { submission, .. }) = self.waiting.pop() else { return };
        let Beginning { pages, slots, position, known_tokens } = beginning;
        self.note_lookup(&submission.request.id, &path, *position);
        let mut sequences = self.make_sequences(&submission.request, need, pages, slots);
        for sequence in &mut sequences {
            sequence.prefilled(*position);
        }
        metrics::histogram!("qwill_engine_queue_seconds")
            .record(submission.submitted.elapsed().as_secs_f64());
        let EngineOptions { eos_token_ids, vocab_limit, .. } = &self.options;
        let rule = EndRule::of(&submission.request, eos_token_ids, need.new_tokens, *vocab_limit);
        let stops = if self.cache.is_on() {
            self.snapshot_rule.stops(&path.tokens, &path.chunk_ends, *position, *known_tokens)
        } else {
            Vec::new()
        };
        let key = self.next_key;
        self.next_key += 1;
        self.live.insert(key, Live::new(submission, rule, path, *position, stops, sequences));
        self.schedule.add_prompt(key);
        self.publish();
        self.load.waiting.fetch_sub(1, Ordering::AcqRel);
        self.send(key, Event::Started { cached_tokens: *position });
    }

    /// One sequence for each choice: the same pages where they will be full of prompt, its own after that.
    fn make_sequences(
        &mut self,
        request: &Request,
        need: &Need,
        pages: &[u32],
        slots: &[usize],
    ) -> Vec<Sequence> {
        let (shared, own) = pages.split_at(need.shared_pages);
        let own_pages = need.own_pages();
        slots
            .iter()
            .enumerate()
            .map(|(choice, slot)| {
                if choice > 0 {
                    self.pages.share(shared);
                }
                let own = &own[choice * own_pages..(choice + 1) * own_pages];
                Sequence::new(request, choice, *slot, [shared, own].concat())
            })
            .collect()
    }

    fn next_step(&mut self) -> Option<Step> {
        let live = &self.live;
        let rows = |key: SequenceKey| live[&key.request].round_rows(key.choice);
        let limit = self.options.prefill_slice_tokens;
        let slice_rows = match self.schedule.running() {
            0 => limit,
            _ => self.slice_pace.rows_within(self.options.max_stall, limit),
        };
        self.schedule.next(slice_rows, |request| live[&request].prompt_work(), rows)
    }

    fn run(&mut self, step: &Step) -> Result<(), String> {
        let started = Instant::now();
        let (kind, outcome) = match step {
            Step::Slice(parts) => {
                self.load.step_begins(StepKind::Slice, parts.len());
                ("slice", self.run_timed_slice(parts))
            }
            Step::Round(parts) => {
                self.load.step_begins(StepKind::Round, parts.len());
                ("round", self.run_round(parts))
            }
        };
        self.load.step_ends();
        match outcome {
            Ok(rows) => {
                self.load.step_done();
                metrics::counter!("qwill_engine_steps_total", "kind" => kind).increment(1);
                metrics::histogram!("qwill_engine_step_rows", "kind" => kind).record(rows as f64);
                let seconds = started.elapsed().as_secs_f64();
                metrics::histogram!("qwill_engine_step_seconds", "kind" => kind).record(seconds);
                Ok(())
            }
            Err(error) => self.step_failed(kind, step, &error),
        }
    }

    /// A slice that streams wait for is waited for as well, so that its time is known; without streams the next one is
    /// prepared while it runs.
    fn run_timed_slice(&mut self, parts: &[SlicePart]) -> Result<usize, M::Error> {
        let streams_wait = self.schedule.running() > 0;
        let started = Instant::now();
        let rows = self.run_slice(parts)?;
        if streams_wait {
            self.model.wait()?;
            self.slice_pace.record(rows, started.elapsed());
        }
        Ok(rows)
    }

    /// A failed step ends the requests that were in it.
    fn step_failed(&mut self, kind: &'static str, step: &Step, error: &M::Error) -> Result<(), String> {
        let reason = failure_of_request(error);
        let requests: Vec<RequestKey> = match step {
            Step::Slice(parts) => parts.iter().map(|part| part.request).collect(),
            Step::Round(parts) => parts.iter().map(|part| part.sequence.request).collect(),
        };
        for request in requests {
            self.end_request(request, &reason);
        }
        self.recover(kind, error)
    }

    /// After a device error. The contents of what took part are unspecified, so the prefix cache is given up. Whether the
    /// device still works is found out by generating a token; if it does, those that were not part of it go on.
    pub(crate) fn recover(&mut self, kind: &'static str, error: &M::Error) -> Result<(), String> {
        tracing::error!(%error, kind, "a step failed");
        metrics::counter!("qwill_engine_failed_steps_total", "kind" => kind).increment(1);
        self.cache.clear(&mut self.pages);
        self.publish();
        self.self_test().map_err(|second| format!("{error}; afterwards the self-test failed: {second}"))
    }

    /// Notes that a choice's logits were no distribution, and makes that the choice's end. Its caches, and what it found in
    /// the prefix cache, may be the cause, so what is remembered is given up, as after a device error.
    pub(crate) fn unsound(
        &mut self,
        request: RequestKey,
        kind: &'static str,
        position: usize,
    ) -> FinishReason {
        let step = self.load.steps.load(Ordering::Relaxed) + 1;
        let message = format!(
            "the model gave no probabilities behind token {position}: its logits are not numbers (step {step}, a {kind})"
        );
        let id = self.live.get(&request).map_or("", |live| &live.request.id);
        tracing::error!(id, kind, step, position, "logits are not numbers");
        metrics::counter!("qwill_engine_unsound_logits_total", "kind" => kind).increment(1);
        self.load.unsound.fetch_add(1, Ordering::Relaxed);
        self.cache.clear(&mut self.pages);
        FinishReason::Unsound { message }
    }

    /// Ends all choices of a request that have not ended.
    pub(crate) fn end_request(&mut self, request: RequestKey, reason: &FinishReason) {
        let Some(live) = self.live.get(&request) else { return };
        let choices: Vec<usize> = live.running().map(|(choice, _)| choice).collect();
        self.end(request, &choices, reason);
    }

    /// Ends choices. All that they hold is free before the client is told, so that whoever sees the end finds the
    /// counters down.
    pub(crate) fn end(&mut self, request: RequestKey, choices: &[usize], reason: &FinishReason) {
        let Some(live) = self.live.get_mut(&request) else { return };
        for choice in choices {
            if let Some(sequence) = live.sequences[*choice].take() {
                self.schedule.remove_running(SequenceKey { request, choice: *choice });
                self.pages.release(&sequence.pages);
                self.slots.release(sequence.slot);
                let failed = matches!(reason, FinishReason::Error { .. } | FinishReason::Unsound { .. });
                if self.cache.is_on() && !failed {
                    self.settling.add(live, &sequence, &self.chunk_rule);
                }
            }
        }
        let finished = live.running().next().is_none();
        if finished {
            self.schedule.remove_prompt(request);
        }
        self.publish();
        for choice in choices {
            self.send(request, Event::End { choice: *choice, reason: reason.clone() });
        }
        if finished {
            self.live.remove(&request);
        }
    }

    /// A sequence that has not ended.
    pub(crate) fn sequence_mut(&mut self, key: SequenceKey) -> Option<&mut Sequence> {
        self.live.get_mut(&key.request)?.sequences.get_mut(key.choice)?.as_mut()
    }

    pub(crate) fn send(&mut self, request: RequestKey, event: Event) {
        if let Some(live) = self.live.get_mut(&request) {
            live.send(event);
        }
    }
}

fn failure_of_request(error: &impl Error) -> FinishReason {
    FinishReason::Error { message: format!("the engine failed on this request: {error}") }
}

/// Ends a request that was never admitted.
pub(crate) fn refuse(load: &Load, mut submission: Submission, reason: &FinishReason) {
    load.waiting.fetch_sub(1, Ordering::AcqRel);
    for choice in 0..submission.request.choices.max(1) {
        if submission.sink.send(Event::End { choice, reason: reason.clone() }).is_err() {
            return;
        }
    }
}
