//! KV pages and recurrent states on the device: one allocation per kind, layer after layer.

use std::sync::Arc;

use qwill_device::batch::{CONV_RING, PAGE_TOKENS};
use qwill_device::numeric::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16_saturated, quantize_vector};
use qwill_device::{
    AttentionShape, CacheSpec, DeviceError, GdnState, KvPage, KvType, RING_TOKENS, StateType,
};

use super::attention::AttentionKernels;
use super::gdn::GdnKernels;
use super::{Check, load};
use crate::KernelStore;
use crate::copies::{Lanes, Rows, Side};
use crate::driver::{Driver, Memory};
use crate::launch::KvParams;
use crate::unit::gdn_units;

/// The caches of a model, with the kernels for their shapes.
#[derive(Debug)]
pub struct CudaCache {
    spec: CacheSpec,
    attention: Option<Pages>,
    gdn: Option<States>,
    /// Copies that may use the memory.
    lanes: Arc<Lanes>,
}

impl Drop for CudaCache {
    fn drop(&mut self) {
        self.lanes.settle();
    }
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

/// `[gdn_layers, slots, …]` each: base states, rings and raw convolution inputs in the state type, then the rings'
/// log-decays in f32.
#[derive(Debug)]
struct States {
    base: Memory,
    ring: Memory,
    conv: Memory,
    log_decays: Memory,
    /// `[gdn_layers, slots, key_heads]` counters of blocks, zero between launches.
    readers: Memory,
    kernels: GdnKernels,
}

/// The same bytes of every layer, as rows.
pub(super) struct Part<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) width: u64,
    pub(super) layers: u64,
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
    pub(super) log_decays: u64,
    pub(super) readers: u64,
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

/// Bytes of one slot of one layer: base state, ring, raw convolution inputs, log-decays.
fn slot_bytes(spec: &CacheSpec) -> [u64; 4] {
    let gdn = &spec.gdn;
    let ring = RING_TOKENS * (gdn.key_columns() + gdn.value_columns());
    let typed = [gdn.state_elements(), ring, CONV_RING * gdn.conv_channels()];
    let [base, ring, conv] = typed.map(|elements| (elements * spec.state_type.bytes()) as u64);
    [base, ring, conv, (RING_TOKENS * gdn.value_heads * 4) as u64]
}

impl States {
    fn new(driver: &Arc<Driver>, store: &KernelStore, spec: &CacheSpec) -> Result<Self, DeviceError> {
        let units = gdn_units(&spec.gdn, spec.state_type);
        let [rows, chunks] = units.map_err(|reason| DeviceError::shape("cache", reason))?;
        let (rows, chunks) = (load(driver, store, &rows)?, load(driver, store, &chunks)?);
        let slots = (spec.gdn_layers * spec.slots) as u64;
        let [base, ring, conv, log_decays] = slot_bytes(spec).map(|bytes| bytes * slots);
        // Rings and inputs are never read before they are written by an op; zeros keep what tools read defined.
        let zeros = |name, bytes| -> Result<Memory, DeviceError> {
            let memory = driver.allocate(name, bytes)?;
            memory.clear("cache", 0, bytes)?;
            Ok(memory)
        };
        Ok(Self {
            base: zeros("recurrent states", base)?,
            ring: zeros("rings of recurrent states", ring)?,
            conv: zeros("raw convolution inputs", conv)?,
            log_decays: zeros("log-decays of rings", log_decays)?,
            readers: zeros("counters of rings' readers", slots * spec.gdn.key_heads as u64 * 4)?,
            kernels: GdnKernels::new(&rows, &chunks, &spec.gdn, spec.state_type)?,
        })
    }

    /// In the order of [`slot_bytes`].
    fn parts(&self) -> [&Memory; 4] {
        [&self.base, &self.ring, &self.conv, &self.log_decays]
    }
}

impl CudaCache {
    pub(super) fn new(
        driver: &Arc<Driver>,
        store: &KernelStore,
        lanes: &Arc<Lanes>,
        spec: &CacheSpec,
    ) -> Result<Self, DeviceError> {
        let attention = (spec.kv_layers > 0).then(|| Pages::new(driver, store, spec)).transpose()?;
        let gdn = (spec.gdn_layers > 0).then(|| States::new(driver, store, spec)).transpose()?;
        Ok(Self { spec: *spec, attention, gdn, lanes: Arc::clone(lanes) })
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
        let [base, ring, conv, log_decays] = self.slot_offsets(layer, 0);
        let readers = (layer * self.spec.slots * self.spec.gdn.key_heads * 4) as u64;
        Ok(GdnLayer {
            base: states.base.address() + base,
            ring: states.ring.address() + ring,
            conv: states.conv.address() + conv,
            log_decays: states.log_decays.address() + log_decays,
            readers: states.readers.address() + readers,
            kernels: &states.kernels,
        })
    }

