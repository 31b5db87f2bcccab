//! One answer: what a request gets does not depend on who else is there, on slices, pages or cancellations.

use proptest::prelude::*;
use qwill_contract::{FinishReason, Request, SamplingParams};

use super::client::request;
use super::drafts::{any_speculation, oracle};
use super::harness::{Bench, any_request, options};
use crate::EngineOptions;

#[derive(Debug, Clone)]
struct Guest {
    request: Request,
    arrives_at: usize,
    cancelled_at: Option<usize>,
}

fn guest() -> impl Strategy<Value = Guest> {
    let cancelled = prop::option::weighted(0.3, 0usize..80);
    (any_request(), 0usize..60, cancelled).prop_map(|(request, arrives_at, cancelled_at)| Guest {
        request,
        arrives_at,
        cancelled_at,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_request_gets_the_same_answer_in_any_company(
        guests in prop::collection::vec(guest(), 1..17),
        slice in prop_oneof![Just(64usize), Just(100), Just(128), Just(300)],
        sequences in 3usize..9,
        pages in 30usize..60,
        speculation in any_speculation(),
        right_of_8 in 0usize..=8,
        granules in 0usize..60,
    ) {
        let alone: Vec<_> = guests.iter().map(|guest| Bench::answer(&options(), guest.request.clone())).collect();
        let crowded = EngineOptions {
            speculation,
            prefill_slice_tokens: slice,
            max_rows: slice,
            max_sequences: sequences,
            pages,
            ..options()
        };
        let mut bench = Bench::with_host(crowded, granules);
        bench.engine.model.oracle = Some(oracle(guests.iter().map(|guest| &guest.request).zip(&alone), right_of_8));
        let mut clients: Vec<_> = guests.iter().map(|_| None).collect();
        for step in 0.. {
            for (guest, client) in guests.iter().zip(&mut clients) {
                if guest.arrives_at == step {
                    // A request carries its own cancel flag; the same guest also runs alone below.
                    let cancel = qwill_contract::CancelFlag::default();
                    *client = Some(bench.submit(Request { cancel, ..guest.request.clone() }));
                }
                if let (true, Some(client)) = (guest.cancelled_at == Some(step), &client) {
                    client.cancel.cancel();
                }
            }
            if !bench.turn().unwrap() && step > 80 {
                break;
            }
        }
        bench.assert_nothing_is_left();
        for ((guest, client), alone) in guests.iter().zip(clients).zip(alone) {
            let crowded = client.unwrap().wait();
            prop_assert!(!alone.failed(), "{:?}", alone);
            for (crowded, alone) in crowded.choices.iter().zip(&alone.choices) {
                if crowded.end == Some(FinishReason::Cancelled) {
                    prop_assert!(guest.cancelled_at.is_some());
                    prop_assert_eq!(&crowded.tokens[..], &alone.tokens[..crowded.tokens.len()]);
                } else {
                    prop_assert_eq!(crowded, alone);
                }
            }
            let cancelled = guest.cancelled_at.is_some();
            prop_assert!(cancelled || crowded.same_answer(&alone), "{:?} instead of {:?}", crowded, alone);
        }
    }

    #[test]
    fn choice_i_is_a_request_with_seed_plus_i(request in any_request()) {
        let together = Bench::answer(&options(), Request { choices: 3, ..request.clone() });
        for choice in 0..3 {
            let seed = request.sampling.seed.wrapping_add(choice as u64);
            let sampling = SamplingParams { seed, ..request.sampling.clone() };
            let alone = Bench::answer(&options(), Request { choices: 1, sampling, ..request.clone() });
            prop_assert_eq!(&together.choices[choice], &alone.choices[0]);
        }
    }
}

#[test]
fn hot_choices_differ_and_cold_ones_do_not() {
    let sampling = SamplingParams { ignore_eos: true, max_tokens: 100, ..SamplingParams::default() };
    let cold = Request { choices: 2, ..request(&[1; 70], sampling) };
    let answer = Bench::answer(&options(), cold.clone());
    assert_eq!(answer.choices[0], answer.choices[1]);
    let sampling = SamplingParams { temperature: 1.0, ..cold.sampling.clone() };
    let answer = Bench::answer(&options(), Request { sampling, ..cold });
    assert_ne!(answer.choices[0], answer.choices[1]);
}
