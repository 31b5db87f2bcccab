//! What is served: weights, the names they go by, and how they read and write text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use qwill_device::Geometry;
use qwill_server::TextModel;
use qwill_text::{ChatTemplate, TextError, Tokenizer};
use qwill_weights::{Checkpoint, Quantize, WeightCache};
use serde_json::{Map, Value};

use crate::args::{ModelArgs, RandomArgs};
use crate::embedded;
use crate::failure::Hinted;

/// The turn's first token: a natural boundary of a conversation.
const TURN_START: &str = "<|im_start|>";
/// End-of-turn tokens of the family, for checkpoints that name none.
const TURN_ENDS: [&str; 2] = ["<|im_end|>", "<|endoftext|>"];

/// Where weights come from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ModelSource {
    /// The model inside the binary.
    Embedded,
    /// A Hugging Face directory.
    Directory(PathBuf),
    /// Made-up weights.
    Random {
        /// Their shapes.
        geometry: Box<Geometry>,
        /// Their seed.
        seed: u64,
    },
}

impl ModelSource {
    /// What the flags ask for.
    pub(crate) fn of(model: &ModelArgs, random: Option<&RandomArgs>) -> Result<Self> {
        if let Some(directory) = &model.model_dir {
            return Ok(Self::Directory(directory.clone()));
        }
        match random {
            Some(RandomArgs { geometry: Some(name), seed, .. }) => {
                Ok(Self::Random { geometry: Box::new(geometry(name)?), seed: *seed })
            }
            _ => Ok(Self::Embedded),
        }
    }

    /// For the start screen.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Embedded => "embedded".to_owned(),
            Self::Directory(path) => path.display().to_string(),
            Self::Random { seed, .. } => format!("random weights, seed {seed}"),
        }
    }

    /// Template arguments of every chat. `thinking` is what a flag says; without one the template decides,
    /// except where the model is known not to manage.
    pub(crate) fn template_arguments(&self, thinking: Option<bool>) -> Map<String, Value> {
        let known = matches!(self, Self::Embedded).then_some(embedded::THINKING);
        let thinking =
            thinking.or(known).map(|thinking| ("enable_thinking".to_owned(), Value::Bool(thinking)));
        thinking.into_iter().collect()
    }

    /// The weights, opened but not loaded.
    pub(crate) fn checkpoint(&self, quantize: Quantize) -> Result<Checkpoint> {
        match self {
            Self::Embedded => embedded::checkpoint(),
            Self::Directory(path) => open(path),
            Self::Random { geometry, seed } => Ok(Checkpoint::random(geometry, *seed, quantize)),
        }
    }
}

/// A geometry by name.
pub(crate) fn geometry(name: &str) -> Result<Geometry> {
    Geometry::named(name).ok_or_else(|| {
        Hinted::error(
            format!("unknown geometry `{name}`"),
            format!("the known ones: {}", Geometry::NAMES.join(", ")),
        )
    })
}

fn open(path: &Path) -> Result<Checkpoint> {
    let refuse = |problem: &str| {
        Err(Hinted::error(
            format!("{}: {problem}", path.display()),
            "give the directory of a Hugging Face checkpoint, the one that holds config.json",
        ))
    };
    if !path.exists() {
        return refuse("there is no such directory");
    }
    if !path.is_dir() {
        return refuse("this is a file, not a directory");
    }
    Checkpoint::open(path).with_context(|| format!("the checkpoint in {} cannot be used", path.display()))
}

/// A checkpoint with its tokenizer, ready to be planned and loaded.
pub(crate) struct Source {
    /// Where it came from.
    pub(crate) origin: ModelSource,
    /// The weights.
    pub(crate) checkpoint: Checkpoint,
    /// Its own name: the directory's.
    pub(crate) name: String,
    /// Text to tokens and back.
    pub(crate) text: TextModel,
    /// Tokens that end an answer.
    pub(crate) eos_token_ids: Vec<u32>,
    /// Token that begins a turn.
    pub(crate) turn_start: Option<u32>,
}

impl Source {
    /// The same, keeping rounded weights there.
    pub(crate) fn with_cache(mut self, cache: &WeightCache) -> Self {
        self.checkpoint = self.checkpoint.with_cache(cache.clone());
        self
    }

    /// Opens everything that `origin` needs except the weights' contents.
    pub(crate) fn open(
        origin: ModelSource,
        quantize: Quantize,
        chat_template: Option<&Path>,
    ) -> Result<Self> {
        let checkpoint = origin.checkpoint(quantize)?;
        let (tokenizer, config) = tokenizer(&origin, &checkpoint)?;
        let vocab = checkpoint.config().geometry.vocab;
        if tokenizer.vocab_size() > vocab {
            let found = tokenizer.vocab_size();
            return Err(Hinted::error(
                format!("tokenizer.json has {found} tokens, the model only {vocab} embeddings"),
                "tokenizer.json and the weights are not of one model",
            ));
        }
        let jinja = match chat_template {
            Some(path) => {
                Some(std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?)
            }
            None => checkpoint
                .file("chat_template.jinja")?
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
        };
        let template = template(&config, jinja.as_deref(), &tokenizer)?;
        let mut eos_token_ids = checkpoint.config().eos_token_ids.clone();
        if eos_token_ids.is_empty() {
            eos_token_ids = TURN_ENDS.iter().filter_map(|token| tokenizer.id_of(token)).collect();
        }
        Ok(Self {
            name: name(&origin, &checkpoint),
            turn_start: tokenizer.id_of(TURN_START),
            text: TextModel { tokenizer: Arc::new(tokenizer), template: template.map(Arc::new) },
            origin,
            checkpoint,
            eos_token_ids,
        })
    }
}

