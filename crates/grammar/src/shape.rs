use serde_json::{Value, json};
use thiserror::Error;

use llguidance::api::TopLevelGrammar;

use crate::tools::ToolCalls;

/// White space between the parts of a JSON text: what people and programs write, but no endless run of it.
const JSON_SPACE: &str = r"\x20|\x0D?\x0A[\x20\x09]{0,64}";

/// What a text has to be like.
#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    /// A JSON text that fits a schema. `lenient`: what of the schema cannot be enforced is ignored.
    Json {
        /// The schema.
        schema: Value,
        /// See above.
        lenient: bool,
    },
    /// The whole text matches a regular expression.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A Lark grammar; the text is a `start`.
    Lark(String),
    /// Tool calls, or text that may have some.
    Tools(ToolCalls),
}

/// Why a shape cannot be used. All of them are the client's to mend.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// Wrong, contradictory, or more than can be enforced.
    #[error("{0}")]
    Invalid(String),
    /// Too long to be looked at.
    #[error("it has {bytes} bytes, the limit is {limit} bytes")]
    TooLarge {
        /// Of it.
        bytes: usize,
        /// Most.
        limit: usize,
    },
}

impl Shape {
    /// A JSON object, whatever is in it.
    pub fn json_object() -> Self {
        Self::Json { schema: json!({"type": "object"}), lenient: false }
    }

    /// The same text for the same shape.
    pub(crate) fn key(&self) -> String {
        match self {
            Self::Json { schema, lenient } => format!("json {lenient} {schema}"),
            Self::Regex(pattern) => format!("regex {pattern}"),
            Self::Choice(texts) => format!("choice {}", Value::from(texts.clone())),
            Self::Lark(text) => format!("lark {text}"),
            Self::Tools(calls) => format!("tools {}", calls.lark()),
        }
    }

    /// In the words of the grammar library.
    pub(crate) fn to_grammar(&self) -> Result<TopLevelGrammar, GrammarError> {
        Ok(match self {
            Self::Json { schema, lenient } => {
                TopLevelGrammar::from_json_schema(bounded(schema.clone(), *lenient)?)
            }
            Self::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
            Self::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| regex_syntax::escape(text)).collect();
                TopLevelGrammar::from_regex(&format!("(?:{})", texts.join("|")))
            }
            Self::Lark(text) if text.contains("::=") => {
                let message =
                    "it must be a Lark grammar (`start: \"yes\" | \"no\"`); `::=` is of another notation";
                return Err(GrammarError::Invalid(message.to_owned()));
            }
            Self::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            Self::Tools(calls) => TopLevelGrammar::from_lark(calls.lark()),
        })
    }
}

/// A schema with the settings that hold here for all of them.
pub(crate) fn bounded(schema: Value, lenient: bool) -> Result<Value, GrammarError> {
    let mut schema = match schema {
        Value::Object(map) => map,
        Value::Bool(true) => serde_json::Map::new(),
        other => {
            let message = format!("a JSON schema must be an object, not {other}");
            return Err(GrammarError::Invalid(message.chars().take(200).collect()));
        }
    };
    let settings = json!({"whitespace_pattern": JSON_SPACE, "lenient": lenient, "coerce_one_of": lenient});
    schema.insert("x-guidance".to_owned(), settings);
    Ok(Value::Object(schema))
}