    /// A page's arrays over all layers, in the order in which they are stored.
    pub(super) fn page_parts(&self, check: Check, page: usize) -> Result<Vec<Part<'_>>, DeviceError> {
        let CacheSpec { kv_layers, pages, .. } = self.spec;
        check.that(page < pages, || format!("page {page} of {pages}"))?;
        let Some(attention) = &self.attention else { return Ok(Vec::new()) };
        let (elements, scales) = (page_element_bytes(&self.spec), page_scale_bytes(&self.spec));
        let (keys, values) = (&attention.keys, &attention.values);
        let arrays = [
            (&keys.elements, elements),
            (&values.elements, elements),
            (&keys.scales, scales),
            (&values.scales, scales),
        ];
        let part = |(memory, width): (_, u64)| Part {
            rows: Rows {
                side: Side::Device(memory),
                offset: page as u64 * width,
                pitch: pages as u64 * width,
            },
            width,
            layers: kv_layers as u64,
        };
        Ok(arrays.into_iter().map(part).collect())
    }

    /// What is stored of a slot over all layers: base states, then the rows of raw convolution inputs that a state at a
    /// position keeps. Each with where it begins among the stored bytes and how far its layers are apart there.
    pub(super) fn state_parts(
        &self,
        check: Check,
        slot: usize,
        position: usize,
    ) -> Result<Vec<(Part<'_>, u64, u64)>, DeviceError> {
        let CacheSpec { gdn_layers, slots, .. } = self.spec;
        check.that(slot < slots, || format!("slot {slot} of {slots}"))?;
        let Some(states) = &self.gdn else { return Ok(Vec::new()) };
        let [base, _, conv, _] = slot_bytes(&self.spec);
        let part = |memory, of_slot: u64, first: u64, width| Part {
            rows: Rows {
                side: Side::Device(memory),
                offset: slot as u64 * of_slot + first,
                pitch: slots as u64 * of_slot,
            },
            width,
            layers: gdn_layers as u64,
        };
        let row = conv / CONV_RING as u64;
        let inputs = self.spec.stored_inputs() as u64 * row;
        let mut parts = vec![(part(&states.base, base, 0, base), 0, base)];
        for (index, conv_row) in self.spec.stored_rows(position).enumerate() {
            let offset = gdn_layers as u64 * base + index as u64 * row;
            parts.push((part(&states.conv, conv, conv_row as u64 * row, row), offset, inputs));
        }
        Ok(parts)
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
    fn slot_offsets(&self, layer: usize, slot: usize) -> [u64; 4] {
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
        let [base, ring, conv, log_decays] = self.slot_offsets(layer, slot);
        let bytes = slot_bytes(&self.spec);
        let state_type = self.spec.state_type;
        let vectors = read_elements(&states.ring, ring, bytes[1], state_type, f16_to_f32)?;
        let log_decays: Vec<f32> = states.log_decays.read(check.0, log_decays, bytes[3] as usize / 4)?;
        let entries = vectors.chunks(vectors.len() / RING_TOKENS);
        let entries = entries.zip(log_decays.chunks(self.spec.gdn.value_heads));
        Ok(GdnState {
            base: read_elements(&states.base, base, bytes[0], state_type, f16_to_f32)?,
            ring: entries.flat_map(|(vectors, logs)| vectors.iter().chain(logs)).copied().collect(),
            conv: read_elements(&states.conv, conv, bytes[2], state_type, bf16_to_f32)?,
        })
    }

    pub(super) fn write_state(&self, layer: usize, slot: usize, state: &GdnState) -> Result<(), DeviceError> {
        let check = Check("write_state");
        let states = self.states(check, layer, slot)?;
        let gdn = &self.spec.gdn;
        let found = [state.base.len(), state.ring.len(), state.conv.len()];
        let expected =
            [gdn.state_elements(), RING_TOKENS * gdn.ring_entry(), CONV_RING * gdn.conv_channels()];
        check.that(found == expected, || {
            format!("base, ring and conv ring of {found:?} values, a slot has {expected:?}")
        })?;
        let (mut vectors, mut log_decays) = (Vec::new(), Vec::new());
        for entry in state.ring.chunks(gdn.ring_entry()) {
            let (of_entry, logs) = entry.split_at(gdn.key_columns() + gdn.value_columns());
            vectors.extend_from_slice(of_entry);
            log_decays.extend_from_slice(logs);
        }
        let [base, ring, conv, logs] = self.slot_offsets(layer, slot);
        let state_type = self.spec.state_type;
        write_elements(&states.base, base, &state.base, state_type, f32_to_f16_saturated)?;
        write_elements(&states.ring, ring, &vectors, state_type, f32_to_f16_saturated)?;
        write_elements(&states.conv, conv, &state.conv, state_type, f32_to_bf16)?;
        states.log_decays.write(check.0, logs, &log_decays)
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

/// Reads elements of a state: f32, or halves and how they widen.
fn read_elements(
    memory: &Memory,
    offset: u64,
    bytes: u64,
    state_type: StateType,
    widen: fn(u16) -> f32,
) -> Result<Vec<f32>, DeviceError> {
    let len = bytes as usize / state_type.bytes();
    match state_type {
        StateType::F32 => memory.read("read_state", offset, len),
        StateType::F16 => Ok(memory.read("read_state", offset, len)?.into_iter().map(widen).collect()),
    }
}

/// Writes elements of a state: f32, or halves and how values are rounded to them.
fn write_elements(
    memory: &Memory,
    offset: u64,
    values: &[f32],
    state_type: StateType,
    narrow: fn(f32) -> u16,
) -> Result<(), DeviceError> {
    match state_type {
        StateType::F32 => memory.write("write_state", offset, values),
        StateType::F16 => {
            let halves: Vec<u16> = values.iter().copied().map(narrow).collect();
            memory.write("write_state", offset, &halves)
        }
    }
}
