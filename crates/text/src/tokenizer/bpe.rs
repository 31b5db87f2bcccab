//! Byte-pair merging.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// What a pair of tokens becomes; lower ranks merge first.
#[derive(Clone, Copy)]
struct Merged {
    rank: u32,
    id: u32,
}

/// The merge table. Its keys come from the checkpoint, never from a request, so that a fast hash is safe.
pub(super) struct Bpe {
    byte_ids: [u32; 256],
    merges: HashMap<u64, Merged, BuildHasherDefault<PairHasher>>,
}

#[derive(Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    /// Multiplies by an odd constant (2^64 over the golden ratio) and folds, which spreads both halves of a
    /// pair over all bits.
    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// A token of the piece being merged, in a list linked by position.
struct Symbol {
    id: u32,
    previous: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;
/// Id of a symbol that was merged into its left neighbour.
const GONE: u32 = u32::MAX;

/// Working memory of [`Bpe::encode`], kept between pieces.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    /// Candidate merges: (rank, position of the left symbol).
    queue: BinaryHeap<Reverse<(u32, u32)>>,
}

impl Bpe {
    /// `byte_ids[b]` is the token of the single byte b; `merges` gives (left, right, merged) in order of rank.
    pub(super) fn new(byte_ids: &[u32; 256], merges: impl Iterator<Item = (u32, u32, u32)>) -> Self {
        let mut table =
            HashMap::with_capacity_and_hasher(merges.size_hint().0, BuildHasherDefault::default());
        for (rank, (left, right, id)) in merges.enumerate() {
            table.insert(key(left, right), Merged { rank: rank as u32, id });
        }
        Self { byte_ids: *byte_ids, merges: table }
    }

    fn merge_of(&self, left: u32, right: u32) -> Option<Merged> {
        self.merges.get(&key(left, right)).copied()
    }

    /// Appends the tokens of one piece: always the merge of lowest rank, the leftmost of equals, until none is
    /// left. O(n log n) in the bytes of the piece.
    pub(super) fn encode(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        if let [byte] = piece {
            ids.push(self.byte_ids[usize::from(*byte)]);
            return;
        }
        let Scratch { symbols, queue } = scratch;
        symbols.clear();
        queue.clear();
        let last = piece.len().saturating_sub(1) as u32;
        symbols.extend(piece.iter().zip(0u32..).map(|(&byte, at)| Symbol {
            id: self.byte_ids[usize::from(byte)],
            previous: if at == 0 { NONE } else { at - 1 },
            next: if at == last { NONE } else { at + 1 },
        }));
        for at in 0..last {
            self.enqueue(symbols, queue, at);
        }
        while let Some(Reverse((rank, at))) = queue.pop() {
            self.apply(symbols, queue, rank, at);
        }
        ids.extend(symbols.iter().map(|symbol| symbol.id).filter(|&id| id != GONE));
    }

    /// Queues the merge of the symbol at `at` with its right neighbour, if there is one.
    fn enqueue(&self, symbols: &[Symbol], queue: &mut BinaryHeap<Reverse<(u32, u32)>>, at: u32) {
        let left = &symbols[at as usize];
        if left.next != NONE
            && let Some(merged) = self.merge_of(left.id, symbols[left.next as usize].id)
        {
            queue.push(Reverse((merged.rank, at)));
        }
    }

    /// Applies a queued merge, unless one of its symbols changed after it was queued.
    fn apply(&self, symbols: &mut [Symbol], queue: &mut BinaryHeap<Reverse<(u32, u32)>>, rank: u32, at: u32) {
        let Symbol { id, previous, next } = symbols[at as usize];
        if id == GONE || next == NONE {
            return;
        }
        let right = &symbols[next as usize];
        let merged = match self.merge_of(id, right.id) {
            Some(merged) if merged.rank == rank => merged,
            _ => return,
        };
        let after = right.next;
        symbols[next as usize].id = GONE;
        symbols[at as usize].id = merged.id;
        symbols[at as usize].next = after;
        if after != NONE {
            symbols[after as usize].previous = at;
        }
        if previous != NONE {
            self.enqueue(symbols, queue, previous);
        }
        self.enqueue(symbols, queue, at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes are their own ids; 256 = "ab", 257 = "bc", 258 = "abab", in this order of rank.
    fn bpe() -> Bpe {
        let bytes: [u32; 256] = std::array::from_fn(|byte| byte as u32);
        let (a, b, c) = (97, 98, 99);
        Bpe::new(&bytes, [(a, b, 256), (b, c, 257), (256, 256, 258)].into_iter())
    }

    fn encode(text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        bpe().encode(text.as_bytes(), &mut Scratch::default(), &mut ids);
        ids
    }

    #[test]
    fn lower_ranks_and_then_the_left_merge_first() {
        assert_eq!(encode("abc"), [256, 99]);
        assert_eq!(encode("bbc"), [98, 257]);
        assert_eq!(encode("ababab"), [258, 256]);
        assert!(encode("").is_empty());
        assert_eq!(encode("x"), [120]);
    }

    #[test]
    fn a_megabyte_of_one_piece_is_linear_enough() {
        let ids = encode(&"ab".repeat(500_000));
        assert_eq!(ids.len(), 250_000);
    }
}
