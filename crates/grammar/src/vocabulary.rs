use std::sync::Arc;

use qwill_text::{Markers, Tokenizer};
use toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// The tokenizer as grammars see it: tokens are bytes, markers are no text.
pub(crate) struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl Vocabulary {
    /// Of the ids below `vocab_size`; there is at least one of `end_ids`, and all are below it.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, end_ids: &[u32]) -> Self {
        let word = |id: u32| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            // No UTF-8 text has this byte, so no grammar of text has a marker.
            let mark: &[u8] = if tokenizer.is_marker(id) { &[TokTrie::SPECIAL_TOKEN_MARKER] } else { &[] };
            [mark, bytes].concat()
        };
        let words: Vec<Vec<u8>> = (0..vocab_size as u32).map(word).collect();
        let info = TokRxInfo::new(vocab_size as u32, end_ids.first().copied().unwrap_or_default());
        let trie = TokTrie::from(&info, &words).with_eos_tokens(end_ids);
        Self { tokenizer, trie }
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// As the model has learnt it, where that has the same bytes: text is put in NFC before it is cut into tokens.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let learnt = std::str::from_utf8(bytes).ok().map(|text| self.tokenizer.encode(text, Markers::None));
        let same = |ids: &Vec<u32>| {
            let token = |id: &u32| self.tokenizer.token_bytes(*id).unwrap_or_default();
            ids.iter().flat_map(token).eq(bytes)
        };
        learnt.filter(same).unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}
