//! Activations, KV pages and the caches as a whole in host memory, shared by both CPU devices.

use std::ops::Range;

use qwill_device::batch::PAGE_TOKENS;
use qwill_device::numeric::{bf16_to_f32, f16_to_f32, f32_to_bf16, quantize_vector};
use qwill_device::{CacheSpec, DeviceError, GdnState, KvPage, KvType};

use crate::host::{HostStore, Reader, Writer};
use crate::state::StateLayer;

/// Activations `[capacity_rows, cols]`, row-major f32.
#[derive(Debug, Clone, Default)]
pub struct Buffer {
    /// Row-major elements.
    pub(crate) data: Vec<f32>,
    /// Width.
    pub(crate) cols: usize,
}

impl Buffer {
    pub(crate) fn new(rows: usize, cols: usize) -> Self {
        Self { data: vec![0.0; rows * cols], cols }
    }
    pub(crate) fn capacity_rows(&self) -> usize {
        self.data.len().checked_div(self.cols).unwrap_or(0)
    }
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }
    /// The first `rows` rows.
    pub(crate) fn rows(&self, rows: usize) -> &[f32] {
        &self.data[..rows * self.cols]
    }
    /// The first `rows` rows.
    pub(crate) fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.data[..rows * self.cols]
    }
}

/// Keys or values of one layer: `[pages, kv_heads, PAGE_TOKENS, head_dim]`, so that one head of a page is
/// contiguous.
#[derive(Debug, Clone)]
pub(crate) enum KvElements {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    Int8(KvCodes),
}

/// Quantised vectors, the codes apart from the scales.
#[derive(Debug, Clone)]
pub(crate) struct KvCodes {
    codes: Vec<i8>,
    /// f16 bits, one per vector.
    scales: Vec<u16>,
    head_dim: usize,
}

impl KvCodes {
    /// The vectors from `at` on, each with its scale.
    pub(crate) fn vectors(&self, at: usize) -> impl Iterator<Item = (&[i8], f32)> {
        let scales = self.scales[at / self.head_dim..].iter().map(|bits| f16_to_f32(*bits));
        self.codes[at..].chunks_exact(self.head_dim).zip(scales)
    }

    /// Loads whole vectors, one after another.
    fn load(&self, at: usize, out: &mut [f32]) {
        for (out, (codes, scale)) in out.chunks_exact_mut(self.head_dim).zip(self.vectors(at)) {
            for (value, code) in out.iter_mut().zip(codes) {
                *value = f32::from(*code) * scale;
            }
        }
    }
}

impl KvElements {
    fn new(kv_type: KvType, vectors: usize, head_dim: usize) -> Self {
        let elements = vectors * head_dim;
        match kv_type {
            KvType::F32 => Self::F32(vec![0.0; elements]),
            KvType::Bf16 => Self::Bf16(vec![0; elements]),
            KvType::Int8 => {
                Self::Int8(KvCodes { codes: vec![0; elements], scales: vec![0; vectors], head_dim })
            }
        }
    }
    /// Stores one vector.
    pub(crate) fn store(&mut self, at: usize, values: &[f32]) {
        match self {
            Self::F32(data) => data[at..at + values.len()].copy_from_slice(values),
            Self::Bf16(data) => {
                for (slot, value) in data[at..].iter_mut().zip(values) {
                    *slot = f32_to_bf16(*value);
                }
            }
            Self::Int8(data) => {
                let codes = &mut data.codes[at..at + values.len()];
                data.scales[at / data.head_dim] = quantize_vector(values, codes);
            }
        }
    }
    /// Loads whole vectors, one after another.
    pub(crate) fn load(&self, at: usize, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(&data[at..at + out.len()]),
            Self::Bf16(data) => {
                for (value, bits) in out.iter_mut().zip(&data[at..]) {
                    *value = bf16_to_f32(*bits);
                }
            }
            Self::Int8(data) => data.load(at, out),
        }
    }
    /// Copies whole vectors.
    fn copy_within(&mut self, from: usize, to: usize, len: usize) {
        match self {
            Self::F32(data) => data.copy_within(from..from + len, to),
            Self::Bf16(data) => data.copy_within(from..from + len, to),
            Self::Int8(data) => {
                data.codes.copy_within(from..from + len, to);
                let (from, to, len) = (from / data.head_dim, to / data.head_dim, len / data.head_dim);
                data.scales.copy_within(from..from + len, to);
            }
        }
    }
}

