//! The way of large data to the device: through a few page-locked buffers that are used again and again, so that the
//! host fills one while the others are copied.

use std::sync::Arc;

use qwill_device::DeviceError;

use crate::driver::{Driver, Element, Memory};
use crate::pinned::Pinned;

/// Buffers: one that is filled, one that is copied, one that waits.
const BUFFERS: usize = 3;
/// Bytes of a buffer, on either side: a copy of 8 MiB takes 150 µs or more, a hundred times what enqueuing it takes.
pub(crate) const BUFFER_BYTES: usize = 8 << 20;
/// Arrays in a buffer begin at multiples of this.
pub(crate) const ALIGN: usize = 256;

/// The buffers.
#[derive(Debug)]
pub(crate) struct Staging {
    buffers: Vec<Buffer>,
    next: usize,
}

/// Page-locked memory, and as much on the device that it is copied to.
#[derive(Debug)]
struct Buffer {
    host: Pinned,
    device: Memory,
}

/// Arrays on their way in one buffer.
#[derive(Debug)]
pub(crate) struct Parcel<'a> {
    buffer: &'a mut Buffer,
    used: usize,
}

impl Staging {
    pub(crate) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        let buffer = |_| -> Result<Buffer, DeviceError> {
            let device = driver.allocate("a buffer for uploads", BUFFER_BYTES as u64)?;
            Ok(Buffer { host: Pinned::new(driver, BUFFER_BYTES / 4)?, device })
        };
        Ok(Self { buffers: (0..BUFFERS).map(buffer).collect::<Result<_, _>>()?, next: 0 })
    }

    /// The buffer that was filled longest ago, empty.
    pub(crate) fn parcel(&mut self) -> Parcel<'_> {
        let buffer = &mut self.buffers[self.next];
        self.next = (self.next + 1) % BUFFERS;
        Parcel { buffer, used: 0 }
    }
}

impl Parcel<'_> {
    /// Adds an array and returns where it will be on the device. Waits for the buffer's last copy.
    pub(crate) fn put<T: Element>(&mut self, op: &'static str, values: &[T]) -> Result<u64, DeviceError> {
        let start = self.used.next_multiple_of(ALIGN);
        self.buffer.host.put(op, start, values)?;
        self.used = start + size_of_val(values);
        Ok(self.buffer.device.address() + start as u64)
    }

    /// Enqueues the copy. What is enqueued afterwards finds the arrays on the device, until as many parcels as there are
    /// buffers have followed.
    pub(crate) fn send(self, op: &'static str) -> Result<(), DeviceError> {
        self.buffer.host.send_bytes(op, self.used, &self.buffer.device)
    }
}
