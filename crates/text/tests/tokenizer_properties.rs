//! The tokenizer against an independent implementation of the same file, and laws that hold for any text.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use common::{TOKENIZER, bytes, read};
use proptest::prelude::*;
use qwill_text::{Detokenizer, Markers, Tokenizer};
use serde_json::{Value, json};
use unicode_normalization_alignments::UnicodeNormalization;

/// The same tokenizer, executed by the `tokenizers` crate; without markers for [`Markers::None`].
fn reference(with_markers: bool, pattern: Option<&str>) -> (tokenizers::Tokenizer, Vec<u8>) {
    let mut file: Value = serde_json::from_slice(&read("models/tiny/tokenizer.json")).unwrap();
    if !with_markers {
        file["added_tokens"] = json!([]);
    }
    if let Some(pattern) = pattern {
        file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(pattern);
    }
    let file = serde_json::to_vec(&file).unwrap();
    (tokenizers::Tokenizer::from_bytes(&file).unwrap(), file)
}

static WITH_MARKERS: LazyLock<tokenizers::Tokenizer> = LazyLock::new(|| reference(true, None).0);
static WITHOUT_MARKERS: LazyLock<tokenizers::Tokenizer> = LazyLock::new(|| reference(false, None).0);

fn reference_ids(tokenizer: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// Text in which the corner cases of the pattern are frequent.
fn awkward_text() -> impl Strategy<Value = String> {
    let parts = prop::sample::select(vec![
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "\u{a0}",
        "\u{3000}",
        "\u{85}",
        "\u{2028}",
        "a",
        "é",
        "e\u{301}",
        "\u{301}",
        "Æ",
        "日",
        "ﷺ",
        "'s",
        "'S",
        "'ſ",
        "'re",
        "'LL",
        "'",
        "1",
        "²",
        "١",
        "!",
        "...",
        "😀",
        "\u{200d}",
        "\u{0}",
        "<",
        "<think>",
        "<|im_end|>",
        "<|im_",
        "end|>",
        ">",
        "\u{338}",
        "the",
        "हि",
        "한",
        "ᄒ",
        "ᅡ",
    ]);
    let any_char = any::<char>().prop_map(String::from);
    let part = prop_oneof![4 => parts.prop_map(str::to_owned), 1 => any_char];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn plain_text_has_the_ids_of_the_reference(text in awkward_text()) {
        prop_assert_eq!(TOKENIZER.encode(&text, Markers::None), reference_ids(&WITHOUT_MARKERS, &text));
    }

    #[test]
    fn text_with_markers_has_the_ids_of_the_reference(text in awkward_text()) {
        prop_assert_eq!(TOKENIZER.encode(&text, Markers::All), reference_ids(&WITH_MARKERS, &text));
    }

    #[test]
    fn plain_ids_are_the_bytes_of_the_nfc_text(text in awkward_text()) {
        let nfc: String = text.nfc().map(|(c, _)| c).collect();
        let ids = TOKENIZER.encode(&text, Markers::None);
        prop_assert_eq!(bytes(&ids), nfc.as_bytes());
        prop_assert!(ids.iter().all(|&id| !TOKENIZER.is_special(id)));
        prop_assert_eq!(TOKENIZER.decode(&ids, true), nfc);
    }

    #[test]
    fn streamed_ids_are_the_decoded_ids(
        ids in prop::collection::vec(prop_oneof![0u32..300, 8160u32..8200], 0..24),
        skip_special: bool,
    ) {
        let mut detokenizer = Detokenizer::new(TOKENIZER.clone(), skip_special);
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text += &detokenizer.finish();
        prop_assert_eq!(text, TOKENIZER.decode(&ids, skip_special));
    }
}

#[test]
fn the_older_pattern_has_the_ids_of_the_reference() {
    let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let (reference, file) = reference(false, Some(pattern));
    let tokenizer = Tokenizer::from_json(&file, None).unwrap();
    let config = ProptestConfig::with_cases(1000);
    proptest!(config, |(text in awkward_text())| {
        prop_assert_eq!(tokenizer.encode(&text, Markers::None), reference_ids(&reference, &text));
    });
}

/// Doubling the text must not much more than double the time.
#[test]
fn monotonous_text_takes_no_quadratic_time() {
    for unit in ["a", " ", "\n", "!", "\u{301}", "<", "<|", " \n", "日", "\u{1F600}"] {
        let text = unit.repeat(1_000_000 / unit.len());
        let start = Instant::now();
        let ids = TOKENIZER.encode(&text, Markers::All);
        let took = start.elapsed();
        assert!(!ids.is_empty());
        assert!(took < Duration::from_secs(8), "1 MB of {unit:?} took {took:?}");
        println!("1 MB of {unit:?}: {} tokens in {took:?}", ids.len());
    }
}

/// A figure, not a test of one: `cargo test --release -p qwill-text -- --ignored --nocapture speed`.
#[test]
#[ignore = "prints the speed; run it in a release build"]
fn speed_of_a_long_prompt() {
    // Different files, none twice: repeated words are cheap, and real prompts do not repeat themselves as much.
    let files =
        ["README.md", "cases.py", "check_golden.py", "make_golden.py", "behaviour.jsonl", "../Cargo.lock"];
    let text: String = files.map(|file| String::from_utf8(read(&format!("golden/{file}"))).unwrap()).concat();
    let best = |encode: &dyn Fn() -> usize| {
        (0..10)
            .map(|_| {
                let start = Instant::now();
                (encode(), start.elapsed())
            })
            .min_by_key(|run| run.1)
            .unwrap()
    };
    let (tokens, took) = best(&|| TOKENIZER.encode(&text, Markers::All).len());
    println!("{} bytes, {tokens} tokens: {took:?}", text.len());
    let (tokens, took) = best(&|| reference_ids(&WITH_MARKERS, &text).len());
    println!("reference implementation: {tokens} tokens: {took:?}");
}
