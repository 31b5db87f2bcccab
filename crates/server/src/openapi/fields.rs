//! What requests may say: the fields of the bodies, in groups that endpoints share.

use serde_json::{Value, json};

use super::schema::{
    Field, any_object, any_of, anything, boolean, count, field, list, list_of, needed, number, number_above,
    object, one_of, reference, some, some_text, text, whole,
};
use crate::known;

/// Schemas with names.
pub(super) fn components() -> Vec<(&'static str, Value)> {
    vec![
        ("Message", any_of([reference("PlainMessage"), reference("AssistantMessage")])),
        ("PlainMessage", plain_message()),
        ("AssistantMessage", assistant_message()),
        ("Content", any_of([text(), list(reference("TextPart"))])),
        ("TextPart", text_part()),
        ("ToolCall", tool_call()),
        ("Function", function()),
        ("Tool", tool()),
    ]
}

/// Which model is meant.
pub(super) fn model() -> Vec<Field> {
    vec![field("model", text(), "tiny", "One of the names in `/v1/models`; the server's model if left out")]
}

/// How tokens are drawn, and how many.
pub(super) fn sampling() -> Vec<Field> {
    let penalty = || number(-2.0, 2.0);
    vec![
        field("max_tokens", count(0), 5, "Most tokens to generate"),
        field("max_completion_tokens", count(0), 5, "Another name of `max_tokens`"),
        field("min_tokens", count(0), 1, "No end before so many tokens"),
        field(
            "temperature",
            number(0.0, 2.0),
            0.7,
            "How freely tokens are drawn; 0 always takes the likeliest",
        ),
        field(
            "top_p",
            number_above(0.0, 1.0),
            0.9,
            "Draw among the likeliest tokens that have this share together",
        ),
        field("top_k", count(-1), 20, "Draw among so many of the likeliest tokens; 0 or -1 for all"),
        field(
            "min_p",
            number(0.0, 1.0),
            0.05,
            "Draw among tokens at least this likely, relative to the likeliest",
        ),
        field("presence_penalty", penalty(), 0.5, "Taken off the logit of every token that is there already"),
        field("frequency_penalty", penalty(), 0.5, "The same, once for each time that it is there"),
        field(
            "repetition_penalty",
            number_above(0.0, 10.0),
            1.1,
            "Divides the logits of tokens that are there already",
        ),
        field(
            "logit_bias",
            logit_bias(),
            json!({"7": -100}),
            "Added to the logits of single tokens; false bans one",
        ),
        field("allowed_token_ids", some(count(0)), json!([7, 9]), "The only tokens that may be drawn"),
        field(
            "bad_words",
            bad_words(),
            json!(["maybe"]),
            "Words whose tokens are not drawn one behind the other",
        ),
        field("seed", seed(), 7, "The same seed, request and numerics give the same answer"),
        field("ignore_eos", boolean(), true, "Go on behind the end of the turn"),
        field("stop_token_ids", list(count(0)), json!([9]), "Tokens that end the answer"),
        field("stop", stop(), json!(["END"]), "Texts that end the answer, and are no part of it"),
        field("include_stop_str_in_output", boolean(), true, "Keep what ended the answer"),
        field("skip_special_tokens", boolean(), false, "Leave markers out of the text; true if left out"),
        field("n", count(1), 2, "Number of answers"),
        field("best_of", count(1), 1, "Must equal `n`"),
        field(
            "max_time_s",
            number_above(0.0, 1e6),
            60,
            "Seconds that the request may take; then the answer ends",
        ),
        field("priority", whole(i64::from(i32::MIN), i64::from(i32::MAX)), 0, "Who waits: lower goes first"),
        field(
            "cache_salt",
            json!({"type": "string", "maxLength": 256}),
            "team",
            "Share cached prompts only with it",
        ),
    ]
}

fn logit_bias() -> Value {
    let bias = || any_of([number(-100.0, 100.0), one_of([false])]);
    let by_id = json!({
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": bias(),
    });
    let token = any_of([count(0), json!({"type": "string", "minLength": 1, "maxLength": 256})]);
    let pair = json!({"type": "array", "prefixItems": [token, bias()], "minItems": 2, "maxItems": 2});
    any_of([by_id, list(pair)])
}

fn bad_words() -> Value {
    list_of(json!({"type": "string", "pattern": "[^ ]", "maxLength": 256}), 0, 512)
}

fn seed() -> Value {
    json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX})
}

fn stop() -> Value {
    let one = || json!({"type": "string", "minLength": 1, "maxLength": 4096});
    any_of([one(), list_of(one(), 0, 16)])
}

