//! KV pages and recurrent states on the device: one allocation per kind, layer after layer.

use std::sync::Arc;

use qwill_device::batch::{CONV_RING, PAGE_TOKENS};
use qwill_device::numeric::{bf16_to_f32, f32_to_bf16};
use qwill_device::{AttentionShape, CacheSpec, DeviceError, GdnState, KvPage, KvType, RING_TOKENS};

use super::attention::AttentionKernels;
use super::gdn::GdnKernels;
use super::{Check, load};
use crate::KernelStore;
use crate::driver::{Driver, Memory};
use crate::unit::{attention_unit, gdn_unit};

/// The caches of a model, with the kernels for their shapes.
#[derive(Debug)]
pub struct CudaCache {
    spec: CacheSpec,
    attention: Option<Pages>,
    gdn: Option<States>,
}

/// `[kv_layers, pages, kv_heads, PAGE_TOKENS, head_dim]` each.
#[derive(Debug)]
struct Pages {
    keys: Memory,
    values: Memory,
    /// RoPE's `rope_theta^(−2i/rope_dims)`.
    inverse: Memory,
    kernels: AttentionKernels,
}

/// `[gdn_layers, slots, …]` f32 each: base states, rings, conv rings.
#[derive(Debug)]
struct States {
    base: Memory,
    ring: Memory,
    conv: Memory,
    kernels: GdnKernels,
}

/// One KV layer, for the ops.
pub(super) struct KvLayer<'a> {
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) inverse: u64,
    pub(super) kernels: &'a AttentionKernels,
}

/// One GDN layer, for the ops.
pub(super) struct GdnLayer<'a> {
    pub(super) base: u64,
    pub(super) ring: u64,
    pub(super) conv: u64,
    pub(super) kernels: &'a GdnKernels,
}

impl Pages {
    fn new(driver: &Arc<Driver>, store: &KernelStore, spec: &CacheSpec) -> Result<Self, DeviceError> {
        let build = attention_unit(&spec.attention, spec.kv_type);
        let build = build.map_err(|reason| DeviceError::shape("cache", reason))?;
        let inverse = inverse_frequencies(&spec.attention);
        let pages = Self {
            keys: driver.allocate("keys", spec.page_bytes() / 2 * spec.pages as u64)?,
            values: driver.allocate("values", spec.page_bytes() / 2 * spec.pages as u64)?,
            inverse: driver.allocate("RoPE frequencies", inverse.len() as u64 * 4)?,
            kernels: AttentionKernels::new(&load(driver, store, &build)?)?,
        };
        pages.inverse.write("cache", 0, &inverse)?;
        Ok(pages)
    }
}

/// `f32(rope_theta^(−2i/rope_dims))`, computed in f64.
fn inverse_frequencies(shape: &AttentionShape) -> Vec<f32> {
    let exponent = |i: usize| -2.0 * i as f64 / shape.rope_dims as f64;
    (0..shape.rope_dims / 2).map(|i| shape.rope_theta.powf(exponent(i)) as f32).collect()
}

/// Bytes of one slot of one layer: base state, ring, conv ring.
fn slot_bytes(spec: &CacheSpec) -> [u64; 3] {
    let gdn = &spec.gdn;
    let elements = [gdn.state_elements(), RING_TOKENS * gdn.ring_entry(), CONV_RING * gdn.conv_channels()];
    elements.map(|elements| elements as u64 * 4)
}

impl States {
    fn new(driver: &Arc<Driver>, store: &KernelStore, spec: &CacheSpec) -> Result<Self, DeviceError> {
        let build = gdn_unit(&spec.gdn).map_err(|reason| DeviceError::shape("cache", reason))?;
        let slots = (spec.gdn_layers * spec.slots) as u64;
        let [base, ring, conv] = slot_bytes(spec).map(|bytes| bytes * slots);
        let states = Self {
            base: driver.allocate("recurrent states", base)?,
            ring: driver.allocate("rings of recurrent states", ring)?,
            conv: driver.allocate("rings of convolution inputs", conv)?,
            kernels: GdnKernels::new(&load(driver, store, &build)?, &spec.gdn)?,
        };
        states.base.clear("cache", 0, base)?;
        // Never read before they are written by an op; zeros keep what tools read defined.
        states.ring.clear("cache", 0, ring)?;
        states.conv.clear("cache", 0, conv)?;
        Ok(states)
    }

