//! Weight matrices on their way to a device.

use std::ops::Range;

/// Quantisation group: consecutive inputs that share one scale.
pub const GROUP: usize = 128;

/// Blocks of a matrix that arrives in parts begin at multiples of this many rows: whole tiles of every device, and
/// whole 32-bit words of every packing along the outputs.
pub const BLOCK_ROWS: usize = 64;

/// How a weight matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Symmetric signed 8-bit codes, one f16 scale per [`GROUP`] inputs.
    Int8,
    /// Symmetric signed 4-bit codes, one f16 scale per [`GROUP`] inputs; scales may be negative.
    Int4,
}

impl WeightFormat {
    /// Bytes of a matrix of `rows × cols` in this format, without padding.
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> u64 {
        let elements = rows as u64 * cols as u64;
        let scales = rows as u64 * cols.div_ceil(GROUP) as u64 * 2;
        match self {
            Self::F32 => elements * 4,
            Self::F16 | Self::Bf16 => elements * 2,
            Self::Int8 => elements + scales,
            Self::Int4 => rows as u64 * cols.div_ceil(2) as u64 + scales,
        }
    }
    /// Name used in tables, flags and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

/// Borrowed bytes of a matrix `[rows, cols]`, row-major: row = output, column = input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatrixData<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The elements.
    pub elements: MatrixElements<'a>,
}

