//! Keys of blobs.

use qwill_device::batch::PAGE_TOKENS;
use sha2::{Digest, Sha256};

/// A digest of what a blob is, its salt and all tokens that lead to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlobKey(pub(super) [u8; 32]);

#[derive(Clone, Copy)]
enum Kind {
    Page = 1,
    State = 2,
}

/// The keys of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PathKeys {
    /// Of its whole pages.
    whole_pages: Vec<BlobKey>,
    /// Of what is at each of some positions.
    at: Vec<KeysAt>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct KeysAt {
    position: usize,
    state: BlobKey,
    /// Of the page that is not full there.
    last_page: Option<BlobKey>,
}

impl PathKeys {
    /// The keys that states at the ascending `positions` have, and the pages before them.
    pub(crate) fn new(salt: Option<&str>, tokens: &[u32], positions: &[usize]) -> Self {
        let mut keys = Self { whole_pages: Vec::new(), at: Vec::new() };
        let mut wanted = positions.iter().copied().filter(|position| *position <= tokens.len()).peekable();
        let last = wanted.clone().last().unwrap_or(0);
        let mut hash = PathHash::new(salt);
        if wanted.next_if_eq(&0).is_some() {
            keys.at.push(hash.keys_at(0));
        }
        for (position, token) in (1usize..).zip(&tokens[..last]) {
            hash.token(*token);
            if position.is_multiple_of(PAGE_TOKENS) {
                keys.whole_pages.push(hash.key(Kind::Page));
            }
            if wanted.next_if_eq(&position).is_some() {
                keys.at.push(hash.keys_at(position));
            }
        }
        keys
    }

    /// The positions, ascending.
    pub(crate) fn positions(&self) -> impl DoubleEndedIterator<Item = usize> {
        self.at.iter().map(|at| at.position)
    }

    /// The state at one of the positions.
    pub(crate) fn state(&self, position: usize) -> Option<BlobKey> {
        Some(self.at(position)?.state)
    }

    /// The pages before one of the positions, in order.
    pub(crate) fn pages(&self, position: usize) -> impl Iterator<Item = BlobKey> {
        let whole = self.whole_pages.iter().take(position / PAGE_TOKENS);
        whole.copied().chain(self.at(position).and_then(|at| at.last_page))
    }

    fn at(&self, position: usize) -> Option<&KeysAt> {
        let index = self.at.binary_search_by_key(&position, |at| at.position).ok()?;
        self.at.get(index)
    }
}

/// The digest of a path so far.
struct PathHash(Sha256);

impl PathHash {
    fn new(salt: Option<&str>) -> Self {
        let mut hash = Sha256::new();
        match salt {
            Some(salt) => {
                hash.update((salt.len() as u64 + 1).to_le_bytes());
                hash.update(salt.as_bytes());
            }
            None => hash.update(0u64.to_le_bytes()),
        }
        Self(hash)
    }

    fn token(&mut self, token: u32) {
        self.0.update(token.to_le_bytes());
    }

    fn keys_at(&self, position: usize) -> KeysAt {
        let last_page = (!position.is_multiple_of(PAGE_TOKENS)).then(|| self.key(Kind::Page));
        KeysAt { position, state: self.key(Kind::State), last_page }
    }

    fn key(&self, kind: Kind) -> BlobKey {
        // A byte more than the tokens' words: no path's digest is another path's key.
        BlobKey(self.0.clone().chain_update([kind as u8]).finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn keys(tokens: &[u32], positions: &[usize]) -> PathKeys {
        PathKeys::new(None, tokens, positions)
    }

    #[test]
    fn paths_that_begin_alike_share_the_keys_of_what_is_alike() {
        let one: Vec<u32> = (0..300).collect();
        let mut other = one.clone();
        other[200] = 7;
        let (one, other) = (keys(&one, &[128, 190, 300]), keys(&other, &[128, 190, 300]));
        for position in [128, 190] {
            assert_eq!(one.state(position), other.state(position));
            assert!(one.pages(position).eq(other.pages(position)));
        }
        assert_ne!(one.state(300), other.state(300));
        let (one, other): (Vec<_>, Vec<_>) = (one.pages(300).collect(), other.pages(300).collect());
        assert_eq!((one.len(), other.len()), (5, 5));
        assert_eq!(one[..3], other[..3]);
        assert!(one[3] != other[3] && one[4] != other[4]);
    }

    #[test]
    fn no_key_has_two_meanings() {
        let tokens: Vec<u32> = vec![5; 200];
        let positions: Vec<usize> = (0..=200).collect();
        let mut seen = HashSet::new();
        for salt in [None, Some(""), Some("a")] {
            let keys = PathKeys::new(salt, &tokens, &positions);
            assert!(keys.positions().eq(0..=200));
            for position in 0..=200 {
                assert!(seen.insert(keys.state(position).unwrap()));
                if position > 0 {
                    let last = keys.pages(position).last().unwrap();
                    assert!(seen.insert(last), "page that ends at {position}");
                }
                assert_eq!(keys.pages(position).count(), position.div_ceil(PAGE_TOKENS));
            }
        }
    }

    proptest! {
        #[test]
        fn the_keys_at_a_position_do_not_depend_on_the_others(
            tokens in prop::collection::vec(0u32..50, 1..300),
            mut positions in prop::collection::vec(0usize..300, 1..6),
        ) {
            positions.retain(|position| *position <= tokens.len());
            positions.sort_unstable();
            positions.dedup();
            let all = keys(&tokens, &positions);
            for position in positions {
                let alone = keys(&tokens[..position], &[position]);
                prop_assert_eq!(all.state(position), alone.state(position));
                prop_assert!(all.pages(position).eq(alone.pages(position)));
            }
        }
    }
}
