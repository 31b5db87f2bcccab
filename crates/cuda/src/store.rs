//! Where compiled kernels come from: the pack in the binary, the cache on disk, the compiler, in this order.
//!
//! A source whose code is damaged, or which the driver refuses, is passed over with a warning. What came from the cache
//! is then deleted, so that the code is compiled anew, once.

use std::cell::OnceCell;
use std::path::PathBuf;

use crate::pack::Pack;
use crate::{CompileTarget, CubinCache, KernelError, Nvrtc, UnitBuild};

/// The kernels that the build was given, see `build.rs`.
static BUILT_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.pack"));

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

/// Why code could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The driver's words.
    pub reason: String,
    /// Whether the code itself is at fault, so that code from elsewhere may do.
    pub of_code: bool,
}

/// Looks kernels up.
#[derive(Debug)]
pub struct KernelStore {
    pack: Pack<'static>,
    cache: Option<CubinCache>,
    target: CompileTarget,
    compiler: OnceCell<Result<Nvrtc, KernelError>>,
}

impl KernelStore {
    /// A store with a cache in the given directory; without one only pack and compiler.
    pub fn new(cache_directory: Option<PathBuf>) -> Self {
        Self {
            pack: Pack::new(BUILT_IN),
            cache: cache_directory.map(CubinCache::new),
            target: CompileTarget::default(),
            compiler: OnceCell::new(),
        }
    }

    /// The same, with a compiler whose code a driver and a GPU can run.
    #[must_use]
    pub fn for_target(self, target: CompileTarget) -> Self {
        Self { target, ..self }
    }

    /// Hands the code of a unit for a compute capability (times ten) to `load`, from the first source whose code it
    /// takes.
    pub fn load<T>(
        &self,
        build: &UnitBuild,
        sm: u32,
        mut load: impl FnMut(&[u8]) -> Result<T, Refusal>,
    ) -> Result<(T, KernelOrigin), KernelError> {
        let refused =
            |refusal: Refusal| KernelError::Refused { unit: build.describe(), sm, reason: refusal.reason };
        let key = build.key(sm);
        for (code, origin) in [self.packed(&key), self.cached(&key)].into_iter().flatten() {
            match load(&code) {
                Ok(loaded) => return Ok((loaded, origin)),
                Err(refusal) if !refusal.of_code => return Err(refused(refusal)),
                Err(refusal) => self.pass_over(build, &key, origin, &refusal),
            }
        }
        let compiler = self.needed_compiler(build, sm)?;
        let code = compiler.compile(build, sm)?.cubin;
        let loaded = load(&code).map_err(refused)?;
        if let Some(cache) = &self.cache
            && let Err(error) = cache.store(&key, compiler.version(), &code)
        {
            tracing::warn!("{error}; {} will be compiled again at the next start", build.unit.name);
        }
        Ok((loaded, KernelOrigin::Compiler))
    }

    /// Compiles those units that neither pack nor cache has, all at the same time, into the cache. Left to
    /// [`Self::load`], one after another, the kernels of the 27B take 15 s. What fails here fails there again, and is told.
    pub fn prepare(&self, builds: &[UnitBuild], sm: u32) {
        let is_missing = |build: &&UnitBuild| matches!(self.origin(build, sm), Ok(KernelOrigin::Compiler));
        let missing: Vec<&UnitBuild> = builds.iter().filter(is_missing).collect();
        let (Some(cache), Ok(compiler), 2..) = (&self.cache, self.compiler(), missing.len()) else { return };
        std::thread::scope(|scope| {
            for build in missing {
                scope.spawn(move || {
                    let compiled = compiler.compile(build, sm);
                    compiled.and_then(|code| cache.store(&build.key(sm), compiler.version(), &code.cubin))
                });
            }
        });
    }

    /// Where [`Self::load`] would take the code from first, without compiling.
    pub fn origin(&self, build: &UnitBuild, sm: u32) -> Result<KernelOrigin, KernelError> {
        let key = build.key(sm);
        match self.packed(&key).or_else(|| self.cached(&key)) {
            Some((_, origin)) => Ok(origin),
            None => self.needed_compiler(build, sm).map(|_| KernelOrigin::Compiler),
        }
    }

    /// The compiler, whether or not anything needs it.
    pub fn compiler(&self) -> Result<&Nvrtc, &KernelError> {
        self.compiler.get_or_init(|| Nvrtc::find(self.target)).as_ref()
    }

    /// The cache on disk.
    pub fn cache(&self) -> Option<&CubinCache> {
        self.cache.as_ref()
    }

    fn packed(&self, key: &str) -> Option<(Vec<u8>, KernelOrigin)> {
        let code = self.pack.find(key).unwrap_or_else(|error| {
            tracing::warn!("{error}; looking for the kernels elsewhere");
            None
        });
        Some((code?, KernelOrigin::Pack))
    }

    fn cached(&self, key: &str) -> Option<(Vec<u8>, KernelOrigin)> {
        Some((self.cache.as_ref()?.load(key, self.compiler_version())?, KernelOrigin::Cache))
    }

    fn compiler_version(&self) -> Option<&str> {
        self.compiler().ok().map(Nvrtc::version)
    }

    fn pass_over(&self, build: &UnitBuild, key: &str, origin: KernelOrigin, refusal: &Refusal) {
        let place = match origin {
            KernelOrigin::Pack => "built-in",
            KernelOrigin::Cache | KernelOrigin::Compiler => "cached",
        };
        tracing::warn!("the driver refuses the {place} code of {}: {}", build.describe(), refusal.reason);
        if let (KernelOrigin::Cache, Some(cache)) = (origin, &self.cache) {
            cache.remove(key, self.compiler_version());
        }
    }

