//! Where the GPU's code comes from: the pack, the cache, the compiler.

use std::path::Path;

use qwill_cuda::{
    CompileTarget, CubinCache, CudaVersion, KernelError, KernelOrigin, KernelStore, Nvrtc, UnitBuild,
};
use qwill_device::{Geometry, KvType, StateType};

use super::Finding;
use crate::units;

/// What would bring a compiler.
const INSTALL: &str =
    "`pip install nvidia-cuda-nvrtc-cu12` brings one; name its libnvrtc.so.12 in QWILL_NVRTC";

/// Compiler, cache, and the origin of the kernels of a geometry for every architecture (times ten).
pub(super) fn findings(
    cache_directory: Option<&Path>,
    geometry: Option<&Geometry>,
    architectures: &[u32],
    cuda_version: Option<CudaVersion>,
) -> Vec<Finding> {
    let units = geometry.map(units_of).unwrap_or_default();
    let store = |sm| {
        let target = CompileTarget { cuda_version, sm };
        KernelStore::new(cache_directory.map(Path::to_owned)).for_target(target)
    };
    let mut architectures = architectures.to_vec();
    architectures.sort_unstable();
    architectures.dedup();
    let mut findings = Vec::new();
    for sm in &architectures {
        let store = store(Some(*sm));
        let units: Vec<UnitBuild> = units.iter().filter(|unit| unit.is_for(*sm)).cloned().collect();
        let sources = Sources::of(&store, &units, *sm);
        findings.push(compiler(store.compiler(), sources.missing > 0));
        findings.push(sources.finding(geometry.map_or("", |one| &one.name)));
    }
    if architectures.is_empty() {
        findings.push(compiler(store(None).compiler(), false));
    }
    findings.push(cache(cache_directory.map(CubinCache::new).as_ref()));
    findings
}

fn units_of(geometry: &Geometry) -> Vec<UnitBuild> {
    // A geometry that the kernels cannot take has none; serving it says why.
    qwill_cuda::units_of(geometry, &[KvType::Bf16], &[StateType::F32]).unwrap_or_default()
}

fn compiler(found: Result<&Nvrtc, &KernelError>, is_missed: bool) -> Finding {
    match found {
        Ok(nvrtc) => {
            Finding::ok("compiler", format!("NVRTC {}, {}", nvrtc.version(), nvrtc.file().display()))
        }
        Err(error) if is_missed => Finding::problem("compiler", error.to_string(), INSTALL),
        Err(_) => Finding::ok("compiler", "no NVRTC; only a GPU whose kernels are not built in needs it"),
    }
}

/// How many units come from where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sources {
    sm: u32,
    packed: usize,
    cached: usize,
    compiled: usize,
    missing: usize,
}

impl Sources {
    fn of(store: &KernelStore, units: &[UnitBuild], sm: u32) -> Self {
        let mut sources = Self { sm, ..Self::default() };
        for unit in units {
            *match store.origin(unit, sm) {
                Ok(KernelOrigin::Pack) => &mut sources.packed,
                Ok(KernelOrigin::Cache) => &mut sources.cached,
                Ok(KernelOrigin::Compiler) => &mut sources.compiled,
                Err(_) => &mut sources.missing,
            } += 1;
        }
        sources
    }

    fn finding(self, geometry: &str) -> Finding {
        let Self { sm, packed, cached, compiled, missing } = self;
        let parts = [
            (packed, "built in"),
            (cached, "in the cache"),
            (compiled, "to be compiled at the first start"),
            (missing, "missing"),
        ];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        let found = format!("sm_{sm}, {geometry}: {}", parts.join(", "));
        if missing > 0 {
            return Finding::problem("sources", found, format!("nothing can compile them: {INSTALL}"));
        }
        Finding::ok("sources", found)
    }
}

fn cache(cache: Option<&CubinCache>) -> Finding {
    let Some(cache) = cache else {
        let advice = "kernels that are not built in are compiled at every start: set XDG_CACHE_HOME";
        return Finding::warning("cache", "neither HOME nor XDG_CACHE_HOME is set", advice);
    };
    let content = cache.content();
    let plural = if content.files == 1 { "" } else { "s" };
    let found = format!(
        "{}: {} file{plural}, {}",
        cache.directory().display(),
        content.files,
        units::bytes(content.bytes)
    );
    if let Err(error) = cache.check_writable() {
        let advice = "kernels that are not built in are compiled at every start: make it writable";
        return Finding::warning("cache", format!("{found}; {error}"), advice);
    }
    if let Some(first) = content.damaged.first() {
        let found = format!("{found}; {} damaged", content.damaged.len());
        let advice = format!("damaged files are not used: delete them, the first is {}", first.display());
        return Finding::warning("cache", found, advice);
    }
    Finding::ok("cache", found)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn no_compiler_is_a_problem_only_where_code_is_missing() {
        let error = KernelError::NoneFits { looked_at: "/usr".into(), refused: vec!["too new".into()] };
        assert_eq!(compiler(Err(&error), false).level, Level::Ok);
        let missed = compiler(Err(&error), true);
        assert!(missed.level == Level::Problem && missed.found.contains("too new"), "{missed:?}");
    }

    #[test]
    fn every_architecture_is_looked_up_once() {
        let directory = tempfile::tempdir().unwrap();
        let geometry = Geometry::named("tiny");
        let of = |architectures: &[u32]| {
            findings(Some(directory.path()), geometry.as_ref(), architectures, Some((12, 4)))
        };
        let names = |findings: &[Finding]| findings.iter().map(|one| one.name).collect::<Vec<_>>();
        assert_eq!(names(&of(&[])), ["compiler", "cache"]);
        let found = of(&[90, 86, 90]);
        assert_eq!(names(&found), ["compiler", "sources", "compiler", "sources", "cache"]);
        assert!(found[1].found.starts_with("sm_86, tiny: "), "{found:?}");
    }

    #[test]
    fn every_source_of_a_kernel_is_counted() {
        let all = Sources { sm: 90, packed: 1, cached: 2, compiled: 3, missing: 0 };
        let finding = all.finding("27b");
        assert_eq!(finding.level, Level::Ok);
        assert!(finding.found.starts_with("sm_90, 27b: 1 built in, 2 in the cache, 3 to be"), "{finding:?}");
        assert_eq!(Sources { missing: 1, ..all }.finding("27b").level, Level::Problem);
    }

    #[test]
    fn a_cache_is_counted_and_its_damaged_files_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let kernels = CubinCache::new(directory.path());
        kernels.store("k", "12.9", b"code").unwrap();
        assert_eq!(cache(Some(&kernels)).level, Level::Ok);
        let damaged = kernels.path("l", "12.9");
        std::fs::write(&damaged, b"QWCUBIN1 and no more").unwrap();
        let finding = cache(Some(&kernels));
        assert!(finding.found.ends_with("1 file, 44 B; 1 damaged"), "{finding:?}");
        assert!(finding.advice.contains(&damaged.display().to_string()), "{finding:?}");
        assert_eq!(cache(None).level, Level::Warning);
    }
}
