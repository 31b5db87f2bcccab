//! Weights of the right distribution without a checkpoint: for speed measurements and tests of any geometry.
//!
//! Every row is a function of (seed, name, row), so rows can be made in any order and by any thread.
//! Linears are normal with variance 1 / inputs, which keeps activations near unit size; those that write to
//! the residual stream are smaller by √(2 · layers), so that the stream does not grow with depth. Normal
//! numbers come from a table of quantiles, a lookup each: fast enough to fill tens of gigabytes at load.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::LazyLock;

use qwill_device::numeric::{f32_to_bf16, f32_to_f16};
use qwill_device::{GROUP, Geometry, WeightFormat};

use crate::layout::{Layout, VectorRole, VectorSpec};
use crate::matrix::{Matrix, MatrixSpec};
use crate::quantize::Quantize;

/// Entries of the quantile table; a power of two.
const QUANTILES: usize = 4096;
/// Typical largest magnitude of [`GROUP`] normal numbers, in standard deviations.
const LARGEST_OF_GROUP: f32 = 2.7;

/// Standard normal quantiles at (i + ½) / [`QUANTILES`], by summing the density.
static NORMAL: LazyLock<[f32; QUANTILES]> = LazyLock::new(|| {
    const STEP: f64 = 1e-4;
    let density = |x: f64| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
    let (mut x, mut below) = (-6.0, 0.0);
    std::array::from_fn(|i| {
        while below < (i as f64 + 0.5) / QUANTILES as f64 {
            x += STEP;
            below += density(x - STEP / 2.0) * STEP;
        }
        x as f32
    })
});

/// A weak but sufficient hash of a counter: the finaliser of splitmix64.
#[inline]
pub(crate) fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number in [0, 1) from the top bits.
pub(crate) fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1 << 24) as f32
}

/// All tensors of a geometry, made on demand.
#[derive(Debug)]
pub(crate) struct RandomWeights {
    seed: u64,
    stored: Quantize,
    layers: usize,
    matrices: HashMap<String, MatrixSpec>,
    vectors: HashMap<String, VectorSpec>,
}

impl RandomWeights {
    pub(crate) fn new(geometry: &Geometry, seed: u64, stored: Quantize) -> Self {
        let layout = Layout::of(geometry);
        Self {
            seed,
            stored,
            layers: geometry.layers.len(),
            matrices: layout.matrices.into_iter().map(|spec| (spec.name.clone(), spec)).collect(),
            vectors: layout.vectors.into_iter().map(|spec| (spec.name.clone(), spec)).collect(),
        }
    }

    pub(crate) fn matrix_spec(&self, name: &str) -> Option<&MatrixSpec> {
        self.matrices.get(name)
    }

    pub(crate) fn vector_spec(&self, name: &str) -> Option<&VectorSpec> {
        self.vectors.get(name)
    }

    /// Canonical full names in order.
    pub(crate) fn names(&self) -> Vec<String> {
        let matrices = self.matrices.keys().map(|name| format!("{name}.weight"));
        let mut names: Vec<_> = matrices.chain(self.vectors.keys().cloned()).collect();
        names.sort_unstable();
        names
    }

    /// The format in which a matrix "is stored".
    pub(crate) fn format_of(&self, name: &str) -> WeightFormat {
        self.stored.target(name).unwrap_or(WeightFormat::Bf16)
    }

    /// Bytes of all tensors.
    pub(crate) fn total_bytes(&self) -> u64 {
        let matrices = self.matrices.values();
        let matrices: u64 = matrices.map(|m| self.format_of(&m.name).matrix_bytes(m.rows, m.cols)).sum();
        matrices + self.vectors.values().map(|vector| vector.len as u64 * 4).sum::<u64>()
    }

    /// Makes rows of a matrix directly in its format.
    pub(crate) fn rows(&self, spec: &MatrixSpec, range: Range<usize>, out: &mut Matrix) {
        let MatrixSpec { name, cols, .. } = spec;
        let key = self.key(name);
        let deviation = self.deviation(name, *cols);
        let rows = (key, range.clone(), *cols);
        let format = self.format_of(name);
        out.reshape(format, range.len(), *cols);
        match format {
            WeightFormat::Int4 => {
                let row_bytes = cols.div_ceil(2);
                fill_rows(out.elements.bytes_mut(), row_bytes, rows.clone(), &nibble_pairs());
                if !cols.is_multiple_of(2) {
                    let last = out.elements.bytes_mut().iter_mut().skip(cols / 2).step_by(row_bytes);
                    last.for_each(|byte| *byte = *byte & 15 | 0x80);
                }
                fill_scales(out.scales.numbers_mut(), rows, deviation, 7.5);
            }
            WeightFormat::Int8 => {
                let step = 127.5 / LARGEST_OF_GROUP;
                let codes = table(|normal| (normal * step).round().clamp(-128.0, 127.0) as i8);
                fill_rows(out.elements.numbers_mut(), *cols, rows.clone(), &codes);
                fill_scales(out.scales.numbers_mut(), rows, deviation, 127.5);
            }
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => {
                let bits = table(|normal| f32_to_bf16(normal * deviation));
                fill_rows::<u16>(out.elements.numbers_mut(), *cols, rows, &bits);
            }
        }
    }

