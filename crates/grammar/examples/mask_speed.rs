//! How long grammars take: sorting the vocabulary, compiling, and each mask along a text.
//!
//! `cargo run --release -p qwill-grammar --example mask_speed [TOKENIZER_JSON [IDS]]`: a vocabulary with fewer than so many ids
//! (248,044, those of the 27B, where nothing is said) is filled up with pairs of its own tokens.
#![allow(clippy::unwrap_used, reason = "an example may fail this way")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use qwill_contract::Guide;
use qwill_grammar::{Grammars, Shape};
use qwill_text::Tokenizer;
use serde_json::{Value, json};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny/tokenizer.json");
const END: &str = "<|im_end|>";

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| TINY.to_owned());
    let ids: usize = arguments.next().map_or(248_044, |ids| ids.parse().unwrap());
    let file = filled_up(&std::fs::read(path).unwrap(), ids);
    let tokenizer = Arc::new(Tokenizer::from_json(&file, None).unwrap());
    let end = tokenizer.id_of(END).unwrap();
    let grammars = Grammars::new(Arc::clone(&tokenizer), tokenizer.vocab_size(), &[end]);
    let started = Instant::now();
    grammars.prepare();
    println!("{} ids, sorted in {:.2?}", tokenizer.vocab_size(), started.elapsed());
    println!(
        "{:<12} {:>10} {:>10} {:>10} {:>10} {:>7}",
        "shape", "compiling", "median", "95 %", "most", "masks"
    );
    for (name, shape) in shapes() {
        let started = Instant::now();
        let grammar = grammars.compile(&shape).unwrap();
        let compiling = started.elapsed();
        let mut masks: Vec<Duration> = (0..20)
            .flat_map(|seed| masks(&mut *grammar.guide(), tokenizer.vocab_size(), end, seed))
            .collect();
        masks.sort_unstable();
        let at = |share: f64| masks[((masks.len() - 1) as f64 * share) as usize];
        let times = [compiling, at(0.5), at(0.95), at(1.0)].map(|time| format!("{time:.1?}"));
        let [compiling, median, most_95, most] = times;
        println!("{name:<12} {compiling:>10} {median:>10} {most_95:>10} {most:>10} {:>7}", masks.len());
    }
}

fn shapes() -> Vec<(&'static str, Shape)> {
    let json = |schema: Value| Shape::Json { schema, lenient: false };
    let person = json!({"type": "object", "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"}, "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "home": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city", "zip"], "additionalProperties": false}},
        "required": ["name", "age", "mail", "tags", "home"], "additionalProperties": false});
    vec![
        ("json_object", Shape::json_object()),
        ("schema", json(person)),
        ("regex", Shape::Regex(r"[A-Z][a-z]+(, [a-z ]+){2,5}\.".to_owned())),
        ("choice", Shape::Choice((0..500).map(|index| format!("answer number {index}")).collect())),
    ]
}

/// The times of the masks along a text that is drawn at random.
fn masks(guide: &mut dyn Guide, vocab_size: usize, end: u32, seed: usize) -> Vec<Duration> {
    let mut times = Vec::new();
    let mut mask = vec![0u32; vocab_size.div_ceil(32)];
    for step in 0..100 {
        let started = Instant::now();
        guide.allowed(&mut mask).unwrap();
        times.push(started.elapsed());
        let choices: Vec<u32> =
            (0..vocab_size as u32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        let token = choices[(seed * 7919 + step * 104_729) % choices.len()];
        if token == end {
            break;
        }
        guide.accept(token).unwrap();
    }
    times
}

/// A tokenizer file with at least so many ids.
fn filled_up(file: &[u8], ids: usize) -> Vec<u8> {
    let mut file: Value = serde_json::from_slice(file).unwrap();
    let markers = file["added_tokens"].as_array().map_or(0, Vec::len);
    let vocab = file["model"]["vocab"].as_object_mut().unwrap();
    let words: Vec<String> = vocab.keys().cloned().collect();
    let mut next = vocab.len() + markers;
    for turn in 1.. {
        for (index, word) in words.iter().enumerate() {
            if next >= ids {
                return serde_json::to_vec(&file).unwrap();
            }
            let joined = format!("{word}{}", words[(index * 31 + turn * 977) % words.len()]);
            if !vocab.contains_key(&joined) {
                vocab.insert(joined, next.into());
                next += 1;
            }
        }
    }
    unreachable!("there are more pairs than ids")
}
