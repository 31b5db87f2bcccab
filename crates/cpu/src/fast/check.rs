//! What an op must be given: shapes that do not fit are errors of the caller, never a panic.

use qwill_device::{AttentionShape, Batch, DeviceError, GdnShape, Phase};

use super::pack::Matrix;
use crate::{Buffer, Cache};

/// The op whose arguments are being checked.
#[derive(Debug, Clone, Copy)]
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
        let capacity = buffer.capacity_rows();
        self.that(rows <= capacity && cols <= buffer.cols, || {
            format!("{name} is [{capacity}, {}], needs [{rows}, {cols}]", buffer.cols)
        })
    }

    /// A vector of exactly `len` values.
    pub(super) fn vector(self, name: &str, values: &[f32], len: usize) -> Result<(), DeviceError> {
        self.that(values.len() == len, || format!("{name} has {} values, needs {len}", values.len()))
    }

    /// Rows of a buffer by index.
    pub(super) fn gathered(
        self,
        name: &str,
        mut rows: impl Iterator<Item = usize>,
        from: &Buffer,
    ) -> Result<(), DeviceError> {
        let capacity = from.capacity_rows();
        match rows.find(|row| *row >= capacity) {
            Some(row) => {
                Err(DeviceError::shape(self.0, format!("row {row} of {name}, which has {capacity}")))
            }
            None => Ok(()),
        }
    }

    /// Token ids below the table's rows.
    pub(super) fn tokens(self, table: &Matrix, batch: &Batch) -> Result<(), DeviceError> {
        match batch.tokens.iter().find(|token| **token as usize >= table.rows) {
            Some(token) => {
                Err(DeviceError::shape(self.0, format!("token {token} of a table of {} rows", table.rows)))
            }
            None => Ok(()),
        }
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
        let fits = (spec.kv_heads, spec.head_dim) == (shape.kv_heads, shape.head_dim)
            && shape.query_heads.is_multiple_of(shape.kv_heads)
            && shape.rope_dims <= shape.head_dim;
        self.that(fits, || format!("shape {shape:?} on a cache of {spec:?}"))?;
        for span in &batch.spans {
            let pages = &batch.page_table[span.first_page..span.first_page + span.pages()];
            let missing = pages.iter().find(|page| **page as usize >= cache.spec.pages);
            self.that(missing.is_none(), || format!("page {missing:?} of {}", cache.spec.pages))?;
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
        let layers = cache.states.len();
        self.that(gdn_layer < layers, || format!("layer {gdn_layer} of {layers} GDN layers"))?;
        self.that(cache.spec.gdn == *shape, || {
            format!("shape {shape:?} on a cache of {:?}", cache.spec.gdn)
        })?;
        let mut taken = vec![false; cache.spec.slots];
        for span in &batch.spans {
            let slot = taken.get_mut(span.slot);
            self.that(slot.is_some(), || format!("slot {} of {}", span.slot, cache.spec.slots))?;
            let shared = slot.is_some_and(|slot| std::mem::replace(slot, true));
            self.that(!shared, || format!("two spans in slot {}", span.slot))?;
            self.that(batch.phase == Phase::Rows || span.ring_len == 0, || {
                format!("a prefill span of slot {} on a ring of {}", span.slot, span.ring_len)
            })?;
        }
        Ok(())
    }
}
