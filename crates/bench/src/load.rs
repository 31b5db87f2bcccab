//! The closed loop: so many requests in flight, until all are done.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::BenchError;
use crate::client::{Client, Connection};
use crate::measure::Observer;
use crate::request::{Dialect, stream};
use crate::sample::Sample;

/// A row's requests, ready to be sent.
pub(crate) struct Load {
    pub(crate) dialect: Dialect,
    pub(crate) concurrency: usize,
    /// One JSON text a request.
    pub(crate) bodies: Vec<String>,
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
    let streams = load.concurrency.min(load.bodies.len());
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
    let mut samples = Vec::with_capacity(shared.load.bodies.len());
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
        let Some(body) = shared.load.bodies.get(index) else { return samples };
        let mut sample = ask(&shared, &mut connection, body.clone()).await;
        sample.index = index;
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
    let sample = stream(&shared.client, open, shared.load.dialect, body, shared.began).await;
    if !sample.is_ok() {
        // What is left of a failed answer must not be read as the next one's.
        *connection = None;
    }
    sample
}
