//! Compiled kernels on disk.
//!
//! A file is `QWCUBIN1`, the SHA-256 of the rest, the code. It is written under another name and renamed, so that a
//! reader never sees half of it; a file that does not check is as good as none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sha2::{Digest, Sha256};

use crate::KernelError;

const MAGIC: &[u8; 8] = b"QWCUBIN1";
const CHECKSUM_BYTES: usize = 32;

/// A directory of compiled kernels.
#[derive(Debug, Clone)]
pub struct CubinCache {
    directory: PathBuf,
}

impl CubinCache {
    /// A cache in a directory, which is made when the first kernel is stored.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// The default place: `$XDG_CACHE_HOME/qwill/kernels` or `~/.cache/qwill/kernels`; `None` without a home.
    pub fn default_directory() -> Option<PathBuf> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
        Some(cache.join("qwill/kernels"))
    }

    /// The code for a key, compiled by the given version, or by any where that is `None` (the newest file then).
    pub fn load(&self, key: &str, compiler: Option<&str>) -> Option<Vec<u8>> {
        match compiler {
            Some(version) => read(&self.path(key, version)),
            None => self.any_version(key),
        }
    }

    fn any_version(&self, key: &str) -> Option<Vec<u8>> {
        let prefix = format!("{key}-");
        let mut candidates: Vec<(std::time::SystemTime, PathBuf)> = fs::read_dir(&self.directory)
            .ok()?
            .filter_map(Result::ok)
            .filter(|entry| {
                let is_cubin = entry.path().extension().is_some_and(|extension| extension == "cubin");
                is_cubin && entry.file_name().to_string_lossy().starts_with(&prefix)
            })
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        candidates.sort();
        candidates.iter().rev().find_map(|(_, path)| read(path))
    }

    /// Stores code for a key.
    pub fn store(&self, key: &str, compiler: &str, code: &[u8]) -> Result<(), KernelError> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let path = self.path(key, compiler);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let draft = self.directory.join(format!("{key}.{}.{serial}.part", std::process::id()));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&self.directory)?;
            fs::write(&draft, pack(code))?;
            fs::rename(&draft, &path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&draft);
            KernelError::Cache { path: path.clone(), reason: error.to_string() }
        })
    }

    /// File of a key compiled by a version.
    pub fn path(&self, key: &str, compiler: &str) -> PathBuf {
        self.directory.join(format!("{key}-{compiler}.cubin"))
    }
}

fn read(path: &Path) -> Option<Vec<u8>> {
    unpack(&fs::read(path).ok()?).map(<[u8]>::to_vec)
}

fn pack(code: &[u8]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&Sha256::digest(code));
    file.extend_from_slice(code);
    file
}

/// The code in a file's bytes, where they check.
pub(crate) fn unpack(file: &[u8]) -> Option<&[u8]> {
    let (checksum, code) = file.strip_prefix(MAGIC)?.split_at_checked(CHECKSUM_BYTES)?;
    (Sha256::digest(code)[..] == *checksum).then_some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_code_comes_back_for_its_compiler_or_for_any() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(directory.path().join("not/yet/there"));
        assert_eq!(cache.load("k", Some("13.0")), None);
        assert_eq!(cache.load("k", None), None);
        cache.store("k", "13.0", b"code").unwrap();
        assert_eq!(cache.load("k", Some("13.0")).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.load("k", Some("12.9")), None);
        assert_eq!(cache.load("k", None).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.load("other", None), None);
    }

    #[test]
    fn a_damaged_file_is_ignored_and_can_be_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(directory.path());
        cache.store("k", "13.0", b"some code").unwrap();
        let path = cache.path("k", "13.0");
        let good = fs::read(&path).unwrap();
        for at in [0, 8, 20, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, bad).unwrap();
            assert_eq!(cache.load("k", Some("13.0")), None, "byte {at}");
        }
        for len in [0, 7, 8, 39, good.len() - 1] {
            fs::write(&path, &good[..len]).unwrap();
            assert_eq!(cache.load("k", None), None, "{len} bytes");
        }
        cache.store("k", "13.0", b"some code").unwrap();
        assert_eq!(cache.load("k", None).as_deref(), Some(&b"some code"[..]));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "a draft was left");
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_an_error_with_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, b"").unwrap();
        let message = CubinCache::new(&file).store("k", "13.0", b"code").unwrap_err().to_string();
        assert!(message.contains("file"), "{message}");
    }
}
