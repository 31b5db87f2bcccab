//! At which positions of a prompt a snapshot is taken.

use std::collections::BTreeSet;

use qwill_device::batch::CHUNK_TOKENS;

/// A snapshot of the 27B has the bytes of the KV of 1,152 tokens, and a slice has to end where one is taken. So not
/// every message start gets one, but those that a later prompt is likely to share:
///
/// * the end of the first message (a system prompt that many conversations begin with);
/// * the last two message starts (the same prompt again or with an answer and a question more; the last question
///   edited);
/// * the last chunk boundary (the same text again, without messages);
/// * where the prompt leaves a path that is known: what two prompts share, a third one is likely to share;
/// * in between, every so many tokens.
///
/// One that lies less than a chunk behind another saves nothing worth it and is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SnapshotRule {
    /// Token that begins a message.
    pub(crate) boundary_token: Option<u32>,
    /// See the last item but one; at least 1.
    pub(crate) interval_tokens: usize,
}

impl SnapshotRule {
    /// Positions behind `from`, ascending, all of them chunk ends before the prompt's end. The path of the first
    /// `known_tokens` tokens is known.
    pub(crate) fn stops(
        &self,
        tokens: &[u32],
        chunk_ends: &[usize],
        from: usize,
        known_tokens: usize,
    ) -> Vec<usize> {
        let ends = &chunk_ends[..chunk_ends.partition_point(|end| *end < tokens.len())];
        let messages = || ends.iter().filter(|end| Some(tokens[**end]) == self.boundary_token);
        let known = &ends[..ends.partition_point(|end| *end <= known_tokens)];
        let mut wanted: BTreeSet<usize> = messages().take(1).copied().collect();
        wanted.extend(messages().rev().take(2));
        wanted.extend(ends.last());
        wanted.extend(known.last());
        wanted.extend(self.intervals(ends));
        keep_apart(wanted, from)
    }

    /// Positions up to the end of a text that ended at a chunk boundary, and that boundary.
    pub(crate) fn settled_stops(&self, chunk_ends: &[usize], from: usize) -> Vec<usize> {
        let mut wanted: BTreeSet<usize> = self.intervals(chunk_ends).collect();
        wanted.extend(chunk_ends.last());
        keep_apart(wanted, from)
    }

    /// A function of the tokens up to each position, so that prompts that begin alike share them.
    fn intervals(&self, ends: &[usize]) -> impl Iterator<Item = usize> {
        let mut last = 0;
        ends.iter().copied().filter(move |end| {
            let far = *end - last >= self.interval_tokens;
            if far {
                last = *end;
            }
            far
        })
    }
}

/// Drops what lies less than a chunk behind `from` or what was kept before.
fn keep_apart(wanted: BTreeSet<usize>, from: usize) -> Vec<usize> {
    let mut last = from;
    let far = |stop: &usize| {
        let far = *stop >= last + CHUNK_TOKENS;
        if far {
            last = *stop;
        }
        far
    };
    wanted.into_iter().filter(far).collect()
}
