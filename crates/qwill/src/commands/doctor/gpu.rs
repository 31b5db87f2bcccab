//! The driver, each GPU and who else uses it.

use std::path::Path;

use qwill_cuda::{
    DriverFacts, EccStatus, GpuFacts, GpuStatus, LEAST_SM, MemoryHolder, MemoryUse, Nvml, NvmlError,
    PcieLink, PowerStatus, ProbeError, Throttle,
};

use super::Finding;
use crate::units;

/// Oldest CUDA whose driver (525) has every function that is called.
const LEAST_CUDA: (u32, u32) = (12, 0);

/// Others may hold this much before it is worth a word: a desktop's windows.
const MODEST_BYTES: u64 = 1 << 30;

/// Less than this fits no model with its context.
const LITTLE_BYTES: u64 = 2 << 30;

/// A limit this close to the default is the default.
const SAME_LIMIT: f64 = 0.99;

/// Whether the kernel's side of NVIDIA's driver is loaded.
pub(super) fn has_device_files() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// The driver, and the library that knows more about its GPUs.
pub(super) fn driver(
    facts: &Result<DriverFacts, ProbeError>,
    nvml: Result<&Nvml, &NvmlError>,
    has_device_files: bool,
) -> Vec<Finding> {
    let version = nvml.ok().and_then(|nvml| nvml.driver_version().ok());
    let mut findings = vec![loaded(facts, version.as_deref(), has_device_files)];
    if let (Ok(_), Err(error)) = (facts, nvml) {
        let advice = "memory holders, error correction, power and clocks stay unknown; models run all the same. In \
                      a container, NVIDIA_DRIVER_CAPABILITIES must have `utility`";
        findings.push(Finding::warning("management", error.to_string(), advice));
    }
    findings
}

fn loaded(facts: &Result<DriverFacts, ProbeError>, version: Option<&str>, has_device_files: bool) -> Finding {
    let needs =
        "an NVIDIA GPU of compute capability 8.0 or newer (RTX 30, A100 and later) and driver 525 or newer";
    match facts {
        Ok(facts) if facts.gpus.is_empty() => Finding::warning(
            "driver",
            "installed, but it shows no GPU",
            "see whether CUDA_VISIBLE_DEVICES hides it, or the container was started without it",
        ),
        Ok(DriverFacts { cuda_version: (major, minor), gpus }) => {
            let count = gpus.len();
            let version = version.unwrap_or("unknown version");
            let plural = if count == 1 { "" } else { "s" };
            let found = format!("{version}, CUDA {major}.{minor}, {count} GPU{plural}");
            if (*major, *minor) < LEAST_CUDA {
                return Finding::problem("driver", found, "too old: install 525 or newer");
            }
            Finding::ok("driver", found)
        }
        Err(error @ ProbeError::NoDriver) if has_device_files => Finding::problem(
            "driver",
            format!("{error}, though the system has an NVIDIA device"),
            "in a container: start it with the GPU (`--gpus all`), NVIDIA_DRIVER_CAPABILITIES with `compute`. \
             Elsewhere: install the driver's libraries of the version that is loaded",
        ),
        Err(error @ ProbeError::Refused(_)) if has_device_files => Finding::problem(
            "driver",
            error.to_string(),
            "`nvidia-smi` may say more; after an update of the driver, restart the machine",
        ),
        Err(error) => {
            Finding::warning("driver", error.to_string(), format!("to use a GPU, this machine needs {needs}"))
        }
    }
}

/// Everything about one GPU; `name_of` names a process.
pub(super) fn findings(
    facts: &GpuFacts,
    status: Option<&GpuStatus>,
    name_of: &dyn Fn(u32) -> Option<String>,
) -> Vec<Finding> {
    let mut findings = vec![model(facts)];
    let Some(status) = status else { return findings };
    findings.extend(status.memory.map(|use_| memory(use_, status.holders.as_deref(), name_of)));
    findings.extend(status.ecc.map(error_correction));
    findings.extend(status.power.map(power));
    findings.extend(clocks("clocks", status));
    findings.extend(status.persistence.map(persistence));
    findings.extend(status.link.map(link));
    if status.divided == Some(true) {
        findings.push(Finding::ok("instances", "the GPU is divided (MIG); the driver shows one part of it"));
    }
    findings
}

