//! KV pages and recurrent states: what a device keeps between steps.

use crate::numeric::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16_saturated};
use crate::{AttentionShape, GdnShape};

/// Storage type of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element.
    Bf16,
    /// 1 byte an element and 2 bytes a vector: codes with one f16 scale per position and kv head, see
    /// [`crate::numeric::quantize_vector`].
    Int8,
}

impl KvType {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Int8];

    /// Bytes of one element, without its part of a scale.
    pub fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Int8 => 1,
        }
    }
    /// Bytes of the scale of one vector of `head_dim` elements.
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::Bf16 => 0,
            Self::Int8 => 2,
        }
    }
    /// Bytes of one vector, its scale included.
    pub fn vector_bytes(self, head_dim: usize) -> usize {
        head_dim * self.element_bytes() + self.scale_bytes()
    }
    /// Name used in flags and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
}

/// Storage type of recurrent states: base states and the vectors of their rings. Log-decays are f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateType {
    /// 4 bytes an element; raw convolution inputs too.
    F32,
    /// IEEE half, 2 bytes an element; raw convolution inputs in bfloat16.
    F16,
}

impl StateType {
    /// Bytes of one element of base state, `k̂`, `u` or a raw convolution input.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
    /// Name used in flags and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        }
    }
    /// An element of base state, `k̂` or `u` as it is stored; beyond the largest half it is the largest half.
    #[inline]
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => f16_to_f32(f32_to_f16_saturated(value)),
        }
    }
    /// A raw convolution input as it is stored.
    #[inline]
    pub fn round_input(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => bf16_to_f32(f32_to_bf16(value)),
        }
    }
}

/// Granules are multiples of it: the smallest page that operating systems lock in memory, and a disk's block.
const GRANULE_ALIGN_BYTES: u64 = 4096;

/// Sizes of a device's caches; nothing grows after they are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheSpec {
    /// Layers with KV (the trunk's attention layers, then MTP).
    pub kv_layers: usize,
    /// Shape of an attention layer.
    pub attention: AttentionShape,
    /// Storage of keys and values.
    pub kv_type: KvType,
    /// Pages of [`crate::batch::PAGE_TOKENS`] tokens; one page id covers all KV layers.
    pub pages: usize,
    /// GDN layers.
    pub gdn_layers: usize,
    /// Shape of a GDN layer.
    pub gdn: GdnShape,
    /// Storage of recurrent states.
    pub state_type: StateType,
    /// State slots: resident sequences.
    pub slots: usize,
}

impl CacheSpec {
    /// Bytes of one page over all KV layers, keys and values.
    pub fn page_bytes(&self) -> u64 {
        let vectors = self.kv_layers * 2 * crate::batch::PAGE_TOKENS * self.attention.kv_heads;
        (vectors * self.kv_type.vector_bytes(self.attention.head_dim)) as u64
    }
    /// Bytes of one slot over all GDN layers: base state, ring and conv ring.
    pub fn slot_bytes(&self) -> u64 {
        let gdn = &self.gdn;
        let ring = crate::RING_TOKENS * (gdn.key_columns() + gdn.value_columns());
        let conv = crate::batch::CONV_RING * gdn.conv_channels();
        let typed = (gdn.state_elements() + ring + conv) * self.state_type.bytes();
        let log_decays = crate::RING_TOKENS * gdn.value_heads * size_of::<f32>();
        (self.gdn_layers * (typed + log_decays)) as u64
    }
    /// Bytes of one granule of a host store: room for one page, in whole pages of memory.
    pub fn granule_bytes(&self) -> u64 {
        self.page_bytes().max(1).next_multiple_of(GRANULE_ALIGN_BYTES)
    }
    /// Bytes of a stored state over all GDN layers: base state, and the raw convolution inputs that the next row
    /// reads.
    pub fn state_bytes(&self) -> u64 {
        let inputs = self.stored_inputs() * self.gdn.conv_channels();
        (self.gdn_layers * (self.gdn.state_elements() + inputs) * self.state_type.bytes()) as u64
    }
    /// Granules that a stored state takes.
    pub fn state_granules(&self) -> usize {
        self.state_bytes().div_ceil(self.granule_bytes()) as usize
    }
    /// Raw convolution inputs of a layer that a stored state keeps.
    pub fn stored_inputs(&self) -> usize {
        self.gdn.conv_width.saturating_sub(1)
    }
    /// Rows of the convolution ring that a state stored at a position keeps, oldest first.
    pub fn stored_rows(&self, position: usize) -> impl Iterator<Item = usize> + use<> {
        use crate::batch::CONV_RING;
        let inputs = self.stored_inputs();
        (0..inputs).map(move |index| (position + CONV_RING - inputs + index) % CONV_RING)
    }
    /// Bytes of all pages and slots.
    pub fn bytes(&self) -> u64 {
        self.page_bytes() * self.pages as u64 + self.slot_bytes() * self.slots as u64
    }
}

