//! Prompts of many kinds, as ids, all from the golden data.

use serde_json::Value;

use super::{golden, golden_lines, ids};

/// A prompt and what it is.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub(crate) kind: String,
    pub(crate) ids: Vec<u32>,
}

const MESSAGE_START: u32 = 8167;
const MESSAGE_END: u32 = 8168;
const NEWLINE: u32 = 198;

/// A turn of a conversation in which a text is a user's message and the answer begins with the text's own beginning,
/// as it does when somebody asks for a copy.
pub(crate) fn copying(text: &[u32], begun: usize) -> Vec<u32> {
    [&[MESSAGE_START][..], text, &[MESSAGE_END, NEWLINE, MESSAGE_START], &text[..begun.min(text.len())]]
        .concat()
}

/// A conversation that goes on after an answer.
pub(crate) fn follow_up(prompt: &[u32], answer: &[u32], question: &[u32]) -> Vec<u32> {
    let turn = [MESSAGE_END, NEWLINE, MESSAGE_START];
    [prompt, answer, &turn, question, &turn].concat()
}

/// More than 300: conversations (thinking, tools, Danish, several turns), code, novels, encyclopedia, copies, and many
/// short strings in other scripts. Conversations that differ late share most of their tokens.
pub(crate) fn prompts() -> Vec<Prompt> {
    let mut prompts = Vec::new();
    let mut add = |kind: String, ids: Vec<u32>| {
        if !ids.is_empty() {
            prompts.push(Prompt { kind, ids });
        }
    };
    for (name, prompt) in golden("trunk.json")["prompts"].as_object().unwrap() {
        add(format!("{} ({name})", prompt["kind"].as_str().unwrap()), ids(&prompt["ids"]));
    }
    for case in golden_lines("behaviour.jsonl") {
        add(format!("question: {}", case["question"].as_str().unwrap()), ids(&case["prompt_ids"]));
    }
    let conversations = golden_lines("chat.jsonl");
    for field in ["ids_gen", "ids"] {
        for case in conversations.iter().filter(|case| case[field].is_array()) {
            add(format!("chat {} {field}", case["name"].as_str().unwrap()), ids(&case[field]));
        }
    }
    let windows = golden("perplexity.json");
    for (at, window) in windows["windows"].as_array().unwrap().iter().enumerate() {
        let text = ids(&window["ids"]);
        add(format!("encyclopedia {at}"), text[..40 + 7 * at].to_vec());
        add(format!("copy {at}"), copying(&text[..30 + 5 * at], 4 + at % 9));
    }
    let strings = golden_lines("tokenizer.jsonl");
    let long = |case: &&Value| case["ids"].as_array().is_some_and(|ids| ids.len() >= 8);
    for case in strings.iter().filter(long) {
        add(format!("string {:?}", case["text"].as_str().unwrap()), ids(&case["ids"]));
    }
    prompts
}
