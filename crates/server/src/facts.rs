//! What the server says about itself, in the shapes that clients, gateways and monitors of other servers look for.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::App;
use crate::live::Slot;
use crate::prompt::{KV_PAGE_TOKENS, context_limit};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// `GET /version`.
pub(crate) async fn version(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"name": "qwill", "version": VERSION, "numerics": app.facts().numerics}))
}

/// `GET /slots`: everything in hand, oldest first.
pub(crate) async fn slots(State(app): State<Arc<App>>) -> Json<Vec<Slot>> {
    Json(app.live.slots())
}

/// `GET /props`, as llama.cpp has it.
pub(crate) async fn props(State(app): State<Arc<App>>) -> Json<Value> {
    let facts = app.facts();
    let defaults = &app.options.defaults;
    let context = context_limit(facts, 1);
    Json(json!({
        "default_generation_settings": {
            "n_ctx": context,
            "params": {
                "temperature": defaults.temperature,
                "top_p": defaults.top_p,
                "top_k": defaults.top_k,
                "min_p": defaults.min_p,
                "presence_penalty": defaults.presence_penalty,
                "repeat_penalty": defaults.repetition_penalty,
                "n_predict": defaults.max_tokens.map_or(-1, |tokens| tokens as i64),
            },
        },
        "total_slots": facts.max_sequences,
        "n_ctx": context,
        "model_alias": app.model_name(),
        "model_names": facts.model_names,
        "model_path": app.model_name(),
        "chat_template": app.text.template.as_ref().map(|template| template.source()),
        "bos_token": "",
        "eos_token": end_of_turn(&app),
        "modalities": {"text": true, "vision": false, "audio": false},
        "numerics": facts.numerics,
        "build_info": format!("qwill {VERSION}"),
    }))
}

/// `GET /tokenizer_info`, which evaluation tools ask for.
pub(crate) async fn tokenizer_info(State(app): State<Arc<App>>) -> Json<Value> {
    let facts = app.facts();
    Json(json!({
        "tokenizer_class": "Qwen2Tokenizer",
        "vocab_size": facts.vocab_size,
        "model_max_length": context_limit(facts, 1),
        "bos_token": null,
        "eos_token": end_of_turn(&app),
        "eos_token_id": facts.eos_token_ids.first(),
        "pad_token": null,
        "add_bos_token": false,
        "chat_template": app.text.template.as_ref().map(|template| template.source()),
    }))
}

/// `GET /model_info`, as `SGLang` has it.
pub(crate) async fn model_info(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({
        "model_path": app.model_name(),
        "tokenizer_path": app.model_name(),
        "served_model_name": app.model_name(),
        "is_generation": true,
        "max_model_len": context_limit(app.facts(), 1),
        "preferred_sampling_params": null,
        "has_image_understanding": false,
        "has_audio_understanding": false,
    }))
}

/// `GET /server_info`, as `SGLang` has it.
pub(crate) async fn server_info(State(app): State<Arc<App>>) -> Json<Value> {
    let facts = app.facts();
    Json(json!({
        "server": "qwill",
        "version": VERSION,
        "model_path": app.model_name(),
        "served_model_name": app.model_name(),
        "model_names": facts.model_names,
        "status": if app.check_ready().is_ok() { "ready" } else { "unavailable" },
        "context_length": context_limit(facts, 1),
        "max_running_requests": facts.max_sequences,
        "max_queued_requests": facts.queue_capacity,
        "max_total_num_tokens": facts.kv_capacity_tokens,
        "page_size": KV_PAGE_TOKENS,
        "vocab_size": facts.vocab_size,
        "numerics": facts.numerics,
        "disaggregation_mode": "null",
        "dp_size": 1,
        "tp_size": 1,
        "started_unix_s": app.started_unix_s,
        "uptime_s": app.metrics.uptime().as_secs_f64(),
    }))
}

/// How busy the server is.
struct Busy {
    running: usize,
    waiting: usize,
    used_tokens: usize,
    capacity_tokens: usize,
    /// Of the pages.
    usage: f64,
    tokens_per_s: f64,
    cache_hit_rate: f64,
    utilization: f64,
}

impl Busy {
    fn of(app: &App) -> Self {
        let load = app.engine.load().snapshot();
        let facts = app.facts();
        let share = |part: usize, whole: usize| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        Self {
            running: load.running,
            waiting: load.waiting,
            used_tokens: app.live.tokens_in_use(),
            capacity_tokens: facts.kv_capacity_tokens,
            usage: share(load.pages_used, load.pages_total),
            tokens_per_s: app.live.tokens_per_s(),
            cache_hit_rate: app.metrics.cache_hit_rate(),
            utilization: share(load.running, facts.max_sequences),
        }
    }
}

/// `GET /v1/loads`, as `SGLang` has it: one entry for each replica behind an address, here one.
pub(crate) async fn loads(State(app): State<Arc<App>>) -> Json<Value> {
    let busy = Busy::of(&app);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Json(json!({
        "timestamp": now.as_secs_f64(),
        "version": VERSION,
        "dp_rank_count": 1,
        "loads": [{
            "dp_rank": 0,
            "num_running_reqs": busy.running,
            "num_waiting_reqs": busy.waiting,
            "num_total_reqs": busy.running + busy.waiting,
            "num_used_tokens": busy.used_tokens,
            "num_total_tokens": busy.used_tokens,
            "max_total_num_tokens": busy.capacity_tokens,
            "max_running_requests": app.facts().max_sequences,
            "token_usage": busy.usage,
            "gen_throughput": busy.tokens_per_s,
            "cache_hit_rate": busy.cache_hit_rate,
            "utilization": busy.utilization,
        }],
        "aggregate": {
            "total_running_reqs": busy.running,
            "total_waiting_reqs": busy.waiting,
            "total_reqs": busy.running + busy.waiting,
            "avg_token_usage": busy.usage,
            "avg_throughput": busy.tokens_per_s,
            "avg_utilization": busy.utilization,
        },
    }))
}

/// `GET /get_load`, `SGLang`'s older form of the same.
pub(crate) async fn get_load(State(app): State<Arc<App>>) -> Json<Value> {
    let Busy { running, waiting, used_tokens, .. } = Busy::of(&app);
    Json(json!([{
        "dp_rank": 0,
        "num_reqs": running + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": used_tokens,
    }]))
}

/// `GET /load`, as vLLM has it: requests in hand.
pub(crate) async fn load(State(app): State<Arc<App>>) -> Json<Value> {
    let Busy { running, waiting, .. } = Busy::of(&app);
    Json(json!({"server_load": running + waiting, "running": running, "waiting": waiting}))
}

/// The text of the token at which answers end.
fn end_of_turn(app: &App) -> Option<String> {
    let id = app.facts().eos_token_ids.first()?;
    let bytes = app.text.tokenizer.token_bytes(*id)?;
    Some(String::from_utf8_lossy(bytes).into_owned())
}
