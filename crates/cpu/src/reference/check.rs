//! What an op must be given: shapes that do not fit are errors of the caller, never a panic.

use qwill_device::{AttentionShape, Batch, DeviceError, GdnShape, Phase};

use super::matrix::Matrix;
use crate::{Buffer, Cache};

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
        buffer: &Buffer,
        rows: usize,
        cols: usize,
    ) -> Result<(), DeviceError> {
        self.that(rows <= buffer.capacity_rows() && cols <= buffer.cols, || {
            let (capacity, found) = (buffer.capacity_rows(), buffer.cols);
            format!("{name} is [{capacity}, {found}], needs [{rows}, {cols}]")
        })
    }

    /// A vector of exactly `len` values.
    pub(super) fn vector(self, name: &str, values: &[f32], len: usize) -> Result<(), DeviceError> {
        self.that(values.len() == len, || format!("{name} has {} values, needs {len}", values.len()))
    }

    /// Rows of a buffer by index.
    pub(super) fn gathered(self, name: &str, rows: &[usize], from: &Buffer) -> Result<(), DeviceError> {
        let largest = rows.iter().copied().max().unwrap_or(0);
        self.that(rows.is_empty() || largest < from.capacity_rows(), || {
            format!("row {largest} of {name}, which has {}", from.capacity_rows())
        })
    }

    /// Token ids below the table's rows.
    pub(super) fn tokens(self, table: &Matrix, batch: &Batch) -> Result<(), DeviceError> {
        let largest = batch.tokens.iter().copied().max().unwrap_or(0) as usize;
        self.that(batch.tokens.is_empty() || largest < table.rows, || {
            format!("token {largest} of a table of {} rows", table.rows)
        })
    }

    /// A consistent batch whose pages the cache has, and the layer and shape it was made for.
    pub(super) fn attention(
        self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        cache: &Cache,
    ) -> Result<(), DeviceError> {
        batch.check().map_err(|reason| DeviceError::shape(self.0, reason))?;
        self.that(kv_layer < cache.kv.len(), || format!("layer {kv_layer} of {} KV layers", cache.kv.len()))?;
        let spec = &cache.spec.attention;
        self.that((spec.kv_heads, spec.head_dim) == (shape.kv_heads, shape.head_dim), || {
            format!("shape {shape:?} on a cache of {spec:?}")
        })?;
        for span in &batch.spans {
            let pages = &batch.page_table[span.first_page..span.first_page + span.pages()];
            let largest = pages.iter().copied().max().unwrap_or(0) as usize;
            self.that(largest < cache.spec.pages, || format!("page {largest} of {}", cache.spec.pages))?;
        }
        Ok(())
    }

    /// A consistent batch whose slots the cache has, and the layer and shape it was made for.
    pub(super) fn gdn(
        self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        cache: &Cache,
    ) -> Result<(), DeviceError> {
        batch.check().map_err(|reason| DeviceError::shape(self.0, reason))?;
        self.that(gdn_layer < cache.states.len(), || {
            format!("layer {gdn_layer} of {} GDN layers", cache.states.len())
        })?;
        self.that(cache.spec.gdn == *shape, || {
            format!("shape {shape:?} on a cache of {:?}", cache.spec.gdn)
        })?;
        for span in &batch.spans {
            self.that(span.slot < cache.spec.slots, || {
                format!("slot {} of {}", span.slot, cache.spec.slots)
            })?;
            self.that(batch.phase == Phase::Rows || span.ring_len == 0, || {
                format!("a prefill span of slot {} on a ring of {}", span.slot, span.ring_len)
            })?;
        }
        Ok(())
    }
}