impl KvElements {
    /// Writes whole vectors as they are.
    fn write_out(&self, range: Range<usize>, to: &mut Writer<'_>) {
        match self {
            Self::F32(data) => to.numbers(&data[range]),
            Self::Bf16(data) => to.numbers(&data[range]),
            Self::Int8(data) => {
                to.numbers(&data.codes[range.clone()]);
                to.numbers(&data.scales[range.start / data.head_dim..range.end / data.head_dim]);
            }
        }
    }

    /// The reverse of [`KvElements::write_out`].
    fn read_in(&mut self, range: Range<usize>, from: &mut Reader<'_>) {
        match self {
            Self::F32(data) => from.numbers(&mut data[range]),
            Self::Bf16(data) => from.numbers(&mut data[range]),
            Self::Int8(data) => {
                from.numbers(&mut data.codes[range.clone()]);
                from.numbers(&mut data.scales[range.start / data.head_dim..range.end / data.head_dim]);
            }
        }
    }
}

/// KV of one layer.
#[derive(Debug, Clone)]
pub(crate) struct KvLayer {
    pub(crate) keys: KvElements,
    pub(crate) values: KvElements,
}

/// KV pages and recurrent states of all layers.
#[derive(Debug, Clone)]
pub struct Cache {
    pub(crate) spec: CacheSpec,
    pub(crate) kv: Vec<KvLayer>,
    pub(crate) states: Vec<StateLayer>,
}

impl Cache {
    pub(crate) fn new(spec: &CacheSpec) -> Self {
        let vectors = spec.pages * PAGE_TOKENS * spec.attention.kv_heads;
        let elements = || KvElements::new(spec.kv_type, vectors, spec.attention.head_dim);
        let kv = (0..spec.kv_layers).map(|_| KvLayer { keys: elements(), values: elements() }).collect();
        let states = (0..spec.gdn_layers).map(|_| StateLayer::new(spec)).collect();
        Self { spec: *spec, kv, states }
    }

    /// Offset of one head's vector in [`KvElements`].
    pub(crate) fn kv_offset(&self, page: usize, kv_head: usize, offset: usize) -> usize {
        let shape = &self.spec.attention;
        ((page * shape.kv_heads + kv_head) * PAGE_TOKENS + offset) * shape.head_dim
    }

    fn page_elements(&self) -> usize {
        PAGE_TOKENS * self.spec.attention.kv_columns()
    }

    pub(crate) fn clear_slot(&mut self, slot: usize) -> Result<(), DeviceError> {
        self.check_slot("clear_slot", slot)?;
        self.states.iter_mut().for_each(|layer| layer.clear(slot));
        Ok(())
    }

    pub(crate) fn copy_slot(&mut self, from: usize, to: usize) -> Result<(), DeviceError> {
        self.check_slot("copy_slot", from.max(to))?;
        self.states.iter_mut().for_each(|layer| layer.copy(from, to));
        Ok(())
    }

    pub(crate) fn copy_page(&mut self, from: usize, to: usize) -> Result<(), DeviceError> {
        self.check_page("copy_page", 0, from.max(to))?;
        let len = self.page_elements();
        for layer in &mut self.kv {
            layer.keys.copy_within(from * len, to * len, len);
            layer.values.copy_within(from * len, to * len, len);
        }
        Ok(())
    }

    pub(crate) fn read_state(&self, gdn_layer: usize, slot: usize) -> Result<GdnState, DeviceError> {
        self.check_slot("read_state", slot)?;
        let layer = self.states.get(gdn_layer).ok_or_else(|| self.no_layer("read_state", gdn_layer))?;
        Ok(layer.read(slot))
    }

    pub(crate) fn write_state(
        &mut self,
        gdn_layer: usize,
        slot: usize,
        state: &GdnState,
    ) -> Result<(), DeviceError> {
        self.check_slot("write_state", slot)?;
        let missing = self.no_layer("write_state", gdn_layer);
        self.states.get_mut(gdn_layer).ok_or(missing)?.write(slot, state)
    }

    pub(crate) fn read_page(&self, kv_layer: usize, page: usize) -> Result<KvPage, DeviceError> {
        self.check_page("read_page", kv_layer, page)?;
        let shape = self.spec.attention;
        let mut content =
            KvPage { keys: vec![0.0; self.page_elements()], values: vec![0.0; self.page_elements()] };
        for (at, token, head) in page_vectors(&shape) {
            let from = self.kv_offset(page, head, token);
            self.kv[kv_layer].keys.load(from, &mut content.keys[at..at + shape.head_dim]);
            self.kv[kv_layer].values.load(from, &mut content.values[at..at + shape.head_dim]);
        }
        Ok(content)
    }

