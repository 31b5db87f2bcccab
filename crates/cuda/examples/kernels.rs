//! Compiles every kernel without a GPU and compares what it needs with `kernels/budget.txt`:
//! `cargo xtask kernels [--update] [--cache DIR] [--pack FILE] [--sm 90,86] [--geometry odd,named]`.
//!
//! `--cache` keeps code and the compiler's report, and takes what is there instead of compiling; a machine without a
//! compiler can use the directory as its kernel cache. `--pack` writes the code into one file for `QWILL_KERNEL_PACK`.
//! `--update` rewrites the budget. Fails on a spill or an excess. NVRTC is the library that `QWILL_NVRTC` names, or the
//! system's newest.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use qwill_cuda::{
    Budget, CompileTarget, Compiled, CubinCache, Nvrtc, Pack, UnitBuild, parse_usage, units_of,
};
use qwill_device::suite::odd_geometry;
use qwill_device::{Geometry, KvType, StateType};

const ARCHITECTURES: &str = "80,86,89,90,120";
const GEOMETRIES: &str = "odd,tiny,0.8b,9b,27b";

/// Zstandard's, the highest that needs no more than a few MB to unpack.
const COMPRESSION_LEVEL: i32 = 19;

struct Options {
    update: bool,
    cache: Option<CubinCache>,
    pack: Option<PathBuf>,
    architectures: Vec<u32>,
    geometries: Vec<Geometry>,
}

/// A unit for an architecture.
type Job = (UnitBuild, u32);

/// A unit's code and report, and whether it was compiled just now.
struct Done {
    code: Compiled,
    is_fresh: bool,
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
    let (mut update, mut cache, mut pack) = (false, None, None);
    let (mut architectures, mut geometries) = (ARCHITECTURES.to_owned(), GEOMETRIES.to_owned());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--update" => update = true,
            "--cache" => cache = Some(CubinCache::new(value()?)),
            "--pack" => pack = Some(PathBuf::from(value()?)),
            "--sm" => architectures = value()?,
            "--geometry" => geometries = value()?,
            other => return Err(format!("unknown option {other}")),
        }
    }
    let number = |text: &str| text.parse().map_err(|_| format!("not an architecture: {text}"));
    Ok(Options {
        update,
        cache,
        pack,
        architectures: architectures.split(',').map(number).collect::<Result<_, _>>()?,
        geometries: geometries.split(',').map(named).collect::<Result<Vec<_>, _>>()?.concat(),
    })
}

/// The geometries of a name: the suite's odd one, all named ones, or one of those.
fn named(name: &str) -> Result<Vec<Geometry>, String> {
    match name {
        "odd" => Ok(vec![odd_geometry()]),
        "named" => Ok(Geometry::NAMES.into_iter().filter_map(Geometry::named).collect()),
        name => Geometry::named(name).map(|one| vec![one]).ok_or_else(|| format!("unknown geometry {name}")),
    }
}

/// Returns how many kernels are beyond the budget.
fn run(options: &Options) -> Result<usize, String> {
    let nvrtc = Nvrtc::find(CompileTarget::default()).map_err(|error| {
        format!("{error}; `pip install nvidia-cuda-nvrtc-cu12` brings one, QWILL_NVRTC names it")
    })?;
    println!("NVRTC {}, {}", nvrtc.version(), nvrtc.file().display());
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels/budget.txt");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()));
    let mut budget = if options.update { Budget::default() } else { Budget::parse(&text?)? };
    let jobs = jobs(options)?;
    let started = Instant::now();
    let compiled = compile_all(&nvrtc, options.cache.as_ref(), &jobs)?;
    let elapsed_s = started.elapsed().as_secs_f64();
    let mut excesses = 0;
    for (job, compiled) in jobs.iter().zip(&compiled) {
        excesses += report(job, &compiled.code, options.update, &mut budget)?;
    }
    let fresh = compiled.iter().filter(|compiled| compiled.is_fresh).count();
    println!("{fresh} of {} units compiled, the others taken from the cache: {elapsed_s:.1} s", jobs.len());
    if options.update {
        write(&path, budget.to_string().as_bytes())?;
    }
    if let Some(pack) = &options.pack {
        write(pack, &join(&jobs, &compiled)?)?;
    }
    Ok(excesses)
}

