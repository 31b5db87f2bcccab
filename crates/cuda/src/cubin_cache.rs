//! Compiled kernels on disk.
//!
//! A file is `QWCUBIN2`, the SHA-256 of key and code, the code; its name is `key-compiler.cubin`. It is written under
//! another name and renamed, so that a reader never sees half of it; a file that does not check, or that is another
//! key's, is as good as none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sha2::{Digest, Sha256};

use crate::KernelError;

const MAGIC: &[u8; 8] = b"QWCUBIN2";
const CHECKSUM_BYTES: usize = 32;

/// What is in a cache's directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheContent {
    /// Files that check.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files that do not check, and that are as good as none.
    pub damaged: Vec<PathBuf>,
}

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
            None => self.versions(key).iter().rev().find_map(|path| read(path)),
        }
    }

    /// Deletes the code for a key, compiled by the given version, or by any where that is `None`.
    pub fn remove(&self, key: &str, compiler: Option<&str>) {
        let paths = compiler.map_or_else(|| self.versions(key), |version| vec![self.path(key, version)]);
        for path in paths {
            // What cannot be deleted is refused and compiled again at the next start.
            let _ = fs::remove_file(path);
        }
    }

    /// The files of a key, the newest last.
    fn versions(&self, key: &str) -> Vec<PathBuf> {
        let prefix = format!("{key}-");
        let mut files: Vec<(std::time::SystemTime, PathBuf)> = fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .filter_map(Result::ok)
            .filter(|entry| {
                let is_cubin = entry.path().extension().is_some_and(|extension| extension == "cubin");
                is_cubin && entry.file_name().to_string_lossy().starts_with(&prefix)
            })
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        files.sort();
        files.into_iter().map(|(_, path)| path).collect()
    }

    /// Stores code for a key.
    pub fn store(&self, key: &str, compiler: &str, code: &[u8]) -> Result<(), KernelError> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let path = self.path(key, compiler);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let draft = self.directory.join(format!("{key}.{}.{serial}.part", std::process::id()));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&self.directory)?;
            fs::write(&draft, with_checksum(key, code))?;
            fs::rename(&draft, &path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&draft);
            KernelError::Cache { path: path.clone(), reason: error.to_string() }
        })
    }

    /// Where the files are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Reads and checks every file; a directory that is not there has none.
    pub fn content(&self) -> CacheContent {
        let mut content = CacheContent::default();
        for path in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .filter_map(Result::ok)
            .map(|entry| entry.path())
        {
            if path.extension().is_none_or(|extension| extension != "cubin") {
                continue;
            }
            match read(&path) {
                Some(code) => {
                    content.files += 1;
                    content.bytes += (MAGIC.len() + CHECKSUM_BYTES + code.len()) as u64;
                }
                None => content.damaged.push(path),
            }
        }
        content.damaged.sort();
        content
    }

    /// Whether files can be made in the directory, which is made where it is missing.
    pub fn check_writable(&self) -> Result<(), KernelError> {
        let probe = self.directory.join(format!("{}.probe.part", std::process::id()));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&self.directory)?;
            fs::write(&probe, MAGIC)?;
            fs::remove_file(&probe)
        };
        write()
            .map_err(|error| KernelError::Cache { path: self.directory.clone(), reason: error.to_string() })
    }

    /// File of a key compiled by a version.
    pub fn path(&self, key: &str, compiler: &str) -> PathBuf {
        self.directory.join(format!("{key}-{compiler}.cubin"))
    }
}

/// The code of a file, where it checks.
fn read(path: &Path) -> Option<Vec<u8>> {
    let file = fs::read(path).ok()?;
    let (key, _) = path.file_name()?.to_str()?.split_once('-')?;
    let (expected, code) = file.strip_prefix(MAGIC)?.split_at_checked(CHECKSUM_BYTES)?;
    (checksum(key, code)[..] == *expected).then(|| code.to_vec())
}

fn with_checksum(key: &str, code: &[u8]) -> Vec<u8> {
    [MAGIC, &checksum(key, code)[..], code].concat()
}

fn checksum(key: &str, code: &[u8]) -> [u8; CHECKSUM_BYTES] {
    Sha256::new().chain_update(key).chain_update(code).finalize().into()
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
        let message = CubinCache::new(&file).check_writable().unwrap_err().to_string();
        assert!(message.contains("file"), "{message}");
    }

    #[test]
    fn the_content_counts_what_checks_and_names_what_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(directory.path().join("kernels"));
        assert_eq!(cache.content(), CacheContent::default());
        cache.check_writable().unwrap();
        cache.store("k", "13.0", b"code").unwrap();
        cache.store("l", "13.0", b"more code").unwrap();
        let path = cache.path("l", "13.0");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[1..]).unwrap();
        fs::write(cache.directory().join("other.txt"), b"x").unwrap();
        let content = cache.content();
        assert_eq!((content.files, content.damaged), (1, vec![path]));
        assert_eq!(content.bytes, 8 + 32 + 4);
    }

    #[test]
    fn code_of_another_key_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(directory.path());
        cache.store("k", "13.0", b"code").unwrap();
        fs::copy(cache.path("k", "13.0"), cache.path("l", "13.0")).unwrap();
        assert_eq!(cache.load("l", Some("13.0")), None);
        fs::write(cache.path("m", "13.0"), b"\x7fELF, but not ours").unwrap();
        assert_eq!(cache.load("m", None), None);
    }

    #[test]
    fn removed_code_is_gone_for_the_compiler_or_for_all() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(directory.path());
        for version in ["12.9", "13.0"] {
            cache.store("k", version, version.as_bytes()).unwrap();
        }
        cache.store("other", "13.0", b"code").unwrap();
        cache.remove("k", Some("13.0"));
        assert_eq!(cache.load("k", None).as_deref(), Some(&b"12.9"[..]));
        cache.remove("k", None);
        assert_eq!(cache.load("k", None), None);
        assert!(cache.load("other", None).is_some());
        cache.remove("never stored", Some("13.0"));
    }

    /// Directory that [`stores_for_another_process`] fills; set only in the processes that the next test starts.
    const CHILD_DIRECTORY: &str = "QWILL_TEST_CUBIN_CACHE";
    const ROUNDS: usize = 100;

    fn code_of_round(round: usize) -> Vec<u8> {
        vec![round as u8; 100_000 + round]
    }

    #[test]
    fn processes_that_store_at_once_never_show_half_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let start = || {
            let name = "cubin_cache::tests::stores_for_another_process";
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--quiet"])
                .env(CHILD_DIRECTORY, directory.path())
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap()
        };
        let mut children = [start(), start()];
        let path = CubinCache::new(directory.path()).path("k", "13.0");
        let mut reads = 0;
        while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
            if path.exists() {
                let code = read(&path).expect("a file that does not check");
                assert!((0..ROUNDS).any(|round| code == code_of_round(round)));
                reads += 1;
            }
        }
        assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));
        assert!(reads > 0);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "a draft was left");
    }

    /// The other half of the test above; alone it has nothing to do.
    #[test]
    fn stores_for_another_process() {
        let Some(directory) = std::env::var_os(CHILD_DIRECTORY) else { return };
        let cache = CubinCache::new(directory);
        for round in 0..ROUNDS {
            cache.store("k", "13.0", &code_of_round(round)).unwrap();
        }
    }
}
