//! Devices that fail.

use std::time::Duration;

use proptest::prelude::*;
use qwill_contract::{EngineState, FinishReason, Request, SamplingParams};

use super::client::{ChoiceOutcome, Client, assert_idle, request};
use super::harness::{Bench, any_request, ask, asking, message, options, puppet};
use super::puppet::Fault;
use crate::speculation::{SpecMode, SpeculationOptions};
use crate::{EngineError, EngineOptions, start};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whichever call fails, every request either gets its whole answer or an error, nothing leaks, and the engine
    /// serves on.
    #[test]
    fn a_failed_step_ends_its_own_requests_only(
        requests in prop::collection::vec(any_request(), 1..8),
        call in 1usize..200,
    ) {
        let mut bench = Bench::with_fault(options(), Fault::ErrorAt(call));
        let clients: Vec<Client> = requests.iter().map(|request| bench.submit(request.clone())).collect();
        bench.finish();
        assert_idle(bench.handle.load());
        for (request, client) in requests.iter().zip(clients) {
            let outcome = client.wait();
            if !outcome.failed() {
                prop_assert_eq!(outcome, Bench::answer(&options(), request.clone()));
            }
        }
        let again = bench.submit(requests[0].clone());
        bench.finish();
        // The failing call may come only now.
        let again = again.wait();
        prop_assert!(again.failed() || again == Bench::answer(&options(), requests[0].clone()));
        bench.assert_nothing_is_left();
    }
}

