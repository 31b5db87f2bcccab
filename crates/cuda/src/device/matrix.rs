//! Weight matrices: packed on the device, see `struct Matrix` in common.cuh.

use std::sync::Arc;

use qwill_device::matrix::MatrixElements;
use qwill_device::{DeviceError, GROUP, MatrixData, WeightFormat};

use crate::driver::{Driver, Extent, Function, Memory};
use crate::launch::{MatrixParams, PackParams};

/// Outputs of a tile.
const TILE_ROWS: usize = 16;

/// Bytes of the stored matrix that are on the device beside the packed one while it is packed.
const STAGE_BYTES: usize = 256 << 20;

/// A packed matrix `[rows, cols]`.
#[derive(Debug)]
pub struct CudaMatrix {
    data: Memory,
    scales: Option<Memory>,
    rows: usize,
    cols: usize,
    format: WeightFormat,
}

/// Codes and scales as the device stores them: whole tiles of 16 × 128, but F32 and F16 as they are.
fn parts_bytes(format: WeightFormat, rows: usize, cols: usize) -> (u64, u64) {
    let tiles = rows.div_ceil(TILE_ROWS) as u64 * cols.div_ceil(GROUP) as u64;
    let elements = tiles * (TILE_ROWS * GROUP) as u64;
    let scales = tiles * TILE_ROWS as u64 * 2;
    match format {
        WeightFormat::F32 | WeightFormat::F16 => (format.matrix_bytes(rows, cols), 0),
        WeightFormat::Bf16 => (elements * 2, 0),
        WeightFormat::Int8 => (elements, scales),
        WeightFormat::Int4 => (elements / 2, scales),
    }
}

/// Bytes of a packed matrix.
pub(super) fn matrix_bytes(format: WeightFormat, rows: usize, cols: usize) -> u64 {
    let (data, scales) = parts_bytes(format, rows, cols);
    data + scales
}

fn format_code(format: WeightFormat) -> u32 {
    match format {
        WeightFormat::F32 => 0,
        WeightFormat::F16 => 1,
        WeightFormat::Bf16 => 2,
        WeightFormat::Int8 => 3,
        WeightFormat::Int4 => 4,
    }
}

