//! The prefix cache changes nothing but the time: whatever a request finds there, its tokens and log-probabilities are
//! those of an engine that remembers nothing, bit for bit.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use common::client::{Client, Outcome, assert_idle, request};
use common::{Setup, fast, golden, gpu, greedy, seasoned, text};
use qwill_contract::{EngineHandle, Request, SamplingParams};
use qwill_device::{Activations, Device, DeviceError, StateType};
use qwill_engine::EngineThread;
use serde_json::Value;

/// Token that begins a message.
const MESSAGE: u32 = 8167;

/// An engine that remembers and one that does not.
struct Pair {
    warm: (EngineHandle, EngineThread),
    cold: (EngineHandle, EngineThread),
}

impl Pair {
    fn start<D: Device>(
        setup: Setup,
        device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static,
    ) -> Self {
        let cold = Setup { prefix_cache: false, host_granules: 0, pages: 64, ..setup };
        Self { warm: setup.start(device.clone()), cold: cold.start(device) }
    }

    /// Asks all at once, and compares each answer with that of the cold engine, asked one by one.
    fn ask(&self, requests: &[Request]) -> Vec<Outcome> {
        let clients: Vec<Client> =
            requests.iter().map(|request| Client::submit(&self.warm.0, request.clone()).unwrap()).collect();
        let outcomes: Vec<Outcome> = clients.into_iter().map(Client::wait).collect();
        for (index, (request, warm)) in requests.iter().zip(&outcomes).enumerate() {
            let cold = Client::submit(&self.cold.0, request.clone()).unwrap().wait();
            assert!(!cold.failed() && cold.cached_tokens == 0);
            let (cached, prompt) = (warm.cached_tokens, request.prompt.len());
            assert!(
                warm.same_answer(&cold),
                "request {index}, {cached} of {prompt} tokens cached:\n{warm:?}\ncold:\n{cold:?}"
            );
        }
        outcomes
    }

    /// Waits until nothing is left to settle.
    fn rest(&self) {
        let settled = &self.warm.0.load().cache.settled_tokens;
        let mut before = u64::MAX;
        while settled.load(Ordering::Relaxed) != before {
            before = settled.load(Ordering::Relaxed);
            sleep(Duration::from_millis(60));
        }
    }

    fn stop(self) {
        assert_idle(self.warm.0.load());
        self.warm.1.stop().unwrap();
        self.cold.1.stop().unwrap();
    }
}

fn message(content: &[u32]) -> Vec<u32> {
    [&[MESSAGE], content].concat()
}

/// How the turns of a conversation are sampled.
fn sampling(turn: usize, chat: usize, tokens: usize) -> SamplingParams {
    if (turn + chat).is_multiple_of(2) { greedy(tokens) } else { seasoned(tokens, (turn * 10 + chat) as u64) }
}

/// Conversations that share a system prompt: turn after turn, each turn twice, with the last question changed, all at
/// once and one after another. Returns how many requests found something.
fn converse(pair: &Pair, perplexity: &Value, chats: usize, turns: usize, at_once: bool) -> usize {
    let system = message(&text(perplexity, 0, 150));
    let mut texts: Vec<Vec<u32>> = vec![system; chats];
    let mut hits = 0;
    let mut ask = |requests: &[Request]| {
        let outcomes = if at_once {
            pair.ask(requests)
        } else {
            requests.chunks(1).flat_map(|one| pair.ask(one)).collect()
        };
        hits += outcomes.iter().filter(|outcome| outcome.cached_tokens > 0).count();
        outcomes
    };
    for turn in 0..turns {
        let with_question = |(chat, text): (usize, &Vec<u32>), window: usize| {
            let question = message(&common::text(perplexity, window + chat, 20 + 37 * chat + 11 * turn));
            let prompt = [&text[..], &question, &message(&[9, 10])].concat();
            request(&prompt, sampling(turn, chat, 66))
        };
        let requests: Vec<Request> = texts.iter().enumerate().map(|one| with_question(one, turn)).collect();
        let outcomes = ask(&requests);
        pair.rest();
        let again: Vec<Request> = requests.iter().map(|one| request(&one.prompt, seasoned(5, 99))).collect();
        ask(&again);
        let changed: Vec<Request> =
            texts.iter().enumerate().map(|one| with_question(one, turn + 1)).collect();
        ask(&changed);
        texts =
            requests.iter().zip(outcomes).map(|(one, out)| [&one.prompt[..], &out.ids(0)].concat()).collect();
    }
    hits
}

