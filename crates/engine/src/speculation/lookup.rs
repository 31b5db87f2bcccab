//! Drafts copied from a sequence's own tokens.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

/// Lengths of the n-grams that are indexed, longest first. A match is looked for at each in turn.
///
/// Measured on novels, encyclopedia, worked sums, Python, and rewritten and copied passages, tokens a step with drafts
/// of 15: two tokens find more than three (Python 1.57 against 1.40, rewriting 6.0 against 5.1) and rightly followed
/// half the time even in prose; the latest place of two tokens alone loses a passage while it is copied (10.3 against
/// 14.7 with six tokens first); a third length, or all from 24 to 2, adds less than one hundredth.
const LEVELS: [usize; 2] = [6, 2];

/// Matches are measured up to this length; longer ones say no more about what follows.
const LONGEST_MATCH: usize = 32;

/// What a sequence's text says about its next tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LookupDraft {
    /// The tokens that followed the match; empty where there is none.
    pub tokens: Vec<u32>,
    /// Tokens before them that agree with the end of the text, counted up to 32.
    pub matched: usize,
}

/// Finds where the last tokens of a text stood before.
///
/// The match is the most recent earlier place whose last `n` tokens are those of the text, for the larger `n` of 6 and
/// 2 that has one. It may overlap the end: what follows is then a period, and the copy continues with copied
/// tokens.
///
/// One table per `n` holds the latest end of every n-gram: two insertions a token (0.03 us in a short text, 0.4 us where
/// 200,000 tokens have left the processor's caches), 15 to 25 bytes a token with the text, nothing to scan. The keys of the hash are random in each index, so that no prompt can be made to collide;
/// equality is checked, so they never show.
#[derive(Debug, Clone)]
pub struct LookupIndex {
    text: Vec<u32>,
    /// By level: ends of n-grams, exclusive, each n-gram's latest one. The text's own end is not among them.
    ends: [HashTable<u32>; LEVELS.len()],
    keys: [u64; LEVELS[0]],
}

impl LookupIndex {
    /// Indexes a text, usually a prompt.
    pub fn new(text: &[u32]) -> Self {
        let random = RandomState::new();
        let mut index = Self {
            text: Vec::with_capacity(text.len()),
            ends: std::array::from_fn(|_| HashTable::with_capacity(text.len())),
            keys: std::array::from_fn(|at| random.hash_one(at)),
        };
        index.extend(text);
        index
    }

    /// Appends tokens.
    pub fn extend(&mut self, tokens: &[u32]) {
        for token in tokens {
            self.push(*token);
        }
    }

    /// Appends a token.
    pub fn push(&mut self, token: u32) {
        let Self { text, ends, keys } = self;
        let end = text.len();
        for (table, length) in ends.iter_mut().zip(LEVELS).filter(|(_, length)| *length <= end) {
            let ngram = &text[end - length..];
            let same = |other: &u32| text[*other as usize - length..*other as usize] == *ngram;
            let rehash = |other: &u32| hash(keys, &text[*other as usize - length..*other as usize]);
            *table.entry(hash(keys, ngram), same, rehash).or_insert(0).get_mut() = end as u32;
        }
        text.push(token);
    }

    /// At most `most` tokens to follow the text.
    pub fn draft(&self, most: usize) -> LookupDraft {
        let Some(from) = self.find() else { return LookupDraft::default() };
        let text = &self.text;
        let matched = text[..from].iter().rev().zip(text.iter().rev()).take(LONGEST_MATCH);
        let matched = matched.take_while(|(earlier, last)| earlier == last).count();
        let period = text.len() - from;
        let tokens = (0..most).map(|at| text[from + at % period]).collect();
        LookupDraft { tokens, matched }
    }

    /// End of the match: position of the token that followed it.
    fn find(&self) -> Option<usize> {
        let Self { text, ends, keys } = self;
        ends.iter().zip(LEVELS).filter(|(_, length)| *length <= text.len()).find_map(|(table, length)| {
            let ngram = &text[text.len() - length..];
            let same = |end: &u32| text[*end as usize - length..*end as usize] == *ngram;
            table.find(hash(keys, ngram), same).map(|end| *end as usize)
        })
    }
}

