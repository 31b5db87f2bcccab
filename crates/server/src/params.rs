//! Generation parameters: those that the endpoints share, checked and brought to one form.

use std::sync::Arc;
use std::time::Duration;

use qwill_contract::SamplingParams;
use qwill_text::Markers;
use serde_json::Value;

use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, token_id, whole_number};
use crate::form::{Form, take_form};
use crate::generation::Update;
use crate::thinking::ThinkingOutput;
use crate::tools::ToolSettings;

const STOP_STRINGS_LIMIT: usize = 16;
const STOP_STRING_LIMIT_BYTES: usize = 4096;
/// In characters, as in the document.
const BIASED_TEXT_LIMIT: usize = 256;
/// In characters, as in the document.
const CACHE_SALT_LIMIT: usize = 256;
const LOGPROBS_LIMIT: i64 = 20;
/// Softer than this, dividing by the temperature overflows before the maximum can be told from the rest: greedy.
const LOWEST_TEMPERATURE: f32 = 1e-5;

/// What a request asks for, apart from its prompt.
#[derive(Debug, Clone)]
pub(crate) struct Params {
    /// All but `max_tokens`, which depends on the prompt's length, and `seed`.
    pub(crate) sampling: SamplingParams,
    /// Absent: a random one for each prompt.
    pub(crate) seed: Option<u64>,
    /// See [`qwill_contract::Request::cache_salt`].
    pub(crate) cache_salt: Option<Arc<str>>,
    /// See [`qwill_contract::Request::priority`].
    pub(crate) priority: i32,
    /// From the request's arrival to its end.
    pub(crate) max_time: Option<Duration>,
    /// As the client gave it.
    pub(crate) max_tokens: Option<usize>,
    /// What the client calls it.
    pub(crate) max_tokens_path: String,
    pub(crate) choices: usize,
    /// Log-probabilities of the prompt in the answer, with this many alternatives each.
    pub(crate) prompt_logprobs: Option<usize>,
    /// The same for the prompt as part of the answer.
    pub(crate) echo_logprobs: Option<usize>,
    pub(crate) truncation: Truncation,
    pub(crate) output: OutputRules,
    /// What the answer has to be like.
    pub(crate) form: Form,
    /// Set by the endpoints that know tools.
    pub(crate) tools: Arc<ToolSettings>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) extras: Extras,
}

/// What becomes of the beginning of a prompt that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truncation {
    /// The request is refused.
    Refuse,
    /// It is cut off, so that prompt and answer fit.
    ToFit,
    /// It is cut off, so that this many tokens are left, however many would fit.
    To(usize),
}

/// What an answer tells besides.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Extras {
    /// How long it took, with the end.
    pub(crate) timings: bool,
    /// How long it took so far, with every chunk.
    pub(crate) timings_per_token: bool,
    /// How far the prompt is processed, in chunks of their own.
    pub(crate) progress: bool,
}

impl Extras {
    /// Whether a chunk for this news tells timings.
    pub(crate) fn timings_with(self, update: &Update) -> bool {
        self.timings_per_token || (self.timings && matches!(update, Update::Finished { .. }))
    }
}

impl Params {
    /// For APIs whose answers have one choice.
    pub(crate) fn single(self) -> Result<Self, ApiError> {
        let Extras { timings, timings_per_token, progress } = self.extras;
        let elsewhere = [
            ("timings", timings),
            ("timings_per_token", timings_per_token),
            ("return_progress", progress),
            ("return_token_ids", self.output.return_token_ids),
            ("prompt_logprobs", self.prompt_logprobs.is_some()),
        ];
        if let Some((name, _)) = elsewhere.into_iter().find(|&(_, asked)| asked) {
            let message = format!("`{name}` is for /v1/chat/completions and /v1/completions: leave it out");
            return Err(ApiError::field(name, message).with_code("unsupported_parameter"));
        }
        if self.choices == 1 { Ok(self) } else { Err(ApiError::value("n", "1 here", &self.choices.into())) }
    }

    /// Whether an answer has something to say of each token, even of those without text.
    pub(crate) fn tells_tokens(&self) -> bool {
        self.sampling.logprobs.is_some() || self.output.return_token_ids
    }
}

/// How tokens become the answer's text.
#[derive(Debug, Clone)]
pub(crate) struct OutputRules {
    pub(crate) stop: Vec<String>,
    pub(crate) include_stop: bool,
    pub(crate) skip_special: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) thinking: ThinkingOutput,
}