/// Raw text: the same again, a longer one, one that leaves it at an odd place, several choices, scored prompts.
fn continue_texts(pair: &Pair, perplexity: &Value) {
    let long = (4..7).flat_map(|window| text(perplexity, window, 200)).collect::<Vec<u32>>();
    for (tokens, found) in [(300, 0), (300, 256), (590, 256), (590, 576), (333, 256), (577, 512)] {
        let outcome = pair.ask(&[request(&long[..tokens], greedy(10))]);
        assert!(outcome[0].cached_tokens >= found, "{} instead of {found}", outcome[0].cached_tokens);
    }
    for cut in [350, 450] {
        let other = [&long[..cut], &text(perplexity, 7, 90)].concat();
        let choices = Request { choices: 3, ..request(&other, seasoned(30, cut as u64)) };
        let scored = Request { prompt_logprobs: Some(2), ..request(&other, greedy(5)) };
        let salt = format!("cut at {cut}");
        let salted = Request { cache_salt: Some(salt.into()), ..request(&other, greedy(5)) };
        pair.ask(&[choices.clone(), scored]);
        assert!(pair.ask(&[choices])[0].cached_tokens >= cut - 64);
        assert_eq!(pair.ask(&[salted])[0].cached_tokens, 0);
    }
}

/// Conversations with room for all that they leave behind, then raw texts.
fn check_with_room<D: Device>(
    setup: Setup,
    device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static,
) {
    let perplexity = golden("perplexity.json");
    let pair = Pair::start(setup, device);
    let hits = converse(&pair, &perplexity, 3, 2, true);
    assert!(hits >= 3 * 2 * 3 - 3, "{hits}");
    continue_texts(&pair, &perplexity);
    pair.stop();
}

/// Little room on the device: pages go to the host store and come back.
fn check_with_room_in_the_host<D: Device>(
    setup: Setup,
    device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static,
) {
    let pair = Pair::start(Setup { pages: 16, host_granules: 800, ..setup }, device);
    let hits = converse(&pair, &golden("perplexity.json"), 4, 2, false);
    assert!(hits >= 4 * 2 * 3 - 1, "{hits}");
    let cache = &pair.warm.0.load().cache;
    let (host_pages, evictions) =
        (cache.host_pages.load(Ordering::Relaxed), cache.evictions.load(Ordering::Relaxed));
    assert!(host_pages > 0 && evictions == 0, "{host_pages} pages in the host, {evictions} evictions");
    pair.stop();
}

/// Little room everywhere: what was not used for longest is forgotten.
fn check_without_room<D: Device>(
    setup: Setup,
    device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static,
) {
    let pair = Pair::start(Setup { pages: 20, host_granules: 24, ..setup }, device);
    converse(&pair, &golden("perplexity.json"), 3, 2, true);
    assert!(pair.warm.0.load().cache.evictions.load(Ordering::Relaxed) > 0);
    pair.stop();
}

#[test]
fn with_room_in_f32() {
    check_with_room(Setup::f32(), || fast(Activations::F32));
}

#[test]
fn with_room_in_the_host_with_int8_keys_and_values() {
    check_with_room_in_the_host(Setup::int8_kv(), || fast(Activations::Int8));
}

#[test]
fn without_room_in_int4_with_states_in_half_precision() {
    check_without_room(Setup { state_type: StateType::F16, ..Setup::int4() }, || fast(Activations::Int8));
}

#[test]
fn on_the_gpu() {
    if let Some(device) = gpu() {
        for setup in [Setup { state_type: StateType::F16, ..Setup::int8_kv() }, Setup::int4()] {
            check_with_room(setup, device);
            check_with_room_in_the_host(setup, device);
            check_without_room(setup, device);
        }
    }
}

/// Shared beginnings of `message + chunk` tokens: the first message ends at any place in a page, and the texts part at
/// any place in a chunk.
fn sweep<D: Device>(
    setup: Setup,
    device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static,
    lengths: impl Iterator<Item = (usize, usize)>,
) {
    let perplexity = golden("perplexity.json");
    let pair = Pair::start(setup, device);
    let (first, second) = (text(&perplexity, 1, 200), text(&perplexity, 2, 200));
    for (in_page, in_chunk) in lengths {
        // The salt keeps one pair of texts from the next one.
        let shared = [message(&first[..63 + in_page]), message(&second)].concat();
        let shared = &shared[..64 + in_page + 1 + in_chunk];
        let with = |rest: usize| {
            let prompt = [shared, &text(&perplexity, rest, 70)].concat();
            let salt = format!("{in_page} {in_chunk}");
            Request { cache_salt: Some(salt.into()), ..request(&prompt, greedy(3)) }
        };
        let before = Client::submit(&pair.warm.0, with(3)).unwrap().wait();
        assert!(!before.failed() && before.cached_tokens == 0);
        assert_eq!(pair.ask(&[with(4)])[0].cached_tokens, 64 + in_page, "shared: {in_page}, {in_chunk}");
    }
    pair.stop();
}

#[test]
fn beginnings_of_many_lengths() {
    sweep(Setup::int4(), || fast(Activations::Int8), (0..64).step_by(5).map(|at| (at, (at * 37 + 11) % 64)));
}

#[test]
#[ignore = "4,096 pairs of prompts take minutes"]
fn beginnings_of_all_lengths() {
    let all = || (0..64).flat_map(|in_page| (0..64).map(move |in_chunk| (in_page, in_chunk)));
    sweep(Setup::int4(), || fast(Activations::Int8), all());
    if let Some(device) = gpu() {
        sweep(Setup { state_type: StateType::F16, ..Setup::int4() }, device, all());
    }
}