    /// Makes a vector.
    pub(crate) fn vector(&self, spec: &VectorSpec) -> Vec<f32> {
        let key = self.key(&spec.name);
        let draw = |n: usize| mix(key.wrapping_add(n as u64));
        let normal = |n: usize| NORMAL[draw(n) as usize % QUANTILES];
        let value = |n: usize| match spec.role {
            VectorRole::CentredNorm => 0.05 * normal(n),
            VectorRole::PlainNorm => 1.0 + 0.05 * normal(n),
            VectorRole::Convolution { .. } => unit(draw(n)) - 0.5,
            // As Mamba initialises them: rates uniform in 1..16, time steps log-uniform in 0.001..0.1
            // through the inverse of softplus.
            VectorRole::DecayLog => (1.0 + 15.0 * unit(draw(n))).ln(),
            VectorRole::TimeStepBias => {
                let step = (0.001f32.ln() + unit(draw(n)) * 100f32.ln()).exp();
                step + (-(-step).exp_m1()).ln()
            }
        };
        (0..spec.len).map(value).collect()
    }

    /// A start of the counter far from that of every other tensor.
    fn key(&self, name: &str) -> u64 {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        mix(hash ^ mix(self.seed))
    }

    fn deviation(&self, name: &str, cols: usize) -> f32 {
        let unit = 1.0 / (cols as f32).sqrt();
        match name.rsplit('.').next() {
            Some("embed_tokens") => 0.02,
            Some("o_proj" | "out_proj" | "down_proj") => unit / (2.0 * self.layers as f32).sqrt(),
            _ => unit,
        }
    }
}

/// f16 scales for codes whose largest magnitude is `extreme`, of rows of a matrix with that key: the scale of a group
/// of normal numbers, varied by a tenth, half of them negative.
fn fill_scales(
    scales: &mut [u16],
    (key, rows, cols): (u64, Range<usize>, usize),
    deviation: f32,
    extreme: f32,
) {
    let typical = deviation * LARGEST_OF_GROUP / extreme;
    // Another stretch of the counter than the codes use.
    let first = mix(!key).wrapping_add((rows.start * cols.div_ceil(GROUP)) as u64);
    for (group, scale) in scales.iter_mut().enumerate() {
        let bits = mix(first.wrapping_add(group as u64));
        let magnitude = typical * (0.9 + 0.2 * unit(bits));
        *scale = f32_to_f16(if bits & 1 == 0 { magnitude } else { -magnitude });
    }
}

/// The quantiles through a conversion.
fn table<T>(convert: impl Fn(f32) -> T) -> [T; QUANTILES] {
    NORMAL.map(convert)
}

/// Packed bytes of two int4 codes: every pair of 64 quantiles.
fn nibble_pairs() -> [u8; QUANTILES] {
    const COARSE: usize = 64;
    let step = 7.5 / LARGEST_OF_GROUP;
    let nibble = |at: usize| {
        let normal = NORMAL[(2 * at + 1) * QUANTILES / (2 * COARSE)];
        ((normal * step).round().clamp(-8.0, 7.0) + 8.0) as u8
    };
    std::array::from_fn(|at| nibble(at % COARSE) | nibble(at / COARSE) << 4)
}

/// Fills rows of `row_len` elements of a matrix with that key.
fn fill_rows<T: Copy>(
    target: &mut [T],
    row_len: usize,
    (key, rows, _): (u64, Range<usize>, usize),
    table: &[T; QUANTILES],
) {
    for (row, target) in rows.zip(target.chunks_exact_mut(row_len.max(1))) {
        fill(target, mix(key.wrapping_add(row as u64)), table);
    }
}

/// Fills with entries of a table, five from each 64-bit draw.
fn fill<T: Copy>(target: &mut [T], key: u64, table: &[T; QUANTILES]) {
    const PER_DRAW: usize = 5;
    const BITS: usize = QUANTILES.trailing_zeros() as usize;
    let pick = |draw: u64, at: usize| table[(draw >> (at * BITS)) as usize % QUANTILES];
    let (draws, rest) = target.as_chunks_mut::<PER_DRAW>();
    let last = mix(key.wrapping_add(draws.len() as u64));
    for (n, chunk) in draws.iter_mut().enumerate() {
        let draw = mix(key.wrapping_add(n as u64));
        *chunk = std::array::from_fn(|at| pick(draw, at));
    }
    for (at, element) in rest.iter_mut().enumerate() {
        *element = pick(last, at);
    }
}
