//! Lists the compiled kernels of the directory in `QWILL_KERNEL_PACK`, to be built into the binary; none without it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-env-changed=QWILL_KERNEL_PACK");
    let files = match env::var_os("QWILL_KERNEL_PACK") {
        Some(directory) => cubins(Path::new(&directory)),
        None => Vec::new(),
    };
    let mut text = String::from("/// Name and content of the built-in files.\n");
    text.push_str("static PACK_FILES: &[(&str, &[u8])] = &[\n");
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "    ({name:?}, include_bytes!({:?})),", file.display().to_string());
    }
    text.push_str("];\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("pack.rs");
    if let Err(error) = fs::write(&out, text) {
        println!("cargo::error=cannot write {}: {error}", out.display());
    }
}

/// The directory's `.cubin` files by name; a directory that cannot be read stops the build.
fn cubins(directory: &Path) -> Vec<PathBuf> {
    println!("cargo::rerun-if-changed={}", directory.display());
    match fs::read_dir(directory) {
        Ok(entries) => {
            let mut files: Vec<PathBuf> = entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
            files.retain(|path| path.extension().is_some_and(|extension| extension == "cubin"));
            files.sort();
            files
        }
        Err(error) => {
            println!("cargo::error=QWILL_KERNEL_PACK: {}: {error}", directory.display());
            Vec::new()
        }
    }
}
