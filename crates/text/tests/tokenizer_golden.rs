//! `golden/tokenizer.jsonl`: ids of every string three ways, and ids cut inside characters.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{TOKENIZER, bytes, ids, json_lines};
use qwill_text::{Detokenizer, Markers};
use serde_json::Value;

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Text from ids pushed one at a time; every piece is a whole number of characters by its type.
fn streamed(ids: &[u32], skip_special: bool) -> String {
    let mut detokenizer = Detokenizer::new(TOKENIZER.clone(), skip_special);
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text += &detokenizer.finish();
    text
}

fn rows(key: &str) -> Vec<Value> {
    json_lines("golden/tokenizer.jsonl").into_iter().filter(|row| row.get(key).is_some()).collect()
}

#[test]
fn strings_give_the_reference_ids_in_every_mode() {
    let rows = rows("text");
    assert_eq!(rows.len(), 252);
    for row in rows {
        let text = row["text"].as_str().unwrap();
        assert_eq!(TOKENIZER.encode(text, Markers::All), ids(&row["ids"]), "{text:?}");
        let special_as_text = TOKENIZER.encode(text, Markers::SpecialAsText);
        assert_eq!(special_as_text, ids(&row["ids_special_as_text"]), "{text:?}");
        let plain = TOKENIZER.encode(text, Markers::None);
        assert_eq!(plain, ids(&row["ids_plain"]), "{text:?}");
        assert_eq!(hex(&bytes(&plain)), row["bytes_plain"], "{text:?}");
    }
}

#[test]
fn reference_ids_give_the_reference_text() {
    for row in rows("text") {
        let ids = ids(&row["ids"]);
        assert_eq!(hex(&bytes(&ids)), row["bytes"]);
        for (skip_special, key) in [(false, "decoded"), (true, "decoded_skip_special")] {
            assert_eq!(TOKENIZER.decode(&ids, skip_special), row[key]);
            assert_eq!(streamed(&ids, skip_special), row[key]);
        }
    }
}

#[test]
fn ids_cut_inside_characters_give_the_reference_text() {
    let rows = rows("decode_only");
    assert_eq!(rows.len(), 104);
    for row in rows {
        let ids = ids(&row["decode_only"]);
        assert_eq!(hex(&bytes(&ids)), row["bytes"]);
        for (&id, expected) in ids.iter().zip(row["id_bytes"].as_array().unwrap()) {
            assert_eq!(hex(&bytes(&[id])), *expected);
        }
        assert_eq!(TOKENIZER.decode(&ids, false), row["decoded"]);
        assert_eq!(streamed(&ids, false), row["decoded"]);
    }
}

#[test]
fn tokens_are_found_by_their_text() {
    assert_eq!(TOKENIZER.vocab_size(), 8192);
    assert_eq!(TOKENIZER.id_of("<|im_end|>"), Some(8168));
    assert_eq!(TOKENIZER.id_of("</think>"), Some(8191));
    assert_eq!(TOKENIZER.id_of("Hello"), Some(6057));
    assert_eq!(TOKENIZER.id_of(" "), Some(220));
    assert_eq!(TOKENIZER.id_of("no such token"), None);
    assert!(TOKENIZER.is_special(8168) && !TOKENIZER.is_special(8191) && !TOKENIZER.is_special(6057));
    assert_eq!(TOKENIZER.token_bytes(8168), Some(&b"<|im_end|>"[..]));
    assert_eq!(TOKENIZER.token_bytes(8192), None);
    assert_eq!(TOKENIZER.decode(&[6057, u32::MAX], false), "Hello");
}
