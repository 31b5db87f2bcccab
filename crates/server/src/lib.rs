//! The HTTP side of Qwill: an OpenAI-compatible API over an engine.
//!
//! A request is read and validated here, rendered and tokenised with `qwill-text`, and handed to the engine as a
//! `qwill-contract` request; the engine's events come back as text, in one body or as server-sent events. The
//! engine never sees a request that could fail: everything a client can get wrong is answered here with a 4xx
//! that names the field.
//!
//! # Endpoints
//! `POST /v1/chat/completions`, `POST /v1/completions`, `POST /v1/responses`, `POST /v1/messages`, what counts and renders
//! their prompts, `GET /v1/models[/{id}]`, `POST /tokenize`, `POST /detokenize`, health, metrics, facts in the words of
//! other servers, the chat page at `/` and the status page at `/status`; `GET /openapi.json` describes them.
//!
//! # What is particular
//! * Absent `max_tokens` means what fits in the context for chats, and 16 for `/v1/completions`, as `OpenAI`
//!   documents it, unless [`SamplingDefaults::max_tokens`] says otherwise.
//! * Thinking is returned as `reasoning_content` and, with the same text, as `reasoning`. Stop strings are looked
//!   for in the answer only.
//! * Tool calls of the model are found in its text while it is written, in either style (XML or JSON), and come back
//!   as `tool_calls`, their arguments in parts. Values follow the tool's JSON schema: a string stays as it was
//!   written, anything else is read as JSON, Python's spellings included; an argument that the schema does not have is
//!   a string. A call of a tool that the request did not offer is text. With `tool_choice: "none"` the tools are left
//!   out of the prompt; where a call is asked for, a grammar sees to it, behind thinking.
//! * The answer to a named tool ends with `"stop"`, other answers with calls end with `"tool_calls"`, and an answer cut
//!   short with `"length"`: the arguments of its last call are JSON, but not all of them.
//! * Log-probabilities have one entry for each token that `usage.completion_tokens` counts, thinking and the
//!   end-of-turn token included.
//! * What a request asks of the form of its answer, a schema or a grammar, is enforced by a guide in the engine, from
//!   the first token of the answer on; what cannot be enforced is refused.
//! * A known field that this server does not implement is refused with a 400 unless its value asks for nothing;
//!   unknown fields are ignored with one warning per name in the log, or refused with
//!   [`ServerOptions::strict_params`].

mod accounts;
mod admin;
mod aliases;
mod anthropic;
mod app;
mod auth;
mod body;
mod chat;
mod choice;
mod completions;
mod connection;
mod cors;
mod endpoint;
mod engine_metrics;
mod error;
mod facts;
mod fields;
mod form;
mod generation;
mod health;
mod host;
mod keys;
mod known;
mod live;
mod log;
mod logprobs;
mod messages;
mod metrics;
mod models;
mod openapi;
mod options;
mod page;
mod params;
mod parts;
mod prompt;
mod queue_pace;
mod random;
mod recent;
mod render;
mod request_id;
mod responses;
mod router;
mod server;
mod sse;
mod status;
mod thinking;
mod time_limits;
mod tls;
mod tokens;
mod tools;
mod types;
mod watchdog;

pub use engine_metrics::EngineMetrics;
pub use error::ServerError;
pub use keys::{ApiKey, KeyFileError, RateLimits};
pub use openapi::document as openapi_document;
pub use options::{LenientModelNames, MemoryPart, SamplingDefaults, ServerOptions, TextModel};
pub use server::{KeyRing, Server};
pub use tls::Tls;
