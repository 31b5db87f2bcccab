//! Stop strings and chunks in every combination that a table can hold. The numbers of cases are counted here, and
//! told in docs/compatibility.md.

use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use qwill_contract::EngineFacts;
use qwill_server::ServerOptions;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, COMPLETIONS, byte_tokens, plain_chat, with};
use crate::engine::{self, Act};

/// A server whose next answers are what the test says last.
pub(crate) struct Puppet {
    pub(crate) bench: Bench,
    acts: Arc<Mutex<Vec<Act>>>,
}

impl Puppet {
    pub(crate) fn new() -> Self {
        let acts = Arc::new(Mutex::new(Vec::new()));
        let played = Arc::clone(&acts);
        let script = Arc::new(move |_: &qwill_contract::Request, _: usize| played.lock().unwrap().clone());
        // Room for tools in the prompt.
        let facts = EngineFacts { max_context_tokens: 2048, kv_capacity_tokens: 8192, ..engine::facts() };
        Self { bench: Bench::with(ServerOptions::default(), facts, script), acts }
    }

    pub(crate) fn is_to_say(&self, acts: Vec<Act>) {
        *self.acts.lock().unwrap() = acts;
    }

    /// Asks for an answer of these steps, plain and streamed.
    async fn play(&self, path: &str, body: Value, acts: Vec<Act>) -> Answer {
        self.is_to_say(acts);
        let (plain, streamed) = self.bench.both(path, body).await;
        let (text, delta, thinking) = match path {
            CHAT => ("/message/content", "/delta/content", "/message/reasoning_content"),
            _ => ("/text", "/text", "/none"),
        };
        let choice = &plain["choices"][0];
        let string = |pointer| choice.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let answer = Answer {
            text: string(text),
            thinking: string(thinking),
            finish: choice["finish_reason"].as_str().unwrap().to_owned(),
        };
        assert_eq!(streamed.joined(0, delta), answer.text, "streamed and not");
        assert_eq!(streamed.joined(0, "/delta/reasoning_content"), answer.thinking, "streamed and not");
        assert_eq!(streamed.joined(0, "/finish_reason"), answer.finish);
        answer
    }
}

#[derive(Debug, PartialEq)]
struct Answer {
    text: String,
    thinking: String,
    finish: String,
}

pub(crate) fn steps(ids: &[u32], tokens: usize) -> Vec<Act> {
    ids.chunks(tokens).map(|step| Act::Step(step.to_vec())).collect()
}

fn base(path: &str) -> Value {
    if path == CHAT { plain_chat() } else { json!({"prompt": "x", "max_tokens": 200}) }
}

/// What stop strings leave of a text: the first that is complete counts, of several the longest.
fn cut<'a>(text: &'a str, stops: &[&str]) -> (&'a str, bool) {
    for end in 1..=text.len() {
        let longest = stops.iter().filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        if let Some(stop) = longest.max_by_key(|stop| stop.len()) {
            return (&text[..end - stop.len()], true);
        }
    }
    (text, false)
}

#[tokio::test]
async fn stop_strings_cut_exactly_whatever_a_step_brings() {
    const TEXTS: [&str; 6] = [
        "alpha END beta",
        "ababababc ab",
        "naïve 日本語 🙂 done",
        "stop? sto. st, stop!",
        "line\n\nline\n\n\nUser: hi",
        "nothing of it EN",
    ];
    const STOPS: [&[&str]; 10] = [
        &["END"],
        &["ENDLESS", "END"],
        &["abab", "babc", "c ab"],
        &["本", "🙂 d"],
        &["ï"],
        &["stop!", "stop"],
        &["\n\n\n", "\n\nUser:"],
        &["User:", "a"],
        &["zebra"],
        &["e", "ne", "one"],
    ];
    const THINKING: &str = "END of abab, 本 stop! User: e";
    let puppet = Puppet::new();
    let mut cases = 0;
    for text in TEXTS {
        for stops in STOPS {
            let (expected, stopped) = cut(text, stops);
            for step_tokens in 1..=6 {
                let more = json!({"stop": stops});
                let ids = byte_tokens(text);
                let answer = puppet
                    .play(COMPLETIONS, with(base(COMPLETIONS), more.clone()), steps(&ids, step_tokens))
                    .await;
                let context = format!("{text:?} {stops:?} {step_tokens}");
                assert_eq!((&*answer.text, &*answer.finish), (expected, "stop"), "{context}");

                let thought = byte_tokens(&format!("{THINKING}\n</think>\n\n{text}"));
                let chat = with(base(CHAT), with(more.clone(), json!({"enable_thinking": true})));
                let answer = puppet.play(CHAT, chat, steps(&thought, step_tokens)).await;
                assert_eq!((&*answer.text, &*answer.thinking), (expected, THINKING), "{context}");

                // Cut by the length instead, before the last character: what was held back is not lost.
                let most = text.char_indices().last().unwrap().0;
                let (short, stopped_before) = cut(&text[..most], stops);
                let body = with(base(COMPLETIONS), with(more, json!({"max_tokens": most})));
                let answer = puppet.play(COMPLETIONS, body, steps(&ids, step_tokens)).await;
                let finish = if stopped_before { "stop" } else { "length" };
                assert_eq!((&*answer.text, &*answer.finish), (short, finish), "{context} {stopped}");
                cases += 3;
            }
        }
    }
    assert!(cases >= 360, "{cases} cases");
}

