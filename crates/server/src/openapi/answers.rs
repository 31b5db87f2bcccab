//! What the server answers.

use serde_json::{Value, json};

use super::schema::{
    Field, always, any_number, any_object, any_of, boolean, count, list, nullable, object, one_of, reference,
    sometimes, text,
};

/// Schemas with names.
pub(super) fn components() -> Vec<(&'static str, Value)> {
    vec![
        ("ChatCompletion", chat_completion()),
        ("ChatCompletionChunk", chat_chunk()),
        ("Completion", completion()),
        ("CompletionChunk", completion_chunk()),
        ("ChatLogprobs", chat_logprobs()),
        ("CompletionLogprobs", completion_logprobs()),
        ("Usage", usage()),
        ("Timings", timings()),
        ("PromptProgress", prompt_progress()),
        ("PromptLogprobs", prompt_logprobs()),
        ("RenderedPrompt", rendered_prompt()),
        ("PromptText", object([always("prompt", text(), "")])),
        ("InputTokens", object([always("object", text(), ""), always("input_tokens", count(0), "")])),
        ("Model", model()),
        (
            "ModelList",
            object([
                always("object", one_of(["list"]), ""),
                always("data", list(reference("Model")), ""),
                always("models", list(any_object()), "Empty: a coding agent looks for it"),
            ]),
        ),
        ("Tokens", tokens()),
        ("Text", object([always("prompt", text(), "The text"), always("text", text(), "The same")])),
        ("Document", json!({"type": "object", "required": ["openapi", "paths"]})),
        ("Error", error()),
    ]
}

fn head(object: &str) -> Vec<Field> {
    vec![
        always("id", text(), ""),
        always("object", one_of([object]), ""),
        always("created", count(0), "Seconds since 1970"),
        always("model", text(), ""),
        always("system_fingerprint", text(), "The numerics: another one may give another text"),
    ]
}

fn finish_reason() -> Field {
    let reasons =
        ["stop", "length", "tool_calls", "function_call"].map(Value::from).into_iter().chain([Value::Null]);
    always("finish_reason", one_of(reasons), "Why the answer ended")
}

fn ids() -> Value {
    list(count(0))
}

fn reasoning() -> [Field; 2] {
    [
        sometimes("reasoning_content", text(), "What the model thought"),
        sometimes("reasoning", text(), "The same under the other name that clients look for"),
    ]
}

fn chat_completion() -> Value {
    let message = object(
        [always("role", one_of(["assistant"]), ""), always("content", text(), "")]
            .into_iter()
            .chain(reasoning()),
    );
    let choice = object([
        always("index", count(0), ""),
        always("message", message, ""),
        always("logprobs", nullable(reference("ChatLogprobs")), "If asked for"),
        finish_reason(),
        sometimes("token_ids", ids(), "With `return_token_ids`"),
    ]);
    object(
        head("chat.completion").into_iter().chain(
            [
                always("choices", list(choice), ""),
                always("usage", reference("Usage"), ""),
                sometimes("prompt_token_ids", ids(), "With `return_token_ids`"),
                sometimes("prompt_logprobs", reference("PromptLogprobs"), "With `prompt_logprobs`"),
            ]
            .into_iter()
            .chain(extras()),
        ),
    )
}

fn chat_chunk() -> Value {
    let called = object([
        sometimes("name", text(), "In the first part of a call"),
        sometimes("arguments", text(), "The next part of the JSON"),
    ]);
    let call = object([
        always("index", count(0), "Which of the answer's calls it is"),
        sometimes("id", text(), "In the first part of a call"),
        sometimes("type", one_of(["function"]), "In the first part of a call"),
        always("function", called.clone(), ""),
    ]);
    let delta = object(
        [
            sometimes("role", one_of(["assistant"]), "In the first chunk"),
            sometimes("content", text(), ""),
            sometimes("tool_calls", list(call), "Parts of calls"),
            sometimes("function_call", called, "The next part of the one call"),
        ]
        .into_iter()
        .chain(reasoning()),
    );
    let choice = object([
        always("index", count(0), ""),
        always("delta", delta, "What is new; empty in the chunk that has the finish reason"),
        always("logprobs", nullable(reference("ChatLogprobs")), "If asked for"),
        finish_reason(),
        sometimes("token_ids", ids(), "With `return_token_ids`"),
    ]);
    object(
        head("chat.completion.chunk").into_iter().chain(
            [
                always("choices", list(choice), "One, or none in the chunk of the usage"),
                sometimes(
                    "usage",
                    nullable(reference("Usage")),
                    "With `include_usage`: null but for the last chunk",
                ),
                sometimes("prompt_token_ids", ids(), "With `return_token_ids`, in the first chunk"),
                sometimes("prompt_progress", reference("PromptProgress"), "With `return_progress`"),
            ]
            .into_iter()
            .chain(extras()),
        ),
    )
}

