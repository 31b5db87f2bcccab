//! One test-suite for every device: random shapes, boundaries, poisoned outputs, against the plain reference.
//!
//! A case is an op (or a promise about several, such as "prefill slices do not change bits"). It draws inputs,
//! runs them on the device and on the reference, and compares every column of every row; then it runs each
//! sequence without its mates on the device and demands equal bits. Everything an op must write is poisoned with
//! NaN before, as is everything it must not read; rows, pages and slots that are not its own must stay as they
//! were.

mod attention;
mod batches;
mod caches;
mod gdn;
mod host_store;
mod linear;
mod outputs;
mod random;
mod rows;
mod sample;
mod splits;
mod weights;

use std::fmt;
use std::time::{Duration, Instant};

use crate::{Activations, AttentionShape, Device, DeviceError, GdnShape, Geometry};
use outputs::Outputs;
pub use random::Random;

/// Largest error allowed, relative to an element's own size plus the root mean square of its row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Of results computed in f32 with sums in another order.
    pub f32: f32,
    /// Of results rounded to bfloat16: neighbours, where a tie fell the other way.
    pub bf16: f32,
    /// Of values rounded to IEEE half, and of what was computed from them: as for bfloat16, with three more bits.
    pub f16: f32,
    /// Of int8 products whose inputs the op computed itself: a code may be one step off.
    pub int8: f32,
    /// Of keys that the op computed and quantised: a code may be one step off. A step is 1/127 of the largest element,
    /// which is up to 10 times the root mean square here.
    pub int8_kv: f32,
}

impl Default for Tolerance {
    fn default() -> Self {
        Self { f32: 2e-5, bf16: 1e-2, f16: 2.5e-3, int8: 4e-3, int8_kv: 0.08 }
    }
}

/// What to run.
#[derive(Debug, Clone, PartialEq)]
pub struct SuiteOptions {
    /// Everything random follows from it.
    pub seed: u64,
    /// Shapes; vocabulary and layer count are not used at their full size.
    pub geometries: Vec<Geometry>,
    /// How closely device and reference must agree.
    pub tolerance: Tolerance,
}

impl Default for SuiteOptions {
    /// The small shapes, where boundaries are met often, then the widths of the smallest and the largest model.
    fn default() -> Self {
        let named = ["tiny", "0.8b", "27b"].into_iter().filter_map(Geometry::named);
        Self {
            seed: 1,
            geometries: [odd_geometry()].into_iter().chain(named).collect(),
            tolerance: Tolerance::default(),
        }
    }
}

/// Shapes that are no multiple of anything: heads of 24 and 40, three value heads per key head, 200 columns.
pub fn odd_geometry() -> Geometry {
    Geometry {
        name: "odd".into(),
        hidden: 200,
        intermediate: 331,
        vocab: 517,
        layers: Vec::new(),
        attention: AttentionShape {
            query_heads: 6,
            kv_heads: 2,
            head_dim: 40,
            rope_dims: 12,
            rope_theta: 1e4,
            norm_eps: 1e-5,
        },
        gdn: GdnShape {
            key_heads: 2,
            value_heads: 6,
            key_dim: 24,
            value_dim: 40,
            conv_width: 4,
            norm_eps: 1e-5,
        },
        norm_eps: 1e-5,
        tied_head: false,
        mtp_layers: 0,
        max_context: 1 << 18,
    }
}

/// Why a case failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct Failure(String);

impl Failure {
    fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
    fn within(self, parameters: &str) -> Self {
        Self(format!("{parameters}: {}", self.0))
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self(error.to_string())
    }
}

/// The outcome of one case.
#[derive(Debug, Clone)]
pub struct CaseReport {
    /// Name, as in [`cases`].
    pub name: &'static str,
    /// Comparisons with the reference, or between two ways on the device.
    pub runs: usize,
    /// The largest error that was within the tolerance.
    pub worst_error: f32,
    /// How long the case took, generating inputs and the reference included.
    pub elapsed: Duration,
    /// The first failure with all parameters of the run; the case ends there.
    pub failure: Option<Failure>,
}

/// The outcome of all cases.
#[derive(Debug, Clone)]
pub struct SuiteReport {
    /// Name of the device under test.
    pub device: String,
    /// Seed of the run.
    pub seed: u64,
    /// One entry per case.
    pub cases: Vec<CaseReport>,
}

impl SuiteReport {
    /// Whether no case failed.
    pub fn passed(&self) -> bool {
        self.cases.iter().all(|case| case.failure.is_none())
    }
}

impl fmt::Display for SuiteReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{}, seed {}", self.device, self.seed)?;
        for CaseReport { name, runs, worst_error, elapsed, failure } in &self.cases {
            writeln!(
                out,
                "  {name:<20} {runs:>5} runs  worst error {worst_error:.1e}  {:.1} s",
                elapsed.as_secs_f64()
            )?;
            if let Some(failure) = failure {
                writeln!(out, "    FAILED, seed {}: {failure}", self.seed)?;
            }
        }
        Ok(())
    }
}

