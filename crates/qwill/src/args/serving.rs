//! The HTTP side of `serve`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use qwill_engine::DEFAULT_MAX_STALL;

use super::LogFormat;
use super::values::{self, ByteCount};
use crate::env;

const DEFAULT_MAX_STALL_MS: u64 = DEFAULT_MAX_STALL.as_millis() as u64;

#[derive(Debug, Clone, Args)]
pub(crate) struct ListenArgs {
    /// Address to listen on; 0.0.0.0 opens the server to the network, for which a key is needed
    #[arg(long, default_value = "127.0.0.1", env = env::HOST, help_heading = "Server")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes a free one and prints it
    #[arg(long, default_value_t = 18020, env = env::PORT, help_heading = "Server")]
    pub(crate) port: u16,
    /// Key that clients must send; may be given several times (the variable: separated by commas)
    #[arg(long, value_name = "KEY", env = env::API_KEY, hide_env_values = true, value_delimiter = ',')]
    #[arg(help_heading = "Server")]
    pub(crate) api_key: Vec<String>,
    /// File with a key a line: `KEY`, or `NAME KEY`, with limits where wanted: `alice sk-1 requests/min=60
    /// tokens/min=100000`. What follows a # is skipped. SIGHUP reads it again
    #[arg(long, value_name = "FILE", env = env::API_KEYS_FILE, help_heading = "Server")]
    pub(crate) api_keys_file: Option<PathBuf>,
    /// Key that also opens what touches everybody's work, such as emptying the prefix cache
    #[arg(long, value_name = "KEY", env = env::ADMIN_KEY, hide_env_values = true, help_heading = "Server")]
    pub(crate) admin_key: Option<String>,
    /// Listen on an address that others can reach although no key is set
    #[arg(long, env = env::ALLOW_NO_KEY, help_heading = "Server")]
    pub(crate) allow_no_key: bool,
    /// Certificates as PEM, the server's own first: the server speaks TLS then. SIGHUP reads both files again
    #[arg(long, value_name = "FILE", requires = "tls_key", env = env::TLS_CERT, help_heading = "Server")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert", env = env::TLS_KEY, help_heading = "Server")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Whose web pages may use the server: `loopback` for those of this machine, `*` for all, `none`, or origins such
    /// as `https://chat.example`, separated by commas
    #[arg(long, value_name = "ORIGINS", default_value = "loopback", env = env::CORS_ORIGINS, value_delimiter = ',')]
    #[arg(help_heading = "Server")]
    pub(crate) cors_origins: Vec<String>,
    /// Host name that requests may be addressed to besides this machine's own; may be given several times. Only a
    /// server without keys on a loopback address looks at it
    #[arg(long, value_name = "NAME", env = env::ALLOWED_HOST, value_delimiter = ',', help_heading = "Server")]
    pub(crate) allowed_host: Vec<String>,
    /// Name that clients ask for; may be given several times [default: the directory's name]
    #[arg(long, value_name = "NAME", env = env::SERVED_NAME, value_delimiter = ',', help_heading = "Server")]
    pub(crate) served_name: Vec<String>,
    /// Requests that may wait; the next one gets a 429
    #[arg(long, default_value_t = 128, value_parser = values::positive, env = env::QUEUE, help_heading = "Server")]
    pub(crate) queue: usize,
    /// How long a slice of somebody's prompt may keep running answers waiting, milliseconds; slices are shorter meanwhile
    #[arg(long, value_name = "MS", default_value_t = DEFAULT_MAX_STALL_MS, env = env::MAX_STALL_MS)]
    #[arg(help_heading = "Server")]
    pub(crate) max_stall_ms: u64,
    /// Largest request body
    #[arg(long, value_name = "BYTES", default_value = "32MiB", env = env::BODY_LIMIT, help_heading = "Server")]
    pub(crate) body_limit: ByteCount,
    /// Connections served at once; more wait until one is closed
    #[arg(long, default_value_t = 1024, value_parser = values::positive, env = env::MAX_CONNECTIONS)]
    #[arg(help_heading = "Server")]
    pub(crate) max_connections: usize,
    /// Refuse request fields that are not known, instead of warning once
    #[arg(long, env = env::STRICT_PARAMS, help_heading = "Server")]
    pub(crate) strict_params: bool,
    /// Whether chats begin with thinking when a request does not say [default: the chat template decides; off
    /// for the embedded model]
    #[arg(long, value_name = "BOOL", env = env::THINKING, help_heading = "Server")]
    pub(crate) thinking: Option<bool>,
    /// Seconds that a request may take, from its arrival to its end; one that asks for less (`max_time_s`) gets less
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds, env = env::REQUEST_TIMEOUT)]
    #[arg(help_heading = "Server")]
    pub(crate) request_timeout: Option<u64>,
    /// Seconds that a request may wait; then it gets a 503
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds, env = env::QUEUE_TIMEOUT)]
    #[arg(help_heading = "Server")]
    pub(crate) queue_timeout: Option<u64>,
    /// Seconds without a completed step after which an engine with work is stuck: its requests end with an error
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = values::seconds, env = env::STALL_TIMEOUT)]
    #[arg(help_heading = "Server")]
    pub(crate) stall_timeout: u64,
    /// End with code 1 when the engine has failed or is stuck, so that a supervisor starts a new process
    #[arg(long, env = env::EXIT_ON_FAILURE, help_heading = "Server")]
    pub(crate) exit_on_failure: bool,
    /// Seconds that running answers get to finish after SIGTERM or Ctrl-C; a second signal ends at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30, env = env::DRAIN_TIMEOUT, help_heading = "Server")]
    pub(crate) drain_timeout: u64,
}

