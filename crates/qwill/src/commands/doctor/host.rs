//! The processor, the memory, and where a model's files are.

use std::path::Path;

use anyhow::Error;
use qwill_cpu::fast::Isa;
use qwill_device::Geometry;
use qwill_weights::Checkpoint;

use super::Finding;
use crate::{failure, units};

/// Less free memory than this is too little for most models of the family.
const LITTLE_MEMORY_BYTES: u64 = 2 << 30;

/// File systems behind a network, or behind a program.
const SLOW_FILE_SYSTEMS: [&str; 6] = ["nfs", "cifs", "smb", "9p", "fuse", "ceph"];

/// Cores, instructions and free memory.
pub(super) fn processor_and_memory() -> Vec<Finding> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    vec![processor(cores, Isa::best()), memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())]
}

fn processor(cores: usize, isa: Isa) -> Finding {
    let found = format!("{cores} core{}, {isa}", if cores == 1 { "" } else { "s" });
    match isa {
        Isa::Scalar => Finding::warning(
            "processor",
            found,
            "without AVX2 only the portable kernels run, many times slower; a GPU does not mind",
        ),
        Isa::Avx2 | Isa::Avx512 => Finding::ok("processor", found),
    }
}

/// From the text of /proc/meminfo.
fn memory(meminfo: &str) -> Finding {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    };
    let Some((free, all)) = bytes("MemAvailable").zip(bytes("MemTotal")) else {
        return Finding::warning("memory", "unknown", "the system does not say: give --memory when serving");
    };
    let found = format!("{} free of {}", units::bytes(free), units::bytes(all));
    if free < LITTLE_MEMORY_BYTES {
        let advice = "only the smallest models fit the processor's memory: stop other programs";
        return Finding::warning("memory", found, advice);
    }
    Finding::ok("memory", found)
}

/// The disk that a model's files are on.
pub(super) fn model_directory(directory: &Path) -> Vec<Finding> {
    let Ok(whole) = directory.canonicalize() else {
        // What is wrong with the directory is said where it is opened as a checkpoint.
        return Vec::new();
    };
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let free = rustix::fs::statvfs(&whole).map(|disk| disk.f_bavail * disk.f_frsize).ok();
    vec![disk(&whole, &mounts, free)]
}

fn disk(directory: &Path, mounts: &str, free: Option<u64>) -> Finding {
    let Some(mount) = Mount::of(directory, mounts) else {
        return Finding::ok("disk", "unknown");
    };
    let free = free.map_or(String::new(), |bytes| format!(", {} free", units::bytes(bytes)));
    let found = format!("{} on {}{free}", mount.kind, mount.point);
    if SLOW_FILE_SYSTEMS.iter().any(|slow| mount.kind.starts_with(slow)) {
        let advice = "weights load no faster than this file system delivers them: a copy on a local disk starts faster";
        return Finding::warning("disk", found, advice);
    }
    Finding::ok("disk", found)
}

/// A line of /proc/self/mountinfo.
struct Mount<'a> {
    point: &'a str,
    /// File system.
    kind: &'a str,
}

impl<'a> Mount<'a> {
    /// The mount that a path is on: the last of those with the longest point.
    fn of(path: &Path, mounts: &'a str) -> Option<Self> {
        let parse = |line: &'a str| {
            let (left, right) = line.split_once(" - ")?;
            Some(Self { point: left.split(' ').nth(4)?, kind: right.split(' ').next()? })
        };
        let on = mounts.lines().filter_map(parse).filter(|mount| path.starts_with(mount.point));
        on.max_by_key(|mount| mount.point.len())
    }
}

/// Whether the directory is a checkpoint; its geometry where it is.
pub(super) fn checkpoint(opened: Result<&Checkpoint, &Error>) -> (Finding, Option<Geometry>) {
    match opened {
        Ok(checkpoint) => {
            let geometry = &checkpoint.config().geometry;
            let found = format!(
                "{}, {} layers of width {}, {}",
                geometry.name,
                geometry.layers.len(),
                units::grouped(geometry.hidden),
                units::bytes(checkpoint.total_bytes()),
            );
            (Finding::ok("checkpoint", found), Some(geometry.clone()))
        }
        Err(error) => {
            let advice = failure::hint(error).unwrap_or_else(|| "see the message".to_owned());
            (Finding::problem("checkpoint", format!("{error:#}"), advice), None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt rw shared:2 - tmpfs tmpfs rw
31 30 0:41 / /mnt/models rw - nfs4 server:/models rw
";

    #[test]
    fn a_disk_is_the_one_with_the_longest_mount_point() {
        let disk = |path: &str| disk(Path::new(path), MOUNTS, Some(5 << 30));
        let remote = disk("/mnt/models/a");
        assert_eq!(
            (remote.level, remote.found.as_str()),
            (Level::Warning, "nfs4 on /mnt/models, 5.37 GB free")
        );
        assert_eq!(disk("/mnt/b"), Finding::ok("disk", "tmpfs on /mnt, 5.37 GB free"));
        assert_eq!(disk("/home"), Finding::ok("disk", "ext4 on /, 5.37 GB free"));
    }

    #[test]
    fn memory_and_processor_are_warned_about_when_there_is_little() {
        let text =
            |free_kib: u64| format!("MemTotal:  8000000 kB\nMemFree: 1 kB\nMemAvailable: {free_kib} kB\n");
        assert_eq!(memory(&text(4_000_000)), Finding::ok("memory", "4.10 GB free of 8.19 GB"));
        assert_eq!(memory(&text(1000)).level, Level::Warning);
        assert_eq!(memory("").level, Level::Warning);
        assert_eq!(processor(1, Isa::Avx2), Finding::ok("processor", "1 core, avx2"));
        assert_eq!(processor(8, Isa::Scalar).level, Level::Warning);
    }

    #[test]
    fn a_checkpoint_that_cannot_be_read_is_a_problem_with_the_advice_of_its_error() {
        let error = failure::Hinted::error("no config.json", "fetch it");
        let (finding, geometry) = checkpoint(Err(&error));
        assert_eq!(finding, Finding::problem("checkpoint", "no config.json", "fetch it"));
        assert_eq!(geometry, None);
    }
}
