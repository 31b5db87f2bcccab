//! The table of everything a client can get wrong in a field.

use serde_json::{Value, json};

/// Fields laid over a good request, expected status, `param`, and a fragment of the message.
pub(crate) type Row = (Value, u16, Option<&'static str>, &'static str);

/// How tokens are drawn, for both endpoints.
pub(crate) fn sampling_rows() -> Vec<Row> {
    vec![
        (json!({"temperature": 2.1}), 400, Some("temperature"), "from 0 to 2, got 2.1"),
        (json!({"temperature": -0.1}), 400, Some("temperature"), "got -0.1"),
        (json!({"temperature": "hot"}), 400, Some("temperature"), "got \"hot\""),
        (json!({"temperature": true}), 400, Some("temperature"), "got true"),
        (json!({"temperature": {}}), 400, Some("temperature"), "got {}"),
        (json!({"temperature": 1e308}), 400, Some("temperature"), "got 1e+308"),
        (json!({"top_p": 0}), 400, Some("top_p"), "above 0, at most 1, got 0"),
        (json!({"top_p": 1.01}), 400, Some("top_p"), "got 1.01"),
        (json!({"top_p": 1e-60}), 400, Some("top_p"), "above 0"),
        (json!({"top_p": "1"}), 400, Some("top_p"), "got \"1\""),
        (json!({"top_k": -2}), 400, Some("top_k"), "got -2"),
        (json!({"top_k": 0.5}), 400, Some("top_k"), "got 0.5"),
        (json!({"top_k": "all"}), 400, Some("top_k"), "got \"all\""),
        (json!({"min_p": -0.1}), 400, Some("min_p"), "from 0 to 1, got -0.1"),
        (json!({"min_p": 1.1}), 400, Some("min_p"), "got 1.1"),
        (json!({"presence_penalty": 2.5}), 400, Some("presence_penalty"), "from -2 to 2, got 2.5"),
        (json!({"presence_penalty": "x"}), 400, Some("presence_penalty"), "got \"x\""),
        (json!({"frequency_penalty": -2.5}), 400, Some("frequency_penalty"), "got -2.5"),
        (json!({"frequency_penalty": []}), 400, Some("frequency_penalty"), "got []"),
        (json!({"repetition_penalty": 0}), 400, Some("repetition_penalty"), "above 0, at most 10, got 0"),
        (json!({"repetition_penalty": 10.5}), 400, Some("repetition_penalty"), "got 10.5"),
        (json!({"logit_bias": {"999999999": 1}}), 400, Some("logit_bias"), "from 0 to 8191, got 999999999"),
        (json!({"logit_bias": {"8192": 1}}), 400, Some("logit_bias"), "got 8192"),
        (json!({"logit_bias": {"-1": 1}}), 400, Some("logit_bias"), "got \"-1\""),
        (json!({"logit_bias": {"abc": 1}}), 400, Some("logit_bias"), "got \"abc\""),
        (json!({"logit_bias": {"5": 1e9}}), 400, Some("logit_bias.5"), "or false, got 1000000000"),
        (json!({"logit_bias": {"5": "high"}}), 400, Some("logit_bias.5"), "got \"high\""),
        (json!({"logit_bias": [[5]]}), 400, Some("logit_bias"), "[id, bias] pairs, got [5]"),
        (json!({"logit_bias": [["", 1]]}), 400, Some("logit_bias"), "got \"\""),
        (json!({"logit_bias": [[5, true]]}), 400, Some("logit_bias.5"), "or false, got true"),
        (json!({"allowed_token_ids": []}), 400, Some("allowed_token_ids"), "at least one token id"),
        (json!({"allowed_token_ids": [8192]}), 400, Some("allowed_token_ids[0]"), "from 0 to 8191, got 8192"),
        (json!({"bad_words": ["a", " "]}), 400, Some("bad_words[1]"), "not blank"),
        (json!({"bad_words": [7]}), 400, Some("bad_words[0]"), "got 7"),
        (json!({"bad_words": "a"}), 400, Some("bad_words"), "got \"a\""),
        (json!({"logit_bias": 3}), 400, Some("logit_bias"), "got 3"),
        (json!({"cache_salt": 5}), 400, Some("cache_salt"), "got 5"),
        (json!({"cache_salt": "s".repeat(257)}), 400, Some("cache_salt"), "at most 256 characters"),
        (json!({"seed": 1.5}), 400, Some("seed"), "64-bit integer, got 1.5"),
        (json!({"seed": "one"}), 400, Some("seed"), "got \"one\""),
        (json!({"seed": 1e30}), 400, Some("seed"), "got 1e+30"),
    ]
}

