//! Walks through texts that a guide allows.

use proptest::prelude::*;
use qwill_contract::{Allowed, Guide};
use qwill_text::Markers;
use serde_json::{Value, json};

use super::{end_ids, grammars, json, lark, tokenizer};
use crate::Shape;

/// The tokens that may come next.
pub(crate) fn allowed(guide: &mut dyn Guide) -> Vec<u32> {
    let vocab_size = tokenizer().vocab_size();
    let mut mask = vec![0; vocab_size.div_ceil(32)];
    let ids = 0..vocab_size as u32;
    match guide.allowed(&mut mask).unwrap() {
        Allowed::All => ids.collect(),
        Allowed::Masked => ids.filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect(),
    }
}

/// Cheap and without any meaning: a number for a step of a walk.
pub(crate) fn dice(seed: u64, step: usize) -> usize {
    let mut bits = seed ^ (step as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (bits ^ (bits >> 27)) as usize >> 8
}

/// Draws until the text ends; `None` where that takes too long. Ends where it may, mostly, and likes tokens that close
/// something.
pub(crate) fn walk(guide: &mut dyn Guide, seed: u64) -> Option<Vec<u32>> {
    let tokenizer = tokenizer();
    let mut text = Vec::new();
    for step in 0..300 {
        let choices = allowed(guide);
        assert!(!choices.is_empty(), "after {:?}", tokenizer.decode(&text, false));
        if choices.iter().any(|id| end_ids().contains(id))
            && (choices.len() < 3 || !dice(seed, step).is_multiple_of(4))
        {
            return Some(text);
        }
        let text_choices: Vec<u32> = choices.into_iter().filter(|id| !end_ids().contains(id)).collect();
        let closes = |id: &&u32| {
            let bytes = tokenizer.token_bytes(**id).unwrap_or_default();
            matches!(bytes, [b'"' | b'}' | b']' | b'\n' | b'<' | b'/', ..])
        };
        let closing: Vec<u32> = text_choices.iter().filter(closes).copied().collect();
        if step > 4 && dice(seed, step + 1000).is_multiple_of(3) {
            let closers =
                ["\n</parameter>\n", "\"", "}"].map(|closer| tokenizer.encode(closer, Markers::None));
            let fitting = closers.iter().find_map(|ids| {
                let count = guide.count_allowed(ids).unwrap();
                (count > 0).then(|| ids[..count].to_vec())
            });
            if let Some(ids) = fitting {
                for id in ids {
                    guide.accept(id).unwrap();
                    text.push(id);
                }
                continue;
            }
        }
        let from = if step > 8 && !closing.is_empty() { &closing } else { &text_choices };
        let token = from[dice(seed, step) % from.len()];
        assert_eq!(guide.count_allowed(&[token]).unwrap(), 1);
        guide.accept(token).unwrap();
        text.push(token);
    }
    None
}

fn shapes() -> Vec<Shape> {
    vec![
        Shape::json_object(),
        json(
            json!({"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer", "minimum": 3}},
            "required": ["name", "n"], "additionalProperties": false}),
        ),
        json(
            json!({"type": "array", "items": {"enum": ["red", "green", 4, null]}, "minItems": 2, "maxItems": 5}),
        ),
        json(json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
            "value": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"], "additionalProperties": false}}})),
        Shape::Regex(r"[0-9]{3}-[a-f]+ (yes|no)?".to_owned()),
        Shape::Choice(vec!["positive".to_owned(), "negative (a|b)".to_owned(), "pos".to_owned()]),
        lark("start: greeting \" \" NAME\ngreeting: \"hi\" | \"hello\"\nNAME: /[A-Z][a-z]{0,9}/"),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// However a guide came behind a text, with drafts that were taken back, it says the same there.
    #[test]
    fn a_guide_that_went_back_is_one_that_never_went(
        shape in prop::sample::select(shapes()),
        seed: u64,
        steps in prop::collection::vec((0usize..6, 0usize..6, any::<bool>()), 1..12),
    ) {
        let grammar = grammars().compile(&shape).unwrap();
        let (mut guide, mut text) = (grammar.guide(), Vec::new());
        for (step, (ahead, back, looks)) in steps.into_iter().enumerate() {
            let mut drafts = Vec::new();
            if looks {
                let forced = guide.forced();
                guide.count_allowed(&forced).unwrap();
                let quote = tokenizer().encode("\", \"a\": 1", Markers::None);
                guide.count_allowed(&quote).unwrap();
            }
            for draft in 0..ahead {
                if looks {
                    let forced = guide.forced();
                    guide.count_allowed(&forced).unwrap();
                }
                let choices = allowed(&mut *guide);
                let token = choices[dice(seed, step * 16 + draft) % choices.len()];
                guide.accept(token).unwrap();
                drafts.push(token);
            }
            let back = back.min(drafts.len());
            guide.roll_back(back).unwrap();
            drafts.truncate(drafts.len() - back);
            text.extend(drafts);

            let mut fresh = grammar.guide();
            for token in &text {
                fresh.accept(*token).unwrap();
            }
            let shown = tokenizer().decode(&text, false);
            prop_assert_eq!(allowed(&mut *guide), allowed(&mut *fresh), "after {:?}", shown);
            prop_assert_eq!(guide.forced(), fresh.forced(), "after {:?}", shown);
            let mut copy = guide.boxed_clone();
            prop_assert_eq!(allowed(&mut *copy), allowed(&mut *fresh), "after {:?}", shown);
        }
    }

    #[test]
    fn what_is_forced_may_come(shape in prop::sample::select(shapes()), seed: u64) {
        let mut guide = grammars().compile(&shape).unwrap().guide();
        for step in 0..40 {
            let forced = guide.forced();
            prop_assert_eq!(guide.count_allowed(&forced).unwrap(), forced.len());
            if let Some(first) = forced.first() {
                prop_assert_eq!(&allowed(&mut *guide), &vec![*first]);
            }
            let choices = allowed(&mut *guide);
            guide.accept(choices[dice(seed, step) % choices.len()]).unwrap();
        }
    }
}

#[test]
fn whole_texts_are_what_was_asked_for() {
    // Numbers of any length are JSON, and more than others can hold.
    let parse = |text: &str| match serde_json::from_str::<Value>(text) {
        Ok(value) => Some(value),
        Err(error) => {
            assert!(error.to_string().contains("out of range"), "{error} in {text}");
            None
        }
    };
    let mut ended = 0;
    for seed in 0..15 {
        for (index, shape) in shapes().iter().enumerate() {
            let mut guide = grammars().compile(shape).unwrap().guide();
            let Some(ids) = walk(&mut *guide, seed) else { continue };
            let text = tokenizer().decode(&ids, false);
            ended += 1;
            let value = if index < 4 { parse(&text) } else { Some(Value::Null) };
            let Some(value) = value else { continue };
            let fits = match index {
                0 => value.is_object(),
                1 => {
                    value["name"].is_string()
                        && value["n"].as_f64().unwrap() >= 3.0
                        && value.as_object().unwrap().len() == 2
                }
                2 => {
                    let items = value.as_array().unwrap();
                    (2..=5).contains(&items.len())
                        && items
                            .iter()
                            .all(|item| [json!("red"), json!("green"), json!(4), json!(null)].contains(item))
                }
                3 => value["value"].is_number() && (value["next"].is_object() || value["next"].is_null()),
                4 => text.as_bytes()[..3].iter().all(u8::is_ascii_digit) && text.contains('-'),
                5 => ["positive", "negative (a|b)", "pos"].contains(&text.as_str()),
                _ => text.starts_with("hi ") || text.starts_with("hello "),
            };
            assert!(fits, "{text:?} for {shape:?}");
        }
    }
    assert!(ended > 50, "only {ended} texts came to an end");
}

/// Within a string an object and a list look alike; behind it they do not.
#[test]
fn another_way_has_masks_of_its_own() {
    let grammar = grammars().compile(&Shape::json_object()).unwrap();
    let tokens = |text: &str| tokenizer().encode(text, Markers::None);
    let accept = |guide: &mut dyn Guide, text: &str| {
        for id in tokens(text) {
            guide.accept(id).unwrap();
        }
    };
    let (mut guide, mut fresh) = (grammar.guide(), grammar.guide());
    accept(&mut *guide, r#"{"a":{"b":"x"#);
    allowed(&mut *guide);
    guide.roll_back(tokens(r#"{"a":{"b":"x"#).len()).unwrap();
    for guide in [&mut guide, &mut fresh] {
        accept(&mut **guide, r#"{"a":[[["x"#);
    }
    assert_eq!(allowed(&mut *guide), allowed(&mut *fresh));
}

/// Behind its end nothing may come but ends, however often one asks.
#[test]
fn a_text_that_has_ended_stays_so() {
    let mut guide = grammars().compile(&Shape::Choice(vec!["a".to_owned()])).unwrap().guide();
    let a = tokenizer().id_of("a").unwrap();
    assert_eq!(allowed(&mut *guide), [a]);
    assert_eq!(guide.count_allowed(&[a, end_ids()[0]]).unwrap(), 1, "what is not known is not allowed");
    guide.accept(a).unwrap();
    let mut ends = end_ids();
    ends.sort_unstable();
    for _ in 0..3 {
        assert_eq!(allowed(&mut *guide), ends);
        assert_eq!(guide.count_allowed(&[ends[0], ends[1], a]).unwrap(), 2);
        guide.accept(ends[0]).unwrap();
    }
    assert!(guide.accept(a).is_err());
    guide.roll_back(4).unwrap();
    assert_eq!(allowed(&mut *guide), [a]);
}

/// Models that are unsure like to write spaces without end.
#[test]
fn white_space_comes_to_an_end() {
    let tokenizer = tokenizer();
    let mut guide = grammars().compile(&Shape::json_object()).unwrap().guide();
    let mut spaces = 0;
    for (step, first) in (0..400).map(|step| (step, step == 0)) {
        let choices = allowed(&mut *guide);
        let is_space = |id: &&u32| {
            let bytes = tokenizer.token_bytes(**id).unwrap_or_default();
            !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace)
        };
        let Some(token) = choices.iter().find(is_space).or_else(|| choices.first().filter(|_| first)) else {
            assert!(spaces > 0, "some space is fine");
            return;
        };
        spaces += usize::from(step > 0);
        guide.accept(*token).unwrap();
    }
    panic!("{spaces} spaces and no end");
}
