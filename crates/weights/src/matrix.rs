use std::borrow::Cow;

use qwill_device::matrix::MatrixElements;
use qwill_device::numeric::{bf16_to_f32, f16_to_f32};
use qwill_device::{MatrixData, WeightFormat};

use crate::quantize::{int4_rows, int8_rows};

/// A weight matrix `[rows, cols]`, row-major, borrowed from the checkpoint where its bytes can be used as they
/// lie and owned otherwise.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    pub(crate) elements: Elements<'a>,
}

/// The owned or borrowed form of [`MatrixElements`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Elements<'a> {
    F32(Cow<'a, [f32]>),
    F16(Cow<'a, [u16]>),
    Bf16(Cow<'a, [u16]>),
    Int8 { codes: Vec<i8>, scales: Cow<'a, [u16]> },
    Int4 { packed: Cow<'a, [u8]>, scales: Cow<'a, [u16]> },
}

impl<'a> Matrix<'a> {
    /// The elements as a device takes them.
    pub fn data(&self) -> MatrixData<'_> {
        let elements = match &self.elements {
            Elements::F32(values) => MatrixElements::F32(values),
            Elements::F16(bits) => MatrixElements::F16(bits),
            Elements::Bf16(bits) => MatrixElements::Bf16(bits),
            Elements::Int8 { codes, scales } => MatrixElements::Int8 { codes, scales },
            Elements::Int4 { packed, scales } => MatrixElements::Int4 { packed, scales },
        };
        MatrixData { rows: self.rows, cols: self.cols, elements }
    }

    /// The storage format.
    pub fn format(&self) -> WeightFormat {
        self.data().format()
    }

    /// f16 bits of the scales `[rows, ceil(cols / GROUP)]`; empty for a dense matrix.
    pub(crate) fn scales(&self) -> &[u16] {
        match &self.elements {
            Elements::Int8 { scales, .. } | Elements::Int4 { scales, .. } => scales,
            _ => &[],
        }
    }

    /// Rounds a dense matrix to int4 or int8; every other combination is returned as it is.
    pub(crate) fn quantized(self, format: WeightFormat) -> Matrix<'a> {
        let (rows, cols) = (self.rows, self.cols);
        let elements = match format {
            WeightFormat::Int4 => {
                let (packed, scales) = match &self.elements {
                    Elements::F32(values) => int4_rows(values, rows, cols, |value| value),
                    Elements::F16(bits) => int4_rows(bits, rows, cols, f16_to_f32),
                    Elements::Bf16(bits) => int4_rows(bits, rows, cols, bf16_to_f32),
                    Elements::Int8 { .. } | Elements::Int4 { .. } => return self,
                };
                Elements::Int4 { packed: packed.into(), scales: scales.into() }
            }
            WeightFormat::Int8 => {
                let (codes, scales) = match &self.elements {
                    Elements::F32(values) => int8_rows(values, rows, cols, |value| value),
                    Elements::F16(bits) => int8_rows(bits, rows, cols, f16_to_f32),
                    Elements::Bf16(bits) => int8_rows(bits, rows, cols, bf16_to_f32),
                    Elements::Int8 { .. } | Elements::Int4 { .. } => return self,
                };
                Elements::Int8 { codes, scales: scales.into() }
            }
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => return self,
        };
        Matrix { rows, cols, elements }
    }
}
