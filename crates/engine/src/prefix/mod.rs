//! The prefix cache: KV pages and snapshots of recurrent states by the tokens that lead to them.
//!
//! A *hit* of a prompt is the deepest snapshot at a chunk boundary of the prompt, before its end, whose tokens are the
//! prompt's first ones. A snapshot and the pages of the tokens before it are there together or not at all: the one that
//! was not used for longest goes as a unit, with the pages that nothing else needs. States lie in the host store; pages
//! on the device while there is room, then in the host store.
//!
//! Everything here is pure. What has to be copied is returned, and the caller does it.

mod cache;
mod granules;
mod miss;
mod pages;
mod stops;
#[cfg(test)]
mod tests;
mod tree;

pub(crate) use cache::{Begun, Lookup, PageCopy, PrefixCache, Table};
pub(crate) use miss::Miss;
pub(crate) use pages::Place;
pub(crate) use stops::SnapshotRule;
pub(crate) use tree::Salt;
