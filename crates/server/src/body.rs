//! Reads a request body: bounded in size and time, JSON, no key twice.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout_at};

use crate::error::{ApiError, show};
use crate::options::ServerOptions;

/// A body that trickles in may take this many times the longest pause.
const WHOLE_BODY_PAUSES: u32 = 10;

/// JSON values that a body may have: each takes up to ten times its bytes once it is read. A prompt of token ids that fills
/// the longest context of the models has 262,144.
const VALUES_LIMIT: usize = 1 << 19;

/// The JSON object in a body.
pub(crate) async fn read_object(
    options: &ServerOptions,
    headers: &HeaderMap,
    body: Body,
) -> Result<Map<String, Value>, ApiError> {
    check_headers(options, headers)?;
    let bytes = read_bytes(options, body).await?;
    // Parsing 32 MiB takes a while: not on a thread that serves others.
    tokio::task::spawn_blocking(move || parse_object(&bytes))
        .await
        .map_err(|error| ApiError::internal(format!("reading the body failed: {error}")))?
}

/// What can be refused before the body is read.
fn check_headers(options: &ServerOptions, headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let content_type = text(header::CONTENT_TYPE);
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        let found = if content_type.is_empty() { "none" } else { content_type };
        let message = format!("the content-type must be `application/json`, got {found:?}");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).closing());
    }
    let encoding = text(header::CONTENT_ENCODING);
    if !encoding.is_empty() && !encoding.eq_ignore_ascii_case("identity") {
        let message = format!("the content-encoding {encoding:?} is not supported: send the body as it is");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).closing());
    }
    let length: Option<u64> = text(header::CONTENT_LENGTH).parse().ok();
    match length {
        Some(length) if length > options.body_limit_bytes as u64 => {
            Err(too_large(options, &format!("has {length} bytes")))
        }
        _ => Ok(()),
    }
}

fn too_large(options: &ServerOptions, what: &str) -> ApiError {
    let limit = options.body_limit_bytes;
    let message = format!("the body {what}, the limit is {limit} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).with_code("body_too_large").closing()
}

async fn read_bytes(options: &ServerOptions, body: Body) -> Result<Bytes, ApiError> {
    let mut chunks = body.into_data_stream();
    let mut bytes = BytesMut::new();
    let last = Instant::now() + options.read_timeout * WHOLE_BODY_PAUSES;
    loop {
        let pause_end = (Instant::now() + options.read_timeout).min(last);
        let chunk = timeout_at(pause_end, chunks.next()).await.map_err(|_| {
            let message = format!("the body stopped arriving after {} bytes", bytes.len());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, message).closing()
        })?;
        match chunk {
            None => return Ok(bytes.freeze()),
            Some(Err(error)) => {
                let message = format!("the body could not be read: {error}");
                return Err(ApiError::new(StatusCode::BAD_REQUEST, message).closing());
            }
            Some(Ok(chunk)) if bytes.len() + chunk.len() > options.body_limit_bytes => {
                return Err(too_large(options, &format!("has at least {} bytes", bytes.len() + chunk.len())));
            }
            Some(Ok(chunk)) => bytes.extend_from_slice(&chunk),
        }
    }
}

fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let bad = |message: String| {
        ApiError::new(StatusCode::BAD_REQUEST, message)
            .with_code("invalid_json")
            .logged_as("the body is not a valid JSON object")
    };
    if bytes.trim_ascii().is_empty() {
        return Err(bad("the body is empty, a JSON object is needed".into()));
    }
    if let Err(error) = str::from_utf8(bytes) {
        return Err(bad(format!("the body is not valid UTF-8 at byte {}", error.valid_up_to())));
    }
    let (values, mut scan) = (Cell::new(0), serde_json::Deserializer::from_slice(bytes));
    let walked = Walk { values: &values }.deserialize(&mut scan).and_then(|()| scan.end());
    if values.get() > VALUES_LIMIT {
        let message = format!("the body has more than {VALUES_LIMIT} JSON values");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).with_code("body_too_large"));
    }
    walked.map_err(|error| bad(format!("the body is not valid JSON: {error}")))?;
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => Err(bad(format!("the body must be a JSON object, got {}", show(&other)))),
        Err(error) => Err(bad(format!("the body is not valid JSON: {error}"))),
    }
}

/// Walks through JSON, keeps nothing, and fails at the first value too many and at a key that an object has twice: which of
/// the two a reader takes is anybody's guess, so neither is.
#[derive(Clone, Copy)]
struct Walk<'a> {
    /// Met so far.
    values: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.values.set(self.values.get() + 1);
        if self.values.get() > VALUES_LIMIT {
            return Err(D::Error::custom("too many values"));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }
    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(self)?.is_some() {}
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = entries.next_key::<String>()? {
            if keys.contains(&key) {
                // The value is read so that the position in the message is behind this key.
                let _ = entries.next_value::<IgnoredAny>();
                let shown: String = key.chars().take(80).collect();
                return Err(A::Error::custom(format!("the key `{shown}` is there twice")));
            }
            keys.insert(key);
            entries.next_value_seed(self)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(body: &[u8]) -> String {
        parse_object(body).unwrap_err().message
    }

    #[test]
    fn reads_objects() {
        let fields = parse_object(br#" {"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]} "#).unwrap();
        assert_eq!(fields.len(), 2);
    }

    #[test]
    fn refuses_everything_else_with_a_reason() {
        for (body, fragment) in [
            (&b""[..], "empty"),
            (b" \n", "empty"),
            (b"\xef\xbb\xbf{}", "not valid JSON"),
            (b"{\"a\":\"\xc4\xe3\xba\xc3\"}", "not valid UTF-8 at byte 6"),
            (b"[1]", "must be a JSON object, got [1]"),
            (b"7", "must be a JSON object"),
            (b"{\"a\":1,}", "not valid JSON"),
            (b"{\"a\":NaN}", "not valid JSON"),
            (b"{\"a\":1e999}", "out of range"),
            (b"{\"a\":\"\\ud800\"}", "not valid JSON"),
            (b"{} {}", "trailing"),
            (b"{\"a\":1,\"b\":2,\"a\":3}", "`a` is there twice"),
            (b"{\"x\":[{\"deep\":1,\"deep\":1}]}", "`deep` is there twice"),
        ] {
            let message = message(body);
            assert!(message.contains(fragment), "{message} lacks {fragment}");
        }
        let mut deep = b"{\"a\":".to_vec();
        deep.extend(vec![b'['; 10_000]);
        assert!(message(&deep).contains("recursion limit"));
    }

    #[test]
    fn a_body_has_at_most_so_many_values() {
        let body = |values: usize| format!("{{\"prompt\":[{}1]}}", "1,".repeat(values - 3)).into_bytes();
        assert_eq!(parse_object(&body(VALUES_LIMIT)).unwrap().len(), 1);
        let error = parse_object(&body(VALUES_LIMIT + 1)).unwrap_err();
        assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert!(error.message.contains("more than 524288 JSON values"), "{}", error.message);
    }

    #[test]
    fn every_cut_of_a_body_is_refused() {
        let body = br#"{"model":"m","messages":[{"role":"user","content":"\u00e9 hi"}],"n":1.5e3,"x":true}"#;
        for end in 0..body.len() {
            assert!(parse_object(&body[..end]).is_err(), "{end}");
        }
        assert!(parse_object(body).is_ok());
    }
}
