//! What an op must be given: shapes that do not fit are errors of the caller, never a fault on the device.

use qwill_device::{AttentionShape, Batch, DeviceError, GdnShape, GdnWeights, Phase, Precision};

use super::{CudaBuffer, CudaCache, CudaDevice, CudaMatrix, CudaVector};

/// The op whose arguments are being checked.
#[derive(Clone, Copy)]
pub(super) struct Check(pub(super) &'static str);

impl Check {
    /// Fails with `reason` unless `fits`.
    pub(super) fn that(self, fits: bool, reason: impl FnOnce() -> String) -> Result<(), DeviceError> {
        if fits { Ok(()) } else { Err(DeviceError::shape(self.0, reason())) }
    }

    /// A buffer of at least `rows` rows and `cols` columns.
    pub(super) fn buffer(
        self,
        name: &str,
        buffer: &CudaBuffer,
        rows: usize,
        cols: usize,
    ) -> Result<(), DeviceError> {
        self.that(rows <= buffer.rows && cols <= buffer.cols, || {
            format!("{name} is [{}, {}], needs [{rows}, {cols}]", buffer.rows, buffer.cols)
        })
    }

    /// A buffer of activations.
    pub(super) fn activations(self, name: &str, buffer: &CudaBuffer) -> Result<(), DeviceError> {
        self.that(buffer.precision == Precision::Activation, || format!("{name} is f32, not activations"))
    }

    /// A buffer of f32.
    pub(super) fn full(self, name: &str, buffer: &CudaBuffer) -> Result<(), DeviceError> {
        self.that(buffer.precision == Precision::Full, || format!("{name} is activations, not f32"))
    }

    /// A vector of exactly `len` values.
    pub(super) fn vector(self, name: &str, vector: &CudaVector, len: usize) -> Result<(), DeviceError> {
        self.that(vector.len == len, || format!("{name} has {} values, needs {len}", vector.len))
    }

    /// Rows of a buffer by index.
    pub(super) fn gathered(self, name: &str, rows: &[usize], from: &CudaBuffer) -> Result<(), DeviceError> {
        let largest = rows.iter().copied().max().unwrap_or(0);
        self.that(rows.is_empty() || largest < from.rows, || {
            format!("row {largest} of {name}, which has {}", from.rows)
        })
    }

    /// Token ids below the table's rows.
    pub(super) fn tokens(self, table: &CudaMatrix, batch: &Batch) -> Result<(), DeviceError> {
        let largest = batch.tokens.iter().copied().max().unwrap_or(0) as usize;
        self.that(batch.tokens.is_empty() || largest < table.rows(), || {
            format!("token {largest} of a table of {} rows", table.rows())
        })
    }

    /// Pages that the cache has, and the layer and shape it was made for.
    pub(super) fn attention(
        self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        cache: &CudaCache,
    ) -> Result<(), DeviceError> {
        let spec = cache.spec();
        self.that(kv_layer < spec.kv_layers, || format!("layer {kv_layer} of {} KV layers", spec.kv_layers))?;
        self.that(spec.attention == *shape, || {
            format!("shape {shape:?} on a cache of {:?}", spec.attention)
        })?;
        let largest = batch.page_table.iter().copied().max().unwrap_or(0) as usize;
        self.that(largest < spec.pages, || format!("page {largest} of {}", spec.pages))
    }

    /// The small weights of a GDN layer.
    pub(super) fn weights(
        self,
        shape: &GdnShape,
        weights: &GdnWeights<CudaDevice>,
    ) -> Result<(), DeviceError> {
        self.vector("conv", &weights.conv, shape.conv_channels() * shape.conv_width)?;
        self.vector("decay_rate", &weights.decay_rate, shape.value_heads)?;
        self.vector("dt_bias", &weights.dt_bias, shape.value_heads)?;
        self.vector("norm", &weights.norm, shape.value_dim)
    }

    /// Slots that the cache has, and the layer and shape it was made for.
    pub(super) fn gdn(
        self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        cache: &CudaCache,
    ) -> Result<(), DeviceError> {
        let spec = cache.spec();
        self.that(gdn_layer < spec.gdn_layers, || {
            format!("layer {gdn_layer} of {} GDN layers", spec.gdn_layers)
        })?;
        self.that(spec.gdn == *shape, || format!("shape {shape:?} on a cache of {:?}", spec.gdn))?;
        for span in &batch.spans {
            self.that(span.slot < spec.slots, || format!("slot {} of {}", span.slot, spec.slots))?;
            self.that(batch.phase == Phase::Rows || span.ring_len == 0, || {
                format!("a prefill span of slot {} on a ring of {}", span.slot, span.ring_len)
            })?;
        }
        Ok(())
    }
}
