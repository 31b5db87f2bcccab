//! What a request asks of the form of its answer (a schema, a regular expression, a choice, a grammar, tool calls, a limit for
//! thinking, tokens that it may have), and the guides that the engine gets for it.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use qwill_contract::Guide;
use qwill_grammar::{
    Grammar, GrammarError, Grammars, Limited, Shape, Thinking, ThinkingMarkers, TokenLimits, ToolCalls,
    ToolShape,
};
use qwill_text::Markers;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::known;
use crate::params::parse_token_ids;
use crate::prompt::Prompt;
use crate::tools::{Tool, ToolChoice, ToolSettings};

/// A grammar that is not compiled by then is too much.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(5);
const CHOICES_LIMIT: usize = 4096;
const BAD_WORDS_LIMIT: usize = 512;
/// Of one word, in characters.
const BAD_WORD_LIMIT: usize = 256;

/// What is asked of the form of an answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Form {
    /// The shape of the answer itself, behind thinking, with the field that asks for it.
    shape: Option<(String, Shape)>,
    /// Tokens that may be thought.
    pub(crate) thinking_budget: Option<usize>,
    /// Tokens that thinking and answer may have.
    limits: Option<Arc<TokenLimits>>,
}

/// Guides for the prompts of a request.
#[derive(Debug, Default)]
pub(crate) struct Guides {
    grammar: Option<Grammar>,
    thinking_budget: Option<usize>,
    markers: Option<Arc<ThinkingMarkers>>,
    limits: Option<Arc<TokenLimits>>,
}

/// Takes what a request says about the form of its answer, in any of the usual spellings.
pub(crate) fn take_form(app: &App, fields: &mut Fields) -> Result<Form, ApiError> {
    let mut found = Vec::new();
    let path = fields.path("response_format");
    if let Some(format) = fields.take("response_format") {
        found.extend(response_format(app, &path, format)?);
    }
    let (schema, regex, choice, grammar) =
        (Spelling::Schema, Spelling::Regex, Spelling::Choice, Spelling::Grammar);
    if let Some(asked) = fields.take("structured_outputs") {
        let mut asked = Fields::nested("structured_outputs", asked)?;
        let names = [(schema, "json"), (regex, "regex"), (choice, "choice"), (grammar, "grammar")];
        take_shapes(&mut asked, &names, &mut found)?;
        if asked.boolean("json_object")? == Some(true) {
            found.push((asked.path("json_object"), Shape::json_object()));
        }
        known::settle(app, &asked)?;
    }
    let names = [
        (schema, "guided_json"),
        (schema, "json_schema"),
        (regex, "guided_regex"),
        (regex, "regex"),
        (choice, "guided_choice"),
        (grammar, "guided_grammar"),
        (grammar, "grammar"),
        (grammar, "ebnf"),
    ];
    take_shapes(fields, &names, &mut found)?;
    if let [(first, _), (second, _), ..] = &found[..] {
        let message =
            format!("`{first}` and `{second}` both say what the answer has to be like: send one of them");
        return Err(ApiError::field(second.clone(), message).with_code("invalid_value"));
    }
    let thinking_budget = take_thinking_budget(fields)?;
    Ok(Form { shape: found.pop(), thinking_budget, limits: take_limits(app, fields)? })
}

/// How a field says what the answer has to be like.
#[derive(Clone, Copy)]
enum Spelling {
    Schema,
    Regex,
    Choice,
    Grammar,
}

impl Spelling {
    fn read(self, path: &str, value: Value) -> Result<Option<Shape>, ApiError> {
        let text = |value: Value| match value {
            Value::String(text) => Ok(text),
            other => Err(ApiError::value(path, "a string", &other)),
        };
        Ok(match self {
            Self::Schema => Some(Shape::Json { schema: parse_schema(path, &value)?, lenient: false }),
            Self::Regex => Some(Shape::Regex(text(value)?)),
            Self::Choice => Some(Shape::Choice(texts(path, &value)?)),
            Self::Grammar => {
                Some(Shape::Lark(text(value)?)).filter(|shape| *shape != Shape::Lark(String::new()))
            }
        })
    }
}

/// Takes shapes from fields of these names.
fn take_shapes(
    fields: &mut Fields,
    names: &[(Spelling, &str)],
    found: &mut Vec<(String, Shape)>,
) -> Result<(), ApiError> {
    for (spelling, name) in names {
        if let Some(value) = fields.take(name) {
            let path = fields.path(name);
            let shape = spelling.read(&path, value)?;
            found.extend(shape.map(|shape| (path, shape)));
        }
    }
    Ok(())
}

