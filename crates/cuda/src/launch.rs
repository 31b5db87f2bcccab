//! What each kernel takes: the Rust twins of the structs in the `.cu` files, field by field. Addresses are `u64`.
#![expect(unsafe_code, reason = "promises that a struct equals its C twin")]

/// A kernel's only parameter.
///
/// # Safety
/// The struct is `repr(C)` and equals its C twin in layout; its addresses are valid for the launch.
pub(crate) unsafe trait Params {}

/// Declares structs and that they are [`Params`].
macro_rules! params {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $name { $(pub(crate) $field: $type,)* }
        // SAFETY: repr(C) with the fields of the C struct of the same name in the same order; the callers in
        // `device` fill in addresses of live allocations, and the stream keeps launches before their release.
        unsafe impl Params for $name {}
    )*};
}

/// `struct Matrix` of common.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MatrixParams {
    pub(crate) data: u64,
    pub(crate) scales: u64,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) groups: u32,
    pub(crate) format: u32,
}

/// As `MAX_PARTS` of linear.cu.
pub(crate) const MAX_PARTS: usize = 4;

/// `struct Part` of linear.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PartParams {
    pub(crate) matrix: MatrixParams,
    pub(crate) out_column: u32,
    pub(crate) first_block: u32,
}

/// `struct Step` of common.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StepParams {
    pub(crate) counts: u64,
    pub(crate) logit_rows: u64,
    pub(crate) tokens: u64,
    pub(crate) row_span: u64,
    pub(crate) spans: u64,
    pub(crate) chunks: u64,
    pub(crate) page_table: u64,
}

/// `struct Kv` of attention.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvParams {
    pub(crate) keys: u64,
    pub(crate) values: u64,
    pub(crate) key_scales: u64,
    pub(crate) value_scales: u64,
}

params! {
    /// rows.cu, `embed`.
    EmbedParams { table: MatrixParams, tokens: u64, out: u64, out_cols: u32, }
    /// rows.cu, `rms_norm`.
    NormParams { x: u64, weight: u64, out: u64, x_cols: u32, out_cols: u32, cols: u32, filled_cols: u32, eps: f32, }
    /// rows.cu, `mtp_combine`.
    MtpParams {
        table: MatrixParams, tokens: u64, hidden: u64, embed_norm: u64, hidden_norm: u64, out: u64,
        hidden_cols: u32, hidden_width: u32, out_cols: u32, eps: f32,
    }
    /// rows.cu, `swiglu`.
    SwigluParams { gate_up: u64, out: u64, in_cols: u32, out_cols: u32, width: u32, }
    /// rows.cu, `gated_norm`.
    GatedNormParams {
        scanned: u64, projected: u64, norm: u64, out: u64,
        scanned_cols: u32, projected_cols: u32, out_cols: u32, z_column: u32, heads: u32, dim: u32, eps: f32,
    }
    /// rows.cu, `gather`.
    GatherParams { from: u64, indices: u64, to: u64, cols: u32, from_cols: u32, to_cols: u32, }
    /// pack.cu, `pack`.
    PackParams {
        source: u64, raw_scales: u64, data: u64, scales: u64,
        rows: u32, cols: u32, groups: u32, format: u32, first_row: u32, source_rows: u32,
    }
    /// `linear*.cu` but for `arrange`.
    LinearParams {
        parts: [PartParams; MAX_PARTS], x: u64, indices: u64, out: u64, sums: u64, arrivals: u64,
        part_count: u32, x_cols: u32, out_cols: u32, rows: u32, mode: u32, whole_blocks: u32,
    }
    /// `linear_prompt.cu`, `arrange`.
    ArrangeParams { x: u64, indices: u64, out: u64, rows: u32, x_cols: u32, groups: u32, unused: u32, }
    /// attention.cu, `prepare`.
    AttentionPrepareParams {
        step: StepParams, projected: u64, q_norm: u64, k_norm: u64, inverse: u64, query: u64, kv: KvParams,
        projected_cols: u32, query_cols: u32, eps: f32,
    }
    /// `attention_rows.cu` and `attention_plain.cu`, all, and attention.cu, `combine`.
    AttendParams {
        step: StepParams, query: u64, projected: u64, kv: KvParams, partials: u64, out: u64,
        first_row: u32, query_cols: u32, projected_cols: u32, out_cols: u32, scale: f32,
    }
    /// `attention_prompt.cu`, `attend_prompt`.
    PromptParams {
        step: StepParams, query: u64, projected: u64, kv: KvParams, out: u64,
        query_cols: u32, projected_cols: u32, out_cols: u32, scale: f32,
    }
    /// gdn.cu, `prepare` and `remember`.
    GdnPrepareParams {
        step: StepParams, projected: u64, taps: u64, decay_rate: u64, dt_bias: u64, conv: u64, mixed: u64,
        projected_cols: u32, mixed_cols: u32, query_scale: f32,
    }
    /// gdn.cu, `scan_rows` and `layer_rows`.
    GdnRoundParams {
        step: StepParams, projected: u64, taps: u64, decay_rate: u64, dt_bias: u64, conv: u64, mixed: u64, norm: u64,
        base: u64, ring: u64, log_decays: u64, readers: u64, out: u64,
        projected_cols: u32, mixed_cols: u32, out_cols: u32, query_scale: f32, eps: f32, unused: u32,
    }
    /// `gdn_chunks.cu`, `scan_chunks`.
    ScanParams {
        step: StepParams, mixed: u64, base: u64, ring: u64, log_decays: u64, readers: u64, out: u64,
        mixed_cols: u32, out_cols: u32,
    }
    /// ceilings.cu, all.
    CeilingParams { from: u64, to: u64, pieces: u64, rounds: u32, seed: u32, }
    /// sample.cu, `tiles` and `sample`.
    SampleParams {
        logits: u64, adjusted: u64, maxima: u64, sums: u64, rows: u64, results: u64, top: u64, logits_cols: u32,
        tiles: u32, top_capacity: u32, unused: u32,
    }
}
