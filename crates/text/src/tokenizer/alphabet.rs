//! The byte-level alphabet of GPT-2: every byte has a printable stand-in character, so that a vocabulary of
//! byte strings can be written as text.

/// The character that stands for `byte`: itself where it is printable Latin-1, else the next free one from
/// U+0100 on.
fn stand_in(byte: u8) -> char {
    let shifted = match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => return char::from(byte),
        0..=0x20 => u32::from(byte),
        0x7F..=0xA0 => 33 + u32::from(byte - 0x7F),
        0xAD => 67,
    };
    char::from_u32(0x100 + shifted).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Undoes the alphabet.
pub(super) struct Alphabet {
    /// Byte of each character below U+0144, if it is in the alphabet.
    bytes: [Option<u8>; 0x144],
}

impl Alphabet {
    pub(super) fn new() -> Self {
        let mut bytes = [None; 0x144];
        for byte in 0..=u8::MAX {
            bytes[stand_in(byte) as usize] = Some(byte);
        }
        Self { bytes }
    }

    /// Bytes of a vocabulary entry. One with a character outside the alphabet stands for itself.
    pub(super) fn decode(&self, token: &str) -> Vec<u8> {
        token
            .chars()
            .map(|c| self.bytes.get(c as usize).copied().flatten())
            .collect::<Option<Vec<u8>>>()
            .unwrap_or_else(|| token.as_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let alphabet = Alphabet::new();
        for byte in 0..=u8::MAX {
            assert_eq!(alphabet.decode(&stand_in(byte).to_string()), [byte]);
        }
        assert_eq!(stand_in(b' '), 'Ġ');
        assert_eq!(stand_in(b'\n'), 'Ċ');
        assert_eq!(stand_in(0xAD), 'Ń');
    }

    #[test]
    fn a_character_outside_the_alphabet_makes_the_token_literal() {
        assert_eq!(Alphabet::new().decode("日a"), "日a".as_bytes());
        assert_eq!(Alphabet::new().decode("a b"), b"a b");
    }
}
