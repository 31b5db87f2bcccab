//! Matrix products.

use qwill_device::{Activations, GROUP};

use super::matrix::Matrix;
use crate::Buffer;

/// Partial sums of [`dot`].
const LANES: usize = 16;

/// `Σ a[i]·b[i]` in f32: 16 partial sums over `i mod 16`, then added from the first to the last.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a_block, b_block) in a_blocks.iter().zip(b_blocks) {
        for ((sum, x), y) in sums.iter_mut().zip(a_block).zip(b_block) {
            *sum += x * y;
        }
    }
    for ((sum, x), y) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += x * y;
    }
    sums.iter().sum()
}

/// Hands `matrix · inputs[row]` to `store(row, output, sum)`, one weight row after another.
///
/// With [`Activations::Int8`] and a quantised matrix the inputs are quantised first, see
/// [`quantise`] and [`quantised_dot`]. A row's bits depend on that row and the matrix alone.
pub(super) fn multiply(
    activations: Activations,
    inputs: &[&[f32]],
    matrix: &Matrix,
    mut store: impl FnMut(usize, usize, f32),
) {
    if activations == Activations::Int8 && matrix.is_quantised() {
        return multiply_quantised(inputs, matrix, store);
    }
    let mut weights = vec![0.0; matrix.cols];
    for output in 0..matrix.rows {
        matrix.widen_row(output, &mut weights);
        for (row, input) in inputs.iter().enumerate() {
            store(row, output, dot(&weights, &input[..matrix.cols]));
        }
    }
}

fn multiply_quantised(inputs: &[&[f32]], matrix: &Matrix, mut store: impl FnMut(usize, usize, f32)) {
    let quantised: Vec<QuantisedRow> = inputs.iter().map(|input| quantise(&input[..matrix.cols])).collect();
    let mut codes = vec![0; matrix.cols];
    for output in 0..matrix.rows {
        matrix.row_codes(output, &mut codes);
        for (row, input) in quantised.iter().enumerate() {
            store(row, output, quantised_dot(&codes, |group| matrix.scale(output, group), input));
        }
    }
}

/// An activation row as int8 codes, one scale per [`GROUP`] inputs.
struct QuantisedRow {
    codes: Vec<i8>,
    scales: Vec<f32>,
}

/// Per group: `scale = max|x| / 127` in f32, `code = x / scale` rounded half to even; codes 0 where the scale
/// is 0.
fn quantise(input: &[f32]) -> QuantisedRow {
    let mut codes = Vec::with_capacity(input.len());
    let mut scales = Vec::with_capacity(input.len().div_ceil(GROUP));
    for group in input.chunks(GROUP) {
        let scale = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 127.0;
        scales.push(scale);
        codes
            .extend(group.iter().map(|x| if scale == 0.0 { 0 } else { (x / scale).round_ties_even() as i8 }));
    }
    QuantisedRow { codes, scales }
}

/// `Σ_groups f32(Σ weight code · input code) · (weight scale · input scale)`: the inner sum exact in i32, the
/// outer one in f32 in group order.
fn quantised_dot(codes: &[i8], weight_scale: impl Fn(usize) -> f32, input: &QuantisedRow) -> f32 {
    let groups = codes.chunks(GROUP).zip(input.codes.chunks(GROUP)).zip(&input.scales);
    let mut sum = 0.0;
    for (group, ((weights, inputs), scale)) in groups.enumerate() {
        let exact: i32 = weights.iter().zip(inputs).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        sum += exact as f32 * (weight_scale(group) * scale);
    }
    sum
}

/// The first `rows` rows of a buffer as slices.
pub(super) fn row_slices(buffer: &Buffer, rows: usize) -> Vec<&[f32]> {
    (0..rows).map(|row| buffer.row(row)).collect()
}

/// `out[row][first_column + i] = matrix[i] · inputs[row]`, rounded to the activation type.
pub(super) fn linear_into(
    activations: Activations,
    inputs: &[&[f32]],
    matrix: &Matrix,
    first_column: usize,
    out: &mut Buffer,
) {
    multiply(activations, inputs, matrix, |row, output, sum| {
        out.row_mut(row)[first_column + output] = activations.round(sum);
    });
}

/// `x[row] += matrix · inputs[row]`, the sum rounded once.
pub(super) fn linear_add(activations: Activations, inputs: &[&[f32]], matrix: &Matrix, x: &mut Buffer) {
    multiply(activations, inputs, matrix, |row, output, sum| {
        let slot = &mut x.row_mut(row)[output];
        *slot = activations.round(*slot + sum);
    });
}

/// `logits[i] = matrix · inputs[i]`, never rounded.
pub(super) fn head(activations: Activations, inputs: &[&[f32]], matrix: &Matrix, logits: &mut Buffer) {
    multiply(activations, inputs, matrix, |row, output, sum| logits.row_mut(row)[output] = sum);
}