/// Random weights have no text of their own: the embedded tokenizer names as many ids as it has, and the
/// others cannot be drawn.
fn tokenizer(origin: &ModelSource, checkpoint: &Checkpoint) -> Result<(Tokenizer, Vec<u8>)> {
    let file = |name: &str| -> Result<Option<Vec<u8>>> {
        match origin {
            ModelSource::Random { .. } => Ok(embedded::tokenizer_file(name).map(<[u8]>::to_vec)),
            _ => Ok(checkpoint.file(name)?.map(std::borrow::Cow::into_owned)),
        }
    };
    let Some(json) = file("tokenizer.json")? else {
        return Err(Hinted::error(
            format!("{}: there is no tokenizer.json", origin.describe()),
            "fetch tokenizer.json and tokenizer_config.json of the same model into the directory",
        ));
    };
    let config = file("tokenizer_config.json")?;
    let tokenizer = Tokenizer::from_json(&json, config.as_deref()).context("the tokenizer cannot be used")?;
    Ok((tokenizer, config.unwrap_or_else(|| b"{}".to_vec())))
}

/// A checkpoint without a template serves completions only: that is a warning, a broken template an error.
fn template(config: &[u8], jinja: Option<&str>, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
    match ChatTemplate::from_tokenizer_config(config, jinja) {
        Ok(template) => Ok(Some(template.with_markers_of(tokenizer))),
        Err(error @ TextError::NoChatTemplate { .. }) => {
            tracing::warn!("{error}; /v1/chat/completions will refuse, /v1/completions works");
            Ok(None)
        }
        Err(error) => Err(error).context("the chat template cannot be used"),
    }
}

fn name(origin: &ModelSource, checkpoint: &Checkpoint) -> String {
    match origin {
        ModelSource::Embedded => embedded::NAME.to_owned(),
        // A path such as `.` has a name only when it is resolved.
        ModelSource::Directory(path) => path
            .canonicalize()
            .ok()
            .and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()))
            .unwrap_or_else(|| checkpoint.config().geometry.name.clone()),
        ModelSource::Random { geometry, .. } => format!("random-{}", geometry.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinking_is_the_flags_then_the_models_then_the_templates_business() {
        let directory = ModelSource::Directory("m".into());
        assert!(directory.template_arguments(None).is_empty());
        assert_eq!(directory.template_arguments(Some(true))["enable_thinking"], true);
        assert_eq!(ModelSource::Embedded.template_arguments(None)["enable_thinking"], false);
        assert_eq!(ModelSource::Embedded.template_arguments(Some(true))["enable_thinking"], true);
    }

    #[test]
    #[cfg(feature = "embedded-model")]
    fn the_embedded_model_opens_with_everything_that_a_chat_needs() {
        let source = Source::open(ModelSource::Embedded, Quantize::None, None).unwrap();
        assert_eq!(source.name, "tiny");
        assert!(source.text.template.is_some());
        assert_eq!(source.eos_token_ids.len(), 2);
        assert_eq!(source.turn_start, source.text.tokenizer.id_of("<|im_start|>"));
        assert!(source.turn_start.is_some());
    }

    #[test]
    #[cfg(not(feature = "embedded-model"))]
    fn a_binary_without_a_model_says_so_and_what_to_name_instead() {
        let error = Source::open(ModelSource::Embedded, Quantize::None, None).err().unwrap();
        let text = crate::failure::render(&error);
        assert!(text.contains("without the embedded model"), "{text}");
        assert!(text.contains("hint: give the directory"), "{text}");
    }

    #[test]
    fn random_weights_borrow_the_embedded_tokenizer() {
        let geometry = Box::new(Geometry::named("0.8b").unwrap());
        let source = Source::open(ModelSource::Random { geometry, seed: 7 }, Quantize::Int4, None).unwrap();
        assert_eq!(source.name, "random-0.8b");
        assert!(source.text.tokenizer.vocab_size() <= source.checkpoint.config().geometry.vocab);
        assert_eq!(source.eos_token_ids.len(), 2);
    }

    #[test]
    fn a_path_that_is_no_checkpoint_is_refused_with_the_reason() {
        let refuse = |path: &Path| {
            let origin = ModelSource::Directory(path.to_owned());
            Source::open(origin, Quantize::None, None)
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default()
        };
        assert!(refuse(Path::new("no/such/place")).contains("there is no such directory"));
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(refuse(file.path()).contains("this is a file"));
    }
}