/// Everything else that both endpoints have.
pub(crate) fn shared_rows() -> Vec<Row> {
    vec![
        (
            json!({"model": "llama-7"}),
            404,
            Some("model"),
            "`llama-7` does not exist; this server has `tiny`, `team/alias`",
        ),
        (json!({"model": ""}), 404, Some("model"), "does not exist"),
        (json!({"model": 7}), 400, Some("model"), "a string, got 7"),
        (json!({"max_tokens": -1}), 400, Some("max_tokens"), "at least 0, got -1"),
        (json!({"max_tokens": 0}), 400, Some("max_tokens"), "at least 1"),
        (json!({"max_tokens": 1.5}), 400, Some("max_tokens"), "whole number, at least 0, got 1.5"),
        (json!({"max_tokens": "ten"}), 400, Some("max_tokens"), "got \"ten\""),
        (json!({"max_tokens": 1e308}), 400, Some("max_tokens"), "got 1e+308"),
        (json!({"max_tokens": []}), 400, Some("max_tokens"), "got []"),
        (json!({"max_tokens": 100_000}), 400, Some("max_tokens"), "tokens fit after this prompt"),
        (json!({"max_completion_tokens": -5}), 400, Some("max_completion_tokens"), "got -5"),
        (
            json!({"max_tokens": 5, "max_completion_tokens": 6}),
            400,
            Some("max_completion_tokens"),
            "`max_tokens` (5) and `max_completion_tokens` (6)",
        ),
        (json!({"stop": ""}), 400, Some("stop[0]"), "not empty"),
        (json!({"stop": ["a", ""]}), 400, Some("stop[1]"), "not empty, got \"\""),
        (json!({"stop": ["a", 5]}), 400, Some("stop[1]"), "got 5"),
        (json!({"stop": 5}), 400, Some("stop"), "up to 16 strings"),
        (json!({"stop": vec!["s"; 17]}), 400, Some("stop"), "up to 16 strings"),
        (json!({"stop": "x".repeat(5000)}), 400, Some("stop[0]"), "5000 bytes, the limit is 4096"),
        (json!({"stop_token_ids": [8192]}), 400, Some("stop_token_ids[0]"), "got 8192"),
        (json!({"stop_token_ids": [1, -1]}), 400, Some("stop_token_ids[1]"), "got -1"),
        (json!({"stop_token_ids": ["a"]}), 400, Some("stop_token_ids[0]"), "got \"a\""),
        (json!({"stop_token_ids": 7}), 400, Some("stop_token_ids"), "a list, got 7"),
        (json!({"min_tokens": -1}), 400, Some("min_tokens"), "got -1"),
        (json!({"min_tokens": 9, "max_tokens": 4}), 400, Some("min_tokens"), "is 9 and must not exceed"),
        (json!({"min_tokens": 5000}), 400, Some("min_tokens"), "is 5000, but only"),
        (json!({"ignore_eos": "yes"}), 400, Some("ignore_eos"), "true or false, got \"yes\""),
        (json!({"ignore_eos": 1}), 400, Some("ignore_eos"), "got 1"),
        (json!({"n": 0}), 400, Some("n"), "from 1 to 4, got 0"),
        (json!({"n": -1}), 400, Some("n"), "got -1"),
        (json!({"n": 5}), 400, Some("n"), "from 1 to 4, got 5"),
        (json!({"n": 1_000_000_000_000_i64}), 400, Some("n"), "got 1000000000000"),
        (json!({"n": "2"}), 400, Some("n"), "got \"2\""),
        (json!({"best_of": 3}), 400, Some("best_of"), "equals `n` (1), got 3"),
        (json!({"stream": "true"}), 400, Some("stream"), "got \"true\""),
        (
            json!({"stream_options": {"include_usage": true}}),
            400,
            Some("stream_options"),
            "only for `stream`",
        ),
        (json!({"stream": true, "stream_options": 5}), 400, Some("stream_options"), "an object, got 5"),
        (
            json!({"stream": true, "stream_options": {"include_usage": 1}}),
            400,
            Some("stream_options.include_usage"),
            "got 1",
        ),
        (json!({"include_stop_str_in_output": 1}), 400, Some("include_stop_str_in_output"), "got 1"),
        (json!({"skip_special_tokens": "no"}), 400, Some("skip_special_tokens"), "got \"no\""),
        (json!({"return_token_ids": 1}), 400, Some("return_token_ids"), "got 1"),
    ]
}