/// A matrix's bytes as stored, row by row.
enum Stored<'a> {
    Bytes(&'a [u8]),
    Signed(&'a [i8]),
    Halves(&'a [u16]),
}

impl Stored<'_> {
    fn write(&self, memory: &Memory, from: usize, to: usize) -> Result<(), DeviceError> {
        match self {
            Self::Bytes(values) => memory.write("matrix", 0, &values[from..to]),
            Self::Signed(values) => memory.write("matrix", 0, &values[from..to]),
            Self::Halves(values) => memory.write("matrix", 0, &values[from..to]),
        }
    }
    fn element_bytes(&self) -> usize {
        if matches!(self, Self::Halves(_)) { 2 } else { 1 }
    }
}

impl CudaMatrix {
    pub(super) fn new(
        driver: &Arc<Driver>,
        pack: &Function,
        data: &MatrixData<'_>,
    ) -> Result<Self, DeviceError> {
        data.check().map_err(|reason| DeviceError::shape("matrix", reason))?;
        let (rows, cols, format) = (data.rows, data.cols, data.format());
        if rows >= 1 << 24 || cols >= 1 << 24 {
            return Err(DeviceError::shape("matrix", format!("[{rows}, {cols}] has a side of 2^24 or more")));
        }
        let (data_bytes, scale_bytes) = parts_bytes(format, rows, cols);
        let packed = driver.allocate("a weight matrix", data_bytes)?;
        let scales = match scale_bytes {
            0 => None,
            bytes => Some(driver.allocate("scales of a weight matrix", bytes)?),
        };
        let matrix = Self { data: packed, scales, rows, cols, format };
        match data.elements {
            MatrixElements::F32(values) => matrix.data.write("matrix", 0, values)?,
            MatrixElements::F16(bits) => matrix.data.write("matrix", 0, bits)?,
            MatrixElements::Bf16(bits) => matrix.pack(driver, pack, &Stored::Halves(bits), cols, &[])?,
            MatrixElements::Int8 { codes, scales } => {
                matrix.pack(driver, pack, &Stored::Signed(codes), cols, scales)?;
            }
            MatrixElements::Int4 { packed, scales } => {
                matrix.pack(driver, pack, &Stored::Bytes(packed), cols.div_ceil(2), scales)?;
            }
        }
        Ok(matrix)
    }

    /// Uploads some rows at a time as stored and packs them there; `row_elements` of `stored` make a row.
    fn pack(
        &self,
        driver: &Arc<Driver>,
        pack: &Function,
        stored: &Stored<'_>,
        row_elements: usize,
        raw_scales: &[u16],
    ) -> Result<(), DeviceError> {
        let row_bytes = (row_elements * stored.element_bytes()).max(1);
        let fitting = (STAGE_BYTES / row_bytes).min(65_535 * TILE_ROWS) / TILE_ROWS * TILE_ROWS;
        let stage_rows = fitting.max(TILE_ROWS).min(self.rows.next_multiple_of(TILE_ROWS));
        let groups = self.cols.div_ceil(GROUP);
        let stage = driver.allocate("a matrix being packed", (stage_rows * row_bytes) as u64)?;
        let scale_stage = driver.allocate("scales being packed", (stage_rows * groups * 2) as u64)?;
        for first in (0..self.rows).step_by(stage_rows) {
            let rows = stage_rows.min(self.rows - first);
            stored.write(&stage, first * row_elements, (first + rows) * row_elements)?;
            if !raw_scales.is_empty() {
                scale_stage.write("matrix", 0, &raw_scales[first * groups..(first + rows) * groups])?;
            }
            let params = PackParams {
                source: stage.address(),
                raw_scales: scale_stage.address(),
                data: self.data.address(),
                scales: self.scales.as_ref().map_or(0, Memory::address),
                rows: self.rows as u32,
                cols: self.cols as u32,
                groups: groups as u32,
                format: format_code(self.format),
                first_row: first as u32,
                source_rows: rows as u32,
            };
            let words = matrix_bytes(self.format, TILE_ROWS, self.cols).div_ceil(4) as usize;
            let extent = Extent::new((words.div_ceil(256), rows.div_ceil(TILE_ROWS), 1), 256);
            driver.launch("matrix", pack, extent, &params)?;
        }
        driver.synchronize("matrix")
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }
    pub(super) fn cols(&self) -> usize {
        self.cols
    }
    pub(super) fn format(&self) -> WeightFormat {
        self.format
    }

    pub(super) fn params(&self) -> MatrixParams {
        MatrixParams {
            data: self.data.address(),
            scales: self.scales.as_ref().map_or(0, Memory::address),
            rows: self.rows as u32,
            cols: self.cols as u32,
            groups: self.cols.div_ceil(GROUP) as u32,
            format: format_code(self.format),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_bytes_are_whole_tiles() {
        assert_eq!(matrix_bytes(WeightFormat::Int4, 16, 128), 1024 + 32);
        assert_eq!(matrix_bytes(WeightFormat::Int4, 17, 129), 4 * (1024 + 32));
        assert_eq!(matrix_bytes(WeightFormat::Int8, 16, 128), 2048 + 32);
        assert_eq!(matrix_bytes(WeightFormat::Bf16, 1, 1), 4096);
        assert_eq!(matrix_bytes(WeightFormat::F32, 3, 5), 60);
        // 5120 × 17408 at 4 bits and a 16-bit scale per 128: no padding.
        assert_eq!(
            matrix_bytes(WeightFormat::Int4, 5120, 17408),
            WeightFormat::Int4.matrix_bytes(5120, 17408)
        );
    }
}
