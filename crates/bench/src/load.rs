//! The closed loop: so many requests in flight, until all are done.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::BenchError;
use crate::client::{Client, Connection};
use crate::measure::Observer;
use crate::request::{Asking, stream};
use crate::sample::Sample;
use crate::talk::{Said, Talk};

/// A row's requests, ready to be sent.
pub(crate) struct Load {
    pub(crate) asking: Asking,
    pub(crate) concurrency: usize,
    pub(crate) output_tokens: usize,
    pub(crate) exact_output: bool,
    /// In their order. Those of one conversation are its turns.
    pub(crate) questions: Vec<Question>,
}

/// A request.
pub(crate) struct Question {
    /// What was said before, and will have been.
    pub(crate) talk: Arc<Talk>,
    /// Which of the conversation's questions it is, counted from 0.
    pub(crate) turn: usize,
    pub(crate) text: String,
}

impl Question {
    /// One that is alone.
    pub(crate) fn alone(text: String) -> Self {
        Self { talk: Arc::default(), turn: 0, text }
    }
}

/// What a row's requests left.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// From the first request's sending to the last answer's end.
    pub(crate) wall_us: u64,
    /// In the order of the requests.
    pub(crate) samples: Vec<Sample>,
}

struct Shared {
    client: Client,
    observer: Arc<dyn Observer>,
    load: Load,
    next: AtomicUsize,
    began: Instant,
}

/// Runs all of them. Every stream has a connection of its own, opened before the clock starts; connecting is part of
/// no figure. A server that cannot be reached at all is an error; requests that fail later are in their samples.
pub(crate) async fn run(
    client: &Client,
    load: Load,
    observer: &Arc<dyn Observer>,
) -> Result<Outcome, BenchError> {
    let streams = load.concurrency.min(load.questions.len());
    let mut connections = Vec::with_capacity(streams);
    for _ in 0..streams {
        connections.push(client.connect().await?);
    }
    let shared = Arc::new(Shared {
        client: client.clone(),
        observer: Arc::clone(observer),
        load,
        next: AtomicUsize::new(0),
        began: Instant::now(),
    });
    let workers: Vec<_> = connections
        .into_iter()
        .map(|connection| tokio::spawn(work(Arc::clone(&shared), connection)))
        .collect();
    let mut samples = Vec::with_capacity(shared.load.questions.len());
    for worker in workers {
        let done =
            worker.await.map_err(|error| BenchError::Settings(format!("a stream ended early: {error}")))?;
        samples.extend(done);
    }
    samples.sort_by_key(|sample: &Sample| sample.index);
    let wall_us = samples.iter().map(|sample| sample.start_us + sample.end_us).max().unwrap_or(0);
    Ok(Outcome { wall_us, samples })
}

/// One stream: request after request, until none is left.
async fn work(shared: Arc<Shared>, connection: Connection) -> Vec<Sample> {
    let mut connection = Some(connection);
    let mut samples = Vec::new();
    loop {
        let index = shared.next.fetch_add(1, Ordering::Relaxed);
        let Some(question) = shared.load.questions.get(index) else { return samples };
        let mut said = question.talk.turn().await;
        said.push(Said::by_user(&question.text));
        let Load { asking, output_tokens, exact_output, .. } = &shared.load;
        let body = asking.body(&said, *output_tokens, *exact_output).to_string();
        let mut sample = ask(&shared, &mut connection, body).await;
        said.push(Said::by_model(std::mem::take(&mut sample.answer)));
        (sample.index, sample.turn) = (index, question.turn);
        shared.observer.request_ended(&sample);
        samples.push(sample);
    }
}

/// One request, on the stream's connection or, when that has ended, on a new one.
async fn ask(shared: &Shared, connection: &mut Option<Connection>, body: String) -> Sample {
    if let Some(open) = connection
        && !open.is_usable().await
    {
        *connection = None;
    }
    let open = match connection {
        Some(open) => open,
        None => match shared.client.connect().await {
            Ok(new) => connection.insert(new),
            Err(error) => {
                let start_us = shared.began.elapsed().as_micros() as u64;
                return Sample { start_us, error: Some(error.with_causes()), ..Sample::default() };
            }
        },
    };
    let sample = stream(&shared.client, open, shared.load.asking.dialect, body, shared.began).await;
    if !sample.is_ok() {
        // What is left of a failed answer must not be read as the next one's.
        *connection = None;
    }
    sample
}
