//! Devices that fail.

use std::time::Duration;

use proptest::prelude::*;
use qwill_contract::{EngineState, FinishReason, Request, SamplingParams};

use super::client::{Client, assert_idle, request};
use super::harness::{Bench, any_request, options, puppet};
use super::puppet::Fault;
use crate::{EngineError, start};

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
