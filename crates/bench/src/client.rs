//! HTTP/1.1 to one server: whole answers for questions, open connections for streams.

use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, USER_AGENT};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::BenchError;
use crate::endpoint::Endpoint;

/// Largest whole answer that is read: a list of models or of tokens is far below.
const ANSWER_LIMIT_BYTES: usize = 64 << 20;

/// A server and how to speak to it.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    endpoint: Arc<Endpoint>,
    authorization: Option<HeaderValue>,
    /// For one request, from sending it to the end of its answer; also for connecting.
    pub(crate) timeout: Duration,
}

/// An open connection, for one request after the other.
#[derive(Debug)]
pub(crate) struct Connection {
    sender: SendRequest<String>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Client {
    /// Nothing is connected yet.
    pub(crate) fn new(endpoint: Endpoint, key: Option<&str>, timeout: Duration) -> Result<Self, BenchError> {
        let authorization = match key {
            None => None,
            Some(key) => {
                let mut value = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| {
                    BenchError::Settings("the server's key has characters that no header can carry".into())
                })?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(Self { endpoint: Arc::new(endpoint), authorization, timeout })
    }

    /// A new connection.
    pub(crate) async fn connect(&self) -> Result<Connection, BenchError> {
        let Endpoint { host, port, authority, .. } = &*self.endpoint;
        let refused = |source| BenchError::Connect { address: authority.clone(), source };
        let stream = self.in_time(TcpStream::connect((host.as_str(), *port))).await?.map_err(refused)?;
        // A request is one small write; it must not wait for others to fill a packet.
        stream.set_nodelay(true).map_err(refused)?;
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(broken("connecting"))?;
        // The task ends with the connection; what goes wrong there is reported by the request that it hits.
        tokio::spawn(connection);
        Ok(Connection { sender })
    }

    /// Asks for a path of the server on a connection of its own.
    pub(crate) async fn get(&self, path: &str) -> Result<Answer, BenchError> {
        self.ask(self.request(Method::GET, path, String::new())?).await
    }

    /// Posts JSON on a connection of its own.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Answer, BenchError> {
        self.ask(self.request(Method::POST, path, body.to_string())?).await
    }

    /// A request for a path of the server.
    pub(crate) fn request(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<Request<String>, BenchError> {
        let mut request = Request::builder()
            .method(method)
            .uri(self.endpoint.path(path))
            .header(HOST, &self.endpoint.authority)
            .header(USER_AGENT, "qwill-bench")
            .header(ACCEPT, "*/*")
            .header(CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| BenchError::Settings(format!("{path}: {error}")))?;
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        Ok(request)
    }

    /// Waits for no longer than a request may take.
    pub(crate) async fn in_time<T>(&self, work: impl Future<Output = T>) -> Result<T, BenchError> {
        let seconds = self.timeout.as_secs();
        tokio::time::timeout(self.timeout, work).await.map_err(|_| BenchError::Timeout { seconds })
    }

    async fn ask(&self, request: Request<String>) -> Result<Answer, BenchError> {
        let mut connection = self.connect().await?;
        self.in_time(async {
            let response = connection.send(request).await?;
            let (status, headers) = (response.status().as_u16(), response.headers().clone());
            let text = read_all(response.into_body()).await?;
            Ok(Answer { status, headers, text })
        })
        .await?
    }
}

impl Connection {
    /// Sends a request; its answer's body is still to come.
    pub(crate) async fn send(&mut self, request: Request<String>) -> Result<Response<Incoming>, BenchError> {
        self.sender.send_request(request).await.map_err(broken("asking"))
    }

    /// Whether another request can be sent; waits until the last answer is done with.
    pub(crate) async fn is_usable(&mut self) -> bool {
        self.sender.ready().await.is_ok()
    }
}

impl Answer {
    /// The answer's JSON, when the status is 200.
    pub(crate) fn json(&self, what: &'static str, path: &str) -> Result<Value, BenchError> {
        if self.status != 200 {
            return Err(refusal(path, self.status, &self.text));
        }
        serde_json::from_str(&self.text)
            .map_err(|error| BenchError::Answer { what, reason: error.to_string() })
    }
}

/// The next piece of a body; `None` at its end.
pub(crate) async fn next_bytes(body: &mut Incoming) -> Option<Result<Bytes, BenchError>> {
    loop {
        let frame = std::future::poll_fn(|context| std::pin::Pin::new(&mut *body).poll_frame(context)).await;
        match frame?.map(hyper::body::Frame::into_data) {
            Ok(Ok(bytes)) => return Some(Ok(bytes)),
            // Trailers are no data.
            Ok(Err(_)) => {}
            Err(error) => return Some(Err(broken("reading the answer")(error))),
        }
    }
}

/// The whole rest of a body as text.
pub(crate) async fn read_all(mut body: Incoming) -> Result<String, BenchError> {
    let mut all = Vec::new();
    while let Some(bytes) = next_bytes(&mut body).await {
        all.extend_from_slice(&bytes?);
        if all.len() > ANSWER_LIMIT_BYTES {
            let reason = format!("it is longer than {ANSWER_LIMIT_BYTES} bytes");
            return Err(BenchError::Answer { what: "the answer", reason });
        }
    }
    Ok(String::from_utf8_lossy(&all).into_owned())
}

/// The error of an answer whose status is not 200: the message of an error body, else its beginning.
pub(crate) fn refusal(path: &str, status: u16, body: &str) -> BenchError {
    let parsed: Value = serde_json::from_str(body).unwrap_or_default();
    let message = parsed["error"]["message"]
        .as_str()
        .or(parsed["message"].as_str())
        .map_or_else(|| body.trim().chars().take(200).collect(), str::to_owned);
    let message = if message.is_empty() { "nothing else".to_owned() } else { message };
    BenchError::Status { path: path.to_owned(), status, message }
}

fn broken(action: &'static str) -> impl Fn(hyper::Error) -> BenchError {
    move |source| BenchError::Http { action, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_the_server_said() {
        let text = |body| refusal("/v1/models", 400, body).to_string();
        let head = "the server answered 400 to /v1/models: ";
        assert_eq!(text(r#"{"error": {"message": "too hot"}}"#), format!("{head}too hot"));
        assert_eq!(text(r#"{"object": "error", "message": "too cold"}"#), format!("{head}too cold"));
        assert_eq!(text("bad gateway\n"), format!("{head}bad gateway"));
        assert_eq!(text(""), format!("{head}nothing else"));
        assert!(text(&"x".repeat(9000)).len() < 300);
    }
}
