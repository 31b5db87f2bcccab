//! The `OpenAPI` document as a client sees it.

use qwill_server::ServerOptions;
use serde_json::{Value, json};

use crate::client::{Bench, byte_tokens, one_by_one, plain_chat, with};
use crate::engine;

#[tokio::test]
async fn every_documented_field_is_taken_as_its_example_says() {
    let options = ServerOptions { strict_params: true, ..Default::default() };
    let facts = qwill_contract::EngineFacts {
        max_context_tokens: 4096,
        kv_capacity_tokens: 65_536,
        ..engine::facts()
    };
    let bench = Bench::with(options, facts, one_by_one(byte_tokens("ok")));
    let document = bench.get("/openapi.json").await.json();
    let mut sent = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let Some(body) = item.pointer("/post/requestBody/content/application~1json/schema") else { continue };
        let forms = body["anyOf"].as_array().map_or(std::slice::from_ref(body), Vec::as_slice);
        for (name, property) in forms.iter().flat_map(|form| form["properties"].as_object().unwrap()) {
            let example = json!({name: property["examples"][0]});
            let mut refusals = Vec::new();
            for base in bases(path) {
                let reply = bench.post(path, with(base, example.clone())).await;
                if reply.status != 200 {
                    refusals.push(reply.body);
                }
            }
            assert!(refusals.len() < bases(path).len(), "{path} {example}: {refusals:?}");
            sent += 1;
        }
    }
    assert!(sent > 100, "only {sent} fields are documented");
}

/// What goes with a field: at least one of these bodies takes it.
fn bases(path: &str) -> Vec<Value> {
    match path {
        "/v1/responses" | "/v1/responses/input_tokens" => vec![json!({"input": "Hi"})],
        "/v1/messages" | "/v1/messages/count_tokens" => {
            vec![json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})]
        }
        "/v1/chat/completions"
        | "/v1/chat/completions/render"
        | "/v1/chat/completions/input_tokens"
        | "/apply-template" => {
            let functions = json!({"functions": [{"name": "weather"}]});
            vec![
                plain_chat(),
                with(plain_chat(), json!({"stream": true, "logprobs": true})),
                with(plain_chat(), functions),
            ]
        }
        "/v1/completions" => vec![json!({"prompt": "Hi"}), json!({"prompt": "Hi", "stream": true})],
        "/tokenize" => vec![json!({}), json!({"prompt": "Hi"}), plain_chat()],
        "/detokenize" => vec![json!({"tokens": [5]})],
        "/abort_request" => vec![json!({"abort_all": true})],
        other => panic!("{other} is not known to this test"),
    }
}

#[tokio::test]
async fn the_document_needs_no_key_and_tells_of_it() {
    let options = ServerOptions { api_keys: vec!["secret".into()], ..Default::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(byte_tokens("ok")));
    let reply = bench.get("/openapi.json").await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.json()["security"], json!([{"bearer": []}, {"header": []}]));
    assert_eq!(reply.json()["paths"]["/health"]["get"]["security"], json!([]));
}
