//! Puts the file of compiled kernels that `QWILL_KERNEL_PACK` names into the binary; without it, none.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-env-changed=QWILL_KERNEL_PACK");
    let built_in = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("kernels.pack");
    let outcome = match env::var_os("QWILL_KERNEL_PACK").map(PathBuf::from) {
        Some(pack) => {
            println!("cargo::rerun-if-changed={}", pack.display());
            fs::copy(&pack, &built_in)
                .map_err(|error| format!("QWILL_KERNEL_PACK: {}: {error}", pack.display()))
        }
        None => {
            fs::write(&built_in, []).map(|()| 0).map_err(|error| format!("{}: {error}", built_in.display()))
        }
    };
    if let Err(error) = outcome {
        println!("cargo::error={error}");
    }
}
