//! Grammars over the tiny model: every text that comes to its end is what was asked for, thinking before it or not, and it is the
//! same whoever drafts and whatever runs beside it.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use std::sync::Arc;

use common::client::{Client, Outcome, assert_idle, request};
use common::company::{Dice, mate, submit};
use common::{Setup, VOCAB, fast, repository};
use qwill_contract::{FinishReason, Request, SamplingParams};
use qwill_device::Activations;
use qwill_engine::speculation::{MAX_DRAFTS, SpecMode};
use qwill_grammar::{Grammars, Shape, Thinking};
use qwill_text::{Markers, Tokenizer};
use serde_json::{Value, json};

const END_IDS: [u32; 2] = [8166, 8168];

/// A shape, and whether a text is of it.
type Case = (Shape, fn(&str) -> bool);

fn value(text: &str) -> Option<Value> {
    match serde_json::from_str(text) {
        Ok(value) => Some(value),
        Err(error) => {
            // JSON, but more than fits a number.
            assert!(error.to_string().contains("out of range"), "{error} in {text}");
            None
        }
    }
}

fn cases() -> Vec<Case> {
    let strict = |schema: Value| Shape::Json { schema, lenient: false };
    vec![
        (
            strict(
                json!({"type": "object", "properties": {"odd key": {"type": "integer"}, "name": {"enum": ["x", "y"]}},
                "required": ["odd key", "name"], "additionalProperties": false}),
            ),
            |text| {
                value(text).is_none_or(|it| {
                    it["odd key"].is_number()
                        && ["x", "y"].contains(&it["name"].as_str().unwrap())
                        && it.as_object().unwrap().len() == 2
                })
            },
        ),
        (
            strict(json!({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 6})),
            |text| {
                let it = value(text).unwrap();
                (2..=6).contains(&it.as_array().unwrap().len())
                    && it.as_array().unwrap().iter().all(Value::is_boolean)
            },
        ),
        (Shape::json_object(), |text| value(text).is_none_or(|it| it.is_object())),
        (Shape::Regex("[0-9]{4}-[0-9]{2}".to_owned()), |text| {
            text.len() == 7 && text.bytes().enumerate().all(|(at, byte)| (at == 4) == (byte == b'-'))
        }),
        (Shape::Choice(vec!["positive".to_owned(), "negative".to_owned()]), |text| {
            ["positive", "negative"].contains(&text)
        }),
        (Shape::Lark("start: \"yes\" | \"no\" \", \" /[a-z]{1,12}/".to_owned()), |text| {
            text == "yes" || text.starts_with("no, ")
        }),
    ]
}

struct Text {
    tokenizer: Arc<Tokenizer>,
    grammars: Grammars,
}

impl Text {
    fn new() -> Self {
        let file = std::fs::read(repository().join("models/tiny/tokenizer.json")).unwrap();
        let tokenizer = Arc::new(Tokenizer::from_json(&file, None).unwrap());
        Self { grammars: Grammars::new(Arc::clone(&tokenizer), VOCAB, &END_IDS), tokenizer }
    }

    fn request(&self, shape: &Shape, thinks: bool, seed: u64) -> Request {
        let opened = if thinks { "<think>\n" } else { "<think>\n\n</think>\n\n" };
        let prompt = format!(
            "<|im_start|>user\nAnswer in the form that I want.<|im_end|>\n<|im_start|>assistant\n{opened}"
        );
        let answer = self.grammars.compile(shape).unwrap().guide();
        let guide = if thinks {
            let markers = self.grammars.thinking_markers().unwrap();
            Box::new(Thinking::new(markers, Some(8 + seed as usize), Some(answer)))
        } else {
            answer
        };
        let sampling = SamplingParams {
            temperature: [0.0, 0.8, 1.5][seed as usize % 3],
            seed,
            max_tokens: 120,
            min_tokens: 30 * (seed as usize % 2),
            presence_penalty: if seed == 4 { 1.0 } else { 0.0 },
            logit_bias: if seed == 5 { vec![(8166, 5.0)] } else { Vec::new() },
            logprobs: Some(2),
            ..SamplingParams::default()
        };
        let prompt = self.tokenizer.encode(&prompt, Markers::All);
        Request { guide: Some(guide), ..request(&prompt, sampling) }
    }

    /// The text behind thinking, if it came to its end.
    fn ended(&self, outcome: &Outcome) -> Option<String> {
        let ids = outcome.ids(0);
        match &outcome.choices[0].end {
            Some(FinishReason::Stop { token }) => {
                assert!(END_IDS.contains(token) && ids.last() == Some(token));
                let text = self.tokenizer.decode(&ids[..ids.len() - 1], false);
                Some(text.rsplit_once("</think>\n\n").map_or(text.as_str(), |(_, answer)| answer).to_owned())
            }
            Some(FinishReason::Length) => None,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn answers_have_their_form_and_drafts_do_not_change_them() {
    let text = Text::new();
    let mut requests = Vec::new();
    for (index, (shape, fits)) in cases().into_iter().enumerate() {
        for thinks in [false, true] {
            for seed in (0..6).filter(|seed| (seed + index as u64).is_multiple_of(2)) {
                requests.push((text.request(&shape, thinks, seed), fits, thinks));
            }
        }
    }
    let setup = Setup { prefix_cache: false, spec: SpecMode::Off, ..Setup::int4() };
    let (handle, thread) = setup.start(|| fast(Activations::Int8));
    let plain: Vec<Outcome> = requests.iter().map(|(request, ..)| submit(&handle, request).wait()).collect();
    assert_idle(handle.load());
    thread.stop().unwrap();
    let mut ended = 0;
    for ((_, fits, thinks), outcome) in requests.iter().zip(&plain) {
        let Some(answer) = text.ended(outcome) else { continue };
        let whole = text.tokenizer.decode(&outcome.ids(0), false);
        assert!(fits(&answer) && *thinks == whole.contains("</think>"), "{whole:?}");
        ended += 1;
    }
    assert!(ended * 2 > plain.len(), "only {ended} of {} came to an end", plain.len());

    for (spec, draft_len, adaptive) in
        [(SpecMode::Mtp, MAX_DRAFTS, false), (SpecMode::Auto, 4, true), (SpecMode::Lookup, MAX_DRAFTS, false)]
    {
        let setup = Setup { spec, draft_len, adaptive, ..setup };
        let (handle, thread) = setup.start(|| fast(Activations::Int8));
        let mut dice = Dice(draft_len as u64);
        let mates: Vec<Client> = (0..3).map(|_| submit(&handle, &mate(&mut dice))).collect();
        let clients: Vec<Client> = requests.iter().map(|(request, ..)| submit(&handle, request)).collect();
        for (client, plain) in clients.into_iter().zip(&plain) {
            let outcome = client.wait();
            assert!(outcome.same_answer(plain), "{spec:?} {draft_len}:\n{outcome:?}\nplain:\n{plain:?}");
        }
        for mate in mates {
            mate.wait();
        }
        thread.stop().unwrap();
    }
}
