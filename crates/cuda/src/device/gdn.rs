//! Gated `DeltaNet`.

use std::sync::Arc;

use qwill_device::batch::{CHUNK_TOKENS, CONV_RING};
use qwill_device::{Batch, DeviceError, GdnShape, GdnWeights, Phase};

use super::{Check, CudaBuffer, CudaCache, CudaDevice};
use crate::driver::{Extent, Function, Module};
use crate::launch::{GdnPrepareParams, ScanParams};

/// As `COLUMNS`, `CHUNK_COLUMNS` and the warps of the kernels in the sources.
const COLUMNS: usize = 32;
const CHUNK_COLUMNS: usize = 64;
const PREPARE_WARPS: usize = 4;
const SCAN_THREADS: usize = 128;
const CHUNK_THREADS: usize = 128;

/// Entry points of gdn.cu and `gdn_chunks.cu` for one shape and state type.
#[derive(Debug)]
pub(super) struct GdnKernels {
    prepare: Function,
    remember: Function,
    /// For spans of at most 1, 4 and 16 rows.
    scan_rows: [Function; 3],
    scan_chunks: Function,
}

impl GdnKernels {
    /// From the modules of `gdn_units`.
    pub(super) fn new(
        module: &Arc<Module>,
        chunks: &Arc<Module>,
        shape: &GdnShape,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            prepare: module.early_function("prepare", 0)?,
            remember: module.early_function("remember", 0)?,
            scan_rows: [
                module.early_function("scan_rows_1", 0)?,
                module.early_function("scan_rows_4", 0)?,
                module.early_function("scan_rows_16", 0)?,
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
        check.vector("conv", &weights.conv, shape.conv_channels() * shape.conv_width)?;
        check.vector("decay_rate", &weights.decay_rate, shape.value_heads)?;
        check.vector("dt_bias", &weights.dt_bias, shape.value_heads)?;
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
        let extent = Extent::new((shape.conv_channels().div_ceil(256), CONV_RING, self.step.spans()), 256);
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
        let spans = self.step.spans();
        let grid = |columns: usize| (shape.value_dim.div_ceil(columns), shape.value_heads, spans);
        if batch.phase == Phase::Prefill {
            let extent = Extent::new(grid(CHUNK_COLUMNS), CHUNK_THREADS);
            let extent = extent.with_shared(chunk_shared_bytes(shape));
            return self.driver.launch(check.0, &layer.kernels.scan_chunks, extent, &params);
        }
        let kernel = match batch.spans.iter().map(|span| span.rows).max().unwrap_or(0) {
            0..=1 => &layer.kernels.scan_rows[0],
            2..=4 => &layer.kernels.scan_rows[1],
            _ => &layer.kernels.scan_rows[2],
        };
        self.driver.launch(check.0, kernel, Extent::new(grid(COLUMNS), SCAN_THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use qwill_device::Geometry;

    use super::*;

    #[test]
    fn a_chunk_fits_the_shared_memory_of_every_supported_card() {
        for name in Geometry::NAMES {
            let shape = Geometry::named(name).unwrap().gdn;
            assert!(chunk_shared_bytes(&shape) <= 99 * 1024, "{name}: {}", chunk_shared_bytes(&shape));
        }
    }
}
