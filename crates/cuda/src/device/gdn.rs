//! Gated `DeltaNet`.

use std::sync::Arc;

use qwill_device::batch::{CHUNK_TOKENS, CONV_RING};
use qwill_device::{Batch, DeviceError, GdnShape, GdnWeights, Phase, RING_TOKENS, StateType};

use super::cache::GdnLayer;
use super::{Check, CudaBuffer, CudaCache, CudaDevice};
use crate::driver::{Extent, Function, Module};
use crate::launch::{GdnPrepareParams, GdnRoundParams, ScanParams, StepParams};

/// As `CHUNK_COLUMNS`, `WARPS` and the warps of the other kernels in the sources.
const CHUNK_COLUMNS: usize = 64;
const PREPARE_WARPS: usize = 4;
const ROUND_WARPS: usize = 8;
const CHUNK_THREADS: usize = 128;

/// Most rows of a span that the kernels for rounds are compiled for.
const ROUND_ROWS: [usize; 4] = [1, 4, 8, 16];

/// Entry points of gdn.cu and `gdn_chunks.cu` for one shape and state type.
#[derive(Debug)]
pub(super) struct GdnKernels {
    prepare: Function,
    remember: Function,
    /// The scan of rounds alone.
    scan_rows: RoundKernel,
    /// Everything between a round's projections, for spans of at most [`ROUND_ROWS`].
    layer_rows: [RoundKernel; 4],
    scan_chunks: Function,
}

#[derive(Debug)]
struct RoundKernel {
    most_rows: usize,
    kernel: Function,
    shared_bytes: usize,
}

impl GdnKernels {
    /// From the modules of `gdn_units`.
    pub(super) fn new(
        module: &Arc<Module>,
        chunks: &Arc<Module>,
        shape: &GdnShape,
        state_type: StateType,
    ) -> Result<Self, DeviceError> {
        let round = |name: &str, rows: usize| {
            let shared_bytes = round_shared_bytes(shape, state_type, rows);
            let kernel = module.early_function(name, shared_bytes as u32)?;
            Ok::<_, DeviceError>(RoundKernel { most_rows: rows, kernel, shared_bytes })
        };
        let [one, four, eight, most] = ROUND_ROWS;
        Ok(Self {
            prepare: module.early_function("prepare", 0)?,
            remember: module.early_function("remember", 0)?,
            scan_rows: round("scan_rows", most)?,
            layer_rows: [
                round("layer_rows_1", one)?,
                round("layer_rows_4", four)?,
                round("layer_rows_8", eight)?,
                round("layer_rows_16", most)?,
            ],
            scan_chunks: chunks.early_function("scan_chunks", chunk_shared_bytes(shape) as u32)?,
        })
    }
}

/// `sizeof(ChunkShared)`.
fn chunk_shared_bytes(shape: &GdnShape) -> usize {
    let keys_and_queries = 2 * CHUNK_TOKENS * (shape.key_dim.next_multiple_of(16) + 8) * 2;
    let values = CHUNK_TOKENS * (CHUNK_COLUMNS + 8) * 2;
    let weights = 2 * 2 * CHUNK_TOKENS * (CHUNK_TOKENS + 8) * 2;
    let inverses = 2 * CHUNK_TOKENS * 24 * 2;
    let diagonal = CHUNK_TOKENS * 16 * 4;
    let gates = 5 * CHUNK_TOKENS * 4;
    keys_and_queries + values + weights + inverses + diagonal + gates
}

/// `sizeof(RoundShared)`.
fn round_shared_bytes(shape: &GdnShape, state_type: StateType, rows: usize) -> usize {
    let (key, value) = (shape.key_dim, shape.value_dim);
    let holds_state = state_type == StateType::F16 && rows <= 8;
    let stored = RING_TOKENS * value + if holds_state { key * value } else { 8 };
    let sums = 2 * ROUND_WARPS * rows.min(4) * value;
    let keys_or_sums_bytes = (RING_TOKENS * key * state_type.bytes()).max(sums * 4);
    let rows_and_totals = rows * (2 * key + value) + 2 * rows * value;
    let gates = 2 * RING_TOKENS + 2 * rows * RING_TOKENS;
    // The sums of logs are doubles, and a flag fills one.
    let logs_bytes = RING_TOKENS * 8 + 16;
    stored * state_type.bytes() + keys_or_sums_bytes + (rows_and_totals + gates) * 4 + logs_bytes
}

impl CudaDevice {
    pub(super) fn run_gdn_prepare(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        weights: &GdnWeights<Self>,
        projected: &CudaBuffer,
        cache: &mut CudaCache,
        mixed: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("gdn_prepare");
        check.gdn(batch, gdn_layer, shape, cache)?;
        check.activations("projected", projected)?;
        check.full("mixed", mixed)?;
        check.buffer("projected", projected, batch.rows(), shape.projected())?;
        check.buffer("mixed", mixed, batch.rows(), shape.mixed())?;
        check.weights(shape, weights)?;
        let layer = cache.gdn_layer(check, gdn_layer)?;
        let params = GdnPrepareParams {
            step: self.step.params(check.0, batch)?,
            projected: projected.memory.address(),
            taps: weights.conv.memory.address(),
            decay_rate: weights.decay_rate.memory.address(),
            dt_bias: weights.dt_bias.memory.address(),
            conv: layer.conv,
            mixed: mixed.memory.address(),
            projected_cols: projected.stride as u32,
            mixed_cols: mixed.stride as u32,
            query_scale: 1.0 / (shape.key_dim as f32).sqrt(),
        };
        let units = 2 * shape.key_heads + shape.value_heads + 1;
        let extent = Extent::new((units.div_ceil(PREPARE_WARPS), batch.rows(), 1), PREPARE_WARPS * 32);
        self.driver.launch(check.0, &layer.kernels.prepare, extent, &params)?;
        if batch.phase == Phase::Rows {
            return Ok(());
        }
        let extent =
            Extent::new((shape.conv_channels().div_ceil(256 * 4), CONV_RING, self.step.spans()), 256);
        self.driver.launch(check.0, &layer.kernels.remember, extent, &params)
    }

