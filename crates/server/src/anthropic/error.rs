//! Errors as Anthropic's clients expect them.

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::error::ApiError;
use crate::request_id::RequestId;

/// Where Anthropic's clients look for a request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

#[derive(Serialize)]
pub(super) struct ErrorBody<'a> {
    r#type: &'static str,
    error: ErrorDetail<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
}

#[derive(Serialize)]
struct ErrorDetail<'a> {
    r#type: &'static str,
    message: &'a str,
}

/// An error's body or event.
pub(super) fn error_body<'a>(error: &'a ApiError, request_id: Option<&'a str>) -> ErrorBody<'a> {
    let detail = ErrorDetail { r#type: kind(error.status), message: &error.message };
    ErrorBody { r#type: "error", error: detail, request_id }
}

/// Anthropic's names.
fn kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

/// Says every error of the routes under `/v1/messages` in Anthropic's words, whoever found it.
pub(crate) async fn in_own_words(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if !(path == "/v1/messages" || path.starts_with("/v1/messages/")) {
        return next.run(request).await;
    }
    let request_id = request.extensions().get::<RequestId>().map(|RequestId(id)| id.clone());
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions().get::<ApiError>() {
        let body = Json(error_body(error, request_id.as_deref())).into_response().into_body();
        *response.body_mut() = body;
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    if let Some(id) = request_id.and_then(|id| HeaderValue::from_str(&id).ok()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}
