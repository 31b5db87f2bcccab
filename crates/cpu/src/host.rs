//! The host store of both CPU devices: pages and states as bytes, in granules of one allocation.

use qwill_device::{CacheSpec, DeviceError};

/// Bytes that are converted at a time.
const BLOCK_BYTES: usize = 4096;

/// Pages and states outside the caches; see [`qwill_device::Device::host_store`].
#[derive(Debug)]
pub struct HostStore {
    bytes: Vec<u8>,
    granule_bytes: usize,
}

/// A number that any bits are a value of, stored in the machine's byte order.
pub(crate) trait Number: Copy {
    /// Writes exactly its bytes.
    fn put(self, bytes: &mut [u8]);
    /// The reverse of [`Number::put`].
    fn take(bytes: &[u8]) -> Self;
}

macro_rules! number {
    ($($name:ty),*) => {$(
        impl Number for $name {
            fn put(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn take(bytes: &[u8]) -> Self {
                let mut word = [0; size_of::<Self>()];
                word.copy_from_slice(bytes);
                Self::from_ne_bytes(word)
            }
        }
    )*};
}
number!(i8, u16, f32);

impl HostStore {
    pub(crate) fn new(spec: &CacheSpec, granules: usize) -> Self {
        let granule_bytes = spec.granule_bytes() as usize;
        Self { bytes: vec![0; granules.saturating_mul(granule_bytes)], granule_bytes }
    }

    /// Fails unless the store was made for such caches and has the granules.
    pub(crate) fn check(
        &self,
        op: &'static str,
        spec: &CacheSpec,
        granules: &[u32],
    ) -> Result<(), DeviceError> {
        let needed = spec.granule_bytes();
        if needed != self.granule_bytes as u64 {
            let reason = format!("granules of {} bytes, the cache needs {needed}", self.granule_bytes);
            return Err(DeviceError::shape(op, reason));
        }
        granules.iter().try_for_each(|granule| self.check_granule(op, *granule))
    }

    fn check_granule(&self, op: &'static str, granule: u32) -> Result<(), DeviceError> {
        let count = self.bytes.len() / self.granule_bytes;
        if (granule as usize) < count {
            return Ok(());
        }
        Err(DeviceError::shape(op, format!("granule {granule} of {count}")))
    }

    pub(crate) fn read_granule(&self, granule: u32) -> Result<&[u8], DeviceError> {
        self.check_granule("read_granule", granule)?;
        Ok(&self.bytes[granule as usize * self.granule_bytes..][..self.granule_bytes])
    }

    pub(crate) fn write_granule(&mut self, granule: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check_granule("write_granule", granule)?;
        if bytes.len() != self.granule_bytes {
            let reason = format!("{} bytes, a granule has {}", bytes.len(), self.granule_bytes);
            return Err(DeviceError::shape("write_granule", reason));
        }
        self.bytes[granule as usize * self.granule_bytes..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Writes numbers one after another to granules that [`HostStore::check`] accepts and that have room.
    pub(crate) fn writer<'a>(&'a mut self, granules: &'a [u32]) -> Writer<'a> {
        Writer { store: self, granules, at: 0 }
    }

    /// The reverse of [`HostStore::writer`].
    pub(crate) fn reader<'a>(&'a self, granules: &'a [u32]) -> Reader<'a> {
        Reader { store: self, granules, at: 0 }
    }

    /// Where the byte `at` of a string in granules lies, and how many follow it there.
    fn place(&self, granules: &[u32], at: usize) -> (usize, usize) {
        let (index, offset) = (at / self.granule_bytes, at % self.granule_bytes);
        (granules[index] as usize * self.granule_bytes + offset, self.granule_bytes - offset)
    }
}

/// See [`HostStore::writer`].
pub(crate) struct Writer<'a> {
    store: &'a mut HostStore,
    granules: &'a [u32],
    at: usize,
}

impl Writer<'_> {
    pub(crate) fn numbers<T: Number>(&mut self, values: &[T]) {
        let mut block = [0; BLOCK_BYTES];
        for values in values.chunks(BLOCK_BYTES / size_of::<T>()) {
            for (bytes, value) in block.chunks_exact_mut(size_of::<T>()).zip(values) {
                value.put(bytes);
            }
            self.bytes(&block[..size_of_val(values)]);
        }
    }

    fn bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (start, room) = self.store.place(self.granules, self.at);
            let (here, rest) = bytes.split_at(room.min(bytes.len()));
            self.store.bytes[start..start + here.len()].copy_from_slice(here);
            self.at += here.len();
            bytes = rest;
        }
    }
}

/// See [`HostStore::reader`].
pub(crate) struct Reader<'a> {
    store: &'a HostStore,
    granules: &'a [u32],
    at: usize,
}

impl Reader<'_> {
    pub(crate) fn numbers<T: Number>(&mut self, values: &mut [T]) {
        let mut block = [0; BLOCK_BYTES];
        for values in values.chunks_mut(BLOCK_BYTES / size_of::<T>()) {
            self.bytes(&mut block[..size_of_val(values)]);
            for (bytes, value) in block.chunks_exact(size_of::<T>()).zip(values) {
                *value = T::take(bytes);
            }
        }
    }

    fn bytes(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let (start, room) = self.store.place(self.granules, self.at);
            let (here, rest) = bytes.split_at_mut(room.min(bytes.len()));
            here.copy_from_slice(&self.store.bytes[start..start + here.len()]);
            self.at += here.len();
            bytes = rest;
        }
    }
}
