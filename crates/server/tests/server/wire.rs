//! The rules for the events of Anthropic's and of the Responses API, held to every kind of answer.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::client::{MESSAGES, RESPONSES, byte_tokens, with};
use crate::engine::Act;
use crate::matrix::{Puppet, steps};

const CALL: &str =
    "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>";

/// A kind of answer: what is asked besides, what the model says, how its engine ends, and the kinds of parts that come.
struct Scene {
    more: Value,
    said: String,
    last: Option<Act>,
    parts: Vec<&'static str>,
    end: &'static str,
}

fn scenes(path: &str) -> Vec<Scene> {
    let is_messages = path == MESSAGES;
    let of = |messages: &'static str, responses: &'static str| if is_messages { messages } else { responses };
    let (text, thinking, call) =
        (of("text", "message"), of("thinking", "reasoning"), of("tool_use", "function_call"));
    let think = if is_messages {
        json!({"thinking": {"type": "adaptive"}})
    } else {
        json!({"reasoning": {"effort": "high"}})
    };
    let scene = |more: Value, said: &str, parts: Vec<&'static str>, end| Scene {
        more,
        said: said.to_owned(),
        last: None,
        parts,
        end,
    };
    let (done, cut) = (of("end_turn", "response.completed"), of("max_tokens", "response.incomplete"));
    let called = of("tool_use", "response.completed");
    let limit = if is_messages { "max_tokens" } else { "max_output_tokens" };
    let mut scenes = vec![
        scene(json!({}), "Some text.", vec![text], done),
        scene(json!({}), "", vec![], done),
        scene(think.clone(), "Hm.\n</think>\n\nYes.", vec![thinking, text], done),
        scene(json!({}), CALL, vec![call], called),
        scene(json!({}), &format!("So.\n\n{CALL}\n{CALL}"), vec![text, call, call], called),
        scene(think, &format!("Hm.\n</think>\n\nSo.\n\n{CALL}"), vec![thinking, text, call], called),
        scene(with(json!({}), json!({limit: 3})), "abcdef", vec![text], cut),
        Scene {
            last: Some(Act::Fail("by design")),
            ..scene(json!({}), "ab", vec![text], of("error", "response.failed"))
        },
    ];
    if is_messages {
        scenes.push(scene(json!({"stop_sequences": ["d"]}), "abcdef", vec![text], "stop_sequence"));
    }
    scenes
}

fn body(path: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    if path == MESSAGES {
        return json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "stream": true,
            "tools": [{"name": "f", "input_schema": parameters}]});
    }
    json!({"input": "Hi", "reasoning": {"effort": "none"}, "stream": true,
        "tools": [{"type": "function", "name": "f", "parameters": parameters}]})
}

#[tokio::test]
async fn events_follow_the_rules_of_their_endpoint() {
    let puppet = Puppet::new();
    let mut cases = 0;
    for path in [MESSAGES, RESPONSES] {
        for scene in scenes(path) {
            for step_tokens in 1..=6 {
                let acts =
                    steps(&byte_tokens(&scene.said), step_tokens).into_iter().chain(scene.last.clone());
                puppet.is_to_say(acts.collect());
                let reply = puppet.bench.post(path, with(body(path), scene.more.clone())).await;
                assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
                let events = reply.named_events();
                assert!(events.iter().all(|(name, event)| event["type"] == **name), "{}", reply.body);
                let check = if path == MESSAGES { check_messages } else { check_responses };
                check(&events, &scene, &reply.body);
                cases += 1;
            }
        }
    }
    println!("{cases} cases");
}

fn check_messages(events: &[(String, Value)], scene: &Scene, context: &str) {
    let mut rest = events.iter().filter(|(name, _)| name != "ping").peekable();
    assert_eq!(rest.next().unwrap().0, "message_start", "{context}");
    let mut kinds = Vec::new();
    while let Some((_, start)) = rest.next_if(|(name, _)| name == "content_block_start") {
        let index = json!(kinds.len());
        let kind = start["content_block"]["type"].as_str().unwrap();
        kinds.push(kind.to_owned());
        assert_eq!(start["index"], index, "{context}");
        let mut deltas = 0;
        while let Some((_, delta)) = rest.next_if(|(name, _)| name == "content_block_delta") {
            let fits: &[&str] = match kind {
                "text" => &["text_delta"],
                "thinking" => &["thinking_delta", "signature_delta"],
                _ => &["input_json_delta"],
            };
            assert!(fits.contains(&delta["delta"]["type"].as_str().unwrap()), "{context}");
            assert_eq!(delta["index"], index, "{context}");
            deltas += 1;
        }
        assert!(deltas > 0, "{context}");
        if scene.last.is_some() && rest.peek().is_some_and(|(name, _)| name == "error") {
            break;
        }
        let (name, stop) = rest.next().unwrap();
        assert_eq!((name.as_str(), &stop["index"]), ("content_block_stop", &index), "{context}");
    }
    assert_eq!(kinds, scene.parts, "{context}");
    if scene.last.is_none() {
        let (name, delta) = rest.next().unwrap();
        assert_eq!(
            (name.as_str(), &delta["delta"]["stop_reason"]),
            ("message_delta", &json!(scene.end)),
            "{context}"
        );
        assert!(delta["usage"]["output_tokens"].is_u64(), "{context}");
        assert_eq!(rest.next().unwrap().0, "message_stop", "{context}");
    } else {
        assert_eq!(rest.next().unwrap().0, "error", "{context}");
    }
    assert_eq!(rest.next(), None, "{context}");
}

fn check_responses(events: &[(String, Value)], scene: &Scene, context: &str) {
    for (number, (_, event)) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{context}");
    }
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["response.created", "response.in_progress"], "{context}");
    assert_eq!(names.last(), Some(&scene.end), "{context}");
    let mut kinds = Vec::new();
    // The item that is being told, with its id.
    let mut open: Option<Value> = None;
    for (name, event) in &events[2..events.len() - 1] {
        match name.as_str() {
            "response.output_item.added" => {
                assert!(open.is_none(), "{context}");
                assert_eq!(event["output_index"], kinds.len(), "{context}");
                kinds.push(event["item"]["type"].as_str().unwrap().to_owned());
                open = Some(event["item"]["id"].clone());
            }
            "response.output_item.done" => {
                assert_eq!(open.take().as_ref(), Some(&event["item"]["id"]), "{context}");
                assert_eq!(event["output_index"], kinds.len() - 1, "{context}");
            }
            "error" => assert!(scene.last.is_some(), "{context}"),
            _ => {
                assert_eq!(open.as_ref(), Some(&event["item_id"]), "{name} {context}");
                assert_eq!(event["output_index"], kinds.len() - 1, "{context}");
            }
        }
    }
    assert!(open.is_none() || scene.last.is_some(), "{context}");
    assert_eq!(kinds, scene.parts, "{context}");
    // The last event has all of it.
    let output = events.last().unwrap().1["response"]["output"].as_array().unwrap();
    if scene.last.is_none() {
        assert_eq!(output.len(), kinds.len(), "{context}");
    }
}
