//! Metrics under vLLM's names, so that boards, autoscalers and gateways made for it work. They are made from the text
//! of our own, so that the two can never differ.

/// Our name, and vLLM's.
const NAMES: &[(&str, &str)] = &[
    ("qwill_requests_running", "vllm:num_requests_running"),
    ("qwill_requests_waiting", "vllm:num_requests_waiting"),
    ("qwill_kv_usage_ratio", "vllm:kv_cache_usage_perc"),
    ("qwill_begun_prompt_tokens_total", "vllm:prompt_tokens_total"),
    ("qwill_begun_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    ("qwill_cached_prompt_tokens_total", "vllm:prefix_cache_hits_total"),
    ("qwill_generated_tokens_total", "vllm:generation_tokens_total"),
    ("qwill_requests_finished_total", "vllm:request_success_total"),
    ("qwill_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    ("qwill_inter_token_seconds", "vllm:inter_token_latency_seconds"),
    ("qwill_inter_token_seconds", "vllm:time_per_output_token_seconds"),
    ("qwill_queue_seconds", "vllm:request_queue_time_seconds"),
    ("qwill_request_seconds", "vllm:e2e_request_latency_seconds"),
    ("qwill_drafting_rounds_total", "vllm:spec_decode_num_drafts_total"),
    ("qwill_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    ("qwill_accepted_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"),
    ("qwill_accepted_drafts_by_position_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
];

/// What a histogram's samples are called beside its name.
const SUFFIXES: [&str; 4] = ["", "_bucket", "_sum", "_count"];

/// The lines that `text` has under other names. vLLM's have the model and the engine's number as labels, and call by
/// other words how a request ended; what never reached an engine does not count there.
pub(crate) fn lines(text: &str, model: &str) -> String {
    let model = model.replace('\\', "\\\\").replace('"', "\\\"");
    let own_labels = format!("model_name=\"{model}\",engine=\"0\"");
    let mut out = String::new();
    for (ours, theirs) in NAMES {
        let renamed = text.lines().filter_map(|line| renamed(line, ours, theirs, &own_labels));
        for line in renamed {
            out.push_str(&line);
            out.push('\n');
        }
    }
    out
}

/// A line of the metric `ours` as it is called there.
fn renamed(line: &str, ours: &str, theirs: &str, own_labels: &str) -> Option<String> {
    if let Some(comment) = line.strip_prefix("# ") {
        let (kind, rest) = comment.split_once(' ')?;
        let (name, rest) = rest.split_once(' ')?;
        return (name == ours).then(|| format!("# {kind} {theirs} {rest}"));
    }
    let (sample, value) = line.rsplit_once(' ')?;
    let (name, labels) = match sample.split_once('{') {
        Some((name, labels)) => (name, labels.trim_end_matches('}')),
        None => (sample, ""),
    };
    let suffix = SUFFIXES.into_iter().find(|suffix| name.strip_suffix(suffix) == Some(ours))?;
    if labels.contains("reason=\"refused\"") {
        return None;
    }
    let labels =
        labels.replace("reason=\"cancelled\"", "reason=\"abort\"").replace("reason=", "finished_reason=");
    let comma = if labels.is_empty() { "" } else { "," };
    Some(format!("{theirs}{suffix}{{{own_labels}{comma}{labels}}} {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_theirs_and_values_ours() {
        let text = "# HELP qwill_requests_running Sequences\n# TYPE qwill_requests_running gauge\n\
                    qwill_requests_running 3\n\n\
                    # TYPE qwill_requests_running_more gauge\nqwill_requests_running_more 4\n\
                    # TYPE qwill_queue_seconds histogram\nqwill_queue_seconds_bucket{le=\"0.1\"} 1\n\
                    qwill_queue_seconds_sum 0.5\nqwill_queue_seconds_count 1\n";
        let expected = "# HELP vllm:num_requests_running Sequences\n# TYPE vllm:num_requests_running gauge\n\
                        vllm:num_requests_running{model_name=\"a\\\"b\",engine=\"0\"} 3\n\
                        # TYPE vllm:request_queue_time_seconds histogram\n\
                        vllm:request_queue_time_seconds_bucket{model_name=\"a\\\"b\",engine=\"0\",le=\"0.1\"} 1\n\
                        vllm:request_queue_time_seconds_sum{model_name=\"a\\\"b\",engine=\"0\"} 0.5\n\
                        vllm:request_queue_time_seconds_count{model_name=\"a\\\"b\",engine=\"0\"} 1\n";
        assert_eq!(lines(text, "a\"b"), expected);
    }

    #[test]
    fn ends_have_their_words_and_refusals_do_not_count() {
        let text = "qwill_requests_finished_total{endpoint=\"/x\",reason=\"cancelled\"} 2\n\
                    qwill_requests_finished_total{endpoint=\"/x\",reason=\"refused\"} 5\n\
                    qwill_requests_finished_total{endpoint=\"/x\",reason=\"length\"} 1\n";
        let expected = "vllm:request_success_total{model_name=\"m\",engine=\"0\",endpoint=\"/x\",finished_reason=\"abort\"} 2\n\
             vllm:request_success_total{model_name=\"m\",engine=\"0\",endpoint=\"/x\",finished_reason=\"length\"} 1\n";
        assert_eq!(lines(text, "m"), expected);
    }
}
