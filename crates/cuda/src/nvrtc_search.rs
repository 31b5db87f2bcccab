//! Which NVRTC compiles, where a machine has several.
//!
//! A driver takes code of its own CUDA's major version or an older one, whatever the minor version. So the newest library
//! that is not newer than the driver is the best, one that is newer by its minor version alone is good enough, and one of
//! a newer major version is refused.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{KernelError, Nvrtc};

/// `(major, minor)`.
pub type CudaVersion = (u32, u32);

/// What the compiled code must run on; by default anything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CompileTarget {
    /// Newest CUDA that the driver runs.
    pub cuda_version: Option<CudaVersion>,
    /// Compute capability, times ten.
    pub sm: Option<u32>,
}

impl Nvrtc {
    /// The library that `QWILL_NVRTC` names, or the best for a target of those that are installed.
    pub fn find(target: CompileTarget) -> Result<Self, KernelError> {
        let places = Places::of_this_machine();
        let candidates = places.candidates();
        let mut refused = Vec::new();
        let mut best: Option<(Rank, Self)> = None;
        for (path, is_certain) in candidates {
            match Self::open(&path) {
                Ok(nvrtc) => match rank(nvrtc.release(), &nvrtc.architectures(), target) {
                    Ok(rank) if best.as_ref().is_none_or(|(other, _)| rank > *other) => {
                        best = Some((rank, nvrtc));
                    }
                    Ok(_) => {}
                    Err(reason) => {
                        refused.push(format!("{} is NVRTC {}: {reason}", path.display(), nvrtc.version()));
                    }
                },
                // A bare name that the loader does not know is not there, which is no news.
                Err(error) if is_certain => refused.push(error.to_string()),
                Err(_) => {}
            }
        }
        best.map(|(_, nvrtc)| nvrtc)
            .ok_or_else(|| KernelError::NoneFits { looked_at: places.describe(), refused })
    }
}

/// A greater one is preferred: not newer than the driver, then near to it.
type Rank = (bool, CudaVersion, Reverse<CudaVersion>);

/// How well a library fits, or why it does not.
fn rank(release: CudaVersion, architectures: &[u32], target: CompileTarget) -> Result<Rank, String> {
    if let Some(sm) = target.sm
        && !architectures.is_empty()
        && !architectures.contains(&sm)
    {
        return Err(format!("it does not compile for sm_{sm}"));
    }
    let Some(driver) = target.cuda_version else { return Ok((true, release, Reverse(release))) };
    if release.0 > driver.0 {
        let (major, minor) = driver;
        return Err(format!(
            "the driver runs code of CUDA {major}.{minor} and may refuse that of CUDA {}",
            release.0
        ));
    }
    let fits = release <= driver;
    Ok((fits, if fits { release } else { (0, 0) }, Reverse(release)))
}

/// Where libraries may be.
#[derive(Debug, Default)]
struct Places {
    /// What the user named: then nothing else counts.
    named: Option<PathBuf>,
    /// Names for the system's loader.
    names: &'static [&'static str],
    /// Python installations, environments and the user's own packages: what holds `lib/python3*`.
    prefixes: Vec<PathBuf>,
    /// What holds `cuda*/lib64`.
    toolkits: PathBuf,
}

impl Places {
    fn of_this_machine() -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        Self {
            named: variable("QWILL_NVRTC").map(PathBuf::from),
            names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"],
            prefixes: prefixes(&variable),
            toolkits: PathBuf::from("/usr/local"),
        }
    }

    /// Paths and names to open, each once, and whether something is known to be there.
    fn candidates(&self) -> Vec<(PathBuf, bool)> {
        if let Some(named) = &self.named {
            return vec![(named.clone(), true)];
        }
        let mut folders = Vec::new();
        for prefix in &self.prefixes {
            for python in matching(&prefix.join("lib"), "python3") {
                for packages in ["site-packages", "dist-packages"] {
                    let nvidia = python.join(packages).join("nvidia");
                    folders.extend(matching(&nvidia, "cu").into_iter().map(|folder| folder.join("lib")));
                }
            }
        }
        folders.extend(matching(&self.toolkits, "cuda").into_iter().map(|folder| folder.join("lib64")));
        let files = folders.iter().flat_map(|folder| matching(folder, "libnvrtc.so."));
        // One library has many names: cuda and cuda-12.9 are one folder, libnvrtc.so.12 and .so.12.9.86 one file.
        let files: BTreeSet<PathBuf> = files.filter_map(|file| file.canonicalize().ok()).collect();
        let names = self.names.iter().map(|name| (PathBuf::from(name), false));
        names.chain(files.into_iter().map(|file| (file, true))).collect()
    }

    fn describe(&self) -> String {
        if self.named.is_some() {
            return "QWILL_NVRTC".to_owned();
        }
        let prefixes: Vec<String> = self.prefixes.iter().map(|prefix| prefix.display().to_string()).collect();
        format!(
            "the system's library path, {}/cuda*/lib64 and the Python packages of {}",
            self.toolkits.display(),
            prefixes.join(", ")
        )
    }
}

