//! Compiles every kernel without a GPU and compares what it needs with `kernels/budget.txt`:
//! `cargo xtask kernels [--update] [--cache DIR] [--sm 90,86] [--geometry tiny,27b]`.
//!
//! `--cache` also stores the code, for a machine without a compiler or for `QWILL_KERNEL_PACK`. `--update` rewrites the
//! budget. Fails on a spill or an excess. NVRTC is the library that `QWILL_NVRTC` names, or the system's.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use qwill_cuda::{Budget, CubinCache, Nvrtc, UnitBuild, parse_usage, units_of};
use qwill_device::suite::odd_geometry;
use qwill_device::{Geometry, KvType};

const ARCHITECTURES: &str = "80,86,89,90,120";
const GEOMETRIES: &str = "odd,tiny,0.8b,9b,27b";

struct Options {
    update: bool,
    cache: Option<CubinCache>,
    architectures: Vec<u32>,
    geometries: Vec<Geometry>,
}

fn main() -> ExitCode {
    match options().and_then(|options| run(&options)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(excesses) => {
            eprintln!("error: {excesses} kernel(s) beyond kernels/budget.txt");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn options() -> Result<Options, String> {
    let (mut update, mut cache) = (false, None);
    let (mut architectures, mut geometries) = (ARCHITECTURES.to_owned(), GEOMETRIES.to_owned());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--update" => update = true,
            "--cache" => cache = Some(CubinCache::new(value()?)),
            "--sm" => architectures = value()?,
            "--geometry" => geometries = value()?,
            other => return Err(format!("unknown option {other}")),
        }
    }
    let number = |text: &str| text.parse().map_err(|_| format!("not an architecture: {text}"));
    let geometry = |name: &str| match name {
        "odd" => Ok(odd_geometry()),
        name => Geometry::named(name).ok_or_else(|| format!("unknown geometry {name}")),
    };
    Ok(Options {
        update,
        cache,
        architectures: architectures.split(',').map(number).collect::<Result<_, _>>()?,
        geometries: geometries.split(',').map(geometry).collect::<Result<_, _>>()?,
    })
}

/// Returns how many kernels are beyond the budget.
fn run(options: &Options) -> Result<usize, String> {
    let nvrtc = Nvrtc::find().map_err(|error| {
        format!("{error}; `pip install nvidia-cuda-nvrtc` brings one, QWILL_NVRTC names it")
    })?;
    println!("NVRTC {}", nvrtc.version());
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels/budget.txt");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()));
    let mut budget = if options.update { Budget::default() } else { Budget::parse(&text?)? };
    let mut excesses = 0;
    for sm in &options.architectures {
        for build in builds(&options.geometries)? {
            excesses += compile(&nvrtc, options, &build, *sm, &mut budget)?;
        }
    }
    if options.update {
        std::fs::write(&path, budget.to_string()).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(excesses)
}

/// The units of all geometries with both KV types, each once.
fn builds(geometries: &[Geometry]) -> Result<Vec<UnitBuild>, String> {
    let (mut builds, mut seen) = (Vec::new(), BTreeSet::new());
    for geometry in geometries {
        for build in units_of(geometry, &[KvType::Bf16, KvType::F32])? {
            if seen.insert(build.describe()) {
                builds.push(build);
            }
        }
    }
    Ok(builds)
}

fn compile(
    nvrtc: &Nvrtc,
    options: &Options,
    build: &UnitBuild,
    sm: u32,
    budget: &mut Budget,
) -> Result<usize, String> {
    let compiled = nvrtc.compile(build, sm).map_err(|error| error.to_string())?;
    if let Some(cache) = &options.cache {
        cache.store(&build.key(sm), nvrtc.version(), &compiled.cubin).map_err(|error| error.to_string())?;
    }
    let usages = parse_usage(&compiled.log);
    println!("sm_{sm} {}: {} bytes", build.describe(), compiled.cubin.len());
    let mut excesses = 0;
    for kernel in build.unit.kernels {
        let usage = *usages.get(*kernel).ok_or_else(|| format!("the compiler did not report {kernel}"))?;
        let name = format!("{}/{kernel}", build.unit.name);
        if options.update {
            budget.allow(&name, usage);
        }
        let excess = budget.excess(&name, usage);
        println!("  {kernel:<14} {usage}");
        if let Some(excess) = excess {
            eprintln!("sm_{sm} {}: {kernel}: {excess}", build.describe());
            excesses += 1;
        }
    }
    Ok(excesses)
}