fn model(facts: &GpuFacts) -> Finding {
    let GpuFacts { name, sm, memory_bytes, multiprocessors, .. } = facts;
    let found =
        format!("{name}, sm_{sm}, {multiprocessors} multiprocessors, {}", units::bytes(*memory_bytes));
    if *sm < LEAST_SM {
        let advice = format!("the kernels need sm_{LEAST_SM} or newer: models run on the processor");
        return Finding::problem("model", found, advice);
    }
    Finding::ok("model", found)
}

fn memory(
    memory: MemoryUse,
    holders: Option<&[MemoryHolder]>,
    name_of: &dyn Fn(u32) -> Option<String>,
) -> Finding {
    let mut found =
        format!("{} free of {}", units::bytes(memory.free_bytes), units::bytes(memory.total_bytes));
    let holders: Vec<String> = holders.unwrap_or_default().iter().map(|one| holder(*one, name_of)).collect();
    if !holders.is_empty() {
        found = format!("{found}; held by {}", holders.join(", "));
    } else if memory.used_bytes > MODEST_BYTES {
        found = format!("{found}; {} held by processes that are not shown", units::bytes(memory.used_bytes));
    }
    if memory.free_bytes < LITTLE_BYTES {
        return Finding::problem("memory", found, "too little for a model: stop the processes that hold it");
    }
    if memory.used_bytes > MODEST_BYTES {
        let advice = "a model gets what is free when it starts: stop them before, or plan with less";
        return Finding::warning("memory", found, advice);
    }
    Finding::ok("memory", found)
}

fn holder(MemoryHolder { pid, bytes }: MemoryHolder, name_of: &dyn Fn(u32) -> Option<String>) -> String {
    let name = name_of(pid).map_or(String::new(), |name| format!("{name}, "));
    let bytes = bytes.map_or_else(|| "unknown amount".to_owned(), units::bytes);
    format!("process {pid} ({name}{bytes})")
}

