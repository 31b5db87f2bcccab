//! The numbers that fix a model's shapes.

/// Which mixer a decoder layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated `DeltaNet`: a recurrent state per value head.
    Gdn,
    /// Gated softmax attention with a KV cache.
    Attention,
}

/// Shape of every attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads; each has a gate of the same width.
    pub query_heads: usize,
    /// Key/value heads; query head `j` reads kv head `j / (query_heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Leading dimensions of a head that are rotated; pairs are `(i, i + rope_dims / 2)`.
    pub rope_dims: usize,
    /// RoPE base.
    pub rope_theta: f64,
    /// Epsilon of the q and k norms.
    pub norm_eps: f32,
}

impl AttentionShape {
    /// Columns of the merged projection: per query head `query | gate`, then keys, then values.
    pub fn projected(&self) -> usize {
        2 * self.query_columns() + 2 * self.kv_columns()
    }
    /// `query_heads * head_dim`.
    pub fn query_columns(&self) -> usize {
        self.query_heads * self.head_dim
    }
    /// `kv_heads * head_dim`.
    pub fn kv_columns(&self) -> usize {
        self.kv_heads * self.head_dim
    }
    /// Factor on q·k: `head_dim^(-1/2)`.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Shape of every Gated `DeltaNet` layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GdnShape {
    /// Query/key heads.
    pub key_heads: usize,
    /// Value heads; value head `j` uses key head `j / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Taps of the causal depthwise convolution; the last tap multiplies the newest sample.
    pub conv_width: usize,
    /// Epsilon of the output norm (mean of squares).
    pub norm_eps: f32,
}

impl GdnShape {
    /// `key_heads * key_dim`.
    pub fn key_columns(&self) -> usize {
        self.key_heads * self.key_dim
    }
    /// `value_heads * value_dim`.
    pub fn value_columns(&self) -> usize {
        self.value_heads * self.value_dim
    }
    /// Convolved channels: `q | k | v`.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_columns() + self.value_columns()
    }
    /// Columns of the merged projection: `q | k | v | z | b | a`.
    pub fn projected(&self) -> usize {
        self.conv_channels() + self.value_columns() + 2 * self.value_heads
    }
    /// First column of `z` in the merged projection.
    pub fn z_column(&self) -> usize {
        self.conv_channels()
    }
    /// First column of `b` (write strength) in the merged projection.
    pub fn b_column(&self) -> usize {
        self.conv_channels() + self.value_columns()
    }
    /// First column of `a` (decay input) in the merged projection.
    pub fn a_column(&self) -> usize {
        self.b_column() + self.value_heads
    }
    /// Columns of the mixed buffer: `q̂ | k̂ | v | log-decay | β`.
    pub fn mixed(&self) -> usize {
        self.conv_channels() + 2 * self.value_heads
    }
    /// First column of the log-decay in the mixed buffer.
    pub fn log_decay_column(&self) -> usize {
        self.conv_channels()
    }
    /// First column of β in the mixed buffer.
    pub fn beta_column(&self) -> usize {
        self.conv_channels() + self.value_heads
    }
    /// Elements of one layer's recurrent state: `value_heads × key_dim × value_dim`.
    pub fn state_elements(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
    /// Values of one ring entry: `k̂` of every key head, then `u` and the log-decay of every value head.
    pub fn ring_entry(&self) -> usize {
        self.key_columns() + self.value_columns() + self.value_heads
    }
    /// The key head that a value head reads.
    pub fn key_head_of(&self, value_head: usize) -> usize {
        value_head / (self.value_heads / self.key_heads)
    }
}

/// Everything that fixes the shapes of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct Geometry {
    /// Short name for people: `27b`, `tiny`, or the checkpoint's.
    pub name: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Rows of the embedding and the head, padding included.
    pub vocab: usize,
    /// Mixer of each layer.
    pub layers: Vec<LayerKind>,
    /// Attention layers' shape.
    pub attention: AttentionShape,
    /// GDN layers' shape.
    pub gdn: GdnShape,
    /// Epsilon of the residual-stream norms.
    pub norm_eps: f32,
    /// Whether the head is the embedding matrix.
    pub tied_head: bool,
    /// Layers of the multi-token-prediction module (0 or 1).
    pub mtp_layers: usize,
    /// Longest context the model was made for, tokens.
    pub max_context: usize,
}

impl Geometry {
    /// Number of GDN layers.
    pub fn gdn_layers(&self) -> usize {
        self.layers.iter().filter(|kind| **kind == LayerKind::Gdn).count()
    }
    /// Number of attention layers in the trunk (without MTP).
    pub fn attention_layers(&self) -> usize {
        self.layers.len() - self.gdn_layers()
    }
    /// Number of layers that own KV pages: the trunk's attention layers, then the MTP layers.
    pub fn kv_layers(&self) -> usize {
        self.attention_layers() + self.mtp_layers
    }

    /// The dense models of the family by name, and the tiny one. `None` for an unknown name.
    ///
    /// Source: the released `config.json` files.
    pub fn named(name: &str) -> Option<Self> {
        // hidden, intermediate, layers, q heads, kv heads, gdn value heads, tied
        let (hidden, intermediate, layers, query_heads, kv_heads, value_heads, tied_head) = match name {
            "0.8b" => (1024, 3584, 24, 8, 2, 16, true),
            "2b" => (2048, 6144, 24, 8, 2, 16, true),
            "4b" => (2560, 9216, 32, 16, 4, 32, true),
            "9b" => (4096, 12288, 32, 16, 4, 32, false),
            "27b" => (5120, 17408, 64, 24, 4, 48, false),
            "tiny" => (256, 512, 8, 2, 1, 6, false),
            _ => return None,
        };
        let tiny = name == "tiny";
        Some(Self {
            name: name.to_owned(),
            hidden,
            intermediate,
            vocab: if tiny { 8192 } else { 248_320 },
            layers: (1..=layers)
                .map(|n| if n % 4 == 0 { LayerKind::Attention } else { LayerKind::Gdn })
                .collect(),
            attention: AttentionShape {
                query_heads,
                kv_heads,
                head_dim: 256,
                rope_dims: 64,
                rope_theta: 1e7,
                norm_eps: 1e-6,
            },
            gdn: GdnShape {
                key_heads: if tiny { 2 } else { 16 },
                value_heads,
                key_dim: 128,
                value_dim: 128,
                conv_width: 4,
                norm_eps: 1e-6,
            },
            norm_eps: 1e-6,
            tied_head,
            mtp_layers: 1,
            max_context: if tiny { 32_768 } else { 262_144 },
        })
    }

    /// Names that [`Geometry::named`] knows, largest first.
    pub const NAMES: [&str; 6] = ["27b", "9b", "4b", "2b", "0.8b", "tiny"];
}
