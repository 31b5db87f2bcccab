//! The tables against the parsers, and against the file that is read without a server.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use qwill_contract::{EngineFacts, engine_channel};
use qwill_text::{ChatTemplate, Tokenizer};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::schema::count;
use super::*;
use crate::fields::{asked, whole_number};
use crate::known;
use crate::options::{ServerOptions, TextModel};
use crate::router::{PATHS, router};

const POSTS: [&str; 5] =
    ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort_request"];

/// A server whose model is still loading: it reads requests and then refuses them.
fn app() -> Arc<App> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny");
    let read = |name: &str| std::fs::read(format!("{directory}/{name}")).unwrap();
    let config = read("tokenizer_config.json");
    let tokenizer = Tokenizer::from_json(&read("tokenizer.json"), Some(&config)).unwrap();
    let template = ChatTemplate::from_tokenizer_config(&config, None).unwrap();
    let text = TextModel { tokenizer: Arc::new(tokenizer), template: Some(Arc::new(template)) };
    let facts = EngineFacts {
        model_names: vec!["tiny".into()],
        max_context_tokens: 4096,
        vocab_size: 8192,
        eos_token_ids: vec![8168],
        max_sequences: 4,
        kv_capacity_tokens: 4096,
        queue_capacity: 4,
        numerics: "f32".into(),
    };
    let options = ServerOptions { strict_params: true, ..Default::default() };
    let address = options.bind.ip();
    App::new(options, address, engine_channel(facts).0, text).unwrap()
}

/// The documented properties of `schema` below `path`, as the parsers' errors spell them.
fn documented(document: &Value, schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let target = document.pointer(name.trim_start_matches('#')).expect("a component");
        return documented(document, target, path, found);
    }
    for part in schema["anyOf"].as_array().into_iter().flatten() {
        documented(document, part, path, found);
    }
    if schema.get("items").is_some() {
        documented(document, &schema["items"], &format!("{path}[]"), found);
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        documented(document, property, &path, found);
        found.insert(path);
    }
}

/// The properties of a body, of all its forms.
fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let forms = schema["anyOf"].as_array().map_or(std::slice::from_ref(schema), Vec::as_slice);
    forms.iter().flat_map(|form| form["properties"].as_object().unwrap())
}

/// Bodies that go with a field's example: what is needed, and what some fields need beside them.
fn bases(path: &str) -> Vec<Value> {
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    match path {
        "/v1/chat/completions" => vec![chat.clone(), with_functions(chat)],
        "/v1/completions" => vec![json!({"prompt": "Hi"})],
        "/tokenize" => vec![json!({}), json!({"prompt": "Hi"}), chat],
        "/detokenize" => vec![json!({"tokens": [5]})],
        _ => vec![json!({})],
    }
}

fn with_functions(mut body: Value) -> Value {
    body["functions"] = json!([{"name": "weather"}]);
    body
}

#[tokio::test]
async fn what_parsers_ask_for_is_documented_and_nothing_else() {
    let (document, router) = (document(true), router(app()));
    for path in POSTS {
        asked::take();
        let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        for base in bases(path) {
            for (name, property) in properties(schema) {
                let mut body = base.clone();
                body[name] = property["examples"][0].clone();
                body["stream"] = (name == "stream_options" || body["stream"] == true).into();
                let request = Request::post(path).header("content-type", "application/json");
                let request = request.body(Body::from(body.to_string())).unwrap();
                let status = router.clone().oneshot(request).await.unwrap().status();
                assert_ne!(status, StatusCode::INTERNAL_SERVER_ERROR, "{path}: {name}");
            }
        }
        let asked = asked::take();
        let mut told = BTreeSet::new();
        documented(&document, schema, "", &mut told);
        let is_hint = |name: &&String| known::IGNORED.contains(&name.as_str());
        let secret: Vec<_> = asked.difference(&told).collect();
        assert!(secret.is_empty(), "{path} takes {secret:?}, which src/openapi/fields.rs does not document");
        // Tools are checked as they are, without being taken apart; forms have parts that exclude each other.
        let taken_whole = |name: &&String| {
            [
                "tools[]",
                "tool_choice.",
                "functions[]",
                "function_call.",
                "response_format.",
                "structured_outputs.",
            ]
            .iter()
            .any(|whole| name.starts_with(whole))
        };
        let idle: Vec<_> =
            told.difference(&asked).filter(|name| !is_hint(name) && !taken_whole(name)).collect();
        assert!(idle.is_empty(), "{path} never looks at {idle:?}, which src/openapi/fields.rs documents");
    }
}

#[test]
fn every_route_is_documented() {
    const WITH_IDS: [&str; 3] = ["/v1/models/{id}", "/v1/responses/{id}", "/v1/responses/{id}/input_items"];
    let document = document(true);
    let documented: BTreeSet<&str> =
        document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
    let routes: BTreeSet<&str> = PATHS.iter().copied().chain(WITH_IDS).collect();
    assert_eq!(documented, routes);
}

#[test]
fn every_reference_has_its_component_and_every_component_is_used() {
    let document = document(true);
    let text = document.to_string();
    for name in document["components"]["schemas"].as_object().unwrap().keys() {
        assert!(text.contains(&format!("\"#/components/schemas/{name}\"")), "{name} is used nowhere");
    }
    for part in text.split("\"#/components/schemas/").skip(1) {
        let name = part.split('"').next().unwrap();
        assert!(document["components"]["schemas"].get(name).is_some(), "{name} is nowhere");
    }
}

/// Without a bound, 1e30 would be a whole number by the document and none by the parsers.
#[test]
fn whole_numbers_end_where_they_are_read() {
    fn check(schema: &Value) {
        if schema["type"] == "integer" && schema.get("minimum").is_some() {
            assert!(schema.get("maximum").is_some(), "{schema}");
        }
        let parts = schema.as_object().into_iter().flat_map(|fields| fields.values());
        parts.chain(schema.as_array().into_iter().flatten()).for_each(check);
    }
    check(&document(true));
    let most = &count(0)["maximum"];
    assert_eq!(whole_number(most), most.as_i64());
    assert_eq!(whole_number(&json!(most.as_u64().unwrap() + 1)), None);
}

#[test]
fn a_server_with_keys_says_that_it_wants_one() {
    assert_eq!(document(true)["security"][0], json!({}));
    assert_eq!(document(false)["security"], json!([{"bearer": []}, {"header": []}]));
}

#[test]
fn the_file_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let found: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(
        found == document(true),
        "docs/openapi.json is stale: run `cargo xtask docs` and commit the result"
    );
}
