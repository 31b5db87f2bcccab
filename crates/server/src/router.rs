//! Routes, and what is done around every one of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use crate::anthropic::MessagesRequest;
use crate::app::App;
use crate::chat::ChatRequest;
use crate::completions::CompletionRequest;
use crate::error::ApiError;
use crate::log::CLIENT_CLOSED;
use crate::metrics::Metrics;
use crate::responses::ResponsesRequest;
use crate::{
    admin, anthropic, auth, cors, endpoint, facts, health, host, metrics, models, openapi, page, render,
    request_id, responses, status, tokens,
};

const ENDPOINTS: &str = "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, POST /v1/messages, \
                         GET /v1/models, POST /tokenize, POST /detokenize, POST /apply-template, \
                         POST /abort_request, GET /health, GET /metrics, GET /slots, GET /props, \
                         GET /server_info, GET /v1/loads, GET /v1/status, GET /version, \
                         GET /openapi.json";

/// First path segments after `/v1/` of what other servers do and this one does not.
const OTHER_SERVICES: &[&str] = &[
    "assistants",
    "audio",
    "batches",
    "classify",
    "embeddings",
    "files",
    "fine_tuning",
    "images",
    "moderations",
    "pooling",
    "realtime",
    "rerank",
    "score",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
];

/// All routes of a server, outermost layer last.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(page::chat))
        .route("/status", get(page::status))
        .route("/page/{name}", get(page::file))
        .route("/openapi.json", get(openapi::show))
        .route("/health", get(health::health))
        .route("/health/live", get(health::live))
        .route("/health/ready", get(health::ready))
        .route("/metrics", get(metrics::show))
        .route("/v1/status", get(status::show))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/chat/completions", post(endpoint::handle::<ChatRequest>))
        .route("/v1/chat/completions/render", post(render::render))
        .route("/v1/chat/completions/input_tokens", post(render::input_tokens::<ChatRequest>))
        .route("/v1/completions", post(endpoint::handle::<CompletionRequest>))
        .route("/v1/messages", post(endpoint::handle::<MessagesRequest>))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/responses", post(endpoint::handle::<ResponsesRequest>))
        .route("/v1/responses/input_tokens", post(render::input_tokens::<ResponsesRequest>))
        .route("/v1/responses/{id}", get(responses::show).delete(responses::remove))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/apply-template", post(render::apply_template))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .merge(facts_and_control())
        // Names without the version, for clients that were written for other servers.
        .route("/models", get(models::list))
        .route("/chat/completions", post(endpoint::handle::<ChatRequest>))
        .route("/completions", post(endpoint::handle::<CompletionRequest>))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        // Bodies are read, and bounded, by our own reader.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::clone(&app), auth::require_key))
        .layer(from_fn_with_state(Arc::clone(&app), host::require_known))
        .layer(from_fn(survive_panics))
        .layer(from_fn_with_state(Arc::clone(&app), count))
        .layer(from_fn(anthropic::in_own_words))
        .layer(from_fn_with_state(Arc::clone(&app), cors::allow))
        .layer(from_fn(request_id::tag))
        .with_state(app)
}

/// What the server says about itself, and what touches work in hand. Names are those of other servers, whose clients
/// and gateways look for them.
fn facts_and_control() -> Router<Arc<App>> {
    Router::new()
        .route("/version", get(facts::version))
        .route("/ping", get(health::ping))
        .route("/health_generate", get(health::generate))
        .route("/props", get(facts::props))
        .route("/slots", get(facts::slots))
        .route("/tokenizer_info", get(facts::tokenizer_info))
        .route("/model_info", get(facts::model_info))
        .route("/get_model_info", get(facts::model_info))
        .route("/server_info", get(facts::server_info))
        .route("/get_server_info", get(facts::server_info))
        .route("/v1/loads", get(facts::loads))
        .route("/get_load", get(facts::get_load))
        .route("/load", get(facts::load))
        .route("/abort_request", post(admin::abort))
        .route("/flush_cache", post(admin::flush))
}

