//! The tiny model's tokenizer and the golden files.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use qwill_text::{ChatTemplate, Tokenizer};
use serde_json::Value;

pub(crate) fn read(path: &str) -> Vec<u8> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    std::fs::read(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub(crate) fn json_lines(path: &str) -> Vec<Value> {
    let text = String::from_utf8(read(path)).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

pub(crate) static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let config = read("models/tiny/tokenizer_config.json");
    Arc::new(Tokenizer::from_json(&read("models/tiny/tokenizer.json"), Some(&config)).expect("a tokenizer"))
});

pub(crate) static TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
    ChatTemplate::from_tokenizer_config(&read("models/tiny/tokenizer_config.json"), None).expect("a template")
});

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("a list of ids")
}

pub(crate) fn bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|&id| TOKENIZER.token_bytes(id).expect("a token")).copied().collect()
}
