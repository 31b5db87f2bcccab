//! The parts of `tokenizer.json` and `tokenizer_config.json` that are read, and the check that they describe
//! the byte-level BPE implemented here.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::scanner::Marks;
use crate::TextError;

/// Pattern of the Qwen3.5 family: combining marks stay with letters.
const PATTERN_MARKS_IN_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Pattern of Qwen2 and Qwen3, also written by tools that re-save a newer tokenizer in the older class.
const PATTERN_MARKS_AS_SYMBOLS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

#[derive(Deserialize)]
pub(super) struct TokenizerFile {
    #[serde(default)]
    pub added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    pub model: Model,
}

/// One entry of `added_tokens`, or of `added_tokens_decoder` (where the id is the key).
#[derive(Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the file's own flags")]
pub(super) struct AddedToken {
    #[serde(default)]
    pub id: u32,
    pub content: String,
    #[serde(default)]
    pub special: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    single_word: bool,
}

#[derive(Deserialize)]
pub(super) struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    pub vocab: HashMap<String, u32>,
    pub merges: Vec<Merge>,
    #[serde(default)]
    dropout: Option<f64>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// Newer files write a merge as a pair, older ones as two words with a space between.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Merge {
    Pair(String, String),
    Words(String),
}

impl Merge {
    pub(super) fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Words(words) => words.split_once(' '),
        }
    }
}

#[derive(Deserialize)]
struct ConfigFile {
    #[serde(default)]
    added_tokens_decoder: HashMap<String, AddedToken>,
}

/// How ordinary text (between markers) is prepared for BPE.
pub(super) struct TextRules {
    pub normalise_nfc: bool,
    pub marks: Marks,
}

impl TokenizerFile {
    pub(super) fn parse(json: &[u8]) -> Result<Self, TextError> {
        serde_json::from_slice(json).map_err(|source| TextError::Json { file: "tokenizer.json", source })
    }

    /// Adds the tokens that only `tokenizer_config.json` knows; where both name an id or a text,
    /// `tokenizer.json` is right.
    pub(super) fn merge_config(&mut self, config_json: &[u8]) -> Result<(), TextError> {
        let file = "tokenizer_config.json";
        let config: ConfigFile =
            serde_json::from_slice(config_json).map_err(|source| TextError::Json { file, source })?;
        let known_ids: Vec<u32> = self.added_tokens.iter().map(|token| token.id).collect();
        for (key, mut token) in config.added_tokens_decoder {
            let id = key.parse().map_err(|_| TextError::InvalidTokenizer {
                problem: format!("added_tokens_decoder of {file} has the key {key:?}, which is no token id"),
            })?;
            token.id = id;
            let known = known_ids.contains(&id)
                || self.added_tokens.iter().any(|other| other.content == token.content);
            if !known {
                self.added_tokens.push(token);
            }
        }
        Ok(())
    }

    /// Refuses every setting that would need other rules than the ones implemented here.
    pub(super) fn check(&self) -> Result<TextRules, TextError> {
        let model = &self.model;
        let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let plain_bpe = model.kind.as_deref().unwrap_or("BPE") == "BPE"
            && model.dropout.unwrap_or(0.0) == 0.0
            && !is_set(&model.continuing_subword_prefix)
            && !is_set(&model.end_of_word_suffix)
            && !model.byte_fallback
            && !model.ignore_merges;
        if !plain_bpe {
            let found = format!(
                "{:?} (dropout {:?}, prefix {:?}, suffix {:?}, byte_fallback {}, ignore_merges {})",
                model.kind,
                model.dropout,
                model.continuing_subword_prefix,
                model.end_of_word_suffix,
                model.byte_fallback,
                model.ignore_merges
            );
            let expected = "plain BPE without dropout, affixes, byte fallback or ignore_merges";
            return Err(TextError::UnsupportedTokenizer { what: "model", found, expected });
        }
        if self.decoder["type"] != "ByteLevel" {
            return Err(unsupported("decoder", &self.decoder, "ByteLevel"));
        }
        if let Some(token) =
            self.added_tokens.iter().find(|token| token.lstrip || token.rstrip || token.single_word)
        {
            let found = format!("{:?} with lstrip, rstrip or single_word", token.content);
            let expected = "tokens that match wherever they stand";
            return Err(TextError::UnsupportedTokenizer { what: "added_tokens", found, expected });
        }
        let normalise_nfc = match &self.normalizer {
            Value::Null => false,
            normalizer if normalizer["type"] == "NFC" => true,
            other => return Err(unsupported("normalizer", other, "NFC or null")),
        };
        Ok(TextRules { normalise_nfc, marks: self.pattern()? })
    }

    fn pattern(&self) -> Result<Marks, TextError> {
        let steps = &self.pre_tokenizer["pretokenizers"];
        let split = &steps[0];
        let isolated = self.pre_tokenizer["type"] == "Sequence"
            && steps.as_array().is_some_and(|steps| steps.len() == 2)
            && split["type"] == "Split"
            && split["behavior"] == "Isolated"
            && split["invert"] != json!(true)
            && steps[1]["type"] == "ByteLevel"
            && steps[1]["add_prefix_space"] == json!(false)
            && steps[1]["use_regex"] == json!(false);
        match split["pattern"]["Regex"].as_str() {
            Some(PATTERN_MARKS_IN_WORDS) if isolated => Ok(Marks::InWords),
            Some(PATTERN_MARKS_AS_SYMBOLS) if isolated => Ok(Marks::AsSymbols),
            _ => Err(unsupported(
                "pre_tokenizer",
                &self.pre_tokenizer,
                "Split by the Qwen pattern (isolated), then ByteLevel without regex and prefix space",
            )),
        }
    }
}

fn unsupported(what: &'static str, found: &Value, expected: &'static str) -> TextError {
    TextError::UnsupportedTokenizer { what, found: found.to_string(), expected }
}