async fn not_found(method: Method, uri: Uri) -> Response {
    if method == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    let path: String = uri.path().chars().take(120).collect();
    let service = path.trim_start_matches("/v1/").split('/').next().unwrap_or_default();
    let message = if OTHER_SERVICES.contains(&service) {
        format!("{path}: this server generates text and has no `{service}` service. It has {ENDPOINTS}")
    } else {
        format!("there is no {method} {path}. This server has {ENDPOINTS}")
    };
    unread(&method, ApiError::new(StatusCode::NOT_FOUND, message).with_code("not_found")).into_response()
}

/// Also the answer to OPTIONS. The methods that there are go into `Allow` behind this.
async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    if method == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    let path: String = uri.path().chars().take(120).collect();
    let message = format!("{path} does not take {method}. This server has {ENDPOINTS}");
    let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).with_code("method_not_allowed");
    unread(&method, error).into_response()
}

/// An answer to a request whose body, if its method has one, nobody read.
fn unread(method: &Method, error: ApiError) -> ApiError {
    if method.is_safe() { error } else { error.closing() }
}

/// A bug in a handler costs its request a 500, nothing else.
async fn survive_panics(request: Request, next: Next) -> Response {
    let mut answer = Box::pin(next.run(request));
    std::future::poll_fn(move |context| {
        let polled = catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(context)));
        polled.unwrap_or_else(|panic| {
            let reason = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let reason = reason.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            tracing::error!(reason, "a request handler panicked");
            Poll::Ready(
                ApiError::internal("an internal error occurred; it is in the server's log").into_response(),
            )
        })
    })
    .await
}

/// Counts the answer, or the client that left before there was one.
async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    struct Counting {
        metrics: Arc<Metrics>,
        endpoint: &'static str,
        status: u16,
    }
    impl Drop for Counting {
        fn drop(&mut self) {
            self.metrics.answered(self.endpoint, self.status);
        }
    }
    let endpoint = endpoint_label(request.uri().path());
    let mut counting = Counting { metrics: Arc::clone(&app.metrics), endpoint, status: CLIENT_CLOSED };
    let response = next.run(request).await;
    counting.status = response.status().as_u16();
    response
}

/// The paths of the routes, which are metric labels too.
pub(crate) const PATHS: &[&str] = &[
    "/",
    "/status",
    "/v1/status",
    "/version",
    "/openapi.json",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/chat/completions/input_tokens",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/apply-template",
    "/tokenize",
    "/detokenize",
    "/ping",
    "/health_generate",
    "/props",
    "/slots",
    "/tokenizer_info",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/v1/loads",
    "/get_load",
    "/load",
    "/abort_request",
    "/flush_cache",
];

/// A path as a metric label: one of a few, whatever clients ask for.
fn endpoint_label(path: &str) -> &'static str {
    const FAMILIES: &[&str] = &["/v1/models", "/v1/responses"];
    let is_it = |label: &&&str| **label == path || label.strip_prefix("/v1") == Some(path);
    let in_family = |family: &&&str| path.strip_prefix(**family).is_some_and(|rest| rest.starts_with('/'));
    let other = if path.starts_with(page::FOLDER) { "/page" } else { "other" };
    PATHS.iter().find(is_it).or_else(|| FAMILIES.iter().find(in_family)).copied().unwrap_or(other)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt;

    use super::*;

    async fn boom() {
        panic!("by design");
    }

    #[tokio::test]
    async fn a_panic_is_a_500() {
        let router: Router = Router::new().route("/boom", get(boom)).layer(from_fn(survive_panics));
        let request = Request::builder().uri("/boom").body(Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 16).await.unwrap();
        let body: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(body["error"]["type"], "server_error");
        assert!(!String::from_utf8_lossy(&bytes).contains("by design"), "the reason stays in the log");
    }

    #[test]
    fn labels_are_few() {
        assert_eq!(endpoint_label("/v1/models/a/b"), "/v1/models");
        assert_eq!(endpoint_label("/tokenize"), "/tokenize");
        assert_eq!(endpoint_label("/page/chat.js"), "/page");
        assert_eq!(endpoint_label("/x?y"), "other");
    }
}