/// What a stream has to look like.
struct Expected {
    choices: usize,
    usage: bool,
    logprobs: bool,
    fails: bool,
    finish_reason: &'static str,
}

#[tokio::test]
async fn chunks_follow_the_rules_of_their_endpoint() {
    let puppet = Puppet::new();
    let text = |text: &str| byte_tokens(text);
    let scenes: [(&str, Value, Vec<u32>, Option<Act>); 8] = [
        ("text", json!({}), text("Some text."), None),
        ("nothing", json!({}), Vec::new(), None),
        ("thinking", json!({"enable_thinking": true}), text("Hm.\n</think>\n\nYes."), None),
        ("two", json!({"n": 2}), text("ab"), None),
        ("length", json!({"max_tokens": 3}), text("abcdef"), None),
        ("stop", json!({"stop": "d"}), text("abcdef"), None),
        ("logprobs", json!({"logprobs": 1}), text("né"), None),
        ("error", json!({}), text("ab"), Some(Act::Fail("by design"))),
    ];
    let mut cases = 0;
    for (name, more, ids, last) in &scenes {
        for path in [CHAT, COMPLETIONS] {
            for usage in [false, true] {
                for step_tokens in [1, 3] {
                    let mut body = with(base(path), more.clone());
                    if path == CHAT && *name == "logprobs" {
                        body = with(body, json!({"logprobs": true, "top_logprobs": 1}));
                    }
                    if path == COMPLETIONS {
                        body.as_object_mut().unwrap().remove("enable_thinking");
                    }
                    let script: Vec<Act> = steps(ids, step_tokens).into_iter().chain(last.clone()).collect();
                    let finish_reason = if *name == "length" { "length" } else { "stop" };
                    if last.is_none() {
                        puppet.is_to_say(script.clone());
                        let plain = puppet.bench.post(path, body.clone()).await.json();
                        assert_eq!(plain["choices"][0]["finish_reason"], finish_reason, "{plain}");
                    }
                    body = with(body, json!({"stream": true, "stream_options": {"include_usage": usage}}));
                    puppet.is_to_say(script);
                    let reply = puppet.bench.post(path, body).await;
                    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
                    let expected = Expected {
                        choices: if *name == "two" { 2 } else { 1 },
                        usage,
                        logprobs: *name == "logprobs",
                        fails: last.is_some(),
                        finish_reason,
                    };
                    check_chunks(path, &reply.events(), &expected, &reply.body);
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, 64);
}

fn check_chunks(path: &str, events: &[Value], expected: &Expected, context: &str) {
    let mut events = events.to_vec();
    if expected.fails {
        let error = events.pop().unwrap();
        assert!(error["error"]["message"].is_string() && error.as_object().unwrap().len() == 1, "{context}");
    } else if expected.usage {
        let last = events.pop().unwrap();
        assert_eq!(last["choices"], json!([]), "{context}");
        assert!(last["usage"]["total_tokens"].is_u64(), "{context}");
    }
    let object = if path == CHAT { "chat.completion.chunk" } else { "text_completion" };
    for event in &events {
        assert_eq!(event["object"], object);
        for name in ["id", "created", "model", "system_fingerprint"] {
            assert_eq!(event[name], events[0][name], "{context}");
        }
        assert_eq!(event["choices"].as_array().unwrap().len(), 1, "{context}");
        assert_eq!(event.get("usage"), expected.usage.then_some(&Value::Null), "{context}");
    }
    for index in 0..expected.choices {
        let of_choice = |event: &&Value| event["choices"][0]["index"] == index;
        let mut chunks: Vec<&Value> =
            events.iter().filter(of_choice).map(|event| &event["choices"][0]).collect();
        if path == CHAT {
            assert_eq!(chunks.remove(0)["delta"], json!({"role": "assistant", "content": ""}), "{context}");
        }
        if !expected.fails {
            let last = chunks.pop().unwrap();
            assert_eq!(last["finish_reason"], expected.finish_reason, "{context}");
            assert_eq!(last["logprobs"], Value::Null, "{context}");
            let nothing = if path == CHAT { last["delta"] == json!({}) } else { last["text"] == "" };
            assert!(nothing, "the reason comes alone: {context}");
        }
        for chunk in chunks {
            assert_eq!(chunk["finish_reason"], Value::Null, "{context}");
            assert_eq!(chunk["logprobs"].is_object(), expected.logprobs, "{context}");
            check_text(path, chunk, expected.logprobs, context);
        }
    }
}

/// A chunk between the first and the last brings text, of one kind.
fn check_text(path: &str, chunk: &Value, may_be_empty: bool, context: &str) {
    if path == COMPLETIONS {
        assert!(may_be_empty || chunk["text"] != "", "{context}");
        return;
    }
    let delta = chunk["delta"].as_object().unwrap();
    assert_eq!(delta.get("reasoning"), delta.get("reasoning_content"), "{context}");
    let texts: Vec<&Value> = ["content", "reasoning"].iter().filter_map(|&name| delta.get(name)).collect();
    assert_eq!(texts.len(), 1, "{context}");
    assert!(may_be_empty || texts[0] != "", "{context}");
    assert!(!delta.contains_key("role"), "{context}");
}