    pub(super) fn run_gdn_scan(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        mixed: &CudaBuffer,
        cache: &mut CudaCache,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("gdn_scan");
        check.gdn(batch, gdn_layer, shape, cache)?;
        check.full("mixed", mixed)?;
        check.activations("out", out)?;
        check.buffer("mixed", mixed, batch.rows(), shape.mixed())?;
        check.buffer("out", out, batch.rows(), shape.value_columns())?;
        let layer = cache.gdn_layer(check, gdn_layer)?;
        if batch.phase == Phase::Rows {
            let params = GdnRoundParams {
                mixed: mixed.memory.address(),
                out: out.memory.address(),
                mixed_cols: mixed.stride as u32,
                out_cols: out.stride as u32,
                ..round_params(self.step.params(check.0, batch)?, &layer)
            };
            return self.launch_round(check, shape, &layer.kernels.scan_rows, &params);
        }
        let params = ScanParams {
            step: self.step.params(check.0, batch)?,
            mixed: mixed.memory.address(),
            base: layer.base,
            ring: layer.ring,
            log_decays: layer.log_decays,
            readers: layer.readers,
            out: out.memory.address(),
            mixed_cols: mixed.stride as u32,
            out_cols: out.stride as u32,
        };
        let grid = (shape.value_dim.div_ceil(CHUNK_COLUMNS), shape.value_heads, self.step.spans());
        let extent = Extent::new(grid, CHUNK_THREADS).with_shared(chunk_shared_bytes(shape));
        self.driver.launch(check.0, &layer.kernels.scan_chunks, extent, &params)
    }

    /// Everything between the projections of a round in one launch.
    pub(super) fn run_gdn_round(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        weights: &GdnWeights<Self>,
        projected: &CudaBuffer,
        cache: &mut CudaCache,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        // Under the name of its largest part, for those who measure ops.
        let check = Check("gdn_scan");
        check.gdn(batch, gdn_layer, shape, cache)?;
        check.activations("projected", projected)?;
        check.activations("out", out)?;
        check.buffer("projected", projected, batch.rows(), shape.projected())?;
        check.buffer("out", out, batch.rows(), shape.value_columns())?;
        check.weights(shape, weights)?;
        let layer = cache.gdn_layer(check, gdn_layer)?;
        let params = GdnRoundParams {
            projected: projected.memory.address(),
            taps: weights.conv.memory.address(),
            decay_rate: weights.decay_rate.memory.address(),
            dt_bias: weights.dt_bias.memory.address(),
            conv: layer.conv,
            norm: weights.norm.memory.address(),
            out: out.memory.address(),
            projected_cols: projected.stride as u32,
            out_cols: out.stride as u32,
            query_scale: 1.0 / (shape.key_dim as f32).sqrt(),
            eps: shape.norm_eps,
            ..round_params(self.step.params(check.0, batch)?, &layer)
        };
        let most = batch.spans.iter().map(|span| span.rows).max().unwrap_or(0);
        let [small @ .., largest] = &layer.kernels.layer_rows;
        let kernel = small.iter().find(|kernel| most <= kernel.most_rows).unwrap_or(largest);
        self.launch_round(check, shape, kernel, &params)
    }

    fn launch_round(
        &self,
        check: Check,
        shape: &GdnShape,
        round: &RoundKernel,
        params: &GdnRoundParams,
    ) -> Result<(), DeviceError> {
        let extent = Extent::new((shape.value_heads, self.step.spans(), 1), ROUND_WARPS * 32);
        self.driver.launch(check.0, &round.kernel, extent.with_shared(round.shared_bytes), params)
    }
}

/// What every kernel for rounds is given: a layer's states.
fn round_params(step: StepParams, layer: &GdnLayer<'_>) -> GdnRoundParams {
    GdnRoundParams {
        step,
        projected: 0,
        taps: 0,
        decay_rate: 0,
        dt_bias: 0,
        conv: 0,
        mixed: 0,
        norm: 0,
        base: layer.base,
        ring: layer.ring,
        log_decays: layer.log_decays,
        readers: layer.readers,
        out: 0,
        projected_cols: 0,
        mixed_cols: 0,
        out_cols: 0,
        query_scale: 0.0,
        eps: 0.0,
        unused: 0,
    }
}

#[cfg(test)]
mod tests {
    use qwill_device::Geometry;

    use super::*;

    #[test]
    fn chunks_and_rounds_fit_the_shared_memory_of_every_supported_card() {
        for name in Geometry::NAMES {
            let shape = Geometry::named(name).unwrap().gdn;
            assert!(chunk_shared_bytes(&shape) <= 99 * 1024, "{name}: {}", chunk_shared_bytes(&shape));
            for state_type in [StateType::F32, StateType::F16] {
                for rows in ROUND_ROWS {
                    let bytes = round_shared_bytes(&shape, state_type, rows);
                    assert!(bytes <= 99 * 1024, "{name}, {state_type:?}, {rows} rows: {bytes}");
                }
            }
        }
    }
}
