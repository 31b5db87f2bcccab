//! Weight matrices as they were stored: codes stay codes, one row is widened at a time.

use qwill_device::matrix::MatrixElements;
use qwill_device::numeric::{bf16_to_f32, f16_to_f32};
use qwill_device::{DeviceError, GROUP, MatrixData, WeightFormat};

/// An owned copy of a [`MatrixData`]: `[rows, cols]`, row = output, column = input.
#[derive(Debug, Clone)]
pub struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    elements: Elements,
}

#[derive(Debug, Clone)]
enum Elements {
    F32(Vec<f32>),
    F16(Vec<u16>),
    Bf16(Vec<u16>),
    Int8 { codes: Vec<i8>, scales: Vec<u16> },
    Int4 { packed: Vec<u8>, scales: Vec<u16> },
}

impl Matrix {
    /// All zeros.
    pub(super) fn empty(format: WeightFormat, rows: usize, cols: usize) -> Self {
        let (elements, groups) = (rows * cols, rows * cols.div_ceil(GROUP));
        let elements = match format {
            WeightFormat::F32 => Elements::F32(vec![0.0; elements]),
            WeightFormat::F16 => Elements::F16(vec![0; elements]),
            WeightFormat::Bf16 => Elements::Bf16(vec![0; elements]),
            WeightFormat::Int8 => Elements::Int8 { codes: vec![0; elements], scales: vec![0; groups] },
            WeightFormat::Int4 => {
                Elements::Int4 { packed: vec![0x88; rows * cols.div_ceil(2)], scales: vec![0; groups] }
            }
        };
        Self { rows, cols, elements }
    }

    /// Copies a block of rows after checking it.
    pub(super) fn fill(&mut self, first_row: usize, block: &MatrixData<'_>) -> Result<(), DeviceError> {
        block
            .check_block(self.format(), self.rows, self.cols, first_row)
            .map_err(|reason| DeviceError::shape("matrix", reason))?;
        let groups = self.cols.div_ceil(GROUP);
        match (&mut self.elements, block.elements) {
            (Elements::F32(to), MatrixElements::F32(from)) => put(to, first_row * self.cols, from),
            (Elements::F16(to), MatrixElements::F16(from))
            | (Elements::Bf16(to), MatrixElements::Bf16(from)) => put(to, first_row * self.cols, from),
            (Elements::Int8 { codes, scales }, MatrixElements::Int8 { codes: from, scales: from_scales }) => {
                put(codes, first_row * self.cols, from);
                put(scales, first_row * groups, from_scales);
            }
            (
                Elements::Int4 { packed, scales },
                MatrixElements::Int4 { packed: from, scales: from_scales },
            ) => {
                put(packed, first_row * self.cols.div_ceil(2), from);
                put(scales, first_row * groups, from_scales);
            }
            _ => return Err(DeviceError::shape("matrix", "a block of another format")),
        }
        Ok(())
    }

    fn format(&self) -> WeightFormat {
        match self.elements {
            Elements::F32(_) => WeightFormat::F32,
            Elements::F16(_) => WeightFormat::F16,
            Elements::Bf16(_) => WeightFormat::Bf16,
            Elements::Int8 { .. } => WeightFormat::Int8,
            Elements::Int4 { .. } => WeightFormat::Int4,
        }
    }

    /// Whether the elements are integer codes with a scale per group.
    pub(super) fn is_quantised(&self) -> bool {
        matches!(self.elements, Elements::Int8 { .. } | Elements::Int4 { .. })
    }

    /// Writes row `row` in f32: exactly [`MatrixData::value`] of each column.
    pub(super) fn widen_row(&self, row: usize, out: &mut [f32]) {
        let of_row = row * self.cols..(row + 1) * self.cols;
        match &self.elements {
            Elements::F32(values) => out.copy_from_slice(&values[of_row]),
            Elements::F16(bits) => widen(&bits[of_row], f16_to_f32, out),
            Elements::Bf16(bits) => widen(&bits[of_row], bf16_to_f32, out),
            Elements::Int8 { .. } | Elements::Int4 { .. } => self.widen_codes(row, out),
        }
    }

