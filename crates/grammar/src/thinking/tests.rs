use std::sync::OnceLock;

use proptest::prelude::*;

use super::*;
use crate::Shape;
use crate::tests::walk::{allowed, dice, walk};
use crate::tests::{end_ids, grammars, tokenizer};

fn markers() -> Arc<ThinkingMarkers> {
    static MADE: OnceLock<Arc<ThinkingMarkers>> = OnceLock::new();
    let make = || Arc::new(ThinkingMarkers::new(tokenizer(), tokenizer().vocab_size(), &end_ids()).unwrap());
    Arc::clone(MADE.get_or_init(make))
}

fn thinking(budget: Option<usize>, answer: Option<&Shape>) -> Thinking {
    Thinking::new(markers(), budget, answer.map(|shape| grammars().compile(shape).unwrap().guide()))
}

fn choice() -> Shape {
    Shape::Choice(vec!["yes".to_owned(), "no".to_owned()])
}

fn take(guide: &mut Thinking, text: &str) {
    for id in tokenizer().encode(text, Markers::All) {
        assert_eq!(guide.count_allowed(&[id]), Ok(1), "{id} of {text:?}");
        guide.accept(id).unwrap();
    }
}

/// What is forced from here on, as text.
fn way_out(guide: &mut Thinking) -> String {
    let mut ids = Vec::new();
    while let [only] = allowed(guide)[..] {
        assert_eq!(guide.forced().first(), Some(&only));
        guide.accept(only).unwrap();
        ids.push(only);
    }
    tokenizer().decode(&ids, false)
}

#[test]
fn a_used_up_budget_leads_out() {
    let mut guide = thinking(Some(3), None);
    take(&mut guide, "a b c");
    assert_eq!(way_out(&mut guide), "\n</think>\n\n");
    assert_eq!(allowed(&mut guide).len(), tokenizer().vocab_size(), "the answer is free");

    let mut line_ended = thinking(Some(2), None);
    take(&mut line_ended, "a\n");
    assert_eq!(way_out(&mut line_ended), "</think>\n\n");
    assert_eq!(way_out(&mut thinking(Some(0), None)), "\n</think>\n\n", "as the template writes it");
    assert_eq!(thinking(Some(0), None).forced().len(), 3);
}

#[test]
fn thinking_that_ends_by_itself_is_left_alone() {
    let mut guide = thinking(Some(9), None);
    take(&mut guide, "a</think>");
    assert!(guide.forced().is_empty());
    assert!(allowed(&mut guide).len() > 1000);
    take(&mut guide, "a b c d e f g h i j k l m");
    assert!(allowed(&mut guide).len() > 1000, "the budget is for thinking");
}

#[test]
fn a_character_is_not_cut() {
    let byte = |byte: u8| (0..8192).find(|id| tokenizer().token_bytes(*id) == Some(&[byte])).unwrap();
    let mut guide = thinking(Some(1), None);
    guide.accept(byte(0xf0)).unwrap();
    for part in [0x9f, 0x99, 0x82] {
        assert!(allowed(&mut guide).len() > 1000, "{part:x}");
        guide.accept(byte(part)).unwrap();
    }
    assert_eq!(way_out(&mut guide), "\n</think>\n\n");
    let mut stubborn = thinking(Some(1), None);
    for _ in 0..4 {
        stubborn.accept(byte(0xf0)).unwrap();
    }
    stubborn.accept(byte(0xf0)).unwrap();
    assert_eq!(way_out(&mut stubborn), "\n</think>\n\n", "a budget is a budget");
}

#[test]
fn the_section_ends_with_its_marker_only() {
    let mut guide = thinking(None, Some(&choice()));
    let call = tokenizer().id_of("<tool_call>").unwrap();
    let choices = allowed(&mut guide);
    assert!(!choices.contains(&end_ids()[0]) && !choices.contains(&call));
    let letters = tokenizer().encode("</think>", Markers::None);
    let (last, first) = letters.split_last().unwrap();
    for id in first {
        guide.accept(*id).unwrap();
    }
    assert!(!allowed(&mut guide).contains(last));
    assert_eq!(guide.count_allowed(&[*last]), Ok(0));
    take(&mut guide, "</think>");
    assert_eq!(way_out(&mut guide), "\n\n");
    let id = |text: &str| tokenizer().encode(text, Markers::None)[0];
    assert!(allowed(&mut guide).contains(&id("yes")));
    assert!(!allowed(&mut guide).contains(&id("a")));
}

proptest! {
    #[test]
    fn going_back_is_never_having_gone(
        budget in prop::option::of(0usize..12),
        answer: bool,
        seed: u64,
        steps in prop::collection::vec((0usize..6, 0usize..6), 1..12),
    ) {
        let shape = choice();
        let make = || thinking(budget, answer.then_some(&shape));
        let (mut guide, mut text) = (make(), Vec::new());
        for (step, (ahead, back)) in steps.into_iter().enumerate() {
            let mut drafts = Vec::new();
            for draft in 0..ahead {
                let choices = allowed(&mut guide);
                let dice = dice(seed, step * 16 + draft);
                let close = choices.contains(&markers().close) && dice.is_multiple_of(8);
                let token = if close { markers().close } else { choices[dice % choices.len()] };
                guide.accept(token).unwrap();
                drafts.push(token);
            }
            let back = back.min(drafts.len());
            guide.roll_back(back).unwrap();
            let again = &drafts[drafts.len() - back..];
            // An end behind other tokens is not looked for.
            let known = again.iter().position(|id| end_ids().contains(id)).unwrap_or(back);
            prop_assert!(guide.count_allowed(again).unwrap() >= known);
            drafts.truncate(drafts.len() - back);
            text.extend(drafts);
            let mut fresh = make();
            for token in &text {
                fresh.accept(*token).unwrap();
            }
            prop_assert_eq!(guide.forced(), fresh.forced());
            prop_assert_eq!(allowed(&mut guide), allowed(&mut fresh));
        }
    }

    #[test]
    fn every_text_has_an_answer_behind_thinking(budget in 0usize..20, seed: u64) {
        let ids = walk(&mut thinking(Some(budget), Some(&choice())), seed).unwrap();
        let text = tokenizer().decode(&ids, false);
        let answer = text.rsplit_once("</think>\n\n").unwrap().1;
        prop_assert!(["yes", "no"].contains(&answer), "{}", text);
    }
}
