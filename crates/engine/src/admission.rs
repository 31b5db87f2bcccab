//! What a request will use, and the queue of those that wait for it.

use std::collections::VecDeque;

use qwill_contract::Request;
use qwill_device::batch::PAGE_TOKENS;
use thiserror::Error;

/// Sizes that no request can exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Prompt + generation of a sequence.
    pub(crate) max_context_tokens: usize,
    /// State slots.
    pub(crate) slots: usize,
    /// KV pages.
    pub(crate) pages: usize,
    /// Ids below this have text.
    pub(crate) vocab_limit: usize,
}

/// A request that can never run here. The messages are for clients.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Refusal {
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("the prompt has {prompt_tokens} tokens, the context holds {max_context_tokens}")]
    PromptTooLong { prompt_tokens: usize, max_context_tokens: usize },
    #[error("{choices} choices were asked for, {slots} sequences can run at once")]
    TooManyChoices { choices: usize, slots: usize },
    #[error(
        "{choices} choices of {sequence_tokens} tokens need {needed_tokens} tokens of KV, there are {capacity_tokens}; \
         ask for fewer choices or a smaller max_tokens"
    )]
    TooManyPages { choices: usize, sequence_tokens: usize, needed_tokens: usize, capacity_tokens: usize },
    #[error("token {token} in {place} is not below the vocabulary size {vocab_limit}")]
    UnknownToken { token: u32, place: &'static str, vocab_limit: usize },
}

/// What a request will use at most, reserved before it starts: nothing that runs is ever put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// Sequences; a state slot each.
    pub(crate) choices: usize,
    /// Tokens to generate for each at most: the context's end may come before `max_tokens`.
    pub(crate) new_tokens: usize,
    /// Pages of one sequence.
    pub(crate) sequence_pages: usize,
    /// Pages full of prompt, which all choices share.
    pub(crate) shared_pages: usize,
}

impl Need {
    pub(crate) fn of(request: &Request, limits: &Limits) -> Result<Self, Refusal> {
        let prompt_tokens = request.prompt.len();
        if prompt_tokens == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        let max_context_tokens = limits.max_context_tokens;
        if prompt_tokens > max_context_tokens {
            return Err(Refusal::PromptTooLong { prompt_tokens, max_context_tokens });
        }
        check_tokens(request, limits.vocab_limit)?;
        let choices = request.choices.max(1);
        if choices > limits.slots {
            return Err(Refusal::TooManyChoices { choices, slots: limits.slots });
        }
        let new_tokens = request.sampling.max_tokens.min(max_context_tokens - prompt_tokens);
        let need = Self {
            choices,
            new_tokens,
            sequence_pages: (prompt_tokens + new_tokens).div_ceil(PAGE_TOKENS),
            shared_pages: prompt_tokens / PAGE_TOKENS,
        };
        if need.pages() > limits.pages {
            return Err(Refusal::TooManyPages {
                choices,
                sequence_tokens: prompt_tokens + new_tokens,
                needed_tokens: need.pages() * PAGE_TOKENS,
                capacity_tokens: limits.pages * PAGE_TOKENS,
            });
        }
        Ok(need)
    }

    /// Pages that each choice has for itself.
    pub(crate) fn own_pages(&self) -> usize {
        self.sequence_pages - self.shared_pages
    }

    /// Pages of all choices together.
    pub(crate) fn pages(&self) -> usize {
        self.shared_pages + self.choices * self.own_pages()
    }
}

/// The device relies on ids being rows of its tables, so a wrong one must not get that far.
fn check_tokens(request: &Request, vocab_limit: usize) -> Result<(), Refusal> {
    let sampling = &request.sampling;
    let prompt = request.prompt.iter().map(|token| ("the prompt", *token));
    let bias = sampling.logit_bias.iter().map(|(token, _)| ("logit_bias", *token));
    let stop = sampling.stop_token_ids.iter().map(|token| ("stop_token_ids", *token));
    match prompt.chain(bias).chain(stop).find(|(_, token)| *token as usize >= vocab_limit) {
        Some((place, token)) => Err(Refusal::UnknownToken { token, place, vocab_limit }),
        None => Ok(()),
    }
}

