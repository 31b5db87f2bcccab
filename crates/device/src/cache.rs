//! KV pages and recurrent states: what a device keeps between steps.

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
    /// State slots: resident sequences.
    pub slots: usize,
}

impl CacheSpec {
    /// Bytes of one page over all KV layers, keys and values.
    pub fn page_bytes(&self) -> u64 {
        let vectors = self.kv_layers * 2 * crate::batch::PAGE_TOKENS * self.attention.kv_heads;
        (vectors * self.kv_type.vector_bytes(self.attention.head_dim)) as u64
    }
    /// Bytes of one slot over all GDN layers: base state, ring and conv ring, all f32.
    pub fn slot_bytes(&self) -> u64 {
        let ring = crate::RING_TOKENS * self.gdn.ring_entry();
        let conv = crate::batch::CONV_RING * self.gdn.conv_channels();
        (self.gdn_layers * (self.gdn.state_elements() + ring + conv) * 4) as u64
    }
    /// Bytes of all pages and slots.
    pub fn bytes(&self) -> u64 {
        self.page_bytes() * self.pages as u64 + self.slot_bytes() * self.slots as u64
    }
}

/// One GDN layer's state of one slot, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct GdnState {
    /// `[value_heads, key_dim, value_dim]`: the base state, without the ring's entries.
    pub base: Vec<f32>,
    /// `[RING_TOKENS, ring_entry]`; only committed entries mean anything.
    pub ring: Vec<f32>,
    /// `[CONV_RING, conv_channels]`, position `p` at row `p % CONV_RING`.
    pub conv: Vec<f32>,
}

/// One page of one KV layer, on the host, widened to f32 and scaled.
#[derive(Debug, Clone, PartialEq)]
pub struct KvPage {
    /// `[PAGE_TOKENS, kv_heads, head_dim]`, normed and rotated.
    pub keys: Vec<f32>,
    /// `[PAGE_TOKENS, kv_heads, head_dim]`.
    pub values: Vec<f32>,
}
