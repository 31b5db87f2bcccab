//! Text from a stream of token ids.

use std::sync::Arc;

use crate::Tokenizer;

/// Turns ids into text as they arrive and never splits a character: bytes of an unfinished one wait for the
/// next token. The pieces joined are [`Tokenizer::decode`] of all ids.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Bytes of an unfinished character, at most three.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// `skip_special` leaves out markers flagged special (`<|im_end|>`), not the others (`</think>`).
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, pending: Vec::new() }
    }

    /// The text that `id` completes, possibly empty.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(id) {
            return String::new();
        }
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        if self.pending.is_empty()
            && let Ok(text) = str::from_utf8(bytes)
        {
            return text.to_owned();
        }
        self.pending.extend_from_slice(bytes);
        self.take_complete()
    }

    /// The end of the stream: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }

    /// Removes everything from `pending` that later bytes cannot change.
    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        let mut complete = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            complete += chunk.valid().len();
            let invalid = chunk.invalid();
            // An error without a length is a sequence that the end of input cut off.
            let cut_off = str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            let may_continue = cut_off && complete + invalid.len() == self.pending.len();
            if !invalid.is_empty() && !may_continue {
                text.push(char::REPLACEMENT_CHARACTER);
                complete += invalid.len();
            }
        }
        self.pending.drain(..complete);
        text
    }
}
