//! Sequences whose text a guide shapes: their drafts, and the masks under which their tokens are drawn.
//!
//! The masks of a round are made on the host while the device computes the round's logits, those of several sequences side
//! by side.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;
use std::time::Instant;

use qwill_contract::{Allowed, Guide, GuideError};
use qwill_device::sample::is_in_mask;

use crate::live::Live;
use crate::sampling::Draw;
use crate::schedule::{RequestKey, SequenceKey};

/// Threads that make masks at most: one sequence's take 0.1 ms, several rows of it more.
static WORKERS: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from).min(8));

/// A sequence's guide and what it has said of the coming tokens.
///
/// What is asked along drafts must not change the text, so an error counts only where a guide that was told nothing but the
/// sequence's own tokens runs into it as well, and only if the drafts before it turn out right.
#[derive(Debug, Clone)]
pub(crate) struct Guided {
    /// As it was before the first token.
    origin: Box<dyn Guide>,
    /// Stands behind the sequence's tokens and some drafts.
    guide: Box<dyn Guide>,
    /// Drafts behind which the guide stands.
    ahead: usize,
    /// By number of drafts: the mask of the token after them; `None` where all tokens may come.
    masks: Vec<Option<Vec<u32>>>,
    /// Why there is no mask after the drafts that have one.
    failure: Option<GuideError>,
}

impl Guided {
    pub(crate) fn new(guide: Box<dyn Guide>) -> Self {
        let origin = guide.clone();
        Self { origin, guide, ahead: 0, masks: Vec::new(), failure: None }
    }

    /// After how many right drafts the sequence cannot go on, and why.
    pub(crate) fn failure(&self) -> Option<(usize, GuideError)> {
        Some((self.masks.len(), self.failure.clone()?))
    }

    /// The mask of the token after so many drafts, once it is made.
    pub(crate) fn mask(&self, drafts: usize) -> Option<&[u32]> {
        self.masks.get(drafts)?.as_deref()
    }

    /// Whether a token may be drafted after so many drafts.
    pub(crate) fn allows(&self, drafts: usize, token: u32) -> bool {
        let mask = self.masks.get(drafts);
        mask.is_some_and(|mask| mask.as_ref().is_none_or(|mask| is_in_mask(mask, token)))
    }

    /// Tokens that are drafts for nothing.
    pub(crate) fn forced(&mut self) -> Vec<u32> {
        if self.ahead > 0 || self.failure.is_some() { Vec::new() } else { self.guide.forced() }
    }

    /// How many of the drafts may come.
    pub(crate) fn count_allowed(&mut self, drafts: &[u32]) -> usize {
        let known = self.ahead.min(drafts.len());
        if known == drafts.len() || self.failure.is_some() {
            return known;
        }
        known + guard(|| self.guide.count_allowed(&drafts[known..])).unwrap_or(0)
    }

    /// Makes the masks of all tokens up to the one behind these drafts, which may come. `output` are the sequence's tokens.
    fn make_masks(&mut self, output: &[u32], drafts: &[u32], vocab_limit: usize) {
        if self.failure.is_some() || self.try_masks(drafts, vocab_limit).is_ok() {
            return;
        }
        let again = self.restore(output).and_then(|()| self.try_masks(drafts, vocab_limit));
        self.failure = again.err();
    }

    fn try_masks(&mut self, drafts: &[u32], vocab_limit: usize) -> Result<(), GuideError> {
        while self.masks.len() <= drafts.len() {
            while self.ahead < self.masks.len() {
                guard(|| self.guide.accept(drafts[self.ahead]))?;
                self.ahead += 1;
            }
            let mut mask = vec![0; vocab_limit.div_ceil(32)];
            let allowed = guard(|| self.guide.allowed(&mut mask))?;
            if allowed == Allowed::Masked && mask.iter().all(|word| *word == 0) {
                return Err(GuideError("no token is allowed to come next".to_owned()));
            }
            self.masks.push((allowed == Allowed::Masked).then_some(mask));
        }
        Ok(())
    }

    /// Goes on behind the last `new` tokens of the sequence's output, of which the first `right` were its drafts.
    pub(crate) fn advance(&mut self, right: usize, new: usize, output: &[u32]) {
        let tokens = &output[output.len() - new..];
        let went_on = self.failure.is_none() && self.try_advance(right.min(tokens.len()), tokens).is_ok();
        self.masks.clear();
        self.failure = if went_on { None } else { self.restore(output).err() };
        self.ahead = 0;
    }

    fn try_advance(&mut self, right: usize, tokens: &[u32]) -> Result<(), GuideError> {
        let kept = self.ahead.min(right);
        if self.ahead > kept {
            guard(|| self.guide.roll_back(self.ahead - kept))?;
        }
        tokens[kept..].iter().try_for_each(|token| guard(|| self.guide.accept(*token)))
    }

    /// Begins anew and goes on behind the sequence's tokens.
    fn restore(&mut self, output: &[u32]) -> Result<(), GuideError> {
        self.guide = self.origin.clone();
        self.ahead = 0;
        output.iter().try_for_each(|token| guard(|| self.guide.accept(*token)))
    }
}

/// A guide that panics fails like one that says so.
fn guard<T>(work: impl FnOnce() -> Result<T, GuideError>) -> Result<T, GuideError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(GuideError("its guide panicked".to_owned())))
}

/// Makes the masks of the draws of all sequences with a guide.
pub(crate) fn make_masks(live: &mut BTreeMap<RequestKey, Live>, draws: &[Draw], vocab_limit: usize) {
    let mut depths: BTreeMap<SequenceKey, usize> = BTreeMap::new();
    for Draw { key, drafts, .. } in draws {
        if live[&key.request].sequence(key.choice).guided.is_some() {
            let depth = depths.entry(*key).or_default();
            *depth = (*depth).max(*drafts);
        }
    }
    if depths.is_empty() {
        return;
    }
    let started = Instant::now();
    let mut jobs = jobs(live, &depths);
    let workers = WORKERS.min(jobs.len());
    let work = |jobs: &mut [Job<'_>]| {
        for (guided, output, drafts) in jobs {
            guided.make_masks(output, drafts, vocab_limit);
        }
    };
    std::thread::scope(|scope| {
        let per_worker = jobs.len().div_ceil(workers);
        let (own, others) = jobs.split_at_mut(per_worker);
        for part in others.chunks_mut(per_worker) {
            scope.spawn(move || work(part));
        }
        work(own);
    });
    metrics::histogram!("qwill_engine_mask_seconds").record(started.elapsed().as_secs_f64());
}

/// A sequence's guide, its tokens, and the drafts along which masks are wanted.
type Job<'a> = (&'a mut Guided, &'a [u32], &'a [u32]);

/// Those of these sequences, up to so many drafts.
fn jobs<'a>(live: &'a mut BTreeMap<RequestKey, Live>, depths: &BTreeMap<SequenceKey, usize>) -> Vec<Job<'a>> {
    let sequences = live.iter_mut().flat_map(|(request, live)| {
        let choices = live.sequences.iter_mut().enumerate();
        choices.filter_map(move |(choice, sequence)| {
            Some((SequenceKey { request: *request, choice }, sequence.as_mut()?))
        })
    });
    let wanted = sequences.filter_map(|(key, sequence)| {
        let depth = *depths.get(&key)?;
        Some((sequence.guided.as_mut()?, &sequence.output[..], &sequence.drafts[..depth]))
    });
    wanted.collect()
}