/// The elements of a [`MatrixData`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MatrixElements<'a> {
    /// `[rows, cols]`.
    F32(&'a [f32]),
    /// `[rows, cols]` IEEE half bits.
    F16(&'a [u16]),
    /// `[rows, cols]` bfloat16 bits.
    Bf16(&'a [u16]),
    /// Codes `[rows, cols]`, scales `[rows, ceil(cols / GROUP)]` as f16 bits; value = code · scale.
    Int8 {
        /// Signed codes.
        codes: &'a [i8],
        /// f16 bits.
        scales: &'a [u16],
    },
    /// Codes two per byte along the inputs (even input in the low nibble), stored as code + 8; each row starts
    /// on a byte: `[rows, ceil(cols / 2)]`. Scales `[rows, ceil(cols / GROUP)]` as f16 bits.
    /// value = (nibble − 8) · scale.
    Int4 {
        /// Packed nibbles.
        packed: &'a [u8],
        /// f16 bits.
        scales: &'a [u16],
    },
}

impl<'a> MatrixData<'a> {
    /// Some of the rows.
    ///
    /// # Panics
    /// If there are fewer rows, or [`MatrixData::check`] does not hold.
    #[must_use]
    pub fn block(&self, rows: Range<usize>) -> MatrixData<'a> {
        let of = |per_row: usize| rows.start * per_row..rows.end * per_row;
        let (cols, groups) = (self.cols, self.cols.div_ceil(GROUP));
        let elements = match self.elements {
            MatrixElements::F32(values) => MatrixElements::F32(&values[of(cols)]),
            MatrixElements::F16(bits) => MatrixElements::F16(&bits[of(cols)]),
            MatrixElements::Bf16(bits) => MatrixElements::Bf16(&bits[of(cols)]),
            MatrixElements::Int8 { codes, scales } => {
                MatrixElements::Int8 { codes: &codes[of(cols)], scales: &scales[of(groups)] }
            }
            MatrixElements::Int4 { packed, scales } => {
                MatrixElements::Int4 { packed: &packed[of(cols.div_ceil(2))], scales: &scales[of(groups)] }
            }
        };
        MatrixData { rows: rows.len(), cols, elements }
    }

    /// The storage format.
    pub fn format(&self) -> WeightFormat {
        match self.elements {
            MatrixElements::F32(_) => WeightFormat::F32,
            MatrixElements::F16(_) => WeightFormat::F16,
            MatrixElements::Bf16(_) => WeightFormat::Bf16,
            MatrixElements::Int8 { .. } => WeightFormat::Int8,
            MatrixElements::Int4 { .. } => WeightFormat::Int4,
        }
    }

    /// Checks the slices' lengths against the shape. The message names both numbers.
    pub fn check(&self) -> Result<(), String> {
        let elements = self.rows * self.cols;
        let scales = self.rows * self.cols.div_ceil(GROUP);
        let expect = |what: &str, found: usize, expected: usize| {
            if found == expected {
                Ok(())
            } else {
                Err(format!(
                    "matrix [{}, {}] as {}: {found} {what}, expected {expected}",
                    self.rows,
                    self.cols,
                    self.format().name()
                ))
            }
        };
        match self.elements {
            MatrixElements::F32(values) => expect("elements", values.len(), elements),
            MatrixElements::F16(bits) | MatrixElements::Bf16(bits) => {
                expect("elements", bits.len(), elements)
            }
            MatrixElements::Int8 { codes, scales: found } => {
                expect("codes", codes.len(), elements)?;
                expect("scales", found.len(), scales)
            }
            MatrixElements::Int4 { packed, scales: found } => {
                expect("packed bytes", packed.len(), self.rows * self.cols.div_ceil(2))?;
                expect("scales", found.len(), scales)
            }
        }
    }

    /// Checks that this is a block of rows of a matrix `[rows, cols]` of that format; see
    /// [`crate::Device::fill_rows`].
    pub fn check_block(
        &self,
        format: WeightFormat,
        rows: usize,
        cols: usize,
        first_row: usize,
    ) -> Result<(), String> {
        self.check()?;
        let end = first_row.saturating_add(self.rows);
        let whole =
            first_row.is_multiple_of(BLOCK_ROWS) && (self.rows.is_multiple_of(BLOCK_ROWS) || end == rows);
        if self.format() == format && self.cols == cols && end <= rows && whole {
            return Ok(());
        }
        Err(format!(
            "rows {first_row}..{end} of {} inputs as {}, for a matrix [{rows}, {cols}] of {} in blocks of \
             {BLOCK_ROWS} rows",
            self.cols,
            self.format().name(),
            format.name()
        ))
    }

    /// The value at `[row, col]` in f32: the definition that every device's dequantisation must equal bit for
    /// bit (one f32 multiplication of an integer by a scale widened from f16).
    pub fn value(&self, row: usize, col: usize) -> f32 {
        use crate::numeric::{bf16_to_f32, f16_to_f32};
        let at = row * self.cols + col;
        let group = row * self.cols.div_ceil(GROUP) + col / GROUP;
        match self.elements {
            MatrixElements::F32(values) => values[at],
            MatrixElements::F16(bits) => f16_to_f32(bits[at]),
            MatrixElements::Bf16(bits) => bf16_to_f32(bits[at]),
            MatrixElements::Int8 { codes, scales } => f32::from(codes[at]) * f16_to_f32(scales[group]),
            MatrixElements::Int4 { packed, scales } => {
                let byte = packed[row * self.cols.div_ceil(2) + col / 2];
                let nibble = if col.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
                (f32::from(nibble) - 8.0) * f16_to_f32(scales[group])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_the_matrix_format_and_whole_blocks_of_its_rows() {
        let values = [0.0; 3 * 130];
        let block =
            |rows: usize| MatrixData { rows, cols: 3, elements: MatrixElements::F32(&values[..rows * 3]) };
        let check = |rows, first_row| block(rows).check_block(WeightFormat::F32, 130, 3, first_row);
        for (rows, first_row) in [(130, 0), (64, 0), (128, 0), (64, 64), (66, 64), (2, 128)] {
            assert_eq!(check(rows, first_row), Ok(()), "{rows} from {first_row}");
        }
        for (rows, first_row) in [(65, 0), (64, 32), (64, 128), (130, 64), (1, 128)] {
            let reason = check(rows, first_row).unwrap_err();
            assert!(reason.contains(&format!("rows {first_row}..{}", first_row + rows)), "{reason}");
        }
        assert_eq!(block(130).block(64..130).check_block(WeightFormat::F32, 130, 3, 64), Ok(()));
        assert!(block(64).check_block(WeightFormat::F16, 130, 3, 0).is_err());
        assert!(block(64).check_block(WeightFormat::F32, 130, 4, 0).is_err());
    }
}
