//! The disk tier at work: snapshots are saved in time that nobody else needs, and a request whose prompt goes further on
//! disk than in memory waits beside the queue until that has been read.
//!
//! Neither waits for the disk. A turn moves one granule at most, about a millisecond's copy at the shapes of the 27B.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Duration;

use qwill_contract::EngineState;

use crate::StepModel;
use crate::admission::Need;
use crate::caching::PromptPath;
use crate::disk::{BlobKey, DiskCache, PathKeys};
use crate::engine::{Arrival, Engine};
use crate::prefix::{Place, Table};

/// Snapshots that wait to be saved; beyond that the oldest is given up.
const MOST_WAITING: usize = 64;

/// Snapshots that a server that is to end still saves: those of its last conversations. A second each, where they are
/// long and of the 27B.
const MOST_SAVED_AT_THE_END: usize = 8;

/// Blobs of one prompt that are being read at a time: enough that the disk always has work.
const MOST_READING: usize = 8;

/// How long an engine that has only the disk to wait for sleeps.
const NAP: Duration = Duration::from_millis(1);

/// The disk, what goes there and what comes from it.
pub(crate) struct DiskTier {
    disk: DiskCache,
    granule_bytes: usize,
    /// Through it pages of the device leave; the prefix cache does not know it.
    passage: u32,
    /// Snapshots by their path and position.
    waiting: VecDeque<(PromptPath, usize)>,
    saving: Option<Saving>,
    loading: Vec<Loading>,
}

/// A snapshot that is being saved.
struct Saving {
    path: PromptPath,
    position: usize,
    /// What is left, the state last: whatever is found on disk is whole.
    parts: VecDeque<(BlobKey, Part)>,
    /// The page at the front is on its way through the passage.
    in_passage: bool,
    /// Of the state, granule after granule.
    state: Vec<u8>,
}

#[derive(Clone, Copy)]
enum Part {
    Page(usize),
    State,
}

/// A request that waits for what is on disk.
struct Loading {
    need: Need,
    arrival: Arrival,
    position: usize,
    pages: Vec<u32>,
    state: Vec<u32>,
    /// Not asked for yet, with the granules that each is for.
    wanted: VecDeque<(BlobKey, Vec<u32>)>,
    reading: HashMap<BlobKey, Vec<u32>>,
    /// Something was missing or damaged.
    failed: bool,
}

impl DiskTier {
    /// Requests that wait.
    pub(crate) fn take_arrivals(&mut self) -> Vec<Arrival> {
        self.loading.drain(..).map(|loading| loading.arrival).collect()
    }

    fn is_busy(&self) -> bool {
        let to_save = self.saving.is_some() || !self.waiting.is_empty();
        to_save || !self.loading.is_empty() || self.disk.is_writing()
    }
}

impl<M: StepModel> Engine<M> {
    /// Gives the engine a disk; its prefix cache was made without the host store's last granule.
    pub(crate) fn attach_disk(&mut self, disk: DiskCache) -> Result<(), M::Error> {
        let Some(passage) = self.model.host_granules().checked_sub(1) else { return Ok(()) };
        let passage = passage as u32;
        let granule_bytes = self.model.read_granule(passage)?.len();
        let (waiting, saving, loading) = (VecDeque::new(), None, Vec::new());
        self.disk = Some(DiskTier { disk, granule_bytes, passage, waiting, saving, loading });
        self.publish_disk();
        Ok(())
    }

    // ---- to the disk ----

    /// Notes a snapshot that was just taken.
    pub(crate) fn save_later(&mut self, path: &PromptPath, position: usize) {
        let Some(tier) = &mut self.disk else { return };
        tier.waiting.push_back((path.clone(), position));
        if tier.waiting.len() > MOST_WAITING {
            tier.waiting.pop_front();
        }
    }

    /// Does a piece of what is to be done for the disk in idle time; where that can only be waited for, sleeps a moment.
    /// False where there is nothing.
    pub(crate) fn work_for_disk(&mut self) -> Result<bool, String> {
        if self.load.state() == EngineState::Draining
            && let Some(tier) = &mut self.disk
        {
            let too_many = tier.waiting.len().saturating_sub(MOST_SAVED_AT_THE_END);
            tier.waiting.drain(..too_many);
        }
        match self.save_piece() {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(error) => {
                if let Some(tier) = &mut self.disk {
                    tier.saving = None;
                }
                self.recover("save", &error)?;
            }
        }
        let busy = self.disk.as_ref().is_some_and(DiskTier::is_busy);
        if busy {
            std::thread::sleep(NAP);
        }
        Ok(busy)
    }

    /// Saves a granule of a snapshot. False where there is none to save, or the disk or a copy has to be waited for.
    fn save_piece(&mut self) -> Result<bool, M::Error> {
        let Some(tier) = &mut self.disk else { return Ok(false) };
        let Some(saving) = &mut tier.saving else { return Ok(tier.begin_saving()) };
        let Some((key, part)) = saving.parts.front().copied() else {
            tier.saving = None;
            return Ok(true);
        };
        let tokens = &saving.path.tokens[..saving.position];
        // It may have had to make room meanwhile.
        let Some((granules, places)) = self.cache.places(&saving.path.salt, tokens) else {
            tier.saving = None;
            return Ok(true);
        };
        if !self.model.stored()? {
            return Ok(false);
        }
        match part {
            Part::State => {
                let done = saving.state.len() / tier.granule_bytes;
                saving.state.extend_from_slice(self.model.read_granule(granules[done])?);
                if done + 1 < granules.len() {
                    return Ok(true);
                }
                // There is room: whoever is first is always taken.
                tier.disk.put(&key, std::mem::take(&mut saving.state));
            }
            Part::Page(index) => {
                if !tier.disk.has_room(tier.granule_bytes) {
                    return Ok(false);
                }
                let granule = match places[index] {
                    _ if saving.in_passage => tier.passage,
                    Place::Host(granule) => granule,
                    Place::Device(page) => {
                        self.model.store_page(page as usize, tier.passage)?;
                        saving.in_passage = true;
                        return Ok(true);
                    }
                };
                saving.in_passage = false;
                tier.disk.put(&key, self.model.read_granule(granule)?.to_vec());
            }
        }
        saving.parts.pop_front();
        Ok(true)
    }

