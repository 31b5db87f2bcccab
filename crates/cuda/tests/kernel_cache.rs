//! The kernel cache with a real driver. Without a GPU it says so and passes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs;
use std::path::Path;

use common::device;
use qwill_cuda::{CompileTarget, CubinCache, CudaDevice, CudaOptions, Nvrtc, UnitBuild, fixed_units};
use qwill_device::Device;

/// The smallest of the units that every device loads.
fn small_unit() -> UnitBuild {
    fixed_units().into_iter().find(|build| build.unit.name == "pack").unwrap()
}

/// The version of the compiler whose code for a key the directory has.
fn compiler_of(directory: &Path, key: &str) -> String {
    let mut names =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let version =
        |name: String| Some(name.strip_prefix(key)?.strip_prefix('-')?.strip_suffix(".cubin")?.to_owned());
    names.find_map(version).unwrap()
}

#[test]
fn code_that_the_driver_refuses_is_compiled_anew_and_kept() {
    let Some(first) = device(&CudaOptions::from_environment()) else { return };
    let facts = first.facts().name;
    let sm: u32 = facts.split_once("sm_").unwrap().1.trim_end_matches(')').parse().unwrap();
    drop(first);
    let directory = tempfile::tempdir().unwrap();
    let Some(warm) = CudaOptions::from_environment().kernel_cache_directory.filter(|warm| warm.is_dir())
    else {
        println!("skipped: no cached kernels to begin with");
        return;
    };
    for entry in fs::read_dir(warm).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
    }
    let cache = CubinCache::new(directory.path());
    let key = small_unit().key(sm);
    let version = compiler_of(directory.path(), &key);
    let good = cache.load(&key, Some(&version)).unwrap();
    // Code of another GPU, where there is a compiler to make it; an image that ends too early; none at all.
    let mut refused = vec![good[..good.len() / 2].to_vec(), b"not code".to_vec()];
    if let Ok(nvrtc) = Nvrtc::find(CompileTarget::default()) {
        let other = if sm == 80 { 90 } else { 80 };
        refused.push(nvrtc.compile(&small_unit(), other).unwrap().cubin);
    }
    for bad in refused {
        cache.store(&key, &version, &bad).unwrap();
        let own = CudaOptions {
            kernel_cache_directory: Some(directory.path().to_owned()),
            ..CudaOptions::from_environment()
        };
        match CudaDevice::new(&own) {
            Ok(_) => {
                let found = cache.load(&key, None).unwrap();
                assert!(found != bad && found.starts_with(b"\x7fELF"), "the refused code is still there");
            }
            // Without a compiler nothing can replace it, but it must be gone, and the error must say so.
            Err(error) => {
                assert!(error.to_string().contains("NVRTC"), "{error}");
                assert_eq!(cache.load(&key, None), None);
            }
        }
    }
}
