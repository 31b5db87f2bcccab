//! What a server is configured with.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use qwill_text::{ChatTemplate, Tokenizer};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{ApiKey, EngineMetrics, Tls};

/// Settings of a server. [`ServerOptions::default`] is right for one person on one machine.
#[derive(Clone)]
#[allow(clippy::struct_excessive_bools, reason = "settings that have nothing to do with each other")]
pub struct ServerOptions {
    /// Address to listen on; port 0 picks a free one.
    pub bind: SocketAddr,
    /// Keys that open the server. None: it is open to everybody who reaches the address.
    pub api_keys: Vec<ApiKey>,
    /// A further key, which also opens what touches everybody's work. Without one nobody may do that.
    pub admin_key: Option<String>,
    /// Listen on an address that others can reach although there is no key.
    pub allow_no_key: bool,
    /// Origins whose pages may use the server: `loopback` for those of this machine, `*` for all, or one such as
    /// `https://chat.example`.
    pub cors_origins: Vec<String>,
    /// Speak TLS, and only that.
    pub tls: Option<Tls>,
    /// Names, besides those of this machine, that requests may be addressed to when the server has no keys and
    /// listens on a loopback address; other servers answer to any name.
    pub allowed_hosts: Vec<String>,
    /// Connections served at once; more wait unanswered in the system's backlog. Fewer when the process may not
    /// open so many files.
    pub max_connections: usize,
    /// Largest request body, bytes.
    pub body_limit_bytes: usize,
    /// A stream that has been silent for this long gets a comment, so that proxies keep it.
    pub keep_alive: Duration,
    /// Time that running requests get to finish after shutdown was asked for.
    pub drain_timeout: Duration,
    /// Longest time for a request's head, and longest pause within a body.
    pub read_timeout: Duration,
    /// Longest time without progress while a client does not read its answer.
    pub write_timeout: Duration,
    /// An engine that has work and completes no step for this long is stuck: requests end with an error, `/health` says
    /// so, and what is in hand goes to the log.
    pub stall_timeout: Duration,
    /// [`crate::Server::run`] ends with an error when the engine has failed or is stuck, for whoever starts it again.
    pub exit_on_failure: bool,
    /// Longest time for a request, from its arrival to its end; a request may ask for less.
    pub request_timeout: Option<Duration>,
    /// Longest time that a request may wait.
    pub queue_timeout: Option<Duration>,
    /// Log the text of prompts and answers.
    pub log_prompts: bool,
    /// Sampling where a request does not say.
    pub defaults: SamplingDefaults,
    /// Largest `n`; the engine's number of sequences bounds it further.
    pub max_choices: usize,
    /// Refuse unknown fields instead of warning.
    pub strict_params: bool,
    /// Names of other models that are answered all the same.
    pub lenient_model_names: LenientModelNames,
    /// Responses that are kept for later requests to go on from; those not used for longest make room.
    pub stored_responses: usize,
    /// How large they may be together, bytes.
    pub stored_responses_bytes: usize,
    /// Template arguments for every chat; a request's own come on top.
    pub chat_template_kwargs: Map<String, Value>,
    /// What the engine counts, to be shown in `/metrics` with what the server does.
    pub engine_metrics: Option<EngineMetrics>,
    /// Where the memory goes, for the status page.
    pub memory: Vec<MemoryPart>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 18020)),
            api_keys: Vec::new(),
            admin_key: None,
            allow_no_key: false,
            cors_origins: vec!["loopback".to_owned()],
            tls: None,
            allowed_hosts: Vec::new(),
            max_connections: 1024,
            body_limit_bytes: 32 << 20,
            keep_alive: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_mins(1),
            stall_timeout: Duration::from_mins(2),
            exit_on_failure: false,
            request_timeout: None,
            queue_timeout: None,
            log_prompts: false,
            defaults: SamplingDefaults::default(),
            max_choices: 8,
            strict_params: false,
            lenient_model_names: LenientModelNames::default(),
            stored_responses: 1000,
            stored_responses_bytes: 64 << 20,
            chat_template_kwargs: Map::new(),
            engine_metrics: None,
            memory: Vec::new(),
        }
    }
}

/// A part of the memory that was planned at start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPart {
    /// What it is for: weights, states and the like.
    pub section: String,
    /// Name within the section.
    pub name: String,
    /// Exact bytes.
    pub bytes: u64,
}

/// Names of models that a server answers to besides its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LenientModelNames {
    /// None: any other name is an error.
    None,
    /// Those that coding agents have built in: `claude-…` and `gpt-…`.
    #[default]
    Agents,
    /// Every name.
    All,
}

impl LenientModelNames {
    pub(crate) fn allow(self, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::Agents => name.starts_with("claude-") || name.starts_with("gpt-"),
            Self::All => true,
        }
    }
}

/// Sampling where a request does not say: the model's `generation_config.json`, or flags.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingDefaults {
    /// 0 to 2; 0 is greedy.
    pub temperature: f32,
    /// (0, 1].
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: usize,
    /// 0 to 1.
    pub min_p: f32,
    /// −2 to 2.
    pub presence_penalty: f32,
    /// Above 0, at most 10; 1 does nothing.
    pub repetition_penalty: f32,
    /// Tokens to generate at most. `None`: what fits for a chat, 16 for a completion.
    pub max_tokens: Option<usize>,
}

impl Default for SamplingDefaults {
    /// The `OpenAI` defaults: temperature 1 and nothing cut.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            max_tokens: None,
        }
    }
}

/// How the model reads and writes text.
#[derive(Clone)]
pub struct TextModel {
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversation to text. Without one there is no chat, only completions.
    pub template: Option<Arc<ChatTemplate>>,
}