/// The message of a choice that had no distribution.
fn unsound_message(choice: &ChoiceOutcome) -> &str {
    match &choice.end {
        Some(FinishReason::Unsound { message }) => message,
        end => panic!("{end:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Logits that are no numbers, from some place of a choice on, cost that choice its end and nobody else anything, with
    /// drafts and without; what the choice said before is what it says otherwise.
    #[test]
    fn unsound_logits_end_their_own_choice_only(
        requests in prop::collection::vec(any_request(), 1..8),
        victim in any::<prop::sample::Index>(),
        generated in 0usize..12,
        drafts in any::<bool>(),
    ) {
        let mode = if drafts { SpecMode::Lookup } else { SpecMode::Off };
        let speculation = SpeculationOptions { mode, adaptive: false, ..SpeculationOptions::default() };
        let options = EngineOptions { speculation, ..options() };
        let mut requests = requests;
        for (index, request) in requests.iter_mut().enumerate() {
            // Each choice has its own seed.
            request.sampling.seed = 100 * index as u64;
            request.prompt_logprobs = None;
        }
        let victim = victim.index(requests.len());
        let (seed, prompt) = (requests[victim].sampling.seed, requests[victim].prompt.len());
        let fault = Fault::UnsoundDraw { seed, position: (prompt + generated) as u64 };
        let mut bench = Bench::with_fault(options.clone(), fault);
        let clients: Vec<Client> = requests.iter().map(|request| bench.submit(request.clone())).collect();
        bench.finish();
        assert_idle(bench.handle.load());
        for (index, (request, client)) in requests.iter().zip(clients).enumerate() {
            let (outcome, expected) = (client.wait(), Bench::answer(&options, request.clone()));
            if index != victim {
                prop_assert_eq!(outcome, expected);
                continue;
            }
            prop_assert_eq!(&outcome.choices[1..], &expected.choices[1..], "the other choices go on");
            let (first, whole) = (&outcome.choices[0], &expected.choices[0]);
            let unsound = whole.tokens.len() > generated;
            prop_assert_eq!(bench.handle.load().snapshot().unsound, u64::from(unsound));
            if unsound {
                prop_assert_eq!(&first.tokens, &whole.tokens[..generated]);
                let kind = if generated == 0 { "a slice" } else { "a round" };
                let place = format!("behind token {}:", prompt + generated);
                let message = unsound_message(first);
                prop_assert!(message.contains(&place) && message.contains(kind), "{}", message);
            } else {
                prop_assert_eq!(first, whole);
            }
        }
        bench.assert_nothing_is_left();
    }
}

#[test]
fn unsound_logits_in_a_prompt_end_its_request_only() {
    let scored = |prompt: &[u32]| Request { prompt_logprobs: Some(1), choices: 2, ..asking(prompt, 4) };
    let (bad, good) = (scored(&[[3; 70].as_slice(), &[9], &[3; 200]].concat()), scored(&[4; 90]));
    let mut bench = Bench::with_fault(options(), Fault::UnsoundScore { token: 9 });
    let clients = [&bad, &good, &bad].map(|request| bench.submit(request.clone()));
    bench.finish();
    let [first, second, third] = clients.map(Client::wait);
    for outcome in [first, third] {
        assert!(outcome.prompt_logprobs.is_none() && outcome.choices.iter().all(|one| one.tokens.is_empty()));
        assert!(outcome.choices.iter().all(|choice| unsound_message(choice).contains("behind token 70:")));
    }
    assert_eq!(second, Bench::answer(&options(), good));
    assert_eq!(bench.handle.load().snapshot().unsound, 2);
    bench.assert_nothing_is_left();
}

#[test]
fn what_led_to_unsound_logits_is_not_remembered() {
    let mut bench = Bench::new(options());
    let prompt = message(300, 7);
    assert!(!bench.ask(asking(&prompt, 3)).failed());
    let seed = asking(&prompt, 3).sampling.seed;
    bench.engine.model.fault = Fault::UnsoundDraw { seed, position: 0 };
    let failed = bench.ask(asking(&prompt, 3));
    assert!(failed.failed() && failed.cached_tokens > 0, "{failed:?}");
    assert_eq!(bench.engine.cache.usage().snapshots, 0);
    bench.engine.model.fault = Fault::None;
    let again = ask(&mut bench, &asking(&prompt, 3));
    assert_eq!(again.cached_tokens, 0);
}

fn long_request() -> Request {
    let sampling = SamplingParams { ignore_eos: true, max_tokens: 300, ..SamplingParams::default() };
    Request { choices: 2, ..request(&[1; 100], sampling) }
}

/// Runs four requests on a thread whose model fails for good, and checks that everybody is told.
fn dies_with_everybody_told(fault: Fault, words: &str) {
    let options = options();
    let (handle, thread) = start(options.clone(), move || {
        let mut puppet = puppet(&options);
        puppet.fault = fault;
        Ok::<_, EngineError>(puppet)
    })
    .unwrap();
    thread.wait_ready().unwrap();
    let clients: Vec<Client> = (0..4).filter_map(|_| Client::submit(&handle, long_request()).ok()).collect();
    for client in clients {
        let outcome = client.wait();
        for choice in &outcome.choices {
            let Some(FinishReason::Error { message }) = &choice.end else { panic!("{outcome:?}") };
            assert!(message.contains(words), "{message}");
        }
    }
    assert!(matches!(thread.join(), Err(EngineError::Failed(message)) if message.contains(words)));
    assert!(matches!(handle.load().state(), EngineState::Failed(message) if message.contains(words)));
    assert!(Client::submit(&handle, long_request()).is_err());
    assert_idle(handle.load());
}

#[test]
fn a_device_that_stays_broken_fails_the_engine() {
    dies_with_everybody_told(Fault::ErrorsFrom(60), "fails");
}

#[test]
fn a_panic_fails_the_engine_and_drops_nobody() {
    dies_with_everybody_told(Fault::PanicAt(60), "call 60 panics");
}

#[test]
fn a_step_that_hangs_does_not_keep_a_stop_from_returning() {
    let options = options();
    let (handle, thread) = start(options.clone(), move || {
        let mut puppet = puppet(&options);
        puppet.fault = Fault::HangAt(60);
        Ok::<_, EngineError>(puppet)
    })
    .unwrap();
    thread.wait_ready().unwrap();
    let mut client = Client::submit(&handle, long_request()).unwrap();
    let patience = Duration::from_millis(100);
    let ended = thread.stop_within(patience);
    assert!(matches!(ended, Err(EngineError::Stuck(waited)) if waited == patience));
    assert!(!client.look().ended());
}

#[test]
fn a_stop_with_patience_ends_like_one_without() {
    let options = options();
    let (handle, thread) = start(options.clone(), move || Ok::<_, EngineError>(puppet(&options))).unwrap();
    thread.wait_ready().unwrap();
    let client = Client::submit(&handle, long_request()).unwrap();
    thread.stop_within(Duration::from_mins(1)).unwrap();
    assert!(!client.wait().failed());
    assert_eq!(handle.load().state(), EngineState::Stopped);
}
