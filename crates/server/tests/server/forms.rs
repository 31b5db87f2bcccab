//! What a request asks of the form of its answer comes to the engine as a guide.

use axum::http::StatusCode;
use qwill_contract::Guide;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, COMPLETIONS, plain_chat, tokens, with};
use crate::engine::END_OF_TURN;

/// Whether a guide lets a text pass, with an end of turn behind it.
fn passes(guide: &dyn Guide, text: &str) -> bool {
    let mut guide = guide.boxed_clone();
    let ids = tokens(text).into_iter().chain([END_OF_TURN]);
    ids.into_iter().all(|id| guide.count_allowed(&[id]) == Ok(1) && guide.accept(id).is_ok())
}

/// The guide that a body brings the engine.
async fn guide(bench: &Bench, path: &str, body: Value) -> Option<Box<dyn Guide>> {
    let reply = bench.post(path, body.clone()).await;
    assert_eq!(reply.status, StatusCode::OK, "{body}: {}", reply.body);
    bench.stage.last_request().guide
}

fn number() -> Value {
    json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false})
}

#[tokio::test]
async fn every_spelling_is_enforced() {
    let bench = Bench::saying("ok");
    let schema = |strict: Value| json!({"type": "json_schema", "json_schema": {"name": "n", "schema": number(), "strict": strict}});
    for (form, good, bad) in [
        (json!({"response_format": {"type": "json_object"}}), r#"{"a": [1, {}]}"#, "[1]"),
        (json!({"response_format": schema(json!(true))}), r#"{"n": 5}"#, r#"{"n": "5"}"#),
        (json!({"response_format": schema(Value::Null)}), r#"{"n": 5}"#, r#"{"m": 5}"#),
        (json!({"response_format": {"type": "json_object", "schema": number()}}), r#"{"n":5}"#, "{}"),
        (json!({"response_format": {"type": "regex", "pattern": "[ab]+"}}), "abba", "abc"),
        (json!({"structured_outputs": {"json": number()}}), r#"{"n": 5}"#, "5"),
        (json!({"structured_outputs": {"choice": ["yes", "no"]}}), "no", "nope"),
        (json!({"structured_outputs": {"json_object": true}}), "{}", "7"),
        (json!({"guided_json": number().to_string()}), r#"{"n": 5}"#, "5"),
        (json!({"guided_regex": "[0-9]{2}"}), "42", "4"),
        (json!({"guided_choice": ["a b", "c"]}), "a b", "a"),
        (json!({"guided_grammar": "start: \"x\" \"y\"*"}), "xyy", "yy"),
        (json!({"json_schema": number()}), r#"{"n": 5}"#, "5"),
        (json!({"regex": "a|b"}), "b", "ab"),
        (json!({"grammar": "start: \"x\" \"y\"*"}), "xyy", "yy"),
    ] {
        let body = with(json!({"prompt": "Hi"}), form.clone());
        let guide = guide(&bench, COMPLETIONS, body).await.unwrap();
        assert!(passes(&*guide, good), "{form} and {good}");
        assert!(!passes(&*guide, bad), "{form} and {bad}");
    }
    for nothing in [
        json!({"response_format": {"type": "text"}}),
        json!({"structured_outputs": {}}),
        json!({"grammar": "", "reasoning_budget": -1}),
        json!({"thinking_budget": 5}),
    ] {
        let body = with(json!({"prompt": "Hi"}), nothing.clone());
        assert!(guide(&bench, COMPLETIONS, body).await.is_none(), "{nothing}");
    }
}

/// With thinking off the answer begins at once; with thinking it begins behind it.
#[tokio::test]
async fn a_form_begins_where_the_answer_does() {
    let bench = Bench::saying("ok");
    let chat = |more: Value| with(with(plain_chat(), json!({"guided_choice": ["yes"]})), more);
    let closed = guide(&bench, CHAT, chat(json!({"enable_thinking": false}))).await.unwrap();
    assert!(passes(&*closed, "yes") && !passes(&*closed, "no") && !passes(&*closed, "hm</think>\n\nyes"));
    let open = guide(&bench, CHAT, chat(json!({"enable_thinking": true}))).await.unwrap();
    assert!(passes(&*open, "hm {no}\n</think>\n\nyes"));
    assert!(!passes(&*open, "hm</think>\n\nno") && !passes(&*open, "yes") && !passes(&*open, "hm"));
}

#[tokio::test]
async fn a_budget_leads_out_of_thinking() {
    let bench = Bench::saying("ok");
    for name in ["thinking_budget", "thinking_token_budget", "reasoning_budget"] {
        let limited =
            guide(&bench, CHAT, with(plain_chat(), json!({name: 2, "enable_thinking": true}))).await.unwrap();
        assert!(passes(&*limited, "a b\n</think>\n\nanything"), "{name}");
        assert!(passes(&*limited, "a</think>anything"), "{name}");
        assert!(!passes(&*limited, "a b c d</think>\n\nanything"), "{name}");
        let closed = with(plain_chat(), json!({name: 2, "enable_thinking": false}));
        assert!(guide(&bench, CHAT, closed).await.is_none(), "there is nothing to limit");
    }
    let both = with(plain_chat(), json!({"thinking_budget": 1, "regex": "[0-9]", "enable_thinking": true}));
    let both = guide(&bench, CHAT, both).await.unwrap();
    assert!(passes(&*both, "a\n</think>\n\n7") && !passes(&*both, "a\n</think>\n\nb"));
}

#[tokio::test]
async fn tokens_can_be_left_out() {
    let bench = Bench::saying("ok");
    for path in [CHAT, COMPLETIONS] {
        let body =
            |more| if path == CHAT { with(plain_chat(), more) } else { with(json!({"prompt": "x"}), more) };
        let banned = guide(&bench, path, body(json!({"bad_words": ["cat", " dog"]}))).await.unwrap();
        for (text, passed) in
            [("a cow", true), ("cat", false), ("a cat", false), ("dog", false), ("a dog", false)]
        {
            assert_eq!(passes(&*banned, text), passed, "{text}");
        }
        let mut few = tokens("yes no");
        few.push(END_OF_TURN);
        let few =
            guide(&bench, path, body(json!({"allowed_token_ids": few, "bad_words": []}))).await.unwrap();
        assert!(passes(&*few, "yes no") && !passes(&*few, "maybe"));
        assert!(guide(&bench, path, body(json!({"bad_words": []}))).await.is_none());
    }
    let shaped =
        json!({"regex": "(cat|cow)", "bad_words": ["cat"], "thinking_budget": 9, "enable_thinking": true});
    let shaped = guide(&bench, CHAT, with(plain_chat(), shaped)).await.unwrap();
    assert!(passes(&*shaped, "hm\n</think>\n\ncow") && !passes(&*shaped, "hm\n</think>\n\ncat"));
    assert!(!passes(&*shaped, "a cat\n</think>\n\ncow"), "nor are they thought");
    let bias = json!({"logit_bias": [["a cat", -2], [7, false]]});
    bench.post(CHAT, with(plain_chat(), bias)).await;
    let mut expected: Vec<(u32, f32)> = tokens("a cat").into_iter().map(|id| (id, -2.0)).collect();
    expected.push((7, f32::NEG_INFINITY));
    expected.sort_by_key(|(id, _)| *id);
    assert_eq!(bench.stage.last_request().sampling.logit_bias, expected);
}

#[tokio::test]
async fn calls_have_their_schema_where_they_are_asked_for_or_strict() {
    const BODY: &str = "<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>";
    const WRONG: &str = "<parameter=days>\nsome\n</parameter>\n</function>\n</tool_call>";
    let bench = Bench::saying("ok");
    let tool = |strict: bool| {
        json!([{"type": "function", "function": {"name": "f", "strict": strict, "parameters": {"type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}])
    };
    let chat = |more: Value| with(plain_chat(), more);
    let call = |body: &str| format!("<tool_call>\n<function=f>\n{body}");

    let required = chat(json!({"tools": tool(false), "tool_choice": "required"}));
    let required = guide(&bench, CHAT, required).await.unwrap();
    let two = format!("{}\n{}", call(BODY), call(BODY));
    assert!(passes(&*required, &call(BODY)) && passes(&*required, &two));
    assert!(!passes(&*required, &call(WRONG)) && !passes(&*required, "no"));
    let one = json!({"tools": tool(false), "tool_choice": "required", "parallel_tool_calls": false});
    let one = guide(&bench, CHAT, chat(one)).await.unwrap();
    assert!(passes(&*one, &call(BODY)) && !passes(&*one, &two));
    let named = json!({"type": "function", "function": {"name": "f"}});
    for choice in [json!("required"), named] {
        let thought = chat(json!({"tools": tool(false), "tool_choice": choice, "enable_thinking": true}));
        let thought = guide(&bench, CHAT, thought).await.unwrap();
        assert!(passes(&*thought, &format!("the city\n</think>\n\n{}", call(BODY))));
        assert!(!passes(&*thought, &call(BODY)), "a call would end the thinking before its marker does");
        assert!(!passes(&*thought, "the city\n</think>\n\nno"));
    }

    assert!(guide(&bench, CHAT, chat(json!({"tools": tool(false)}))).await.is_none());
    let strict = guide(&bench, CHAT, chat(json!({"tools": tool(true)}))).await.unwrap();
    assert!(passes(&*strict, "hello") && passes(&*strict, &call(BODY)));
    assert!(passes(&*strict, &format!("I look.\n\n{}", call(BODY))) && !passes(&*strict, &call(WRONG)));

    let either = chat(json!({"tools": tool(false), "guided_json": number()}));
    let either = guide(&bench, CHAT, either).await.unwrap();
    assert!(passes(&*either, r#"{"n": 5}"#) && passes(&*either, &call(BODY)) && !passes(&*either, "hello"));
    let none = chat(json!({"tools": tool(false), "guided_json": number(), "tool_choice": "none"}));
    assert!(!passes(&*guide(&bench, CHAT, none).await.unwrap(), &call(BODY)));

    let grammar = chat(json!({"tools": tool(true), "grammar": "start: \"a\""}));
    let reply = bench.post(CHAT, grammar).await;
    assert_eq!((reply.status, reply.error()["param"].clone()), (StatusCode::BAD_REQUEST, json!("grammar")));
    // What cannot be enforced is an error where it was promised.
    for (strict, status) in [(false, StatusCode::OK), (true, StatusCode::BAD_REQUEST)] {
        let parameters =
            json!({"type": "object", "properties": {"x": {"type": "array", "uniqueItems": true}}});
        let tools = json!([{"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}]);
        let reply = bench.post(CHAT, chat(json!({"tools": tools, "tool_choice": "required"}))).await;
        assert_eq!(reply.status, status, "{}", reply.body);
    }
}
