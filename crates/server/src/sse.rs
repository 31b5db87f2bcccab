//! Answers as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use futures_util::stream;
use serde::Serialize;

use crate::app::App;
use crate::endpoint::Answer;
use crate::generation::Generation;

/// Events that wait to be sent.
#[derive(Default)]
pub(crate) struct Events(VecDeque<Event>);

impl Events {
    /// Adds an event without a name.
    pub(crate) fn data(&mut self, data: &impl Serialize) {
        self.0.push_back(Event::default().data(json(data)));
    }

    /// Adds an event with a name.
    pub(crate) fn named(&mut self, name: &str, data: &impl Serialize) {
        self.0.push_back(Event::default().event(name).data(json(data)));
    }

    /// Adds the mark at which clients of `OpenAI`'s older endpoints stop to read.
    pub(crate) fn done(&mut self) {
        self.0.push_back(Event::default().data("[DONE]"));
    }
}

/// What a stream sends while there is nothing to say, so that nobody on the way gives it up.
pub(crate) enum KeepAliveForm {
    Comment,
    Event { name: &'static str, data: &'static str },
}

struct Stream<A> {
    generation: Generation,
    answer: A,
    events: Events,
    ended: bool,
}

/// The whole answer as a stream: events as they come, signs of life while none do, an end in any case. When the
/// client goes, the stream is dropped, and the generation with it.
pub(crate) fn respond<A: Answer>(app: &App, generation: Generation, mut answer: A) -> Response {
    let mut events = Events::default();
    answer.begin(&generation, &mut events);
    let stream = Stream { generation, answer, events, ended: false };
    let keep_alive = KeepAlive::new().interval(app.options.keep_alive);
    let keep_alive = match A::keep_alive() {
        KeepAliveForm::Comment => keep_alive.text("waiting"),
        KeepAliveForm::Event { name, data } => keep_alive.event(Event::default().event(name).data(data)),
    };
    let mut response = Sse::new(stream::unfold(stream, next_event)).keep_alive(keep_alive).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies of the nginx family collect a stream unless told not to.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

async fn next_event<A: Answer>(mut stream: Stream<A>) -> Option<(Result<Event, Infallible>, Stream<A>)> {
    loop {
        if let Some(event) = stream.events.0.pop_front() {
            return Some((Ok(event), stream));
        }
        if stream.ended {
            return None;
        }
        let Stream { generation, answer, events, ended } = &mut stream;
        match generation.next().await {
            Some(Ok(update)) => answer.update(generation, update, events),
            Some(Err(error)) => {
                answer.fail(&error, events);
                *ended = true;
            }
            None => {
                answer.end(generation, events);
                *ended = true;
            }
        }
    }
}

/// JSON text of an event.
fn json(data: &impl Serialize) -> String {
    // The types here have string keys and finite numbers: they always have a JSON text.
    serde_json::to_string(data).unwrap_or_default()
}
