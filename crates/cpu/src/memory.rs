//! How much memory the operating system has for this process.

use std::path::Path;

/// Memory that the operating system says is available, within the limit of the process's control group (a container's);
/// without an answer, no limit.
pub fn available_memory_bytes() -> u64 {
    let read = |path: &str| std::fs::read_to_string(Path::new(path)).unwrap_or_default();
    let of_machine = meminfo_available(&read("/proc/meminfo")).unwrap_or(u64::MAX);
    let group = "/sys/fs/cgroup/memory";
    let of_group = group_available(
        &read(&format!("{group}.max")),
        &read(&format!("{group}.current")),
        &read(&format!("{group}.stat")),
    );
    of_machine.min(of_group.unwrap_or(u64::MAX))
}

fn meminfo_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// What a control group may still take: files that are cached make room.
fn group_available(max: &str, current: &str, stat: &str) -> Option<u64> {
    let limit: u64 = max.trim().parse().ok()?;
    let used: u64 = current.trim().parse().ok()?;
    let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_read() {
        let meminfo = "MemTotal:  8000000 kB\nMemFree: 1 kB\nMemAvailable: 5000000 kB\n";
        assert_eq!(meminfo_available(meminfo), Some(5_000_000 * 1024));
        assert_eq!(meminfo_available(""), None);
    }

    #[test]
    fn a_container_has_its_limit() {
        let stat = "anon 300\nfile 500\ninactive_file 400\n";
        assert_eq!(group_available("1000\n", "700\n", stat), Some(700));
        assert_eq!(group_available("1000\n", "2000\n", ""), Some(0));
        assert_eq!(group_available("max\n", "700\n", stat), None);
        assert_eq!(group_available("", "", ""), None);
    }
}
