//! Drafts, whoever made them, change nothing but the number of rounds.

use std::collections::BTreeMap;

use proptest::prelude::*;
use qwill_contract::{Request, SamplingParams};

use super::client::{Client, Outcome, assert_idle, request};
use super::harness::{Bench, VOCAB, any_request, options};
use super::puppet::Oracle;
use crate::EngineOptions;
use crate::live::Live;
use crate::schedule::SequenceKey;
use crate::speculation::{SpecMode, SpeculationOptions, SyntheticAcceptance};

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

/// An MTP module that knows the plain answers: of 8 tokens, how many are right.
pub(crate) fn oracle<'a>(
    answers: impl IntoIterator<Item = (&'a Request, &'a Outcome)>,
    right_of_8: usize,
) -> Oracle {
    let texts = answers.into_iter().flat_map(|(request, outcome)| {
        let text = |choice| [&request.prompt[..], &outcome.ids(choice)].concat();
        (0..outcome.choices.len()).map(text).collect::<Vec<_>>()
    });
    let texts: Vec<Vec<u32>> = texts.collect();
    Box::new(move |text| {
        let known = texts.iter().find(|known| known.len() > text.len() && known.starts_with(text));
        let token = known.map_or(0, |known| known[text.len()]);
        let is_right = (text.len() * 5 + token as usize) % 8 < right_of_8;
        if is_right { token } else { (token + 1) % VOCAB as u32 }
    })
}

/// Every way to speculate.
pub(crate) fn any_speculation() -> impl Strategy<Value = SpeculationOptions> {
    let mode = prop::sample::select(vec![SpecMode::Off, SpecMode::Mtp, SpecMode::Lookup, SpecMode::Auto]);
    (mode, 1usize..=15, any::<bool>()).prop_map(|(mode, max_draft_len, adaptive)| SpeculationOptions {
        mode,
        max_draft_len,
        adaptive,
        synthetic: None,
    })
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
            sequence.drafts = drafter.draft(answer, sequence.generated(), dice + key.choice);
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
    // Without the cache nobody waits for another's prompt, so that requests are numbered in their order.
    let mut bench = Bench::new(EngineOptions { prefix_cache: false, ..options.clone() });
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
        let options =
            EngineOptions { max_rows, prefill_slice_tokens: 64, pages: 60, ..options() };
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

/// Runs a request with an MTP module that is always right, beside another prompt. Returns the rounds it took.
fn rounds_with_mtp(max_draft_len: usize) -> usize {
    let plain = Bench::answer(&options(), long_request());
    let speculation =
        SpeculationOptions { mode: SpecMode::Mtp, max_draft_len, adaptive: false, synthetic: None };
    let mut bench = Bench::new(EngineOptions { speculation, ..options() });
    bench.engine.model.oracle = Some(oracle([(&long_request(), &plain)], 8));
    let mut client = bench.submit(long_request());
    let other =
        bench.submit(request(&[9; 600], SamplingParams { max_tokens: 1, ..SamplingParams::default() }));
    let mut rounds = 0;
    while !client.look().ended() {
        let before = client.look().ids(0).len();
        assert!(bench.turn().unwrap());
        rounds += usize::from(before > 0 && client.look().ids(0).len() > before);
    }
    bench.finish();
    other.wait();
    assert_eq!(client.wait(), plain);
    rounds
}

/// Every row that the module attends to has been there and was right, whatever steps came between.
#[test]
fn a_module_that_is_always_right_is_always_followed() {
    assert_eq!(rounds_with_mtp(15), 6);
    assert_eq!(rounds_with_mtp(1), 48);
    // Rings end at multiples of 32, which rounds of 4 reach.
    assert_eq!(rounds_with_mtp(3), 24);
}

#[test]
fn pairs_of_tokens_that_came_before_are_looked_up() {
    let sampling = SamplingParams { max_tokens: 97, ignore_eos: true, ..SamplingParams::default() };
    let prompt: Vec<u32> = (0..500).map(|at| at * at * 7 % VOCAB as u32).collect();
    let mut bench = Bench::new(EngineOptions {
        speculation: SpeculationOptions { mode: SpecMode::Lookup, adaptive: false, ..Default::default() },
        ..options()
    });
    let client = bench.submit(request(&prompt, sampling.clone()));
    let mut drafted = 0;
    while bench.turn().unwrap() {
        let sequences = bench.engine.live.values().flat_map(Live::running);
        drafted += sequences.map(|(_, sequence)| sequence.drafts.len()).sum::<usize>();
    }
    assert_eq!(client.wait(), Bench::answer(&options(), request(&prompt, sampling)));
    assert!(drafted > 0);
}

/// All the work is done; how many drafts count is as the table says.
#[test]
fn synthetic_acceptance_takes_as_many_drafts_as_the_table_says() {
    let synthetic = Some(SyntheticAcceptance::new(vec![1.0, 1.0, 0.0]).unwrap());
    let speculation =
        SpeculationOptions { mode: SpecMode::Mtp, max_draft_len: 3, adaptive: false, synthetic };
    let mut bench = Bench::new(EngineOptions { speculation, prefix_cache: false, ..options() });
    bench.engine.model.oracle = Some(Box::new(|text| text.len() as u32 % 40));
    let mut client = bench.submit(long_request());
    let mut lengths = Vec::new();
    while bench.turn().unwrap() {
        lengths.push(client.look().ids(0).len());
    }
    let steps: Vec<usize> = lengths.windows(2).map(|pair| pair[1] - pair[0]).collect();
    // Before a fold a round can have fewer rows.
    assert!(steps.iter().all(|tokens| (1..=3).contains(tokens)), "{steps:?}");
    assert!(steps.iter().filter(|tokens| **tokens == 3).count() * 10 >= steps.len() * 9, "{steps:?}");
}