    fn widen_codes(&self, row: usize, out: &mut [f32]) {
        let mut codes = vec![0; self.cols];
        self.row_codes(row, &mut codes);
        let groups = out.chunks_mut(GROUP).zip(codes.chunks(GROUP));
        for (group, (values, codes)) in groups.enumerate() {
            let scale = self.scale(row, group);
            for (value, code) in values.iter_mut().zip(codes) {
                *value = f32::from(*code) * scale;
            }
        }
    }

    /// Writes the signed codes of row `row`; zeros for a matrix that has none.
    pub(super) fn row_codes(&self, row: usize, out: &mut [i8]) {
        match &self.elements {
            Elements::Int8 { codes, .. } => {
                out.copy_from_slice(&codes[row * self.cols..(row + 1) * self.cols]);
            }
            Elements::Int4 { packed, .. } => {
                let row_bytes = self.cols.div_ceil(2);
                let bytes = &packed[row * row_bytes..(row + 1) * row_bytes];
                for (pair, byte) in out.chunks_mut(2).zip(bytes) {
                    for (code, nibble) in pair.iter_mut().zip([byte & 15, byte >> 4]) {
                        *code = nibble as i8 - 8;
                    }
                }
            }
            Elements::F32(_) | Elements::F16(_) | Elements::Bf16(_) => out.fill(0),
        }
    }

    /// The scale of a group of [`GROUP`] inputs of a row; 1 for a matrix without scales.
    pub(super) fn scale(&self, row: usize, group: usize) -> f32 {
        match &self.elements {
            Elements::Int8 { scales, .. } | Elements::Int4 { scales, .. } => {
                f16_to_f32(scales[row * self.cols.div_ceil(GROUP) + group])
            }
            Elements::F32(_) | Elements::F16(_) | Elements::Bf16(_) => 1.0,
        }
    }
}

fn put<T: Copy>(to: &mut [T], at: usize, from: &[T]) {
    to[at..at + from.len()].copy_from_slice(from);
}

fn widen(bits: &[u16], to_f32: fn(u16) -> f32, out: &mut [f32]) {
    for (value, bits) in out.iter_mut().zip(bits) {
        *value = to_f32(*bits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_widened_row_is_value_by_value_the_definition() {
        let (rows, cols) = (3, 259usize);
        let bits: Vec<u16> = (0..rows * cols).map(|i| (i * 7919 % 31_000) as u16).collect();
        let values: Vec<f32> = bits.iter().map(|b| f16_to_f32(*b)).collect();
        let codes: Vec<i8> = bits.iter().map(|b| *b as i8).collect();
        let packed: Vec<u8> = (0..rows * cols.div_ceil(2)).map(|i| (i * 37) as u8).collect();
        let scales: Vec<u16> =
            (0..rows * cols.div_ceil(GROUP)).map(|i| 0x2c00 + 0x8000 * (i as u16 % 2)).collect();
        for elements in [
            MatrixElements::F32(&values),
            MatrixElements::F16(&bits),
            MatrixElements::Bf16(&bits),
            MatrixElements::Int8 { codes: &codes, scales: &scales },
            MatrixElements::Int4 { packed: &packed, scales: &scales },
        ] {
            let data = MatrixData { rows, cols, elements };
            let mut matrix = Matrix::empty(data.format(), rows, cols);
            matrix.fill(0, &data).unwrap();
            let mut row = vec![0.0; cols];
            for r in 0..rows {
                matrix.widen_row(r, &mut row);
                for (col, value) in row.iter().enumerate() {
                    assert_eq!(
                        value.to_bits(),
                        data.value(r, col).to_bits(),
                        "{:?} {r} {col}",
                        data.format()
                    );
                }
            }
        }
    }

    #[test]
    fn a_matrix_of_the_wrong_length_is_refused_with_both_numbers() {
        let data = MatrixData { rows: 2, cols: 3, elements: MatrixElements::F32(&[0.0; 5]) };
        let mut matrix = Matrix::empty(WeightFormat::F32, 2, 3);
        let message = matrix.fill(0, &data).unwrap_err().to_string();
        assert!(message.contains('5') && message.contains('6'), "{message}");
    }
}