    fn needed_compiler(&self, build: &UnitBuild, sm: u32) -> Result<&Nvrtc, KernelError> {
        self.compiler().map_err(|error| KernelError::NoCompiler {
            unit: build.describe(),
            sm,
            reason: error.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixed_units;
    use crate::pack::tests::pack_of;

    const SM: u32 = 90;

    fn build() -> UnitBuild {
        fixed_units().remove(1)
    }

    /// A store as on a machine without a compiler.
    fn store(cache: &std::path::Path, pack: Vec<u8>) -> KernelStore {
        let store = KernelStore::new(Some(cache.to_owned()));
        let none = KernelError::Library { library: "libnvrtc".into(), reason: "not there".into() };
        let compiler = OnceCell::from(Err(none));
        KernelStore { pack: Pack::new(pack.leak()), compiler, ..store }
    }

    fn get(store: &KernelStore) -> Result<(Vec<u8>, KernelOrigin), KernelError> {
        store.load(&build(), SM, |code| Ok(code.to_vec()))
    }

    fn pack_with(code: &[u8]) -> Vec<u8> {
        pack_of(&[(build().key(SM), code.to_vec())])
    }

    #[test]
    fn built_in_code_comes_before_cached_code() {
        let directory = tempfile::tempdir().unwrap();
        CubinCache::new(directory.path()).store(&build().key(SM), "13.0", b"cached").unwrap();
        let with_pack = store(directory.path(), pack_with(b"packed"));
        assert_eq!(get(&with_pack).unwrap(), (b"packed".to_vec(), KernelOrigin::Pack));
        assert_eq!(with_pack.origin(&build(), SM).unwrap(), KernelOrigin::Pack);
        let without = store(directory.path(), pack_of(&[]));
        assert_eq!(get(&without).unwrap(), (b"cached".to_vec(), KernelOrigin::Cache));
        assert_eq!(without.origin(&build(), SM).unwrap(), KernelOrigin::Cache);
    }

    #[test]
    fn damaged_built_in_code_is_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let mut pack = pack_with(b"packed");
        *pack.last_mut().unwrap() ^= 1;
        let store = store(directory.path(), pack);
        let message = get(&store).unwrap_err().to_string();
        assert!(message.contains("sm_90") && message.contains("pip install"), "{message}");
        assert_eq!(store.origin(&build(), SM).unwrap_err().to_string(), message);
        CubinCache::new(directory.path()).store(&build().key(SM), "13.0", b"cached").unwrap();
        assert_eq!(get(&store).unwrap(), (b"cached".to_vec(), KernelOrigin::Cache));
    }

    #[test]
    fn refused_code_is_dropped_from_the_cache_and_the_next_source_is_asked() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(directory.path());
        cache.store(&build().key(SM), "13.0", b"cached").unwrap();
        let store = store(directory.path(), pack_with(b"packed"));
        let mut asked = Vec::new();
        let outcome = store.load(&build(), SM, |code| -> Result<(), Refusal> {
            asked.push(code.to_vec());
            Err(Refusal { reason: "not for me".into(), of_code: true })
        });
        assert!(matches!(outcome, Err(KernelError::NoCompiler { .. })), "{outcome:?}");
        assert_eq!(asked, [b"packed", b"cached"]);
        assert_eq!(cache.load(&build().key(SM), None), None);
    }

    #[test]
    fn a_driver_in_trouble_does_not_cost_the_cache_its_code() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(directory.path());
        cache.store(&build().key(SM), "13.0", b"cached").unwrap();
        let store = store(directory.path(), pack_of(&[]));
        let outcome = store.load(&build(), SM, |_| -> Result<(), Refusal> {
            Err(Refusal { reason: "out of memory".into(), of_code: false })
        });
        assert!(outcome.unwrap_err().to_string().contains("out of memory"));
        assert!(cache.load(&build().key(SM), None).is_some());
    }

    /// Needs a compiler, which `QWILL_NVRTC` names; says so and passes without one.
    #[test]
    fn refused_cached_code_is_compiled_anew_once_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let store =
            KernelStore { pack: Pack::new(&[]), ..KernelStore::new(Some(directory.path().to_owned())) };
        let Ok(compiler) = store.compiler() else {
            println!("skipped: no NVRTC");
            return;
        };
        let cache = CubinCache::new(directory.path());
        cache.store(&build().key(SM), compiler.version(), b"not code").unwrap();
        let is_code = |code: &[u8]| {
            let refusal = || Refusal { reason: "no ELF image".into(), of_code: true };
            code.starts_with(b"\x7fELF").then(|| code.to_vec()).ok_or_else(refusal)
        };
        let (code, origin) = store.load(&build(), SM, is_code).unwrap();
        assert_eq!(origin, KernelOrigin::Compiler);
        assert_eq!(store.load(&build(), SM, is_code).unwrap(), (code, KernelOrigin::Cache));
    }

    /// As above.
    #[test]
    fn a_cache_that_cannot_be_written_costs_nothing_but_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let store = KernelStore { pack: Pack::new(&[]), ..KernelStore::new(Some(file.path().to_owned())) };
        match get(&store) {
            Ok((_, origin)) => assert_eq!(origin, KernelOrigin::Compiler),
            Err(error) => assert!(matches!(error, KernelError::NoCompiler { .. }), "{error}"),
        }
    }
}
