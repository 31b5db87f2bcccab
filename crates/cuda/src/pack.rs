//! Compiled kernels inside the binary: one file, made when the binary is built.
//!
//! Layout, little-endian: `QWPACK01`, the number of entries (u32), per entry its key (32 bytes of hex), the length of its
//! frame (u64) and the SHA-256 of key and frame; then the frames, in the same order. A frame is Zstandard. Each entry
//! stands alone: one that is damaged costs its own kernels, and nothing is unpacked that is not wanted or does not check.

use std::io::Read;

use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"QWPACK01";
const KEY_BYTES: usize = 32;
const CHECKSUM_BYTES: usize = 32;
const ENTRY_BYTES: usize = KEY_BYTES + 8 + CHECKSUM_BYTES;

/// Most bytes of one unit's code: fifty times the largest there is, and no burden on any machine.
const MOST_CODE_BYTES: u64 = 64 << 20;

/// A pack's bytes. Nothing is read before something is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Pack<'a> {
    bytes: &'a [u8],
}

/// Why an entry cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the kernels built into this program are damaged: {0}")]
pub struct DamagedPack(String);

impl<'a> Pack<'a> {
    /// A pack of these bytes; of none, one without entries.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Joins compressed units to a pack. Keys are those of [`crate::UnitBuild::key`].
    pub fn join(frames: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&(frames.len() as u32).to_le_bytes());
        for (key, frame) in frames {
            debug_assert_eq!(key.len(), KEY_BYTES);
            bytes.extend_from_slice(key.as_bytes());
            bytes.extend_from_slice(&(frame.len() as u64).to_le_bytes());
            bytes.extend_from_slice(&checksum(key.as_bytes(), frame));
        }
        for (_, frame) in frames {
            bytes.extend_from_slice(frame);
        }
        bytes
    }

    /// The code of a key, `None` where the pack has none.
    pub fn find(&self, key: &str) -> Result<Option<Vec<u8>>, DamagedPack> {
        if self.bytes.is_empty() {
            return Ok(None);
        }
        let damaged = |what: &str| DamagedPack(what.to_owned());
        let (index, mut frames) = self.index().ok_or_else(|| damaged("its index cannot be read"))?;
        for entry in index.chunks_exact(ENTRY_BYTES) {
            let (found, rest) = entry.split_at(KEY_BYTES);
            let (len, expected) = rest.split_at(8);
            let len = len.iter().rev().fold(0, |len, byte| len << 8 | u64::from(*byte));
            let split = usize::try_from(len).ok().and_then(|len| frames.split_at_checked(len));
            let (frame, others) = split.ok_or_else(|| damaged("it ends too early"))?;
            frames = others;
            if found != key.as_bytes() {
                continue;
            }
            if checksum(found, frame)[..] != *expected {
                return Err(damaged(&format!("{key} has another checksum")));
            }
            return unpack(frame).map(Some).map_err(|reason| damaged(&format!("{key}: {reason}")));
        }
        Ok(None)
    }

    /// The index and what follows it.
    fn index(&self) -> Option<(&'a [u8], &'a [u8])> {
        let (count, rest) = self.bytes.strip_prefix(MAGIC)?.split_first_chunk::<4>()?;
        rest.split_at_checked((u32::from_le_bytes(*count) as usize).checked_mul(ENTRY_BYTES)?)
    }
}

fn checksum(key: &[u8], frame: &[u8]) -> [u8; CHECKSUM_BYTES] {
    Sha256::new().chain_update(key).chain_update(frame).finalize().into()
}

fn unpack(frame: &[u8]) -> Result<Vec<u8>, String> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(frame).map_err(|error| error.to_string())?;
    let mut code = Vec::new();
    decoder.take(MOST_CODE_BYTES).read_to_end(&mut code).map_err(|error| error.to_string())?;
    Ok(code)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A pack as the build makes it.
    pub(crate) fn pack_of(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
        let frame = |(key, code): &(String, Vec<u8>)| (key.clone(), zstd::bulk::compress(code, 1).unwrap());
        Pack::join(&entries.iter().map(frame).collect::<Vec<_>>())
    }

    fn key(number: u8) -> String {
        format!("{number:032x}")
    }

    fn entries() -> Vec<(String, Vec<u8>)> {
        (1..4).map(|number| (key(number), vec![number; 1000 * usize::from(number)])).collect()
    }

    #[test]
    fn every_entry_comes_back_and_no_other() {
        let bytes = pack_of(&entries());
        for (key, code) in entries() {
            assert_eq!(Pack::new(&bytes).find(&key).unwrap(), Some(code));
        }
        assert_eq!(Pack::new(&bytes).find(&key(9)).unwrap(), None);
        assert_eq!(Pack::new(&[]).find(&key(1)).unwrap(), None);
    }

    #[test]
    fn a_damaged_entry_costs_itself_alone() {
        let mut bytes = pack_of(&entries());
        *bytes.last_mut().unwrap() ^= 1;
        let pack = Pack::new(&bytes);
        assert!(pack.find(&key(3)).unwrap_err().to_string().contains(&key(3)));
        assert_eq!(pack.find(&key(1)).unwrap(), Some(vec![1; 1000]));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_an_error_or_have_nothing(bytes: Vec<u8>) {
            prop_assert!(!matches!(Pack::new(&bytes).find(&key(1)), Ok(Some(_))));
            let with_magic = [&MAGIC[..], &bytes].concat();
            prop_assert!(!matches!(Pack::new(&with_magic).find(&key(1)), Ok(Some(_))));
        }

        /// Even where the checksum holds, which only a deliberate change could bring about.
        #[test]
        fn arbitrary_frames_do_not_panic(frame: Vec<u8>, flips in prop::collection::vec(any::<prop::sample::Index>(), 1..4)) {
            let _ = Pack::new(&Pack::join(&[(key(1), frame)])).find(&key(1));
            let code: Vec<u8> = (0..5000u32).flat_map(u32::to_le_bytes).collect();
            let mut frame = zstd::bulk::compress(&code, 1).unwrap();
            for flip in flips {
                let at = flip.index(frame.len() * 8);
                frame[at / 8] ^= 1 << (at % 8);
            }
            let _ = Pack::new(&Pack::join(&[(key(1), frame)])).find(&key(1));
        }

        #[test]
        fn a_changed_or_shortened_pack_gives_the_right_code_or_none(at: prop::sample::Index, bit in 0..8u32, cut: bool) {
            let mut bytes = pack_of(&entries());
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= 1u8 << bit }
            for (key, code) in entries() {
                if let Ok(Some(found)) = Pack::new(&bytes).find(&key) {
                    prop_assert_eq!(found, code);
                }
            }
        }
    }
}