fn completion_choice() -> Value {
    object([
        always("index", count(0), "Prompt by prompt, `n` each"),
        always("text", text(), ""),
        always("logprobs", nullable(reference("CompletionLogprobs")), "If asked for"),
        finish_reason(),
        sometimes("token_ids", ids(), "With `return_token_ids`"),
        sometimes("prompt_token_ids", ids(), "With `return_token_ids`"),
        sometimes("prompt_logprobs", reference("PromptLogprobs"), "With `prompt_logprobs`"),
    ])
}

fn completion() -> Value {
    let body = [always("choices", list(completion_choice()), ""), always("usage", reference("Usage"), "")];
    object(head("text_completion").into_iter().chain(body).chain(extras()))
}

fn completion_chunk() -> Value {
    let body = [
        always("choices", list(completion_choice()), "One, or none in the chunk of the usage"),
        sometimes("usage", nullable(reference("Usage")), "With `include_usage`: null but for the last chunk"),
        sometimes("prompt_progress", reference("PromptProgress"), "With `return_progress`"),
    ];
    object(head("text_completion").into_iter().chain(body).chain(extras()))
}

fn candidate() -> Vec<Field> {
    vec![
        always("token", text(), "Its text; `bytes:` and escapes where the bytes are no text alone"),
        always("logprob", any_number(), "Natural logarithm; -9999 for what cannot be"),
        always("bytes", nullable(list(count(0))), ""),
    ]
}

fn chat_logprobs() -> Value {
    let likely = list(object(candidate()));
    let token = object(candidate().into_iter().chain([always("top_logprobs", likely, "Likeliest first")]));
    object([always("content", list(token), "One for each token")])
}

fn completion_logprobs() -> Value {
    let likely = json!({"type": "object", "additionalProperties": any_number()});
    object([
        always("tokens", list(text()), ""),
        always(
            "token_logprobs",
            list(nullable(any_number())),
            "Null for the first token of an echoed prompt",
        ),
        always("top_logprobs", list(nullable(likely)), ""),
        always("text_offset", ids(), "Where each token begins in the text, in characters"),
    ])
}

fn timings() -> Value {
    let counts = ["cache_n", "prompt_n", "predicted_n"].map(|name| always(name, count(0), "Tokens"));
    let times = ["prompt_ms", "prompt_per_token_ms", "predicted_ms", "predicted_per_token_ms"];
    let rates = ["prompt_per_second", "predicted_per_second"];
    let figures = times.into_iter().chain(rates).map(|name| always(name, any_number(), ""));
    object(counts.into_iter().chain(figures))
}

fn prompt_progress() -> Value {
    let counts = ["total", "cache", "processed"].map(|name| always(name, count(0), "Tokens"));
    object(counts.into_iter().chain([always("time_ms", any_number(), "")]))
}

fn prompt_logprobs() -> Value {
    let token = object([
        always("logprob", any_number(), ""),
        always("rank", nullable(count(1)), "Null where it is not among the likely ones"),
        always("decoded_token", text(), ""),
    ]);
    let mut by_id = json!({"type": ["object", "null"]});
    by_id["additionalProperties"] = token;
    list(by_id)
}

fn rendered_prompt() -> Value {
    object([
        always("prompt", text(), ""),
        always("prompt_token_ids", ids(), ""),
        always("count", count(0), ""),
        always("max_model_len", count(1), "Longest prompt and answer, tokens"),
        always("opens_reasoning", boolean(), "Whether the answer begins with thinking"),
    ])
}

/// What answers tell when they are asked.
fn extras() -> [Field; 1] {
    [sometimes("timings", reference("Timings"), "With `timings`")]
}

fn usage() -> Value {
    object([
        always("prompt_tokens", count(0), ""),
        always("completion_tokens", count(0), "Thinking and the token that ends the turn included"),
        always("total_tokens", count(0), ""),
        always(
            "prompt_tokens_details",
            object([always("cached_tokens", count(0), "Of the prompt: not computed again")]),
            "",
        ),
        always(
            "completion_tokens_details",
            object([always("reasoning_tokens", count(0), "Of the answer: thinking")]),
            "",
        ),
    ])
}

fn model() -> Value {
    object([
        always("id", text(), ""),
        always("object", one_of(["model"]), ""),
        always("created", count(0), "Seconds since 1970"),
        always("owned_by", text(), ""),
        always("max_model_len", count(1), "Longest prompt and answer, tokens"),
        always("context_length", count(1), "The same"),
    ])
}

fn tokens() -> Value {
    let piece = object([always("id", count(0), ""), always("piece", any_of([text(), list(count(0))]), "")]);
    object([
        always("count", count(0), ""),
        always("max_model_len", count(1), "Longest prompt and answer, tokens"),
        always("tokens", ids(), ""),
        sometimes("token_strs", list(text()), "With `return_token_strs`"),
        sometimes("pieces", list(piece), "With `with_pieces`"),
    ])
}

fn error() -> Value {
    let detail = object([
        always("message", text(), "What is wrong, and what to do"),
        always("type", text(), "The kind, which clients make exceptions of"),
        always("param", nullable(text()), "The field at fault, as a path"),
        always("code", nullable(text()), "A fixed name of the reason"),
    ]);
    object([always("error", detail, "")])
}
