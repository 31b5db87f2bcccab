//! Chat prompts: the checkpoint's Jinja template, executed as Hugging Face's libraries do.

mod functions;
mod json;
mod paint;
mod python;

use std::collections::HashMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value as Data;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{TextError, Tokenizer, ToolStyle};
use functions::Raised;
use paint::{Ink, Level, Painter, Spelling};

/// Work that one rendering may do, in fuel: about an instruction, or 64 bytes of text made, each. Far more than
/// any real prompt takes: a template spends some hundred instructions on a message, and copies text a few times.
const BASE_FUEL: u64 = 1_000_000;
const FUEL_PER_JSON_VALUE: u64 = 1_000;
const FUEL_PER_TEXT_BYTE: u64 = 1;
const TEMPLATE_NAME: &str = "chat template";
/// Names that the request itself gives to every template.
const RESERVED: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// A chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// `bos_token`, `eos_token` and the like, which templates may print.
    special_tokens: Vec<(String, String)>,
    spellings: Vec<Spelling>,
}

/// What a template is rendered with.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// The conversation: objects with `role`, `content` and so on. Arguments of tool calls should be objects,
    /// as templates go through their items.
    pub messages: &'a [Value],
    /// Functions the model may call, in the shape of the request.
    pub tools: Option<&'a [Value]>,
    /// Whether the prompt ends with the start of an assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub kwargs: &'a Map<String, Value>,
}

/// A rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The prompt, with everything spelt as it was given.
    pub text: String,
    /// Where in `text`, in bytes and ascending, a character that could start a marker came from the request.
    from_request: Vec<usize>,
    /// Characters for which `from_request` is known.
    tracked: Vec<char>,
}

impl Rendered {
    /// Token ids of the prompt. Markers that the template wrote are parsed; those spelt in messages, tools or
    /// arguments are plain text, encoded in one stretch with the text around them.
    ///
    /// The exceptions: in the words of an assistant's own message, markers that are not special (`<think>`)
    /// are parsed; and so they are in all messages where the template itself looks for them.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        tokenizer.encode_where(&self.text, |at, marker| {
            marker.text.starts_with(&self.tracked[..]) && self.from_request.binary_search(&at).is_err()
        })
    }

    /// Ends the prompt in front of `mark`; tells whether it stands there, once, as it has to.
    pub fn end_at(&mut self, mark: char) -> bool {
        let mut places = self.text.match_indices(mark);
        match (places.next(), places.next()) {
            (Some((end, _)), None) => {
                self.text.truncate(end);
                true
            }
            _ => false,
        }
    }
}

