//! A server to talk to and the talking.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use qwill_contract::{EngineFacts, EngineHandle};
use qwill_server::{Server, ServerOptions, TextModel};
use qwill_text::{ChatTemplate, Markers, Tokenizer};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::engine::{self, Act, Script, Stage};

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const MESSAGES: &str = "/v1/messages";
pub(crate) const RESPONSES: &str = "/v1/responses";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

pub(crate) struct Bench {
    pub(crate) router: Router,
    pub(crate) engine: EngineHandle,
    pub(crate) stage: Arc<Stage>,
    pub(crate) text: TextModel,
}

pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The data of all events, without the final `[DONE]`, which must be there.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.into_iter().map(|text| serde_json::from_str(text).unwrap()).collect()
    }

    /// Names and data of all events of a stream that names them.
    pub(crate) fn named_events(&self) -> Vec<(String, Value)> {
        let event = |block: &str| {
            let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
            Some((field("event: ")?.to_owned(), serde_json::from_str(field("data: ")?).unwrap()))
        };
        self.body.split("\n\n").filter_map(event).collect()
    }

    pub(crate) fn error(&self) -> Value {
        self.json()["error"].clone()
    }

    /// Text of a choice under a pointer such as `/delta/content`, joined over the events.
    pub(crate) fn joined(&self, index: usize, pointer: &str) -> String {
        let choices = self
            .events()
            .into_iter()
            .flat_map(|event| event["choices"].as_array().cloned().unwrap_or_default());
        choices
            .filter(|choice| choice["index"] == index)
            .filter_map(|choice| choice.pointer(pointer).and_then(Value::as_str).map(str::to_owned))
            .collect()
    }
}

/// Tokenizer and template of the small model in the repository.
pub(crate) fn text_model() -> TextModel {
    static LOADED: OnceLock<TextModel> = OnceLock::new();
    LOADED.get_or_init(load_text_model).clone()
}

fn load_text_model() -> TextModel {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny");
    let read = |name: &str| std::fs::read(format!("{directory}/{name}")).unwrap();
    let config = read("tokenizer_config.json");
    let tokenizer = Tokenizer::from_json(&read("tokenizer.json"), Some(&config)).unwrap();
    let template = ChatTemplate::from_tokenizer_config(&config, None).unwrap();
    TextModel { tokenizer: Arc::new(tokenizer), template: Some(Arc::new(template)) }
}

impl Bench {
    pub(crate) fn new(script: Script) -> Self {
        Self::with(ServerOptions::default(), engine::facts(), script)
    }

    pub(crate) fn with(options: ServerOptions, facts: EngineFacts, script: Script) -> Self {
        Self::with_text(text_model(), options, facts, script)
    }

    pub(crate) fn with_text(
        text: TextModel,
        options: ServerOptions,
        facts: EngineFacts,
        script: Script,
    ) -> Self {
        crate::logging::listen();
        let (engine, stage) = engine::start(facts, script);
        let router = Server::router(options, engine.clone(), text.clone()).unwrap();
        Self { router, engine, stage, text }
    }

    /// Answers every request with `text`, cut into tokens by the tokenizer, one a step.
    pub(crate) fn saying(text: &'static str) -> Self {
        Self::new(one_by_one(tokens(text)))
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Reply {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = tokio::time::timeout(Duration::from_secs(20), to_bytes(body, usize::MAX));
        let body =
            String::from_utf8(bytes.await.expect("the answer took too long").unwrap().to_vec()).unwrap();
        Reply { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Reply {
        self.post_raw(path, body.to_string()).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Reply {
        self.send(Request::delete(path).body(Body::empty()).unwrap()).await
    }

    /// The text of the last prompt that the engine was given.
    pub(crate) fn last_prompt(&self) -> String {
        self.text.tokenizer.decode(&self.stage.last_request().prompt, false)
    }

    pub(crate) async fn post_raw(&self, path: &str, body: impl Into<Body>) -> Reply {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(body.into()).unwrap()).await
    }

    /// Sends the body plain and streamed; both must succeed.
    pub(crate) async fn both(&self, path: &str, mut body: Value) -> (Value, Reply) {
        let plain = self.post(path, body.clone()).await;
        assert_eq!(plain.status, StatusCode::OK, "{}", plain.body);
        body["stream"] = true.into();
        let streamed = self.post(path, body).await;
        assert_eq!(streamed.status, StatusCode::OK, "{}", streamed.body);
        assert_eq!(streamed.header("content-type"), Some("text/event-stream"));
        (plain.json(), streamed)
    }

    /// Listens on a free port; stops when the sender is used or dropped.
    pub(crate) async fn listen(&self, options: ServerOptions) -> Listening {
        let options = ServerOptions { bind: ([127, 0, 0, 1], 0).into(), ..options };
        let server = Server::bind(options, self.engine.clone(), self.text.clone()).await.unwrap();
        let address = server.local_addr();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let task = tokio::spawn(server.run(async move {
            let _ = stopped.await;
        }));
        Listening { address, stop, task }
    }
}

pub(crate) struct Listening {
    pub(crate) address: std::net::SocketAddr,
    pub(crate) stop: tokio::sync::oneshot::Sender<()>,
    pub(crate) task: tokio::task::JoinHandle<Result<(), qwill_server::ServerError>>,
}

pub(crate) fn tokens(text: &str) -> Vec<u32> {
    text_model().tokenizer.encode(text, Markers::All)
}

/// The tokens of single bytes, as badly as text can be cut.
pub(crate) fn byte_tokens(text: &str) -> Vec<u32> {
    byte_ids(text.as_bytes())
}

/// The tokens of these bytes, which need not be text.
pub(crate) fn byte_ids(bytes: &[u8]) -> Vec<u32> {
    static IDS: OnceLock<Vec<u32>> = OnceLock::new();
    let ids = IDS.get_or_init(|| {
        let tokenizer = text_model().tokenizer;
        let id_of =
            |byte: u8| (0..engine::VOCAB as u32).find(|&id| tokenizer.token_bytes(id) == Some(&[byte]));
        (0..=255).map(|byte| id_of(byte).unwrap_or_else(|| panic!("no token is the byte {byte}"))).collect()
    });
    bytes.iter().map(|&byte| ids[usize::from(byte)]).collect()
}

/// A script of one token a step.
pub(crate) fn one_by_one(ids: Vec<u32>) -> Script {
    in_steps(ids, 1)
}

/// A script of several tokens a step.
pub(crate) fn in_steps(ids: Vec<u32>, step_tokens: usize) -> Script {
    Arc::new(move |_, _| ids.chunks(step_tokens).map(|step| Act::Step(step.to_vec())).collect())
}

/// A chat request that gets its answer without thinking.
pub(crate) fn plain_chat() -> Value {
    json!({"messages": [{"role": "user", "content": "Hi"}], "enable_thinking": false})
}

/// `base` with the fields of `more`.
pub(crate) fn with(mut base: Value, more: Value) -> Value {
    let Value::Object(fields) = more else { panic!("not an object") };
    base.as_object_mut().unwrap().extend(fields);
    base
}