/// The name of a process of this machine; none in a container that does not see it.
pub(super) fn process_name(pid: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

fn error_correction(ecc: EccStatus) -> Finding {
    let EccStatus { enabled, pending, corrected_errors, uncorrected_errors } = ecc;
    let mut found = if enabled { "on" } else { "off" }.to_owned();
    if pending != enabled {
        found = format!("{found}, {} after a restart", if pending { "on" } else { "off" });
    }
    let (corrected, uncorrected) = (corrected_errors.unwrap_or(0), uncorrected_errors.unwrap_or(0));
    if enabled {
        found = format!("{found}; {corrected} errors corrected, {uncorrected} not");
    }
    if uncorrected > 0 {
        let advice = "the memory returned wrong bits since the driver was loaded: answers cannot be trusted. Restart \
                      the machine; if it comes back, the card is failing";
        return Finding::problem("error correction", found, advice);
    }
    Finding::ok("error correction", found)
}

fn power(power: PowerStatus) -> Finding {
    let draw = power.draw_w.map_or(String::new(), |watts| format!(", {watts:.0} W now"));
    let Some(default_w) = power.default_limit_w.filter(|default| *default > 0.0) else {
        return Finding::ok("power limit", format!("{:.0} W{draw}", power.limit_w));
    };
    let found = format!("{:.0} W of {default_w:.0} W{draw}", power.limit_w);
    if power.limit_w < default_w * SAME_LIMIT {
        let advice = format!(
            "a lower limit saves power and costs speed, more of it in prompts than in answers; `nvidia-smi -pl \
             {default_w:.0}` as root takes it back"
        );
        return Finding::warning("power limit", found, advice);
    }
    Finding::ok("power limit", found)
}

/// Clock and what holds it down, at this moment.
pub(super) fn clocks(name: &'static str, status: &GpuStatus) -> Option<Finding> {
    let clock = status.clock_mhz?;
    let most = status.most_clock_mhz.map_or(String::new(), |most| format!(" of {most}"));
    let heat = status.temperature_c.map_or(String::new(), |degrees| format!(", {degrees} °C"));
    let throttles = status.throttles.as_deref().unwrap_or_default();
    let reasons: Vec<&str> = throttles.iter().map(|reason| reason.name()).collect();
    let held = if reasons.is_empty() { String::new() } else { format!("; held by {}", reasons.join(", ")) };
    let found = format!("{clock}{most} MHz{heat}{held}");
    let has = |wanted: &[Throttle]| throttles.iter().any(|reason| wanted.contains(reason));
    let advice = if has(&[Throttle::Heat, Throttle::HardwareHeat]) {
        "too hot: speed falls until it is cooled better"
    } else if has(&[Throttle::HardwareSlowdown, Throttle::PowerBrake]) {
        "the board protects itself: look at its power cables and supply"
    } else if has(&[Throttle::FixedClocks]) {
        "somebody fixed the clocks: `nvidia-smi -rgc` and `nvidia-smi -rac` as root take it back"
    } else {
        return Some(Finding::ok(name, found));
    };
    Some(Finding::warning(name, found, advice))
}

fn persistence(on: bool) -> Finding {
    let found = if on {
        "on"
    } else {
        "off: the driver unloads while nobody uses the GPU, and starts then take longer"
    };
    Finding::ok("persistence", found)
}

fn link(link: PcieLink) -> Finding {
    let PcieLink { generation, lanes, most_generation, most_lanes } = link;
    let found = format!("PCIe {generation} x{lanes}, at most {most_generation} x{most_lanes}");
    if lanes < most_lanes {
        let advice = "fewer lanes than the card has: weights load more slowly, answers are as fast. Another slot has \
                      more";
        return Finding::warning("link", found, advice);
    }
    Finding::ok("link", found)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    fn facts(sm: u32) -> GpuFacts {
        GpuFacts {
            name: "Made-up 9000".into(),
            uuid: "GPU-1".into(),
            sm,
            memory_bytes: 24 << 30,
            multiprocessors: 80,
            memory_bytes_per_s: Some(9e11),
        }
    }

    fn status() -> GpuStatus {
        let bytes = |used| MemoryUse {
            total_bytes: 24 << 30,
            reserved_bytes: 0,
            used_bytes: used,
            free_bytes: (24 << 30) - used,
        };
        GpuStatus {
            uuid: "GPU-1".into(),
            name: "Made-up 9000".into(),
            memory: Some(bytes(0)),
            holders: Some(Vec::new()),
            ecc: None,
            power: Some(PowerStatus { limit_w: 350.0, default_limit_w: Some(350.0), draw_w: Some(20.4) }),
            clock_mhz: Some(210),
            most_clock_mhz: Some(1980),
            throttles: Some(vec![Throttle::Idle]),
            temperature_c: Some(31),
            persistence: Some(true),
            link: Some(PcieLink { generation: 1, lanes: 16, most_generation: 4, most_lanes: 16 }),
            divided: None,
        }
    }

    fn levels(facts: &GpuFacts, status: &GpuStatus) -> Vec<(&'static str, Level)> {
        let findings = findings(facts, Some(status), &|_| None);
        let bad = findings.iter().filter(|finding| finding.level != Level::Ok);
        bad.map(|finding| (finding.name, finding.level)).collect()
    }

    #[test]
    fn a_gpu_that_is_as_it_should_be_has_nothing_but_ok_lines() {
        assert_eq!(levels(&facts(86), &status()), []);
        let findings = findings(&facts(86), Some(&status()), &|_| None);
        let names: Vec<&str> = findings.iter().map(|finding| finding.name).collect();
        assert_eq!(names, ["model", "memory", "power limit", "clocks", "persistence", "link"]);
        assert_eq!(findings[3].found, "210 of 1980 MHz, 31 °C; held by idle");
    }

    #[test]
    fn everything_that_costs_speed_is_a_warning() {
        let power = PowerStatus { limit_w: 250.0, default_limit_w: Some(350.0), draw_w: None };
        let link = PcieLink { generation: 4, lanes: 4, most_generation: 4, most_lanes: 16 };
        let slow = GpuStatus {
            power: Some(power),
            link: Some(link),
            throttles: Some(vec![Throttle::PowerLimit, Throttle::HardwareHeat]),
            ..status()
        };
        let warnings = ["power limit", "clocks", "link"].map(|name| (name, Level::Warning));
        assert_eq!(levels(&facts(86), &slow), warnings);
        let limited = GpuStatus { throttles: Some(vec![Throttle::PowerLimit]), ..status() };
        assert_eq!(levels(&facts(86), &limited), [], "a card at its power limit does its work");
    }

    #[test]
    fn what_makes_answers_wrong_or_impossible_is_a_problem() {
        let ecc = |uncorrected| EccStatus {
            enabled: true,
            pending: true,
            corrected_errors: Some(2),
            uncorrected_errors: Some(uncorrected),
        };
        assert_eq!(levels(&facts(86), &GpuStatus { ecc: Some(ecc(0)), ..status() }), []);
        let failing = GpuStatus { ecc: Some(ecc(1)), ..status() };
        assert_eq!(levels(&facts(86), &failing), [("error correction", Level::Problem)]);
        assert_eq!(levels(&facts(75), &status()), [("model", Level::Problem)]);
    }

    #[test]
    fn who_holds_the_memory_is_named() {
        let use_ =
            MemoryUse { total_bytes: 24 << 30, reserved_bytes: 0, used_bytes: 6 << 30, free_bytes: 18 << 30 };
        let holders = [(7, Some(6 << 30)), (8, None)].map(|(pid, bytes)| MemoryHolder { pid, bytes });
        let name_of = |pid| (pid == 7).then(|| "python3".to_owned());
        let finding = memory(use_, Some(&holders), &name_of);
        assert_eq!(finding.level, Level::Warning);
        assert!(
            finding.found.ends_with("held by process 7 (python3, 6.44 GB), process 8 (unknown amount)"),
            "{finding:?}"
        );
        let hidden = memory(use_, None, &name_of);
        assert!(hidden.found.contains("6.44 GB held by processes that are not shown"), "{hidden:?}");
        let full = MemoryUse { free_bytes: 1 << 30, ..use_ };
        assert_eq!(memory(full, None, &name_of).level, Level::Problem);
    }

    #[test]
    fn a_missing_driver_is_a_problem_only_where_there_is_a_gpu() {
        let level = |facts: &Result<DriverFacts, ProbeError>, files| loaded(facts, None, files).level;
        let refused = Err(ProbeError::Refused("no device".into()));
        assert_eq!(level(&Err(ProbeError::NoDriver), false), Level::Warning);
        assert_eq!(level(&Err(ProbeError::NoDriver), true), Level::Problem);
        assert_eq!(level(&refused, false), Level::Warning);
        assert_eq!(level(&refused, true), Level::Problem);
        let of = |cuda_version, gpus| Ok(DriverFacts { cuda_version, gpus });
        assert_eq!(level(&of((12, 8), vec![facts(86)]), true), Level::Ok);
        assert_eq!(level(&of((11, 8), vec![facts(86)]), true), Level::Problem);
        assert_eq!(level(&of((12, 8), Vec::new()), true), Level::Warning);
        let error = NvmlError::NotInstalled { reason: "not found".into() };
        let findings = driver(&of((12, 8), vec![facts(86)]), Err(&error), true);
        assert_eq!((findings[1].name, findings[1].level), ("management", Level::Warning));
        assert_eq!(driver(&Err(ProbeError::NoDriver), Err(&error), false).len(), 1);
    }
}
