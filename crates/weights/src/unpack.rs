//! Packed words of GPTQ and compressed-tensors to the device's codes, bit for bit.
//!
//! Both store `code + 2^(bits−1)` in 32-bit little-endian words along the inputs, lowest bits first. For 4
//! bits the bytes of such a word *are* the device's packed nibbles of eight inputs; for 8 bits they are the
//! device's codes with the top bit flipped. What differs is the order of the words: compressed-tensors has
//! them by output, GPTQ by input, which is transposed here.

/// Words of one cache line: the tile of the transposition.
const TILE: usize = 16;

/// Words `[words, outputs]` to bytes `[outputs, words * 4]`.
pub(crate) fn transpose_words(source: &[u32], words: usize, outputs: usize, bytes: &mut [u8]) {
    let row_bytes = (words * 4).max(1);
    // Tiles of 16 × 16 words: whole cache lines are read and written.
    for (tile, rows) in bytes.chunks_mut(row_bytes * TILE).enumerate() {
        for start in (0..words).step_by(TILE) {
            let end = words.min(start + TILE);
            for (within, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
                let output = tile * TILE + within;
                for (word, bytes) in (start..end).zip(row[start * 4..end * 4].chunks_exact_mut(4)) {
                    bytes.copy_from_slice(&source[word * outputs + output].to_le_bytes());
                }
            }
        }
    }
}

/// Scales `[groups, outputs]` to `[outputs, groups]`.
pub(crate) fn transpose_scales(source: &[u16], outputs: usize, scales: &mut [u16]) {
    let groups = source.len() / outputs.max(1);
    for (output, scales) in scales.chunks_exact_mut(groups.max(1)).enumerate() {
        for (group, scale) in scales.iter_mut().enumerate() {
            *scale = source[group * outputs + output];
        }
    }
}

/// Bytes `code + 128` to signed codes, in place.
pub(crate) fn sign_codes(bytes: &mut [u8]) {
    for byte in bytes {
        *byte ^= 0x80;
    }
}

/// Field `at` of `bits` bits in a row of words.
pub(crate) fn field(words: &[u32], bits: usize, at: usize) -> u32 {
    let bit = at * bits;
    words.get(bit / 32).map_or(0, |word| word >> (bit % 32) & ((1 << bits) - 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn transposition_moves_every_word(words in 1usize..40, outputs in 1usize..40) {
            let source: Vec<u32> = (0..words * outputs).map(|n| crate::random::mix(n as u64) as u32).collect();
            let mut bytes = vec![0; source.len() * 4];
            transpose_words(&source, words, outputs, &mut bytes);
            for output in 0..outputs {
                for word in 0..words {
                    let at = (output * words + word) * 4;
                    prop_assert_eq!(&bytes[at..at + 4], &source[word * outputs + output].to_le_bytes());
                }
            }
        }
    }

    #[test]
    fn codes_of_a_published_word_come_in_order() {
        let word = 0x7654_3210;
        assert_eq!((0..8).map(|n| field(&[word], 4, n)).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let mut bytes = [0; 4];
        transpose_words(&[word], 1, 1, &mut bytes);
        assert_eq!(bytes, [0x10, 0x32, 0x54, 0x76]);
        let mut codes = [0, 127, 128, 255];
        sign_codes(&mut codes);
        assert_eq!(codes.map(u8::cast_signed), [-128, -1, 0, 127]);
    }
}