/// One run of an op with everything it needs, on the host.
trait OpRun: Sized {
    /// All parameters, for a failure's message.
    fn describe(&self) -> String;
    /// Runs it on a device; fails also where something was touched that must not be.
    fn execute<D: Device>(&self, device: &mut D) -> Result<Outputs, Failure>;
    /// The same work with fewer mates, or none.
    fn with_less_company(&self, random: &mut Random) -> Vec<Part<Self>>;
}

/// Some rows and spans of a run as a run of their own.
struct Part<T> {
    run: T,
    rows: Vec<usize>,
    spans: Vec<usize>,
}

/// A case in progress.
struct Bench<'a, D, R> {
    device: &'a mut D,
    reference: &'a mut R,
    options: &'a SuiteOptions,
    activations: Activations,
    random: Random,
    runs: usize,
    worst_error: f32,
}

impl<D: Device, R: Device> Bench<'_, D, R> {
    /// Device against reference, then the device against itself with less company.
    fn check<T: OpRun>(&mut self, run: &T) -> Result<(), Failure> {
        self.check_unnamed(run).map_err(|failure| failure.within(&run.describe()))
    }

    fn check_unnamed<T: OpRun>(&mut self, run: &T) -> Result<(), Failure> {
        let expected = run.execute(self.reference).map_err(|failure| failure.within("the reference"))?;
        let found = run.execute(self.device)?;
        let error = found.close_to(&expected, self.activations, &self.options.tolerance)?;
        self.worst_error = self.worst_error.max(error);
        self.runs += 1;
        for Part { run, rows, spans } in run.with_less_company(&mut self.random) {
            let alone = run.execute(self.device).map_err(|failure| failure.within("with less company"))?;
            let circumstance = format!("with only rows {rows:?} of the step");
            found.part(&rows, &spans).same_bits(&alone, &circumstance)?;
            self.runs += 1;
        }
        Ok(())
    }
}

type CaseFunction<D, R> = fn(&mut Bench<'_, D, R>) -> Result<(), Failure>;

/// Names of all cases, in the order they run; the functions are in [`functions`].
const NAMES: [&str; 25] = [
    "embed",
    "rms_norm",
    "norm_linears",
    "linear",
    "linear_add",
    "wide_products",
    "norm_swiglu",
    "swiglu",
    "attention_prepare",
    "attention",
    "gdn_prepare",
    "gdn_scan_prefill",
    "gdn_scan_rows",
    "gdn_layer",
    "gated_norm",
    "mtp_combine",
    "head",
    "sample",
    "score",
    "gather",
    "caches",
    "host_store",
    "prefill_slices",
    "round_splits",
    "rejected_rows",
];

fn functions<D: Device, R: Device>() -> [CaseFunction<D, R>; NAMES.len()] {
    [
        rows::embed,
        rows::rms_norm,
        linear::norm_linears,
        linear::linear,
        linear::linear_add,
        linear::wide_products,
        linear::norm_swiglu,
        rows::swiglu,
        attention::prepare,
        attention::attention,
        gdn::prepare,
        gdn::scan_prefill,
        gdn::scan_rows,
        gdn::layer,
        rows::gated_norm,
        rows::mtp_combine,
        linear::head,
        sample::sample,
        sample::score,
        rows::gather,
        caches::caches,
        host_store::host_store,
        splits::prefill_slices,
        splits::round_splits,
        splits::rejected_rows,
    ]
}

/// Names of all cases, in the order they run.
pub fn cases() -> &'static [&'static str] {
    &NAMES
}

/// Runs every case.
pub fn run<D: Device, R: Device>(device: &mut D, reference: &mut R, options: &SuiteOptions) -> SuiteReport {
    let named = NAMES.into_iter().zip(functions::<D, R>());
    let cases = named.map(|(name, function)| run_one(name, function, device, reference, options)).collect();
    SuiteReport { device: device.facts().name, seed: options.seed, cases }
}

/// Runs one case by name; `None` for a name that [`cases`] does not list.
pub fn run_case<D: Device, R: Device>(
    name: &str,
    device: &mut D,
    reference: &mut R,
    options: &SuiteOptions,
) -> Option<CaseReport> {
    let (name, function) = NAMES.into_iter().zip(functions::<D, R>()).find(|(known, _)| *known == name)?;
    Some(run_one(name, function, device, reference, options))
}

fn run_one<D: Device, R: Device>(
    name: &'static str,
    function: CaseFunction<D, R>,
    device: &mut D,
    reference: &mut R,
    options: &SuiteOptions,
) -> CaseReport {
    let activations = device.facts().activations;
    let random = Random::new(options.seed, name);
    let mut bench = Bench { device, reference, options, activations, random, runs: 0, worst_error: 0.0 };
    let start = Instant::now();
    let failure = function(&mut bench).err();
    CaseReport { name, runs: bench.runs, worst_error: bench.worst_error, elapsed: start.elapsed(), failure }
}