/// The parts of `tokenizer_config.json` that templates need.
#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    chat_template: Option<TemplateEntry>,
    #[serde(default)]
    added_tokens_decoder: HashMap<String, Spelling>,
    #[serde(flatten)]
    other: HashMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TemplateEntry {
    Single(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl ChatTemplate {
    /// Compiles a template. It tracks the markers of the Qwen3.5 family; for other ones see
    /// [`ChatTemplate::with_markers_of`].
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`].
    pub fn new(source: &str) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax_error = |error: &Error| TextError::TemplateSyntax { message: error.to_string() };
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| syntax_error(&error))?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        functions::register(&mut environment);
        environment
            .add_template_owned(TEMPLATE_NAME, source.to_owned())
            .map_err(|error| syntax_error(&error))?;
        Ok(Self {
            environment,
            source: source.to_owned(),
            special_tokens: Vec::new(),
            spellings: paint::family_spellings(),
        })
    }

    /// The template of a checkpoint: `jinja_file` (the text of `chat_template.jinja`) if there is one, else
    /// `chat_template` of `tokenizer_config.json`: a string, or a list in which the one named `default` counts.
    ///
    /// # Errors
    /// [`TextError::Json`], [`TextError::NoChatTemplate`] or [`TextError::TemplateSyntax`].
    pub fn from_tokenizer_config(
        tokenizer_config_json: &[u8],
        jinja_file: Option<&str>,
    ) -> Result<Self, TextError> {
        let config: Config = serde_json::from_slice(tokenizer_config_json)
            .map_err(|source| TextError::Json { file: "tokenizer_config.json", source })?;
        let mut template = match (jinja_file, config.chat_template) {
            (Some(source), _) => Self::new(source)?,
            (None, Some(entry)) => Self::new(&entry.default()?)?,
            (None, None) => {
                let reason = "tokenizer_config.json has no `chat_template`".to_owned();
                return Err(TextError::NoChatTemplate { reason });
            }
        };
        template.track(config.added_tokens_decoder.into_values());
        template.special_tokens = special_tokens(config.other);
        Ok(template)
    }

    /// Also tracks the markers of this tokenizer through the template, whatever they look like.
    #[must_use]
    pub fn with_markers_of(mut self, tokenizer: &Tokenizer) -> Self {
        let markers = tokenizer.markers().iter();
        self.track(markers.map(|marker| Spelling { content: marker.text.clone(), special: marker.special }));
        self
    }

    fn track(&mut self, spellings: impl Iterator<Item = Spelling>) {
        for spelling in spellings.filter(|spelling| !spelling.content.is_empty()) {
            match self.spellings.iter_mut().find(|known| known.content == spelling.content) {
                Some(known) => *known = spelling,
                None => self.spellings.push(spelling),
            }
        }
    }

    /// The template's own text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// How the template teaches the model to write tool calls.
    pub fn tool_style(&self) -> ToolStyle {
        ToolStyle::of_template(&self.source)
    }

    /// Renders a conversation.
    ///
    /// To know which characters of the prompt came from the request, the template is rendered a second time
    /// with every character of the request that could start a marker replaced ("inked") by one that occurs
    /// nowhere else. Character by character, the two results then show where each came from, through any
    /// slicing, trimming or splitting, and also for a marker put together from several strings.
    ///
    /// # Errors
    /// [`TextError::Template`] with the template's own words where it raised an exception,
    /// [`TextError::ReservedArgument`], and [`TextError::UntrackableText`] where the template rewrites a
    /// marker spelt in the conversation.
    pub fn render(&self, input: &ChatInput) -> Result<Rendered, TextError> {
        if let Some(name) = RESERVED.into_iter().find(|&name| input.kwargs.contains_key(name)) {
            return Err(TextError::ReservedArgument { name: name.to_owned() });
        }
        let environment = self.fuelled(input);
        let text = run(&environment, &self.special_tokens, input, &Painter::blank())?;
        let inks = paint::choose_inks(input, &self.spellings, &self.source)?;
        let tracked = paint::first_chars(&self.spellings);
        if inks.is_empty() {
            return Ok(Rendered { text, from_request: Vec::new(), tracked });
        }
        for level in [Level::Everything, Level::SpecialSpellings] {
            let painter = Painter::new(&inks, level, &self.spellings);
            let inked = run(&environment, &self.special_tokens, input, &painter);
            if let Some(from_request) = inked.ok().and_then(|inked| Ink::positions(&inks, &text, &inked)) {
                return Ok(Rendered { text, from_request, tracked });
            }
        }
        Err(TextError::UntrackableText {
            reason: "the chat template rewrites a control marker spelt in the conversation",
        })
    }

    /// The environment (a cheap copy) with as much fuel as this request may use.
    fn fuelled(&self, input: &ChatInput) -> Environment<'static> {
        let mut size = Size::default();
        input.values().for_each(|value| size.add(value));
        let fuel = BASE_FUEL + FUEL_PER_JSON_VALUE * size.values + FUEL_PER_TEXT_BYTE * size.text_bytes;
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        environment
    }
}

impl<'a> ChatInput<'a> {
    /// Everything that the request supplies.
    fn values(&self) -> impl Iterator<Item = &'a Value> {
        self.messages.iter().chain(self.tools.unwrap_or_default()).chain(self.kwargs.values())
    }
}

/// How much there is of some JSON.
#[derive(Default)]
struct Size {
    values: u64,
    text_bytes: u64,
}

impl Size {
    fn add(&mut self, value: &Value) {
        self.values += 1;
        match value {
            Value::String(text) => self.text_bytes += text.len() as u64,
            Value::Array(items) => items.iter().for_each(|item| self.add(item)),
            Value::Object(entries) => entries.iter().for_each(|(key, entry)| {
                self.text_bytes += key.len() as u64;
                self.add(entry);
            }),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// Renders the template of `environment` once.
fn run(
    environment: &Environment,
    special_tokens: &[(String, String)],
    input: &ChatInput,
    painter: &Painter,
) -> Result<String, TextError> {
    let mut variables: Vec<(String, Data)> = vec![("documents".to_owned(), Data::from(()))];
    variables.extend(special_tokens.iter().map(|(name, text)| (name.clone(), Data::from(text))));
    variables.extend(input.kwargs.iter().map(|(name, value)| (name.clone(), painter.value(value))));
    let messages: Vec<Data> = input.messages.iter().map(|message| painter.message(message)).collect();
    variables.push(("messages".to_owned(), Data::from(messages)));
    let tools = input.tools.map(|tools| tools.iter().map(|tool| painter.value(tool)).collect::<Vec<_>>());
    variables.push(("tools".to_owned(), tools.map_or(Data::from(()), Data::from)));
    variables.push(("add_generation_prompt".to_owned(), Data::from(input.add_generation_prompt)));
    environment
        .get_template(TEMPLATE_NAME)
        .and_then(|template| template.render(Data::from_pairs(variables)))
        .map_err(|error| TextError::Template { message: message_of(&error) })
}

impl TemplateEntry {
    fn default(self) -> Result<String, TextError> {
        match self {
            Self::Single(source) => Ok(source),
            Self::Named(templates) => {
                let names: Vec<&str> = templates.iter().map(|template| template.name.as_str()).collect();
                let reason = format!("tokenizer_config.json has templates {names:?}, none of them `default`");
                let default = templates.into_iter().find(|template| template.name == "default");
                default.map(|template| template.template).ok_or(TextError::NoChatTemplate { reason })
            }
        }
    }
}

/// Entries such as `"eos_token": "<|im_end|>"`, also written as objects with `content`.
fn special_tokens(config: HashMap<String, Value>) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
    let is_token = |name: &str| name.ends_with("_token") && !name.starts_with("add_");
    config
        .into_iter()
        .filter(|(name, _)| is_token(name))
        .filter_map(|(name, value)| text(&value).map(|text| (name, text)))
        .collect()
}

/// What the template raised, word for word; otherwise what the engine found and where.
fn message_of(error: &Error) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(raised) = current.downcast_ref::<Raised>() {
            return raised.0.clone();
        }
        cause = current.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => "the chat template does too much work for one conversation".to_owned(),
        _ => format!("the chat template failed: {error}"),
    }
}
