//! One streamed request: its body, and the sample that its answer leaves.

use std::time::Instant;

use hyper::Method;
use hyper::body::Incoming;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::BenchError;
use crate::client::{Client, Connection, next_bytes, read_all, refusal};
use crate::events::Events;
use crate::sample::Sample;
use crate::server::Abilities;
use crate::talk::{self, Said};

/// Which of the API's two ways of asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Dialect {
    /// The name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
        }
    }

    /// The path under the server's root.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// The prompt's field, for a text that a user says.
    pub(crate) fn prompt(self, text: &str) -> (&'static str, Value) {
        talk::prompt(self, &[Said::by_user(text)])
    }
}

/// What all requests of a measurement have in common.
#[derive(Debug, Clone)]
pub(crate) struct Asking {
    pub(crate) dialect: Dialect,
    pub(crate) model: String,
    /// The server's own default without.
    pub(crate) temperature: Option<f64>,
    pub(crate) abilities: Abilities,
}

impl Asking {
    /// The body of a streamed request. `exactly`: the answer shall have `tokens` tokens, as far as the server can be
    /// told to; otherwise that is the most.
    pub(crate) fn body(&self, said: &[Said], tokens: usize, exactly: bool) -> Value {
        let mut body = Map::new();
        body.insert("model".into(), json!(self.model));
        let (field, prompt) = talk::prompt(self.dialect, said);
        body.insert(field.into(), prompt);
        body.insert("max_tokens".into(), json!(tokens));
        if let Some(temperature) = self.temperature {
            body.insert("temperature".into(), json!(temperature));
        }
        if exactly && self.abilities.ignore_eos {
            body.insert("ignore_eos".into(), json!(true));
        }
        if exactly && self.abilities.min_tokens {
            body.insert("min_tokens".into(), json!(tokens));
        }
        body.insert("stream".into(), json!(true));
        body.insert("stream_options".into(), json!({"include_usage": true}));
        Value::Object(body)
    }
}

/// Sends a body and reads the answer to its end. Whatever fails is in the sample.
pub(crate) async fn stream(
    client: &Client,
    connection: &mut Connection,
    dialect: Dialect,
    body: String,
    row_began: Instant,
) -> Sample {
    let sent = Instant::now();
    let mut sample = Sample { start_us: micros(row_began, sent), ..Sample::default() };
    let answered = client.in_time(read(client, connection, dialect, body, sent, &mut sample)).await;
    sample.end_us = micros(sent, Instant::now());
    if let Err(error) = answered.and_then(|read| read) {
        sample.error = Some(error.with_causes());
    }
    sample
}

async fn read(
    client: &Client,
    connection: &mut Connection,
    dialect: Dialect,
    body: String,
    sent: Instant,
    sample: &mut Sample,
) -> Result<(), BenchError> {
    let path = dialect.path();
    let response = connection.send(client.request(Method::POST, path, body)?).await?;
    let status = response.status().as_u16();
    if status != 200 {
        return Err(refusal(path, status, &read_all(response.into_body()).await?));
    }
    let mut has_usage = false;
    let mut events = Events::default();
    let mut body = response.into_body();
    while let Some(bytes) = next_bytes(&mut body).await {
        let arrived_us = micros(sent, Instant::now());
        for data in events.push(&bytes?) {
            if data == "[DONE]" {
                drain(&mut body).await;
                return if has_usage { Ok(()) } else { Err(BenchError::NoUsage) };
            }
            has_usage |= take_chunk(&data, arrived_us, sample)?;
        }
    }
    Err(BenchError::Cut)
}

/// Reads the end of the body behind the last event, so that the connection can serve the next request.
async fn drain(body: &mut Incoming) {
    while let Some(Ok(_)) = next_bytes(body).await {}
}