/// Takes the shared parameters out of `fields`; `logprobs` is left to the endpoints, which spell it differently.
pub(crate) fn take_params(app: &App, fields: &mut Fields) -> Result<Params, ApiError> {
    let (max_tokens, max_tokens_path) = take_max_tokens(fields)?;
    let sampling = take_sampling(app, fields)?;
    let seed = take_seed(fields)?;
    let cache_salt = take_cache_salt(fields)?;
    let priority = take_priority(fields)?;
    let max_time = take_max_time(fields)?;
    if let Some(most) = max_tokens
        && sampling.min_tokens > most
    {
        let least = sampling.min_tokens;
        let message =
            format!("`min_tokens` is {least} and must not exceed `{max_tokens_path}`, which is {most}");
        return Err(ApiError::field("min_tokens", message).with_code("invalid_value"));
    }
    let choices = take_choices(app, fields)?;
    let output = OutputRules {
        stop: take_stop(fields)?,
        include_stop: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
        skip_special: fields.boolean("skip_special_tokens")?.unwrap_or(true),
        return_token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
        thinking: take_thinking_output(fields)?,
    };
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = take_stream_options(app, fields, stream)?;
    let prompt_logprobs = take_prompt_logprobs(fields, stream)?;
    let truncation = take_truncation(fields)?;
    let extras = take_extras(fields, stream)?;
    Ok(Params {
        sampling,
        seed,
        cache_salt,
        priority,
        max_time,
        max_tokens,
        max_tokens_path,
        choices,
        prompt_logprobs,
        echo_logprobs: None,
        truncation,
        output,
        form: take_form(app, fields)?,
        tools: Arc::default(),
        stream,
        include_usage,
        extras,
    })
}

/// The limit and the name that it was given by.
fn take_max_tokens(fields: &mut Fields) -> Result<(Option<usize>, String), ApiError> {
    let (old_path, new_path) = (fields.path("max_tokens"), "max_completion_tokens".to_owned());
    let old = fields.count("max_tokens", 0)?;
    let new = fields.count("max_completion_tokens", 0)?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => {
            let message = format!(
                "`{old_path}` ({old}) and `{new_path}` ({new}) are the same setting and differ: send one"
            );
            Err(ApiError::field(new_path, message).with_code("invalid_value"))
        }
        (None, Some(new)) => Ok((Some(new), new_path)),
        (old, _) => Ok((old, old_path)),
    }
}

fn take_sampling(app: &App, fields: &mut Fields) -> Result<SamplingParams, ApiError> {
    let defaults = &app.options.defaults;
    let vocab_size = app.facts().vocab_size;
    let temperature = fields.number("temperature", "a number from 0 to 2", |t| (0.0..=2.0).contains(&t))?;
    let temperature = temperature.unwrap_or(defaults.temperature);
    let top_p = fields.number("top_p", "a number above 0, at most 1", |p| p > 0.0 && p <= 1.0)?;
    let top_k = fields.integer("top_k", "a whole number: -1 or 0 for all, or at least 1", |k| k >= -1)?;
    let min_p = fields.number("min_p", "a number from 0 to 1", |p| (0.0..=1.0).contains(&p))?;
    let penalty = "a number from -2 to 2";
    let in_range = |penalty: f32| (-2.0..=2.0).contains(&penalty);
    let presence = fields.number("presence_penalty", penalty, in_range)?;
    let frequency = fields.number("frequency_penalty", penalty, in_range)?;
    let repetition =
        fields.number("repetition_penalty", "a number above 0, at most 10", |p| p > 0.0 && p <= 10.0)?;
    Ok(SamplingParams {
        temperature: if temperature < LOWEST_TEMPERATURE { 0.0 } else { temperature },
        top_p: top_p.unwrap_or(defaults.top_p),
        top_k: top_k.map_or(defaults.top_k, |k| k.max(0) as usize).min(vocab_size),
        min_p: min_p.unwrap_or(defaults.min_p),
        presence_penalty: presence.unwrap_or(defaults.presence_penalty),
        frequency_penalty: frequency.unwrap_or(0.0),
        repetition_penalty: repetition.unwrap_or(defaults.repetition_penalty),
        logit_bias: take_logit_bias(app, fields)?,
        seed: 0,
        max_tokens: 0,
        min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        stop_token_ids: take_token_ids(fields, "stop_token_ids", vocab_size)?,
        logprobs: None,
    })
}

/// `include_reasoning` and `separate_reasoning`.
fn take_thinking_output(fields: &mut Fields) -> Result<ThinkingOutput, ApiError> {
    let shown = fields.boolean("include_reasoning")?.unwrap_or(true);
    let apart = fields.boolean("separate_reasoning")?.unwrap_or(true);
    Ok(match (shown, apart) {
        (false, _) => ThinkingOutput::Hidden,
        (true, false) => ThinkingOutput::Inline,
        (true, true) => ThinkingOutput::Apart,
    })
}

