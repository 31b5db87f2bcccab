//! How fast pages and states go to page-locked memory and back, and what rounds notice of it:
//! `cargo run --release -p qwill-cuda --example copy_speed -- [geometry]`.

use std::time::Instant;

use qwill_cuda::{CudaBuffer, CudaCache, CudaDevice, CudaHostStore, CudaMatrix, CudaOptions};
use qwill_device::matrix::MatrixElements;
use qwill_device::plan::cache_spec;
use qwill_device::{CacheSpec, Device, Geometry, KvType, MatrixData, Precision, StateType};

type Failure = Box<dyn std::error::Error>;

const PAGES: usize = 400;
const STATES: usize = 8;
const PASSES: usize = 5;
/// So many that pages of different layers lie more than 2 GiB apart, at the shapes of the 27B in bf16.
const MANY_PAGES: usize = 17_000;
/// Products of the work beside the copies.
const PRODUCTS: usize = 120;
const PRODUCT_ROWS: usize = 8;

fn main() -> Result<(), Failure> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "27b".to_owned());
    let geometry = Geometry::named(&name).ok_or("unknown geometry")?;
    let mut device = CudaDevice::new(&CudaOptions::from_environment())?;
    println!("{name} on {}", device.facts().name);
    for (kv_type, state_type) in [(KvType::Bf16, StateType::F16), (KvType::Int8, StateType::F32)] {
        let spec = cache_spec(&geometry, (kv_type, state_type), PAGES + 1, STATES);
        Bench::new(&mut device, &spec)?.print()?;
    }
    let spec = cache_spec(&geometry, (KvType::Bf16, StateType::F16), MANY_PAGES, STATES);
    if spec.bytes() < device.facts().memory_bytes {
        println!("{MANY_PAGES} pages:");
        Bench::new(&mut device, &spec)?.print_pages()?;
    }
    Ok(())
}

/// A model's caches, its host store, and work to do meanwhile.
struct Bench<'a> {
    device: &'a mut CudaDevice,
    spec: CacheSpec,
    cache: CudaCache,
    store: CudaHostStore,
    work: (CudaMatrix, CudaBuffer, CudaBuffer),
}

impl<'a> Bench<'a> {
    fn new(device: &'a mut CudaDevice, spec: &CacheSpec) -> Result<Self, Failure> {
        let granules = PAGES + STATES * spec.state_granules();
        let cache = device.cache(spec)?;
        let started = Instant::now();
        let store = device.host_store(spec, granules)?;
        let bytes = granules as u64 * spec.granule_bytes();
        println!(
            "  {} KV, {} states: {:.2} GB page-locked in {:.2} s",
            spec.kv_type.name(),
            spec.state_type.name(),
            bytes as f64 / 1e9,
            started.elapsed().as_secs_f64()
        );
        let (rows, cols) = (17_408, 5120);
        let elements = vec![0x3c00; rows * cols];
        let matrix = device.matrix(&MatrixData { rows, cols, elements: MatrixElements::Bf16(&elements) })?;
        let input = device.buffer(PRODUCT_ROWS, cols, Precision::Activation)?;
        let out = device.buffer(PRODUCT_ROWS, rows, Precision::Activation)?;
        Ok(Self { device, spec: *spec, cache, store, work: (matrix, input, out) })
    }

    fn print(&mut self) -> Result<(), Failure> {
        self.print_pages()?;
        self.print_states()?;
        self.print_stalls()
    }

    /// Microseconds until the calls of `work` return, and until its copies are done; the best of several passes.
    fn time(&mut self, work: impl Fn(&mut Self) -> Result<(), Failure>) -> Result<[f64; 2], Failure> {
        let mut best = [f64::INFINITY; 2];
        for _ in 0..PASSES {
            let started = Instant::now();
            work(self)?;
            let called = started.elapsed();
            while !self.device.stored(&self.store)? {}
            let done = started.elapsed();
            for (best, found) in best.iter_mut().zip([called, done]) {
                *best = best.min(found.as_secs_f64() * 1e6);
            }
        }
        Ok(best)
    }

