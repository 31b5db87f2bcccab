//! Fields that are not parameters of ours: those that change nothing here, those that we do not do, unknown ones.

use serde_json::Value;

use crate::app::App;
use crate::error::{ApiError, show};
use crate::fields::Fields;

/// Accepted whatever the value: they label a request or give hints that have no effect on the text.
pub(crate) const IGNORED: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "verbosity",
    "client_metadata",
    "max_tool_calls",
    "context_management",
    "cache_control",
    "betas",
    "inference_geo",
    "speed",
    "diagnostics",
    "cache_prompt",
    // Nothing is added to or between tokens with this family's tokenizers.
    "add_special_tokens",
    "spaces_between_special_tokens",
    // There is one way here to make grammars work.
    "guided_decoding_backend",
];

/// Known fields that we do not do, each with the values (as compact JSON) that ask for nothing.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("modalities", &["[\"text\"]"]),
    ("audio", &[]),
    ("prediction", &[]),
    ("web_search_options", &[]),
    ("suffix", &["\"\""]),
    ("logits_processors", &["[]"]),
    ("logit_processors", &["[]"]),
    ("guided_whitespace_pattern", &[]),
    ("whitespace_pattern", &[]),
    ("structural_tag", &[]),
    ("stop_regex", &["[]", "\"\""]),
    ("banned_strings", &["[]"]),
    ("use_beam_search", &["false"]),
    ("length_penalty", &["1", "1.0"]),
    ("early_stopping", &["false"]),
    ("chat_template", &[]),
    ("documents", &["[]"]),
    ("mm_processor_kwargs", &["{}"]),
    ("images", &["[]"]),
    ("typical_p", &["1", "1.0"]),
    ("top_a", &["0", "0.0"]),
    ("tfs", &["1", "1.0"]),
    ("tfs_z", &["1", "1.0"]),
    ("mirostat", &["0"]),
    ("mirostat_mode", &["0"]),
    ("dry_multiplier", &["0", "0.0"]),
    ("xtc_probability", &["0", "0.0"]),
    ("dynatemp_range", &["0", "0.0"]),
    ("smoothing_factor", &["0", "0.0"]),
    ("lora", &["[]"]),
    ("lora_request", &[]),
    ("kv_transfer_params", &[]),
    ("background", &["false"]),
    ("conversation", &[]),
    ("container", &[]),
    ("mcp_servers", &["[]"]),
];

/// Settles the fields that the endpoint did not take. Call it last.
pub(crate) fn settle(app: &App, fields: &Fields) -> Result<(), ApiError> {
    for (name, value) in fields.rest() {
        if value.is_null() || IGNORED.contains(&name) {
            continue;
        }
        match UNSUPPORTED.iter().find(|(known, _)| *known == name) {
            Some((_, neutral)) => check_neutral(fields.path(name), value, neutral)?,
            None => unknown(app, &fields.path(name))?,
        }
    }
    Ok(())
}

fn check_neutral(path: String, value: &Value, neutral: &[&str]) -> Result<(), ApiError> {
    let shown = show(value);
    if neutral.contains(&shown.as_str()) {
        return Ok(());
    }
    let hint = match neutral {
        [] => "leave it out".to_owned(),
        values => format!("leave it out or send {}", values.join(" or ")),
    };
    let rule = format!("`{path}` is not supported yet by this server: {hint}");
    let message = format!("{rule}, got {shown}");
    Err(ApiError::field(path, message).with_code("unsupported_parameter").logged_as(rule))
}

/// A path without positions: one warning for a field, not one for each message.
pub(crate) fn without_positions(path: &str) -> String {
    path.replace(|c: char| c.is_ascii_digit(), "")
}

/// A kind of tool that only other servers can carry out: it is left out, with one warning.
pub(crate) fn ignored_tool(app: &App, kind: &str) {
    let kind: String = kind.chars().take(64).collect();
    if app.first_warning(&format!("tools of type {kind}")) {
        tracing::warn!(kind, "tools of a type that is not a function are left out (this is said once)");
    }
}

/// A field that nothing is known of: a warning, once for each name, or a refusal.
pub(crate) fn unknown(app: &App, path: &str) -> Result<(), ApiError> {
    let path: String = path.chars().take(64).collect();
    if app.options.strict_params {
        let message = format!("`{path}` is not a known field");
        return Err(ApiError::field(path, message).with_code("unknown_parameter"));
    }
    if app.first_warning(&path) {
        tracing::warn!(field = ?path, "unknown request field ignored (this is said once)");
    }
    Ok(())
}
