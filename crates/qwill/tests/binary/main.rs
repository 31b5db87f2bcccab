//! The binary as people run it: real processes, real sockets, the embedded model.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

mod bench;
mod board;
mod browser;
mod chat;
mod deploy;
mod doctor;
mod failures;
mod faults;
mod gpu;
mod harness;
mod launch;
mod operations;
mod page;
mod plan;
mod scale_out;
mod serving;
mod settings;
mod signals;
mod soak;
mod speculation;
mod tools;
