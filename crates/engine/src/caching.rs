//! The prefix cache at work: where a prompt begins, what it leaves behind, what the gauges say. What is kept and what
//! has to go is decided in [`crate::prefix`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use qwill_contract::Request;

use crate::StepModel;
use crate::chunks::ChunkRule;
use crate::engine::Engine;
use crate::prefix::{Begun, Lookup, Miss, PageCopy, Salt, Table};

/// Tokens as the prefix cache knows them. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct PromptPath {
    pub(crate) salt: Salt,
    pub(crate) tokens: Arc<[u32]>,
    /// Ends of the chunks that it is processed in.
    pub(crate) chunk_ends: Arc<[usize]>,
    /// Whether it may begin at a snapshot; not where the logits of all its rows are wanted.
    pub(crate) may_hit: bool,
}

impl PromptPath {
    pub(crate) fn of(request: &Request, rule: &ChunkRule) -> Self {
        Self {
            salt: request.cache_salt.clone(),
            chunk_ends: rule.chunk_ends(&request.prompt).into(),
            tokens: Arc::clone(&request.prompt),
            may_hit: request.prompt_logprobs.is_none(),
        }
    }
}

/// Where a prompt begins, and what it has for its whole life.
#[derive(Debug)]
pub(crate) struct Beginning {
    pub(crate) pages: Vec<u32>,
    pub(crate) slots: Vec<usize>,
    /// Tokens in the caches already.
    pub(crate) position: usize,
    /// First tokens that the prefix cache knows.
    pub(crate) known_tokens: usize,
}

impl<M: StepModel> Engine<M> {
    /// Takes pages and slots, and puts into them what the prefix cache has of the prompt. `None` where they are not to be
    /// had now.
    pub(crate) fn begin(
        &mut self,
        path: &PromptPath,
        page_count: usize,
        slot_count: usize,
    ) -> Result<Option<Beginning>, M::Error> {
        if self.slots.free() < slot_count {
            return Ok(None);
        }
        let found = self.look_up(path);
        let Some(Begun { pages, copies, state }) = self.cache.begin(found.hit, page_count, &mut self.pages)
        else {
            return Ok(None);
        };
        let Some(slots) = self.slots.take(slot_count) else {
            self.pages.release(&pages);
            return Ok(None);
        };
        let first_slot = slots.first().copied().unwrap_or_default();
        let position = found.hit.map_or(0, |hit| hit.position);
        if let Err(error) = self.copy_hit(&copies, first_slot, position, &state) {
            self.pages.release(&pages);
            for slot in slots {
                self.slots.release(slot);
            }
            return Err(error);
        }
        Ok(Some(Beginning { pages, slots, position, known_tokens: found.known_tokens }))
    }

    pub(crate) fn look_up(&self, path: &PromptPath) -> Lookup {
        if path.may_hit {
            self.cache.look_up(&path.salt, &path.tokens, &path.chunk_ends)
        } else {
            Lookup::default()
        }
    }

    fn copy_hit(
        &mut self,
        copies: &[PageCopy],
        slot: usize,
        position: usize,
        state: &[u32],
    ) -> Result<(), M::Error> {
        for copy in copies {
            match *copy {
                PageCopy::Store { page, granule } => self.model.store_page(page as usize, granule)?,
                PageCopy::Load { granule, page } => self.model.load_page(page as usize, granule)?,
                PageCopy::Within { from, to } => self.model.copy_page(from as usize, to as usize)?,
            }
        }
        if position > 0 { self.model.load_state(slot, position, state) } else { Ok(()) }
    }

    /// Counts what a request found, and says why it was not more.
    pub(crate) fn note_lookup(&self, id: &str, path: &PromptPath, position: usize) {
        let found = self.look_up(path);
        let miss = if self.cache.is_on() && path.may_hit {
            self.cache.explain(&found, &path.salt, &path.tokens, &path.chunk_ends)
        } else {
            Some(Miss::Off)
        };
        let counters = &self.load.cache;
        if position > 0 {
            counters.hits.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(miss) = miss {
            counters.misses[miss.index()].fetch_add(1, Ordering::Relaxed);
        }
        let diverged_at = if let Some(Miss::Diverged { at }) = miss { Some(at) } else { None };
        tracing::debug!(
            request = id,
            prompt_tokens = path.tokens.len(),
            cached_tokens = position,
            miss = miss.map(Miss::label),
            diverged_at,
            "looked up in the prefix cache"
        );
    }

    /// Keeps the state that prefill has left in a slot after the first `position` tokens, and the pages before it.
    pub(crate) fn keep_snapshot(
        &mut self,
        path: &PromptPath,
        position: usize,
        slot: usize,
        pages: &[u32],
    ) -> Result<(), M::Error> {
        let tokens = &path.tokens[..position];
        if self.cache.contains(&path.salt, tokens) {
            return Ok(());
        }
        let Some(granules) = self.cache.take_state_granules(&mut self.pages) else { return Ok(()) };
        if let Err(error) = self.model.store_state(slot, position, &granules) {
            self.cache.give_granules(&granules);
            return Err(error);
        }
        self.cache.insert(&path.salt, tokens, Table::Device(pages), granules, &mut self.pages);
        self.save_later(path, position);
        Ok(())
    }

    /// Forgets what prompts left in memory, where somebody wants that. Files on disk stay.
    pub(crate) fn flush_if_asked(&mut self) {
        if let Some(flush) = self.load.cache.flush_to_do() {
            self.stop_settling();
            self.cache.clear(&mut self.pages);
            self.publish();
            self.load.cache.flush_done(flush);
        }
    }

    /// Writes the gauges. A page that only the cache holds, or what settles in idle time, is to be had by any request,
    /// so it is not in use.
    pub(crate) fn publish(&self) {
        let settling = self.settling.sequence();
        let settling_pages =
            settling.map_or(0, |sequence| self.cache.held_beside(&sequence.pages, &self.pages));
        let idle_pages = self.cache.reclaimable_pages(&self.pages) + settling_pages;
        let slots_used = self.slots.used() - usize::from(settling.is_some());
        self.load.pages_used.store(self.pages.used() - idle_pages, Ordering::Relaxed);
        self.load.slots_used.store(slots_used, Ordering::Relaxed);
        self.load.running.store(slots_used, Ordering::Relaxed);
        let (usage, gauges) = (self.cache.usage(), &self.load.cache);
        for (gauge, value) in [
            (&gauges.snapshots, usage.snapshots),
            (&gauges.tokens, usage.tokens),
            (&gauges.device_pages, usage.device_pages),
            (&gauges.host_pages, usage.host_pages),
            (&gauges.granules_used, usage.granules_used),
            (&gauges.granules_total, usage.granules_total),
        ] {
            gauge.store(value, Ordering::Relaxed);
        }
        gauges.evictions.store(usage.evictions, Ordering::Relaxed);
    }
}