fn take_prompt_logprobs(fields: &mut Fields, stream: bool) -> Result<Option<usize>, ApiError> {
    let found = take_top_logprobs(fields, "prompt_logprobs")?;
    if stream && found.is_some() {
        let message = "`prompt_logprobs` is for answers that are not streamed: leave out `stream`";
        return Err(ApiError::field("prompt_logprobs", message).with_code("invalid_value"));
    }
    Ok(found)
}

/// `truncate_prompt_tokens`: a number of tokens, or -1 for what fits.
fn take_truncation(fields: &mut Fields) -> Result<Truncation, ApiError> {
    let expected = "a whole number: -1 for what fits, or at least 1";
    let found = fields.integer("truncate_prompt_tokens", expected, |keep| keep == -1 || keep >= 1)?;
    Ok(match found {
        None => Truncation::Refuse,
        Some(keep) => usize::try_from(keep).map_or(Truncation::ToFit, Truncation::To),
    })
}

fn take_extras(fields: &mut Fields, stream: bool) -> Result<Extras, ApiError> {
    let timings_per_token = fields.boolean("timings_per_token")?.unwrap_or(false);
    let timings = fields.boolean("timings")?.unwrap_or(timings_per_token);
    let progress = fields.boolean("return_progress")?.unwrap_or(false);
    if progress && !stream {
        let message = "`return_progress` is only for `stream`: true";
        return Err(ApiError::field("return_progress", message).with_code("invalid_value"));
    }
    Ok(Extras { timings, timings_per_token, progress })
}

/// Any 64-bit integer, signed or not.
fn take_seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| whole_number(&value).map(|seed| seed as u64));
    seed.map(Some).ok_or_else(|| ApiError::value("seed", "a 64-bit integer", &value))
}

/// Lower is more urgent; 0 where nothing is said.
fn take_priority(fields: &mut Fields) -> Result<i32, ApiError> {
    let in_range = |priority: i64| i32::try_from(priority).is_ok();
    let priority = fields.integer("priority", "a whole number of 32 bits", in_range)?;
    Ok(priority.unwrap_or(0) as i32)
}

fn take_max_time(fields: &mut Fields) -> Result<Option<Duration>, ApiError> {
    const LONGEST_S: f32 = 1e6;
    let seconds = fields.number("max_time_s", "a number of seconds above 0, at most 1000000", |s| {
        s > 0.0 && s <= LONGEST_S
    })?;
    Ok(seconds.map(Duration::from_secs_f32))
}

/// Any text but the empty one, which is none.
fn take_cache_salt(fields: &mut Fields) -> Result<Option<Arc<str>>, ApiError> {
    let Some(salt) = fields.string("cache_salt")?.filter(|salt| !salt.is_empty()) else { return Ok(None) };
    if salt.chars().count() > CACHE_SALT_LIMIT {
        let expected = format!("at most {CACHE_SALT_LIMIT} characters");
        return Err(ApiError::value("cache_salt", &expected, &salt.into()));
    }
    Ok(Some(salt.into()))
}

fn take_token_ids(fields: &mut Fields, name: &str, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let items = fields.list(name)?.unwrap_or_default();
    parse_token_ids(&items, &fields.path(name), vocab_size)
}

/// Token ids, all of the vocabulary.
pub(crate) fn parse_token_ids(items: &[Value], path: &str, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let parse = |(index, item): (usize, &Value)| {
        token_id(item, vocab_size).ok_or_else(|| {
            let expected = format!("a token id from 0 to {}", vocab_size.saturating_sub(1));
            ApiError::value(format!("{path}[{index}]"), &expected, item)
        })
    };
    items.iter().enumerate().map(parse).collect()
}

