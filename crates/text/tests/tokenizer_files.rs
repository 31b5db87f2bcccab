//! Loading of `tokenizer.json` and `tokenizer_config.json`, good and bad.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::read;
use qwill_text::{Markers, TextError, Tokenizer};
use serde_json::{Value, json};

fn file() -> Value {
    serde_json::from_slice(&read("models/tiny/tokenizer.json")).unwrap()
}

fn load(file: &Value, config: Option<&Value>) -> Result<Tokenizer, TextError> {
    let config = config.map(|config| serde_json::to_vec(config).unwrap());
    Tokenizer::from_json(&serde_json::to_vec(file).unwrap(), config.as_deref())
}

/// The error after one change to the tiny model's file.
fn error_after(change: impl FnOnce(&mut Value)) -> TextError {
    let mut file = file();
    change(&mut file);
    load(&file, None).err().expect("an error")
}

#[test]
fn tokens_that_only_the_config_knows_are_added() {
    let decoder = json!({"added_tokens_decoder": {
        "8200": {"content": "<tts_pad>", "special": true},
        "8191": {"content": "<not_this>", "special": true},
        "8201": {"content": "<think>", "special": true},
    }});
    let tokenizer = load(&file(), Some(&decoder)).unwrap();
    assert_eq!(tokenizer.encode("a<tts_pad>", Markers::All), [64, 8200]);
    assert!(tokenizer.is_special(8200));
    assert_eq!(tokenizer.vocab_size(), 8201);
    assert_eq!(tokenizer.token_bytes(8195), None);
    // What tokenizer.json says of an id or a text stands.
    assert_eq!(tokenizer.token_bytes(8191), Some(&b"</think>"[..]));
    assert_eq!(tokenizer.id_of("<think>"), Some(8190));
    assert_eq!(tokenizer.id_of("<not_this>"), None);
}

#[test]
fn merges_may_be_written_as_words() {
    let mut file = file();
    for merge in file["model"]["merges"].as_array_mut().unwrap() {
        *merge = json!(format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
    }
    let text = "Hello, world! Hvad hedder du?";
    let expected = common::TOKENIZER.encode(text, Markers::None);
    assert_eq!(load(&file, None).unwrap().encode(text, Markers::None), expected);
}

#[test]
fn another_kind_of_tokenizer_is_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 8] = [
        (|file| file["model"]["type"] = json!("Unigram"), "model"),
        (|file| file["model"]["byte_fallback"] = json!(true), "model"),
        (|file| file["model"]["ignore_merges"] = json!(true), "model"),
        (|file| file["normalizer"] = json!({"type": "Lowercase"}), "normalizer"),
        (
            |file| file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"\s+"),
            "pre_tokenizer",
        ),
        (|file| file["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = json!(true), "pre_tokenizer"),
        (|file| file["decoder"] = json!(null), "decoder"),
        (|file| file["added_tokens"][0]["lstrip"] = json!(true), "added_tokens"),
    ];
    for (change, expected) in cases {
        match error_after(change) {
            TextError::UnsupportedTokenizer { what, .. } => assert_eq!(what, expected),
            other => panic!("{expected}: {other}"),
        }
    }
}

#[test]
fn contradictions_are_named() {
    let missing_byte = error_after(|file| {
        file["model"]["vocab"].as_object_mut().unwrap().remove("Ġ");
    });
    assert!(missing_byte.to_string().contains("0x20"), "{missing_byte}");
    let unknown_merge = error_after(|file| file["model"]["merges"][0] = json!(["Ġ", "☃"]));
    assert!(unknown_merge.to_string().contains("☃"), "{unknown_merge}");
    let huge_id = error_after(|file| file["added_tokens"][0]["id"] = json!(u32::MAX));
    assert!(huge_id.to_string().contains("4294967295"), "{huge_id}");
    assert!(matches!(Tokenizer::from_json(b"{", None), Err(TextError::Json { file: "tokenizer.json", .. })));
    let bad_config = Tokenizer::from_json(&read("models/tiny/tokenizer.json"), Some(b"{"));
    assert!(matches!(bad_config, Err(TextError::Json { file: "tokenizer_config.json", .. })));
    let bad_key = load(&file(), Some(&json!({"added_tokens_decoder": {"x": {"content": "<x>"}}})));
    assert!(bad_key.is_err_and(|error| error.to_string().contains("\"x\"")));
}