/// What form the answer has to have.
pub(super) fn form() -> Vec<Field> {
    let schema = || any_of([any_object(), json!({"type": "string", "contentMediaType": "application/json"})]);
    let choices = || list_of(text(), 1, 4096);
    let shapes = object([
        field("json", schema(), json!({"type": "object"}), "A JSON Schema"),
        field("regex", text(), "[ab]", "A regular expression"),
        field("choice", choices(), json!(["yes", "no"]), "One of these texts"),
        field("grammar", text(), "start: \"a\"", "A grammar as Lark writes it"),
        field("json_object", boolean(), true, "Any JSON object"),
    ]);
    let budget = |name| field(name, count(-1), 100, "Most tokens to think; -1 for no limit");
    vec![
        field("response_format", response_format(), json!({"type": "json_object"}), "The form of the answer"),
        field(
            "structured_outputs",
            shapes,
            json!({"choice": ["yes", "no"]}),
            "One of several ways to say the form",
        ),
        field("guided_json", schema(), json!({"type": "object"}), "The same, a JSON Schema"),
        field("json_schema", schema(), json!({"type": "object"}), "The same"),
        field("guided_regex", text(), "[ab]", "The same, a regular expression"),
        field("regex", text(), "[ab]", "The same"),
        field("guided_choice", choices(), json!(["yes", "no"]), "The same, one of these texts"),
        field("guided_grammar", text(), "start: \"a\"", "The same, a grammar as Lark writes it"),
        field("grammar", text(), "start: \"a\"", "The same"),
        field("ebnf", text(), "start: \"a\"", "The same"),
        budget("thinking_token_budget"),
        budget("thinking_budget"),
        budget("reasoning_budget"),
    ]
}

fn response_format() -> Value {
    let schema = || any_of([any_object(), text()]);
    let named = object([
        field("name", text(), "answer", "For people"),
        field("description", text(), "The answer", "For people"),
        field("strict", boolean(), true, "False lets go what the schema says and cannot be enforced"),
        needed("schema", schema(), json!({"type": "object"}), "A JSON Schema"),
    ]);
    object([
        needed("type", one_of(["text", "json_object", "json_schema", "regex", "grammar"]), "text", ""),
        field("schema", schema(), json!({"type": "object"}), "Of `json_object`: what object"),
        field("json_schema", named, json!({"schema": {"type": "object"}}), "Of `json_schema`"),
        field("pattern", text(), "[ab]", "Of `regex`"),
        field("regex", text(), "[ab]", "Of `regex`"),
        field("grammar", text(), "start: \"a\"", "Of `grammar`"),
    ])
}

/// How the answer comes.
pub(super) fn output() -> Vec<Field> {
    let options = object([
        field("include_usage", boolean(), true, "A last event with token counts"),
        field("include_obfuscation", one_of([false]), false, "Padding of events; not supported"),
    ]);
    vec![
        field("stream", boolean(), true, "Send the answer as server-sent events while it is made"),
        field("stream_options", options, json!({"include_usage": true}), "Only with `stream`"),
        field("include_reasoning", boolean(), false, "Whether the answer has the thinking; true if left out"),
        field(
            "separate_reasoning",
            boolean(),
            false,
            "False puts thinking into the content, between its tags",
        ),
        field("timings", boolean(), true, "Add how long prompt and answer took"),
        field("timings_per_token", boolean(), true, "The same in every event of a stream"),
        field(
            "return_progress",
            boolean(),
            true,
            "With `stream`: events that tell how far the prompt is processed",
        ),
        field(
            "prompt_logprobs",
            whole(0, 20),
            1,
            "Add log-probabilities of the prompt's tokens; not with `stream`",
        ),
        field(
            "truncate_prompt_tokens",
            any_of([one_of([-1]), count(1)]),
            4000,
            "Cut a longer prompt at its beginning; -1 to what fits",
        ),
        field("return_token_ids", boolean(), true, "Add the ids of the prompt's and the answer's tokens"),
    ]
}

