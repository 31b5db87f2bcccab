//! Where the GDN chunks of a prompt begin: a function of its tokens alone.

use qwill_device::batch::CHUNK_TOKENS;

/// The rule: a segment begins at the first token, at every boundary token and [`ChunkRule::interval_tokens`] after
/// the last segment's begin; within a segment a chunk begins every [`CHUNK_TOKENS`] tokens. Whether a chunk begins
/// at a position depends on the tokens up to there, so a longer prompt has the chunks of its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkRule {
    /// Token that begins a message.
    pub(crate) boundary_token: Option<u32>,
    /// Longest segment; at least 1.
    pub(crate) interval_tokens: usize,
}

impl ChunkRule {
    /// End of every chunk of a prompt, ascending; the last one is the prompt's end.
    pub(crate) fn chunk_ends(&self, tokens: &[u32]) -> Vec<usize> {
        let mut ends = self.lasting_ends(tokens);
        if ends.last() != Some(&tokens.len()) && !tokens.is_empty() {
            ends.push(tokens.len());
        }
        ends
    }

    /// Ends of the chunks that every text has that begins with these tokens, ascending. The end of the tokens is one of
    /// them only where a chunk ends there whatever follows.
    pub(crate) fn lasting_ends(&self, tokens: &[u32]) -> Vec<usize> {
        let mut ends = Vec::with_capacity(tokens.len() / CHUNK_TOKENS + 4);
        let (mut segment, mut chunk) = (0, 0);
        for position in 1..=tokens.len() {
            let message = tokens.get(position).is_some_and(|token| Some(*token) == self.boundary_token);
            let new_segment = message || position - segment == self.interval_tokens;
            if new_segment {
                segment = position;
            }
            if new_segment || position - chunk == CHUNK_TOKENS {
                ends.push(position);
                chunk = position;
            }
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Start of the segment that a position lies in, straight from the rule's words.
    fn segment_start(rule: ChunkRule, tokens: &[u32], position: usize) -> usize {
        if position == 0 || Some(tokens[position]) == rule.boundary_token {
            return position;
        }
        let before = segment_start(rule, tokens, position - 1);
        if position - before == rule.interval_tokens { position } else { before }
    }

    proptest! {
        #[test]
        fn chunks_follow_the_rule(
            tokens in prop::collection::vec(0u32..40, 1..400),
            interval_tokens in 1usize..200,
            marked in any::<bool>(),
        ) {
            let rule = ChunkRule { boundary_token: marked.then_some(7), interval_tokens };
            let mut expected: Vec<usize> = (1..tokens.len())
                .filter(|p| (p - segment_start(rule, &tokens, *p)).is_multiple_of(CHUNK_TOKENS))
                .collect();
            expected.push(tokens.len());
            prop_assert_eq!(rule.chunk_ends(&tokens), expected);
        }

        #[test]
        fn a_longer_prompt_keeps_the_chunks_of_its_beginning(
            tokens in prop::collection::vec(0u32..40, 2..400),
            cut in 1usize..400,
        ) {
            let rule = ChunkRule { boundary_token: Some(7), interval_tokens: 100 };
            let cut = cut.min(tokens.len() - 1);
            let whole = rule.chunk_ends(&tokens);
            let part = rule.chunk_ends(&tokens[..cut]);
            prop_assert_eq!(&part[..part.len() - 1], &whole[..part.len() - 1]);
            for next in [7, 8] {
                let longer = rule.chunk_ends(&[&tokens[..cut], &[next, 8]].concat());
                let lasting = rule.lasting_ends(&tokens[..cut]);
                prop_assert!(longer.starts_with(&lasting));
                prop_assert_eq!(next == 8 && longer.contains(&cut), next == 8 && lasting.contains(&cut));
            }
        }
    }
}