/// Known fields that are not done: named, with a value that is fine where there is one.
pub(crate) fn unsupported_rows() -> Vec<Row> {
    [
        ("modalities", json!(["text", "audio"]), "got [\"text\",\"audio\"]"),
        ("audio", json!({"voice": "x"}), "leave it out"),
        ("prediction", json!({"type": "content", "content": "x"}), "not supported yet"),
        ("web_search_options", json!({}), "not supported yet"),
        ("suffix", json!("tail"), "got \"tail\""),
        ("logits_processors", json!(["p"]), "not supported yet"),
        ("banned_strings", json!(["a"]), "send []"),
        ("use_beam_search", json!(true), "send false, got true"),
        ("length_penalty", json!(0.5), "got 0.5"),
        ("typical_p", json!(0.5), "got 0.5"),
        ("mirostat", json!(2), "got 2"),
        ("xtc_probability", json!(0.5), "got 0.5"),
        ("dry_multiplier", json!(0.8), "got 0.8"),
    ]
    .map(|(field, value, fragment)| (json!({field: value}), 400, Some(field), fragment))
    .to_vec()
}

/// Forms of an answer that are none, or that nothing meets; each names what is wrong with it.
pub(crate) fn form_rows() -> Vec<Row> {
    const SCHEMA: Option<&str> = Some("response_format.json_schema.schema");
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    vec![
        (json!({"response_format": "json"}), 400, Some("response_format"), "an object, got \"json\""),
        (json!({"response_format": {}}), 400, Some("response_format.type"), "one of text, json_object"),
        (json!({"response_format": {"type": "xml"}}), 400, Some("response_format.type"), "got \"xml\""),
        (
            json!({"response_format": {"type": "text", "regex": ["a"]}}),
            400,
            Some("response_format.regex"),
            "a string",
        ),
        (
            json!({"response_format": {"type": "json_object", "json_schema": {"schema": 5}}}),
            400,
            SCHEMA,
            "a JSON schema",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            400,
            Some("response_format.json_schema"),
            "an object with a `schema`",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
            400,
            SCHEMA,
            "a JSON schema",
        ),
        (schema(json!(7)), 400, SCHEMA, "got 7"),
        (schema(json!({"type": "strange"})), 400, SCHEMA, "strange"),
        (schema(json!({"type": "string", "pattern": "(?<x"})), 400, SCHEMA, "(?<x"),
        (schema(json!({"type": "array", "uniqueItems": true})), 400, SCHEMA, "uniqueItems"),
        (json!({"guided_json": "{"}), 400, Some("guided_json"), "a JSON schema"),
        (json!({"guided_regex": 5}), 400, Some("guided_regex"), "a string, got 5"),
        (json!({"guided_regex": "a(?=b)"}), 400, Some("guided_regex"), "cannot be used"),
        (json!({"regex": "a".repeat(300_000)}), 400, Some("regex"), "the limit is 262144 bytes"),
        (json!({"guided_choice": []}), 400, Some("guided_choice"), "a list of 1 to"),
        (json!({"guided_choice": ["a", 1]}), 400, Some("guided_choice"), "a list of 1 to"),
        (json!({"guided_grammar": "root ::= ("}), 400, Some("guided_grammar"), "Lark"),
        (json!({"ebnf": "root ::= \"a\""}), 400, Some("ebnf"), "Lark"),
        (json!({"grammar": "start: missing"}), 400, Some("grammar"), "missing"),
        (
            json!({"structured_outputs": {"regex": "["}}),
            400,
            Some("structured_outputs.regex"),
            "cannot be used",
        ),
        (
            json!({"structured_outputs": {"structural_tag": "x"}}),
            400,
            Some("structured_outputs.structural_tag"),
            "not supported yet",
        ),
        (json!({"regex": "a", "json_schema": {}}), 400, Some("regex"), "`json_schema` and `regex` both say"),
        (json!({"thinking_budget": -2}), 400, Some("thinking_budget"), "-1 for no limit"),
        (json!({"thinking_budget": 3, "thinking_token_budget": 4}), 400, Some("thinking_budget"), "send one"),
    ]
}

