//! One blob's file: magic, identity, key, length of the contents, digest, contents.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use super::BlobKey;

/// The format; another number wherever its layout changes.
const MAGIC: &[u8; 8] = b"QWPREFX1";
const DIGEST_BYTES: usize = 32;
/// Bytes before the contents.
pub(super) const HEADER_BYTES: usize = MAGIC.len() + 2 * DIGEST_BYTES + 8 + DIGEST_BYTES;

/// Bytes of the identity that a name shows.
const SHOWN_IDENTITY_BYTES: usize = 8;
const EXTENSION: &str = ".prefix";
/// While a file is being written.
const DRAFT_EXTENSION: &str = ".prefix.part";

/// The name of a blob's file.
pub(super) fn name(identity: &[u8; 32], key: &BlobKey) -> String {
    format!("{}-{}{EXTENSION}", hex(&identity[..SHOWN_IDENTITY_BYTES]), hex(&key.0))
}

/// The name of the file while it is written.
pub(super) fn draft_name(name: &str) -> String {
    format!("{}{DRAFT_EXTENSION}", name.strip_suffix(EXTENSION).unwrap_or(name))
}

/// What a name in the directory says about a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Named {
    /// A blob of some model.
    Blob,
    /// What a process left that ended while it wrote.
    Draft,
    /// Nothing of ours.
    Foreign,
}

pub(super) fn named(name: &str) -> Named {
    let is_ours = |stem: &str| {
        let parts = stem.split_once('-');
        let is_hex = |text: &str, bytes: usize| {
            text.len() == 2 * bytes && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        parts.is_some_and(|(identity, key)| {
            is_hex(identity, SHOWN_IDENTITY_BYTES) && is_hex(key, DIGEST_BYTES)
        })
    };
    if name.strip_suffix(DRAFT_EXTENSION).is_some_and(is_ours) {
        Named::Draft
    } else if name.strip_suffix(EXTENSION).is_some_and(is_ours) {
        Named::Blob
    } else {
        Named::Foreign
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// What comes before the contents.
pub(super) fn header(identity: &[u8; 32], key: &BlobKey, contents: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(identity);
    header.extend_from_slice(&key.0);
    header.extend_from_slice(&(contents.len() as u64).to_le_bytes());
    let digest = Sha256::new().chain_update(&header).chain_update(contents).finalize();
    header.extend_from_slice(&digest);
    header
}

/// Takes the contents out of a whole file, which must be that blob with so many bytes. Returns what is wrong otherwise.
pub(super) fn contents(
    mut file: Vec<u8>,
    identity: &[u8; 32],
    key: &BlobKey,
    bytes: usize,
) -> Result<Vec<u8>, &'static str> {
    if file.len() != HEADER_BYTES + bytes {
        return Err("it has another length");
    }
    let contents = file.split_off(HEADER_BYTES);
    let (found, expected) = (file, header(identity, key, &contents));
    if found[..MAGIC.len()] != *MAGIC {
        return Err("it is no file of this version");
    }
    if found != expected {
        return Err("it is damaged, or of another model");
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IDENTITY: [u8; 32] = [7; 32];
    const KEY: BlobKey = BlobKey([0xab; 32]);

    fn file(contents: &[u8]) -> Vec<u8> {
        let mut file = header(&IDENTITY, &KEY, contents);
        file.extend_from_slice(contents);
        file
    }

    fn read(file: Vec<u8>, bytes: usize) -> Result<Vec<u8>, &'static str> {
        contents(file, &IDENTITY, &KEY, bytes)
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let whole = file(b"some contents");
        assert_eq!(read(whole.clone(), 13).unwrap(), b"some contents");
        for len in 0..whole.len() {
            read(whole[..len].to_vec(), 13).unwrap_err();
            // Whoever expects as much as there is finds that it is not what was written.
            read(whole[..len].to_vec(), len.saturating_sub(HEADER_BYTES)).unwrap_err();
        }
        read([whole, vec![0]].concat(), 13).unwrap_err();
    }

    #[test]
    fn any_flipped_bit_is_seen() {
        let whole = file(b"contents");
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            read(flipped, 8).unwrap_err();
        }
    }

    #[test]
    fn another_models_and_another_places_blob_is_refused() {
        let whole = file(b"contents");
        contents(whole.clone(), &[8; 32], &KEY, 8).unwrap_err();
        contents(whole, &IDENTITY, &BlobKey([0xac; 32]), 8).unwrap_err();
    }

    proptest! {
        #[test]
        fn whatever_is_kept_is_read_back(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            prop_assert_eq!(read(file(&bytes), bytes.len()).unwrap(), bytes);
        }

        #[test]
        fn no_bytes_are_taken_for_a_blob(bytes in prop::collection::vec(any::<u8>(), 0..400), expected in 0usize..300) {
            prop_assert!(read(bytes, expected).is_err());
        }

        #[test]
        fn only_our_names_are_ours(text in "[0-9a-fx.-]{0,90}(\\.prefix)?(\\.part)?") {
            prop_assert_eq!(named(&text), Named::Foreign);
        }
    }

    #[test]
    fn names_are_known_again() {
        let name = name(&IDENTITY, &KEY);
        assert_eq!(named(&name), Named::Blob);
        assert_eq!(named(&draft_name(&name)), Named::Draft);
        for foreign in
            ["lock", "model.safetensors", ".prefix", "a-b.prefix", &name.to_uppercase(), &name[1..]]
        {
            assert_eq!(named(foreign), Named::Foreign, "{foreign}");
        }
    }
}