/// What a request gets when it does not say. Without a flag, the checkpoint's `generation_config.json` decides.
#[derive(Debug, Default, Args)]
pub(crate) struct SamplingArgs {
    /// Default temperature, 0 to 2
    #[arg(long, value_parser = values::temperature, env = env::TEMPERATURE, help_heading = "Sampling defaults")]
    pub(crate) temperature: Option<f32>,
    /// Default top-p, above 0 to 1
    #[arg(long, value_parser = values::top_p, env = env::TOP_P, help_heading = "Sampling defaults")]
    pub(crate) top_p: Option<f32>,
    /// Default top-k; 0 keeps all tokens
    #[arg(long, env = env::TOP_K, help_heading = "Sampling defaults")]
    pub(crate) top_k: Option<usize>,
    /// Default min-p, 0 to 1
    #[arg(long, value_parser = values::min_p, env = env::MIN_P, help_heading = "Sampling defaults")]
    pub(crate) min_p: Option<f32>,
    /// Default repetition penalty, above 0 to 10; 1 does nothing
    #[arg(long, value_parser = values::repetition_penalty, env = env::REPETITION_PENALTY, help_heading = "Sampling defaults")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Default most tokens of an answer [default: as many as fit]
    #[arg(long, value_parser = values::positive, env = env::MAX_TOKENS, help_heading = "Sampling defaults")]
    pub(crate) max_tokens: Option<usize>,
}

#[derive(Debug, Args)]
#[expect(clippy::struct_field_names, reason = "fields are called as the flags are")]
pub(crate) struct LogArgs {
    /// Form of the log, which goes to standard error
    #[arg(long, value_enum, default_value = "text", env = env::LOG_FORMAT, help_heading = "Log")]
    pub(crate) log_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or directives such as `info,qwill_engine=debug`
    #[arg(long, value_name = "LEVEL", default_value = "info", env = env::LOG_LEVEL, help_heading = "Log")]
    pub(crate) log_level: String,
    /// Log the text of prompts and answers
    #[arg(long, env = env::LOG_PROMPTS, help_heading = "Log")]
    pub(crate) log_prompts: bool,
}
