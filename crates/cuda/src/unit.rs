//! Kernel sources: one `.cu` file each, and what is compiled into them.

use std::fmt::Write as _;

use qwill_device::{AttentionShape, GdnShape, Geometry, KvType, StateType};
use sha2::{Digest, Sha256};

/// A source file and its entry points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// File name without ending.
    pub name: &'static str,
    /// The text of the file, after that of a header of its own where it has one.
    pub source: &'static str,
    /// Names of its kernels.
    pub kernels: &'static [&'static str],
}

/// The headers that units include: name and text.
pub(crate) const HEADERS: [(&str, &str); 5] = [
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("linear.cuh", include_str!("../kernels/linear.cuh")),
    ("linear_sums.cuh", include_str!("../kernels/linear_sums.cuh")),
    ("hopper.cuh", include_str!("../kernels/hopper.cuh")),
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
];

pub(crate) const ROWS: Unit = Unit {
    name: "rows",
    source: include_str!("../kernels/rows.cu"),
    kernels: &["embed", "rms_norm", "mtp_combine", "swiglu", "gated_norm", "gather"],
};
pub(crate) const PACK: Unit =
    Unit { name: "pack", source: include_str!("../kernels/pack.cu"), kernels: &["pack"] };
pub(crate) const LINEAR: Unit = Unit {
    name: "linear",
    source: include_str!("../kernels/linear.cu"),
    kernels: &["int4_2", "int4_3", "int4_4", "int8_2", "int8_4", "bf16_1", "plain"],
};
pub(crate) const LINEAR_MANY: Unit = Unit {
    name: "linear_many",
    source: include_str!("../kernels/linear_many.cu"),
    kernels: &["int4_16", "int4_32", "int4_64", "int8_16", "int8_32", "int8_64", "bf16_16", "bf16_64"],
};
/// For compute capability 9.0 alone.
pub(crate) const LINEAR_ROUNDS: Unit = Unit {
    name: "linear_rounds",
    source: include_str!("../kernels/linear_rounds.cu"),
    kernels: &[
        "int4_round_16",
        "int4_round_32",
        "int4_round_64",
        "int8_round_16",
        "int8_round_32",
        "int8_round_64",
        "bf16_round_16",
        "bf16_round_32",
        "bf16_round_64",
    ],
};
/// For compute capability 9.0 alone.
pub(crate) const LINEAR_PROMPT: Unit = Unit {
    name: "linear_prompt",
    source: include_str!("../kernels/linear_prompt.cu"),
    kernels: &[
        "arrange",
        "int4_prompt_64",
        "int4_prompt_128",
        "int8_prompt_64",
        "int8_prompt_128",
        "bf16_prompt_64",
        "bf16_prompt_128",
    ],
};
pub(crate) const ATTENTION: Unit = Unit {
    name: "attention",
    source: include_str!("../kernels/attention.cu"),
    kernels: &["prepare", "combine"],
};
pub(crate) const ATTENTION_PLAIN: Unit = Unit {
    name: "attention_plain",
    source: include_str!("../kernels/attention_plain.cu"),
    kernels: &["attend_plain"],
};
pub(crate) const ATTENTION_ROWS: Unit = Unit {
    name: "attention_rows",
    source: include_str!("../kernels/attention_rows.cu"),
    kernels: &["attend_one", "attend_many"],
};
pub(crate) const ATTENTION_PROMPT: Unit = Unit {
    name: "attention_prompt",
    source: include_str!("../kernels/attention_prompt.cu"),
    kernels: &["attend_prompt"],
};
pub(crate) const GDN: Unit = Unit {
    name: "gdn",
    source: concat!(include_str!("../kernels/gdn_state.cuh"), include_str!("../kernels/gdn.cu")),
    kernels: &[
        "prepare",
        "remember",
        "scan_rows",
        "layer_rows_1",
        "layer_rows_4",
        "layer_rows_8",
        "layer_rows_16",
    ],
};
pub(crate) const GDN_CHUNKS: Unit = Unit {
    name: "gdn_chunks",
    source: concat!(include_str!("../kernels/gdn_state.cuh"), include_str!("../kernels/gdn_chunks.cu")),
    kernels: &["scan_chunks"],
};
pub(crate) const SAMPLE: Unit =
    Unit { name: "sample", source: include_str!("../kernels/sample.cu"), kernels: &["tiles", "sample"] };
pub(crate) const CEILINGS: Unit = Unit {
    name: "ceilings",
    source: include_str!("../kernels/ceilings.cu"),
    kernels: &["fill", "read", "copy", "mma_bf16", "mma_int8", "fma_f32", "nothing"],
};

/// A unit with the constants of a geometry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitBuild {
    /// The source.
    pub unit: Unit,
    /// Preprocessor constants.
    pub defines: Vec<(&'static str, usize)>,
}

impl UnitBuild {
    /// A unit that needs no constants.
    pub(crate) fn plain(unit: Unit) -> Self {
        Self { unit, defines: Vec::new() }
    }