/// A schema, or the JSON text of one.
fn parse_schema(path: &str, value: &Value) -> Result<Value, ApiError> {
    let expected = "a JSON schema, as an object or its text";
    let schema = match value {
        Value::String(text) => {
            serde_json::from_str(text).map_err(|_| ApiError::value(path, expected, value))?
        }
        other => other.clone(),
    };
    if schema.is_object() || schema == Value::Bool(true) {
        Ok(schema)
    } else {
        Err(ApiError::value(path, expected, value))
    }
}

fn texts(path: &str, value: &Value) -> Result<Vec<String>, ApiError> {
    let texts = value.as_array().filter(|texts| !texts.is_empty() && texts.len() <= CHOICES_LIMIT);
    let texts = texts.and_then(|texts| texts.iter().map(|text| text.as_str().map(str::to_owned)).collect());
    let expected = format!("a list of 1 to {CHOICES_LIMIT} strings");
    texts.ok_or_else(|| ApiError::value(path, &expected, value))
}

/// The format in a field whose full path is `path`.
fn response_format(app: &App, path: &str, format: Value) -> Result<Option<(String, Shape)>, ApiError> {
    const KINDS: &str = "one of text, json_object, json_schema, regex, grammar";
    let mut format = Fields::nested(path, format)?;
    let kind_path = format.path("type");
    let kind = format.string("type")?.ok_or_else(|| ApiError::value(&kind_path, KINDS, &Value::Null))?;
    let missing = |path: &str, what: &str| Err(ApiError::value(path, what, &Value::Null));
    let found = match kind.as_str() {
        "text" => None,
        "json_object" => {
            // Some servers take the schema here.
            let schema = format.take("schema");
            let path = if schema.is_some() { format.path("schema") } else { path.to_owned() };
            let shape = match schema {
                Some(schema) => Shape::Json { schema: parse_schema(&path, &schema)?, lenient: false },
                None => Shape::json_object(),
            };
            Some((path, shape))
        }
        "json_schema" => {
            let path = format.path("json_schema");
            let inner = match format.take("json_schema") {
                Some(inner) => Fields::nested(&path, inner)?,
                // Some APIs have it one level up.
                None if format.has("schema") => std::mem::replace(&mut format, Fields::new(Map::new())),
                None => return missing(&path, "an object with a `schema`"),
            };
            Some(named_schema(app, inner)?)
        }
        "regex" | "grammar" => {
            let mut found = Vec::new();
            let names =
                [(Spelling::Regex, "pattern"), (Spelling::Regex, "regex"), (Spelling::Grammar, "grammar")];
            take_shapes(&mut format, &names, &mut found)?;
            let Some(shape) = found.pop() else {
                return missing(path, &format!("an object with a `{kind}`"));
            };
            Some(shape)
        }
        _ => return Err(ApiError::value(&kind_path, KINDS, &kind.into())),
    };
    check_other_types(app, &mut format)?;
    known::settle(app, &format)?;
    Ok(found)
}

/// A schema with a name and whether it is strict.
fn named_schema(app: &App, mut fields: Fields) -> Result<(String, Shape), ApiError> {
    // For people; a schema without a name is as good.
    let _ = (fields.string("name")?, fields.string("description")?);
    let lenient = fields.boolean("strict")? == Some(false);
    let path = fields.path("schema");
    let schema =
        fields.take("schema").ok_or_else(|| ApiError::value(&path, "a JSON schema", &Value::Null))?;
    let schema = parse_schema(&path, &schema)?;
    known::settle(app, &fields)?;
    Ok((path, Shape::Json { schema, lenient }))
}

/// What belongs to formats of other types says nothing; it has to be what the document says all the same.
fn check_other_types(app: &App, format: &mut Fields) -> Result<(), ApiError> {
    let path = format.path("json_schema");
    if let Some(inner) = format.take("json_schema") {
        named_schema(app, Fields::nested(&path, inner)?)?;
    }
    let names = [
        (Spelling::Schema, "schema"),
        (Spelling::Regex, "pattern"),
        (Spelling::Regex, "regex"),
        (Spelling::Grammar, "grammar"),
    ];
    take_shapes(format, &names, &mut Vec::new())
}