/// One GDN layer's state of one slot, on the host, widened to f32.
#[derive(Debug, Clone, PartialEq)]
pub struct GdnState {
    /// `[value_heads, key_dim, value_dim]`: the base state, without the ring's entries.
    pub base: Vec<f32>,
    /// `[RING_TOKENS, ring_entry]`; only committed entries mean anything.
    pub ring: Vec<f32>,
    /// `[CONV_RING, conv_channels]`, position `p` at row `p % CONV_RING`.
    pub conv: Vec<f32>,
}

impl GdnState {
    /// The state as a slot of the given type holds it.
    #[must_use]
    pub fn rounded(mut self, shape: &GdnShape, state_type: StateType) -> Self {
        let round = |values: &mut [f32]| {
            for value in values {
                *value = state_type.round(*value);
            }
        };
        round(&mut self.base);
        for entry in self.ring.chunks_mut(shape.ring_entry()) {
            round(&mut entry[..shape.key_columns() + shape.value_columns()]);
        }
        for value in &mut self.conv {
            *value = state_type.round_input(*value);
        }
        self
    }
}

/// One page of one KV layer, on the host, widened to f32 and scaled.
#[derive(Debug, Clone, PartialEq)]
pub struct KvPage {
    /// `[PAGE_TOKENS, kv_heads, head_dim]`, normed and rotated.
    pub keys: Vec<f32>,
    /// `[PAGE_TOKENS, kv_heads, head_dim]`.
    pub values: Vec<f32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Geometry;

    fn spec_27b(state_type: StateType) -> CacheSpec {
        let geometry = Geometry::named("27b").unwrap();
        CacheSpec {
            kv_layers: geometry.kv_layers(),
            attention: geometry.attention,
            kv_type: KvType::Bf16,
            pages: 1,
            gdn_layers: geometry.gdn_layers(),
            gdn: geometry.gdn,
            state_type,
            slots: 1,
        }
    }

    /// Base 75.5 MB, ring 25.5 MB, convolution inputs 19.7 MB.
    #[test]
    fn a_slot_of_the_largest_model_has_the_bytes_that_64_of_them_allow() {
        assert_eq!(spec_27b(StateType::F16).slot_bytes(), 75_497_472 + 25_460_736 + 19_660_800);
        assert_eq!(spec_27b(StateType::F32).slot_bytes(), 150_994_944 + 50_626_560 + 39_321_600);
    }

    /// Beside base states of 75.5 MB, three inputs of 10,240 channels a layer.
    #[test]
    fn a_stored_state_of_the_largest_model_takes_eighteen_pages() {
        let spec = spec_27b(StateType::F16);
        assert_eq!(spec.page_bytes(), 17 * 2 * 64 * 4 * 256 * 2);
        assert_eq!(spec.granule_bytes(), spec.page_bytes());
        assert_eq!(spec.state_bytes(), 75_497_472 + 48 * 3 * 10_240 * 2);
        assert_eq!(spec.state_granules(), 18);
    }

    #[test]
    fn granules_are_whole_pages_of_memory() {
        let spec = CacheSpec { kv_type: KvType::Int8, kv_layers: 1, ..spec_27b(StateType::F16) };
        assert_eq!((spec.page_bytes(), spec.granule_bytes()), (132_096, 135_168));
        assert_eq!(CacheSpec { kv_layers: 0, ..spec }.granule_bytes(), 4096);
    }

    #[test]
    fn the_rows_of_a_stored_state_end_before_its_position() {
        let rows = |position| spec_27b(StateType::F16).stored_rows(position).collect::<Vec<_>>();
        assert_eq!(rows(7), [4, 5, 6]);
        assert_eq!(rows(20), [17, 18, 19]);
        assert_eq!(rows(41), [18, 19, 0]);
    }

    #[test]
    fn rounding_to_half_saturates_and_keeps_nan() {
        let round = |value| StateType::F16.round(value);
        assert_eq!(round(1e30), 65_504.0);
        assert_eq!(round(-65_520.0), -65_504.0);
        assert_eq!(round(f32::INFINITY), 65_504.0);
        assert!(round(f32::NAN).is_nan());
        assert_eq!(round(0.1), f16_to_f32(0x2e66));
        assert_eq!(StateType::F16.round_input(1.0 + 1.0 / 512.0), 1.0);
        assert_eq!(StateType::F32.round(1e30), 1e30);
    }
}
