//! The endpoints.

use serde_json::Value;

use super::schema::{Field, any_of, object};
use super::{facts, fields, messages, responses};

/// A method of a path.
pub(super) struct Endpoint {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    pub(super) id: &'static str,
    pub(super) summary: &'static str,
    /// Parts of the path, each with what it is.
    pub(super) parameters: &'static [(&'static str, &'static str)],
    pub(super) body: Option<Value>,
    /// Status, what it means, and what comes with it.
    pub(super) answers: Vec<(u16, &'static str, Payload)>,
    /// Statuses whose body is an error.
    pub(super) errors: &'static [u16],
    /// The component that such a body is.
    pub(super) error: &'static str,
    /// Whether it needs no key.
    pub(super) public: bool,
}

/// What an answer's body is.
pub(super) enum Payload {
    /// A component.
    Json(&'static str),
    /// A component or, streamed, events of another one.
    JsonOrEvents(&'static str, &'static str),
    /// Text of this type.
    Text(&'static str),
    /// There is none.
    Nothing,
}

/// What every path may answer.
const GET_ERRORS: &[u16] = &[401, 403, 405, 500];
const POST_ERRORS: &[u16] = &[400, 401, 403, 404, 405, 408, 413, 415, 500, 503];
const GENERATION_ERRORS: &[u16] = &[400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503, 504];

/// All of them.
pub(super) fn all() -> Vec<Endpoint> {
    [
        generating(),
        prompts(),
        responses_api(),
        messages_api(),
        tokens(),
        about_the_server(),
        facts_and_control(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn generating() -> Vec<Endpoint> {
    let completion =
        [fields::model(), fields::completion(), fields::sampling(), fields::form(), fields::output()];
    vec![
        generate(
            ("/v1/chat/completions", "chat", "Answer in a conversation"),
            "ChatCompletion",
            "ChatCompletionChunk",
            chat_body(),
        ),
        generate(
            ("/v1/completions", "complete", "Continue a text"),
            "Completion",
            "CompletionChunk",
            with_hints(completion),
        ),
    ]
}

fn chat_body() -> Value {
    with_hints([
        fields::model(),
        fields::conversation(),
        fields::sampling(),
        fields::form(),
        fields::chat(),
        fields::output(),
    ])
}

/// What a chat's prompt is, without running it.
fn prompts() -> Vec<Endpoint> {
    let prompt = |path, id, summary, answer| post(path, id, summary, Payload::Json(answer), chat_body());
    vec![
        prompt(
            "/v1/chat/completions/render",
            "render",
            "Text and tokens of a chat's prompt",
            "RenderedPrompt",
        ),
        prompt("/v1/chat/completions/input_tokens", "countChat", "Tokens of a chat's prompt", "InputTokens"),
        prompt(
            "/apply-template",
            "applyTemplate",
            "The text of a chat's prompt, as llama.cpp has it",
            "PromptText",
        ),
    ]
}

fn responses_api() -> Vec<Endpoint> {
    let body = || with_hints([fields::model(), responses::fields(), fields::of_one_answer(&["max_tokens"])]);
    let kept = |path, method, id, summary, answer| Endpoint {
        method,
        parameters: &[("id", "A response's id")],
        errors: &[400, 401, 403, 404, 405, 500],
        ..get(path, id, summary, Payload::Json(answer))
    };
    vec![
        generate(
            ("/v1/responses", "respond", "Answer, as OpenAI's newer API has it"),
            "Response",
            "ResponseEvent",
            body(),
        ),
        post(
            "/v1/responses/input_tokens",
            "countResponse",
            "Tokens of its prompt",
            Payload::Json("InputTokens"),
            body(),
        ),
        kept("/v1/responses/{id}", "get", "getResponse", "A response that was kept", "Response"),
        kept("/v1/responses/{id}", "delete", "removeResponse", "Forget a response", "RemovedResponse"),
        kept("/v1/responses/{id}/input_items", "get", "getInput", "What it answered", "InputItems"),
    ]
}

fn messages_api() -> Vec<Endpoint> {
    let body = || with_hints([fields::model(), messages::fields(), fields::of_one_answer(&["stop"])]);
    let endpoints = [
        generate(
            ("/v1/messages", "message", "Answer, as Anthropic's API has it"),
            "ClaudeAnswer",
            "ClaudeEvent",
            body(),
        ),
        post(
            "/v1/messages/count_tokens",
            "countMessage",
            "Tokens of its prompt",
            Payload::Json("ClaudeTokens"),
            body(),
        ),
    ];
    endpoints.map(|endpoint| Endpoint { error: "ClaudeError", ..endpoint }).into()
}

fn tokens() -> Vec<Endpoint> {
    let form = |own: Vec<Field>| with_hints([fields::model(), fields::tokenize(), own]);
    let forms = any_of([form(fields::tokenize_text()), form(fields::conversation())]);
    vec![
        post(
            "/tokenize",
            "tokenize",
            "Tokens of a text or of a conversation",
            Payload::Json("Tokens"),
            forms,
        ),
        post(
            "/detokenize",
            "detokenize",
            "The text of tokens",
            Payload::Json("Text"),
            with_hints([fields::model(), fields::detokenize()]),
        ),
    ]
}

fn about_the_server() -> Vec<Endpoint> {
    let json = Payload::Json;
    let health = |path, id, summary| {
        let answers = vec![(200, "It is so", json("Health")), (503, "It is not", json("Health"))];
        Endpoint { answers, public: true, ..get(path, id, summary, json("Health")) }
    };
    let public = |endpoint| Endpoint { public: true, ..endpoint };
    vec![
        get("/v1/models", "listModels", "The model's names", json("ModelList")),
        Endpoint {
            parameters: &[("id", "The model's name, percent-encoded")],
            errors: &[400, 401, 403, 404, 405, 500],
            ..get("/v1/models/{id}", "getModel", "The model under one of its names", json("Model"))
        },
        health("/health", "health", "Whether requests are taken and tokens come out"),
        health("/health/live", "healthLive", "Whether the server need not be restarted"),
        health("/health/ready", "healthReady", "Whether requests are taken"),
        health("/health_generate", "healthGenerate", "Whether a token was really generated just now"),
        get("/metrics", "metrics", "What the server counts, for Prometheus", Payload::Text("text/plain")),
        public(get("/version", "version", "Name and version of the server", json("Version"))),
        public(get("/openapi.json", "document", "This document", json("Document"))),
        public(get("/", "page", "A page to chat on", Payload::Text("text/html"))),
        public(get("/status", "statusPage", "A page that shows what runs", Payload::Text("text/html"))),
    ]
}

fn facts_and_control() -> Vec<Endpoint> {
    let fact = |path, id, summary, component| get(path, id, summary, Payload::Json(component));
    let ping = vec![(200, "It is so", Payload::Nothing), (503, "It is not", Payload::Nothing)];
    vec![
        Endpoint {
            answers: ping,
            public: true,
            ..get("/ping", "ping", "As /health, without words", Payload::Nothing)
        },
        fact("/props", "properties", "What the server is, as llama.cpp has it", "Properties"),
        fact("/v1/status", "status", "What it is doing, for the status page and for people", "Status"),
        fact("/slots", "slots", "Requests in hand, oldest first", "Slots"),
        fact("/tokenizer_info", "tokenizerInfo", "The tokenizer and the chat template", "TokenizerInfo"),
        fact("/model_info", "modelInfo", "What the model is, as SGLang has it", "ModelInfo"),
        fact("/get_model_info", "oldModelInfo", "The same under its older name", "ModelInfo"),
        fact("/server_info", "serverInfo", "What the server is, as SGLang has it", "ServerInfo"),
        fact("/get_server_info", "oldServerInfo", "The same under its older name", "ServerInfo"),
        fact("/v1/loads", "loads", "How busy it is, as SGLang has it", "Loads"),
        fact("/get_load", "oldLoads", "The same in its older form", "OldLoads"),
        fact("/load", "load", "How busy it is, as vLLM has it", "Load"),
        post(
            "/abort_request",
            "abort",
            "End requests of one's own; with the admin's key, of anybody",
            Payload::Json("Aborted"),
            with_hints([facts::abort()]),
        ),
        Endpoint {
            body: None,
            errors: &[401, 403, 405, 500, 503],
            ..post(
                "/flush_cache",
                "flush",
                "Forget what prompts left in memory",
                Payload::Json("Flushed"),
                Value::Null,
            )
        },
    ]
}

fn get(path: &'static str, id: &'static str, summary: &'static str, answer: Payload) -> Endpoint {
    Endpoint {
        path,
        method: "get",
        id,
        summary,
        parameters: &[],
        body: None,
        answers: vec![(200, "The answer", answer)],
        errors: GET_ERRORS,
        error: "Error",
        public: false,
    }
}

fn post(
    path: &'static str,
    id: &'static str,
    summary: &'static str,
    answer: Payload,
    body: Value,
) -> Endpoint {
    Endpoint { method: "post", body: Some(body), errors: POST_ERRORS, ..get(path, id, summary, answer) }
}

fn generate(
    (path, id, summary): (&'static str, &'static str, &'static str),
    answer: &'static str,
    chunk: &'static str,
    body: Value,
) -> Endpoint {
    let payload = Payload::JsonOrEvents(answer, chunk);
    Endpoint { errors: GENERATION_ERRORS, ..post(path, id, summary, payload, body) }
}

/// A body of these fields, and of those that every endpoint takes without an effect.
fn with_hints(groups: impl IntoIterator<Item = Vec<Field>>) -> Value {
    let fields: Vec<Field> = groups.into_iter().flatten().collect();
    let hints = fields::hints(&fields);
    object(fields.into_iter().chain(hints))
}
