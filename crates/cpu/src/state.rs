//! Recurrent states in host memory, shared by both CPU devices.

use std::ops::Range;

use qwill_device::batch::CONV_RING;
use qwill_device::numeric::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16_saturated};
use qwill_device::{CacheSpec, DeviceError, GdnShape, GdnState, RING_TOKENS, StateType};

use crate::host::{Reader, Writer};

/// A number format of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// IEEE half; what is too large becomes the largest.
    F16,
    /// bfloat16.
    Bf16,
}

impl Half {
    /// Widens as many values as `out` has places.
    pub(crate) fn widen(self, halves: &[u16], out: &mut [f32]) {
        let pairs = out.iter_mut().zip(halves);
        match self {
            Self::F16 => pairs.for_each(|(value, bits)| *value = f16_to_f32(*bits)),
            Self::Bf16 => pairs.for_each(|(value, bits)| *value = bf16_to_f32(*bits)),
        }
    }

    /// Rounds all values.
    pub(crate) fn narrow(self, values: &[f32], halves: &mut [u16]) {
        let pairs = halves.iter_mut().zip(values);
        match self {
            Self::F16 => pairs.for_each(|(bits, value)| *bits = f32_to_f16_saturated(*value)),
            Self::Bf16 => pairs.for_each(|(bits, value)| *bits = f32_to_bf16(*value)),
        }
    }
}

/// Elements in one of the number formats of a state.
#[derive(Debug, Clone)]
pub(crate) enum Elements {
    F32(Vec<f32>),
    Half(Half, Vec<u16>),
}

impl Elements {
    /// Zeros: f32, or `half` where the state type is [`StateType::F16`].
    fn new(state_type: StateType, half: Half, len: usize) -> Self {
        match state_type {
            StateType::F32 => Self::F32(vec![0.0; len]),
            StateType::F16 => Self::Half(half, vec![0; len]),
        }
    }

    pub(crate) fn load(&self, at: usize, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(&data[at..at + out.len()]),
            Self::Half(half, data) => half.widen(&data[at..], out),
        }
    }

    pub(crate) fn store(&mut self, at: usize, values: &[f32]) {
        match self {
            Self::F32(data) => data[at..at + values.len()].copy_from_slice(values),
            Self::Half(half, data) => half.narrow(values, &mut data[at..]),
        }
    }

    fn read(&self, range: Range<usize>) -> Vec<f32> {
        let mut values = vec![0.0; range.len()];
        self.load(range.start, &mut values);
        values
    }

    fn clear(&mut self, range: Range<usize>) {
        match self {
            Self::F32(data) => data[range].fill(0.0),
            Self::Half(_, data) => data[range].fill(0),
        }
    }

    fn copy_within(&mut self, from: Range<usize>, to: usize) {
        match self {
            Self::F32(data) => data.copy_within(from, to),
            Self::Half(_, data) => data.copy_within(from, to),
        }
    }

    /// Writes elements as they are.
    fn write_out(&self, range: Range<usize>, to: &mut Writer<'_>) {
        match self {
            Self::F32(data) => to.numbers(&data[range]),
            Self::Half(_, data) => to.numbers(&data[range]),
        }
    }

    /// The reverse of [`Elements::write_out`].
    fn read_in(&mut self, range: Range<usize>, from: &mut Reader<'_>) {
        match self {
            Self::F32(data) => from.numbers(&mut data[range]),
            Self::Half(_, data) => from.numbers(&mut data[range]),
        }
    }
}

/// Rounds in place to what a state of the type holds.
pub(crate) fn round_state(state_type: StateType, values: &mut [f32]) {
    if state_type != StateType::F32 {
        for value in values {
            *value = state_type.round(*value);
        }
    }
}

/// Recurrent states of one GDN layer, one slot after another.
#[derive(Debug, Clone)]
pub(crate) struct StateLayer {
    pub(crate) state_type: StateType,
    /// `[slots, value_heads, key_dim, value_dim]`.
    pub(crate) base: Elements,
    /// `[slots, RING_TOKENS, key_columns + value_columns]`: `k̂` of the key heads, then `u`.
    pub(crate) ring: Elements,
    /// `[slots, RING_TOKENS, value_heads]`, of the ring's entries.
    pub(crate) log_decays: Vec<f32>,
    /// `[slots, CONV_RING, conv_channels]`.
    pub(crate) conv: Elements,
    shape: GdnShape,
}

impl StateLayer {
    pub(crate) fn new(spec: &CacheSpec) -> Self {
        let (shape, state_type, slots) = (spec.gdn, spec.state_type, spec.slots);
        Self {
            state_type,
            base: Elements::new(state_type, Half::F16, slots * shape.state_elements()),
            ring: Elements::new(state_type, Half::F16, slots * RING_TOKENS * vector_columns(&shape)),
            log_decays: vec![0.0; slots * RING_TOKENS * shape.value_heads],
            conv: Elements::new(state_type, Half::Bf16, slots * CONV_RING * shape.conv_channels()),
            shape,
        }
    }