    /// Whether a GPU of this compute capability (times ten) has the instructions that the unit needs.
    pub fn is_for(&self, sm: u32) -> bool {
        ![LINEAR_PROMPT, LINEAR_ROUNDS].contains(&self.unit) || sm == 90
    }

    /// Name and constants, for people.
    pub fn describe(&self) -> String {
        let mut text = self.unit.name.to_owned();
        for (name, value) in &self.defines {
            // Writing to a string cannot fail.
            let _ = write!(text, " {name}={value}");
        }
        text
    }

    /// What identifies the compiled code but for the compiler: source, headers, constants and architecture, as hex.
    pub fn key(&self, sm: u32) -> String {
        let mut hash = Sha256::new();
        let constants = self.defines.iter().map(|(name, value)| format!("{name}={value}"));
        for part in [self.unit.name.to_owned(), self.unit.source.to_owned(), sm.to_string()]
            .into_iter()
            .chain(HEADERS.map(|header| header.1.to_owned()))
            .chain(constants)
        {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hex(&hash.finalize()[..16])
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// `KV_F32`, `KV_BF16` and `KV_INT8` of attention.cu.
fn kv_constant(kv_type: KvType) -> usize {
    match kv_type {
        KvType::F32 => 0,
        KvType::Bf16 => 1,
        KvType::Int8 => 2,
    }
}

/// The units that attend.
pub(crate) struct AttentionUnits {
    /// Before and after.
    pub(crate) around: UnitBuild,
    /// What attends for rows that are split over their positions: on plain cores for keys and values in f32, which
    /// takes prompts as well, and on tensor cores for the other types.
    pub(crate) rows: UnitBuild,
    /// What attends for prompts; none in f32.
    pub(crate) prompt: Option<UnitBuild>,
}

/// The attention kernels of a shape; an error where the kernels cannot take it.
pub(crate) fn attention_units(shape: &AttentionShape, kv_type: KvType) -> Result<AttentionUnits, String> {
    let AttentionShape { query_heads, kv_heads, head_dim, rope_dims, .. } = *shape;
    let fits = head_dim.is_multiple_of(8) && (8..=256).contains(&head_dim) && rope_dims <= head_dim;
    let heads_fit = kv_heads > 0 && query_heads.is_multiple_of(kv_heads) && query_heads / kv_heads <= 8;
    if !fits || !heads_fit {
        return Err(format!(
            "the kernels take heads of 8 to 256 in steps of 8 and at most 8 query heads per kv head, not {shape:?}"
        ));
    }
    let build = |unit, more: &[(&'static str, usize)]| {
        let common = [
            ("HEAD_DIM", head_dim),
            ("QUERY_HEADS", query_heads),
            ("KV_HEADS", kv_heads),
            ("KV_TYPE", kv_constant(kv_type)),
        ];
        UnitBuild { unit, defines: common.into_iter().chain(more.iter().copied()).collect() }
    };
    let plain = kv_type == KvType::F32;
    let shared_bytes = ("SHARED_BYTES", prompt_shared_bytes(head_dim, kv_type));
    Ok(AttentionUnits {
        around: build(ATTENTION, &[("ROPE_DIMS", rope_dims)]),
        rows: build(if plain { ATTENTION_PLAIN } else { ATTENTION_ROWS }, &[]),
        prompt: (!plain).then(|| build(ATTENTION_PROMPT, &[shared_bytes])),
    })
}

/// Query vectors that a block of the prompt kernel attends for: `TILE` in the source.
pub(crate) const PROMPT_TILE: usize = 64;

/// Dynamic shared memory of the prompt kernel; its source asserts that it is right.
pub(crate) fn prompt_shared_bytes(head_dim: usize, kv_type: KvType) -> usize {
    const POSITIONS: usize = 32;
    let vector_bytes = head_dim.next_multiple_of(16) * 2 + 16;
    // Keys and values: two buffers, or one beside arriving codes and scales.
    let (buffers, arriving) = match kv_type {
        KvType::Int8 => (1, kv_type.vector_bytes(head_dim)),
        KvType::F32 | KvType::Bf16 => (2, 0),
    };
    PROMPT_TILE * vector_bytes + 2 * POSITIONS * (buffers * vector_bytes + arriving)
}

/// The Gated `DeltaNet` kernels of a shape: for rows, then for chunks; an error where the kernels cannot take it.
pub fn gdn_units(shape: &GdnShape, state_type: StateType) -> Result<[UnitBuild; 2], String> {
    let GdnShape { key_heads, value_heads, key_dim, value_dim, conv_width, .. } = *shape;
    let heads_fit = key_heads > 0 && value_heads.is_multiple_of(key_heads);
    let fits = [key_dim, value_dim].iter().all(|dim| (4..=128).contains(dim) && dim.is_multiple_of(4))
        && (1..=4).contains(&conv_width);
    if !heads_fit || !fits {
        return Err(format!(
            "the kernels take heads of 4 to 128 in steps of 4 and at most 4 taps, not {shape:?}"
        ));
    }
    let defines = vec![
        ("KEY_HEADS", key_heads),
        ("VALUE_HEADS", value_heads),
        ("KEY_DIM", key_dim),
        ("VALUE_DIM", value_dim),
        ("CONV_WIDTH", conv_width),
        ("STATE_F16", usize::from(state_type == StateType::F16)),
    ];
    Ok([GDN, GDN_CHUNKS].map(|unit| UnitBuild { unit, defines: defines.clone() }))
}

/// The units of an attention and a GDN shape with KV and states of the given types; an error where the kernels cannot take
/// one.
pub(crate) fn shape_units(
    attention: &AttentionShape,
    kv_types: &[KvType],
    gdn: &GdnShape,
    state_types: &[StateType],
) -> Result<Vec<UnitBuild>, String> {
    let mut units = Vec::new();
    for kv_type in kv_types {
        let AttentionUnits { around, rows, prompt } = attention_units(attention, *kv_type)?;
        units.extend([around, rows].into_iter().chain(prompt));
    }
    for state_type in state_types {
        units.extend(gdn_units(gdn, *state_type)?);
    }
    Ok(units)
}

/// The units that need no geometry; see [`UnitBuild::is_for`].
pub fn fixed_units() -> Vec<UnitBuild> {
    [ROWS, PACK, LINEAR, LINEAR_MANY, LINEAR_ROUNDS, LINEAR_PROMPT, SAMPLE, CEILINGS]
        .into_iter()
        .map(UnitBuild::plain)
        .collect()
}

/// Everything that a geometry needs with KV and states of the given types, each unit once; see [`UnitBuild::is_for`].
pub fn units_of(
    geometry: &Geometry,
    kv_types: &[KvType],
    state_types: &[StateType],
) -> Result<Vec<UnitBuild>, String> {
    let mut units = fixed_units();
    units.extend(shape_units(&geometry.attention, kv_types, &geometry.gdn, state_types)?);
    Ok(units)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gdn(name: &str) -> UnitBuild {
        let [rows, _] = gdn_units(&Geometry::named(name).unwrap().gdn, StateType::F16).unwrap();
        rows
    }

    #[test]
    fn a_key_follows_everything_that_changes_the_code() {
        let build = gdn("27b");
        let key = build.key(90);
        assert_eq!(key, gdn("27b").key(90));
        assert_ne!(key, build.key(86));
        assert_ne!(key, gdn("tiny").key(90));
        let [f32_states, _] = gdn_units(&Geometry::named("27b").unwrap().gdn, StateType::F32).unwrap();
        assert_ne!(key, f32_states.key(90));
        let other_source = UnitBuild { unit: Unit { source: "other", ..build.unit }, ..build.clone() };
        assert_ne!(key, other_source.key(90));
        let moved = UnitBuild { defines: build.defines.iter().rev().copied().collect(), ..build };
        assert_ne!(key, moved.key(90));
    }

    #[test]
    fn every_kernel_is_in_its_source() {
        for unit in [
            ROWS,
            PACK,
            ATTENTION,
            ATTENTION_PLAIN,
            ATTENTION_PROMPT,
            ATTENTION_ROWS,
            GDN,
            GDN_CHUNKS,
            SAMPLE,
            CEILINGS,
        ] {
            // A kernel whose name ends in a number is made by a macro.
            for kernel in
                unit.kernels.iter().filter(|name| !name.ends_with(|last: char| last.is_ascii_digit()))
            {
                assert!(unit.source.contains(&format!(" {kernel}(const ")), "{} {kernel}", unit.name);
            }
        }
    }

    #[test]
    fn shapes_that_the_kernels_cannot_take_are_refused_with_the_shape() {
        let geometry = Geometry::named("27b").unwrap();
        let wide = AttentionShape { head_dim: 512, ..geometry.attention };
        assert!(attention_units(&wide, KvType::Bf16).err().unwrap().contains("512"));
        let uneven = GdnShape { value_heads: 17, ..geometry.gdn };
        assert!(gdn_units(&uneven, StateType::F32).unwrap_err().contains("17"));
    }

    #[test]
    fn prompts_are_attended_within_the_least_shared_memory() {
        // Of a block on sm_86, sm_89 and sm_120.
        for kv_type in [KvType::Bf16, KvType::Int8] {
            assert!(prompt_shared_bytes(256, kv_type) <= 99 << 10, "{kv_type:?}");
        }
        let shape = Geometry::named("27b").unwrap().attention;
        assert!(attention_units(&shape, KvType::F32).unwrap().prompt.is_none());
    }

    #[test]
    fn every_named_geometry_has_units() {
        for name in Geometry::NAMES {
            let geometry = Geometry::named(name).unwrap();
            assert_eq!(units_of(&geometry, &[KvType::Bf16], &[StateType::F16]).unwrap().len(), 13);
        }
    }
}
