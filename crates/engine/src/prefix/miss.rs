//! Why a prompt was not found as far as it could have been.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashSet, VecDeque};
use std::hash::{Hash, Hasher};

use qwill_contract::CacheLoad;

use super::tree::Salt;

/// Forgotten snapshots that are remembered to have been there; 8 bytes each.
const REMEMBERED: usize = 4096;

/// The reason for a miss: a hit that is less deep than the prompt allows, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The cache is off, or the request wants what only computing gives.
    Off,
    /// A deeper snapshot was there and had to make room.
    Evicted,
    /// The tokens are known further on, but no snapshot is there.
    NoSnapshot,
    /// The tokens are known under another salt only.
    OtherSalt,
    /// No known path has the token at this position.
    Diverged {
        /// Tokens that are known.
        at: usize,
    },
}

impl Miss {
    /// Its place in [`CacheLoad::MISS_REASONS`].
    pub(crate) fn index(self) -> usize {
        match self {
            Self::Off => 0,
            Self::Evicted => 1,
            Self::NoSnapshot => 2,
            Self::OtherSalt => 3,
            Self::Diverged { .. } => 4,
        }
    }

    pub(crate) fn label(self) -> &'static str {
        CacheLoad::MISS_REASONS[self.index()]
    }
}

/// Hashes of a salt and the tokens up to each of the ascending `ends`.
pub(crate) fn path_hashes(salt: &Salt, tokens: &[u32], ends: &[usize]) -> Vec<u64> {
    let mut hasher = DefaultHasher::new();
    salt.hash(&mut hasher);
    let mut start = 0;
    let mut hash_to = |end: &usize| {
        tokens[start..*end].iter().for_each(|token| hasher.write_u32(*token));
        start = *end;
        hasher.finish()
    };
    ends.iter().map(&mut hash_to).collect()
}

/// The snapshots that were forgotten last.
#[derive(Debug, Default)]
pub(crate) struct Forgotten {
    order: VecDeque<u64>,
    hashes: HashSet<u64>,
}

impl Forgotten {
    pub(crate) fn add(&mut self, path_hash: u64) {
        if !self.hashes.insert(path_hash) {
            return;
        }
        self.order.push_back(path_hash);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.hashes.remove(&oldest);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    pub(crate) fn contains(&self, path_hash: u64) -> bool {
        self.hashes.contains(&path_hash)
    }
}
