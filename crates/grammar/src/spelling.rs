use qwill_text::Tokenizer;

/// Which tokens complete a word, by how much of it is there already.
#[derive(Debug)]
pub(crate) struct Spelling {
    word: &'static str,
    /// By bytes of the word that the text ends with: the tokens that bring the rest. Without any: those that have it all.
    completing: Vec<Vec<u32>>,
}

impl Spelling {
    /// Tokens below `vocab_size`, but for `exception`.
    pub(crate) fn new(
        word: &'static str,
        tokenizer: &Tokenizer,
        vocab_size: usize,
        exception: Option<u32>,
    ) -> Self {
        let bytes = word.as_bytes();
        let mut completing = vec![Vec::new(); bytes.len()];
        for id in (0..vocab_size as u32).filter(|id| Some(*id) != exception) {
            let Some(token) = tokenizer.token_bytes(id) else { continue };
            if token.windows(bytes.len()).any(|part| part == bytes) {
                completing[0].push(id);
            }
            for (there, tokens) in completing.iter_mut().enumerate().skip(1) {
                if token.starts_with(&bytes[there..]) {
                    tokens.push(id);
                }
            }
        }
        Self { word, completing }
    }

    /// The tokens that would complete the word behind a text.
    pub(crate) fn completing(&self, text: &[u8]) -> impl Iterator<Item = u32> {
        let is_there = |there: &usize| text.ends_with(&self.word.as_bytes()[..*there]);
        let there = (0..self.completing.len()).filter(is_there);
        there.flat_map(|there| self.completing[there].iter().copied())
    }
}
