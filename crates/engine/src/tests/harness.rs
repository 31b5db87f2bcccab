//! Requests, and what came of them.

use std::sync::Arc;

use proptest::prelude::*;
use qwill_contract::{CancelFlag, EngineHandle, EngineInbox, Guide, Request, SamplingParams, engine_channel};

use super::client::{Client, Outcome, assert_idle, request};
use super::guides::any_guide;
use super::puppet::{Fault, GRANULE_BYTES, Puppet};
use crate::engine::Engine;
use crate::speculation::{SpecMode, SpeculationOptions};
use crate::{DEFAULT_MAX_STALL, EngineOptions};

pub(crate) const VOCAB: usize = 50;
pub(crate) const EOS: u32 = 3;
pub(crate) const BOUNDARY: u32 = 7;

pub(crate) fn options() -> EngineOptions {
    EngineOptions {
        model_names: vec!["puppet".into()],
        numerics: "none".into(),
        eos_token_ids: vec![EOS],
        vocab_limit: VOCAB,
        max_sequences: 6,
        pages: 40,
        max_context_tokens: 640,
        max_rows: 128,
        max_logit_rows: 64,
        prefill_slice_tokens: 128,
        max_stall: DEFAULT_MAX_STALL,
        queue_capacity: 64,
        chunk_boundary_token: Some(BOUNDARY),
        chunk_interval_tokens: 200,
        speculation: SpeculationOptions { mode: SpecMode::Off, ..SpeculationOptions::default() },
        prefix_cache: true,
        disk_cache: None,
        snapshot_interval_tokens: 300,
    }
}

/// Granules of a puppet's host store, where a test does not say how many.
const GRANULES: usize = 40;

pub(crate) fn puppet(options: &EngineOptions) -> Puppet {
    puppet_with_host(options, GRANULES)
}

fn puppet_with_host(options: &EngineOptions, granules: usize) -> Puppet {
    let EngineOptions { pages, max_sequences, max_rows, max_logit_rows, .. } = *options;
    let mut puppet = Puppet::new(pages, max_sequences, max_rows, max_logit_rows);
    puppet.host = vec![[0xa5; GRANULE_BYTES]; granules];
    puppet
}

/// The beginning of one of a few conversations: messages of many lengths.
pub(crate) fn conversation(number: usize, tokens: usize) -> Vec<u32> {
    let token = |at: usize| {
        let bits = (at / 7 + number * 31).wrapping_mul(0x9e37_79b1) >> 8;
        if at.is_multiple_of(20 + number * 17) { BOUNDARY } else { 8 + (bits % 40) as u32 }
    };
    (0..tokens).map(token).collect()
}

/// Requests of every kind that the engine can run.
pub(crate) fn any_request() -> impl Strategy<Value = Request> {
    let follow_up = (0usize..3, 1usize..450, prop::collection::vec(0..VOCAB as u32, 1..80));
    let prompt = prop_oneof![
        3 => follow_up.prop_map(|(number, tokens, rest)| [conversation(number, tokens), rest].concat()),
        1 => prop::collection::vec(0..VOCAB as u32, 1..80),
        1 => prop::collection::vec(0..VOCAB as u32, 60..70),
        1 => prop::collection::vec(0..VOCAB as u32, 100..500),
    ];
    let lengths = (0usize..90, 0usize..20, any::<bool>(), prop::option::of(0usize..3));
    let shape = (1usize..4, prop::option::of(0usize..3), any::<u64>(), any::<bool>(), 0u32..3);
    let guide = prop::option::weighted(0.4, any_guide());
    (prompt, lengths, shape, guide).prop_map(|(prompt, lengths, shape, guide)| {
        let (max_tokens, min_tokens, ignore_eos, logprobs) = lengths;
        let (choices, prompt_logprobs, seed, warm, penalty) = shape;
        let sampling = SamplingParams {
            temperature: if warm { 1.0 } else { 0.0 },
            top_k: 10,
            seed,
            max_tokens,
            min_tokens,
            ignore_eos,
            logprobs,
            presence_penalty: if penalty == 1 { 0.5 } else { 0.0 },
            repetition_penalty: if penalty == 2 { 1.1 } else { 1.0 },
            stop_token_ids: if seed % 3 == 0 { vec![11] } else { vec![] },
            ..SamplingParams::default()
        };
        let guide = guide.map(|guide| guide.boxed_clone());
        Request { choices, prompt_logprobs, guide, ..request(&prompt, sampling) }
    })
}

