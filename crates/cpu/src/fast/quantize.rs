//! Activations as int8 codes.

use qwill_device::GROUP;

use super::blocks::{Blocks, steps};
use super::pool::Pool;
use super::scratch::grow;
use super::simd::{self, IntRows, Level, MAX_LANES, Simd};

/// Rows of int8 activations: per row and [`GROUP`] inputs a scale `max|x| / 127`, codes `x / scale` rounded half to
/// even, and the sum of the codes. Inputs are padded to whole groups with zeros.
#[derive(Debug, Default)]
pub(super) struct QuantisedRows {
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
    groups: usize,
}

impl QuantisedRows {
    /// Bytes of a group.
    pub(super) const GROUP_BYTES: usize = GROUP * size_of::<i8>() + size_of::<f32>() + size_of::<i32>();

    /// Makes room for groups of all rows together.
    pub(super) fn reserve(&mut self, groups: usize) {
        grow(&mut self.codes, groups * GROUP);
        grow(&mut self.scales, groups);
        grow(&mut self.sums, groups);
    }

    /// Quantises the first `cols` of `rows` rows that are `stride` apart.
    pub(super) fn quantise(
        &mut self,
        (level, pool): (Level, &mut Pool),
        input: &[f32],
        stride: usize,
        cols: usize,
        rows: usize,
    ) {
        let groups = cols.div_ceil(GROUP);
        self.groups = groups;
        self.reserve(rows * groups);
        let per_piece = super::rows_per_piece(rows, cols, pool.threads());
        let bounds = steps(rows, per_piece);
        let codes = Blocks::new(&mut self.codes, groups * GROUP, bounds.clone(), vec![0, groups * GROUP]);
        let scales = Blocks::new(&mut self.scales, groups, bounds.clone(), vec![0, groups]);
        let sums = Blocks::new(&mut self.sums, groups, bounds.clone(), vec![0, groups]);
        pool.run(bounds.len() - 1, &|_, piece| {
            let (mut codes, mut scales, mut sums) =
                (codes.take(piece, 0), scales.take(piece, 0), sums.take(piece, 0));
            for row in 0..codes.rows() {
                let input = &input[(piece * per_piece + row) * stride..][..cols];
                simd::quantise_row(level, input, codes.row_mut(row), scales.row_mut(row), sums.row_mut(row));
            }
        });
    }

    /// The rows from `first` on.
    pub(super) fn rows_from(&self, first: usize) -> IntRows<'_> {
        IntRows {
            codes: &self.codes[first * self.groups * GROUP..],
            scales: &self.scales[first * self.groups..],
            sums: &self.sums[first * self.groups..],
            groups: self.groups,
        }
    }
}

/// Kernel of one row.
#[inline(always)]
pub(super) fn quantise_row_body<S: Simd>(
    simd: S,
    input: &[f32],
    codes: &mut [i8],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    let groups = input.chunks(GROUP).zip(codes.chunks_mut(GROUP)).zip(scales).zip(sums);
    for (((input, codes), scale), sum) in groups {
        *scale = largest_size(simd, input) / 127.0;
        *sum = 0;
        if *scale == 0.0 {
            codes.fill(0);
            continue;
        }
        let divisor = simd.splat(*scale);
        for (input, codes) in input.chunks(S::LANES).zip(codes.chunks_mut(S::LANES)) {
            let ratio = simd.div(simd.load_part(input), divisor);
            let ratio = simd.min(simd.max(ratio, simd.splat(-127.0)), simd.splat(127.0));
            // Adding 1.5 · 2^23 rounds half to even and leaves the integer in the low bits.
            let mut shifted = [0.0; MAX_LANES];
            simd.store(&mut shifted, simd.add(ratio, simd.splat(12_582_912.0)));
            for (code, bits) in codes.iter_mut().zip(shifted) {
                *code = bits.to_bits() as i8;
                *sum += i32::from(*code);
            }
        }
        codes[input.len()..].fill(0);
    }
}

#[inline(always)]
fn largest_size<S: Simd>(simd: S, input: &[f32]) -> f32 {
    let mut largest = simd.splat(0.0);
    for part in input.chunks(S::LANES) {
        let part = simd.load_part(part);
        // A NaN in the first operand leaves the second.
        largest = simd.max(simd.max(part, simd.sub(simd.splat(0.0), part)), largest);
    }
    simd.largest(largest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fast::Isa;

    #[test]
    fn codes_scales_and_sums_are_the_definition_on_every_instruction_set() {
        let cols = 300;
        let input: Vec<f32> =
            (0..3 * cols).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 37.0 * (i / cols) as f32).collect();
        for isa in Isa::available() {
            let mut pool = Pool::new(2).unwrap();
            let mut rows = QuantisedRows { codes: vec![77; 4 * 3 * GROUP], ..QuantisedRows::default() };
            rows.quantise((Level::new(isa).unwrap(), &mut pool), &input, cols, cols, 3);
            for row in 0..3 {
                let found = rows.rows_from(row);
                for (group, values) in input[row * cols..(row + 1) * cols].chunks(GROUP).enumerate() {
                    let scale = values.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
                    assert_eq!(found.scales[group], scale);
                    let code = |x: &f32| if scale == 0.0 { 0 } else { (x / scale).round_ties_even() as i8 };
                    let mut expected: Vec<i8> = values.iter().map(code).collect();
                    expected.resize(GROUP, 0);
                    assert_eq!(found.codes[group * GROUP..(group + 1) * GROUP], expected[..], "{isa}");
                    assert_eq!(found.sums[group], expected.iter().map(|c| i32::from(*c)).sum::<i32>());
                }
            }
        }
    }
}