/// How many tokens may be thought; −1 says that there is no limit.
fn take_thinking_budget(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let mut budget: Option<(&str, i64)> = None;
    for name in ["thinking_token_budget", "thinking_budget", "reasoning_budget"] {
        let Some(tokens) =
            fields.integer(name, "a whole number: -1 for no limit, or at least 0", |n| n >= -1)?
        else {
            continue;
        };
        match budget {
            Some((other, before)) if before != tokens => {
                let message = format!(
                    "`{other}` ({before}) and `{name}` ({tokens}) are the same setting and differ: send one"
                );
                return Err(ApiError::field(name, message).with_code("invalid_value"));
            }
            _ => budget = Some((name, tokens)),
        }
    }
    Ok(budget.and_then(|(_, tokens)| usize::try_from(tokens).ok()))
}

/// `allowed_token_ids` and `bad_words`.
fn take_limits(app: &App, fields: &mut Fields) -> Result<Option<Arc<TokenLimits>>, ApiError> {
    let vocab_size = app.facts().vocab_size;
    let path = fields.path("allowed_token_ids");
    let among = match fields.list("allowed_token_ids")? {
        Some(items) if items.is_empty() => {
            return Err(ApiError::value(path, "a list of at least one token id", &Value::Array(items)));
        }
        items => items.map(|items| parse_token_ids(&items, &path, vocab_size)).transpose()?,
    };
    let banned = take_bad_words(app, fields)?;
    let any = among.is_some() || !banned.is_empty();
    Ok(any.then(|| Arc::new(TokenLimits::new(vocab_size, among.as_deref(), banned))))
}

/// The tokens of words as they are at the beginning of a text and behind a space.
fn take_bad_words(app: &App, fields: &mut Fields) -> Result<Vec<Vec<u32>>, ApiError> {
    let path = fields.path("bad_words");
    let items = fields.list("bad_words")?.unwrap_or_default();
    if items.len() > BAD_WORDS_LIMIT {
        let expected = format!("a list of at most {BAD_WORDS_LIMIT} words");
        return Err(ApiError::value(path, &expected, &Value::Array(items)));
    }
    let mut banned = Vec::with_capacity(2 * items.len());
    for (index, item) in items.iter().enumerate() {
        let fits = |word: &&str| word.chars().count() <= BAD_WORD_LIMIT && word.contains(|c| c != ' ');
        let word = item.as_str().filter(fits).map(|word| word.trim_start_matches(' ')).ok_or_else(|| {
            let expected = format!("a word that is not blank, of at most {BAD_WORD_LIMIT} characters");
            ApiError::value(format!("{path}[{index}]"), &expected, item)
        })?;
        let encode = |text: &str| app.text.tokenizer.encode(text, Markers::None);
        banned.extend([encode(word), encode(&format!(" {word}"))]);
    }
    Ok(banned)
}

impl Form {
    /// The shape of answers that may have, or have to have, tool calls.
    fn with_tools(&self, app: &App, tools: &ToolSettings) -> Result<Option<(String, Shape)>, ApiError> {
        let required = matches!(tools.choice, ToolChoice::Required | ToolChoice::Named(_));
        let is_called = |tool: &&Tool| match &tools.choice {
            ToolChoice::Named(name) => tool.name == *name,
            _ => true,
        };
        let is_shaped = required || self.shape.is_some() || tools.tools.iter().any(|tool| tool.strict);
        if !tools.may_call() || !is_shaped {
            return Ok(self.shape.clone());
        }
        let answer = self.shape.as_ref().filter(|_| !required);
        if let Some((field, Shape::Lark(_))) = answer {
            let message = format!(
                "`{field}` cannot be combined with tools that may be called: send `tool_choice`: \"none\""
            );
            return Err(ApiError::field(field.clone(), message).with_code("unsupported_parameter"));
        }
        let tokenizer = &app.text.tokenizer;
        let marker = |text| tokenizer.id_of(text).filter(|id| tokenizer.is_marker(*id));
        let style = app.tool_style();
        let shape = |tool: &Tool| ToolShape {
            name: tool.name.clone(),
            parameters: tool.parameters.clone(),
            strict: tool.strict,
        };
        let calls = ToolCalls {
            style,
            tools: tools.tools.iter().filter(is_called).map(shape).collect(),
            parallel: !tools.end_with_call(),
            required,
            answer: answer.map(|(_, shape)| Box::new(shape.clone())),
            markers: marker("<tool_call>").zip(marker("</tool_call>")),
        };
        let field = answer.map_or("tools", |(field, _)| field.as_str());
        Ok(Some((field.to_owned(), Shape::Tools(calls))))
    }

