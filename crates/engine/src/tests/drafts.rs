//! Drafts, whoever made them, change nothing but the number of rounds.

use std::collections::BTreeMap;

use proptest::prelude::*;
use qwill_contract::{Request, SamplingParams};

use super::client::{Client, Outcome, assert_idle, request};
use super::harness::{Bench, VOCAB, any_request, options};
use crate::EngineOptions;
use crate::schedule::SequenceKey;

/// How a drafter that knows the plain answer guesses: of 8 tokens, how many are right.
#[derive(Debug, Clone, Copy)]
struct Drafter {
    right_of_8: usize,
    most: usize,
}

impl Drafter {
    /// Drafts behind the tokens that a sequence has generated; `dice` stands for everything that a guess depends on.
    fn draft(self, answer: &[u32], generated: usize, dice: usize) -> Vec<u32> {
        let guess = |at: usize| {
            let token = answer.get(at).copied().unwrap_or(dice as u32 % VOCAB as u32);
            let is_right = (at * 7 + dice * 5) % 8 < self.right_of_8;
            if is_right { token } else { (token + 1 + (at + dice) as u32 % 40) % VOCAB as u32 }
        };
        let length = if self.right_of_8 == 8 { self.most } else { (dice * 3 + generated) % (self.most + 1) };
        (generated..generated + length).map(guess).collect()
    }
}

fn drafter() -> impl Strategy<Value = Drafter> {
    (0usize..=8, 0usize..20).prop_map(|(right_of_8, most)| Drafter { right_of_8, most })
}

/// Gives every running sequence new drafts.
fn put_drafts(bench: &mut Bench, answers: &BTreeMap<SequenceKey, Vec<u32>>, drafter: Drafter, dice: usize) {
    for (key, answer) in answers {
        let Some(live) = bench.engine.live.get_mut(&key.request).filter(|live| live.prompt_done()) else {
            continue;
        };
        if let Some(sequence) = &mut live.sequences[key.choice] {
            sequence.drafts = drafter.draft(answer, sequence.generated, dice + key.choice);
        }
    }
}

/// Runs requests side by side with drafts. Returns what came of them and the rounds it took.
fn answer_with_drafts(
    options: &EngineOptions,
    requests: &[Request],
    answers: &[Outcome],
    drafter: Drafter,
) -> (Vec<Outcome>, usize) {
    let mut bench = Bench::new(options.clone());
    let clients: Vec<Client> = requests.iter().map(|request| bench.submit(request.clone())).collect();
    let mut known = BTreeMap::new();
    for (request, answer) in answers.iter().enumerate() {
        for choice in 0..answer.choices.len() {
            known.insert(SequenceKey { request: request as u64, choice }, answer.ids(choice));
        }
    }
    let mut turns = 0;
    while bench.turn().unwrap() {
        put_drafts(&mut bench, &known, drafter, turns);
        turns += 1;
    }
    assert_idle(bench.handle.load());
    (clients.into_iter().map(Client::wait).collect(), turns)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn an_answer_does_not_depend_on_drafts(
        requests in prop::collection::vec(any_request(), 1..7),
        drafter in drafter(),
        max_rows in prop_oneof![Just(64usize), Just(128)],
    ) {
        let options = EngineOptions { max_rows, prefill_slice_tokens: 64, pages: 60, ..options() };
        let plain: Vec<Outcome> = requests.iter().map(|one| Bench::answer(&options, one.clone())).collect();
        let (drafted, _) = answer_with_drafts(&options, &requests, &plain, drafter);
        prop_assert_eq!(drafted, plain);
    }
}

fn long_request() -> Request {
    let sampling = SamplingParams { max_tokens: 97, ignore_eos: true, ..Default::default() };
    request(&[1; 70], sampling)
}

/// 97 tokens: one from the prompt, 96 in rounds of 16, which a ring of 32 divides.
#[test]
fn right_drafts_take_a_round_for_16_tokens_and_wrong_ones_a_round_for_each() {
    let plain = [Bench::answer(&options(), long_request())];
    let turns = |right_of_8| {
        let drafter = Drafter { right_of_8, most: 15 };
        let (drafted, turns) = answer_with_drafts(&options(), &[long_request()], &plain, drafter);
        assert_eq!(drafted, plain);
        turns
    };
    assert_eq!(turns(8), 1 + 6);
    assert_eq!(turns(0), 1 + 96);
}
