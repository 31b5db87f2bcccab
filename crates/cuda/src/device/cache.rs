//! KV pages and recurrent states on the device: one allocation per kind, layer after layer.

use std::sync::Arc;

use qwill_device::batch::{CONV_RING, PAGE_TOKENS};
use qwill_device::numeric::{bf16_to_f32, f16_to_f32, f32_to_bf16, quantize_vector};
use qwill_device::{AttentionShape, CacheSpec, DeviceError, GdnState, KvPage, KvType, RING_TOKENS};

use super::attention::AttentionKernels;
use super::gdn::GdnKernels;
use super::{Check, load};
use crate::KernelStore;
use crate::driver::{Driver, Memory};
use crate::launch::KvParams;
use crate::unit::gdn_unit;

/// The caches of a model, with the kernels for their shapes.
#[derive(Debug)]
pub struct CudaCache {
    spec: CacheSpec,
    attention: Option<Pages>,
    gdn: Option<States>,
}

#[derive(Debug)]
struct Pages {
    keys: Vectors,
    values: Vectors,
    /// RoPE's `rope_theta^(−2i/rope_dims)`.
    inverse: Memory,
    kernels: AttentionKernels,
}

/// Keys or values. Codes apart from scales, so that every vector begins at a multiple of its own size.
#[derive(Debug)]
struct Vectors {
    /// `[kv_layers, pages, kv_heads, PAGE_TOKENS, head_dim]`.
    elements: Memory,
    /// `[kv_layers, pages, kv_heads, PAGE_TOKENS]` f16; empty where the type has none.
    scales: Memory,
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
    pub(super) kv: KvParams,
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

impl Vectors {
    fn new(driver: &Arc<Driver>, spec: &CacheSpec, what: &str) -> Result<Self, DeviceError> {
        let pages = (spec.kv_layers * spec.pages) as u64;
        Ok(Self {
            elements: driver.allocate(what, pages * page_element_bytes(spec))?,
            scales: driver.allocate(&format!("scales of {what}"), pages * page_scale_bytes(spec))?,
        })
    }

    /// One page of one layer, the `index`th in memory, as f32 in the order of the memory.
    fn read(&self, spec: &CacheSpec, op: &'static str, index: u64) -> Result<Vec<f32>, DeviceError> {
        let (elements, len) = (&self.elements, page_vectors(spec) * spec.attention.head_dim);
        let at = index * page_element_bytes(spec);
        Ok(match spec.kv_type {
            KvType::F32 => elements.read(op, at, len)?,
            KvType::Bf16 => elements.read(op, at, len)?.into_iter().map(bf16_to_f32).collect(),
            KvType::Int8 => {
                let codes: Vec<i8> = elements.read(op, at, len)?;
                let scales: Vec<u16> =
                    self.scales.read(op, index * page_scale_bytes(spec), page_vectors(spec))?;
                let vectors = codes.chunks(spec.attention.head_dim).zip(scales);
                let scaled = |(codes, scale): (&[i8], u16)| -> Vec<f32> {
                    codes.iter().map(|code| f32::from(*code) * f16_to_f32(scale)).collect()
                };
                vectors.flat_map(scaled).collect()
            }
        })
    }

    /// The reverse of [`Self::read`].
    fn write(
        &self,
        spec: &CacheSpec,
        op: &'static str,
        index: u64,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        let at = index * page_element_bytes(spec);
        match spec.kv_type {
            KvType::F32 => self.elements.write(op, at, values),
            KvType::Bf16 => {
                let bits: Vec<u16> = values.iter().copied().map(f32_to_bf16).collect();
                self.elements.write(op, at, &bits)
            }
            KvType::Int8 => {
                let dim = spec.attention.head_dim;
                let mut codes = vec![0i8; values.len()];
                let vectors = values.chunks(dim).zip(codes.chunks_mut(dim));
                let scales: Vec<u16> =
                    vectors.map(|(values, codes)| quantize_vector(values, codes)).collect();
                self.elements.write(op, at, &codes)?;
                self.scales.write(op, index * page_scale_bytes(spec), &scales)
            }
        }
    }

    /// Copies one page of one layer.
    fn copy(&self, spec: &CacheSpec, op: &'static str, from: u64, to: u64) -> Result<(), DeviceError> {
        for (memory, bytes) in
            [(&self.elements, page_element_bytes(spec)), (&self.scales, page_scale_bytes(spec))]
        {
            if bytes > 0 {
                memory.copy_within(op, from * bytes, to * bytes, bytes)?;
            }
        }
        Ok(())
    }
}

/// Vectors of one page of one layer, keys or values.
fn page_vectors(spec: &CacheSpec) -> usize {
    PAGE_TOKENS * spec.attention.kv_heads
}
fn page_element_bytes(spec: &CacheSpec) -> u64 {
    (page_vectors(spec) * spec.attention.head_dim * spec.kv_type.element_bytes()) as u64
}
fn page_scale_bytes(spec: &CacheSpec) -> u64 {
    (page_vectors(spec) * spec.kv_type.scale_bytes()) as u64
}

impl Pages {
    fn new(driver: &Arc<Driver>, store: &KernelStore, spec: &CacheSpec) -> Result<Self, DeviceError> {
        let inverse = inverse_frequencies(&spec.attention);
        let pages = Self {
            keys: Vectors::new(driver, spec, "keys")?,
            values: Vectors::new(driver, spec, "values")?,
            inverse: driver.allocate("RoPE frequencies", inverse.len() as u64 * 4)?,
            kernels: AttentionKernels::new(driver, store, spec)?,
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
        let first = self.page_index(layer, 0);
        let (elements, scales) =
            (first * page_element_bytes(&self.spec), first * page_scale_bytes(&self.spec));
        Ok(KvLayer {
            kv: KvParams {
                keys: pages.keys.elements.address() + elements,
                values: pages.values.elements.address() + elements,
                key_scales: pages.keys.scales.address() + scales,
                value_scales: pages.values.scales.address() + scales,
            },
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

    /// Where a page of a layer lies among all of the memory.
    fn page_index(&self, layer: usize, page: usize) -> u64 {
        layer as u64 * self.spec.pages as u64 + page as u64
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
            let (from, to) = (self.page_index(layer, from), self.page_index(layer, to));
            pages.keys.copy(&self.spec, check.0, from, to)?;
            pages.values.copy(&self.spec, check.0, from, to)?;
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
        let index = self.page_index(layer, page);
        let read = |vectors: &Vectors| -> Result<Vec<f32>, DeviceError> {
            Ok(self.swap_heads(&vectors.read(&self.spec, check.0, index)?, false))
        };
        Ok(KvPage { keys: read(&pages.keys)?, values: read(&pages.values)? })
    }

    pub(super) fn write_page(&self, layer: usize, page: usize, content: &KvPage) -> Result<(), DeviceError> {
        let check = Check("write_page");
        let pages = self.pages(check, layer, page)?;
        let len = page_vectors(&self.spec) * self.spec.attention.head_dim;
        for (vectors, values) in [(&pages.keys, &content.keys), (&pages.values, &content.values)] {
            check.that(values.len() == len, || format!("{} values, a page has {len}", values.len()))?;
            let stored = self.swap_heads(values, true);
            vectors.write(&self.spec, check.0, self.page_index(layer, page), &stored)?;
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
