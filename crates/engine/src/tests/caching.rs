//! What a request finds that others left, and that its answer is not changed by it.

use std::sync::atomic::Ordering;

use qwill_contract::{CacheLoad, FinishReason, Request};

use super::client::{Client, Outcome};
use super::harness::{Bench, ask, asking, conversation, message, options};
use super::puppet::Fault;
use crate::EngineOptions;

fn misses(bench: &Bench) -> Vec<(&'static str, u64)> {
    let counts = bench.handle.load().cache.misses.iter().map(|count| count.load(Ordering::Relaxed));
    CacheLoad::MISS_REASONS.into_iter().zip(counts).filter(|(_, count)| *count > 0).collect()
}

#[test]
fn the_same_prompt_begins_at_its_last_message_or_chunk() {
    let mut bench = Bench::new(options());
    let chat = [message(150, 9), message(120, 10), message(5, 11)].concat();
    assert_eq!(ask(&mut bench, &asking(&chat, 20)).cached_tokens, 0);
    assert_eq!(ask(&mut bench, &asking(&chat, 20)).cached_tokens, 270);
    let text = vec![12; 250];
    assert_eq!(ask(&mut bench, &asking(&text, 20)).cached_tokens, 0);
    assert_eq!(ask(&mut bench, &asking(&text, 20)).cached_tokens, 200, "where the second segment begins");
    assert_eq!(bench.handle.load().cache.hits.load(Ordering::Relaxed), 2);
    bench.assert_nothing_is_left();
}

#[test]
fn a_flush_forgets_everything_and_touches_nothing_that_runs() {
    let mut bench = Bench::new(options());
    let chat = [message(150, 9), message(120, 10), message(5, 11)].concat();
    ask(&mut bench, &asking(&chat, 20));
    let running = bench.submit(asking(&chat, 60));
    (0..5).for_each(|_| assert!(bench.turn().unwrap()));
    let flush = bench.handle.load().cache.request_flush();
    assert!(bench.turn().unwrap());
    assert!(bench.handle.load().cache.is_flushed(flush));
    assert_eq!(bench.handle.load().cache.snapshots.load(Ordering::Relaxed), 0);
    bench.finish();
    assert!(running.wait().same_answer(&Bench::answer(&options(), asking(&chat, 60))));
    let flush = bench.handle.load().cache.request_flush();
    assert!(!bench.turn().unwrap(), "nothing else is to be done");
    assert!(bench.handle.load().cache.is_flushed(flush), "an idle engine does it too");
    assert_eq!(ask(&mut bench, &asking(&chat, 20)).cached_tokens, 0);
    bench.assert_nothing_is_left();
}

#[test]
fn a_conversation_goes_on_where_its_last_answer_ended() {
    let mut bench = Bench::new(options());
    let mut chat = message(100, 9);
    let mut settled = 0;
    for turn in 0..4 {
        chat.extend(message(3, 20 + turn));
        let outcome = ask(&mut bench, &asking(&chat, 90));
        // Within a chunk: a snapshot so near to another is not taken.
        let cached = outcome.cached_tokens;
        assert!(cached <= settled && cached + 64 > settled, "{cached} of {settled}");
        chat.extend(outcome.ids(0));
        settled = bench.engine.chunk_rule.lasting_ends(&chat).last().copied().unwrap();
        assert!(settled > chat.len() - 64);
        chat.extend(message(30, 30 + turn));
    }
    assert!(bench.handle.load().cache.settled_tokens.load(Ordering::Relaxed) > 0);
    bench.assert_nothing_is_left();
}

#[test]
fn what_two_prompts_share_a_third_one_finds() {
    let mut bench = Bench::new(options());
    let prompt = |last: u32| [conversation(2, 133), vec![last; 80]].concat();
    let cached: Vec<usize> =
        (10..14).map(|last| ask(&mut bench, &asking(&prompt(last), 5)).cached_tokens).collect();
    let ends = bench.engine.chunk_rule.chunk_ends(&prompt(10));
    let shared = ends.into_iter().filter(|end| *end <= 133).max().unwrap();
    assert_eq!(cached[2..], [shared, shared], "{cached:?}");
    bench.assert_nothing_is_left();
}

#[test]
fn prompts_that_come_at_once_compute_once_what_they_share() {
    let mut bench = Bench::new(options());
    let asks = |question: u32| asking(&[message(400, 9), message(60, 20 + question)].concat(), 5);
    let clients: Vec<_> = (0..5).map(|question| bench.submit(asks(question))).collect();
    let other = bench.submit(asking(&[8; 30], 5));
    bench.finish();
    let outcomes: Vec<Outcome> = clients.into_iter().map(Client::wait).collect();
    let cached: Vec<usize> = outcomes.iter().map(|outcome| outcome.cached_tokens).collect();
    assert_eq!(cached, [0, 400, 400, 400, 400]);
    assert_eq!(bench.handle.load().prompt_tokens.load(Ordering::Relaxed), 400 + 5 * 60 + 30);
    assert!(!other.wait().failed());
    for (question, outcome) in outcomes.iter().enumerate() {
        assert!(outcome.same_answer(&Bench::answer(&options(), asks(question as u32))));
    }
    bench.assert_nothing_is_left();
}

#[test]
fn who_follows_goes_on_alone_when_the_other_is_gone() {
    let mut bench = Bench::new(options());
    let asks = |question: u32| asking(&[message(500, 9), message(60, 20 + question)].concat(), 5);
    let first = bench.submit(asks(0));
    let mut second = bench.submit(asks(1));
    let third = bench.submit(asks(2));
    assert!(bench.turn().unwrap() && !second.look().started);
    first.cancel.cancel();
    third.cancel.cancel();
    bench.finish();
    assert_eq!(first.wait().choices[0].end, Some(FinishReason::Cancelled));
    assert_eq!(third.wait().choices[0].end, Some(FinishReason::Cancelled));
    assert!(second.wait().same_answer(&Bench::answer(&options(), asks(1))));
    bench.assert_nothing_is_left();
}

