//! Attention over paged keys and values.

use std::sync::Arc;

use qwill_device::{AttentionShape, Batch, CacheSpec, DeviceError, KvType, Phase};

use super::cache::KvLayer;
use super::{Check, CudaBuffer, CudaCache, CudaDevice, CudaVector, load};
use crate::KernelStore;
use crate::driver::{Driver, Extent, Function};
use crate::launch::{AttendParams, AttentionPrepareParams, PromptParams};
use crate::unit::{AttentionUnits, PROMPT_TILE, attention_units, prompt_shared_bytes};

/// Rows of a launch at most, other than for prompts: bounds the memory for the parts.
const LAUNCH_ROWS: usize = 64;
/// As `MAX_SPLITS` in the source.
const MAX_SPLITS: usize = 32;
/// As `WARPS` in the sources.
const WARPS: usize = 4;

/// The entry points for one shape and type.
#[derive(Debug)]
pub(super) struct AttentionKernels {
    prepare: Function,
    combine: Function,
    /// For rounds with one row a sequence, and for those with several.
    one_row: Function,
    many_rows: Function,
    /// With the shared memory that it needs; none for keys and values in f32.
    prompt: Option<(Function, usize)>,
}

impl AttentionKernels {
    pub(super) fn new(
        driver: &Arc<Driver>,
        store: &KernelStore,
        spec: &CacheSpec,
    ) -> Result<Self, DeviceError> {
        let (shape, kv_type) = (&spec.attention, spec.kv_type);
        let units = attention_units(shape, kv_type).map_err(|reason| DeviceError::shape("cache", reason))?;
        let AttentionUnits { around, rows, prompt } = units;
        let (around, rows) = (load(driver, store, &around)?, load(driver, store, &rows)?);
        let [one_row, many_rows] = match kv_type {
            KvType::F32 => ["attend_plain"; 2],
            KvType::Bf16 | KvType::Int8 => ["attend_one", "attend_many"],
        };
        let load_prompt = |build| {
            let shared_bytes = prompt_shared_bytes(shape.head_dim, kv_type);
            let function =
                load(driver, store, &build)?.early_function("attend_prompt", shared_bytes as u32)?;
            Ok::<_, DeviceError>((function, shared_bytes))
        };
        Ok(Self {
            prepare: around.early_function("prepare", 0)?,
            combine: around.early_function("combine", 0)?,
            one_row: rows.early_function(one_row, 0)?,
            many_rows: rows.early_function(many_rows, 0)?,
            prompt: prompt.map(load_prompt).transpose()?,
        })
    }
}

/// Bytes of the parts of one launch.
pub(super) fn partial_bytes(shape: &AttentionShape) -> u64 {
    (LAUNCH_ROWS * shape.query_heads * MAX_SPLITS * (shape.head_dim + 2) * 4) as u64
}

impl CudaDevice {
    pub(super) fn run_attention_prepare(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        projected: &CudaBuffer,
        (q_norm, k_norm): (&CudaVector, &CudaVector),
        cache: &mut CudaCache,
        query: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("attention_prepare");
        check.attention(batch, kv_layer, shape, cache)?;
        check.activations("projected", projected)?;
        check.activations("query", query)?;
        check.buffer("projected", projected, batch.rows(), shape.projected())?;
        check.buffer("query", query, batch.rows(), shape.query_columns())?;
        check.vector("q_norm", q_norm, shape.head_dim)?;
        check.vector("k_norm", k_norm, shape.head_dim)?;
        let layer = cache.kv_layer(check, kv_layer)?;
        let params = AttentionPrepareParams {
            step: self.step.params(check.0, batch)?,
            projected: projected.memory.address(),
            q_norm: q_norm.memory.address(),
            k_norm: k_norm.memory.address(),
            inverse: layer.inverse,
            query: query.memory.address(),
            kv: layer.kv,
            projected_cols: projected.stride as u32,
            query_cols: query.stride as u32,
            eps: shape.norm_eps,
        };
        let units = (shape.query_heads + shape.kv_heads).div_ceil(WARPS);
        let extent = Extent::new((units, batch.rows(), 1), WARPS * 32);
        self.driver.launch(check.0, &layer.kernels.prepare, extent, &params)
    }

    pub(super) fn run_attention(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        query: &CudaBuffer,
        projected: &CudaBuffer,
        cache: &CudaCache,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("attention");
        check.attention(batch, kv_layer, shape, cache)?;
        check.activations("query", query)?;
        check.activations("projected", projected)?;
        check.activations("out", out)?;
        check.buffer("query", query, batch.rows(), shape.query_columns())?;
        check.buffer("projected", projected, batch.rows(), shape.projected())?;
        check.buffer("out", out, batch.rows(), shape.query_columns())?;
        let layer = cache.kv_layer(check, kv_layer)?;
        let step = self.step.params(check.0, batch)?;
        match &layer.kernels.prompt {
            Some(prompt) if batch.phase == Phase::Prefill => {
                let params = PromptParams {
                    step,
                    query: query.memory.address(),
                    projected: projected.memory.address(),
                    kv: layer.kv,
                    out: out.memory.address(),
                    query_cols: query.stride as u32,
                    projected_cols: projected.stride as u32,
                    out_cols: out.stride as u32,
                    scale: shape.scale(),
                };
                self.attend_prompt(check, batch, shape, prompt, &params)
            }
            _ => {
                let params = AttendParams {
                    step,
                    query: query.memory.address(),
                    projected: projected.memory.address(),
                    kv: layer.kv,
                    partials: self.partials.at_least(&self.driver, partial_bytes(shape))?.address(),
                    out: out.memory.address(),
                    first_row: 0,
                    query_cols: query.stride as u32,
                    projected_cols: projected.stride as u32,
                    out_cols: out.stride as u32,
                    scale: shape.scale(),
                };
                self.attend_rows(check, batch, shape, &layer, params)
            }
        }
    }

    /// Prompts, a tile of query vectors a block.
    fn attend_prompt(
        &self,
        check: Check,
        batch: &Batch,
        shape: &AttentionShape,
        (function, shared_bytes): &(Function, usize),
        params: &PromptParams,
    ) -> Result<(), DeviceError> {
        let heads = shape.query_heads / shape.kv_heads;
        let rows = batch.spans.iter().map(|span| span.rows).max().unwrap_or(0);
        let tiles = (rows * heads).div_ceil(PROMPT_TILE);
        let extent =
            Extent::new((shape.kv_heads, tiles, batch.spans.len()), WARPS * 32).with_shared(*shared_bytes);
        self.driver.launch(check.0, function, extent, params)
    }

    /// Rows split over their positions.
    fn attend_rows(
        &self,
        check: Check,
        batch: &Batch,
        shape: &AttentionShape,
        layer: &KvLayer<'_>,
        params: AttendParams,
    ) -> Result<(), DeviceError> {
        let one_each = batch.spans.iter().all(|span| span.rows == 1);
        let attend = if one_each { &layer.kernels.one_row } else { &layer.kernels.many_rows };
        for first_row in (0..batch.rows()).step_by(LAUNCH_ROWS) {
            let rows = LAUNCH_ROWS.min(batch.rows() - first_row);
            let params = AttendParams { first_row: first_row as u32, ..params };
            let extent = Extent::new((MAX_SPLITS, shape.kv_heads, rows), WARPS * 32);
            self.driver.launch(check.0, attend, extent, &params)?;
            let extent = Extent::new((shape.query_heads, rows, 1), shape.head_dim);
            self.driver.launch(check.0, &layer.kernels.combine, extent, &params)?;
        }
        Ok(())
    }
}