/// Messages and tool calls.
pub(crate) fn message_rows() -> Vec<Row> {
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let call = |call: Value| {
        json!({"messages": [
            {"role": "user", "content": "x"}, {"role": "assistant", "content": null, "tool_calls": [call]}]})
    };
    vec![
        (json!({"messages": null}), 400, Some("messages"), "missing"),
        (json!({"messages": []}), 400, Some("messages"), "at least one message, got []"),
        (json!({"messages": "hi"}), 400, Some("messages"), "a list, got \"hi\""),
        (json!({"messages": {}}), 400, Some("messages"), "a list"),
        (json!({"messages": ["hi"]}), 400, Some("messages[0]"), "an object, got \"hi\""),
        (json!({"messages": [{"content": "x"}]}), 400, Some("messages[0].role"), "missing"),
        (
            json!({"messages": [{"role": "robot", "content": "x"}]}),
            400,
            Some("messages[0].role"),
            "got \"robot\"",
        ),
        (json!({"messages": [{"role": 5, "content": "x"}]}), 400, Some("messages[0].role"), "got 5"),
        (
            json!({"messages": [{"role": "User", "content": "x"}]}),
            400,
            Some("messages[0].role"),
            "got \"User\"",
        ),
        (json!({"messages": [{"role": "user"}]}), 400, Some("messages[0].content"), "missing"),
        (user(json!(5)), 400, Some("messages[0].content"), "text parts, got 5"),
        (user(json!({})), 400, Some("messages[0].content"), "got {}"),
        (user(json!(["x"])), 400, Some("messages[0].content[0]"), "an object, got \"x\""),
        (
            user(json!([{"text": "x"}])),
            400,
            Some("messages[0].content[0].type"),
            "must be \"text\", got null",
        ),
        (user(json!([{"type": "text"}])), 400, Some("messages[0].content[0].text"), "a string, got null"),
        (user(json!([{"type": "text", "text": 5}])), 400, Some("messages[0].content[0].text"), "got 5"),
        (
            user(json!([{"type": "image_url", "image_url": {"url": "data:"}}])),
            400,
            Some("messages[0].content[0].type"),
            "text only",
        ),
        (user(json!([{"type": "input_audio"}])), 400, Some("messages[0].content[0].type"), "text only"),
        (user(json!([{"type": "hologram"}])), 400, Some("messages[0].content[0].type"), "got \"hologram\""),
        (json!({"messages": [{"role": "assistant"}]}), 400, Some("messages[0].content"), "only tool calls"),
        (
            json!({"messages": [{"role": "user", "content": "x", "name": 5}]}),
            400,
            Some("messages[0].name"),
            "got 5",
        ),
        (
            json!({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}),
            400,
            Some("messages[0].tool_call_id"),
            "got 5",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": "x", "reasoning_content": 5}]}),
            400,
            Some("messages[0].reasoning_content"),
            "got 5",
        ),
        (call(json!("f")), 400, Some("messages[1].tool_calls[0]"), "an object"),
        (call(json!({"type": "custom"})), 400, Some("messages[1].tool_calls[0].type"), "got \"custom\""),
        (call(json!({"function": 5})), 400, Some("messages[1].tool_calls[0].function"), "an object, got 5"),
        (
            call(json!({"function": {"arguments": "{}"}})),
            400,
            Some("messages[1].tool_calls[0].function.name"),
            "not empty",
        ),
        (
            call(json!({"function": {"name": "f", "arguments": "{\"a\": "}})),
            400,
            Some("messages[1].tool_calls[0].function.arguments"),
            "string of JSON",
        ),
        (
            call(json!({"function": {"name": "f", "arguments": "[1]"}})),
            400,
            Some("messages[1].tool_calls[0].function.arguments"),
            "a JSON object, got [1]",
        ),
    ]
}

