//! Where compiled kernels come from: the pack in the binary, the cache on disk, the compiler.

use std::cell::OnceCell;
use std::path::PathBuf;

use crate::cubin_cache::unpack;
use crate::{CubinCache, KernelError, Nvrtc, UnitBuild};

include!(concat!(env!("OUT_DIR"), "/pack.rs"));

/// Which of the three sources had the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelOrigin {
    /// Built into the binary.
    Pack,
    /// Found on disk.
    Cache,
    /// Compiled just now.
    Compiler,
}

/// Looks kernels up.
#[derive(Debug)]
pub struct KernelStore {
    cache: Option<CubinCache>,
    compiler: OnceCell<Result<Nvrtc, KernelError>>,
}

impl KernelStore {
    /// A store with a cache in the given directory; without one only pack and compiler.
    pub fn new(cache_directory: Option<PathBuf>) -> Self {
        Self { cache: cache_directory.map(CubinCache::new), compiler: OnceCell::new() }
    }

    /// The code of a unit for a compute capability (times ten).
    pub fn get(&self, build: &UnitBuild, sm: u32) -> Result<(Vec<u8>, KernelOrigin), KernelError> {
        let key = build.key(sm);
        let packed = PACK_FILES.iter().find(|(name, _)| name.starts_with(&key));
        if let Some(code) = packed.and_then(|(_, file)| unpack(file)) {
            return Ok((code.to_vec(), KernelOrigin::Pack));
        }
        let compiler = self.compiler.get_or_init(Nvrtc::find);
        let version = compiler.as_ref().ok().map(Nvrtc::version);
        if let Some(code) = self.cache.as_ref().and_then(|cache| cache.load(&key, version)) {
            return Ok((code, KernelOrigin::Cache));
        }
        let compiler = compiler.as_ref().map_err(|error| KernelError::NoCompiler {
            unit: build.describe(),
            sm,
            reason: error.to_string(),
        })?;
        let code = compiler.compile(build, sm)?.cubin;
        if let Some(cache) = &self.cache {
            // A cache that cannot be written costs time at the next start, nothing else.
            let _ = cache.store(&key, compiler.version(), &code);
        }
        Ok((code, KernelOrigin::Compiler))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixed_units;

    /// Whether or not this machine has a compiler.
    #[test]
    fn cached_code_is_found_and_missing_code_is_compiled_or_an_error_with_a_hint() {
        let directory = tempfile::tempdir().unwrap();
        let store = KernelStore::new(Some(directory.path().to_owned()));
        let build = fixed_units().remove(1);
        match store.get(&build, 90) {
            Ok((code, origin)) => {
                assert!(!code.is_empty());
                assert_ne!(origin, KernelOrigin::Cache);
            }
            Err(error) => {
                let message = error.to_string();
                assert!(message.contains("sm_90") && message.contains("pip install"), "{message}");
                CubinCache::new(directory.path()).store(&build.key(90), "1.0", b"code").unwrap();
                assert_eq!(store.get(&build, 90).unwrap(), (b"code".to_vec(), KernelOrigin::Cache));
            }
        }
    }
}