/// The units of all geometries with all types of KV and states for every architecture, each once.
fn jobs(options: &Options) -> Result<Vec<Job>, String> {
    let (mut builds, mut seen) = (Vec::new(), BTreeSet::new());
    for geometry in &options.geometries {
        for build in units_of(geometry, &KvType::ALL, &[StateType::F16, StateType::F32])? {
            if seen.insert(build.describe()) {
                builds.push(build);
            }
        }
    }
    let of_architecture = |sm: &u32| {
        let builds = builds.iter().filter(|build| build.is_for(*sm));
        builds.map(|build| (build.clone(), *sm)).collect::<Vec<Job>>()
    };
    Ok(options.architectures.iter().flat_map(of_architecture).collect())
}

/// Compiles on every core; the results are in the order of the jobs.
fn compile_all(nvrtc: &Nvrtc, cache: Option<&CubinCache>, jobs: &[Job]) -> Result<Vec<Done>, String> {
    let next = AtomicUsize::new(0);
    let slots: Vec<OnceLock<Result<Done, String>>> = jobs.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(index) else { return };
            // Each index is given out once.
            let _ = slots[index].set(compile(nvrtc, cache, job));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    slots.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// From the cache where it has code and report, otherwise from the compiler.
fn compile(nvrtc: &Nvrtc, cache: Option<&CubinCache>, (build, sm): &Job) -> Result<Done, String> {
    let key = build.key(*sm);
    let fresh = || {
        let code = nvrtc.compile(build, *sm).map_err(|error| error.to_string())?;
        Ok(Done { code, is_fresh: true })
    };
    let Some(cache) = cache else { return fresh() };
    let report = cache.path(&key, nvrtc.version()).with_extension("log");
    if let (Some(cubin), Ok(log)) =
        (cache.load(&key, Some(nvrtc.version())), std::fs::read_to_string(&report))
    {
        return Ok(Done { code: Compiled { cubin, log }, is_fresh: false });
    }
    let done: Done = fresh()?;
    // The code last: where it is, its report is whole.
    std::fs::create_dir_all(report.parent().unwrap_or(Path::new(".")))
        .map_err(|error| format!("{}: {error}", report.display()))?;
    write(&report, done.code.log.as_bytes())?;
    cache.store(&key, nvrtc.version(), &done.code.cubin).map_err(|error| error.to_string())?;
    Ok(done)
}

/// Prints what every kernel of a unit needs; returns how many are beyond the budget.
fn report(
    (build, sm): &Job,
    compiled: &Compiled,
    update: bool,
    budget: &mut Budget,
) -> Result<usize, String> {
    let usages = parse_usage(&compiled.log);
    println!("sm_{sm} {}: {} bytes", build.describe(), compiled.cubin.len());
    let mut excesses = 0;
    for kernel in build.unit.kernels {
        let usage = *usages.get(*kernel).ok_or_else(|| format!("the compiler did not report {kernel}"))?;
        let name = format!("{}/{kernel}", build.unit.name);
        if update {
            budget.allow(&name, usage);
        }
        println!("  {kernel:<14} {usage}");
        if let Some(excess) = budget.excess(&name, usage) {
            eprintln!("sm_{sm} {}: {kernel}: {excess}", build.describe());
            excesses += 1;
        }
    }
    Ok(excesses)
}

/// All code as one file for the binary.
fn join(jobs: &[Job], compiled: &[Done]) -> Result<Vec<u8>, String> {
    let frames = jobs.iter().zip(compiled).map(|((build, sm), compiled)| {
        let frame = zstd::bulk::compress(&compiled.code.cubin, COMPRESSION_LEVEL)
            .map_err(|error| error.to_string())?;
        Ok((build.key(*sm), frame))
    });
    let frames: Vec<(String, Vec<u8>)> = frames.collect::<Result<_, String>>()?;
    let pack = Pack::join(&frames);
    let raw: usize = compiled.iter().map(|compiled| compiled.code.cubin.len()).sum();
    println!("{} units: {raw} bytes of code, {} packed", frames.len(), pack.len());
    Ok(pack)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}