    fn parts(&self) -> [&Memory; 3] {
        [&self.base, &self.ring, &self.conv]
    }
}

impl CudaCache {
    pub(super) fn new(
        driver: &Arc<Driver>,
        store: &KernelStore,
        spec: &CacheSpec,
    ) -> Result<Self, DeviceError> {
        let attention = (spec.kv_layers > 0).then(|| Pages::new(driver, store, spec)).transpose()?;
        let gdn = (spec.gdn_layers > 0).then(|| States::new(driver, store, spec)).transpose()?;
        Ok(Self { spec: *spec, attention, gdn })
    }

    pub(super) fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    pub(super) fn kv_layer(&self, check: Check, layer: usize) -> Result<KvLayer<'_>, DeviceError> {
        let pages = self.pages(check, layer, 0)?;
        let offset = self.page_offset(layer, 0);
        Ok(KvLayer {
            keys: pages.keys.address() + offset,
            values: pages.values.address() + offset,
            inverse: pages.inverse.address(),
            kernels: &pages.kernels,
        })
    }

    pub(super) fn gdn_layer(&self, check: Check, layer: usize) -> Result<GdnLayer<'_>, DeviceError> {
        let states = self.states(check, layer, 0)?;
        let [base, ring, conv] = self.slot_offsets(layer, 0);
        Ok(GdnLayer {
            base: states.base.address() + base,
            ring: states.ring.address() + ring,
            conv: states.conv.address() + conv,
            kernels: &states.kernels,
        })
    }

    fn pages(&self, check: Check, layer: usize, page: usize) -> Result<&Pages, DeviceError> {
        let CacheSpec { kv_layers, pages, .. } = self.spec;
        let outside = || format!("page {page} of {pages}, layer {layer} of {kv_layers} KV layers");
        check.that(layer < kv_layers && page < pages, outside)?;
        self.attention.as_ref().ok_or_else(|| DeviceError::shape(check.0, outside()))
    }

    fn states(&self, check: Check, layer: usize, slot: usize) -> Result<&States, DeviceError> {
        let CacheSpec { gdn_layers, slots, .. } = self.spec;
        let outside = || format!("slot {slot} of {slots}, layer {layer} of {gdn_layers} GDN layers");
        check.that(layer < gdn_layers && slot < slots, outside)?;
        self.gdn.as_ref().ok_or_else(|| DeviceError::shape(check.0, outside()))
    }

    /// Elements of one page of one layer, keys or values.
    fn page_elements(&self) -> usize {
        PAGE_TOKENS * self.spec.attention.kv_columns()
    }
    /// Bytes of one page of one layer, keys or values.
    fn page_bytes(&self) -> u64 {
        (self.page_elements() * self.spec.kv_type.bytes()) as u64
    }
    fn page_offset(&self, layer: usize, page: usize) -> u64 {
        (layer as u64 * self.spec.pages as u64 + page as u64) * self.page_bytes()
    }
    fn slot_offsets(&self, layer: usize, slot: usize) -> [u64; 3] {
        let index = layer as u64 * self.spec.slots as u64 + slot as u64;
        slot_bytes(&self.spec).map(|bytes| bytes * index)
    }

    pub(super) fn clear_slot(&self, slot: usize) -> Result<(), DeviceError> {
        let check = Check("clear_slot");
        check.that(slot < self.spec.slots, || format!("slot {slot} of {}", self.spec.slots))?;
        for layer in 0..self.spec.gdn_layers {
            let states = self.states(check, layer, slot)?;
            states.base.clear(check.0, self.slot_offsets(layer, slot)[0], slot_bytes(&self.spec)[0])?;
        }
        Ok(())
    }

    pub(super) fn copy_slot(&self, from: usize, to: usize) -> Result<(), DeviceError> {
        let check = Check("copy_slot");
        check
            .that(from.max(to) < self.spec.slots, || format!("slots {from}, {to} of {}", self.spec.slots))?;
        if from == to {
            return Ok(());
        }
        for layer in 0..self.spec.gdn_layers {
            let states = self.states(check, layer, from)?;
            let offsets = self.slot_offsets(layer, from).into_iter().zip(self.slot_offsets(layer, to));
            for ((part, (from, to)), bytes) in
                states.parts().into_iter().zip(offsets).zip(slot_bytes(&self.spec))
            {
                part.copy_within(check.0, from, to, bytes)?;
            }
        }
        Ok(())
    }

    pub(super) fn copy_page(&self, from: usize, to: usize) -> Result<(), DeviceError> {
        let check = Check("copy_page");
        check
            .that(from.max(to) < self.spec.pages, || format!("pages {from}, {to} of {}", self.spec.pages))?;
        if from == to {
            return Ok(());
        }
        for layer in 0..self.spec.kv_layers {
            let pages = self.pages(check, layer, from)?;
            let (from, to) = (self.page_offset(layer, from), self.page_offset(layer, to));
            pages.keys.copy_within(check.0, from, to, self.page_bytes())?;
            pages.values.copy_within(check.0, from, to, self.page_bytes())?;
        }
        Ok(())
    }

    pub(super) fn read_state(&self, layer: usize, slot: usize) -> Result<GdnState, DeviceError> {
        let check = Check("read_state");
        let states = self.states(check, layer, slot)?;
        let [base, ring, conv] = self.slot_offsets(layer, slot);
        let [base_len, ring_len, conv_len] = slot_bytes(&self.spec).map(|bytes| bytes as usize / 4);
        Ok(GdnState {
            base: states.base.read(check.0, base, base_len)?,
            ring: states.ring.read(check.0, ring, ring_len)?,
            conv: states.conv.read(check.0, conv, conv_len)?,
        })
    }

    pub(super) fn write_state(&self, layer: usize, slot: usize, state: &GdnState) -> Result<(), DeviceError> {
        let check = Check("write_state");
        let states = self.states(check, layer, slot)?;
        let values = [&state.base, &state.ring, &state.conv];
        let offsets = self.slot_offsets(layer, slot).into_iter().zip(slot_bytes(&self.spec));
        for ((part, (offset, bytes)), values) in states.parts().into_iter().zip(offsets).zip(values) {
            check.that(values.len() as u64 * 4 == bytes, || {
                format!("{} values, a slot has {}", values.len(), bytes / 4)
            })?;
            part.write(check.0, offset, values)?;
        }
        Ok(())
    }

    pub(super) fn read_page(&self, layer: usize, page: usize) -> Result<KvPage, DeviceError> {
        let check = Check("read_page");
        let pages = self.pages(check, layer, page)?;
        let (offset, len) = (self.page_offset(layer, page), self.page_elements());
        let read = |memory: &Memory| -> Result<Vec<f32>, DeviceError> {
            let stored = match self.spec.kv_type {
                KvType::F32 => memory.read(check.0, offset, len)?,
                KvType::Bf16 => memory.read(check.0, offset, len)?.into_iter().map(bf16_to_f32).collect(),
            };
            Ok(self.swap_heads(&stored, false))
        };
        Ok(KvPage { keys: read(&pages.keys)?, values: read(&pages.values)? })
    }

    pub(super) fn write_page(&self, layer: usize, page: usize, content: &KvPage) -> Result<(), DeviceError> {
        let check = Check("write_page");
        let pages = self.pages(check, layer, page)?;
        let offset = self.page_offset(layer, page);
        for (memory, values) in [(&pages.keys, &content.keys), (&pages.values, &content.values)] {
            check.that(values.len() == self.page_elements(), || {
                format!("{} values, a page has {}", values.len(), self.page_elements())
            })?;
            let stored = self.swap_heads(values, true);
            match self.spec.kv_type {
                KvType::F32 => memory.write(check.0, offset, &stored)?,
                KvType::Bf16 => {
                    let bits: Vec<u16> = stored.into_iter().map(f32_to_bf16).collect();
                    memory.write(check.0, offset, &bits)?;
                }
            }
        }
        Ok(())
    }

    /// `[tokens, heads, dim]` to `[heads, tokens, dim]` where `to_device`, else back.
    fn swap_heads(&self, values: &[f32], to_device: bool) -> Vec<f32> {
        let AttentionShape { kv_heads, head_dim, .. } = self.spec.attention;
        let (outer, inner) = if to_device { (kv_heads, PAGE_TOKENS) } else { (PAGE_TOKENS, kv_heads) };
        let rows = (0..outer).flat_map(|i| (0..inner).map(move |j| (j * outer + i) * head_dim));
        rows.flat_map(|at| &values[at..at + head_dim]).copied().collect()
    }
}