/// Notes what a chunk says; whether it held the token counts.
fn take_chunk(data: &str, arrived_us: u64, sample: &mut Sample) -> Result<bool, BenchError> {
    let chunk: Value = serde_json::from_str(data)
        .map_err(|error| BenchError::Answer { what: "a chunk", reason: error.to_string() })?;
    if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
        let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
        return Err(BenchError::Reported { message });
    }
    let choice = &chunk["choices"][0];
    if has_text(choice) {
        sample.chunk_us.push(arrived_us);
        sample
            .answer
            .extend([&choice["text"], &choice["delta"]["content"]].into_iter().filter_map(Value::as_str));
    }
    if let Some(reason) = choice["finish_reason"].as_str() {
        sample.finish_us = Some(arrived_us);
        sample.finish_reason = Some(reason.to_owned());
    }
    let usage = &chunk["usage"];
    let (Some(prompt), Some(completion)) =
        (usage["prompt_tokens"].as_u64(), usage["completion_tokens"].as_u64())
    else {
        return Ok(false);
    };
    (sample.prompt_tokens, sample.completion_tokens) = (prompt, completion);
    sample.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    Ok(true)
}

/// Whether a choice carries generated text: an answer's, a thought's or a call's. The chunk that only names the
/// role comes before any token and does not count.
fn has_text(choice: &Value) -> bool {
    let delta = &choice["delta"];
    let filled = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
    filled(&choice["text"])
        || ["content", "reasoning_content", "reasoning"].iter().any(|field| filled(&delta[*field]))
        || delta["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty())
}

fn micros(from: Instant, to: Instant) -> u64 {
    to.saturating_duration_since(from).as_micros() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_of(chunks: &[Value]) -> (Sample, bool) {
        let mut sample = Sample::default();
        let mut has_usage = false;
        for (at, chunk) in chunks.iter().enumerate() {
            has_usage |= take_chunk(&chunk.to_string(), 10 * at as u64, &mut sample).unwrap();
        }
        (sample, has_usage)
    }

    #[test]
    fn a_chat_stream_leaves_its_times_and_counts() {
        let (sample, has_usage) = sample_of(&[
            json!({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": null}),
            json!({"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]}),
            json!({"choices": [{"delta": {"content": "yes"}}]}),
            json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3,
                   "prompt_tokens_details": {"cached_tokens": 8}}}),
        ]);
        assert!(has_usage);
        assert_eq!((sample.cached_tokens, sample.answer.as_str()), (Some(8), "yes"));
        assert_eq!(sample.chunk_us, [10, 20]);
        assert_eq!((sample.finish_us, sample.finish_reason.as_deref()), (Some(30), Some("stop")));
        assert_eq!((sample.prompt_tokens, sample.completion_tokens), (9, 3));
    }

    #[test]
    fn a_completion_stream_may_end_in_its_last_text() {
        let (sample, has_usage) = sample_of(&[
            json!({"choices": [{"text": "a", "finish_reason": null}]}),
            json!({"choices": [{"text": "", "finish_reason": null}]}),
            json!({"choices": [{"text": "b", "finish_reason": "length"}]}),
        ]);
        assert!(!has_usage);
        assert_eq!((sample.chunk_us, sample.finish_us), (vec![0, 20], Some(20)));
    }

    #[test]
    fn errors_in_a_stream_are_errors() {
        let mut sample = Sample::default();
        let error = take_chunk(r#"{"error": {"message": "out of memory"}}"#, 0, &mut sample).unwrap_err();
        assert_eq!(error.to_string(), "the server reports: out of memory");
        let error = take_chunk("{", 0, &mut sample).unwrap_err();
        assert!(error.to_string().starts_with("a chunk cannot be read"), "{error}");
    }

    #[test]
    fn a_body_asks_only_for_what_the_server_takes() {
        let mut asking = Asking {
            dialect: Dialect::Chat,
            model: "m".into(),
            temperature: Some(0.0),
            abilities: Abilities { ignore_eos: true, ..Abilities::default() },
        };
        let said = [Said::by_user("hi")];
        let body = asking.body(&said, 7, true);
        assert_eq!(body["messages"][0], json!({"role": "user", "content": "hi"}));
        assert_eq!((&body["max_tokens"], &body["ignore_eos"]), (&json!(7), &json!(true)));
        assert!(body.get("min_tokens").is_none());
        assert_eq!(body["stream_options"]["include_usage"], true);
        asking.dialect = Dialect::Completions;
        let body = asking.body(&said, 7, false);
        assert_eq!(body["prompt"], "hi");
        assert!(body.get("ignore_eos").is_none() && body.get("messages").is_none());
    }
}
