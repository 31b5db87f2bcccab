//! Which rows the next step has: a slice of the waiting prompts, or a round of the running sequences.
//!
//! Pure: no device, no clock. Fair by two rules: while sequences run, slices and rounds alternate, so that a
//! stream waits for one bounded slice at most; and who took part in a step goes to the back of its queue, so that
//! prompts take turns and a round that cannot hold everybody serves all of them in turn.

use std::collections::VecDeque;
use std::ops::Range;

/// A request, in order of admission.
pub(crate) type RequestKey = u64;

/// One choice of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SequenceKey {
    pub(crate) request: RequestKey,
    pub(crate) choice: usize,
}

/// How large steps can be, in rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepLimits {
    /// Of a slice; at least a chunk's.
    pub(crate) slice: usize,
    /// Of a round; at least one sequence's.
    pub(crate) round: usize,
    /// With logits, in both; at least a chunk's.
    pub(crate) logits: usize,
}

/// What is left of a prompt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptWork<'a> {
    /// Ends of all its chunks.
    pub(crate) chunk_ends: &'a [usize],
    /// First chunk not yet done.
    pub(crate) next_chunk: usize,
    /// First chunk that the next slice may not have: the state before it is wanted.
    pub(crate) stop_chunk: usize,
    /// Whether every row's logits are wanted, not only the last one's.
    pub(crate) all_logits: bool,
}

impl PromptWork<'_> {
    /// First token of a chunk.
    pub(crate) fn chunk_start(&self, chunk: usize) -> usize {
        if chunk == 0 { 0 } else { self.chunk_ends[chunk - 1] }
    }

    /// `(rows, rows with logits)` of a chunk.
    fn chunk_cost(&self, chunk: usize) -> (usize, usize) {
        let rows = self.chunk_ends[chunk] - self.chunk_start(chunk);
        let last = chunk + 1 == self.chunk_ends.len();
        let logit_rows = if self.all_logits { rows } else { usize::from(last) };
        (rows, logit_rows)
    }
}

/// Consecutive chunks of one prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlicePart {
    pub(crate) request: RequestKey,
    pub(crate) chunks: Range<usize>,
}

/// A sequence's part of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoundPart {
    pub(crate) sequence: SequenceKey,
    /// At least 1.
    pub(crate) rows: usize,
}

/// The next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Chunks of prompts, each prompt once.
    Slice(Vec<SlicePart>),
    /// Sequences, each once.
    Round(Vec<RoundPart>),
}

/// Prompts to process and sequences to continue, in the order of their turns.
#[derive(Debug)]
pub(crate) struct Schedule {
    limits: StepLimits,
    prompts: VecDeque<RequestKey>,
    running: VecDeque<SequenceKey>,
    last_was_slice: bool,
}

impl Schedule {
    pub(crate) fn new(limits: StepLimits) -> Self {
        Self { limits, prompts: VecDeque::new(), running: VecDeque::new(), last_was_slice: false }
    }

    /// A request was admitted.
    pub(crate) fn add_prompt(&mut self, request: RequestKey) {
        self.prompts.push_back(request);
    }

    /// The request's prompt is done.
    pub(crate) fn remove_prompt(&mut self, request: RequestKey) {
        self.prompts.retain(|other| *other != request);
    }

    /// A sequence has a first token.
    pub(crate) fn add_running(&mut self, sequence: SequenceKey) {
        self.running.push_back(sequence);
    }

    /// A sequence has ended.
    pub(crate) fn remove_running(&mut self, sequence: SequenceKey) {
        self.running.retain(|other| *other != sequence);
    }

    /// Sequences that take part in rounds.
    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    /// Plans the next step and gives its members their next turn at the back. A slice has at most `slice_rows` rows, which
    /// are at least a chunk's. `rows` says how many rows a sequence
    /// wants in a round, each with logits; where they do not all fit, those that want most get fewer. `None` where there is nothing to do.
    pub(crate) fn next<'a>(
        &mut self,
        slice_rows: usize,
        prompt: impl Fn(RequestKey) -> PromptWork<'a>,
        rows: impl Fn(SequenceKey) -> usize,
    ) -> Option<Step> {
        let slice = !self.prompts.is_empty() && (self.running.is_empty() || !self.last_was_slice);
        if slice {
            self.last_was_slice = true;
            return Some(Step::Slice(self.next_slice(slice_rows, prompt)));
        }
        self.last_was_slice = false;
        (!self.running.is_empty()).then(|| Step::Round(self.next_round(rows)))
    }

    fn next_slice<'a>(
        &mut self,
        slice_rows: usize,
        prompt: impl Fn(RequestKey) -> PromptWork<'a>,
    ) -> Vec<SlicePart> {
        let (mut rows_left, mut logits_left) = (slice_rows.min(self.limits.slice), self.limits.logits);
        let mut parts = Vec::new();
        for request in &self.prompts {
            let work = prompt(*request);
            let mut end = work.next_chunk;
            while end < work.stop_chunk {
                let (rows, logit_rows) = work.chunk_cost(end);
                if rows > rows_left || logit_rows > logits_left {
                    break;
                }
                rows_left -= rows;
                logits_left -= logit_rows;
                end += 1;
            }
            if end > work.next_chunk {
                parts.push(SlicePart { request: *request, chunks: work.next_chunk..end });
            }
            if rows_left == 0 {
                break;
            }
        }
        move_to_back(&mut self.prompts, |request| parts.iter().any(|part| part.request == *request));
        parts
    }

    fn next_round(&mut self, rows: impl Fn(SequenceKey) -> usize) -> Vec<RoundPart> {
        let limit = self.limits.round.min(self.limits.logits);
        let members = self.running.len().min(limit);
        let wanted: Vec<usize> = self.running.iter().take(members).map(|sequence| rows(*sequence)).collect();
        let most = common_most(&wanted, limit);
        let parts = self.running.iter().zip(wanted);
        let round =
            parts.map(|(sequence, rows)| RoundPart { sequence: *sequence, rows: rows.min(most) }).collect();
        self.running.rotate_left(members);
        round
    }
}