#[test]
fn salts_share_nothing() {
    let mut bench = Bench::new(options());
    let salted = |salt: Option<&str>| Request { cache_salt: salt.map(Into::into), ..asking(&[9; 150], 5) };
    for salt in [None, Some("a"), Some("b")] {
        assert_eq!(ask(&mut bench, &salted(salt)).cached_tokens, 0);
        assert_eq!(ask(&mut bench, &salted(salt)).cached_tokens, 128);
    }
    assert_eq!(misses(&bench), [("other_salt", 2), ("diverged", 1)]);
    bench.assert_nothing_is_left();
}

#[test]
fn log_probabilities_of_a_prompt_are_computed_but_others_may_begin_there() {
    let mut bench = Bench::new(options());
    let scored = Request { prompt_logprobs: Some(1), ..asking(&[9; 150], 5) };
    assert_eq!(ask(&mut bench, &scored).cached_tokens, 0);
    assert_eq!(ask(&mut bench, &scored).cached_tokens, 0);
    assert_eq!(ask(&mut bench, &asking(&[9; 150], 5)).cached_tokens, 128);
    assert_eq!(misses(&bench), [("off", 2)]);
    bench.assert_nothing_is_left();
}

#[test]
fn a_cache_that_is_off_or_without_memory_finds_nothing() {
    let off = Bench::new(EngineOptions { prefix_cache: false, ..options() });
    for mut bench in [off, Bench::with_host(options(), 0), Bench::with_host(options(), 1)] {
        for _ in 0..2 {
            assert_eq!(ask(&mut bench, &asking(&[9; 150], 5)).cached_tokens, 0);
        }
        assert_eq!(misses(&bench), [("off", 2)]);
        assert_eq!(bench.engine.pages.free(), bench.engine.pages.total());
    }
}

/// Several conversations that together need three times the pages that there are.
#[test]
fn alternating_conversations_come_back_from_the_host_store() {
    let mut bench = Bench::with_host(EngineOptions { pages: 12, ..options() }, 60);
    let mut chats: Vec<Vec<u32>> = (0..4).map(|chat| message(500, 20 + chat)).collect();
    for turn in 0..3 {
        for chat in &mut chats {
            chat.extend(message(3, 9));
            let outcome = ask(&mut bench, &asking(chat, 10));
            assert_eq!(outcome.cached_tokens > 400, turn > 0, "turn {turn}: {}", outcome.cached_tokens);
            chat.extend(outcome.ids(0));
        }
    }
    let gauges = &bench.handle.load().cache;
    assert!(gauges.host_pages.load(Ordering::Relaxed) > 12);
    assert_eq!(gauges.evictions.load(Ordering::Relaxed), 0);
    bench.assert_nothing_is_left();
}

#[test]
fn what_was_not_used_for_longest_makes_room() {
    let mut bench = Bench::with_host(options(), 4);
    for token in [9, 10, 9, 11] {
        ask(&mut bench, &asking(&[token; 80], 5));
    }
    assert_eq!(bench.handle.load().cache.evictions.load(Ordering::Relaxed), 1);
    assert_eq!(ask(&mut bench, &asking(&[9; 80], 5)).cached_tokens, 64);
    assert_eq!(ask(&mut bench, &asking(&[10; 80], 5)).cached_tokens, 0);
    assert_eq!(misses(&bench), [("evicted", 1), ("diverged", 3)]);
    bench.assert_nothing_is_left();
}

#[test]
fn settling_makes_room_for_whoever_comes() {
    let options = EngineOptions { pages: 10, max_sequences: 1, ..options() };
    let mut bench = Bench::with_host(options, 40);
    let mut long = bench.submit(asking(&[9; 300], 300));
    while !long.look().ended() {
        assert!(bench.turn().unwrap());
    }
    assert!(bench.turn().unwrap(), "the text is being settled");
    assert!(bench.engine.settling.sequence().is_some());
    let wide = bench.submit(asking(&[10; 400], 200));
    bench.finish();
    assert_eq!(wide.wait().choices[0].end, Some(FinishReason::Length));
    let text = [vec![9; 300], long.wait().ids(0)].concat();
    let outcome = bench.ask(asking(&text, 5));
    assert!(outcome.cached_tokens > 600 - 64, "settled after all: {}", outcome.cached_tokens);
    bench.assert_nothing_is_left();
}

#[test]
fn a_device_error_empties_the_cache() {
    for call in 1..60 {
        let mut bench = Bench::with_host(EngineOptions { pages: 12, ..options() }, 30);
        let chats: Vec<Vec<u32>> = (0..3).map(|chat| message(400, 20 + chat)).collect();
        for chat in &chats {
            bench.ask(asking(chat, 5));
        }
        let calls = bench.engine.model.calls();
        bench.engine.model.fault = Fault::ErrorAt(calls + call);
        let outcomes: Vec<Outcome> = chats.iter().map(|chat| bench.ask(asking(chat, 80))).collect();
        assert!(outcomes.iter().filter(|outcome| outcome.failed()).count() <= 1);
        for (chat, outcome) in chats.iter().zip(outcomes) {
            assert!(outcome.failed() || outcome.same_answer(&Bench::answer(&options(), asking(chat, 80))));
        }
        bench.assert_nothing_is_left();
    }
}
