//! Prometheus metrics. Counters and histograms of requests are kept here; gauges are read from the engine's load
//! when somebody asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use metrics::{
    Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusRecorder};
use qwill_contract::{CacheLoad, EngineFacts, EngineState, SpeculationLoad};

use crate::EngineMetrics;
use crate::aliases;
use crate::app::App;

/// From a token of a small model to a long prompt on a busy server, seconds.
const LONG_BUCKETS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1200.0];
pub(crate) const SHORT_BUCKETS: &[f64] =
    &[0.000_5, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// How a request ended that the engine never saw.
pub(crate) const REFUSED: &str = "refused";

const QUEUE: &str = "qwill_queue_seconds";
const FIRST_TOKEN: &str = "qwill_time_to_first_token_seconds";
const INTER_TOKEN: &str = "qwill_inter_token_seconds";
const WHOLE_REQUEST: &str = "qwill_request_seconds";

/// Counters and histograms of one server. Not the process-wide recorder: several servers do not mix.
pub(crate) struct Metrics {
    recorder: PrometheusRecorder,
    started: Instant,
    pub(crate) queue_seconds: Histogram,
    pub(crate) first_token_seconds: Histogram,
    pub(crate) inter_token_seconds: Histogram,
    /// Of the prompts that the engine began with: all their tokens, and those found in the prefix cache.
    pub(crate) begun_tokens: AtomicU64,
    pub(crate) cached_tokens: AtomicU64,
}

impl Metrics {
    pub(crate) fn new(facts: &EngineFacts) -> Result<Self, BuildError> {
        let exact = |name: &str| Matcher::Full(name.to_owned());
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(exact(QUEUE), LONG_BUCKETS)?
            .set_buckets_for_metric(exact(FIRST_TOKEN), LONG_BUCKETS)?
            .set_buckets_for_metric(exact(INTER_TOKEN), SHORT_BUCKETS)?
            .set_buckets_for_metric(exact(WHOLE_REQUEST), LONG_BUCKETS)?
            .build_recorder();
        let (queue_seconds, first_token_seconds, inter_token_seconds) = metrics::with_local_recorder(
            &recorder,
            || {
                describe();
                counter!("qwill_stalls_total").absolute(0);
                let model = facts.model_names.first().cloned().unwrap_or_default();
                let version = env!("CARGO_PKG_VERSION");
                gauge!("qwill_build_info", "version" => version, "model" => model, "numerics" => facts.numerics.clone())
                    .set(1.0);
                (histogram!(QUEUE), histogram!(FIRST_TOKEN), histogram!(INTER_TOKEN))
            },
        );
        Ok(Self {
            recorder,
            started: Instant::now(),
            queue_seconds,
            first_token_seconds,
            inter_token_seconds,
            begun_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
        })
    }

    /// An HTTP answer was begun, or its client left before.
    pub(crate) fn answered(&self, endpoint: &'static str, status: u16) {
        self.with(|| {
            counter!("qwill_http_requests_total", "endpoint" => endpoint, "status" => status.to_string())
                .increment(1);
        });
    }

    /// A generation request is over.
    pub(crate) fn request_finished(&self, endpoint: &'static str, finish: &'static str, elapsed: Duration) {
        self.with(|| {
            counter!("qwill_requests_finished_total", "endpoint" => endpoint, "reason" => finish)
                .increment(1);
            if finish != REFUSED {
                histogram!(WHOLE_REQUEST, "endpoint" => endpoint).record(elapsed);
            }
        });
    }

    /// A request with so many tokens was done for the holder of a key.
    pub(crate) fn used(&self, key: &str, prompt_tokens: usize, generated_tokens: usize) {
        self.with(|| {
            counter!("qwill_key_requests_total", "key" => key.to_owned()).increment(1);
            counter!("qwill_key_prompt_tokens_total", "key" => key.to_owned())
                .increment(prompt_tokens as u64);
            counter!("qwill_key_generated_tokens_total", "key" => key.to_owned())
                .increment(generated_tokens as u64);
        });
    }

    /// How long the server has been there.
    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The share of prompts' tokens that the prefix cache had.
    pub(crate) fn cache_hit_rate(&self) -> f64 {
        let begun = self.begun_tokens.load(Ordering::Relaxed);
        if begun == 0 { 0.0 } else { self.cached_tokens.load(Ordering::Relaxed) as f64 / begun as f64 }
    }

    /// The engine completes no step any more.
    pub(crate) fn stalled(&self) {
        self.with(|| counter!("qwill_stalls_total").increment(1));
    }

    /// Moves recorded values into their buckets; otherwise they pile up until somebody asks for them.
    pub(crate) fn upkeep(&self) {
        self.recorder.handle().run_upkeep();
    }

    fn with<T>(&self, work: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(&self.recorder, work)
    }

    fn render(&self, app: &App) -> String {
        let load = app.engine.load().snapshot();
        let ready = !app.is_draining() && load.state == EngineState::Ready;
        self.with(|| {
            for (name, value) in [
                ("qwill_requests_running", load.running),
                ("qwill_requests_waiting", load.waiting),
                ("qwill_kv_pages_used", load.pages_used),
                ("qwill_kv_pages_total", load.pages_total),
                ("qwill_state_slots_used", load.slots_used),
                ("qwill_state_slots_total", app.facts().max_sequences),
                ("qwill_queue_capacity", app.facts().queue_capacity),
                ("qwill_ready", usize::from(ready)),
            ] {
                gauge!(name).set(value as f64);
            }
            gauge!("qwill_kv_usage_ratio").set(load.pages_used as f64 / load.pages_total.max(1) as f64);
            gauge!("qwill_uptime_seconds").set(self.uptime().as_secs_f64());
            counter!("qwill_prompt_tokens_total").absolute(load.prompt_tokens);
            counter!("qwill_generated_tokens_total").absolute(load.generated_tokens);
            counter!("qwill_begun_prompt_tokens_total").absolute(self.begun_tokens.load(Ordering::Relaxed));
            counter!("qwill_cached_prompt_tokens_total").absolute(self.cached_tokens.load(Ordering::Relaxed));
            show_cache(&app.engine.load().cache);
            show_speculation(&app.engine.load().speculation);
        });
        let own = self.recorder.handle().render();
        let aliases = aliases::lines(&own, app.model_name());
        let engine = app.options.engine_metrics.as_ref().map(EngineMetrics::render);
        own + &aliases + &engine.unwrap_or_default()
    }
}

fn show_cache(cache: &CacheLoad) {
    for (name, gauge) in [
        ("qwill_prefix_cache_snapshots", &cache.snapshots),
        ("qwill_prefix_cache_tokens", &cache.tokens),
        ("qwill_prefix_cache_device_pages", &cache.device_pages),
        ("qwill_prefix_cache_host_pages", &cache.host_pages),
        ("qwill_prefix_cache_granules_used", &cache.granules_used),
        ("qwill_prefix_cache_granules_total", &cache.granules_total),
    ] {
        gauge!(name).set(gauge.load(Ordering::Relaxed) as f64);
    }
    gauge!("qwill_prefix_cache_disk_bytes").set(cache.disk_bytes.load(Ordering::Relaxed) as f64);
    for (name, counter) in [
        ("qwill_prefix_cache_hits_total", &cache.hits),
        ("qwill_prefix_cache_evictions_total", &cache.evictions),
        ("qwill_prefix_cache_settled_tokens_total", &cache.settled_tokens),
        ("qwill_prefix_cache_disk_loads_total", &cache.disk_loads),
    ] {
        counter!(name).absolute(counter.load(Ordering::Relaxed));
    }
    for (reason, count) in CacheLoad::MISS_REASONS.into_iter().zip(&cache.misses) {
        counter!("qwill_prefix_cache_misses_total", "reason" => reason)
            .absolute(count.load(Ordering::Relaxed));
    }
}

fn show_speculation(speculation: &SpeculationLoad) {
    let mut accepted = 0;
    for (position, count) in speculation.accepted.iter().enumerate() {
        let count = count.load(Ordering::Relaxed);
        accepted += count;
        counter!("qwill_accepted_drafts_by_position_total", "position" => position.to_string())
            .absolute(count);
    }
    counter!("qwill_accepted_drafts_total").absolute(accepted);
    counter!("qwill_drafting_rounds_total").absolute(speculation.rounds.load(Ordering::Relaxed));
    counter!("qwill_drafted_tokens_total").absolute(speculation.drafted.load(Ordering::Relaxed));
}

fn describe() {
    describe_counter!(
        "qwill_http_requests_total",
        "HTTP answers by endpoint and status; 499: the client left before"
    );
    describe_counter!(
        "qwill_requests_finished_total",
        "Generation requests by endpoint and how they ended: stop, length, tool_calls, timeout, error, cancelled, or refused before the engine saw them"
    );
    describe_counter!("qwill_key_requests_total", "Generation requests by the name of their key");
    describe_counter!("qwill_key_prompt_tokens_total", "Prompt tokens of these requests");
    describe_counter!("qwill_key_generated_tokens_total", "Tokens generated for these requests");
    describe_counter!("qwill_prompt_tokens_total", "Prompt tokens processed");
    describe_counter!("qwill_generated_tokens_total", "Tokens generated");
    describe_counter!(
        "qwill_begun_prompt_tokens_total",
        "Tokens of all prompts that were begun, cached or not"
    );
    describe_counter!("qwill_cached_prompt_tokens_total", "Prompt tokens found in the prefix cache");
    describe_counter!(
        "qwill_prefix_cache_hits_total",
        "Requests that began at a snapshot of the prefix cache"
    );
    describe_counter!(
        "qwill_prefix_cache_misses_total",
        "Requests that found less in the prefix cache than their prompts allow, by reason"
    );
    describe_counter!("qwill_prefix_cache_evictions_total", "Snapshots that had to make room for others");
    describe_counter!(
        "qwill_prefix_cache_settled_tokens_total",
        "Tokens processed in idle time for requests to come"
    );
    describe_gauge!("qwill_prefix_cache_snapshots", "Snapshots in the prefix cache");
    describe_gauge!("qwill_prefix_cache_tokens", "Tokens on the paths to them, common beginnings once");
    describe_gauge!("qwill_prefix_cache_device_pages", "KV pages that the prefix cache holds on the device");
    describe_gauge!("qwill_prefix_cache_host_pages", "KV pages that the prefix cache holds in host memory");
    describe_gauge!(
        "qwill_prefix_cache_granules_used",
        "Granules of host memory in use, by pages and states"
    );
    describe_gauge!("qwill_prefix_cache_granules_total", "Granules of host memory in all");
    describe_counter!(
        "qwill_prefix_cache_disk_loads_total",
        "Requests whose prompts' beginnings were read from disk"
    );
    describe_gauge!("qwill_prefix_cache_disk_bytes", "Bytes of the prefix cache's files on disk");
    describe_gauge!("qwill_requests_running", "Sequences admitted and not ended");
    describe_gauge!("qwill_requests_waiting", "Requests accepted and not admitted");
    describe_gauge!("qwill_queue_capacity", "Requests that may wait");
    describe_gauge!("qwill_kv_pages_used", "KV pages in use");
    describe_gauge!("qwill_kv_pages_total", "KV pages in all");
    describe_gauge!("qwill_state_slots_used", "Recurrent state slots in use");
    describe_gauge!("qwill_state_slots_total", "Recurrent state slots in all");
    describe_counter!("qwill_stalls_total", "Times that the engine had work and completed no step");
    describe_counter!("qwill_drafting_rounds_total", "Rounds of a sequence with drafts");
    describe_counter!("qwill_drafted_tokens_total", "Drafts verified");
    describe_counter!("qwill_accepted_drafts_total", "Drafts accepted");
    describe_counter!(
        "qwill_accepted_drafts_by_position_total",
        "Drafts accepted, by place in the chain from 0"
    );
    describe_gauge!("qwill_kv_usage_ratio", "Share of the KV pages that is in use, 0 to 1");
    describe_gauge!("qwill_ready", "1 when requests are taken");
    describe_gauge!("qwill_uptime_seconds", "Seconds since the server was made");
    describe_gauge!("qwill_build_info", "Always 1; version, model and numerics mode are in the labels");
    describe_histogram!(QUEUE, Unit::Seconds, "From a request's arrival to the engine's beginning");
    describe_histogram!(FIRST_TOKEN, Unit::Seconds, "From a request's arrival to its first token");
    describe_histogram!(
        INTER_TOKEN,
        Unit::Seconds,
        "Between tokens of a request; tokens of one step share their time"
    );
    describe_histogram!(WHOLE_REQUEST, Unit::Seconds, "From a request's arrival to its end");
}

/// `GET /metrics`.
pub(crate) async fn show(State(app): State<Arc<App>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render(&app))
}
