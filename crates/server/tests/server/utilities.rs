//! `/tokenize` and `/detokenize`.

use serde_json::{Value, json};

use crate::client::{Bench, byte_tokens, plain_chat, tokens, with};

#[tokio::test]
async fn texts_become_tokens_and_come_back() {
    let bench = Bench::saying("ok");
    let text = "Hello <|im_end|> wörld 🙂";
    for field in ["prompt", "content"] {
        let reply = bench.post("/tokenize", json!({field: text, "add_special": true})).await.json();
        let ids = tokens(text);
        assert_eq!(reply["tokens"], json!(ids));
        assert_eq!(reply["count"], ids.len());
        assert_eq!(reply["max_model_len"], 256);
        assert!(reply.get("pieces").is_none());
        let back = bench.post("/detokenize", json!({"tokens": ids})).await.json();
        assert_eq!((&back["prompt"], &back["text"]), (&json!(text), &json!(text)));
    }
    let plain = bench.post("/tokenize", json!({"prompt": "<|im_end|>", "parse_special": false})).await.json();
    assert!(plain["count"].as_u64().unwrap() > 1);
    let empty = bench.post("/tokenize", json!({"prompt": ""})).await.json();
    assert_eq!(empty["count"], 0);
    let hidden =
        bench.post("/detokenize", json!({"tokens": [8168], "skip_special_tokens": true})).await.json();
    assert_eq!(hidden["text"], "");
}

#[tokio::test]
async fn pieces_on_request() {
    let bench = Bench::saying("ok");
    let ask = json!({"prompt": "a\u{1F9FF}", "with_pieces": true, "return_token_strs": true});
    let reply = bench.post("/tokenize", ask).await.json();
    let pieces = reply["pieces"].as_array().unwrap();
    assert_eq!(pieces.len(), reply["token_strs"].as_array().unwrap().len());
    assert_eq!(pieces[0]["piece"], "a");
    let bytes: Vec<u8> = pieces
        .iter()
        .flat_map(|piece| match &piece["piece"] {
            Value::String(text) => text.as_bytes().to_vec(),
            bytes => serde_json::from_value(bytes.clone()).unwrap(),
        })
        .collect();
    assert_eq!(bytes, "a\u{1F9FF}".as_bytes());
}

#[tokio::test]
async fn conversations_are_counted_as_the_chat_would() {
    let bench = Bench::saying("ok");
    let count = bench.post("/tokenize", plain_chat()).await.json();
    let used = bench.post("/v1/chat/completions", plain_chat()).await.json();
    assert_eq!(count["count"], used["usage"]["prompt_tokens"]);
    assert_eq!(count["tokens"], json!(bench.stage.last_request().prompt.to_vec()));
    let shorter =
        bench.post("/tokenize", with(plain_chat(), json!({"add_generation_prompt": false}))).await.json();
    assert!(shorter["count"].as_u64() < count["count"].as_u64());
}

#[tokio::test]
async fn bad_requests_are_named() {
    let bench = Bench::saying("ok");
    for (path, body, param, fragment) in [
        ("/tokenize", json!({}), "prompt", "one of"),
        ("/tokenize", json!({"prompt": "a", "content": "b"}), "prompt", "only one"),
        ("/tokenize", json!({"prompt": 5}), "prompt", "a string, got 5"),
        ("/tokenize", json!({"messages": []}), "messages", "at least one"),
        ("/tokenize", json!({"prompt": "a", "with_pieces": 1}), "with_pieces", "got 1"),
        ("/tokenize", json!({"prompt": "a", "model": "x"}), "model", "does not exist"),
        ("/detokenize", json!({}), "tokens", "missing"),
        ("/detokenize", json!({"tokens": "a"}), "tokens", "a list"),
        ("/detokenize", json!({"tokens": [1, 8192]}), "tokens[1]", "got 8192"),
        ("/detokenize", json!({"tokens": [-1]}), "tokens[0]", "got -1"),
        ("/detokenize", json!({"tokens": ["a"]}), "tokens[0]", "got \"a\""),
    ] {
        let reply = bench.post(path, body.clone()).await;
        assert!(reply.status.is_client_error(), "{path} {body}");
        assert_eq!(reply.error()["param"], param, "{path} {body}");
        assert!(reply.error()["message"].as_str().unwrap().contains(fragment), "{}", reply.body);
    }
    let half = byte_tokens("é")[..1].to_vec();
    assert_eq!(bench.post("/detokenize", json!({"tokens": half})).await.json()["text"], "\u{fffd}");
}