    pub(crate) fn write_page(
        &mut self,
        kv_layer: usize,
        page: usize,
        content: &KvPage,
    ) -> Result<(), DeviceError> {
        self.check_page("write_page", kv_layer, page)?;
        let shape = self.spec.attention;
        for (at, token, head) in page_vectors(&shape) {
            let to = self.kv_offset(page, head, token);
            self.kv[kv_layer].keys.store(to, &content.keys[at..at + shape.head_dim]);
            self.kv[kv_layer].values.store(to, &content.values[at..at + shape.head_dim]);
        }
        Ok(())
    }

    pub(crate) fn store_page(
        &self,
        page: usize,
        store: &mut HostStore,
        granule: u32,
    ) -> Result<(), DeviceError> {
        self.check_page("store_page", 0, page)?;
        store.check("store_page", &self.spec, &[granule])?;
        let (len, granules) = (self.page_elements(), [granule]);
        let mut writer = store.writer(&granules);
        for elements in self.kv.iter().flat_map(|layer| [&layer.keys, &layer.values]) {
            elements.write_out(page * len..(page + 1) * len, &mut writer);
        }
        Ok(())
    }

    pub(crate) fn load_page(
        &mut self,
        page: usize,
        store: &HostStore,
        granule: u32,
    ) -> Result<(), DeviceError> {
        self.check_page("load_page", 0, page)?;
        store.check("load_page", &self.spec, &[granule])?;
        let (len, granules) = (self.page_elements(), [granule]);
        let mut reader = store.reader(&granules);
        for elements in self.kv.iter_mut().flat_map(|layer| [&mut layer.keys, &mut layer.values]) {
            elements.read_in(page * len..(page + 1) * len, &mut reader);
        }
        Ok(())
    }

    pub(crate) fn store_state(
        &self,
        slot: usize,
        position: usize,
        store: &mut HostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError> {
        self.check_stored_state("store_state", slot, store, granules)?;
        let mut writer = store.writer(granules);
        for layer in &self.states {
            layer.write_out(slot, self.spec.stored_rows(position), &mut writer);
        }
        Ok(())
    }

    pub(crate) fn load_state(
        &mut self,
        slot: usize,
        position: usize,
        store: &HostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError> {
        self.check_stored_state("load_state", slot, store, granules)?;
        let mut reader = store.reader(granules);
        for layer in &mut self.states {
            layer.read_in(slot, self.spec.stored_rows(position), &mut reader);
        }
        Ok(())
    }

    fn check_stored_state(
        &self,
        op: &'static str,
        slot: usize,
        store: &HostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError> {
        self.check_slot(op, slot)?;
        store.check(op, &self.spec, granules)?;
        let needed = self.spec.state_granules();
        if granules.len() == needed {
            return Ok(());
        }
        Err(DeviceError::shape(op, format!("{} granules, a state takes {needed}", granules.len())))
    }

    fn no_layer(&self, op: &'static str, layer: usize) -> DeviceError {
        DeviceError::shape(
            op,
            format!("layer {layer} of {} GDN and {} KV layers", self.states.len(), self.kv.len()),
        )
    }

    fn check_slot(&self, op: &'static str, slot: usize) -> Result<(), DeviceError> {
        if slot < self.spec.slots {
            return Ok(());
        }
        Err(DeviceError::shape(op, format!("slot {slot} of {}", self.spec.slots)))
    }

    fn check_page(&self, op: &'static str, kv_layer: usize, page: usize) -> Result<(), DeviceError> {
        if kv_layer < self.kv.len().max(1) && page < self.spec.pages {
            return Ok(());
        }
        Err(DeviceError::shape(op, format!("layer {kv_layer} page {page} of {} pages", self.spec.pages)))
    }
}

/// `(offset in a host page, token, head)` of every vector of a page.
fn page_vectors(shape: &qwill_device::AttentionShape) -> impl Iterator<Item = (usize, usize, usize)> {
    let (heads, head_dim) = (shape.kv_heads, shape.head_dim);
    (0..PAGE_TOKENS)
        .flat_map(move |token| (0..heads).map(move |head| ((token * heads + head) * head_dim, token, head)))
}