    fn line(what: &str, count: usize, bytes: u64, [called, done]: [f64; 2]) {
        let each = |us: f64| us / count as f64;
        println!(
            "    {what:<12} {:>7.3} MB: {:>7.1} us each, {:>5.1} GB/s; calls {:>6.1} us each",
            bytes as f64 / 1e6,
            each(done),
            bytes as f64 / each(done) / 1e3,
            each(called)
        );
    }

    fn print_pages(&mut self) -> Result<(), Failure> {
        let times = self.time(|bench| bench.store_pages(PAGES))?;
        Self::line("store page", PAGES, self.spec.page_bytes(), times);
        let times = self.time(|bench| bench.load_pages(PAGES))?;
        Self::line("load page", PAGES, self.spec.page_bytes(), times);
        Ok(())
    }

    fn print_states(&mut self) -> Result<(), Failure> {
        for count in [1, STATES] {
            let times = self.time(|bench| bench.store_states(count))?;
            Self::line(&format!("store {count} st."), count, self.spec.state_bytes(), times);
            let times = self.time(|bench| bench.load_states(count))?;
            Self::line(&format!("load {count} st."), count, self.spec.state_bytes(), times);
        }
        Ok(())
    }

    /// What work takes longer beside copies of what it does not use.
    fn print_stalls(&mut self) -> Result<(), Failure> {
        let alone = self.worked_beside(|_| Ok(()))?;
        let line = |what: &str, beside: f64| {
            println!("    {alone:.0} us of products beside {what}: {:+.0} us", beside - alone);
        };
        line("storing a state", self.worked_beside(|bench| bench.store_states(1))?);
        line("storing 2 states", self.worked_beside(|bench| bench.store_states(2))?);
        line("storing 16 pages", self.worked_beside(|bench| bench.store_pages(16))?);
        line("loading a state", self.worked_beside(|bench| bench.load_states(1))?);
        line("loading 16 pages", self.worked_beside(|bench| bench.load_pages(16))?);
        Ok(())
    }

    fn worked_beside(&mut self, copies: impl Fn(&mut Self) -> Result<(), Failure>) -> Result<f64, Failure> {
        let mut best = f64::INFINITY;
        for _ in 0..PASSES {
            let started = Instant::now();
            copies(self)?;
            let (matrix, input, out) = &mut self.work;
            for _ in 0..PRODUCTS {
                self.device.linear(PRODUCT_ROWS, input, matrix, out)?;
            }
            self.device.read(out, 1)?;
            best = best.min(started.elapsed().as_secs_f64() * 1e6);
            while !self.device.stored(&self.store)? {}
        }
        Ok(best)
    }

    fn store_pages(&mut self, count: usize) -> Result<(), Failure> {
        for page in 0..count {
            self.device.store_page(&self.cache, page, &mut self.store, page as u32)?;
        }
        Ok(())
    }

    fn load_pages(&mut self, count: usize) -> Result<(), Failure> {
        for page in 0..count {
            self.device.load_page(&mut self.cache, page, &self.store, page as u32)?;
        }
        Ok(())
    }

    fn store_states(&mut self, count: usize) -> Result<(), Failure> {
        for slot in 0..count {
            let granules = self.granules_of_state(slot);
            self.device.store_state(&self.cache, slot, 100, &mut self.store, &granules)?;
        }
        Ok(())
    }

    fn load_states(&mut self, count: usize) -> Result<(), Failure> {
        for slot in 0..count {
            let granules = self.granules_of_state(slot);
            self.device.load_state(&mut self.cache, slot, 100, &self.store, &granules)?;
        }
        Ok(())
    }

    fn granules_of_state(&self, state: usize) -> Vec<u32> {
        let count = self.spec.state_granules();
        (0..count).map(|index| (PAGES + index * STATES + state) as u32).collect()
    }
}
