//! API keys.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::app::App;
use crate::error::ApiError;

/// Digests of the keys that open the server. Comparing digests takes the same time whatever was sent, and no
/// key stays in memory in the clear.
pub(crate) struct Keys(Vec<[u8; 32]>);

impl Keys {
    pub(crate) fn new(keys: &[String]) -> Self {
        Self(keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect())
    }

    /// Whether anybody may use the server.
    pub(crate) fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `presented` is one of the keys; looks at all of them in any case.
    fn accept(&self, presented: &[u8]) -> bool {
        let digest: [u8; 32] = Sha256::digest(presented).into();
        let found = self.0.iter().fold(Choice::from(0), |found, key| found | key.ct_eq(&digest));
        found.into()
    }
}

/// Answers 401 to everything but the open paths when there are keys and the request has none of them.
pub(crate) async fn require_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let open = app.keys.is_open()
        || request.method() == Method::OPTIONS
        || is_open_path(request.uri().path())
        || presented_key(request.headers()).is_some_and(|key| app.keys.accept(key));
    if open { next.run(request).await } else { unauthorized(request.headers()).into_response() }
}

/// What says nothing about anybody's work: the server's health and version, and the page, which asks for a key.
fn is_open_path(path: &str) -> bool {
    matches!(path, "/" | "/version" | "/health" | "/health/live" | "/health/ready")
}

fn presented_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii()))
}

fn unauthorized(headers: &HeaderMap) -> ApiError {
    let message = match presented_key(headers) {
        Some(_) => "the API key is not valid",
        None => "an API key is needed: send `Authorization: Bearer <key>` or `x-api-key: <key>`",
    };
    // The body is not read before the key is known.
    ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key").closing()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_each_key_and_nothing_else() {
        let keys = Keys::new(&["alpha".into(), "beta".into()]);
        assert!(keys.accept(b"alpha") && keys.accept(b"beta"));
        for wrong in [&b"alph"[..], b"alphaa", b"", b"ALPHA", b"alphabeta"] {
            assert!(!keys.accept(wrong));
        }
        assert!(!keys.is_open() && Keys::new(&[]).is_open());
    }

    #[test]
    fn reads_both_headers() {
        let mut headers = HeaderMap::new();
        assert_eq!(presented_key(&headers), None);
        headers.insert("x-api-key", "k1".parse().unwrap());
        assert_eq!(presented_key(&headers), Some(&b"k1"[..]));
        headers.insert(header::AUTHORIZATION, "bearer  k2 ".parse().unwrap());
        assert_eq!(presented_key(&headers), Some(&b"k2"[..]));
        headers.insert(header::AUTHORIZATION, "Basic abc".parse().unwrap());
        assert_eq!(presented_key(&headers), Some(&b"k1"[..]));
    }
}