/// What a chat is about.
pub(super) fn conversation() -> Vec<Field> {
    let example = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is the weather in Oslo?"}], "name": "ann"},
        {"role": "assistant", "reasoning_content": "I have to look.", "content": null, "tool_calls": [
            {"id": "call_1", "index": 0, "type": "function",
             "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "assistant", "reasoning": "It rains.", "content": "It rains."},
        {"role": "assistant", "content": null, "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "sun"},
        {"role": "user", "content": "Thanks."},
    ]);
    let weather = json!([{"type": "function", "function": {"name": "weather", "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]);
    vec![
        needed("messages", some(reference("Message")), example, "The conversation so far"),
        field("tools", list(reference("Tool")), weather, "Functions that the model may call"),
        field("tool_choice", tool_choice(), "auto", "Whether it may or must call them"),
        field(
            "parallel_tool_calls",
            boolean(),
            true,
            "Whether one answer may have several calls; true if left out",
        ),
        field(
            "functions",
            list(reference("Function")),
            json!([{"name": "weather"}]),
            "What tools were called before",
        ),
        field(
            "function_call",
            any_of([
                one_of(["none", "auto", "required"]),
                object([needed("name", some_text(), "weather", "")]),
            ]),
            "auto",
            "`tool_choice` for `functions`",
        ),
        field(
            "chat_template_kwargs",
            any_object(),
            json!({"enable_thinking": false}),
            "Arguments of the chat template, as it spells them",
        ),
        field("enable_thinking", boolean(), false, "Whether the model thinks before it answers"),
        field("reasoning_effort", efforts(), "low", "How much to think: the nearest that the template knows"),
        field(
            "add_generation_prompt",
            boolean(),
            true,
            "End the prompt where the answer begins; without it the messages decide",
        ),
        field(
            "continue_final_message",
            boolean(),
            false,
            "Go on with the assistant's last message; without it the messages decide",
        ),
    ]
}

fn efforts() -> Value {
    one_of(["none", "off", "minimal", "low", "medium", "high", "xhigh", "max"])
}

/// Fields of a chat alone.
pub(super) fn chat() -> Vec<Field> {
    let reasoning = object([
        field("effort", efforts(), "low", "Another place for `reasoning_effort`"),
        field("enabled", boolean(), false, "Another place for `enable_thinking`"),
        field("max_tokens", count(-1), 100, "Another place for `thinking_token_budget`"),
        field("exclude", boolean(), true, "Leave thinking out of the answer"),
    ]);
    let example = json!({"effort": "low", "enabled": true, "max_tokens": 100, "exclude": true});
    vec![
        field("reasoning", reasoning, example, "All about thinking in one place"),
        field("logprobs", boolean(), true, "Add the log-probabilities of the answer's tokens"),
        field("top_logprobs", whole(0, 20), 0, "With `logprobs`: of so many likely tokens at each place"),
        field("echo", one_of([false]), false, "Only /v1/completions can give the prompt back"),
    ]
}

/// Fields of a completion alone.
pub(super) fn completion() -> Vec<Field> {
    let ids = || some(count(0));
    let prompt = any_of([some_text(), ids(), list_of(some_text(), 1, 64), list_of(ids(), 1, 64)]);
    vec![
        needed("prompt", prompt, "Once upon a time", "A text or its token ids, or a list of such prompts"),
        field("echo", boolean(), true, "Begin the answer with the prompt"),
        field(
            "logprobs",
            whole(0, 20),
            1,
            "Add log-probabilities: the token's own and those of so many likely ones",
        ),
    ]
}

/// What the APIs share that give one answer: all about how it is drawn and what form it has, but for `others`, which they
/// call by other names.
pub(super) fn of_one_answer(others: &[&str]) -> Vec<Field> {
    const TEMPLATE: &[&str] = &["chat_template_kwargs", "enable_thinking", "reasoning_effort"];
    const SEVERAL: &[&str] = &["n", "best_of", "max_completion_tokens"];
    const ELSEWHERE: &[&str] = &[
        "stream_options",
        "return_token_ids",
        "timings",
        "timings_per_token",
        "return_progress",
        "prompt_logprobs",
    ];
    let template = conversation().into_iter().filter(|field| TEMPLATE.contains(&field.name));
    let all = sampling().into_iter().chain(form()).chain(output()).chain(template);
    let left_out = |name| SEVERAL.contains(&name) || ELSEWHERE.contains(&name) || others.contains(&name);
    all.filter(|field| !left_out(field.name)).collect()
}

/// Fields of `/tokenize` with a text.
pub(super) fn tokenize_text() -> Vec<Field> {
    vec![
        field("prompt", text(), "Hello", "The text, as /v1/completions would read it"),
        field("content", text(), "Hello", "Another name of `prompt`"),
        field("parse_special", boolean(), true, "Read markers as such; true if left out"),
    ]
}

/// Further fields of `/tokenize`.
pub(super) fn tokenize() -> Vec<Field> {
    vec![
        field(
            "with_pieces",
            boolean(),
            true,
            "Add each token's text, or its bytes where they are no text alone",
        ),
        field("return_token_strs", boolean(), true, "Add each token's text as `logprobs` spells it"),
        field("add_special", boolean(), true, "Has no effect: nothing is added to a text"),
        field("add_special_tokens", boolean(), true, "Has no effect: nothing is added to a text"),
    ]
}

/// Fields of `/detokenize`.
pub(super) fn detokenize() -> Vec<Field> {
    vec![
        needed("tokens", list(count(0)), json!([5, 6]), "Token ids"),
        field("skip_special_tokens", boolean(), true, "Leave markers out"),
    ]
}

/// What is taken and changes nothing, but for what `others` spells out.
pub(super) fn hints(others: &[Field]) -> Vec<Field> {
    let told = |name: &&&str| others.iter().all(|field| field.name != **name);
    let hint = |name: &&'static str| {
        field(name, anything(), "hint", "Taken from clients that send it; has no effect")
    };
    known::IGNORED.iter().filter(told).map(hint).collect()
}

fn tool_choice() -> Value {
    let function = || object([needed("name", some_text(), "weather", "")]);
    let named = object([
        needed("type", one_of(["function"]), "function", ""),
        needed("function", function(), json!({"name": "weather"}), ""),
    ]);
    let tools = some(object([needed("function", function(), json!({"name": "weather"}), "")]));
    let allowed = object([
        field("mode", one_of(["auto", "required"]), "auto", ""),
        needed("tools", tools, json!([{"function": {"name": "weather"}}]), "Those that may be called"),
    ]);
    let among = object([
        needed("type", one_of(["allowed_tools"]), "allowed_tools", ""),
        needed("allowed_tools", allowed, json!({"tools": [{"function": {"name": "weather"}}]}), ""),
    ]);
    any_of([one_of(["none", "auto", "required"]), named, among])
}

fn plain_message() -> Value {
    object([
        needed("role", one_of(["system", "developer", "user", "tool", "function"]), "user", "Who speaks"),
        needed("content", reference("Content"), "Hello", ""),
        field("name", text(), "ann", "The speaker's name"),
        field("tool_call_id", text(), "call_1", "The call that a `tool` message answers"),
    ])
}

fn assistant_message() -> Value {
    let mut message = object([
        needed("role", one_of(["assistant"]), "assistant", ""),
        field("content", reference("Content"), "Hello", "May be left out beside tool calls"),
        field("reasoning_content", text(), "Hm.", "What the model thought before"),
        field("reasoning", text(), "Hm.", "Another name of `reasoning_content`"),
        field(
            "tool_calls",
            list(reference("ToolCall")),
            json!([{"function": {"name": "weather"}}]),
            "Functions that it called",
        ),
        field("function_call", called_function(), json!({"name": "weather"}), "What a tool call was before"),
        field("name", text(), "bot", "The speaker's name"),
        field("tool_call_id", text(), "call_1", "Of no use here"),
    ]);
    let there = |name: &str, schema: Value| json!({"required": [name], "properties": {name: schema}});
    message["anyOf"] = json!([
        there("content", reference("Content")),
        there("tool_calls", json!({"type": "array", "minItems": 1})),
        there("function_call", any_object()),
    ]);
    message
}

fn text_part() -> Value {
    object([needed("type", one_of(["text"]), "text", ""), needed("text", text(), "Hello", "")])
}

fn called_function() -> Value {
    let arguments = any_of([json!({"type": "string", "contentMediaType": "application/json"}), any_object()]);
    object([
        needed("name", some_text(), "weather", ""),
        field("arguments", arguments, "{}", "JSON of an object"),
    ])
}

fn tool_call() -> Value {
    object([
        field("id", text(), "call_1", ""),
        field("type", one_of(["function"]), "function", ""),
        field("index", anything(), 0, "Has no effect: the place in the list counts"),
        needed("function", called_function(), json!({"name": "weather"}), ""),
    ])
}

fn function() -> Value {
    object([
        needed("name", some_text(), "weather", ""),
        field("description", text(), "Tells the weather", "What the model is told of it"),
        field("parameters", any_object(), json!({"type": "object"}), "JSON Schema of its arguments"),
        field("strict", boolean(), false, "Whether arguments must meet the schema"),
    ])
}

fn tool() -> Value {
    object([
        needed("type", one_of(["function"]), "function", ""),
        needed("function", reference("Function"), json!({"name": "weather"}), ""),
    ])
}
