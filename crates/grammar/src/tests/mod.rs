//! Guides over the tokens of the small model.

mod compile;
mod tools;
pub(crate) mod walk;

use std::sync::{Arc, OnceLock};

use qwill_text::Tokenizer;
use serde_json::Value;

use crate::{GrammarError, Grammars, Shape};

pub(crate) const END: &str = "<|im_end|>";

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    static LOADED: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let load = || {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny/tokenizer.json");
        Arc::new(Tokenizer::from_json(&std::fs::read(path).unwrap(), None).unwrap())
    };
    Arc::clone(LOADED.get_or_init(load))
}

pub(crate) fn end_ids() -> Vec<u32> {
    [END, "<|endoftext|>"].map(|marker| tokenizer().id_of(marker).unwrap()).to_vec()
}

pub(crate) fn grammars() -> &'static Grammars {
    static MADE: OnceLock<Grammars> = OnceLock::new();
    MADE.get_or_init(|| Grammars::new(tokenizer(), tokenizer().vocab_size(), &end_ids()))
}

pub(crate) fn refusal(shape: &Shape) -> String {
    match grammars().compile(shape) {
        Ok(_) => panic!("{shape:?} is taken"),
        Err(error @ (GrammarError::Invalid(_) | GrammarError::TooLarge { .. })) => error.to_string(),
    }
}

pub(crate) fn json(schema: Value) -> Shape {
    Shape::Json { schema, lenient: false }
}

pub(crate) fn lark(text: &str) -> Shape {
    Shape::Lark(text.to_owned())
}