/// Where Python keeps packages, as far as the environment tells; no Python is run.
fn prefixes(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name)).map(PathBuf::from).collect();
    found.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    let path = variable("PATH").unwrap_or_default();
    let python =
        std::env::split_paths(&path).map(|folder| folder.join("python3")).find(|python| python.exists());
    for python in
        python.iter().flat_map(|python| [Some(python.clone()), python.canonicalize().ok()]).flatten()
    {
        found.extend(python.parent().and_then(Path::parent).map(Path::to_owned));
    }
    found.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut seen = BTreeSet::new();
    found.retain(|prefix| seen.insert(prefix.clone()));
    found
}

/// What a folder has whose name begins so, sorted; nothing where it cannot be read.
fn matching(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARCHITECTURES: [u32; 3] = [80, 90, 120];

    /// The release that is taken of several.
    fn choice(releases: &[CudaVersion], driver: Option<CudaVersion>) -> Option<CudaVersion> {
        let target = CompileTarget { cuda_version: driver, sm: Some(90) };
        let fitting = releases
            .iter()
            .filter_map(|release| Some((rank(*release, &ARCHITECTURES, target).ok()?, *release)));
        fitting.max().map(|(_, release)| release)
    }

    #[test]
    fn the_newest_that_the_driver_runs_is_taken() {
        let all = [(11, 8), (13, 0), (12, 4), (12, 9)];
        assert_eq!(choice(&all, Some((12, 9))), Some((12, 9)));
        assert_eq!(choice(&all, Some((13, 1))), Some((13, 0)));
        assert_eq!(choice(&all, Some((12, 8))), Some((12, 4)));
        assert_eq!(choice(&all, None), Some((13, 0)));
        // Of two that are newer by their minor version, the nearer.
        assert_eq!(choice(&[(12, 9), (12, 4), (13, 0)], Some((12, 2))), Some((12, 4)));
        assert_eq!(choice(&[(13, 0)], Some((12, 9))), None);
    }

    #[test]
    fn a_refusal_gives_both_versions_or_the_architecture() {
        let target = CompileTarget { cuda_version: Some((12, 4)), sm: Some(86) };
        let newer = rank((13, 0), &[86], target).unwrap_err();
        assert!(newer.contains("12.4") && newer.contains("13"), "{newer}");
        assert!(rank((12, 4), &ARCHITECTURES, target).unwrap_err().contains("sm_86"));
        // An old library does not tell what it compiles for.
        assert!(rank((11, 2), &[], target).is_ok());
    }

    #[test]
    fn packages_and_toolkits_are_found_once_each() {
        let root = tempfile::tempdir().unwrap();
        let touch = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, b"").unwrap();
            path.canonicalize().unwrap()
        };
        let packages = "venv/lib/python3.11/site-packages/nvidia";
        let expected = [
            touch("usr/cuda-12.9/lib64/libnvrtc.so.12"),
            touch(&format!("{packages}/cu13/lib/libnvrtc.so.13")),
            touch(&format!("{packages}/cuda_nvrtc/lib/libnvrtc.so.12")),
        ];
        touch(&format!("{packages}/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9"));
        touch(&format!("{packages}/cuda_nvrtc/lib/libnvrtc.alt.so.12"));
        touch(&format!("{packages}/cublas/lib/libcublas.so.12"));
        std::os::unix::fs::symlink("cuda-12.9", root.path().join("usr/cuda")).unwrap();
        let places = Places {
            prefixes: vec![root.path().join("venv"), root.path().join("nowhere")],
            toolkits: root.path().join("usr"),
            ..Places::default()
        };
        let found: Vec<PathBuf> = places.candidates().into_iter().map(|(path, _)| path).collect();
        assert_eq!(found, expected);
        let named = Places { named: Some("/a/libnvrtc.so".into()), ..places };
        assert_eq!(named.candidates(), [(PathBuf::from("/a/libnvrtc.so"), true)]);
    }

    #[test]
    fn python_is_looked_for_without_running_it() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("bin")).unwrap();
        fs::write(root.path().join("bin/python3"), b"").unwrap();
        let variable = |name: &str| match name {
            "PATH" => Some(root.path().join("bin").into_os_string()),
            "HOME" => Some("/home/someone".into()),
            "VIRTUAL_ENV" => Some("/venv".into()),
            _ => None,
        };
        let found = prefixes(&variable);
        let python = root.path().to_owned();
        for expected in [Path::new("/venv"), Path::new("/home/someone/.local"), &python, Path::new("/usr")] {
            assert!(found.iter().any(|prefix| prefix == expected), "{expected:?} not in {found:?}");
        }
    }
}
