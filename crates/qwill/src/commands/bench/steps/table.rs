//! The report for people.

use std::fmt::Write as _;

use super::report::{OpReport, Report, StepReport};
use crate::units;

/// What is not known.
const NONE: &str = "n/a";

/// Ceilings, one line a step, then the ops of every step.
pub(super) fn text(report: &Report) -> String {
    let conditions = &report.conditions;
    let mut text = format!(
        "{} on {}, {}\ncontext {} tokens, the best of {} steps\n\n",
        conditions.model,
        conditions.device,
        conditions.numerics,
        conditions.context_tokens,
        conditions.repeats
    );
    if !conditions.left_out.is_empty() {
        let _ = writeln!(text, "left out, more than the memory holds: {}\n", conditions.left_out.join(", "));
    }
    ceilings(&mut text, report);
    steps(&mut text, &report.steps);
    for step in &report.steps {
        ops(&mut text, step);
    }
    text
}

fn ceilings(text: &mut String, report: &Report) {
    let ceilings = &report.ceilings;
    let giga = |rate: Option<f64>| figure(rate.map(|rate| rate / 1e9), 0);
    let tera = |rate: Option<f64>| figure(rate.map(|rate| rate / 1e12), 1);
    let reads: Vec<String> = ceilings
        .reads
        .iter()
        .map(|rate| format!("{} at {}", giga(Some(rate.bytes_per_s)), units::bytes(rate.bytes)))
        .collect();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "ceilings, measured now\n  reads GB/s: {}", reads.join(", "));
    let _ = writeln!(
        text,
        "  copy GB/s: {}; matrices TFLOP/s: {}; int8 TOP/s: {}; the rest TFLOP/s: {}; launch us: {}\n",
        giga(ceilings.copy_bytes_per_s),
        tera(ceilings.matrix_per_s),
        tera(ceilings.int8_per_s),
        tera(ceilings.vector_per_s),
        figure(ceilings.launch_us, 1),
    );
}

fn steps(text: &mut String, steps: &[StepReport]) {
    let heading = [
        "step",
        "best us",
        "median us",
        "tok/s",
        "floor us",
        "floor/best",
        "kernels us",
        "launches",
        "gap us",
        "GB",
        "TFLOP",
    ];
    let rows = steps.iter().map(|step| {
        vec![
            step.name.clone(),
            figure(Some(step.wall_us), 0),
            figure(Some(step.median_us), 0),
            figure(Some(step.tokens_per_s()), 1),
            figure(step.floor_us(), 0),
            percent(step.share()),
            figure(step.kernels_us(), 0),
            step.launches().map_or(NONE.to_owned(), |count| count.to_string()),
            figure(step.gap_us(), 0),
            figure(Some(step.bytes() as f64 / 1e9), 3),
            figure(Some(step.operations() as f64 / 1e12), 3),
        ]
    });
    table(text, &heading, rows);
}

fn ops(text: &mut String, step: &StepReport) {
    let _ = writeln!(text, "\n{}", step.name);
    let heading = [
        "op", "launches", "us", "floor us", "floor/us", "MB", "GB/s", "of reads", "GFLOP", "TFLOP/s",
        "of rate",
    ];
    let rows = step.ops.iter().map(|op: &OpReport| {
        vec![
            op.op.to_owned(),
            op.launches.map_or(NONE.to_owned(), |count| count.to_string()),
            figure(op.us, 1),
            figure(op.floor_us, 1),
            percent(op.share()),
            figure(Some(op.bytes as f64 / 1e6), 1),
            figure(op.bytes_per_s().map(|rate| rate / 1e9), 0),
            percent(op.read_share),
            figure(Some(op.operations as f64 / 1e9), 2),
            figure(op.operations_per_s().map(|rate| rate / 1e12), 2),
            percent(op.arithmetic_share),
        ]
    });
    table(text, &heading, rows);
}

/// Columns as wide as their longest cell, the first one left, the others right.
fn table(text: &mut String, heading: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let heading: Vec<String> = heading.iter().map(|name| (*name).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(heading).chain(rows).collect();
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 => write!(line, "  {cell:width$}"),
                _ => write!(line, "  {cell:>width$}"),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

fn figure(value: Option<f64>, decimals: usize) -> String {
    value.map_or(NONE.to_owned(), |value| format!("{value:.decimals$}"))
}

fn percent(share: Option<f64>) -> String {
    share.map_or(NONE.to_owned(), |share| format!("{:.0} %", share * 100.0))
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn every_figure_has_its_place() {
        insta::assert_snapshot!(text(&report()));
    }
}
