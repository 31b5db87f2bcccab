//! Byte-level BPE: text to token ids and back.

mod alphabet;
mod bpe;
mod file;
mod markers;
mod scanner;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::TextError;
use alphabet::Alphabet;
use bpe::{Bpe, Scratch};
use file::{Merge, Model, TextRules, TokenizerFile};
pub use markers::Markers;
pub(crate) use markers::{Marker, MarkerTable};
use scanner::Pieces;

/// A tokenizer read from `tokenizer.json`. Immutable after loading: share it in an [`std::sync::Arc`].
///
/// Between markers, text is put in NFC, cut into pieces by the pattern of the Qwen family and merged piece by
/// piece. No token is added at the start or end.
pub struct Tokenizer {
    bpe: Bpe,
    rules: TextRules,
    markers: MarkerTable,
    tokens: TokenTable,
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and from `tokenizer_config.json` the `added_tokens_decoder` entries that
    /// `tokenizer.json` lacks.
    ///
    /// # Errors
    /// [`TextError::Json`] for malformed files, [`TextError::UnsupportedTokenizer`] for a tokenizer of another
    /// kind and [`TextError::InvalidTokenizer`] for one that contradicts itself.
    pub fn from_json(tokenizer_json: &[u8], tokenizer_config_json: Option<&[u8]>) -> Result<Self, TextError> {
        let mut file = TokenizerFile::parse(tokenizer_json)?;
        if let Some(config_json) = tokenizer_config_json {
            file.merge_config(config_json)?;
        }
        let rules = file.check()?;
        let bpe = build_bpe(&file.model)?;
        let markers: Vec<Marker> = file
            .added_tokens
            .into_iter()
            .map(|token| Marker { text: token.content, id: token.id, special: token.special })
            .collect();
        let tokens = TokenTable::new(&file.model.vocab, &markers)?;
        Ok(Self { bpe, rules, markers: MarkerTable::new(markers), tokens })
    }

    /// Token ids of `text`. Never fails: every byte has a token.
    pub fn encode(&self, text: &str, mode: Markers) -> Vec<u32> {
        self.encode_where(text, |_, marker| match mode {
            Markers::All => true,
            Markers::SpecialAsText => !marker.special,
            Markers::None => false,
        })
    }

    /// Encodes `text`, parsing those markers that `accept`, given their byte position, takes. What lies between
    /// two of them is encoded as one stretch.
    pub(crate) fn encode_where(&self, text: &str, accept: impl Fn(usize, &Marker) -> bool) -> Vec<u32> {
        let mut stretches = Vec::new();
        let mut done = 0;
        while let Some((at, marker)) = self.markers.find(text, done, &accept) {
            stretches.push((self.normalise(&text[done..at]), Some(marker.id)));
            done = at + marker.text.len();
        }
        stretches.push((self.normalise(&text[done..]), None));
        self.encode_stretches(&stretches)
    }

    /// Encodes stretches of plain text, each followed by its marker.
    fn encode_stretches(&self, stretches: &[(Cow<'_, str>, Option<u32>)]) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut scratch = Scratch::default();
        // A piece always has the same ids: repeated ones are copied from where they stood first.
        let mut known: HashMap<&str, Range<usize>> = HashMap::new();
        for (text, marker) in stretches {
            for piece in Pieces::new(text, self.rules.marks) {
                if let Some(range) = known.get(piece) {
                    ids.extend_from_within(range.clone());
                } else {
                    let start = ids.len();
                    self.bpe.encode(piece.as_bytes(), &mut scratch, &mut ids);
                    known.insert(piece, start..ids.len());
                }
            }
            ids.extend(marker);
        }
        ids
    }

    fn normalise<'a>(&self, text: &'a str) -> Cow<'a, str> {
        // Below U+0300 nothing combines, and everything is in NFC.
        let settled = !self.rules.normalise_nfc
            || text.chars().all(|c| c < '\u{300}')
            || matches!(is_nfc_quick(text.chars()), IsNormalized::Yes);
        if settled { Cow::Borrowed(text) } else { Cow::Owned(text.nfc().map(|(c, _)| c).collect()) }
    }

    /// Number of ids up to the highest that has text. A model may have more rows than this (padding).
    pub fn vocab_size(&self) -> usize {
        self.tokens.spans.len()
    }

