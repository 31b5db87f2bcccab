use std::ops::Range;

use qwill_device::matrix::MatrixElements;
use qwill_device::numeric::{bf16_to_f32, f16_to_f32};
use qwill_device::{GROUP, MatrixData, WeightFormat};

use crate::memory::Memory;
use crate::quantize::{int4_rows, int8_rows};

/// A matrix that a model has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MatrixSpec {
    /// Canonical module name, such as `layers.0.mlp.up_proj`.
    pub name: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// A weight matrix `[rows, cols]`, row-major, or some rows of one. Its memory can be filled again with another.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    pub(crate) format: WeightFormat,
    /// In the machine's byte order.
    pub(crate) elements: Memory,
    /// f16 bits `[rows, ceil(cols / GROUP)]`; empty for a dense matrix.
    pub(crate) scales: Memory,
}

impl Default for Matrix {
    /// No rows, no columns.
    fn default() -> Self {
        let (elements, scales) = (Memory::default(), Memory::default());
        Self { rows: 0, cols: 0, format: WeightFormat::F32, elements, scales }
    }
}

/// Bytes of a row's elements, without scales.
pub(crate) fn row_bytes(format: WeightFormat, cols: usize) -> usize {
    match format {
        WeightFormat::F32 => cols * 4,
        WeightFormat::F16 | WeightFormat::Bf16 => cols * 2,
        WeightFormat::Int8 => cols,
        WeightFormat::Int4 => cols.div_ceil(2),
    }
}

/// Bytes of a row's scales.
pub(crate) fn scale_row_bytes(format: WeightFormat, cols: usize) -> usize {
    match format {
        WeightFormat::Int8 | WeightFormat::Int4 => cols.div_ceil(GROUP) * 2,
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => 0,
    }
}

impl Matrix {
    /// The elements as a device takes them.
    pub fn data(&self) -> MatrixData<'_> {
        let elements = match self.format {
            WeightFormat::F32 => MatrixElements::F32(self.elements.numbers()),
            WeightFormat::F16 => MatrixElements::F16(self.elements.numbers()),
            WeightFormat::Bf16 => MatrixElements::Bf16(self.elements.numbers()),
            WeightFormat::Int8 => {
                MatrixElements::Int8 { codes: self.elements.numbers(), scales: self.scales.numbers() }
            }
            WeightFormat::Int4 => {
                MatrixElements::Int4 { packed: self.elements.bytes(), scales: self.scales.numbers() }
            }
        };
        MatrixData { rows: self.rows, cols: self.cols, elements }
    }

    /// The storage format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Gives it shape and format; contents are unspecified.
    pub(crate) fn reshape(&mut self, format: WeightFormat, rows: usize, cols: usize) {
        (self.rows, self.cols, self.format) = (rows, cols, format);
        self.elements.resize(rows * row_bytes(format, cols));
        self.scales.resize(rows * scale_row_bytes(format, cols));
    }

    /// Rounds dense rows in the machine's byte order into this matrix, which has its shape and its format, int4 or
    /// int8. The error is the place of the first group whose scale is not finite: its row, and its columns.
    pub(crate) fn round(&mut self, dense: WeightFormat, from: &Memory) -> Result<(), (usize, Range<usize>)> {
        match dense {
            WeightFormat::F32 => self.round_elements(from.numbers(), |value: f32| value),
            WeightFormat::F16 => self.round_elements(from.numbers(), f16_to_f32),
            _ => self.round_elements(from.numbers(), bf16_to_f32),
        }
        let groups = self.cols.div_ceil(GROUP);
        let infinite = |bits: &u16| !f16_to_f32(*bits).is_finite();
        match self.scales.numbers::<u16>().iter().position(infinite) {
            None => Ok(()),
            Some(at) => {
                let first = at % groups * GROUP;
                Err((at / groups, first..self.cols.min(first + GROUP)))
            }
        }
    }

    fn round_elements<T: Copy>(&mut self, values: &[T], widen: impl Fn(T) -> f32) {
        let scales = self.scales.numbers_mut();
        match self.format {
            WeightFormat::Int4 => int4_rows(values, self.cols, widen, self.elements.bytes_mut(), scales),
            _ => int8_rows(values, self.cols, widen, self.elements.numbers_mut(), scales),
        }
    }
}
