//! What the assembler says about a kernel, and what it may need at most.

use std::collections::BTreeMap;
use std::fmt;

/// Resources of one kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread spills, stores and loads together.
    pub spill_bytes: u32,
    /// Bytes of static shared memory of a block.
    pub shared_bytes: u32,
}

impl fmt::Display for Usage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { registers, spill_bytes, shared_bytes } = self;
        write!(out, "{registers} registers, {spill_bytes} spilled, {shared_bytes} shared")
    }
}

/// Reads the lines that `ptxas -v` writes: one per kernel, by name.
pub fn parse_usage(log: &str) -> BTreeMap<String, Usage> {
    let mut kernels: BTreeMap<String, Usage> = BTreeMap::new();
    let mut name = String::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            rest.split('\'').next().unwrap_or_default().clone_into(&mut name);
        }
        let mut set = |what: &str, field: fn(&mut Usage) -> &mut u32| {
            if let Some(number) = number_before(line, what) {
                *field(kernels.entry(name.clone()).or_default()) += number;
            }
        };
        set(" bytes spill stores", |usage| &mut usage.spill_bytes);
        set(" bytes spill loads", |usage| &mut usage.spill_bytes);
        set(" registers", |usage| &mut usage.registers);
        set(" bytes smem", |usage| &mut usage.shared_bytes);
    }
    kernels
}

/// The number right before `what`.
fn number_before(line: &str, what: &str) -> Option<u32> {
    let before = &line[..line.find(what)?];
    let digits = before.len() - before.bytes().rev().take_while(u8::is_ascii_digit).count();
    before[digits..].parse().ok()
}

/// What the kernels of each unit may need, over all architectures and geometries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Budget(BTreeMap<String, Usage>);

impl Budget {
    /// Reads lines of `unit/kernel registers shared`; `#` begins a comment.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        let entries = lines.filter(|line| !line.is_empty()).map(|line| {
            let mut words = line.split_whitespace();
            let mut number = || words.next_back()?.parse().ok();
            let (shared_bytes, registers) = (number(), number());
            let entry = words.next().zip(registers.zip(shared_bytes));
            let (name, (registers, shared_bytes)) =
                entry.ok_or_else(|| format!("not `kernel registers shared`: {line}"))?;
            Ok((name.to_owned(), Usage { registers, spill_bytes: 0, shared_bytes }))
        });
        entries.collect::<Result<_, String>>().map(Self)
    }

    /// Raises what is allowed to what is needed.
    pub fn allow(&mut self, kernel: &str, usage: Usage) {
        let entry = self.0.entry(kernel.to_owned()).or_default();
        entry.registers = entry.registers.max(usage.registers);
        entry.shared_bytes = entry.shared_bytes.max(usage.shared_bytes);
    }

    /// What a kernel needs beyond what is allowed, as a sentence.
    pub fn excess(&self, kernel: &str, usage: Usage) -> Option<String> {
        let Some(allowed) = self.0.get(kernel) else { return Some(format!("{usage}, but it has no budget")) };
        let within = usage.spill_bytes == 0
            && usage.registers <= allowed.registers
            && usage.shared_bytes <= allowed.shared_bytes;
        (!within).then(|| format!("{usage}; allowed: {allowed}"))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "# Most registers of a thread and bytes of static shared memory of a block; no kernel may spill."
        )?;
        writeln!(out, "# Written by `cargo xtask kernels --update`.")?;
        for (name, usage) in &self.0 {
            writeln!(out, "{name:<28} {:>4} {:>6}", usage.registers, usage.shared_bytes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'scan' for 'sm_86'
ptxas info    : Function properties for scan
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 3604 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'fold' for 'sm_86'
ptxas info    : Function properties for fold
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers
";

    #[test]
    fn the_assemblers_lines_are_read() {
        let kernels = parse_usage(LOG);
        assert_eq!(kernels.len(), 2);
        assert_eq!(kernels["scan"], Usage { registers: 64, spill_bytes: 16, shared_bytes: 3604 });
        assert_eq!(kernels["fold"], Usage { registers: 48, spill_bytes: 0, shared_bytes: 0 });
    }

    #[test]
    fn a_budget_survives_the_round_trip_and_refuses_what_is_beyond_it() {
        let mut budget = Budget::default();
        let usage = Usage { registers: 64, spill_bytes: 0, shared_bytes: 100 };
        budget.allow("gdn/scan", usage);
        budget.allow("gdn/scan", Usage { registers: 60, ..usage });
        let budget = Budget::parse(&budget.to_string()).unwrap();
        assert_eq!(budget.excess("gdn/scan", usage), None);
        for beyond in [
            Usage { registers: 65, ..usage },
            Usage { spill_bytes: 4, ..usage },
            Usage { shared_bytes: 101, ..usage },
        ] {
            assert!(budget.excess("gdn/scan", beyond).is_some(), "{beyond}");
        }
        assert!(budget.excess("gdn/other", usage).unwrap().contains("no budget"));
    }

    #[test]
    fn a_line_that_is_no_budget_is_an_error_with_the_line() {
        assert!(Budget::parse("gdn/scan 64").unwrap_err().contains("gdn/scan 64"));
        assert!(Budget::parse("gdn/scan many 3").unwrap_err().contains("many"));
    }
}