    /// Bytes of a token, which may be part of a character; the text of a marker. `None` for an unused id.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.bytes(id)
    }

    /// Whether `id` is a marker flagged special, which [`Tokenizer::decode`] can leave out.
    pub fn is_special(&self, id: u32) -> bool {
        self.markers.iter().any(|marker| marker.special && marker.id == id)
    }

    /// Whether `id` is a marker, special or not.
    pub fn is_marker(&self, id: u32) -> bool {
        self.markers.iter().any(|marker| marker.id == id)
    }

    /// Id of the token whose text is exactly `token` (as text, not in the byte-level alphabet).
    pub fn id_of(&self, token: &str) -> Option<u32> {
        let marker = self.markers.iter().find(|marker| marker.text == token);
        marker.map(|marker| marker.id).or_else(|| self.tokens.id_of(token.as_bytes()))
    }

    /// Text of `ids`; bytes that are no UTF-8 become U+FFFD, one for each maximal cut-off sequence. Ids without
    /// text give nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn markers(&self) -> &MarkerTable {
        &self.markers
    }
}

fn build_bpe(model: &Model) -> Result<Bpe, TextError> {
    let alphabet = Alphabet::new();
    let mut byte_ids = [None; 256];
    for (token, &id) in &model.vocab {
        if let [byte] = alphabet.decode(token)[..] {
            byte_ids[usize::from(byte)] = Some(id);
        }
    }
    let mut ids = [0; 256];
    for (byte, id) in byte_ids.into_iter().enumerate() {
        ids[byte] = id.ok_or_else(|| TextError::InvalidTokenizer {
            problem: format!("the vocabulary has no token for the byte {byte:#04x}"),
        })?;
    }
    let merges = model.merges.iter().map(|merge| resolve(model, merge)).collect::<Result<Vec<_>, _>>()?;
    Ok(Bpe::new(&ids, merges.into_iter()))
}

/// Ids of a merge: left, right and the token they become.
fn resolve(model: &Model, merge: &Merge) -> Result<(u32, u32, u32), TextError> {
    let invalid = |reason: &str| TextError::InvalidTokenizer { problem: format!("a merge {reason}") };
    let (left, right) = merge.parts().ok_or_else(|| invalid("is not two words"))?;
    let id = |token: &str| {
        model.vocab.get(token).copied().ok_or_else(|| invalid(&format!("names {token:?}, which is no token")))
    };
    Ok((id(left)?, id(right)?, id(&format!("{left}{right}"))?))
}

/// The bytes of every token.
struct TokenTable {
    /// All tokens, one after the other.
    blob: Vec<u8>,
    /// By id: where in `blob`.
    spans: Vec<Option<Range<u32>>>,
    /// Ids in the order of their bytes.
    sorted: Vec<u32>,
}

/// Far above any vocabulary; keeps a wrong id in a file from asking for gigabytes.
const MAX_IDS: u32 = 1 << 24;

impl TokenTable {
    fn new(vocab: &HashMap<String, u32>, markers: &[Marker]) -> Result<Self, TextError> {
        let alphabet = Alphabet::new();
        let mut table = Self { blob: Vec::new(), spans: Vec::new(), sorted: Vec::new() };
        for (token, &id) in vocab {
            table.add(id, &alphabet.decode(token))?;
        }
        // Markers last: the same id may stand in the vocabulary too, and then the marker's text counts.
        for marker in markers {
            table.add(marker.id, marker.text.as_bytes())?;
        }
        let mut sorted: Vec<u32> =
            (0..table.spans.len() as u32).filter(|&id| table.bytes(id).is_some()).collect();
        sorted.sort_by_key(|&id| (table.bytes(id), id));
        table.sorted = sorted;
        Ok(table)
    }

    fn add(&mut self, id: u32, bytes: &[u8]) -> Result<(), TextError> {
        if id >= MAX_IDS {
            let problem = format!("token id {id} is above {MAX_IDS}");
            return Err(TextError::InvalidTokenizer { problem });
        }
        let index = id as usize;
        if index >= self.spans.len() {
            self.spans.resize(index + 1, None);
        }
        let start = self.blob.len() as u32;
        self.blob.extend_from_slice(bytes);
        self.spans[index] = Some(start..self.blob.len() as u32);
        Ok(())
    }

    fn bytes(&self, id: u32) -> Option<&[u8]> {
        let span = self.spans.get(id as usize)?.as_ref()?;
        Some(&self.blob[span.start as usize..span.end as usize])
    }

    fn id_of(&self, bytes: &[u8]) -> Option<u32> {
        let found = self.sorted.binary_search_by(|&id| self.bytes(id).cmp(&Some(bytes))).ok()?;
        Some(self.sorted[found])
    }
}