/// A message of so many tokens, one and the same after its first.
pub(crate) fn message(tokens: usize, token: u32) -> Vec<u32> {
    [vec![BOUNDARY], vec![token; tokens - 1]].concat()
}

/// An engine that the test drives step by step.
pub(crate) struct Bench {
    pub(crate) engine: Engine<Puppet>,
    pub(crate) handle: EngineHandle,
    inbox: EngineInbox,
}

impl Bench {
    pub(crate) fn new(options: EngineOptions) -> Self {
        Self::with_host(options, GRANULES)
    }

    pub(crate) fn with_host(options: EngineOptions, granules: usize) -> Self {
        let (handle, inbox) = engine_channel(options.facts());
        let puppet = puppet_with_host(&options, granules);
        let engine = Engine::new(puppet, options, Arc::clone(&inbox.load));
        Self { engine, handle, inbox }
    }

    pub(crate) fn with_fault(options: EngineOptions, fault: Fault) -> Self {
        let mut bench = Self::new(options);
        bench.engine.model.fault = fault;
        bench
    }

    pub(crate) fn submit(&mut self, request: Request) -> Client {
        Client::submit(&self.handle, request).unwrap()
    }

    /// One step; false where there was nothing to do.
    pub(crate) fn turn(&mut self) -> Result<bool, String> {
        self.engine.receive(&self.inbox);
        self.engine.turn()
    }

    pub(crate) fn finish(&mut self) {
        while self.turn().unwrap() {}
    }

    /// Runs a request in this engine, when all else is done.
    pub(crate) fn ask(&mut self, request: Request) -> Outcome {
        let client = self.submit(request);
        self.finish();
        assert_idle(self.handle.load());
        client.wait()
    }

    /// Runs a request by itself, in an engine of its own that remembers nothing.
    pub(crate) fn answer(options: &EngineOptions, request: Request) -> Outcome {
        let mut bench = Self::new(EngineOptions { prefix_cache: false, ..options.clone() });
        let outcome = bench.ask(request);
        bench.assert_nothing_is_left();
        outcome
    }

    /// What the prefix cache holds is all that is held.
    pub(crate) fn assert_nothing_is_left(&mut self) {
        assert_idle(self.handle.load());
        let engine = &mut self.engine;
        assert_eq!(engine.pages.used(), engine.cache.usage().device_pages);
        engine.cache.clear(&mut engine.pages);
        assert_eq!(engine.pages.free(), engine.pages.total());
        assert_eq!(engine.slots.free(), engine.options.max_sequences);
        let usage = engine.cache.usage();
        assert_eq!((usage.granules_used, usage.snapshots, usage.tokens), (0, 0, 0));
    }
}

/// Greedy, with log-probabilities, to the length.
pub(crate) fn asking(prompt: &[u32], max_tokens: usize) -> Request {
    let sampling =
        SamplingParams { ignore_eos: true, max_tokens, logprobs: Some(1), ..SamplingParams::default() };
    request(prompt, sampling)
}

/// Asks, and checks the answer against that of an engine that remembers nothing.
pub(crate) fn ask(bench: &mut Bench, request: &Request) -> Outcome {
    let fresh = |request: &Request| Request { cancel: CancelFlag::default(), ..request.clone() };
    let outcome = bench.ask(fresh(request));
    let cold = Bench::answer(&options(), fresh(request));
    assert!(outcome.same_answer(&cold), "{outcome:?} instead of {cold:?}");
    assert!(!outcome.failed());
    outcome
}
