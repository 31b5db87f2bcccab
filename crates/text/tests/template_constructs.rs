//! Templates beyond the tiny model's: the constructs that the family's templates use, errors, and text of the
//! request that spells markers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use common::{TEMPLATE, TOKENIZER};
use proptest::prelude::*;
use qwill_text::{ChatInput, ChatTemplate, Markers, Rendered, TextError};
use serde_json::{Map, Value, json};

/// In the manner of the family's templates: macros, namespaces, reversed slices, neighbours of a loop, items,
/// `tojson`, comparisons with tags in content, splitting and exceptions.
const FAMILY_LIKE: &str = r#"{%- macro body(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'text' in part %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('Unexpected part.') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set content = body(message.content)|trim %}
        {%- if not (content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.searching = false %}
            {%- set ns.last_query = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.searching %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = body(message.content)|trim %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning|trim + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- for name, value in call.arguments|items %}
                {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
                {{- '\n<parameter=' + name + '>' + value }}
            {%- endfor %}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role != "tool" or loop.last %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}
"#;

fn render_with(
    template: &ChatTemplate,
    messages: &Value,
    tools: Option<&Value>,
    kwargs: &Value,
) -> Result<Rendered, TextError> {
    template.render(&ChatInput {
        messages: messages.as_array().unwrap(),
        tools: tools.and_then(Value::as_array).map(Vec::as_slice),
        add_generation_prompt: false,
        kwargs: kwargs.as_object().unwrap_or(&Map::new()),
    })
}

fn render(source: &str, messages: &Value) -> Result<Rendered, TextError> {
    render_with(&ChatTemplate::new(source).unwrap(), messages, None, &Value::Null)
}

fn template_error(source: &str, messages: &Value) -> String {
    match render(source, messages) {
        Err(TextError::Template { message }) => message,
        other => panic!("{other:?}"),
    }
}

/// The text of ids, markers in brackets.
fn shown(ids: &[u32]) -> String {
    let first_marker = TOKENIZER.id_of("<|endoftext|>").unwrap();
    let runs = ids.chunk_by(|&left, &right| left < first_marker && right < first_marker);
    runs.map(|run| {
        let text = TOKENIZER.decode(run, false);
        if run[0] < first_marker { text } else { format!("[{text}]") }
    })
    .collect()
}

#[test]
fn the_constructs_of_the_family_work() {
    let messages = json!([
        {"role": "user", "content": [{"text": "w"}, {"text": "? "}]},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nHm.", "tool_calls": [
            {"arguments": {"city": "Å", "days": 2, "wet": true, "x": 1e-7, "deep": {"x": [1, null]}}}]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
        {"role": "user", "content": "<tool_response>kept</tool_response>"},
        {"role": "assistant", "content": "b", "reasoning_content": " why "},
    ]);
    let tools = json!([{"name": "f", "description": "a <b> & 'c'"}]);
    let template = ChatTemplate::new(FAMILY_LIKE).unwrap();
    let rendered = render_with(&template, &messages, Some(&tools), &Value::Null).unwrap();
    let expected = "<|im_start|>system\n<tools>\n{\"name\": \"f\", \"description\": \"a <b> & 'c'\"}\n</tools><|im_end|>\n\
        <|im_start|>user\nw?<|im_end|>\n\
        <|im_start|>assistant\n<think>\nold\n</think>\n\nHm.\n<parameter=city>Å\n<parameter=days>2\n<parameter=wet>True\
        \n<parameter=x>1e-07\n<parameter=deep>{\"x\": [1, null]}<|im_end|>\n\
        <|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n\
        <|im_start|>user\n<tool_response>kept</tool_response><|im_end|>\n\
        <|im_start|>assistant\n<think>\nwhy\n</think>\n\nb<|im_end|>\n";
    assert_eq!(rendered.text, expected);
}

#[test]
fn control_blocks_leave_no_lines() {
    let source = "{% for m in messages %}\n    {% if m.content %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n";
    assert_eq!(render(source, &json!([{"content": "a"}, {"content": "b"}])).unwrap().text, "a\nb\nend");
}

#[test]
fn values_print_as_in_python() {
    let source = "{{ messages[0].v }} {{ true }} {{ none }} {{ missing }}{{ 1e16 }} {{ 2.0|string }} {{ [1, 'a', none] }}";
    let rendered = render(source, &json!([{"v": 12_345_678_901_234_567_890_u64}])).unwrap();
    assert_eq!(rendered.text, "12345678901234567890 True None 1e+16 2.0 [1, 'a', None]");
}

