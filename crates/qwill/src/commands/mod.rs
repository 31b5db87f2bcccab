//! One file per command.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod health;
pub(crate) mod launch;
pub(crate) mod plan;
pub(crate) mod reference;
pub(crate) mod serve;