/// Rows that nobody may exceed so that together they are no more than `limit`, which is at least one for each.
fn common_most(wanted: &[usize], limit: usize) -> usize {
    let total = |most: usize| wanted.iter().map(|rows| most.min(*rows)).sum::<usize>();
    let largest = wanted.iter().copied().max().unwrap_or(1);
    (1..=largest).rev().find(|most| total(*most) <= limit).unwrap_or(1)
}

/// Moves the chosen entries behind the others; both keep their order.
fn move_to_back<T>(queue: &mut VecDeque<T>, chosen: impl Fn(&T) -> bool) {
    let (back, front): (Vec<T>, Vec<T>) = queue.drain(..).partition(|entry| chosen(entry));
    queue.extend(front);
    queue.extend(back);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use qwill_device::batch::CHUNK_TOKENS;

    use super::*;

    const LIMITS: StepLimits = StepLimits { slice: 128, round: 6, logits: 64 };
    /// After so many chunks of a prompt a slice has to end.
    const STOP_EVERY: usize = 4;

    #[derive(Debug, Clone)]
    struct Prompt {
        chunk_ends: Vec<usize>,
        next_chunk: usize,
        all_logits: bool,
        waited_slices: usize,
    }

    fn work(prompts: &BTreeMap<u64, Prompt>, request: u64) -> PromptWork<'_> {
        let prompt = &prompts[&request];
        PromptWork {
            chunk_ends: &prompt.chunk_ends,
            next_chunk: prompt.next_chunk,
            stop_chunk: prompt.chunk_ends.len().min((prompt.next_chunk / STOP_EVERY + 1) * STOP_EVERY),
            all_logits: prompt.all_logits,
        }
    }

    fn chunk_sizes() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![Just(CHUNK_TOKENS), 1usize..=CHUNK_TOKENS], 1..8)
    }

    #[derive(Debug, Clone)]
    enum Act {
        Admit(Vec<usize>, bool),
        Step(usize),
        CancelPrompt(usize),
        EndRunning(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            1 => (chunk_sizes(), any::<bool>()).prop_map(|(sizes, all)| Act::Admit(sizes, all)),
            3 => (CHUNK_TOKENS..300).prop_map(Act::Step),
            1 => (0usize..50).prop_map(Act::CancelPrompt),
            1 => (0usize..50).prop_map(Act::EndRunning),
        ]
    }

    proptest! {
        /// Against a naive model that knows every prompt and sequence: steps hold what exists, each once, within
        /// the limits; something is done whenever there is something to do; nobody waits longer than a full turn.
        #[test]
        fn steps_are_valid_and_fair(acts in prop::collection::vec(act(), 1..120)) {
            let mut schedule = Schedule::new(LIMITS);
            let mut prompts: BTreeMap<u64, Prompt> = BTreeMap::new();
            let mut running: BTreeMap<SequenceKey, usize> = BTreeMap::new();
            let mut next_key = 0;
            let mut slices_in_a_row = 0;
            for act in acts {
                match act {
                    Act::Admit(sizes, all_logits) => {
                        let chunk_ends = sizes.iter().scan(0, |end, size| { *end += size; Some(*end) }).collect();
                        prompts.insert(next_key, Prompt { chunk_ends, next_chunk: 0, all_logits, waited_slices: 0 });
                        schedule.add_prompt(next_key);
                        next_key += 1;
                    }
                    Act::CancelPrompt(index) if !prompts.is_empty() => {
                        let key = *prompts.keys().nth(index % prompts.len()).unwrap();
                        prompts.remove(&key);
                        schedule.remove_prompt(key);
                    }
                    Act::EndRunning(index) if !running.is_empty() => {
                        let key = *running.keys().nth(index % running.len()).unwrap();
                        running.remove(&key);
                        schedule.remove_running(key);
                    }
                    Act::CancelPrompt(_) | Act::EndRunning(_) => {}
                    Act::Step(slice_rows) => {
                        let rows = |key: SequenceKey| 1 + (key.request as usize + key.choice) % 3;
                        let step = schedule.next(slice_rows, |request| work(&prompts, request), rows);
                        match step {
                            None => prop_assert!(prompts.is_empty() && running.is_empty()),
                            Some(Step::Slice(parts)) => {
                                slices_in_a_row += 1;
                                prop_assert!(running.is_empty() || slices_in_a_row == 1);
                                prop_assert!(!parts.is_empty());
                                let (mut total, mut logits) = (0, 0);
                                let mut members = Vec::new();
                                for part in &parts {
                                    prop_assert!(!members.contains(&part.request), "a prompt twice in a slice");
                                    members.push(part.request);
                                    let prompt = prompts.get_mut(&part.request).unwrap();
                                    prop_assert_eq!(part.chunks.start, prompt.next_chunk);
                                    prop_assert!(part.chunks.end > part.chunks.start);
                                    prop_assert_eq!((part.chunks.end - 1) / STOP_EVERY, part.chunks.start / STOP_EVERY);
                                    let start = if part.chunks.start == 0 { 0 } else { prompt.chunk_ends[part.chunks.start - 1] };
                                    let size = prompt.chunk_ends[part.chunks.end - 1] - start;
                                    let done = part.chunks.end == prompt.chunk_ends.len();
                                    total += size;
                                    logits += if prompt.all_logits { size } else { usize::from(done) };
                                    prompt.next_chunk = part.chunks.end;
                                    prompt.waited_slices = 0;
                                    if done {
                                        prompts.remove(&part.request);
                                        schedule.remove_prompt(part.request);
                                        for choice in 0..2 {
                                            let key = SequenceKey { request: part.request, choice };
                                            running.insert(key, 0);
                                            schedule.add_running(key);
                                        }
                                    }
                                }
                                prop_assert!(total <= LIMITS.slice.min(slice_rows) && logits <= LIMITS.logits);
                                let waiting = prompts.len();
                                for (key, prompt) in &mut prompts {
                                    if !members.contains(key) {
                                        prompt.waited_slices += 1;
                                        prop_assert!(prompt.waited_slices <= waiting + 60, "prompt {} starves", key);
                                    }
                                }
                            }
                            Some(Step::Round(members)) => {
                                slices_in_a_row = 0;
                                prop_assert!(!members.is_empty());
                                let total: usize = members.iter().map(|part| part.rows).sum();
                                let wanted: usize = members.iter().map(|part| rows(part.sequence)).sum();
                                prop_assert!(total <= LIMITS.round);
                                prop_assert!(members.iter().all(|part| (1..=rows(part.sequence)).contains(&part.rows)));
                                prop_assert!(total == wanted || total + members.len() > LIMITS.round, "rows are left");
                                for waited in running.values_mut() {
                                    *waited += 1;
                                }
                                for part in &members {
                                    prop_assert!(running.insert(part.sequence, 0).is_some_and(|waited| waited > 0), "twice or gone");
                                }
                                let sequences = running.len();
                                prop_assert!(running.values().all(|waited| *waited <= sequences + 60));
                            }
                        }
                    }
                }
            }
        }
    }

    fn prompt(tokens: usize) -> Prompt {
        let chunk_ends = (1..=tokens.div_ceil(64)).map(|chunk| (chunk * 64).min(tokens)).collect();
        Prompt { chunk_ends, next_chunk: 0, all_logits: false, waited_slices: 0 }
    }

    #[test]
    fn two_long_prompts_take_turns_and_a_stream_runs_between_their_slices() {
        let mut prompts = BTreeMap::from([(0, prompt(512)), (1, prompt(512))]);
        let mut schedule = Schedule::new(LIMITS);
        let stream = SequenceKey { request: 9, choice: 0 };
        schedule.add_running(stream);
        schedule.add_prompt(0);
        schedule.add_prompt(1);
        let mut order = Vec::new();
        for _ in 0..8 {
            match schedule.next(128, |request| work(&prompts, request), |_| 1).unwrap() {
                Step::Slice(parts) => {
                    assert_eq!(parts.len(), 1);
                    prompts.get_mut(&parts[0].request).unwrap().next_chunk = parts[0].chunks.end;
                    order.push(Some(parts[0].request));
                }
                Step::Round(members) => {
                    assert_eq!(members, [RoundPart { sequence: stream, rows: 1 }]);
                    order.push(None);
                }
            }
        }
        assert_eq!(order, [Some(0), None, Some(1), None, Some(0), None, Some(1), None]);
    }

    #[test]
    fn short_prompts_share_a_slice() {
        let prompts = BTreeMap::from([(0, prompt(30)), (1, prompt(70)), (2, prompt(10))]);
        let mut schedule = Schedule::new(LIMITS);
        (0..3).for_each(|request| schedule.add_prompt(request));
        let step = schedule.next(128, |request| work(&prompts, request), |_| 1);
        let part = |request, chunks| SlicePart { request, chunks };
        assert_eq!(step, Some(Step::Slice(vec![part(0, 0..1), part(1, 0..2), part(2, 0..1)])));
    }
}
