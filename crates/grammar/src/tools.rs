//! Tool calls as a grammar.

use std::fmt::Write as _;

use qwill_text::ToolStyle;
use serde_json::{Value, json};

use crate::shape::{Shape, bounded};

/// A tool that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolShape {
    /// Its name, without characters that markup is made of.
    pub name: String,
    /// The schema of its arguments; `null` is any.
    pub parameters: Value,
    /// Whether all of the schema has to be enforced; otherwise what cannot be is ignored.
    pub strict: bool,
}

/// Calls that a text has to be, or may have.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCalls {
    /// How they are written.
    pub style: ToolStyle,
    /// What may be called.
    pub tools: Vec<ToolShape>,
    /// Whether there may be several calls.
    pub parallel: bool,
    /// Whether the text has to be calls; otherwise it is text, with calls behind it or not.
    pub required: bool,
    /// What the text has to be like where it is no call; no Lark grammar.
    pub answer: Option<Box<Shape>>,
    /// Ids of `<tool_call>` and `</tool_call>`, where they are markers.
    pub markers: Option<(u32, u32)>,
}

impl ToolCalls {
    /// The grammar, in Lark's notation.
    pub(crate) fn lark(&self) -> String {
        let mut writer = Writer { calls: self, rules: String::new() };
        writer.start();
        for (index, tool) in self.tools.iter().enumerate() {
            match self.style {
                ToolStyle::Xml => writer.xml_call(index, tool),
                ToolStyle::Json => writer.json_call(index, tool),
            }
        }
        writer.rules
    }
}

/// Text that is no beginning of a call.
const PLAIN_TEXT: &str = r"/(?s:.+)/ & ~/(?s:.*)(<tool_call>|<function=)(?s:.*)/";
/// A value up to what ends it.
const VALUE: &str = r"/(?s:.*)/ & ~/(?s:.*)(<\/parameter|<parameter=)(?s:.*)/";

struct Writer<'a> {
    calls: &'a ToolCalls,
    rules: String,
}

impl Writer<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    fn start(&mut self) {
        let ToolCalls { tools, parallel, required, answer, .. } = self.calls;
        let names: Vec<String> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
        self.rule("call", &names.join(" | "));
        let more = if *parallel { r#" ("\n" call)*"# } else { "" };
        self.rule("calls", &format!("call{more}"));
        match (required, answer) {
            (true, _) => self.rule("start", "calls"),
            (false, Some(shape)) => {
                self.rule("start", "answer | calls");
                self.answer_rule(shape);
            }
            (false, None) => {
                self.rule("start", "TEXT | TEXT calls | calls");
                self.rule("TEXT", PLAIN_TEXT);
            }
        }
        let (open, close) = match self.calls.markers {
            Some((open, close)) => (format!("<[{open}]>"), format!("<[{close}]>")),
            None => (literal("<tool_call>"), literal("</tool_call>")),
        };
        self.rule("open", &open);
        self.rule("close", &close);
    }

    /// A call: how it opens, and its body.
    fn call(&mut self, index: usize, body: &str) {
        let opening = self.calls.style.opening(&self.calls.tools[index].name);
        let behind_marker = opening.strip_prefix("<tool_call>").unwrap_or(&opening);
        self.rule(&format!("call_{index}"), &format!("open {} {body}", literal(behind_marker)));
    }

