//! Activations and other memory that ops work in.

use std::sync::Arc;

use qwill_device::numeric::{bf16_to_f32, f32_to_bf16};
use qwill_device::{DeviceError, GROUP, Precision};

use super::Check;
use crate::driver::{Driver, Memory};

/// A buffer `[capacity_rows, cols]` on the device: bf16 activations, each row zero-padded to whole groups of columns,
/// or f32.
#[derive(Debug)]
pub struct CudaBuffer {
    pub(super) memory: Memory,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements from row to row.
    pub(super) stride: usize,
    pub(super) precision: Precision,
}

impl CudaBuffer {
    pub(super) fn new(
        driver: &Arc<Driver>,
        rows: usize,
        cols: usize,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let bytes = Self::bytes(rows, cols, precision);
        let memory = driver.allocate("an activation buffer", bytes)?;
        // The padding of rows is read by products and never written.
        memory.clear("buffer", 0, bytes)?;
        Ok(Self { memory, rows, cols, stride: Self::stride(cols, precision), precision })
    }

    fn stride(cols: usize, precision: Precision) -> usize {
        match precision {
            Precision::Activation => cols.next_multiple_of(GROUP),
            Precision::Full => cols,
        }
    }

    pub(super) fn bytes(rows: usize, cols: usize, precision: Precision) -> u64 {
        let element_bytes = match precision {
            Precision::Activation => 2,
            Precision::Full => 4,
        };
        rows as u64 * Self::stride(cols, precision) as u64 * element_bytes
    }

    /// The first rows, widened.
    pub(super) fn read(&self, rows: usize) -> Result<Vec<f32>, DeviceError> {
        Check("read").buffer("buffer", self, rows, 0)?;
        let len = rows * self.stride;
        match self.precision {
            Precision::Full => self.memory.read("read", 0, len),
            Precision::Activation => {
                let bits: Vec<u16> = self.memory.read("read", 0, len)?;
                let rows = bits.chunks(self.stride.max(1));
                Ok(rows.flat_map(|row| row[..self.cols].iter().map(|bits| bf16_to_f32(*bits))).collect())
            }
        }
    }

    /// Sets the first rows, rounded.
    pub(super) fn write(&self, values: &[f32]) -> Result<(), DeviceError> {
        let check = Check("write");
        check.that(self.cols > 0 && values.len().is_multiple_of(self.cols), || {
            format!("{} values for rows of {}", values.len(), self.cols)
        })?;
        check.buffer("buffer", self, values.len() / self.cols, 0)?;
        match self.precision {
            Precision::Full => self.memory.write("write", 0, values),
            Precision::Activation => {
                let padding = std::iter::repeat_n(0, self.stride - self.cols);
                let rows = values.chunks(self.cols);
                let bits: Vec<u16> = rows
                    .flat_map(|row| row.iter().map(|value| f32_to_bf16(*value)).chain(padding.clone()))
                    .collect();
                self.memory.write("write", 0, &bits)
            }
        }
    }
}

/// A short f32 vector on the device.
#[derive(Debug)]
pub struct CudaVector {
    pub(super) memory: Memory,
    pub(super) len: usize,
}

/// Memory that grows to the largest size asked for.
#[derive(Debug)]
pub(super) struct Scratch {
    name: &'static str,
    memory: Option<Memory>,
}

impl Scratch {
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, memory: None }
    }

    /// At least `bytes`; growing drops the contents.
    pub(super) fn at_least(&mut self, driver: &Arc<Driver>, bytes: u64) -> Result<&Memory, DeviceError> {
        let memory = match self.memory.take() {
            Some(memory) if memory.bytes() >= bytes => memory,
            small => {
                drop(small);
                driver.allocate(self.name, bytes)?
            }
        };
        Ok(self.memory.insert(memory))
    }
}
