//! Memory that numbers of any type can be read into, and typed views of bytes. All unsafe code is here.
#![expect(unsafe_code, reason = "viewing bytes as numbers without a copy")]

use std::borrow::Cow;

/// Numbers that any bit pattern is a valid value of, stored little-endian in files.
pub(crate) trait Number: Copy + 'static {
    /// Decodes one from exactly `size_of::<Self>()` bytes.
    fn decode(bytes: &[u8]) -> Self;
}

macro_rules! number {
    ($($name:ty),*) => {$(
        impl Number for $name {
            #[inline]
            fn decode(bytes: &[u8]) -> Self {
                let mut word = [0; size_of::<Self>()];
                word.copy_from_slice(bytes);
                Self::from_le_bytes(word)
            }
        }
    )*};
}
number!(u8, i8, u16, u32, i64, f32);

/// Little-endian bytes as numbers: a view where the machine's byte order and the address allow it, else a
/// copy. Bytes after the last whole number are ignored.
pub(crate) fn numbers<T: Number>(bytes: &[u8]) -> Cow<'_, [T]> {
    let whole = bytes.len() - bytes.len() % size_of::<T>();
    let bytes = &bytes[..whole];
    if cfg!(target_endian = "little") {
        // SAFETY: `Number` is implemented only for plain integers and floats, of which every bit pattern is a
        // value; `align_to` yields only aligned elements inside `bytes`.
        let (head, view, tail) = unsafe { bytes.align_to::<T>() };
        if head.is_empty() && tail.is_empty() {
            return Cow::Borrowed(view);
        }
    }
    Cow::Owned(bytes.chunks_exact(size_of::<T>()).map(T::decode).collect())
}

/// Bytes at an address that suits every [`Number`], kept to be filled again and again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Memory {
    words: Vec<u64>,
    bytes: usize,
}

impl Memory {
    /// Makes it this long; contents are unspecified. Memory that was longer is not given back.
    pub(crate) fn resize(&mut self, bytes: usize) {
        let words = bytes.div_ceil(size_of::<u64>());
        if words > self.words.len() {
            // Not kept while it grows: its contents do not matter.
            self.words = Vec::new();
            self.words = vec![0; words];
        }
        self.bytes = bytes;
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: any bits are u8 values, and u8 has no alignment: all bytes lie in the middle part.
        let (_, bytes, _) = unsafe { self.words.align_to() };
        &bytes[..self.bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; any bytes are u64 values.
        let (_, bytes, _) = unsafe { self.words.align_to_mut() };
        &mut bytes[..self.bytes]
    }

    /// As numbers in the machine's byte order.
    pub(crate) fn numbers<T: Number>(&self) -> &[T] {
        // SAFETY: any bits are values of T; the words are aligned for it, so that the first part is empty.
        let (_, numbers, _) = unsafe { self.bytes().align_to() };
        numbers
    }

    /// As numbers in the machine's byte order.
    pub(crate) fn numbers_mut<T: Number>(&mut self) -> &mut [T] {
        // SAFETY: as above; any T are bytes.
        let (_, numbers, _) = unsafe { self.bytes_mut().align_to_mut() };
        numbers
    }

    /// From the files' byte order to the machine's, for numbers of this many bytes.
    pub(crate) fn make_native(&mut self, number_bytes: usize) {
        if cfg!(target_endian = "big") {
            self.bytes_mut().chunks_exact_mut(number_bytes).for_each(<[u8]>::reverse);
        }
    }
}

impl PartialEq for Memory {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_and_copies_agree_at_every_alignment() {
        let bytes: Vec<u8> = (0..64u8).map(|n| n.wrapping_mul(7)).collect();
        for start in 0..8 {
            let expected: Vec<u32> = bytes[start..start + 40]
                .chunks_exact(4)
                .map(|c| {
                    u32::from(c[0]) | u32::from(c[1]) << 8 | u32::from(c[2]) << 16 | u32::from(c[3]) << 24
                })
                .collect();
            assert_eq!(numbers::<u32>(&bytes[start..start + 40]).as_ref(), expected);
        }
        assert_eq!(numbers::<u16>(&[1, 2, 3]).as_ref(), [0x0201]);
        assert!(numbers::<f32>(&[]).is_empty());
    }

    #[test]
    fn memory_is_of_the_length_asked_for_and_kept() {
        let mut memory = Memory::default();
        assert!(memory.bytes().is_empty() && memory.numbers::<f32>().is_empty());
        for bytes in [9, 64, 3, 0, 64] {
            memory.resize(bytes);
            memory.bytes_mut().fill(0xab);
            assert_eq!((memory.bytes().len(), memory.numbers::<u16>().len()), (bytes, bytes / 2));
            assert!(memory.numbers::<u16>().iter().all(|word| *word == 0xabab));
        }
        assert_eq!(memory.words.len(), 8);
        memory.numbers_mut::<u32>()[15] = 0x0403_0201;
        assert_eq!(memory.bytes()[60..], 0x0403_0201u32.to_ne_bytes());
    }

    #[test]
    fn only_the_used_bytes_are_compared() {
        let of = |bytes: usize, value: u8| {
            let mut memory = Memory::default();
            memory.resize(16);
            memory.bytes_mut().fill(value);
            memory.resize(bytes);
            memory.bytes_mut().fill(1);
            memory
        };
        assert_eq!(of(9, 5), of(9, 6));
        assert_ne!(of(9, 5), of(8, 5));
    }
}