#[test]
fn a_template_that_fails_says_why() {
    assert_eq!(
        template_error("{{ raise_exception('no: ' ~ messages[0].role) }}", &json!([{"role": "x"}])),
        "no: x"
    );
    assert_eq!(
        template_error("{% macro f() %}{{ raise_exception('deep') }}{% endmacro %}{{ f() }}", &json!([])),
        "deep"
    );
    assert_eq!(template_error(FAMILY_LIKE, &json!([])), "No messages provided.");
    let only_responses = json!([{"role": "user", "content": "<tool_response></tool_response>"}]);
    assert_eq!(template_error(FAMILY_LIKE, &only_responses), "No user query found in messages.");
    let undefined = template_error("{{ messages[0].a.b }}", &json!([{}]));
    assert!(undefined.contains("undefined"), "{undefined}");
    assert!(template_error("{{ strftime_now('%Q') }}", &json!([])).contains("strftime_now"));
}

#[test]
fn endless_work_is_stopped() {
    let nested =
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}{% endfor %}";
    let growing =
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}";
    let recursive = "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    for source in [nested, growing, recursive] {
        let start = Instant::now();
        let message = template_error(source, &json!([]));
        assert!(start.elapsed() < Duration::from_secs(20), "{message} after {:?}", start.elapsed());
    }
}

#[test]
fn a_very_long_conversation_is_not_stopped() {
    let turn = |index: usize| {
        let role = if index.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": "word <b> ".repeat(40)})
    };
    let messages: Vec<Value> = (0..5001).map(turn).collect();
    let start = Instant::now();
    let rendered = render(FAMILY_LIKE, &json!(messages)).unwrap();
    assert!(rendered.text.len() > 5001 * 300);
    println!("{} bytes in {:?}", rendered.text.len(), start.elapsed());
}

#[test]
fn templates_that_do_not_compile_are_errors() {
    for source in ["{% if %}", "{{ 'open", "{% for x in y %}", "{% unknown_tag %}"] {
        assert!(matches!(ChatTemplate::new(source), Err(TextError::TemplateSyntax { .. })), "{source}");
    }
}

#[test]
fn the_template_comes_from_the_file_or_the_config() {
    let load = |config: Value, file| ChatTemplate::from_tokenizer_config(config.to_string().as_bytes(), file);
    let text = |template: Result<ChatTemplate, TextError>| {
        render_with(&template.unwrap(), &json!([]), None, &Value::Null).unwrap().text
    };
    let named =
        json!({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]});
    assert_eq!(text(load(named.clone(), None)), "d");
    assert_eq!(text(load(named, Some("file"))), "file");
    let tokens = json!({"chat_template": "{{ eos_token }}{{ pad_token }}{{ bos_token }}",
        "eos_token": "<e>", "pad_token": {"content": "<p>"}, "bos_token": null});
    assert_eq!(text(load(tokens, None)), "<e><p>");
    assert!(matches!(load(json!({}), None), Err(TextError::NoChatTemplate { .. })));
    let no_default = json!({"chat_template": [{"name": "rag", "template": "r"}]});
    assert!(load(no_default, None).is_err_and(|error| error.to_string().contains("rag")));
}

#[test]
fn arguments_are_variables_but_cannot_replace_the_request() {
    let template = ChatTemplate::new("{{ effort }}{% if tools is none %}!{% endif %}").unwrap();
    let rendered = render_with(&template, &json!([]), None, &json!({"effort": "low"})).unwrap();
    assert_eq!(rendered.text, "low!");
    let result = render_with(&template, &json!([]), None, &json!({"messages": []}));
    assert!(matches!(result, Err(TextError::ReservedArgument { name }) if name == "messages"));
}

#[test]
fn a_marker_put_together_from_parts_is_text() {
    let messages = json!([{"role": "user", "content": [
        {"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>"}, {"type": "text", "text": "<"},
        {"type": "text", "text": "/think>"}]}]);
    let rendered = render_with(&TEMPLATE, &messages, None, &Value::Null).unwrap();
    assert_eq!(rendered.text, "<|im_start|>user\na<|im_end|></think><|im_end|>\n");
    assert_eq!(shown(&rendered.encode(&TOKENIZER)), "[<|im_start|>]user\na<|im_end|></think>[<|im_end|>]\n");
}

#[test]
fn an_assistants_thinking_tags_are_markers_and_its_special_ones_text() {
    let messages = json!([
        {"role": "user", "content": "q<think>"},
        {"role": "assistant", "content": "a<think>b<|im_end|><tool_call>", "reasoning_content": "<|im_start|>r"},
    ]);
    let ids = render_with(&TEMPLATE, &messages, None, &Value::Null).unwrap().encode(&TOKENIZER);
    let expected = "[<|im_start|>]user\nq<think>[<|im_end|>]\n[<|im_start|>]assistant\n[<think>]\n<|im_start|>r\n[</think>]\
        \n\na[<think>]b<|im_end|>[<tool_call>][<|im_end|>]\n";
    assert_eq!(shown(&ids), expected);
}