/// The other fields of a chat.
pub(crate) fn chat_rows() -> Vec<Row> {
    vec![
        (json!({"tools": {}}), 400, Some("tools"), "a list"),
        (json!({"tools": [5]}), 400, Some("tools[0]"), "an object, got 5"),
        (json!({"tools": [{"type": "web_search"}]}), 400, Some("tools[0].type"), "got \"web_search\""),
        (json!({"tools": [{"type": "function"}]}), 400, Some("tools[0].function"), "an object"),
        (
            json!({"tools": [{"type": "function", "function": {}}]}),
            400,
            Some("tools[0].function.name"),
            "not empty",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
            400,
            Some("tools[0].function.parameters"),
            "an object, got 5",
        ),
        (json!({"tool_choice": "required"}), 400, Some("tool_choice"), "has no `tools`"),
        (json!({"tool_choice": "always"}), 400, Some("tool_choice"), "got \"always\""),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
            400,
            Some("tool_choice"),
            "names a function that `tools` does not have",
        ),
        (json!({"logprobs": 5}), 400, Some("logprobs"), "true or false, got 5"),
        (json!({"logprobs": true, "top_logprobs": 21}), 400, Some("top_logprobs"), "from 0 to 20, got 21"),
        (json!({"logprobs": true, "top_logprobs": -1}), 400, Some("top_logprobs"), "got -1"),
        (json!({"top_logprobs": 5}), 400, Some("top_logprobs"), "needs `logprobs`"),
        (json!({"enable_thinking": "no"}), 400, Some("enable_thinking"), "got \"no\""),
        (json!({"reasoning_effort": "huge"}), 400, Some("reasoning_effort"), "minimal, low"),
        (json!({"reasoning_effort": 3}), 400, Some("reasoning_effort"), "a string, got 3"),
        (json!({"chat_template_kwargs": []}), 400, Some("chat_template_kwargs"), "an object, got []"),
        (json!({"chat_template_kwargs": {"messages": []}}), 400, Some("chat_template_kwargs"), "reserved"),
        (json!({"add_generation_prompt": 1}), 400, Some("add_generation_prompt"), "got 1"),
        (
            json!({"continue_final_message": true}),
            400,
            Some("continue_final_message"),
            "there is nothing to continue",
        ),
        (json!({"chat_template": "{{ x }}"}), 400, Some("chat_template"), "not supported yet"),
        (json!({"echo": true}), 400, Some("echo"), "/v1/completions"),
        (
            json!({"messages": [{"role": "user", "content": "word ".repeat(400)}]}),
            400,
            Some("messages"),
            "prompt and answer together must not exceed 256 tokens",
        ),
    ]
}

pub(crate) fn completion_rows() -> Vec<Row> {
    vec![
        (json!({"prompt": null}), 400, Some("prompt"), "missing"),
        (json!({"prompt": ""}), 400, Some("prompt"), "empty"),
        (json!({"prompt": []}), 400, Some("prompt"), "got []"),
        (json!({"prompt": [[]]}), 400, Some("prompt[0]"), "empty"),
        (json!({"prompt": [""]}), 400, Some("prompt[0]"), "empty"),
        (json!({"prompt": ["a", ""]}), 400, Some("prompt[1]"), "empty"),
        (json!({"prompt": 5}), 400, Some("prompt"), "got 5"),
        (json!({"prompt": {}}), 400, Some("prompt"), "got {}"),
        (json!({"prompt": [true]}), 400, Some("prompt[0]"), "got true"),
        (json!({"prompt": ["a", 5]}), 400, Some("prompt[1]"), "got 5"),
        (json!({"prompt": [5, "a"]}), 400, Some("prompt[1]"), "got \"a\""),
        (json!({"prompt": [8192]}), 400, Some("prompt[0]"), "from 0 to 8191, got 8192"),
        (json!({"prompt": [-1]}), 400, Some("prompt[0]"), "got -1"),
        (json!({"prompt": [1.5]}), 400, Some("prompt[0]"), "got 1.5"),
        (json!({"prompt": [[1], [9999]]}), 400, Some("prompt[1][0]"), "got 9999"),
        (json!({"prompt": vec!["a"; 65]}), 400, Some("prompt"), "has 65 prompts, the limit is 64"),
        (json!({"prompt": vec![5; 256]}), 400, Some("prompt"), "no room to generate"),
        (json!({"prompt": vec![5; 256], "max_tokens": 9}), 400, Some("prompt"), "no room to generate"),
        (json!({"prompt": vec![5; 256], "n": 4}), 400, Some("prompt"), "each of 4 choices to its end"),
        (
            json!({"prompt": vec![5; 300]}),
            400,
            Some("prompt"),
            "at most 255 tokens fits, this one is 45 too long",
        ),
        (json!({"prompt": vec![5; 250], "max_tokens": 7}), 400, Some("max_tokens"), "at most 6 tokens fit"),
        (json!({"prompt": [5], "n": 4, "max_tokens": 300}), 400, Some("max_tokens"), "each of 4 choices"),
        (json!({"logprobs": 21}), 400, Some("logprobs"), "from 0 to 20, got 21"),
        (json!({"logprobs": -1}), 400, Some("logprobs"), "got -1"),
        (json!({"logprobs": true}), 400, Some("logprobs"), "got true"),
        (json!({"echo": "yes"}), 400, Some("echo"), "got \"yes\""),
    ]
}
