//! The `OpenAPI` document: what every endpoint takes and answers, one table for each.
//!
//! Two tests hold the tables to the parsers: every documented field is taken as its example says, and every field that
//! a parser asks for is documented. `docs/openapi.json` is this document, written by `cargo xtask docs`.

mod answers;
mod endpoints;
mod facts;
mod fields;
mod messages;
mod responses;
mod schema;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use crate::app::App;
use endpoints::{Endpoint, Payload};
use schema::{always, any_of, object, one_of, reference, text};

const ABOUT: &str = "Generates text with a model of the Qwen3.5 family. The API is that of OpenAI, so the clients for it \
                     work; fields that are unknown here are ignored with a warning in the log, known ones that are not \
                     supported are refused with their name.";

/// `GET /openapi.json`.
pub(crate) async fn show(State(app): State<Arc<App>>) -> Json<Value> {
    Json(document(app.keys.is_open()))
}

/// The document of a server that anybody may use, or of one that wants a key.
pub fn document(open: bool) -> Value {
    let mut security = vec![json!({"bearer": []}), json!({"header": []})];
    if open {
        security.insert(0, json!({}));
    }
    let mut paths = Map::new();
    for endpoint in endpoints::all() {
        let path = paths.entry(endpoint.path).or_insert_with(|| json!({}));
        path[endpoint.method] = operation(&endpoint);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Qwill",
            "description": ABOUT,
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": security,
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": components(),
        },
    })
}

fn components() -> Map<String, Value> {
    let all = [
        fields::components(),
        answers::components(),
        facts::components(),
        responses::components(),
        messages::components(),
    ];
    let all = all.into_iter().flatten();
    all.map(|(name, schema)| (name.to_owned(), schema)).collect()
}

fn operation(endpoint: &Endpoint) -> Value {
    let mut operation = json!({
        "operationId": endpoint.id,
        "summary": endpoint.summary,
        "responses": responses(endpoint),
    });
    if !endpoint.parameters.is_empty() {
        operation["parameters"] = endpoint.parameters.iter().map(parameter).collect();
    }
    if let Some(body) = &endpoint.body {
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": body}}});
    }
    if endpoint.public {
        operation["security"] = json!([]);
    }
    operation
}

fn parameter(&(name, doc): &(&str, &str)) -> Value {
    json!({"name": name, "in": "path", "required": true, "description": doc, "schema": text()})
}

fn responses(endpoint: &Endpoint) -> Map<String, Value> {
    let mut responses = Map::new();
    for (status, doc, payload) in &endpoint.answers {
        responses.insert(status.to_string(), response(doc, payload, *status));
    }
    for &status in endpoint.errors {
        responses
            .insert(status.to_string(), response(error_doc(status), &Payload::Json(endpoint.error), status));
    }
    responses
}

fn response(doc: &str, payload: &Payload, status: u16) -> Value {
    let string = || json!({"schema": text()});
    let content = match payload {
        Payload::Json(name) => json!({"application/json": {"schema": reference(name)}}),
        Payload::JsonOrEvents(name, chunk) => json!({
            "application/json": {"schema": reference(name)},
            "text/event-stream": {"schema": event(chunk)},
        }),
        Payload::Text(kind) => json!({*kind: string()}),
        Payload::Nothing => json!({}),
    };
    let mut headers = Map::new();
    let mut header = |name: &str, doc: &str, kind: &str| {
        headers.insert(name.into(), json!({"description": doc, "required": true, "schema": {"type": kind}}));
    };
    header("x-request-id", "The request's name in the server's log", "string");
    if matches!(status, 429 | 503) && matches!(payload, Payload::Json("Error" | "ClaudeError")) {
        header("retry-after", "Seconds to wait before trying again", "integer");
    }
    json!({"description": doc, "headers": headers, "content": content})
}

/// An event of a stream: a chunk or the end.
fn event(chunk: &str) -> Value {
    let data = any_of([
        json!({
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": any_of([reference(chunk), reference("Error")]),
        }),
        one_of(["[DONE]"]),
    ]);
    object([always("data", data, "A chunk or an error, as JSON, or the end of the stream")])
}

fn error_doc(status: u16) -> &'static str {
    match status {
        400 => "The request cannot be understood or done; `param` names the field",
        401 => "No key, or one that is not valid",
        403 => "The request is addressed to a name that is not this server's",
        404 => "There is no such model or path",
        405 => "The path takes another method",
        408 => "The body stopped arriving",
        413 => "The body is too large",
        415 => "The body is not plain JSON, or its content-type does not say so",
        429 => "Too many requests wait already, or the key's rate is used up",
        503 => "The server is starting, shutting down or broken",
        504 => "The request's time was over before its answer began",
        _ => "A fault of the server; its log has the reason under the request's id",
    }
}
