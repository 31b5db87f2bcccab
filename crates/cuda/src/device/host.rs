//! Pages and states on their way to page-locked memory and back.
//!
//! Copies run on streams of their own, so that rounds go on meanwhile. What they use is noted: an op that would touch
//! it waits for the copies, on the device; all others do not. Pages go directly; a state is first gathered into a buffer,
//! in the ops' order, because its slot is used on at once.

use std::collections::HashSet;
use std::sync::Arc;

use qwill_device::{Batch, CacheSpec, DeviceError};

use super::{Check, CudaCache, CudaDevice};
use crate::copies::{Event, Lanes, Rows, Side};
use crate::driver::{Driver, Memory};
use crate::host_memory::HostMemory;

/// Page-locked memory for pages and states; see [`qwill_device::Device::host_store`].
#[derive(Debug)]
pub struct CudaHostStore {
    /// Of the caches, without their numbers of pages and slots.
    spec: CacheSpec,
    granules: usize,
    memory: HostMemory,
    /// A state's bytes as they are stored, on the device.
    staging: Memory,
    /// The last use of the staging.
    staged: Event,
}

/// What copies in one direction use.
#[derive(Debug, Default)]
struct Moving {
    pages: HashSet<usize>,
    slots: HashSet<usize>,
    granules: HashSet<u32>,
}

impl Moving {
    fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.slots.is_empty() && self.granules.is_empty()
    }
    fn clear(&mut self) {
        self.pages.clear();
        self.slots.clear();
        self.granules.clear();
    }
    fn has_any(&self, granules: &[u32]) -> bool {
        granules.iter().any(|granule| self.granules.contains(granule))
    }
}

/// The copies that were begun.
#[derive(Debug)]
pub(super) struct Transfers {
    lanes: Arc<Lanes>,
    leaving: Moving,
    arriving: Moving,
}

impl Transfers {
    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        Ok(Self { lanes: Lanes::new(driver)?, leaving: Moving::default(), arriving: Moving::default() })
    }

    pub(super) fn lanes(&self) -> &Arc<Lanes> {
        &self.lanes
    }

    /// Forgets what is done.
    fn settle(&mut self, op: &'static str) -> Result<(), DeviceError> {
        if !self.leaving.is_empty() && self.lanes.leaving.is_done(op)? {
            self.leaving.clear();
        }
        if !self.arriving.is_empty() && self.lanes.arriving.is_done(op)? {
            self.arriving.clear();
        }
        Ok(())
    }

    /// Lets ops wait for the copies of what they use.
    pub(super) fn before(
        &mut self,
        op: &'static str,
        read_pages: &[usize],
        written_pages: &[usize],
        slots: &[usize],
    ) -> Result<(), DeviceError> {
        self.settle(op)?;
        if written_pages.iter().any(|page| self.leaving.pages.contains(page)) {
            self.lanes.leaving.hold_ops(op)?;
            self.leaving.pages.clear();
        }
        let mut pages = read_pages.iter().chain(written_pages);
        let arriving = pages.any(|page| self.arriving.pages.contains(page))
            || slots.iter().any(|slot| self.arriving.slots.contains(slot));
        if arriving {
            self.lanes.arriving.hold_ops(op)?;
            self.arriving.pages.clear();
            self.arriving.slots.clear();
        }
        Ok(())
    }

    /// [`Self::before`] for the ops of a step.
    pub(super) fn before_step(&mut self, op: &'static str, batch: &Batch) -> Result<(), DeviceError> {
        if self.leaving.is_empty() && self.arriving.is_empty() {
            return Ok(());
        }
        let (mut read, mut written, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        for span in &batch.spans {
            let pages = &batch.page_table[span.first_page..span.first_page + span.pages()];
            let (history, own) = pages.split_at(span.position / qwill_device::batch::PAGE_TOKENS);
            read.extend(history.iter().map(|page| *page as usize));
            written.extend(own.iter().map(|page| *page as usize));
            slots.push(span.slot);
        }
        self.before(op, &read, &written, &slots)
    }
}

impl CudaHostStore {
    fn check(&self, check: Check, cache: &CudaCache, granules: &[u32]) -> Result<(), DeviceError> {
        let of_cache = sizeless(cache.spec());
        check.that(of_cache == self.spec, || {
            format!("a store for {:?}, a cache of {of_cache:?}", self.spec)
        })?;
        granules.iter().try_for_each(|granule| self.offset(check, *granule).map(|_| ()))
    }

