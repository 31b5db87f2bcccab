//! Requests beside others: random mates that come, are cancelled and go.

use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use qwill_contract::{CancelFlag, EngineHandle, Request, SamplingParams};

use super::client::{Client, request};
use super::{VOCAB, seasoned};

/// `SplitMix64`: the tests' own dice.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % limit as u64) as usize
    }
}

/// Submits a copy of a request that is cancelled by itself.
pub(crate) fn submit(handle: &EngineHandle, request: &Request) -> Client {
    Client::submit(handle, Request { cancel: CancelFlag::default(), ..request.clone() }).unwrap()
}

/// Random text for somebody whose answer nobody looks at.
pub(crate) fn mate(dice: &mut Dice) -> Request {
    let prompt: Vec<u32> = (0..=dice.below(130)).map(|_| dice.below(VOCAB) as u32).collect();
    let sampling = SamplingParams { min_tokens: 0, ..seasoned(1 + dice.below(40), dice.below(100) as u64) };
    Request { choices: 1 + dice.below(2), ..request(&prompt, sampling) }
}

/// Waits until the engine has taken so many steps more.
pub(crate) fn wait_for_steps(handle: &EngineHandle, steps: usize) {
    let end = handle.load().steps.load(Ordering::Relaxed) + steps as u64;
    // An idle engine takes no steps, so give up after a while; where the mates come is random anyway.
    for _ in 0..200 {
        if handle.load().steps.load(Ordering::Relaxed) >= end {
            return;
        }
        sleep(Duration::from_micros(200));
    }
}
