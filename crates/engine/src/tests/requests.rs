//! What single requests ask for: lengths, stops, log-probabilities, refusals, cancelling.

use std::sync::atomic::Ordering;

use qwill_contract::{CancelFlag, FinishReason, Request, SamplingParams, SinkClosed};

use super::client::{Outcome, assert_idle, request};
use super::harness::{Bench, EOS, VOCAB, options};
use super::puppet::Fault;

fn free_running(max_tokens: usize) -> SamplingParams {
    SamplingParams { ignore_eos: true, max_tokens, ..SamplingParams::default() }
}

fn end_message(outcome: &Outcome) -> String {
    match &outcome.choices[0].end {
        Some(FinishReason::Error { message }) => message.clone(),
        other => panic!("ended with {other:?}"),
    }
}

#[test]
fn generation_ends_at_max_tokens_or_with_the_context() {
    let answer = Bench::answer(&options(), request(&[1; 10], free_running(100)));
    assert_eq!(answer.choices[0].tokens.len(), 100);
    assert_eq!(answer.choices[0].end, Some(FinishReason::Length));
    let answer = Bench::answer(&options(), request(&[1; 600], free_running(100)));
    assert_eq!(answer.choices[0].tokens.len(), 40);
    assert_eq!(answer.choices[0].end, Some(FinishReason::Length));
    let answer = Bench::answer(&options(), request(&[1; 640], free_running(100)));
    assert!(answer.choices[0].tokens.is_empty() && answer.processed_tokens == 640);
    assert_eq!(answer.choices[0].end, Some(FinishReason::Length));
}

/// The first position in a long greedy text at which a token appears that is not there before.
fn text_and_a_late_token() -> (Vec<u32>, usize) {
    let text = Bench::answer(&options(), request(&[2; 20], free_running(60))).ids(0);
    let late = (10..60).rev().find(|at| !text[..*at].contains(&text[*at])).unwrap();
    (text, late)
}

#[test]
fn a_stop_id_ends_the_text_and_is_its_last_token() {
    let (text, late) = text_and_a_late_token();
    let sampling = SamplingParams { stop_token_ids: vec![text[late]], ..free_running(60) };
    let answer = Bench::answer(&options(), request(&[2; 20], sampling.clone()));
    assert_eq!(answer.ids(0), text[..=late]);
    assert_eq!(answer.choices[0].end, Some(FinishReason::Stop { token: text[late] }));
    let answer =
        Bench::answer(&options(), request(&[2; 20], SamplingParams { min_tokens: late + 1, ..sampling }));
    assert_eq!(answer.ids(0)[..late], text[..late]);
    assert_ne!(answer.ids(0)[late], text[late], "a stop id was drawn before min_tokens");
}

#[test]
fn the_end_of_turn_stops_unless_it_is_ignored() {
    let (text, late) = text_and_a_late_token();
    let options = crate::EngineOptions { eos_token_ids: vec![EOS, text[late]], ..options() };
    let answer =
        Bench::answer(&options, request(&[2; 20], SamplingParams { ignore_eos: false, ..free_running(60) }));
    assert!(matches!(answer.choices[0].end, Some(FinishReason::Stop { .. })));
    let answer = Bench::answer(&options, request(&[2; 20], free_running(60)));
    assert_eq!((answer.ids(0), &answer.choices[0].end), (text, &Some(FinishReason::Length)));
}

#[test]
fn an_echo_reports_the_prompt_and_generates_nothing() {
    let prompt: Vec<u32> = (0..150).map(|token| token % VOCAB as u32).collect();
    let echo = Request { prompt_logprobs: Some(2), choices: 2, ..request(&prompt, free_running(0)) };
    let answer = Bench::answer(&options(), echo.clone());
    let logprobs = answer.prompt_logprobs.clone().unwrap();
    assert_eq!(logprobs.len(), 150);
    assert!(
        logprobs[0].is_none() && logprobs[1..].iter().all(|token| token.as_ref().unwrap().top.len() == 2)
    );
    assert!(
        answer
            .choices
            .iter()
            .all(|choice| choice.tokens.is_empty() && choice.end == Some(FinishReason::Length))
    );
    let longer = Bench::answer(&options(), Request { sampling: free_running(5), ..echo });
    assert_eq!(longer.prompt_logprobs, answer.prompt_logprobs);
    assert_eq!(longer.choices[1].tokens.len(), 5);
}

