//! Checkpoints from the outside: the golden packings, the tiny model, random weights, and everything that can
//! be broken about a directory.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking, in their helpers too")]

mod broken;
mod broken_packed;
mod builder;
mod cache;
mod configs;
mod fuzz;
mod golden;
mod random;
mod stream;
mod tiny;