    // ---- from the disk ----

    /// Lets an arrival wait for what is on disk of its prompt, if that is more than is in memory; else gives it back.
    pub(crate) fn load_first(&mut self, need: Need, arrival: Arrival) -> Option<Arrival> {
        let path = &arrival.path;
        if self.disk.is_none() || !path.may_hit {
            return Some(arrival);
        }
        let from = self.look_up(path).hit.map_or(0, |hit| hit.position);
        let Some(tier) = &mut self.disk else { return Some(arrival) };
        let within = |end: &usize| *end > from && *end < path.tokens.len();
        let ends: Vec<usize> = path.chunk_ends.iter().copied().filter(within).collect();
        let keys = PathKeys::new(path.salt.as_deref(), &path.tokens, &ends);
        let is_there = |key: BlobKey| tier.disk.contains(&key);
        let on_disk = |position: &usize| {
            keys.state(*position).is_some_and(is_there) && keys.pages(*position).all(is_there)
        };
        let Some(position) = keys.positions().rev().find(on_disk) else { return Some(arrival) };
        let Some(of_state) = keys.state(position) else { return Some(arrival) };
        let of_pages: Vec<BlobKey> = keys.pages(position).collect();
        let count = of_pages.len() + self.model.state_granules();
        let Some(mut pages) = self.cache.take_granules(count, &mut self.pages) else { return Some(arrival) };
        let state = pages.split_off(of_pages.len());
        let mut wanted: VecDeque<_> =
            of_pages.into_iter().zip(&pages).map(|(key, granule)| (key, vec![*granule])).collect();
        wanted.push_back((of_state, state.clone()));
        let (reading, failed) = (HashMap::new(), false);
        tier.loading.push(Loading { need, arrival, position, pages, state, wanted, reading, failed });
        None
    }

    /// Takes what has come from the disk, asks for more, and lets those go on whose prompts are in memory now.
    pub(crate) fn receive_from_disk(&mut self) -> Result<(), String> {
        self.take_blobs().or_else(|error| self.recover("load", &error))
    }

    fn take_blobs(&mut self) -> Result<(), M::Error> {
        let Some(tier) = &mut self.disk else { return Ok(()) };
        for finished in tier.disk.poll() {
            for loading in &mut tier.loading {
                let Some(granules) = loading.reading.remove(&finished.key) else { continue };
                let Some(contents) = &finished.contents else {
                    loading.failed = true;
                    loading.wanted.clear();
                    continue;
                };
                tier.disk.touch(&finished.key);
                for (granule, bytes) in granules.into_iter().zip(contents.chunks(tier.granule_bytes)) {
                    let written = self.model.write_granule(granule, bytes);
                    loading.failed |= written.is_err();
                    written?;
                }
            }
        }
        for loading in &mut tier.loading {
            while loading.reading.len() < MOST_READING
                && let Some((key, granules)) = loading.wanted.pop_front()
            {
                tier.disk.get(&key, granules.len() * tier.granule_bytes);
                loading.reading.insert(key, granules);
            }
        }
        let is_done = |loading: &mut Loading| loading.reading.is_empty() && loading.wanted.is_empty();
        let done: Vec<Loading> = tier.loading.extract_if(.., is_done).collect();
        for loading in done {
            self.loaded(loading);
        }
        self.publish_disk();
        Ok(())
    }

    fn loaded(&mut self, loading: Loading) {
        let Loading { need, arrival, position, pages, state, failed, .. } = loading;
        let path = &arrival.path;
        if failed {
            self.cache.give_granules(&pages);
            self.cache.give_granules(&state);
        } else {
            let (tokens, table) = (&path.tokens[..position], Table::Host(&pages));
            self.cache.insert(&path.salt, tokens, table, state, &mut self.pages);
            self.load.cache.disk_loads.fetch_add(1, Ordering::Relaxed);
        }
        tracing::debug!(position, failed, "read a prompt's beginning from disk");
        self.push_waiting(need, arrival);
    }

    fn publish_disk(&self) {
        if let Some(tier) = &self.disk {
            self.load.cache.disk_bytes.store(tier.disk.usage().bytes, Ordering::Relaxed);
        }
    }
}

impl DiskTier {
    /// Begins to save the snapshot that waits for longest. False where none does.
    fn begin_saving(&mut self) -> bool {
        let Some((path, position)) = self.waiting.pop_front() else { return false };
        let keys = PathKeys::new(path.salt.as_deref(), &path.tokens, &[position]);
        let pages = keys.pages(position).enumerate().map(|(index, key)| (key, Part::Page(index)));
        let state = keys.state(position).map(|key| (key, Part::State));
        let parts = pages.chain(state).filter(|(key, _)| !self.disk.knows(key)).collect();
        self.saving = Some(Saving { path, position, parts, in_passage: false, state: Vec::new() });
        true
    }
}
