//! Weight matrices: packed on the device, see `struct Matrix` in common.cuh.

use std::sync::Arc;

use qwill_device::matrix::MatrixElements;
use qwill_device::{DeviceError, GROUP, MatrixData, WeightFormat};

use crate::driver::{Driver, Extent, Function, Memory};
use crate::launch::{MatrixParams, PackParams};
use crate::staging::{ALIGN, BUFFER_BYTES, Staging};

/// Outputs of a tile.
const TILE_ROWS: usize = 16;

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

/// What packing needs beside the matrix. The buffers are made for the first block and kept until loading is over.
#[derive(Debug)]
pub(super) struct Packer {
    driver: Arc<Driver>,
    pack: Function,
    staging: Option<Staging>,
}

impl Packer {
    pub(super) fn new(driver: &Arc<Driver>, pack: Function) -> Self {
        Self { driver: Arc::clone(driver), pack, staging: None }
    }

    /// Waits until everything is packed and gives the buffers back.
    pub(super) fn finish(&mut self) -> Result<(), DeviceError> {
        self.driver.synchronize("matrix")?;
        self.staging = None;
        Ok(())
    }

    /// Sends a piece of a block as stored, and packs it there.
    fn send(
        &mut self,
        matrix: &CudaMatrix,
        first_row: usize,
        piece: &MatrixData<'_>,
    ) -> Result<(), DeviceError> {
        let staging = match &mut self.staging {
            Some(staging) => staging,
            none => none.insert(Staging::new(&self.driver)?),
        };
        let mut parcel = staging.parcel();
        let (source, raw_scales) = match piece.elements {
            MatrixElements::F32(values) => (parcel.put("matrix", values)?, 0),
            MatrixElements::F16(bits) | MatrixElements::Bf16(bits) => (parcel.put("matrix", bits)?, 0),
            MatrixElements::Int8 { codes, scales } => {
                (parcel.put("matrix", codes)?, parcel.put("matrix", scales)?)
            }
            MatrixElements::Int4 { packed, scales } => {
                (parcel.put("matrix", packed)?, parcel.put("matrix", scales)?)
            }
        };
        parcel.send("matrix")?;
        let params = PackParams {
            source,
            raw_scales,
            data: matrix.data.address(),
            scales: matrix.scales.as_ref().map_or(0, Memory::address),
            rows: matrix.rows as u32,
            cols: matrix.cols as u32,
            groups: matrix.cols.div_ceil(GROUP) as u32,
            format: format_code(matrix.format),
            first_row: first_row as u32,
            source_rows: piece.rows as u32,
        };
        let words = matrix_bytes(matrix.format, TILE_ROWS, matrix.cols).div_ceil(4) as usize;
        let extent = Extent::new((words.div_ceil(256), piece.rows.div_ceil(TILE_ROWS), 1), 256);
        self.driver.launch("matrix", &self.pack, extent, &params)
    }
}

impl CudaMatrix {
    /// Memory for a matrix; contents are unspecified.
    pub(super) fn empty(
        driver: &Arc<Driver>,
        format: WeightFormat,
        rows: usize,
        cols: usize,
    ) -> Result<Self, DeviceError> {
        if rows >= 1 << 24 || cols >= 1 << 24 {
            return Err(DeviceError::shape("matrix", format!("[{rows}, {cols}] has a side of 2^24 or more")));
        }
        let (data_bytes, scale_bytes) = parts_bytes(format, rows, cols);
        let data = driver.allocate("a weight matrix", data_bytes)?;
        let scales = match scale_bytes {
            0 => None,
            bytes => Some(driver.allocate("scales of a weight matrix", bytes)?),
        };
        Ok(Self { data, scales, rows, cols, format })
    }

    /// Enqueues a block's way to the device and into its tiles; the values may be changed after the call.
    pub(super) fn fill(
        &self,
        packer: &mut Packer,
        first_row: usize,
        block: &MatrixData<'_>,
    ) -> Result<(), DeviceError> {
        block
            .check_block(self.format, self.rows, self.cols, first_row)
            .map_err(|reason| DeviceError::shape("matrix", reason))?;
        let offset = |element_bytes: usize| (first_row * self.cols * element_bytes) as u64;
        match block.elements {
            MatrixElements::F32(values) => return self.data.write("matrix", offset(4), values),
            MatrixElements::F16(bits) => return self.data.write("matrix", offset(2), bits),
            _ => {}
        }
        let tile_bytes = self.format.matrix_bytes(TILE_ROWS, self.cols).max(1) as usize;
        // Scales begin at a round address.
        let tiles = ((BUFFER_BYTES - ALIGN) / tile_bytes).clamp(1, 65_535);
        for start in (0..block.rows).step_by(tiles * TILE_ROWS) {
            let end = block.rows.min(start + tiles * TILE_ROWS);
            packer.send(self, first_row + start, &block.block(start..end))?;
        }
        Ok(())
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
