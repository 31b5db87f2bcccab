//! Text of every script, and bytes that are no text, cut into steps at every place, on every endpoint.

use serde_json::{Value, json};

use crate::client::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Reply, byte_ids, plain_chat, with};
use crate::engine::Act;
use crate::matrix::{Puppet, steps};

/// Bytes as a model may write them; those that are no text are at the end.
fn writings() -> Vec<Vec<u8>> {
    const TEXTS: [&str; 30] = [
        "naïve café",
        "日本語",
        "中文，标点。",
        "한국어 조합",
        "한국어",
        "русский",
        "ελληνικά",
        "עברית שלום",
        "العربية‎ مرحبا",
        "हिन्दी क्षि",
        "ไทย ภาษา",
        "🙂",
        "🙂🙃",
        "👩‍👩‍👧‍👦",
        "👍🏽 ok",
        "🇩🇰🇳🇴",
        "1️⃣ keycap",
        "🏳️‍🌈",
        "e\u{301}a\u{308}",
        "q\u{301}\u{323}",
        "Z͑ͫ̓a͌l̈́go",
        "𝔘𝔫𝔦",
        "𠜎𠜱",
        "a\u{200b}b\u{feff}c",
        "tab\tline\r\n\u{2028}end",
        "\u{0}nul\u{7f}",
        "\u{fffd} is written",
        "ﬃ ligature ß",
        "mixed: aé日🙂z",
        "ends in four 🤔",
    ];
    const NO_TEXTS: [&[u8]; 10] = [
        b"a\x80b",
        b"\xc0\xafx",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80 half",
        b"\xf5\x80\x80\x80",
        b"cut \xe6\x97",
        b"cut \xf0\x9f\x98",
        b"\xf0\x9f\x98 then text",
        b"\xff\xfe",
        b"ok \xc3",
    ];
    TEXTS.iter().map(|text| text.as_bytes().to_vec()).chain(NO_TEXTS.map(<[u8]>::to_vec)).collect()
}

/// What an answer says: its text, and the arguments of its first call.
#[derive(Debug, Default, PartialEq)]
struct Said {
    text: String,
    arguments: String,
}

impl Said {
    /// In an answer that was not streamed.
    fn of(path: &str, answer: &Value) -> Self {
        let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let choice = &answer["choices"][0];
        match path {
            COMPLETIONS => Self { text: string(&choice["text"]), ..Self::default() },
            CHAT => {
                let message = &choice["message"];
                let arguments = string(&message["tool_calls"][0]["function"]["arguments"]);
                Self { text: string(&message["content"]), arguments }
            }
            MESSAGES => {
                let mut said = Self::default();
                for block in list(&answer["content"]) {
                    said.text += &string(&block["text"]);
                    if block["type"] == "tool_use" {
                        said.arguments = block["input"].to_string();
                    }
                }
                said
            }
            _ => {
                let mut said = Self::default();
                for item in list(&answer["output"]) {
                    said.text.extend(list(&item["content"]).iter().map(|part| string(&part["text"])));
                    said.arguments += &string(&item["arguments"]);
                }
                said
            }
        }
    }

    /// In the events of a stream.
    fn of_stream(path: &str, reply: &Reply) -> Self {
        let joined = |event: &str, field: &str| -> String {
            let events = reply.named_events().into_iter().filter(|(name, _)| name == event);
            events
                .filter_map(|(_, data)| data.pointer(field).and_then(Value::as_str).map(str::to_owned))
                .collect()
        };
        let (text, arguments) = match path {
            COMPLETIONS => (reply.joined(0, "/text"), String::new()),
            CHAT => {
                (reply.joined(0, "/delta/content"), reply.joined(0, "/delta/tool_calls/0/function/arguments"))
            }
            MESSAGES => {
                let joined = |field| joined("content_block_delta", field);
                (joined("/delta/text"), joined("/delta/partial_json"))
            }
            _ => {
                let joined = |kind: &str| joined(&format!("response.{kind}.delta"), "/delta");
                (joined("output_text"), joined("function_call_arguments"))
            }
        };
        Self { text, arguments }
    }
}

fn body(path: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool = json!({"name": "f", "parameters": parameters});
    match path {
        COMPLETIONS => json!({"prompt": "x", "max_tokens": 400}),
        CHAT => with(plain_chat(), json!({"tools": [{"type": "function", "function": tool}]})),
        MESSAGES => json!({"messages": plain_chat()["messages"], "max_tokens": 400,
            "tools": [{"name": "f", "input_schema": parameters}]}),
        _ => json!({"input": "Hi", "reasoning": {"effort": "none"}, "store": false,
            "tools": [with(tool, json!({"type": "function"}))]}),
    }
}

/// The answer of these steps, which is the same streamed and not.
async fn said(puppet: &Puppet, path: &str, body: Value, acts: Vec<Act>) -> Said {
    puppet.is_to_say(acts);
    let (plain, streamed) = puppet.bench.both(path, body).await;
    let (plain, streamed) = (Said::of(path, &plain), Said::of_stream(path, &streamed));
    assert_eq!(plain.text, streamed.text, "streamed and not");
    if !(plain.arguments.is_empty() && streamed.arguments.is_empty()) {
        let parsed = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(parsed(&plain.arguments), parsed(&streamed.arguments), "streamed and not");
    }
    plain
}

#[tokio::test]
async fn characters_survive_every_split() {
    const BEFORE: &[u8] = b"<tool_call>\n<function=f>\n<parameter=city>\n";
    const AFTER: &[u8] = b"\n</parameter>\n</function>\n</tool_call>";
    let puppet = Puppet::new();
    let mut cases = 0;
    for bytes in writings() {
        let expected = String::from_utf8_lossy(&bytes);
        for path in [CHAT, COMPLETIONS, MESSAGES, RESPONSES] {
            let ids = byte_ids(&bytes);
            let call = byte_ids(&[BEFORE, &bytes, AFTER].concat());
            for split in 1..=ids.len() {
                let (left, right) = ids.split_at(split);
                let acts = vec![Act::Step(left.to_vec()), Act::Step(right.to_vec())];
                let answer = said(&puppet, path, body(path), acts).await;
                assert_eq!(answer.text, expected, "{path}: {bytes:x?} split at {split}");
                cases += 1;
                if path == COMPLETIONS {
                    continue;
                }
                let (left, right) = call.split_at(BEFORE.len() + split);
                let acts = vec![Act::Step(left.to_vec()), Act::Step(right.to_vec())];
                let answer = said(&puppet, path, body(path), acts).await;
                let arguments: Value = serde_json::from_str(&answer.arguments).unwrap();
                assert_eq!(arguments, json!({"city": expected}), "{path}: {bytes:x?} split at {split}");
                cases += 1;
            }
            // The end of the text and the end of the answer's length in one.
            let limit = if path == RESPONSES { "max_output_tokens" } else { "max_tokens" };
            let body = with(body(path), json!({limit: ids.len()}));
            let answer = said(&puppet, path, body, steps(&ids, 1)).await;
            assert_eq!(answer.text, expected, "{path}: {bytes:x?}");
            cases += 1;
        }
    }
    println!("{cases} cases");
    assert!(cases >= 320, "{cases} cases");
}
