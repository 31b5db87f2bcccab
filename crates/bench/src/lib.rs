//! Measures an OpenAI-compatible server from outside, and draws what was measured.
//!
//! [`measure()`] runs the protocols of [`protocol`] against a URL and gives a [`Report`]: every request's times and
//! token counts, and what follows from them. It uses nothing but the HTTP API, so that any server can stand in, and
//! it knows nothing of the other crates. [`svg`] draws charts of any origin.
//!
//! Where to begin reading: [`protocol`] (what is asked), [`sample`] (what is kept of one request), [`report`] (how
//! the figures follow), `docs/protocols.md` (the same in words).

mod calibrate;
mod client;
mod date;
mod endpoint;
mod error;
mod events;
mod load;
mod measure;
mod plot;
mod prompts;
pub mod protocol;
mod random;
pub mod report;
mod request;
mod reuse;
pub mod sample;
mod server;
pub mod stats;
pub mod svg;
mod table;
mod talk;

pub use error::BenchError;
pub use measure::{Observer, Options, measure};
pub use plot::figure;
pub use report::{Conditions, Report, RowReport};
pub use request::Dialect;
pub use reuse::Reuse;
pub use server::{Abilities, ServerFacts};
pub use table::table;
