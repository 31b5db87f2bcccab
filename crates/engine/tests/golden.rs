//! Reference answers through the whole engine.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use common::client::{Client, Outcome, request};
use common::{Setup, fast, golden, golden_ints, golden_lines, gpu, greedy, ids, reference};
use qwill_contract::{EngineHandle, Event, FinishReason, Request, SamplingParams, SinkClosed};
use qwill_device::{Activations, RING_TOKENS};
use qwill_engine::speculation::SpecMode;
use qwill_weights::Quantize;
use serde_json::Value;

/// Where bfloat16 may choose another token than f32: twice the largest difference of their logits, see
/// golden/README.md.
const BF16_MARGIN: f64 = 0.5;

/// The recorded greedy answers, stopping at a stop token; their smallest margin is 0.03, so f32 must hit each.
fn answers_as_recorded(handle: &EngineHandle, cases: &[Value]) {
    let clients: Vec<Client> = cases
        .iter()
        .map(|case| {
            let sampling = SamplingParams { ignore_eos: false, ..greedy(128) };
            Client::submit(handle, request(&ids(&case["prompt_ids"]), sampling)).unwrap()
        })
        .collect();
    for (case, client) in cases.iter().zip(clients) {
        let outcome = client.wait();
        let expected = ids(&case["ids"]);
        assert_eq!(outcome.ids(0), expected, "{}", case["question"]);
        let end = match case["finish"].as_str() {
            Some("stop") => FinishReason::Stop { token: expected[expected.len() - 1] },
            _ => FinishReason::Length,
        };
        assert_eq!(outcome.choices[0].end, Some(end));
    }
}

/// Negative log-likelihood of a prompt, from its log-probabilities.
fn nll(outcome: &Outcome) -> f64 {
    let tokens = outcome.prompt_logprobs.as_ref().unwrap();
    -tokens.iter().flatten().map(|token| f64::from(token.logprob)).sum::<f64>()
}

#[test]
fn the_fast_device_gives_the_recorded_answers_and_likelihoods() {
    let (handle, thread) = Setup::f32().start(|| fast(Activations::F32));
    answers_as_recorded(&handle, &golden_lines("behaviour.jsonl"));
    for window in golden("perplexity.json")["windows"].as_array().unwrap().iter().take(3) {
        let echo = Request { prompt_logprobs: Some(0), ..request(&ids(&window["ids"]), greedy(0)) };
        let outcome = Client::submit(&handle, echo).unwrap().wait();
        let (found, expected) = (nll(&outcome), window["nll"].as_f64().unwrap());
        assert!((found / expected - 1.0).abs() < 5e-6, "{found} instead of {expected}");
    }
    thread.stop().unwrap();
}

#[test]
fn the_reference_device_gives_recorded_answers() {
    let (handle, thread) = Setup::f32().start(reference);
    answers_as_recorded(&handle, &golden_lines("behaviour.jsonl")[..4]);
    thread.stop().unwrap();
}

/// bfloat16 may part from the recorded answers at a near tie, and not before; its likelihoods are nearly the same.
#[test]
fn the_gpu_gives_the_recorded_answers_up_to_a_near_tie_and_the_likelihoods() {
    let Some(device) = gpu() else { return };
    let (handle, thread) = Setup::rounded(Quantize::None).start(device);
    let mut compared = 0;
    for case in golden_lines("behaviour.jsonl") {
        let margins = case["margins"].as_array().unwrap();
        let clear = margins.iter().take_while(|margin| margin.as_f64().unwrap() > BF16_MARGIN).count();
        let request = request(&ids(&case["prompt_ids"]), greedy(128));
        let found = Client::submit(&handle, request).unwrap().wait().ids(0);
        assert_eq!(found[..clear], ids(&case["ids"])[..clear], "{}", case["question"]);
        compared += clear;
    }
    assert!(compared >= 100, "only {compared} tokens compared");
    for window in golden("perplexity.json")["windows"].as_array().unwrap().iter().take(3) {
        let echo = Request { prompt_logprobs: Some(0), ..request(&ids(&window["ids"]), greedy(0)) };
        let outcome = Client::submit(&handle, echo).unwrap().wait();
        let (found, expected) = (nll(&outcome), window["nll"].as_f64().unwrap());
        assert!((found / expected - 1.0).abs() < 1e-3, "{found} instead of {expected}");
    }
    thread.stop().unwrap();
}

/// Tokens of each event: what the prompt's end and every round after it has brought.
fn tokens_by_step(handle: &EngineHandle, request: Request) -> Vec<usize> {
    let (sender, events) = std::sync::mpsc::channel();
    let sink = move |event| sender.send(event).map_err(|_| SinkClosed);
    handle.submit(request, Box::new(sink)).unwrap();
    let mut tokens_by_step = Vec::new();
    for event in events {
        match event {
            Event::Tokens { tokens, .. } => tokens_by_step.push(tokens.len()),
            Event::End { .. } => break,
            _ => {}
        }
    }
    tokens_by_step
}

/// Rounds with 4 drafts accept as many as the reference implementation's, until a round would cross a fold of the ring
/// and has fewer rows.
#[test]
fn rounds_with_drafts_of_the_module_are_the_recorded_ones() {
    const DRAFTS: usize = 4;
    let setup = Setup { spec: SpecMode::Mtp, draft_len: DRAFTS, adaptive: false, ..Setup::f32() };
    let (handle, thread) = setup.start(|| fast(Activations::F32));
    let mut compared = 0;
    for (name, prompt) in golden("mtp.json")["prompts"].as_object().unwrap() {
        let recorded = ids(&prompt["rounds"]);
        let text = golden_ints("trunk.safetensors", &format!("{name}.ids"));
        let found = tokens_by_step(&handle, request(&text, greedy(60)));
        assert_eq!(found[0], 1, "the prompt's own token");
        let mut ring_len = 0;
        for (round, accepted) in recorded.iter().enumerate() {
            if ring_len + 1 + DRAFTS > RING_TOKENS {
                break;
            }
            assert_eq!(found[round + 1], 1 + *accepted as usize, "{name} round {round}");
            ring_len += found[round + 1];
            compared += 1;
        }
    }
    assert!(compared > 30, "{compared} rounds compared");
    thread.stop().unwrap();
}
