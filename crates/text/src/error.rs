use thiserror::Error;

/// Everything that can go wrong between text and token ids.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file is not the JSON that it should be.
    #[error("{file} cannot be read: {source}")]
    Json {
        /// Name of the file by its role, such as `tokenizer.json`.
        file: &'static str,
        /// What the JSON reader found, with line and column.
        source: serde_json::Error,
    },
    /// `tokenizer.json` is well-formed but describes a tokenizer of another kind.
    #[error("tokenizer.json: {what} is {found}, expected {expected}")]
    UnsupportedTokenizer {
        /// The setting, as a path inside the file.
        what: &'static str,
        /// What the file says.
        found: String,
        /// What this crate can work with.
        expected: &'static str,
    },
    /// `tokenizer.json` contradicts itself.
    #[error("tokenizer.json: {problem}")]
    InvalidTokenizer {
        /// What does not fit, naming the token or merge.
        problem: String,
    },
    /// There is no chat template where one is needed.
    #[error("no chat template: {reason} (hint: add chat_template.jinja to the model directory)")]
    NoChatTemplate {
        /// Where it was looked for.
        reason: String,
    },
    /// The chat template is not valid Jinja.
    #[error("the chat template does not compile: {message}")]
    TemplateSyntax {
        /// The engine's message, with the line.
        message: String,
    },
    /// The chat template refused the conversation (`raise_exception`) or failed on it.
    #[error("{message}")]
    Template {
        /// The template's own words where it raised; otherwise the engine's message.
        message: String,
    },
    /// A template argument has the name of something that every template is given.
    #[error("chat template argument `{name}` is reserved (hint: it is set from the request itself)")]
    ReservedArgument {
        /// The argument's name.
        name: String,
    },
    /// Text of the request cannot be told from text of the template, so that a control marker spelt in it might
    /// act as one.
    #[error("the conversation cannot be encoded safely: {reason}")]
    UntrackableText {
        /// Why not.
        reason: &'static str,
    },
}
