//! What the server tells of itself and of the requests in hand, in the words of other servers.

use serde_json::Value;

use super::schema::{
    Field, always, any_number, any_object, boolean, count, field, list, nullable, object, one_of, reference,
    sometimes, text,
};

/// Schemas with names.
pub(super) fn components() -> Vec<(&'static str, Value)> {
    vec![
        ("Health", health()),
        ("Version", told([("name", text()), ("version", text()), ("numerics", text())])),
        ("Properties", properties()),
        ("TokenizerInfo", tokenizer_info()),
        ("ModelInfo", model_info()),
        ("ServerInfo", server_info()),
        ("Status", status()),
        ("Slots", list(slot())),
        ("Loads", loads()),
        ("OldLoads", list(told(["dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"].map(counted)))),
        ("Load", told(["server_load", "running", "waiting"].map(counted))),
        ("Aborted", object([always("aborted", list(text()), "Ids of the answers")])),
        ("Flushed", told([("flushed", boolean())])),
    ]
}

/// Fields of `/abort_request`.
pub(super) fn abort() -> Vec<Field> {
    vec![
        field("rid", text(), "", "The id of an answer, or the `x-request-id` of a request"),
        field("request_id", text(), "", "Another name of `rid`"),
        field("id", text(), "", "Another name of `rid`"),
        field("abort_all", boolean(), true, "All of one's own; with the admin's key, all"),
    ]
}

/// An object whose fields need no words.
fn told(fields: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    object(fields.into_iter().map(|(name, schema)| always(name, schema, "")))
}

fn counted(name: &'static str) -> (&'static str, Value) {
    (name, count(0))
}

fn measured(name: &'static str) -> (&'static str, Value) {
    (name, any_number())
}

fn health() -> Value {
    object([
        always("status", one_of(["ok", "unavailable"]), ""),
        always("live", boolean(), "Whether it need not be restarted"),
        always("ready", boolean(), "Whether requests are taken"),
        always("can_generate", boolean(), "Whether tokens come out"),
        always("state", one_of(["starting", "ready", "draining", "stopped", "failed"]), ""),
        always("reason", nullable(text()), "Why it is not well"),
        always("running", count(0), "Requests at work"),
        always("waiting", count(0), "Requests in the queue"),
        always("stalled_since_unix_s", nullable(count(0)), "Since when the engine is stuck"),
        always("steps", count(0), "Completed by the engine"),
        always("unsound_logits", count(0), "Choices that ended because the model's logits were not numbers"),
    ])
}

fn properties() -> Value {
    let numbers = ["temperature", "top_p", "min_p", "presence_penalty", "repeat_penalty"].map(measured);
    let params = numbers.into_iter().chain([("top_k", count(0)), ("n_predict", count(-1))]);
    told([
        ("default_generation_settings", told([("n_ctx", count(1)), ("params", told(params))])),
        ("total_slots", count(1)),
        ("n_ctx", count(1)),
        ("model_alias", text()),
        ("model_names", list(text())),
        ("model_path", text()),
        ("chat_template", nullable(text())),
        ("bos_token", text()),
        ("eos_token", nullable(text())),
        ("modalities", told(["text", "vision", "audio"].map(|name| (name, boolean())))),
        ("numerics", text()),
        ("build_info", text()),
    ])
}

fn tokenizer_info() -> Value {
    told([
        ("tokenizer_class", text()),
        ("vocab_size", count(1)),
        ("model_max_length", count(1)),
        ("bos_token", nullable(text())),
        ("eos_token", nullable(text())),
        ("eos_token_id", nullable(count(0))),
        ("pad_token", nullable(text())),
        ("add_bos_token", boolean()),
        ("chat_template", nullable(text())),
    ])
}

fn model_info() -> Value {
    told([
        ("model_path", text()),
        ("tokenizer_path", text()),
        ("served_model_name", text()),
        ("is_generation", boolean()),
        ("max_model_len", count(1)),
        ("preferred_sampling_params", nullable(any_object())),
        ("has_image_understanding", boolean()),
        ("has_audio_understanding", boolean()),
    ])
}

fn server_info() -> Value {
    told([
        ("server", text()),
        ("version", text()),
        ("model_path", text()),
        ("served_model_name", text()),
        ("model_names", list(text())),
        ("status", one_of(["ready", "unavailable"])),
        ("context_length", count(1)),
        ("max_running_requests", count(1)),
        ("max_queued_requests", count(0)),
        ("max_total_num_tokens", count(1)),
        ("page_size", count(1)),
        ("vocab_size", count(1)),
        ("numerics", text()),
        ("disaggregation_mode", text()),
        ("dp_size", count(1)),
        ("tp_size", count(1)),
        ("started_unix_s", count(0)),
        measured("uptime_s"),
    ])
}

fn status() -> Value {
    let requests = ["running", "waiting", "max_running", "max_waiting"].map(counted);
    let tokens = ["prompt", "cached", "generated", "drafted", "accepted"].map(counted);
    let share = || object([always("used", count(0), ""), always("total", count(0), ""), of_tokens()]);
    told([
        ("version", text()),
        ("models", list(text())),
        ("numerics", text()),
        ("uptime_s", count(0)),
        ("health", reference("Health")),
        ("requests", told(requests)),
        ("context_tokens", count(1)),
        ("kv", share()),
        ("states", share()),
        ("cache", any_object()),
        ("tokens", told(tokens)),
        ("rates", list(any_object())),
        ("memory", list(any_object())),
        ("errors", list(any_object())),
    ])
}

fn of_tokens() -> Field {
    sometimes("total_tokens", count(0), "That it can hold")
}

fn slot() -> Value {
    let texts = ["id", "request_id", "key", "endpoint"].map(|name| (name, text()));
    let counts =
        ["choices", "prompt_tokens", "cached_tokens", "processed_tokens", "generated_tokens", "max_tokens"];
    let others = [
        ("state", one_of(["waiting", "prompt", "generating", "ended"])),
        ("is_processing", boolean()),
        ("stream", boolean()),
        ("priority", any_number()),
        ("tokens_per_s", nullable(any_number())),
    ];
    let times = ["waited_s", "age_s", "silent_s"].map(measured);
    told(texts.into_iter().chain(counts.map(counted)).chain(others).chain(times))
}

fn loads() -> Value {
    let counts = [
        "dp_rank",
        "num_running_reqs",
        "num_waiting_reqs",
        "num_total_reqs",
        "num_used_tokens",
        "num_total_tokens",
        "max_total_num_tokens",
        "max_running_requests",
    ];
    let rates = ["token_usage", "gen_throughput", "cache_hit_rate", "utilization"].map(measured);
    let sums = ["total_running_reqs", "total_waiting_reqs", "total_reqs"].map(counted);
    let means = ["avg_token_usage", "avg_throughput", "avg_utilization"].map(measured);
    told([
        measured("timestamp"),
        ("version", text()),
        ("dp_rank_count", count(1)),
        ("loads", list(told(counts.map(counted).into_iter().chain(rates)))),
        ("aggregate", told(sums.into_iter().chain(means))),
    ])
}
