use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::{Matcher, ParserFactory};
use qwill_contract::Guide;
use qwill_text::Tokenizer;
use toktrie::{InferenceCapabilities, TokEnv};

use crate::ThinkingMarkers;
use crate::cache::Cache;
use crate::guide::GrammarGuide;
use crate::shape::{GrammarError, Shape};
use crate::vocabulary::Vocabulary;

/// Largest shape, bytes of its text.
const SHAPE_LIMIT_BYTES: usize = 256 << 10;
/// What compiled grammars may take together.
const CACHE_CAPACITY_BYTES: usize = 64 << 20;
/// A compiled grammar takes so many bytes, ...
const GRAMMAR_BYTES: usize = 64 << 10;
/// ... and so many for each byte of its text: an estimate.
const GRAMMAR_BYTES_PER_BYTE: usize = 64;

/// Work that a grammar may make, in the library's units with its own measurements of them: no more than 20 ms before it
/// begins and 10 ms for a mask, and some 50 MB for a text.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 140_000,
        step_max_items: 50_000,
        max_lexer_states: 40_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Compiles grammars for one model's tokens, and keeps those that were used last.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    end_ids: Arc<[u32]>,
    factory: OnceLock<Result<ParserFactory, String>>,
    markers: OnceLock<Option<Arc<ThinkingMarkers>>>,
    cache: Mutex<Cache<Grammar>>,
}

/// A compiled grammar. Cheap to clone.
#[derive(Clone)]
pub struct Grammar {
    /// Before the first token.
    matcher: Arc<Mutex<Matcher>>,
    end_ids: Arc<[u32]>,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl Grammars {
    /// For the ids below `vocab_size`; `end_ids` are the model's end-of-turn tokens. The work for a large vocabulary is
    /// done by [`Grammars::prepare`] or the first grammar.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, end_ids: &[u32]) -> Self {
        let end_ids: Vec<u32> = end_ids.iter().copied().filter(|id| (*id as usize) < vocab_size).collect();
        Self {
            tokenizer,
            vocab_size,
            end_ids: end_ids.into(),
            factory: OnceLock::new(),
            markers: OnceLock::new(),
            cache: Mutex::new(Cache::new(CACHE_CAPACITY_BYTES)),
        }
    }

    /// Sorts the vocabulary, so that the first grammar need not wait for it.
    pub fn prepare(&self) {
        let _ = self.factory();
        self.thinking_markers();
    }

    /// The model's tokens around thinking, if it has them.
    pub fn thinking_markers(&self) -> Option<Arc<ThinkingMarkers>> {
        let make = || ThinkingMarkers::new(Arc::clone(&self.tokenizer), self.vocab_size, &self.end_ids);
        self.markers.get_or_init(|| make().map(Arc::new)).clone()
    }

    /// Compiles a shape, or finds it compiled. Takes up to some hundred milliseconds, so it is nothing for a thread that
    /// others wait for.
    pub fn compile(&self, shape: &Shape) -> Result<Grammar, GrammarError> {
        let key = shape.key();
        if key.len() > SHAPE_LIMIT_BYTES {
            return Err(GrammarError::TooLarge { bytes: key.len(), limit: SHAPE_LIMIT_BYTES });
        }
        if let Some(grammar) = self.cache().get(&key) {
            return Ok(grammar);
        }
        let factory = self.factory()?;
        let parser = factory.create_parser(shape.to_grammar()?);
        let mut matcher = Matcher::new(parser);
        // A grammar that no text fits shows here, not in the middle of an answer.
        if let Err(error) = matcher.compute_mask_or_eos() {
            return Err(GrammarError::Invalid(plain_message(&error.to_string())));
        }
        let grammar = Grammar { matcher: Arc::new(Mutex::new(matcher)), end_ids: Arc::clone(&self.end_ids) };
        let bytes = GRAMMAR_BYTES + GRAMMAR_BYTES_PER_BYTE * key.len();
        self.cache().put(key, grammar.clone(), bytes);
        Ok(grammar)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache<Grammar>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        let made = self.factory.get_or_init(|| {
            if self.end_ids.is_empty() {
                return Err("this model has no end-of-turn token, so no text can end".to_owned());
            }
            let vocabulary = Vocabulary::new(Arc::clone(&self.tokenizer), self.vocab_size, &self.end_ids);
            let environment: TokEnv = Arc::new(vocabulary);
            let slices = SlicedBiasComputer::general_slices();
            let capabilities = InferenceCapabilities::default();
            let mut factory = ParserFactory::new(&environment, capabilities, &slices)
                .map_err(|error| plain_message(&error.to_string()))?;
            *factory.quiet().limits_mut() = limits();
            Ok(factory)
        });
        made.as_ref().map_err(|message| GrammarError::Invalid(message.clone()))
    }
}

impl Grammar {
    /// Whether both are one compiled grammar.
    #[cfg(test)]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.matcher, &other.matcher)
    }

    /// A guide for one text.
    pub fn guide(&self) -> Box<dyn Guide> {
        let matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Box::new(GrammarGuide::new(matcher, Arc::clone(&self.end_ids)))
    }
}

/// What the library says, without what it says for its own developers.
pub(crate) fn plain_message(message: &str) -> String {
    let end =
        ["\n<state>", "\n<non-verbose", "\n<backtrace>"].iter().filter_map(|mark| message.find(mark)).min();
    let message = message[..end.unwrap_or(message.len())].trim();
    message.chars().take(500).collect()
}