    fn answer_rule(&mut self, shape: &Shape) {
        match shape {
            Shape::Json { schema, lenient } => self.json_rule("answer", schema, *lenient),
            Shape::Regex(pattern) => {
                self.rule("answer", "ANSWER");
                self.rule("ANSWER", &format!("/{}/", llguidance::regex_to_lark(pattern, "")));
            }
            Shape::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                self.rule("answer", &texts.join(" | "));
            }
            // A grammar within a grammar could define the same names.
            Shape::Lark(_) | Shape::Tools(_) => self.rule("answer", "no_grammar_within_this_one"),
        }
    }

    fn json_rule(&mut self, name: &str, schema: &Value, lenient: bool) {
        let schema = if schema.is_null() { json!({"type": "object"}) } else { schema.clone() };
        // What is no schema becomes one that nothing fits, which the compiler says in its own words.
        let schema = bounded(schema.clone(), lenient).unwrap_or_else(|_| json!({"type": schema}));
        self.rule(name, &format!("%json {schema}"));
    }

    fn json_call(&mut self, index: usize, tool: &ToolShape) {
        let end = literal("}\n");
        self.call(index, &format!("arguments_{index} {end} close"));
        self.json_rule(&format!("arguments_{index}"), &tool.parameters, !tool.strict);
    }

    fn xml_call(&mut self, index: usize, tool: &ToolShape) {
        let end = literal("</function>\n");
        let mut parts = Vec::new();
        let schema = &tool.parameters;
        let properties = schema["properties"].as_object().filter(|all| !all.is_empty());
        let Some(properties) = properties else {
            self.call(index, &format!("any_{index}* {end} close"));
            let key = r#""<parameter=" /[^<>\n]+/ ">\n""#;
            self.rule(&format!("any_{index}"), &format!("{key} ANY_{index}"));
            self.rule(&format!("ANY_{index}"), &format!("ANY_VALUE_{index} {}", literal("\n</parameter>\n")));
            self.rule(&format!("ANY_VALUE_{index}"), VALUE);
            return;
        };
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        for (place, (key, property)) in properties.iter().enumerate() {
            let name = format!("{index}_{place}");
            let optional = if required.contains(&key.as_str()) { "" } else { "?" };
            parts.push(format!("parameter_{name}{optional}"));
            let value = self.xml_value(&name, property, tool);
            let key = literal(&format!("<parameter={key}>\n"));
            self.rule(&format!("parameter_{name}"), &format!("{key} {value}"));
        }
        self.call(index, &format!("{} {end} close", parts.join(" ")));
    }

    /// Defines a value with what ends it; returns its name.
    fn xml_value(&mut self, name: &str, property: &Value, tool: &ToolShape) -> String {
        let root = &tool.parameters;
        let end = literal("\n</parameter>\n");
        let resolved = resolve(property, root);
        match text_kind(resolved, root) {
            Text::No => {
                let mut schema = property.clone();
                for definitions in ["$defs", "definitions"] {
                    if let (Some(map), Some(found)) = (schema.as_object_mut(), root.get(definitions)) {
                        map.insert(definitions.to_owned(), found.clone());
                    }
                }
                self.json_rule(&format!("value_{name}"), &schema, !tool.strict);
                format!("value_{name} {end}")
            }
            Text::OneOf(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                self.rule(&format!("VALUE_{name}"), &format!("({}) {end}", texts.join(" | ")));
                format!("VALUE_{name}")
            }
            Text::Any => {
                let mut body = VALUE.to_owned();
                for condition in text_conditions(resolved) {
                    let _ = write!(body, " & /{condition}/");
                }
                self.rule(&format!("VALUE_{name}"), &format!("TEXT_{name} {end}"));
                self.rule(&format!("TEXT_{name}"), &body);
                format!("VALUE_{name}")
            }
        }
    }
}

/// What a value is as text, where it is not written as JSON.
enum Text {
    No,
    OneOf(Vec<String>),
    Any,
}

fn text_kind(schema: &Value, root: &Value) -> Text {
    let constants = schema.get("const").map(std::slice::from_ref);
    let constants = constants.or_else(|| schema["enum"].as_array().map(Vec::as_slice));
    if let Some(constants) = constants {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        return Text::OneOf(constants.iter().map(text).collect());
    }
    if may_be_text(schema, root, 0) { Text::Any } else { Text::No }
}

/// Whether a string is among what fits; strings are written as they are, and then anything can be one.
fn may_be_text(schema: &Value, root: &Value, depth: usize) -> bool {
    let schema = resolve(schema, root);
    let is_string = |kind: &Value| kind.as_str() == Some("string");
    if let Some(kind) = schema.get("type") {
        return is_string(kind) || kind.as_array().is_some_and(|kinds| kinds.iter().any(is_string));
    }
    let branches = ["anyOf", "oneOf"].iter().find_map(|word| schema[*word].as_array());
    match branches {
        Some(branches) if depth < 8 => branches.iter().any(|branch| may_be_text(branch, root, depth + 1)),
        _ => schema.get("allOf").is_none() && schema.get("properties").is_none(),
    }
}

/// Follows references within the tool's own schema.
fn resolve<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut schema = schema;
    // A circle of references leads nowhere.
    for _ in 0..16 {
        let pointer = schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
        match pointer.and_then(|pointer| root.pointer(pointer)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

/// Regular expressions that a string has to match as a whole.
fn text_conditions(schema: &Value) -> Vec<String> {
    let mut conditions = Vec::new();
    let (least, most) = (schema["minLength"].as_u64(), schema["maxLength"].as_u64());
    if least.is_some() || most.is_some() {
        let most = most.map(|most| most.to_string()).unwrap_or_default();
        conditions.push(format!("(?s:.){{{},{most}}}", least.unwrap_or(0)));
    }
    if let Some(pattern) = schema["pattern"].as_str() {
        let (before, pattern) = match pattern.strip_prefix('^') {
            Some(rest) => ("", rest),
            None => ("(?s:.*)", pattern),
        };
        let (pattern, after) = match pattern.strip_suffix('$').filter(|rest| !rest.ends_with('\\')) {
            Some(rest) => (rest, ""),
            None => (pattern, "(?s:.*)"),
        };
        conditions.push(format!("{before}({}){after}", llguidance::regex_to_lark(pattern, "dw")));
    }
    conditions
}

/// A literal in Lark's notation, which is JSON's.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