    fn offset(&self, check: Check, granule: u32) -> Result<u64, DeviceError> {
        let fits = (granule as usize) < self.granules;
        check.that(fits, || format!("granule {granule} of {}", self.granules))?;
        Ok(u64::from(granule) * self.spec.granule_bytes())
    }

    /// Rows in the store's memory.
    fn rows(&self, offset: u64, pitch: u64) -> Rows<'_> {
        Rows { side: Side::Host(&self.memory), offset, pitch }
    }

    /// A stored state's bytes in the staging and in granules, piece by piece: `(granule, offset, bytes)`.
    fn pieces(&self, granules: &[u32]) -> impl Iterator<Item = (u32, u64, u64)> {
        let (granule_bytes, state_bytes) = (self.spec.granule_bytes(), self.spec.state_bytes());
        let offsets = (0..state_bytes).step_by(granule_bytes as usize);
        let pieces = granules.iter().zip(offsets);
        pieces.map(move |(granule, offset)| (*granule, offset, granule_bytes.min(state_bytes - offset)))
    }
}

/// A spec as far as stored pages and states depend on it.
fn sizeless(spec: &CacheSpec) -> CacheSpec {
    CacheSpec { pages: 0, slots: 0, ..*spec }
}

impl CudaDevice {
    pub(super) fn make_host_store(
        &self,
        spec: &CacheSpec,
        granules: usize,
    ) -> Result<CudaHostStore, DeviceError> {
        let bytes = (spec.granule_bytes() as usize).saturating_mul(granules);
        Ok(CudaHostStore {
            spec: sizeless(spec),
            granules,
            memory: HostMemory::new(&self.driver, self.transfers.lanes(), bytes)?,
            staging: self.driver.allocate("a state on its way to the host", spec.state_bytes())?,
            staged: Event::new(&self.driver)?,
        })
    }

    pub(super) fn run_store_page(
        &mut self,
        cache: &CudaCache,
        page: usize,
        store: &CudaHostStore,
        granule: u32,
    ) -> Result<(), DeviceError> {
        let check = Check("store_page");
        store.check(check, cache, &[granule])?;
        let parts = cache.page_parts(check, page)?;
        let Transfers { lanes, leaving, arriving } = &mut self.transfers;
        lanes.leaving.follow_ops(check.0)?;
        if arriving.pages.contains(&page) || arriving.has_any(&[granule]) {
            lanes.leaving.follow(check.0, &lanes.arriving)?;
        }
        let mut offset = store.offset(check, granule)?;
        for part in parts {
            let to = store.rows(offset, part.width);
            self.driver.copy_rows(
                check.0,
                lanes.leaving.stream(),
                (part.rows, to),
                part.width,
                part.layers,
            )?;
            offset += part.width * part.layers;
        }
        leaving.pages.insert(page);
        leaving.granules.insert(granule);
        lanes.leaving.end(check.0)
    }

    pub(super) fn run_load_page(
        &mut self,
        cache: &CudaCache,
        page: usize,
        store: &CudaHostStore,
        granule: u32,
    ) -> Result<(), DeviceError> {
        let check = Check("load_page");
        store.check(check, cache, &[granule])?;
        let parts = cache.page_parts(check, page)?;
        let Transfers { lanes, leaving, arriving } = &mut self.transfers;
        lanes.arriving.follow_ops(check.0)?;
        if leaving.pages.contains(&page) || leaving.has_any(&[granule]) {
            lanes.arriving.follow(check.0, &lanes.leaving)?;
        }
        let mut offset = store.offset(check, granule)?;
        for part in parts {
            let from = store.rows(offset, part.width);
            self.driver.copy_rows(
                check.0,
                lanes.arriving.stream(),
                (from, part.rows),
                part.width,
                part.layers,
            )?;
            offset += part.width * part.layers;
        }
        arriving.pages.insert(page);
        arriving.granules.insert(granule);
        lanes.arriving.end(check.0)
    }