/// Multilinear hashing: the upper half of the sum collides for two n-grams with probability 2^-32 over random keys
/// (Carter and Wegman 1979); the product spreads it over all bits.
fn hash(keys: &[u64], ngram: &[u32]) -> u64 {
    let terms = keys.iter().zip(ngram).map(|(key, token)| key.wrapping_mul(u64::from(*token) + 1));
    let sum = terms.fold(0u64, u64::wrapping_add);
    (sum >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rule's words, as a scan.
    fn scan(text: &[u32], most: usize) -> LookupDraft {
        for length in LEVELS.into_iter().filter(|length| *length < text.len()) {
            let last = &text[text.len() - length..];
            let Some(end) = (length..text.len()).rev().find(|end| text[end - length..*end] == *last) else {
                continue;
            };
            let agree = |tokens: &usize| text[end - tokens..end] == text[text.len() - tokens..];
            let matched = (1..=end.min(LONGEST_MATCH)).take_while(agree).count();
            let mut copied = text.to_vec();
            (0..most).for_each(|at| copied.push(copied[end + at]));
            return LookupDraft { tokens: copied.split_off(text.len()), matched };
        }
        LookupDraft::default()
    }

    /// Text that repeats itself: random tokens and copies of what came before.
    fn repetitive() -> impl Strategy<Value = Vec<u32>> {
        let piece = prop_oneof![
            prop::collection::vec(0u32..6, 1..12).prop_map(Err),
            (any::<prop::sample::Index>(), 1usize..60).prop_map(Ok),
        ];
        prop::collection::vec(piece, 1..12).prop_map(|pieces| {
            let mut text = Vec::new();
            for piece in pieces {
                match piece {
                    Ok((from, length)) if !text.is_empty() => {
                        let from = from.index(text.len());
                        (0..length).for_each(|at| text.push(text[from + at]));
                    }
                    Ok(_) => {}
                    Err(new) => text.extend(new),
                }
            }
            text
        })
    }

    proptest! {
        #[test]
        fn a_draft_is_what_a_scan_finds(text in repetitive(), cut in any::<prop::sample::Index>(), most in 0usize..40) {
            let cut = cut.index(text.len().max(1));
            let mut index = LookupIndex::new(&text[..cut]);
            for end in cut..text.len() {
                prop_assert_eq!(index.draft(most), scan(&text[..end], most));
                index.push(text[end]);
            }
            prop_assert_eq!(index.draft(most), scan(&text, most));
        }
    }

    #[test]
    fn a_period_continues_beyond_the_end() {
        let index = LookupIndex::new(&[9, 1, 2, 3, 1, 2, 3]);
        assert_eq!(index.draft(8), LookupDraft { tokens: vec![1, 2, 3, 1, 2, 3, 1, 2], matched: 3 });
        let index = LookupIndex::new(&[5; 40]);
        assert_eq!(index.draft(2), LookupDraft { tokens: vec![5, 5], matched: LONGEST_MATCH });
    }

    #[test]
    fn the_longest_level_wins_and_within_it_the_latest_place() {
        let passage: Vec<u32> = (100..106).collect();
        let tail = &passage[4..];
        let text = [&passage[..], &[1], tail, &[2], tail, &[3], tail].concat();
        assert_eq!(LookupIndex::new(&text).draft(1).tokens, [3], "two tokens: the latest place");
        let text = [&passage[..], &[1], tail, &[2], &passage].concat();
        assert_eq!(LookupIndex::new(&text).draft(1).tokens, [1], "six tokens: the same passage");
    }

    #[test]
    fn short_texts_have_no_draft() {
        for text in [&[][..], &[1], &[1, 1], &[1, 2, 3], &[1, 2, 3, 1]] {
            assert_eq!(LookupIndex::new(text).draft(15), LookupDraft::default(), "{text:?}");
        }
    }
}