#[test]
fn log_probabilities_come_where_they_are_asked_for() {
    let answer = Bench::answer(&options(), request(&[1; 10], free_running(3)));
    assert!(
        answer.prompt_logprobs.is_none()
            && answer.choices[0].tokens.iter().all(|token| token.logprobs.is_none())
    );
    let sampling = SamplingParams { logprobs: Some(4), ..free_running(3) };
    let answer = Bench::answer(&options(), request(&[1; 10], sampling));
    assert!(answer.choices[0].tokens.iter().all(|token| token.logprobs.as_ref().unwrap().top.len() == 4));
}

#[test]
fn what_can_never_run_is_refused_at_once() {
    let refused = |request: Request| {
        let answer = Bench::answer(&options(), request);
        assert!(!answer.started);
        end_message(&answer)
    };
    assert!(refused(request(&[1; 641], free_running(1))).contains("641 tokens, the context holds 640"));
    assert!(refused(request(&[], free_running(1))).contains("empty"));
    assert!(refused(request(&[VOCAB as u32], free_running(1))).contains("token 50 in the prompt"));
    assert!(refused(Request { choices: 7, ..request(&[1], free_running(1)) }).contains("7 choices"));
    let many = Request { choices: 6, ..request(&[1], free_running(600)) };
    assert!(refused(many).contains("need 3840 tokens of KV, there are 2560"));
}

#[test]
fn a_cancelled_request_is_gone_before_the_next_step() {
    let mut bench = Bench::new(options());
    let mut long = bench.submit(Request { choices: 2, ..request(&[1; 300], free_running(200)) });
    let mut other = bench.submit(request(&[2; 10], free_running(200)));
    for _ in 0..12 {
        bench.turn().unwrap();
    }
    assert!(!long.look().ids(1).is_empty() && !other.look().ids(0).is_empty());
    assert_eq!(bench.handle.load().running.load(Ordering::Relaxed), 3);
    long.cancel.cancel();
    let steps = bench.handle.load().steps.load(Ordering::Relaxed);
    bench.turn().unwrap();
    assert_eq!(bench.handle.load().steps.load(Ordering::Relaxed), steps + 1);
    assert_eq!(bench.handle.load().running.load(Ordering::Relaxed), 1);
    assert_eq!(bench.handle.load().pages_used.load(Ordering::Relaxed), 4);
    assert!(long.wait().choices.iter().all(|choice| choice.end == Some(FinishReason::Cancelled)));
    bench.finish();
    assert_eq!(other.wait().choices[0].tokens.len(), 200);
    assert_idle(bench.handle.load());
}

#[test]
fn one_choice_can_be_cancelled_and_the_others_go_on() {
    let choice_cancel = vec![CancelFlag::default(), CancelFlag::default(), CancelFlag::default()];
    let three = Request { choices: 3, choice_cancel, ..request(&[1; 70], free_running(200)) };
    let alone = Bench::answer(&options(), Request { choice_cancel: Vec::new(), ..three.clone() });
    let mut bench = Bench::new(options());
    let mut client = bench.submit(three.clone());
    // During the prompt, which one choice processes for all, a lone one is kept.
    three.choice_cancel[0].cancel();
    bench.turn().unwrap();
    assert_eq!(bench.handle.load().running.load(Ordering::Relaxed), 3);
    for _ in 0..5 {
        bench.turn().unwrap();
    }
    assert_eq!(client.look().choices[0].end, Some(FinishReason::Cancelled));
    assert_eq!(bench.handle.load().running.load(Ordering::Relaxed), 2);
    let pages_of_two = 1 + 2 * 4;
    assert_eq!(bench.handle.load().pages_used.load(Ordering::Relaxed), pages_of_two);
    three.choice_cancel[2].cancel();
    bench.turn().unwrap();
    assert_eq!(bench.handle.load().running.load(Ordering::Relaxed), 1);
    bench.finish();
    let outcome = client.wait();
    assert_eq!(outcome.choices[1], alone.choices[1]);
    assert_eq!(outcome.choices[2].end, Some(FinishReason::Cancelled));
    assert!(outcome.choices[0].tokens.len() < 3 && outcome.choices[2].tokens.len() < 9);
    assert_idle(bench.handle.load());
}

