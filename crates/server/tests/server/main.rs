//! The server over a scripted engine: real HTTP, real tokenizer and template, no model.

#![allow(clippy::unwrap_used, reason = "a test that finds something missing has failed")]

mod agents;
mod anthropic;
mod bad_input;
mod bad_rows;
mod characters;
mod chat;
mod client;
mod completions;
mod engine;
mod extras;
mod failures;
mod forms;
mod fuzz;
mod logging;
mod matrix;
mod metrics;
mod openapi;
mod operations;
mod prompts;
mod reliability;
mod responses;
mod service;
mod sockets;
mod tls;
mod tools;
mod trust;
mod utilities;
mod wire;
