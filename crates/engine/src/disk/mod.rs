//! The disk tier of the prefix cache: pages and states in files that outlive the process.
//!
//! A *blob* is one page or one state as the device stores it, under a key that is a digest of the salt and of all tokens
//! that lead to it: what prefill computes depends on nothing else, so that conversations that begin alike share their
//! pages without anybody counting references. A blob is a file; files are written under another name and renamed, and
//! carry a digest, the model and the numerics that they belong to. Nothing in a file is trusted.
//!
//! One thread does all reading and writing. The engine's asks for things and looks from time to time what has come; it
//! never waits.

mod file;
mod index;
mod keys;
mod store;

use std::path::PathBuf;

use thiserror::Error;

pub(crate) use keys::{BlobKey, PathKeys};
pub(crate) use store::DiskCache;

/// Where blobs are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskCacheOptions {
    /// The directory, which is made where it is not there. One process uses it at a time.
    pub directory: PathBuf,
    /// Bytes of all files at most; those not used for longest go.
    pub limit_bytes: u64,
    /// A digest of everything that decides a blob's bits beside its tokens: the model, the numerics, the program.
    pub identity: [u8; 32],
}

/// Why a directory cannot be used.
#[derive(Debug, Error)]
pub enum DiskCacheError {
    /// Another process keeps its blobs there.
    #[error("another process uses the disk cache {}", .0.display())]
    InUse(PathBuf),
    /// It cannot be made, read or written.
    #[error("disk cache {}: {reason}", .directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The operating system's words.
        reason: std::io::Error,
    },
}
