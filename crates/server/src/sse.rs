//! Answers as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use futures_util::stream;
use serde::Serialize;

use crate::app::App;
use crate::generation::{Generation, Update};

/// Turns news of a generation into chunks.
pub(crate) trait Chunks: Send + 'static {
    /// Adds the chunks for `update`, each as JSON.
    fn update(&mut self, generation: &Generation, update: Update, chunks: &mut VecDeque<String>);
    /// Adds what comes after the last choice has finished.
    fn end(&mut self, generation: &Generation, chunks: &mut VecDeque<String>);
}

struct Stream<C> {
    generation: Generation,
    source: C,
    chunks: VecDeque<String>,
    ended: bool,
}

/// The whole answer as a stream: chunks as they come, comments while nothing does, `[DONE]` in any case. When the
/// client goes, the stream is dropped, and the generation with it.
pub(crate) fn respond(app: &App, generation: Generation, source: impl Chunks) -> Response {
    let stream = Stream { generation, source, chunks: VecDeque::new(), ended: false };
    let events = stream::unfold(stream, next_event);
    let keep_alive = KeepAlive::new().interval(app.options.keep_alive).text("waiting");
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies of the nginx family collect a stream unless told not to.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

async fn next_event<C: Chunks>(mut stream: Stream<C>) -> Option<(Result<Event, Infallible>, Stream<C>)> {
    loop {
        if let Some(chunk) = stream.chunks.pop_front() {
            return Some((Ok(Event::default().data(chunk)), stream));
        }
        if stream.ended {
            return None;
        }
        match stream.generation.next().await {
            Some(Ok(update)) => stream.source.update(&stream.generation, update, &mut stream.chunks),
            Some(Err(error)) => stream.finish(json(&error.body())),
            None => {
                stream.source.end(&stream.generation, &mut stream.chunks);
                stream.finish(None);
            }
        }
    }
}

impl<C> Stream<C> {
    fn finish(&mut self, last: impl Into<Option<String>>) {
        self.chunks.extend(last.into());
        self.chunks.push_back("[DONE]".into());
        self.ended = true;
    }
}

/// JSON text of a chunk.
pub(crate) fn json(chunk: &impl Serialize) -> String {
    // The types here have string keys and finite numbers: they always have a JSON text.
    serde_json::to_string(chunk).unwrap_or_default()
}
