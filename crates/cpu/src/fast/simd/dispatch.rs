//! Kernels compiled once per instruction set, chosen by the token at run time.

#![expect(unsafe_code, reason = "calls functions compiled for instructions that a token proves")]

use std::ops::Range;

use qwill_device::{Activations, AttentionShape, GdnShape, SampleRow, Span};

use super::Level;
#[cfg(target_arch = "x86_64")]
use super::{Avx2, Avx512};
use crate::Buffer;
use crate::fast::attention::{HeadNorms, Heads};
use crate::fast::blocks::Block;
use crate::fast::gdn_prepare::Weights;
use crate::fast::gdn_scan::{KeyHead, Ring};
#[cfg(test)]
use crate::fast::pack;
use crate::fast::pack::Matrix;
use crate::fast::sample::Candidate;
use crate::fast::{attention, elementwise, gdn_prepare, gdn_scan, linear, quantize, sample};

macro_rules! kernels {
    ($($(#[$doc:meta])* $name:ident: $module:ident::$body:ident ($($arg:ident: $kind:ty),* $(,)?) $(-> $result:ty)?;)*) => {$(
        $(#[$doc])*
        pub(in crate::fast) fn $name(level: Level, $($arg: $kind),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2(simd: Avx2, $($arg: $kind),*) $(-> $result)? {
                $module::$body(simd, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            fn avx512(simd: Avx512, $($arg: $kind),*) $(-> $result)? {
                $module::$body(simd, $($arg),*)
            }
            match level {
                Level::Scalar(simd) => $module::$body(simd, $($arg),*),
                // SAFETY: the token proves the instructions.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2(simd) => unsafe { avx2(simd, $($arg),*) },
                // SAFETY: the token proves the instructions.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512(simd) => unsafe { avx512(simd, $($arg),*) },
            }
        }
    )*};
}

kernels! {
    rms_norm_row: elementwise::rms_norm_row_body(
        activations: Activations, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);
    swiglu_row: elementwise::swiglu_row_body(activations: Activations, gate: &[f32], up: &[f32], out: &mut [f32]);
    gated_norm_row: elementwise::gated_norm_row_body(
        activations: Activations, shape: &GdnShape, scanned: &[f32], gates: &[f32], norm: &[f32], out: &mut [f32]);
    quantise_row: quantize::quantise_row_body(input: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]);
    #[cfg(test)]
    widen_group: pack::widen_group(matrix: &Matrix, tile: usize, group: usize, out: &mut [f32]) -> usize;
    float_tile: linear::float_tile_body(
        matrix: &Matrix, tile: usize, values: &[f32], stride: usize, rows: usize, widened: &mut [f32],
        sums: &mut [f32]);
    attention_prepare_row: attention::prepare_row_body(
        activations: Activations, shape: &AttentionShape, norms: HeadNorms<'_>, angles: &[(f32, f32)], input: &[f32],
        query: &mut [f32], keys: &mut [f32]);
    attend: attention::attend_body(
        activations: Activations, heads: &Heads<'_>, query: &Buffer, projected: &Buffer, memory: &mut [f32],
        out: &mut Block<'_>);
    gdn_prepare_row: gdn_prepare::prepare_row_body(
        activations: Activations, shape: &GdnShape, weights: Weights<'_>, samples: &[Option<&[f32]>], input: &[f32],
        out: &mut [f32]);
    gdn_chunk: gdn_scan::chunk_body(
        activations: Activations, key_head: KeyHead<'_>, mixed: &Buffer, rows: Range<usize>, base: &mut [f32],
        memory: &mut [f32], first_out: usize, out: &mut Block<'_>);
    gdn_rows: gdn_scan::rows_body(
        activations: Activations, key_head: KeyHead<'_>, mixed: &Buffer, span: &Span, base: &mut [f32],
        ring: &mut Ring<'_>, memory: &mut [f32], out: &mut Block<'_>);
    is_sound: sample::is_sound_body(values: &[f32]) -> bool;
    largest: sample::largest_body(values: &[f32]) -> f32;
    next_above: sample::next_above_body(values: &[f32], from: usize, bound: f32) -> usize;
    gumbel_argmax: sample::gumbel_argmax_body(
        logits: &[f32], first: usize, best: Candidate, row: &SampleRow<'_>) -> Candidate;
}
