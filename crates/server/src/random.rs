//! Randomness for ids and seeds. Not for secrets.

use std::hash::{BuildHasher, RandomState};

/// 64 bits that differ at each call: a keyed hash with keys from the operating system, which the standard
/// library changes for every new state.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().hash_one(0_u8)
}

/// `prefix` and 32 hexadecimal digits.
pub(crate) fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn values_differ() {
        let values: HashSet<u64> = (0..1000).map(|_| random_u64()).collect();
        assert_eq!(values.len(), 1000);
        assert_eq!(random_id("x-").len(), 34);
    }
}
