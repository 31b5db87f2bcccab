//! Where bytes live: a mapped file or static memory, and typed views of them. All unsafe code is here.
#![expect(unsafe_code, reason = "mapping files and viewing bytes as numbers without a copy")]

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// The bytes of one file.
#[derive(Debug)]
pub(crate) enum Bytes {
    /// Compiled into the program.
    Static(&'static [u8]),
    /// Mapped from disk.
    Mapped(Mmap),
}

impl Bytes {
    /// Maps a whole file for reading.
    pub(crate) fn map(path: &Path) -> io::Result<Self> {
        // Asked before opening: opening a pipe would wait for a writer.
        if !path.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let file = File::open(path)?;
        // SAFETY: the mapping is private and read-only, and nothing in this program writes to checkpoint
        // files. A file that someone else changes or cuts while it is mapped is outside what any reader of
        // mapped files can guard against; `Checkpoint::open` documents that the files must stay as they are.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self::Mapped(map))
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Static(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

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
number!(u16, u32, i64, f32);

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
    fn aligned_bytes_are_not_copied() {
        let words = [1u64, 2, 3];
        // SAFETY: a u64 slice viewed as its own bytes.
        let (_, bytes, _) = unsafe { words.align_to::<u8>() };
        if cfg!(target_endian = "little") {
            assert!(matches!(numbers::<u32>(bytes), Cow::Borrowed(_)));
        }
        assert!(matches!(numbers::<u32>(&bytes[1..9]), Cow::Owned(_)));
    }

    #[test]
    fn a_directory_is_not_mapped() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Bytes::map(dir.path()).is_err());
    }
}
