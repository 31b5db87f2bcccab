//! Every answer carries an `x-request-id`, the client's own where it sent a sane one.

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use crate::random::random_id;

pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-id");
const LONGEST_BYTES: usize = 128;

/// The id of the request in hand.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

/// Takes or makes the id, gives it to the handlers, and puts it on the answer.
pub(crate) async fn tag(mut request: Request, next: Next) -> Response {
    let id = request
        .headers()
        .get(&HEADER)
        .and_then(|value| value.to_str().ok())
        .filter(|id| is_sane(id))
        .map_or_else(|| random_id("req-"), str::to_owned);
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

/// Short, printable ASCII: fit for a header and a log line.
fn is_sane(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= LONGEST_BYTES
        && id.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_short_printable_ids() {
        assert!(is_sane("a") && is_sane(&"x".repeat(128)) && is_sane("trace 1/2"));
        assert!(!is_sane("") && !is_sane(&"x".repeat(129)) && !is_sane("tab\there") && !is_sane("ü"));
    }
}
