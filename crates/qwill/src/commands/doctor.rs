//! `qwill doctor`: what is on this machine, what is wrong with it, and what to do about that.

mod gpu;
mod host;
mod kernels;
mod self_test;

use std::io::Write;

use anyhow::Result;
use qwill_cuda::{CubinCache, Nvml};
use qwill_device::Geometry;

use crate::args::DoctorArgs;
use crate::failure::Hinted;
use crate::report::{Finding, Level, Report};
use crate::source::ModelSource;
use crate::terminal;

/// Geometry whose kernels are looked up where no model is named: that of the embedded model.
const SMALLEST: &str = "tiny";

/// Prints what was found; problems make it an error.
pub(crate) fn run(arguments: &DoctorArgs) -> Result<()> {
    let report = examine(arguments);
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{:#}", report.as_json(conclusion(&report)))?;
    } else {
        writeln!(out, "{}", terminal::bold(&format!("Qwill {}", crate::VERSION)))?;
        writeln!(out, "{report}\n{}", conclusion(&report))?;
    }
    match report.count(Level::Problem) {
        0 => Ok(()),
        1 => Err(Hinted::error("there is a problem", "the line marked `problem` says what to do")),
        count => Err(Hinted::error(
            format!("there are {count} problems"),
            "the lines marked `problem` say what to do",
        )),
    }
}

fn examine(arguments: &DoctorArgs) -> Report {
    let mut report = Report::default();
    report.section("host", host::processor_and_memory());
    let mut geometry = Geometry::named(SMALLEST);
    if let Some(directory) = &arguments.model_dir {
        report.section("model", host::model_directory(directory));
        let checkpoint = ModelSource::Directory(directory.clone()).checkpoint(qwill_weights::Quantize::None);
        let (found, read) = host::checkpoint(checkpoint.as_ref());
        report.section("model", vec![found]);
        geometry = read.or(geometry);
    }

    // Asked before this process holds memory of a GPU itself.
    let driver = qwill_cuda::driver_facts();
    let nvml = Nvml::open();
    let statuses = nvml.as_ref().ok().and_then(|nvml| nvml.gpus().ok()).unwrap_or_default();
    report.section("driver", gpu::driver(&driver, nvml.as_ref(), gpu::has_device_files()));
    let gpus = driver.as_ref().map_or(&[][..], |driver| &driver.gpus);
    for (ordinal, facts) in gpus.iter().enumerate() {
        let status = statuses.iter().find(|status| status.uuid == facts.uuid);
        report.section(&format!("gpu {ordinal}"), gpu::findings(facts, status, &gpu::process_name));
    }

    let cache = arguments.kernel_cache.clone().or_else(CubinCache::default_directory);
    let architectures: Vec<u32> = gpus.iter().map(|gpu| gpu.sm).collect();
    let cuda_version = driver.as_ref().ok().map(|driver| driver.cuda_version);
    report.section(
        "kernels",
        kernels::findings(cache.as_deref(), geometry.as_ref(), &architectures, cuda_version),
    );

    report.section("self-test", vec![self_test::processor()]);
    for (ordinal, facts) in gpus.iter().enumerate().filter(|(_, gpu)| gpu.sm >= qwill_cuda::LEAST_SM) {
        report.section(
            &format!("gpu {ordinal}"),
            self_test::gpu(ordinal, facts, cache.as_deref(), nvml.as_ref().ok()),
        );
    }
    report
}

/// One sentence about what runs now.
fn conclusion(report: &Report) -> &'static str {
    let gpu_works =
        report.findings().any(|finding| finding.name == "correctness" && finding.level == Level::Ok);
    match (report.count(Level::Problem), gpu_works) {
        (0, true) => "Models run on the GPU and on the processor.",
        (0, false) => "Models run on the processor: `qwill serve` works. There is no GPU that Qwill can use.",
        (_, true) => "Models run, but something needs attention.",
        (_, false) => "Something must be put right before models run as they should.",
    }
}