#[test]
fn cancelling_every_choice_ends_a_request_in_its_prompt() {
    let choice_cancel = vec![CancelFlag::default(), CancelFlag::default()];
    let two = Request { choices: 2, choice_cancel, ..request(&[1; 600], free_running(20)) };
    let mut bench = Bench::new(options());
    let client = bench.submit(two.clone());
    bench.turn().unwrap();
    two.choice_cancel.iter().for_each(CancelFlag::cancel);
    bench.turn().unwrap();
    assert_idle(bench.handle.load());
    assert!(client.wait().choices.iter().all(|choice| choice.end == Some(FinishReason::Cancelled)));
}

#[test]
fn a_waiting_request_can_be_cancelled() {
    let mut bench = Bench::new(options());
    let running = bench.submit(Request { choices: 6, ..request(&[1; 10], free_running(20)) });
    let waiting = bench.submit(request(&[2; 10], free_running(20)));
    bench.turn().unwrap();
    assert_eq!(bench.handle.load().waiting.load(Ordering::Relaxed), 1);
    waiting.cancel.cancel();
    bench.turn().unwrap();
    assert_eq!(bench.handle.load().waiting.load(Ordering::Relaxed), 0);
    let waiting = waiting.wait();
    assert!(!waiting.started && waiting.choices[0].end == Some(FinishReason::Cancelled));
    bench.finish();
    assert!(!running.wait().failed());
    assert_idle(bench.handle.load());
}

#[test]
fn a_closed_sink_cancels() {
    let mut bench = Bench::new(options());
    let sink = |_event| Err(SinkClosed);
    bench.handle.submit(request(&[1; 10], free_running(100)), Box::new(sink)).unwrap();
    bench.turn().unwrap();
    bench.turn().unwrap();
    assert_idle(bench.handle.load());
    assert!(!bench.turn().unwrap());
}

#[test]
fn first_come_first_served_and_nobody_overtakes() {
    let mut bench = Bench::new(options());
    let first = bench.submit(Request { choices: 5, ..request(&[1; 10], free_running(30)) });
    let mut wide = bench.submit(Request { choices: 4, ..request(&[2; 10], free_running(5)) });
    let mut small = bench.submit(request(&[3; 10], free_running(5)));
    for _ in 0..20 {
        bench.turn().unwrap();
        assert!(
            !wide.look().started && !small.look().started,
            "one slot is free, the next request needs four"
        );
    }
    bench.finish();
    assert!(!first.wait().failed() && !wide.wait().failed() && !small.wait().failed());
    assert_idle(bench.handle.load());
}

#[test]
fn a_token_without_text_ends_its_request_only() {
    // Calls: clear, forward, sample (both prompts share the slice and the draw).
    let mut bench = Bench::with_fault(options(), Fault::WildTokenAt(3));
    let first = bench.submit(request(&[1; 10], free_running(5)));
    bench.turn().unwrap();
    let second = bench.submit(request(&[2; 10], free_running(5)));
    bench.finish();
    assert!(end_message(&first.wait()).contains("drew token 50"));
    assert_eq!(second.wait().choices[0].tokens.len(), 5);
    assert_idle(bench.handle.load());
}
