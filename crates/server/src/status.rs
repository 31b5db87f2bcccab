//! `GET /v1/status`: what the server is doing, for the status page and for people with `curl`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::Json;
use axum::extract::{Extension, State};
use qwill_contract::{CacheLoad, LoadSnapshot};
use serde::Serialize;

use crate::app::App;
use crate::auth::Origin;
use crate::health::{Health, assess};
use crate::options::MemoryPart;
use crate::prompt::context_limit;
use crate::recent::{Rates, RecentError, SAMPLE_INTERVAL, Totals};

/// The whole answer. Fields are added, never renamed.
#[derive(Serialize)]
pub(crate) struct Status {
    version: &'static str,
    models: Vec<String>,
    /// Same mode, seed and request: same text.
    numerics: String,
    uptime_s: u64,
    health: Health,
    requests: Requests,
    context_tokens: usize,
    kv: Share,
    states: Share,
    cache: Cache,
    tokens: TokenCounts,
    /// Tokens a second of the last five minutes, oldest first.
    rates: Vec<Rates>,
    /// Memory as it was planned at start, part by part.
    memory: Vec<MemoryPart>,
    /// Requests of the caller's key that failed, latest first; of all keys for the admin.
    errors: Vec<RecentError>,
}

#[derive(Serialize)]
struct Requests {
    running: usize,
    waiting: usize,
    max_running: usize,
    max_waiting: usize,
}

/// Of something that there is a fixed number of.
#[derive(Serialize)]
struct Share {
    used: usize,
    total: usize,
    /// Tokens that the whole of it can hold, where it holds tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    total_tokens: Option<usize>,
}

#[derive(Serialize)]
struct TokenCounts {
    /// Processed, of prompts.
    prompt: u64,
    /// Found in the cache instead.
    cached: u64,
    generated: u64,
    /// Drafts verified, and those of them that were right.
    drafted: u64,
    accepted: u64,
}

/// The prefix cache.
#[derive(Serialize)]
struct Cache {
    snapshots: usize,
    tokens: usize,
    device_pages: usize,
    host_pages: usize,
    host_granules: Share,
    disk_bytes: u64,
    hits: u64,
    /// Requests that found less than their prompts allow, by reason.
    misses: serde_json::Map<String, serde_json::Value>,
    evictions: u64,
    disk_loads: u64,
}

impl Cache {
    fn new(load: &CacheLoad) -> Self {
        let misses = CacheLoad::MISS_REASONS.into_iter().zip(&load.misses);
        Self {
            snapshots: load.snapshots.load(Ordering::Relaxed),
            tokens: load.tokens.load(Ordering::Relaxed),
            device_pages: load.device_pages.load(Ordering::Relaxed),
            host_pages: load.host_pages.load(Ordering::Relaxed),
            host_granules: Share {
                used: load.granules_used.load(Ordering::Relaxed),
                total: load.granules_total.load(Ordering::Relaxed),
                total_tokens: None,
            },
            disk_bytes: load.disk_bytes.load(Ordering::Relaxed),
            hits: load.hits.load(Ordering::Relaxed),
            misses: misses
                .map(|(reason, count)| (reason.to_owned(), count.load(Ordering::Relaxed).into()))
                .collect(),
            evictions: load.evictions.load(Ordering::Relaxed),
            disk_loads: load.disk_loads.load(Ordering::Relaxed),
        }
    }
}

fn totals(app: &App, load: &LoadSnapshot) -> Totals {
    Totals {
        prompt: load.prompt_tokens,
        cached: app.metrics.cached_tokens.load(Ordering::Relaxed),
        generated: load.generated_tokens,
    }
}

/// The handler.
pub(crate) async fn show(State(app): State<Arc<App>>, Extension(origin): Extension<Origin>) -> Json<Status> {
    let facts = app.facts();
    let load = app.engine.load().snapshot();
    let Totals { prompt, cached, generated } = totals(&app, &load);
    let speculation = &app.engine.load().speculation;
    Json(Status {
        version: env!("CARGO_PKG_VERSION"),
        models: facts.model_names.clone(),
        numerics: facts.numerics.clone(),
        uptime_s: app.metrics.uptime().as_secs(),
        health: assess(&app),
        requests: Requests {
            running: load.running,
            waiting: load.waiting,
            max_running: facts.max_sequences,
            max_waiting: facts.queue_capacity,
        },
        context_tokens: context_limit(facts, 1),
        kv: Share {
            used: load.pages_used,
            total: load.pages_total,
            total_tokens: Some(facts.kv_capacity_tokens),
        },
        states: Share { used: load.slots_used, total: facts.max_sequences, total_tokens: None },
        cache: Cache::new(&app.engine.load().cache),
        tokens: TokenCounts {
            prompt,
            cached,
            generated,
            drafted: speculation.drafted.load(Ordering::Relaxed),
            accepted: speculation.accepted.iter().map(|place| place.load(Ordering::Relaxed)).sum(),
        },
        rates: app.history.rates(Instant::now()),
        memory: app.options.memory.clone(),
        errors: app.recent_errors.list(&origin.caller),
    })
}

/// Samples the counters for as long as the server runs.
pub(crate) async fn sample(app: Arc<App>) {
    let mut ticks = tokio::time::interval(SAMPLE_INTERVAL);
    loop {
        ticks.tick().await;
        let load = app.engine.load().snapshot();
        app.history.note(Instant::now(), totals(&app, &load));
    }
}
