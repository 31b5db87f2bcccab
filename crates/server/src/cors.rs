//! Cross-origin access: which pages may use the server from a browser.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::app::App;
use crate::error::ServerError;

/// Pages of this machine.
const LOOPBACK: &str = "loopback";
const ANY: &str = "*";
/// What pages may send where they do not say what they want to.
const USUAL_HEADERS: HeaderValue =
    HeaderValue::from_static("authorization, content-type, x-api-key, x-request-id");
/// What pages may read of an answer.
const SHOWN_HEADERS: HeaderValue = HeaderValue::from_static(
    "x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, \
     x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens",
);

/// Finds out what is no origin, so that a typing mistake does not look like a page that fails.
pub(crate) fn check(origins: &[String]) -> Result<(), ServerError> {
    let is_origin = |origin: &str| {
        let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        host.is_some_and(|host| !host.is_empty() && !host.contains('/') && host.is_ascii())
    };
    match origins.iter().find(|origin| !(*origin == LOOPBACK || *origin == ANY || is_origin(origin))) {
        None => Ok(()),
        Some(origin) => Err(ServerError::Option {
            option: "cors_origins",
            problem: format!("must be loopback, * or such as https://chat.example, not {origin:?}"),
        }),
    }
}

/// Tells browsers that pages of allowed origins may send requests and read the answers. Other origins get no
/// permission: a web page somewhere must not use the model of who looks at it.
pub(crate) async fn allow(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let origin = allowed_origin(&app.options.cors_origins, request.headers());
    let preflight = request.method() == Method::OPTIONS;
    let wanted_headers = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, SHOWN_HEADERS);
        if preflight {
            let methods = HeaderValue::from_static("GET, HEAD, POST, OPTIONS");
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
            // Headers give no rights of their own; clients' libraries add many.
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted_headers.unwrap_or(USUAL_HEADERS));
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        }
    }
    response
}

/// The request's origin when its pages may use the server.
fn allowed_origin(allowed: &[String], headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let text = origin.to_str().ok()?;
    let matches = |allowed: &String| match allowed.as_str() {
        ANY => true,
        LOOPBACK => is_loopback(text),
        other => other.eq_ignore_ascii_case(text),
    };
    allowed.iter().any(matches).then(|| origin.clone())
}

fn is_loopback(origin: &str) -> bool {
    let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    let host = authority.and_then(|authority| match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map(|(host, _)| host),
        None => authority.split(':').next(),
    });
    matches!(host, Some("localhost" | "127.0.0.1" | "::1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_allowed(allowed: &[&str], origin: &str) -> bool {
        let allowed: Vec<String> = allowed.iter().map(|origin| (*origin).to_owned()).collect();
        let mut headers = HeaderMap::new();
        headers.insert(header::ORIGIN, origin.parse().unwrap());
        allowed_origin(&allowed, &headers).is_some()
    }

    #[test]
    fn only_loopback_origins() {
        for origin in ["http://localhost", "http://localhost:3000", "https://127.0.0.1:8", "http://[::1]:1"] {
            assert!(is_allowed(&[LOOPBACK], origin), "{origin}");
            assert!(!is_allowed(&[], origin), "{origin}");
        }
        for origin in
            ["null", "http://localhost.evil.example", "http://evil.example", "file://", "http://127.0.0.1.x"]
        {
            assert!(!is_allowed(&[LOOPBACK], origin), "{origin}");
            assert!(is_allowed(&[ANY], origin), "{origin}");
        }
        assert!(allowed_origin(&[ANY.to_owned()], &HeaderMap::new()).is_none());
    }

    #[test]
    fn named_origins_and_no_others() {
        let allowed = ["https://chat.example", LOOPBACK];
        assert!(is_allowed(&allowed, "https://chat.example") && is_allowed(&allowed, "http://localhost:1"));
        for origin in ["http://chat.example", "https://chat.example:8", "https://a.chat.example", "null"] {
            assert!(!is_allowed(&allowed, origin), "{origin}");
        }
        let good = |origin: &str| check(&[origin.to_owned()]).is_ok();
        assert!(good("*") && good("loopback") && good("https://chat.example:8443"));
        for wrong in ["", "chat.example", "https://", "https://chat.example/", "ftp://x"] {
            assert!(!good(wrong), "{wrong}");
        }
    }
}