/// `{"id": bias}`, or `[[id, bias]]`, where a text may stand for its tokens. A bias of `false` is a ban.
fn take_logit_bias(app: &App, fields: &mut Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let vocab_size = app.facts().vocab_size;
    let entries: Vec<(Vec<u32>, Value)> = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => {
            let number = |key: String| key.parse::<u64>().map_or(Value::String(key), Value::from);
            let entry = |(key, bias)| Ok((vec![biased_id(&number(key), vocab_size)?], bias));
            map.into_iter().map(entry).collect::<Result<_, ApiError>>()?
        }
        Some(Value::Array(items)) => {
            items.iter().map(|item| bias_pair(app, item)).collect::<Result<_, _>>()?
        }
        Some(other) => {
            return Err(ApiError::value("logit_bias", "an object of token ids and biases", &other));
        }
    };
    let mut biases: Vec<(u32, f32)> = Vec::with_capacity(entries.len());
    for (ids, value) in entries {
        let bias = match &value {
            Value::Bool(false) => Some(f32::NEG_INFINITY),
            value => value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias)).map(|bias| bias as f32),
        };
        for id in ids {
            let bias = bias.ok_or_else(|| {
                ApiError::value(format!("logit_bias.{id}"), "a number from -100 to 100, or false", &value)
            })?;
            biases.push((id, bias));
        }
    }
    // An id that is spelt twice, as in "7" and "07", counts once: the last.
    biases.reverse();
    biases.sort_by_key(|&(id, _)| id);
    biases.dedup_by_key(|&mut (id, _)| id);
    Ok(biases)
}

fn biased_id(key: &Value, vocab_size: usize) -> Result<u32, ApiError> {
    token_id(key, vocab_size).ok_or_else(|| {
        let expected = format!("given for token ids from 0 to {}", vocab_size.saturating_sub(1));
        ApiError::value("logit_bias", &expected, key)
    })
}

fn bias_pair(app: &App, item: &Value) -> Result<(Vec<u32>, Value), ApiError> {
    match item.as_array().map(Vec::as_slice) {
        Some([Value::String(text), bias]) if (1..=BIASED_TEXT_LIMIT).contains(&text.chars().count()) => {
            Ok((app.text.tokenizer.encode(text, Markers::None), bias.clone()))
        }
        Some([id, bias]) => Ok((vec![biased_id(id, app.facts().vocab_size)?], bias.clone())),
        _ => Err(ApiError::value("logit_bias", "a list of [id, bias] pairs", item)),
    }
}

fn take_choices(app: &App, fields: &mut Fields) -> Result<usize, ApiError> {
    let most = app.options.max_choices.min(app.facts().max_sequences).max(1);
    let expected = format!("a whole number from 1 to {most}");
    let in_range = |count| (1..=most as i64).contains(&count);
    let choices = fields.integer("n", &expected, in_range)?.unwrap_or(1) as usize;
    let best_of = fields.integer("best_of", "a whole number", |_| true)?;
    if let Some(best_of) = best_of.filter(|&best_of| best_of != choices as i64) {
        let message = format!("`best_of` is only supported when it equals `n` ({choices}), got {best_of}");
        return Err(ApiError::field("best_of", message).with_code("unsupported_parameter"));
    }
    Ok(choices)
}

fn take_stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let path = fields.path("stop");
    let expected = format!("a string or up to {STOP_STRINGS_LIMIT} strings, none of them empty");
    let items = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) if items.len() <= STOP_STRINGS_LIMIT => items,
        Some(Value::String(text)) => vec![Value::String(text)],
        Some(other) => return Err(ApiError::value(path, &expected, &other)),
    };
    let check = |(index, item)| match item {
        Value::String(text) if !text.is_empty() && text.len() <= STOP_STRING_LIMIT_BYTES => Ok(text),
        Value::String(text) if !text.is_empty() => {
            let bytes = text.len();
            let message =
                format!("`{path}[{index}]` has {bytes} bytes, the limit is {STOP_STRING_LIMIT_BYTES} bytes");
            Err(ApiError::field(format!("{path}[{index}]"), message).with_code("invalid_value"))
        }
        other => Err(ApiError::value(format!("{path}[{index}]"), "a string that is not empty", &other)),
    };
    items.into_iter().enumerate().map(check).collect()
}

fn take_stream_options(app: &App, fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.take("stream_options") else { return Ok(false) };
    if !stream {
        let message = "`stream_options` is only for `stream`: true";
        return Err(ApiError::field("stream_options", message).with_code("invalid_value"));
    }
    let mut options = Fields::nested("stream_options", options)?;
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    if options.boolean("include_obfuscation")? == Some(true) {
        let message = "`stream_options.include_obfuscation` is not supported yet by this server, got true";
        return Err(ApiError::field("stream_options.include_obfuscation", message));
    }
    crate::known::settle(app, &options)?;
    Ok(include_usage)
}

/// A number of alternatives to report.
pub(crate) fn take_top_logprobs(fields: &mut Fields, name: &str) -> Result<Option<usize>, ApiError> {
    let expected = format!("a whole number from 0 to {LOGPROBS_LIMIT}");
    let found = fields.integer(name, &expected, |count| (0..=LOGPROBS_LIMIT).contains(&count))?;
    Ok(found.map(|count| count as usize))
}