#[test]
fn markers_in_tools_calls_and_arguments_are_text() {
    let messages = json!([{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f<|im_end|>", "arguments": {"</tool_call>": "<think>", "n": ["<|im_start|>"]}}}]}]);
    let tools = json!([{"description": "<|endoftext|>"}]);
    let ids = render_with(&TEMPLATE, &messages, Some(&tools), &Value::Null).unwrap().encode(&TOKENIZER);
    let shown = shown(&ids);
    for text in ["\"<|endoftext|>\"", "=f<|im_end|>>", "=</tool_call>>\n<think>\n", "[\"<|im_start|>\"]"] {
        assert!(shown.contains(text), "{text} in {shown}");
    }
    assert!(shown.contains("[<tool_call>]") && shown.contains("[</tool_call>]"));
}

/// Where the template looks for a tag in a user's text, the tag is structure there; special markers still are
/// text.
#[test]
fn tags_that_the_template_looks_for_keep_their_meaning() {
    let messages = json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "<tool_response>7<|im_end|></tool_response>"},
    ]);
    let rendered = render(FAMILY_LIKE, &messages).unwrap();
    assert!(rendered.text.contains("<think>\nr\n</think>"), "the last query is the first message");
    let shown = shown(&rendered.encode(&TOKENIZER));
    assert!(shown.contains("[<tool_response>]7<|im_end|>[</tool_response>]"), "{shown}");
}

#[test]
fn a_template_that_rewrites_markers_is_refused_only_where_it_matters() {
    let source = "{{ messages[0].content|escape }}<|im_end|>";
    let harmless = render(source, &json!([{"content": "1 < 2 <think>"}])).unwrap();
    assert_eq!(harmless.text, "1 &lt; 2 &lt;think&gt;<|im_end|>");
    let result = render(source, &json!([{"content": "<|im_end|>"}]));
    assert!(matches!(result, Err(TextError::UntrackableText { .. })), "{result:?}");
}

#[test]
fn text_may_contain_the_private_characters_used_inside() {
    let content = "\u{100000}<|im_end|>\u{100001}\u{10FFFD}<";
    let messages = json!([{"role": "user", "content": content}]);
    let rendered = render_with(&TEMPLATE, &messages, None, &Value::Null).unwrap();
    assert_eq!(rendered.text, format!("<|im_start|>user\n{content}<|im_end|>\n"));
    assert_eq!(shown(&rendered.encode(&TOKENIZER)), format!("[<|im_start|>]user\n{content}[<|im_end|>]\n"));
    let all: String = ('\u{100000}'..='\u{10FFFD}').chain(['<']).collect();
    let result = render_with(&TEMPLATE, &json!([{"role": "user", "content": all}]), None, &Value::Null);
    assert!(matches!(result, Err(TextError::UntrackableText { .. })));
}

#[test]
fn markers_of_any_shape_can_be_tracked() {
    let config = json!({"added_tokens_decoder": {"9000": {"content": "[END]", "special": true}}});
    let file = common::read("models/tiny/tokenizer.json");
    let tokenizer = qwill_text::Tokenizer::from_json(&file, Some(config.to_string().as_bytes())).unwrap();
    let template = ChatTemplate::new("{{ messages[0].content }}[END]").unwrap();
    let messages = json!([{"content": "a[END]"}]);
    // Unknown to the template, it is never taken for a marker.
    let unknown = render_with(&template, &messages, None, &Value::Null).unwrap().encode(&tokenizer);
    assert!(!unknown.contains(&9000));
    let template = template.with_markers_of(&tokenizer);
    let known = render_with(&template, &messages, None, &Value::Null).unwrap().encode(&tokenizer);
    let expected = [tokenizer.encode("a[END]", Markers::None), vec![9000]].concat();
    assert_eq!(known, expected);
}

proptest! {
    /// Whatever a user writes, the prompt's special markers are those of the template.
    #[test]
    fn no_user_text_makes_a_special_marker(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "<|im_end|>", "<|im_start|>", "<", "|im_end|>", "<|im_", "end|>", "<think>", "</think>", " ", "\n", "a",
                "\u{100000}", "<|endoftext|>", "\u{338}",
            ]),
            0..10,
        ),
    ) {
        let parts: Vec<Value> = parts.into_iter().map(|text| json!({"type": "text", "text": text})).collect();
        let messages = json!([{"role": "user", "content": parts}]);
        let rendered = render_with(&TEMPLATE, &messages, None, &Value::Null).unwrap();
        let ids = rendered.encode(&TOKENIZER);
        let markers: Vec<u32> = ids.iter().copied().filter(|&id| id >= 8166).collect();
        prop_assert_eq!(markers, [8167, 8168]);
        let plain = |text: &str| TOKENIZER.encode(text, Markers::None);
        let middle = rendered.text.strip_prefix("<|im_start|>").and_then(|text| text.strip_suffix("<|im_end|>\n")).unwrap();
        prop_assert_eq!(ids, [vec![8167], plain(middle), vec![8168], plain("\n")].concat());
    }
}
