//! Cross-origin access, for pages that this machine serves itself.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Answers preflight requests, and lets pages of loopback origins read the answers. Other origins get no
/// permission: a web page somewhere must not use the model of who looks at it.
pub(crate) async fn allow_loopback(request: Request, next: Next) -> Response {
    let origin = loopback_origin(request.headers());
    let preflight = request.method() == Method::OPTIONS;
    let mut response =
        if preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    if preflight {
        headers.insert(header::ALLOW, HeaderValue::from_static("GET, HEAD, POST, OPTIONS"));
    }
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("x-request-id, retry-after"),
        );
        if preflight {
            headers.insert(
                header::ACCESS_CONTROL_ALLOW_METHODS,
                HeaderValue::from_static("GET, HEAD, POST, OPTIONS"),
            );
            headers.insert(
                header::ACCESS_CONTROL_ALLOW_HEADERS,
                HeaderValue::from_static("authorization, content-type, x-api-key, x-request-id"),
            );
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        }
    }
    response
}

/// The request's origin when it is a page of this machine.
fn loopback_origin(headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let text = origin.to_str().ok()?;
    let authority = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"))?;
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?.0,
        None => authority.split(':').next()?,
    };
    matches!(host, "localhost" | "127.0.0.1" | "::1").then(|| origin.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_origins() {
        let allowed = |origin: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ORIGIN, origin.parse().unwrap());
            loopback_origin(&headers).is_some()
        };
        for origin in ["http://localhost", "http://localhost:3000", "https://127.0.0.1:8", "http://[::1]:1"] {
            assert!(allowed(origin), "{origin}");
        }
        for origin in
            ["null", "http://localhost.evil.example", "http://evil.example", "file://", "http://127.0.0.1.x"]
        {
            assert!(!allowed(origin), "{origin}");
        }
        assert!(loopback_origin(&HeaderMap::new()).is_none());
    }
}
