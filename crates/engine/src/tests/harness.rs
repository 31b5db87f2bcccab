//! Requests, and what came of them.

use std::sync::Arc;

use proptest::prelude::*;
use qwill_contract::{EngineHandle, EngineInbox, Request, SamplingParams, engine_channel};

use super::client::{Client, Outcome, assert_idle, request};
use super::puppet::{Fault, Puppet};
use crate::EngineOptions;
use crate::engine::Engine;
use crate::speculation::{SpecMode, SpeculationOptions};

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
        queue_capacity: 64,
        chunk_boundary_token: Some(BOUNDARY),
        chunk_interval_tokens: 200,
        speculation: SpeculationOptions { mode: SpecMode::Off, ..SpeculationOptions::default() },
    }
}

pub(crate) fn puppet(options: &EngineOptions) -> Puppet {
    Puppet::new(options.pages, options.max_sequences, options.max_rows, options.max_logit_rows)
}

/// Requests of every kind that the engine can run.
pub(crate) fn any_request() -> impl Strategy<Value = Request> {
    let prompt = prop_oneof![
        prop::collection::vec(0..VOCAB as u32, 1..80),
        prop::collection::vec(0..VOCAB as u32, 60..70),
        prop::collection::vec(0..VOCAB as u32, 100..500),
    ];
    let lengths = (0usize..90, 0usize..20, any::<bool>(), prop::option::of(0usize..3));
    let shape = (1usize..4, prop::option::of(0usize..3), any::<u64>(), any::<bool>(), 0u32..3);
    (prompt, lengths, shape).prop_map(|(prompt, lengths, shape)| {
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
        Request { choices, prompt_logprobs, ..request(&prompt, sampling) }
    })
}

/// An engine that the test drives step by step.
pub(crate) struct Bench {
    pub(crate) engine: Engine<Puppet>,
    pub(crate) handle: EngineHandle,
    inbox: EngineInbox,
}

impl Bench {
    pub(crate) fn new(options: EngineOptions) -> Self {
        let (handle, inbox) = engine_channel(options.facts());
        let engine = Engine::new(puppet(&options), options, Arc::clone(&inbox.load));
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

    /// Runs a request by itself.
    pub(crate) fn answer(options: &EngineOptions, request: Request) -> Outcome {
        let mut bench = Self::new(options.clone());
        let client = bench.submit(request);
        bench.finish();
        assert_idle(bench.handle.load());
        client.wait()
    }
}
