//! Start, readiness, drain, end.

use std::time::{Duration, Instant};

use qwill_contract::{EngineState, FinishReason, Request, SamplingParams, SubmitError};

use super::client::{Client, assert_idle, request};
use super::harness::{Bench, options, puppet};
use super::puppet::{Fault, Puppet};
use crate::speculation::SpeculationOptions;
use crate::{EngineError, EngineOptions, EngineThread, start};

fn start_puppet(options: EngineOptions) -> (qwill_contract::EngineHandle, EngineThread) {
    start(options.clone(), move || Ok::<_, EngineError>(puppet(&options))).unwrap()
}

fn long_request() -> Request {
    let sampling = SamplingParams { ignore_eos: true, max_tokens: 300, ..SamplingParams::default() };
    request(&[1; 300], sampling)
}

#[test]
fn a_drain_finishes_running_and_waiting_requests() {
    let (handle, thread) = start_puppet(EngineOptions { max_sequences: 2, ..options() });
    thread.wait_ready().unwrap();
    thread.wait_ready().unwrap();
    assert_eq!(handle.load().state(), EngineState::Ready);
    let clients: Vec<Client> = (0..10).map(|_| Client::submit(&handle, long_request()).unwrap()).collect();
    thread.stop().unwrap();
    for client in clients {
        assert_eq!(client.wait().choices[0].tokens.len(), 300);
    }
    assert_eq!(handle.load().state(), EngineState::Stopped);
    assert!(Client::submit(&handle, long_request()).is_err());
    assert_idle(handle.load());
}

#[test]
fn the_more_urgent_are_answered_first() {
    let mut bench = Bench::new(EngineOptions { max_sequences: 1, ..options() });
    let client = |bench: &mut Bench, priority| bench.submit(Request { priority, ..long_request() });
    let priorities = [0, 5, -1, 0, -1];
    let mut clients: Vec<(usize, Client)> =
        priorities.iter().map(|priority| client(&mut bench, *priority)).enumerate().collect();
    let mut order = Vec::new();
    while !clients.is_empty() {
        bench.turn().unwrap();
        clients.retain_mut(|(number, client)| {
            let ended = client.look().ended();
            if ended {
                order.push(*number);
            }
            !ended
        });
    }
    assert_eq!(order, [2, 4, 0, 3, 1]);
}

#[test]
fn the_thread_ends_when_every_handle_is_gone() {
    let (handle, thread) = start_puppet(options());
    let client = Client::submit(&handle, long_request()).unwrap();
    let other = handle.clone();
    drop(handle);
    assert_eq!(client.wait().choices[0].tokens.len(), 300);
    drop(other);
    thread.join().unwrap();
}

#[test]
fn an_idle_engine_notices_a_drain() {
    let (handle, thread) = start_puppet(options());
    thread.wait_ready().unwrap();
    let asked = Instant::now();
    handle.load().request_drain();
    thread.join().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(2));
}

#[test]
fn the_queue_is_bounded_and_counted_until_admission() {
    let options = EngineOptions { max_sequences: 1, queue_capacity: 3, ..options() };
    let (go, wait) = crossbeam_channel::bounded::<()>(0);
    let (handle, thread) = start(options.clone(), move || {
        // Until the test lets go, the engine is starting and takes nothing out of the queue.
        let _ = wait.recv();
        Ok::<_, EngineError>(puppet(&options))
    })
    .unwrap();
    assert_eq!(handle.load().state(), EngineState::Starting);
    let clients: Vec<Client> = (0..3).map(|_| Client::submit(&handle, long_request()).unwrap()).collect();
    let full = Client::submit(&handle, long_request()).err();
    assert_eq!(full, Some(SubmitError::QueueFull { waiting: 3, capacity: 3 }));
    drop(go);
    for client in clients {
        assert_eq!(client.wait().choices[0].tokens.len(), 300);
    }
    thread.stop().unwrap();
    assert_idle(handle.load());
}

#[test]
fn a_model_that_cannot_be_made_is_reported_with_its_causes() {
    let no_model = || Err::<Puppet, _>(std::io::Error::other("the file is missing"));
    let (handle, thread) = start(options(), no_model).unwrap();
    assert!(
        matches!(thread.wait_ready(), Err(EngineError::Build(error)) if error.to_string().contains("missing"))
    );
    let EngineState::Failed(message) = handle.load().state() else { panic!("{:?}", handle.load().state()) };
    assert_eq!(message, "the model could not be loaded: the file is missing");
    assert!(thread.join().is_err());
}

#[test]
fn a_panic_while_loading_is_reported_and_waiting_requests_are_told() {
    let (handle, thread) = start(options(), || -> Result<Puppet, EngineError> {
        std::thread::sleep(Duration::from_millis(50));
        panic!("bad weights")
    })
    .unwrap();
    let early = Client::submit(&handle, long_request()).unwrap();
    assert!(thread.wait_ready().unwrap_err().to_string().contains("bad weights"));
    assert!(matches!(early.wait().choices[0].end, Some(FinishReason::Error { .. })));
    assert_idle(handle.load());
}

#[test]
fn an_engine_is_not_ready_before_it_has_generated() {
    for fault in [Fault::ErrorAt(2), Fault::WildTokenAt(3), Fault::ErrorAt(5)] {
        let options = options();
        let (handle, thread) = start(options.clone(), move || {
            let mut puppet = puppet(&options);
            puppet.fault = fault;
            Ok::<_, EngineError>(puppet)
        })
        .unwrap();
        assert!(matches!(thread.wait_ready(), Err(EngineError::SelfTest(_))), "{fault:?}");
        assert!(matches!(handle.load().state(), EngineState::Failed(_)));
    }
}

#[test]
fn options_that_cannot_work_are_refused() {
    let good = options();
    for wrong in [
        EngineOptions { model_names: vec![], ..good.clone() },
        EngineOptions { max_sequences: 0, ..good.clone() },
        EngineOptions { max_context_tokens: 40 * 64 + 1, ..good.clone() },
        EngineOptions { prefill_slice_tokens: 63, ..good.clone() },
        EngineOptions { prefill_slice_tokens: 129, ..good.clone() },
        EngineOptions { max_logit_rows: 63, ..good.clone() },
        EngineOptions {
            speculation: SpeculationOptions { max_draft_len: 16, ..Default::default() },
            ..good.clone()
        },
    ] {
        let result = start(wrong.clone(), move || Ok::<_, EngineError>(puppet(&wrong)));
        assert!(matches!(result, Err(EngineError::Options(_))));
    }
}