    /// Compiles what is asked for, where it holds up nobody; what cannot be met is a 400.
    pub(crate) async fn guides(&self, app: &App, tools: &ToolSettings) -> Result<Guides, ApiError> {
        let (shape, thinking_budget) = (self.with_tools(app, tools)?, self.thinking_budget);
        let limits = self.limits.clone();
        if shape.is_none() && thinking_budget.is_none() {
            return Ok(Guides { limits, ..Guides::default() });
        }
        let field = shape.as_ref().map_or("thinking_budget", |(field, _)| field.as_str());
        let busy = || {
            let message = "other grammars are still being compiled: try again";
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("busy").retry()
        };
        // Sorting the vocabulary, once for a server, is no fault of the grammar.
        let grammars = Arc::clone(&app.grammars);
        let prepared = tokio::task::spawn_blocking(move || grammars.prepare()).await;
        prepared.map_err(|error| ApiError::internal(format!("preparing grammars failed: {error}")))?;
        let permit = tokio::time::timeout(COMPILE_TIMEOUT, Arc::clone(&app.compiling).acquire_owned()).await;
        let permit = permit.map_err(|_| busy())?.map_err(|error| ApiError::internal(error.to_string()))?;
        let grammars = Arc::clone(&app.grammars);
        let shape = shape.as_ref().map(|(_, shape)| shape.clone());
        let work = tokio::task::spawn_blocking(move || {
            let grammar = shape.map(|shape| compile(&grammars, &shape)).transpose();
            let markers = grammars.thinking_markers();
            drop(permit);
            grammar.map(|grammar| (grammar, markers))
        });
        // What does not end keeps its permit, so that it is not joined by many of its kind.
        let Ok(done) = tokio::time::timeout(COMPILE_TIMEOUT, work).await else {
            let seconds = COMPILE_TIMEOUT.as_secs();
            let message = format!("`{field}` is too complex: it was not compiled within {seconds} s");
            return Err(ApiError::field(field, message).with_code("grammar_too_complex"));
        };
        let compiled = done.map_err(|error| ApiError::internal(format!("compiling failed: {error}")))?;
        let (grammar, markers) = compiled.map_err(|error| unusable(field, &error))?;
        Ok(Guides { grammar, thinking_budget, markers, limits })
    }
}

/// Compiles a shape; where the schema of a tool that is not strict cannot be enforced, its arguments are any.
fn compile(grammars: &Grammars, shape: &Shape) -> Result<Grammar, GrammarError> {
    let error = match (grammars.compile(shape), shape) {
        (Err(error), Shape::Tools(_)) => error,
        (compiled, _) => return compiled,
    };
    let Shape::Tools(mut calls) = shape.clone() else { return Err(error) };
    let is_loose = |tool: &&mut ToolShape| !tool.strict && !tool.parameters.is_null();
    let mut loosened = false;
    for tool in calls.tools.iter_mut().filter(is_loose) {
        tool.parameters = Value::Null;
        loosened = true;
    }
    if !loosened {
        return Err(error);
    }
    tracing::warn!(%error, "the schemas of tools that are not strict cannot be enforced");
    grammars.compile(&Shape::Tools(calls))
}

fn unusable(field: &str, error: &GrammarError) -> ApiError {
    let code = match error {
        GrammarError::Invalid(_) => "invalid_grammar",
        GrammarError::TooLarge { .. } => "grammar_too_large",
    };
    let rule = format!("`{field}` cannot be used");
    ApiError::field(field, format!("{rule}: {error}")).with_code(code).logged_as(rule)
}

impl Guides {
    /// For the choices of a prompt.
    pub(crate) fn guide(&self, prompt: &Prompt) -> Option<Box<dyn Guide>> {
        let shape = self.shape(prompt);
        match &self.limits {
            Some(limits) => Some(Box::new(Limited::new(Arc::clone(limits), shape))),
            None => shape,
        }
    }

    fn shape(&self, prompt: &Prompt) -> Option<Box<dyn Guide>> {
        let answer = self.grammar.as_ref().map(Grammar::guide);
        match &self.markers {
            Some(markers)
                if prompt.opens_reasoning && (answer.is_some() || self.thinking_budget.is_some()) =>
            {
                Some(Box::new(Thinking::new(Arc::clone(markers), self.thinking_budget, answer)))
            }
            _ => answer,
        }
    }
}