    /// Number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.log_decays.len() / (RING_TOKENS * self.shape.value_heads).max(1)
    }
    fn base_range(&self, slot: usize) -> Range<usize> {
        range(slot, self.shape.state_elements())
    }
    fn ring_range(&self, slot: usize) -> Range<usize> {
        range(slot, RING_TOKENS * vector_columns(&self.shape))
    }
    fn log_decay_range(&self, slot: usize) -> Range<usize> {
        range(slot, RING_TOKENS * self.shape.value_heads)
    }
    /// Where a slot's raw convolution inputs are in [`StateLayer::conv`].
    pub(crate) fn conv_range(&self, slot: usize) -> Range<usize> {
        range(slot, CONV_RING * self.shape.conv_channels())
    }

    /// A slot's base state.
    pub(crate) fn read_base(&self, slot: usize) -> Vec<f32> {
        self.base.read(self.base_range(slot))
    }
    /// Rounds and stores a slot's base state.
    pub(crate) fn write_base(&mut self, slot: usize, base: &[f32]) {
        self.base.store(slot * self.shape.state_elements(), base);
    }

    /// A slot's raw convolution inputs.
    pub(crate) fn read_conv(&self, slot: usize) -> Vec<f32> {
        self.conv.read(self.conv_range(slot))
    }
    /// Rounds and stores a slot's raw convolution inputs.
    pub(crate) fn write_conv(&mut self, slot: usize, conv: &[f32]) {
        self.conv.store(self.conv_range(slot).start, conv);
    }

    /// A slot's ring, `[RING_TOKENS, ring_entry]`.
    pub(crate) fn read_ring(&self, slot: usize) -> Vec<f32> {
        let vectors = self.ring.read(self.ring_range(slot));
        let vectors = vectors.chunks(vector_columns(&self.shape));
        let log_decays = self.log_decays[self.log_decay_range(slot)].chunks(self.shape.value_heads);
        vectors.zip(log_decays).flat_map(|(vectors, logs)| vectors.iter().chain(logs)).copied().collect()
    }

    /// Rounds and stores a slot's ring.
    pub(crate) fn write_ring(&mut self, slot: usize, ring: &[f32]) {
        let columns = vector_columns(&self.shape);
        let (vectors_at, logs_at) = (self.ring_range(slot).start, self.log_decay_range(slot).start);
        for (index, entry) in ring.chunks(self.shape.ring_entry()).enumerate() {
            let (vectors, logs) = entry.split_at(columns);
            self.ring.store(vectors_at + index * columns, vectors);
            self.log_decays[logs_at + index * logs.len()..][..logs.len()].copy_from_slice(logs);
        }
    }

    pub(crate) fn read(&self, slot: usize) -> GdnState {
        GdnState { base: self.read_base(slot), ring: self.read_ring(slot), conv: self.read_conv(slot) }
    }

    pub(crate) fn write(&mut self, slot: usize, state: &GdnState) -> Result<(), DeviceError> {
        let found = [state.base.len(), state.ring.len(), state.conv.len()];
        let expected = [
            self.shape.state_elements(),
            RING_TOKENS * self.shape.ring_entry(),
            CONV_RING * self.shape.conv_channels(),
        ];
        if found != expected {
            let reason = format!("base, ring and conv ring of {found:?} values, a slot has {expected:?}");
            return Err(DeviceError::shape("write_state", reason));
        }
        self.write_base(slot, &state.base);
        self.write_ring(slot, &state.ring);
        self.write_conv(slot, &state.conv);
        Ok(())
    }

    pub(crate) fn clear(&mut self, slot: usize) {
        let range = self.base_range(slot);
        self.base.clear(range);
    }

    pub(crate) fn copy(&mut self, from: usize, to: usize) {
        let (base, ring, conv) = (self.base_range(from), self.ring_range(from), self.conv_range(from));
        self.base.copy_within(base, self.base_range(to).start);
        self.ring.copy_within(ring, self.ring_range(to).start);
        self.conv.copy_within(conv, self.conv_range(to).start);
        let (log_decays, to) = (self.log_decay_range(from), self.log_decay_range(to).start);
        self.log_decays.copy_within(log_decays, to);
    }

    /// Writes a slot's base state and these rows of its raw convolution inputs as they are.
    pub(crate) fn write_out(&self, slot: usize, conv_rows: impl Iterator<Item = usize>, to: &mut Writer<'_>) {
        self.base.write_out(self.base_range(slot), to);
        for row in conv_rows {
            self.conv.write_out(self.conv_row_range(slot, row), to);
        }
    }

    /// The reverse of [`StateLayer::write_out`].
    pub(crate) fn read_in(
        &mut self,
        slot: usize,
        conv_rows: impl Iterator<Item = usize>,
        from: &mut Reader<'_>,
    ) {
        let base = self.base_range(slot);
        self.base.read_in(base, from);
        for row in conv_rows {
            let range = self.conv_row_range(slot, row);
            self.conv.read_in(range, from);
        }
    }

    fn conv_row_range(&self, slot: usize, row: usize) -> Range<usize> {
        range(slot * CONV_RING + row, self.shape.conv_channels())
    }
}

/// Columns of an entry's `k̂ | u`.
fn vector_columns(shape: &GdnShape) -> usize {
    shape.key_columns() + shape.value_columns()
}

fn range(slot: usize, len: usize) -> Range<usize> {
    slot * len..(slot + 1) * len
}