/// Requests that wait, by priority, and first come first served among equals: nobody overtakes the first one but who is
/// more urgent, so it is admitted as soon as enough of what runs has ended. Only who waits for something else than room
/// is set aside meanwhile. Urgency does not grow with waiting: while more urgent requests keep coming, others wait.
#[derive(Debug)]
pub(crate) struct WaitingQueue<T> {
    /// Priorities ascend.
    waiting: VecDeque<Entry<T>>,
    aside: Vec<Entry<T>>,
}

#[derive(Debug)]
struct Entry<T> {
    priority: i32,
    need: Need,
    item: T,
}

impl<T> WaitingQueue<T> {
    pub(crate) fn new() -> Self {
        Self { waiting: VecDeque::new(), aside: Vec::new() }
    }

    /// Behind everybody of the same priority.
    pub(crate) fn push(&mut self, priority: i32, need: Need, item: T) {
        let at = self.waiting.partition_point(|entry| entry.priority <= priority);
        self.waiting.insert(at, Entry { priority, need, item });
    }

    /// The first one, and what it needs.
    pub(crate) fn first(&self) -> Option<(Need, &T)> {
        self.waiting.front().map(|entry| (entry.need, &entry.item))
    }

    /// Takes the first one out; those that are set aside come last.
    pub(crate) fn pop(&mut self) -> Option<T> {
        self.waiting.pop_front().or_else(|| self.aside.pop()).map(|entry| entry.item)
    }

    /// Sets the first one aside; `note` is to say until when.
    pub(crate) fn set_first_aside(&mut self, note: impl FnOnce(&mut T)) {
        if let Some(mut entry) = self.waiting.pop_front() {
            note(&mut entry.item);
            self.aside.push(entry);
        }
    }

    /// Puts those that were set aside and are `ready` before all others of their priority, in their order.
    pub(crate) fn bring_back(&mut self, ready: impl Fn(&T) -> bool) {
        let (back, aside): (Vec<_>, Vec<_>) = self.aside.drain(..).partition(|entry| ready(&entry.item));
        self.aside = aside;
        for entry in back.into_iter().rev() {
            let at = self.waiting.partition_point(|other| other.priority < entry.priority);
            self.waiting.insert(at, entry);
        }
    }

    /// Takes out those for which `gone` holds, in order.
    pub(crate) fn take_where(&mut self, gone: impl Fn(&T) -> bool) -> Vec<T> {
        if !self.waiting.iter().chain(&self.aside).any(|entry| gone(&entry.item)) {
            return Vec::new();
        }
        let (mut out, kept): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(|entry| gone(&entry.item));
        self.waiting = kept.into();
        let (out_of_aside, kept): (Vec<_>, Vec<_>) =
            self.aside.drain(..).partition(|entry| gone(&entry.item));
        self.aside = kept;
        out.extend(out_of_aside);
        out.into_iter().map(|entry| entry.item).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use qwill_contract::{CancelFlag, SamplingParams};

    use super::*;

    const LIMITS: Limits = Limits { max_context_tokens: 640, slots: 4, pages: 12, vocab_limit: 100 };

    fn request(prompt_tokens: usize, max_tokens: usize, choices: usize) -> Request {
        Request {
            id: "r".into(),
            prompt: vec![1; prompt_tokens].into(),
            cache_salt: None,
            priority: 0,
            sampling: SamplingParams { max_tokens, ..SamplingParams::default() },
            choices,
            guide: None,
            prompt_logprobs: None,
            cancel: CancelFlag::default(),
            choice_cancel: Vec::new(),
        }
    }

    #[test]
    fn choices_share_the_full_pages_of_the_prompt() {
        let need = Need::of(&request(130, 100, 3), &LIMITS).unwrap();
        assert_eq!((need.sequence_pages, need.shared_pages, need.pages()), (4, 2, 8));
        let need = Need::of(&request(630, 1000, 1), &LIMITS).unwrap();
        assert_eq!((need.new_tokens, need.sequence_pages), (10, 10), "generation ends with the context");
    }

    #[test]
    fn who_is_set_aside_comes_back_before_the_others() {
        let mut queue = WaitingQueue::new();
        let need = Need::of(&request(10, 10, 1), &LIMITS).unwrap();
        (0..6).for_each(|item| queue.push(0, need, item));
        let aside = |queue: &mut WaitingQueue<i32>| queue.set_first_aside(|item| *item += 10);
        (0..3).for_each(|_| aside(&mut queue));
        assert_eq!(queue.first().map(|(_, item)| *item), Some(3));
        queue.bring_back(|item| *item != 11);
        assert_eq!(queue.take_where(|item| *item == 4), [4]);
        let order: Vec<i32> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [10, 12, 3, 5, 11]);
    }

