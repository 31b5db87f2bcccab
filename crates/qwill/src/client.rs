//! A small client of the chat endpoint: what `qwill chat` speaks to any server, also to its own.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::failure::Hinted;

/// What arrives while an answer is generated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Delta {
    /// Text of the thinking.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// Why it ended: `stop`, `length`.
    Finish(String),
    /// Tokens generated in all.
    Usage(u64),
}

/// For answers that need no generating.
const PATIENCE: Duration = Duration::from_secs(8);

/// A model that a server lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServedModel {
    /// Its name.
    pub(crate) id: String,
    /// Prompt and answer together, where the server says it.
    pub(crate) context_tokens: Option<u64>,
}

impl ServedModel {
    fn of(model: &Value) -> Option<Self> {
        let context_tokens =
            ["max_model_len", "context_length"].iter().find_map(|name| model[*name].as_u64());
        Some(Self { id: model["id"].as_str()?.to_owned(), context_tokens })
    }
}

/// A server.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    agent: ureq::Agent,
    base: String,
    key: Option<String>,
}

impl Client {
    /// `url` with or without a trailing slash or `/v1`.
    pub(crate) fn new(url: &str, key: Option<String>) -> Result<Self> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        if !base.starts_with("http://") {
            return Err(Hinted::error(
                format!("`{url}` is not an http:// address"),
                "write the server's address, such as http://127.0.0.1:18020; for https use a local proxy",
            ));
        }
        // Statuses are read here, because the body of a failure holds its reason.
        let config = ureq::Agent::config_builder().http_status_as_error(false).build();
        Ok(Self { agent: config.into(), base, key })
    }

    /// The server's address, without `/v1`.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Name of the served model.
    pub(crate) fn model(&self) -> Result<String> {
        Ok(self.models()?.swap_remove(0).id)
    }

    /// Everything that the server lists: at least one.
    pub(crate) fn models(&self) -> Result<Vec<ServedModel>> {
        let (status, body) = self.get("/v1/models")?;
        check(status, &body)?;
        let body: Value = serde_json::from_str(&body).context("the list of models")?;
        let models: Vec<ServedModel> =
            body["data"].as_array().into_iter().flatten().filter_map(ServedModel::of).collect();
        if models.is_empty() {
            bail!("the server lists no model");
        }
        Ok(models)
    }

    /// Whether requests are taken and answered; otherwise the server's own reason.
    pub(crate) fn health(&self) -> Result<()> {
        let (status, body) = self.get("/health")?;
        if status == 200 {
            return Ok(());
        }
        let parsed: Value = serde_json::from_str(&body).unwrap_or_default();
        bail!("the server is not healthy ({status}): {}", parsed["reason"].as_str().unwrap_or(body.trim()))
    }

    fn get(&self, path: &str) -> Result<(u16, String)> {
        let request = self.agent.get(format!("{}{path}", self.base));
        let mut request = request.config().timeout_global(Some(PATIENCE)).build();
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.call().map_err(|error| self.unreachable(&error))?;
        let body = response.body_mut().read_to_string().with_context(|| format!("reading {path}"))?;
        Ok((response.status().as_u16(), body))
    }

    /// Sends a chat request and hands each piece of the answer to `take`, until it ends or `take` says stop.
    /// Stopping drops the connection, which cancels the request on the server.
    pub(crate) fn chat(&self, body: &Value, take: &mut dyn FnMut(Delta) -> bool) -> Result<()> {
        let mut request = self.agent.post(format!("{}/v1/chat/completions", self.base));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.send_json(body).map_err(|error| self.unreachable(&error))?;
        if response.status().as_u16() != 200 {
            let status = response.status().as_u16();
            let body = response.body_mut().read_to_string().unwrap_or_default();
            return check(status, &body);
        }
        for data in events(BufReader::new(response.body_mut().as_reader())) {
            let data = data.context("the connection broke")?;
            if data == "[DONE]" {
                return Ok(());
            }
            let chunk: Value = serde_json::from_str(&data).context("a chunk of the answer")?;
            if let Some(message) = chunk["error"]["message"].as_str() {
                bail!("the server reports: {message}");
            }
            for delta in deltas(&chunk) {
                if !take(delta) {
                    return Ok(());
                }
            }
        }
        bail!("the connection ended before the answer did")
    }

    fn unreachable(&self, error: &ureq::Error) -> anyhow::Error {
        Hinted::error(
            format!("cannot reach {}: {error}", self.base),
            "is the server running? `qwill serve` prints its address",
        )
    }
}

/// The reason in an error body, or the body itself.
fn check(status: u16, body: &str) -> Result<()> {
    if status == 200 {
        return Ok(());
    }
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let message = parsed.as_ref().and_then(|body| body["error"]["message"].as_str()).unwrap_or(body.trim());
    if status == 401 {
        return Err(Hinted::error(message, "give the server's key with --api-key"));
    }
    bail!("the server answered {status}: {message}")
}

/// The data of each server-sent event; comments and empty lines are skipped.
fn events(reader: impl BufRead) -> impl Iterator<Item = std::io::Result<String>> {
    reader.lines().filter_map(|line| match line {
        Ok(line) => line.strip_prefix("data:").map(|data| Ok(data.trim_start().to_owned())),
        Err(error) => Some(Err(error)),
    })
}

fn deltas(chunk: &Value) -> Vec<Delta> {
    let choice = &chunk["choices"][0];
    let text = |name: &str| choice["delta"][name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let mut deltas = Vec::new();
    deltas.extend(text("reasoning_content").or_else(|| text("reasoning")).map(Delta::Reasoning));
    deltas.extend(text("content").map(Delta::Content));
    deltas.extend(choice["finish_reason"].as_str().map(|reason| Delta::Finish(reason.to_owned())));
    deltas.extend(chunk["usage"]["completion_tokens"].as_u64().map(Delta::Usage));
    deltas
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_skip_comments_and_keep_data() {
        let stream = ": keep-alive\n\ndata: {\"a\":1}\n\ndata:[DONE]\r\n\r\n";
        let found: Vec<String> = events(stream.as_bytes()).map(Result::unwrap).collect();
        assert_eq!(found, ["{\"a\":1}", "[DONE]"]);
    }

    #[test]
    fn a_chunk_gives_its_parts_in_order() {
        let chunk = json!({
            "choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm", "content": "yes"}, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 7},
        });
        let expected = [
            Delta::Reasoning("hm".into()),
            Delta::Content("yes".into()),
            Delta::Finish("stop".into()),
            Delta::Usage(7),
        ];
        assert_eq!(deltas(&chunk), expected);
        assert_eq!(deltas(&json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})), []);
        assert_eq!(deltas(&json!({"choices": []})), []);
    }

    #[test]
    fn an_error_body_gives_its_message() {
        let text = |error: anyhow::Error| error.to_string();
        let body = r#"{"error": {"message": "temperature is 9"}}"#;
        assert_eq!(text(check(400, body).unwrap_err()), "the server answered 400: temperature is 9");
        assert_eq!(text(check(502, "bad gateway\n").unwrap_err()), "the server answered 502: bad gateway");
        assert!(check(200, "").is_ok());
    }

    #[test]
    fn addresses_may_end_in_v1() {
        for url in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            assert_eq!(Client::new(url, None).unwrap().base, "http://h:1");
        }
        assert!(Client::new("https://h", None).is_err());
        assert!(Client::new("h:1", None).is_err());
    }
}
