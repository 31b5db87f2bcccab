//! Random weight matrices in every storage format.

use std::rc::Rc;

use super::Random;
use crate::matrix::{BLOCK_ROWS, MatrixElements};
use crate::numeric::{f32_to_bf16, f32_to_f16};
use crate::{Device, DeviceError, GROUP, MatrixData, WeightFormat};

/// Every storage format.
pub(super) const FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4];

/// A matrix on the host.
#[derive(Debug, Clone)]
pub(super) struct HostMatrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) format: WeightFormat,
    floats: Vec<f32>,
    halves: Vec<u16>,
    bytes: Vec<u8>,
    scales: Vec<u16>,
}

impl HostMatrix {
    /// Random elements such that a product with inputs of size 1 is of size 1; half of the scales are negative.
    pub(super) fn random(random: &mut Random, format: WeightFormat, rows: usize, cols: usize) -> Rc<Self> {
        let deviation = 1.0 / (cols.max(1) as f32).sqrt();
        let mut matrix = Self {
            rows,
            cols,
            format,
            floats: Vec::new(),
            halves: Vec::new(),
            bytes: Vec::new(),
            scales: Vec::new(),
        };
        let elements = rows * cols;
        match format {
            WeightFormat::F32 => matrix.floats = random.normals(elements, deviation),
            WeightFormat::F16 => {
                matrix.halves = random.normals(elements, deviation).into_iter().map(f32_to_f16).collect();
            }
            WeightFormat::Bf16 => {
                matrix.halves = random.normals(elements, deviation).into_iter().map(f32_to_bf16).collect();
            }
            WeightFormat::Int8 => {
                matrix.bytes = (0..elements).map(|_| random.bits() as u8).collect();
                matrix.scales = scales(random, rows, cols, deviation / 74.0);
            }
            WeightFormat::Int4 => {
                matrix.bytes = (0..rows * cols.div_ceil(2)).map(|_| random.bits() as u8).collect();
                matrix.scales = scales(random, rows, cols, deviation / 4.6);
            }
        }
        Rc::new(matrix)
    }

    /// On the device, block by block from the last where there are several.
    pub(super) fn place<D: Device>(&self, device: &mut D) -> Result<D::Matrix, DeviceError> {
        self.with(|data| {
            let mut matrix = device.empty_matrix(self.format, self.rows, self.cols)?;
            for first_row in (0..self.rows).step_by(BLOCK_ROWS).rev() {
                let block = data.block(first_row..self.rows.min(first_row + BLOCK_ROWS));
                device.fill_rows(&mut matrix, first_row, &block)?;
            }
            Ok(matrix)
        })
    }

    /// As a device takes it. Int8 codes are the bytes reinterpreted, hence the copy.
    pub(super) fn with<T>(&self, use_data: impl FnOnce(&MatrixData<'_>) -> T) -> T {
        let codes: Vec<i8>;
        let elements = match self.format {
            WeightFormat::F32 => MatrixElements::F32(&self.floats),
            WeightFormat::F16 => MatrixElements::F16(&self.halves),
            WeightFormat::Bf16 => MatrixElements::Bf16(&self.halves),
            WeightFormat::Int8 => {
                codes = self.bytes.iter().map(|byte| *byte as i8).collect();
                MatrixElements::Int8 { codes: &codes, scales: &self.scales }
            }
            WeightFormat::Int4 => MatrixElements::Int4 { packed: &self.bytes, scales: &self.scales },
        };
        use_data(&MatrixData { rows: self.rows, cols: self.cols, elements })
    }

    pub(super) fn describe(&self) -> String {
        format!("{} [{}, {}]", self.format.name(), self.rows, self.cols)
    }
}

fn scales(random: &mut Random, rows: usize, cols: usize, size: f32) -> Vec<u16> {
    let scale = |random: &mut Random| {
        let magnitude = random.uniform(0.5, 1.5) * size;
        f32_to_f16(if random.chance(0.5) { -magnitude } else { magnitude })
    };
    (0..rows * cols.div_ceil(GROUP)).map(|_| scale(random)).collect()
}