    #[test]
    fn the_more_urgent_comes_first_and_equals_keep_their_order() {
        let mut queue = WaitingQueue::new();
        let need = Need::of(&request(10, 10, 1), &LIMITS).unwrap();
        for (priority, item) in [(0, 1), (5, 2), (-1, 3), (0, 4), (i32::MIN, 5), (i32::MAX, 6), (-1, 7)] {
            queue.push(priority, need, item);
        }
        assert_eq!(queue.pop(), Some(5));
        (0..3).for_each(|_| queue.set_first_aside(|_| ()));
        assert_eq!(queue.first().map(|(_, item)| *item), Some(4), "3, 7 and 1 wait for something else");
        queue.push(0, need, 8);
        queue.bring_back(|item| *item != 7);
        let order: Vec<i32> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [3, 1, 4, 8, 2, 6, 7]);
    }

    #[test]
    fn what_can_never_run_is_refused_with_the_numbers() {
        let refused = |request: &Request| Need::of(request, &LIMITS).unwrap_err().to_string();
        assert_eq!(refused(&request(641, 1, 1)), "the prompt has 641 tokens, the context holds 640");
        assert_eq!(refused(&request(0, 1, 1)), "the prompt is empty");
        assert!(refused(&request(1, 1, 5)).starts_with("5 choices were asked for, 4 sequences"));
        let message = refused(&request(10, 256, 3));
        assert!(message.contains("need 960 tokens of KV, there are 768"), "{message}");
        let mut unknown = request(3, 1, 1);
        unknown.sampling.logit_bias.push((100, 1.0));
        assert!(refused(&unknown).contains("token 100 in logit_bias"));
    }

    proptest! {
        /// Everything that is not refused runs in the end, by priority and arrival, whatever else was admitted before.
        #[test]
        fn nothing_waits_for_ever(
            requests in prop::collection::vec((1usize..700, 0usize..700, 1usize..6, -2i32..2), 1..30),
            ends in prop::collection::vec(0usize..100, 40),
        ) {
            let mut queue = WaitingQueue::new();
            let mut expected = Vec::new();
            for (index, (prompt, new, choices, priority)) in requests.into_iter().enumerate() {
                if let Ok(need) = Need::of(&request(prompt, new, choices), &LIMITS) {
                    prop_assert!(need.pages() <= LIMITS.pages && need.choices <= LIMITS.slots);
                    queue.push(priority, need, index);
                    expected.push((priority, index));
                }
            }
            expected.sort_unstable();
            let expected: Vec<usize> = expected.into_iter().map(|(_, index)| index).collect();
            let (mut pages, mut slots) = (LIMITS.pages, LIMITS.slots);
            let mut running: Vec<Need> = Vec::new();
            let mut admitted = Vec::new();
            let mut ends = ends.into_iter().cycle();
            while let Some((need, _)) = queue.first() {
                if need.pages() <= pages && need.choices <= slots {
                    pages -= need.pages();
                    slots -= need.choices;
                    running.push(need);
                    admitted.extend(queue.pop());
                } else {
                    prop_assert!(!running.is_empty(), "waits for nothing");
                    let need = running.swap_remove(ends.next().unwrap_or(0) % running.len());
                    pages += need.pages();
                    slots += need.choices;
                }
            }
            prop_assert_eq!(admitted, expected);
        }
    }
}
