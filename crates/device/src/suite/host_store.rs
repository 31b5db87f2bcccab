//! Pages and states on their way to host memory and back: the same bits, and nothing waits or is touched that must not
//! be.

use super::caches::{Expected, fill, random_page, random_state, small_specs};
use super::{Bench, Failure, Random};
use crate::batch::CONV_RING;
use crate::{CacheSpec, Device, GdnState, KvPage};

/// States in the store at once.
const STATES: usize = 2;
/// Granules for pages.
const PAGES: usize = 4;

/// A cache, a host store and what the cache should hold.
struct Run<'a, D: Device> {
    device: &'a mut D,
    random: &'a mut Random,
    spec: CacheSpec,
    cache: D::Cache,
    store: D::HostStore,
    expected: Expected,
}

impl<D: Device> Run<'_, D> {
    fn check(&mut self, after: &str) -> Result<(), Failure> {
        self.expected.check(self.device, &self.cache, after)
    }

    /// A page's content over all layers.
    fn page(&self, page: usize) -> Vec<KvPage> {
        self.expected.pages.iter().map(|pages| pages[page].clone()).collect()
    }

    fn expect_page(&mut self, page: usize, content: &[KvPage]) {
        for (pages, content) in self.expected.pages.iter_mut().zip(content) {
            pages[page] = content.clone();
        }
    }

    /// A slot's states over all layers.
    fn state(&self, slot: usize) -> Vec<GdnState> {
        self.expected.states.iter().map(|slots| slots[slot].clone()).collect()
    }

    /// Of a loaded state only the base and the last inputs mean anything; the rest is taken as it is found.
    fn expect_loaded(&mut self, slot: usize, position: usize, stored: &[GdnState]) -> Result<(), Failure> {
        let channels = self.spec.gdn.conv_channels();
        for (layer, stored) in stored.iter().enumerate() {
            let mut state = self.device.read_state(&self.cache, layer, slot)?;
            state.base.clone_from(&stored.base);
            for row in self.spec.stored_rows(position) {
                let inputs = row * channels..(row + 1) * channels;
                state.conv[inputs.clone()].copy_from_slice(&stored.conv[inputs]);
            }
            self.expected.states[layer][slot] = state;
        }
        Ok(())
    }

    fn overwrite_page(&mut self, page: usize) -> Result<(), Failure> {
        for layer in 0..self.spec.kv_layers {
            let (stored, written) = random_page(self.random, &self.spec);
            self.device.write_page(&mut self.cache, layer, page, &written)?;
            self.expected.pages[layer][page] = stored;
        }
        Ok(())
    }

    fn overwrite_slot(&mut self, slot: usize) -> Result<(), Failure> {
        for layer in 0..self.spec.gdn_layers {
            let state = random_state(self.random, &self.spec);
            self.device.write_state(&mut self.cache, layer, slot, &state)?;
            self.expected.states[layer][slot] = state.rounded(&self.spec.gdn, self.spec.state_type);
        }
        Ok(())
    }

    fn store_page(&mut self, page: usize, granule: u32) -> Result<(), Failure> {
        Ok(self.device.store_page(&self.cache, page, &mut self.store, granule)?)
    }

    fn load_page(&mut self, page: usize, granule: u32) -> Result<(), Failure> {
        Ok(self.device.load_page(&mut self.cache, page, &self.store, granule)?)
    }

    fn store_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), Failure> {
        Ok(self.device.store_state(&self.cache, slot, position, &mut self.store, granules)?)
    }

    fn load_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), Failure> {
        Ok(self.device.load_state(&mut self.cache, slot, position, &self.store, granules)?)
    }

    /// Until all copies are done; every device must get there without being asked for anything else.
    fn wait(&mut self) -> Result<(), Failure> {
        while !self.device.stored(&self.store)? {
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// What is stored comes back, elsewhere, after its place was used for something else at once.
fn there_and_back<D: Device>(
    run: &mut Run<'_, D>,
    position: usize,
    pages: &[u32],
    states: [&[u32]; STATES],
) -> Result<(), Failure> {
    let (page_1, page_3, state_2, state_0) = (run.page(1), run.page(3), run.state(2), run.state(0));
    run.store_state(2, position, states[0])?;
    run.overwrite_slot(2)?;
    run.store_page(1, pages[0])?;
    run.store_page(3, pages[1])?;
    run.overwrite_page(1)?;
    run.device.copy_page(&mut run.cache, 0, 3)?;
    let copied = run.page(0);
    run.expect_page(3, &copied);
    run.store_state(0, position + 5, states[1])?;
    run.device.copy_slot(&mut run.cache, 2, 0)?;
    for slots in &mut run.expected.states {
        slots[0] = slots[2].clone();
    }
    run.check("after storing")?;
    run.wait()?;

    run.load_page(4, pages[0])?;
    run.load_state(1, position, states[0])?;
    run.load_page(1, pages[1])?;
    run.expect_page(4, &page_1);
    run.expect_page(1, &page_3);
    run.expect_loaded(1, position, &state_2)?;
    run.check("after loading")?;
    run.load_state(2, position + 5, states[1])?;
    run.expect_loaded(2, position + 5, &state_0)?;
    run.check("after loading another state")
}

/// Nobody waits between ops on the same page, slot or granules.
fn in_a_hurry<D: Device>(
    run: &mut Run<'_, D>,
    position: usize,
    pages: &[u32],
    states: [&[u32]; STATES],
) -> Result<(), Failure> {
    run.overwrite_page(0)?;
    run.overwrite_slot(0)?;
    let (first, second, state) = (run.page(0), run.page(2), run.state(0));
    run.store_page(0, pages[0])?;
    run.load_page(1, pages[0])?;
    run.store_page(2, pages[0])?;
    run.load_page(0, pages[0])?;
    run.device.copy_page(&mut run.cache, 1, 4)?;
    run.store_page(1, pages[1])?;
    run.overwrite_page(1)?;
    run.load_page(3, pages[1])?;
    for (page, content) in [(0, &second), (3, &first), (4, &first)] {
        run.expect_page(page, content);
    }
    run.store_state(0, position, states[0])?;
    run.load_state(1, position, states[0])?;
    run.store_state(1, position, states[1])?;
    run.overwrite_slot(1)?;
    run.load_state(2, position, states[1])?;
    run.expect_loaded(2, position, &state)?;
    run.check("after ops on the same places")
}

/// A granule's bytes are all there is of a page.
fn through_bytes<D: Device>(run: &mut Run<'_, D>, pages: &[u32]) -> Result<(), Failure> {
    let content = run.page(2);
    run.store_page(2, pages[2])?;
    let bytes = run.device.read_granule(&run.store, pages[2])?.to_vec();
    if bytes.len() as u64 != run.spec.granule_bytes() {
        return Err(Failure::new(format!("a granule of {} bytes", bytes.len())));
    }
    run.store_page(0, pages[3])?;
    run.load_page(1, pages[3])?;
    let other = run.page(0);
    run.expect_page(1, &other);
    run.device.write_granule(&mut run.store, pages[3], &bytes)?;
    run.load_page(4, pages[3])?;
    run.expect_page(4, &content);
    run.check("after copying a granule's bytes")
}

/// What does not fit is refused, and nothing is done.
fn refusals<D: Device>(
    run: &mut Run<'_, D>,
    granules: usize,
    states: [&[u32]; STATES],
) -> Result<(), Failure> {
    let outside = granules as u32;
    let mut wrong = states[0].to_vec();
    wrong[0] = outside;
    let Run { device, spec, cache, store, .. } = run;
    let refused = [
        ("store_page of a page outside", device.store_page(cache, spec.pages, store, 0)),
        ("store_page to a granule outside", device.store_page(cache, 0, store, outside)),
        ("load_page from a granule outside", device.load_page(cache, 0, store, outside)),
        ("load_page to a page outside", device.load_page(cache, spec.pages, store, 0)),
        ("store_state of a slot outside", device.store_state(cache, spec.slots, 9, store, states[0])),
        ("store_state to too few granules", device.store_state(cache, 0, 9, store, &states[0][1..])),
        ("load_state from a granule outside", device.load_state(cache, 0, 9, store, &wrong)),
        ("read_granule outside", device.read_granule(store, outside).map(|_| ())),
        ("write_granule of too few bytes", device.write_granule(store, 0, &[1])),
    ];
    for (name, outcome) in refused {
        if outcome.is_ok() {
            return Err(Failure::new(format!("{name} is not refused")));
        }
    }
    run.check("after refused ops")
}

fn check_one<D: Device>(device: &mut D, random: &mut Random, spec: &CacheSpec) -> Result<(), Failure> {
    let mut cache = device.cache(spec)?;
    let expected = fill(device, &mut cache, random, spec)?;
    let granules = STATES * spec.state_granules() + PAGES;
    let store = device.host_store(spec, granules)?;
    let mut ids: Vec<u32> = (0..granules as u32).collect();
    random.shuffle(&mut ids);
    let position = random.between(spec.gdn.conv_width, 3 * CONV_RING);
    let (pages, states) = ids.split_at(PAGES);
    let (first, second) = states.split_at(spec.state_granules());
    let mut run = Run { device, random, spec: *spec, cache, store, expected };
    there_and_back(&mut run, position, pages, [first, second])?;
    in_a_hurry(&mut run, position, pages, [first, second])?;
    through_bytes(&mut run, pages)?;
    refusals(&mut run, granules, [first, second])
}

pub(super) fn host_store<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for spec in small_specs(&bench.options.geometries) {
        let describe = |failure: Failure| failure.within(&format!("{spec:?}"));
        check_one(bench.reference, &mut bench.random, &spec).map_err(describe)?;
        check_one(bench.device, &mut bench.random, &spec).map_err(describe)?;
        bench.runs += 1;
    }
    Ok(())
}