    pub(super) fn run_store_state(
        &mut self,
        cache: &CudaCache,
        slot: usize,
        position: usize,
        store: &CudaHostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError> {
        let check = Check("store_state");
        check_state(check, cache, store, granules)?;
        let parts = cache.state_parts(check, slot, position)?;
        self.transfers.before(check.0, &[], &[], &[slot])?;
        let Transfers { lanes, leaving, arriving } = &mut self.transfers;
        let (driver, staging) = (&self.driver, Side::Device(&store.staging));
        store.staged.hold(check.0, driver.stream())?;
        for (part, offset, pitch) in parts {
            let to = Rows { side: staging, offset, pitch };
            driver.copy_rows(check.0, driver.stream(), (part.rows, to), part.width, part.layers)?;
        }
        lanes.leaving.follow_ops(check.0)?;
        if arriving.has_any(granules) {
            lanes.leaving.follow(check.0, &lanes.arriving)?;
        }
        for (granule, offset, bytes) in store.pieces(granules) {
            let from = Rows { side: staging, offset, pitch: bytes };
            let to = store.rows(store.offset(check, granule)?, bytes);
            driver.copy_rows(check.0, lanes.leaving.stream(), (from, to), bytes, 1)?;
        }
        store.staged.record(check.0, lanes.leaving.stream())?;
        leaving.granules.extend(granules);
        lanes.leaving.end(check.0)
    }

    pub(super) fn run_load_state(
        &mut self,
        cache: &CudaCache,
        slot: usize,
        position: usize,
        store: &CudaHostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError> {
        let check = Check("load_state");
        check_state(check, cache, store, granules)?;
        let parts = cache.state_parts(check, slot, position)?;
        let Transfers { lanes, leaving, arriving } = &mut self.transfers;
        let (driver, staging) = (&self.driver, Side::Device(&store.staging));
        let stream = lanes.arriving.stream();
        lanes.arriving.follow_ops(check.0)?;
        if leaving.has_any(granules) {
            lanes.arriving.follow(check.0, &lanes.leaving)?;
        }
        store.staged.hold(check.0, stream)?;
        for (granule, offset, bytes) in store.pieces(granules) {
            let from = store.rows(store.offset(check, granule)?, bytes);
            let to = Rows { side: staging, offset, pitch: bytes };
            driver.copy_rows(check.0, stream, (from, to), bytes, 1)?;
        }
        for (part, offset, pitch) in parts {
            let from = Rows { side: staging, offset, pitch };
            driver.copy_rows(check.0, stream, (from, part.rows), part.width, part.layers)?;
        }
        store.staged.record(check.0, stream)?;
        arriving.slots.insert(slot);
        arriving.granules.extend(granules);
        lanes.arriving.end(check.0)
    }

    pub(super) fn is_stored(&mut self) -> Result<bool, DeviceError> {
        self.transfers.settle("stored")?;
        Ok(self.transfers.leaving.is_empty() && self.transfers.arriving.is_empty())
    }

    pub(super) fn run_read_granule<'a>(
        &mut self,
        store: &'a CudaHostStore,
        granule: u32,
    ) -> Result<&'a [u8], DeviceError> {
        let check = Check("read_granule");
        let offset = store.offset(check, granule)?;
        let Transfers { lanes, leaving, .. } = &mut self.transfers;
        if leaving.has_any(&[granule]) {
            lanes.leaving.wait(check.0)?;
        }
        let bytes = store.memory.get(offset as usize, store.spec.granule_bytes() as usize);
        bytes.ok_or_else(|| DeviceError::shape(check.0, format!("granule {granule} is outside")))
    }

    pub(super) fn run_write_granule(
        &mut self,
        store: &mut CudaHostStore,
        granule: u32,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let check = Check("write_granule");
        let offset = store.offset(check, granule)?;
        let len = store.spec.granule_bytes() as usize;
        check.that(bytes.len() == len, || format!("{} bytes, a granule has {len}", bytes.len()))?;
        let Transfers { lanes, leaving, arriving } = &mut self.transfers;
        if leaving.has_any(&[granule]) {
            lanes.leaving.wait(check.0)?;
        }
        if arriving.has_any(&[granule]) {
            lanes.arriving.wait(check.0)?;
        }
        let there = store.memory.get_mut(offset as usize, len);
        let there =
            there.ok_or_else(|| DeviceError::shape(check.0, format!("granule {granule} is outside")))?;
        there.copy_from_slice(bytes);
        Ok(())
    }
}

fn check_state(
    check: Check,
    cache: &CudaCache,
    store: &CudaHostStore,
    granules: &[u32],
) -> Result<(), DeviceError> {
    store.check(check, cache, granules)?;
    let needed = store.spec.state_granules();
    check.that(granules.len() == needed, || format!("{} granules, a state takes {needed}", granules.len()))
}
