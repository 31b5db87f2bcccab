//! How much of the floor is reached, op by op, drawn.

use qwill_bench::svg::{Bar, BarChart, Figure, Panel};

use super::report::{Report, StepReport};

/// Ops that take less of a step than this are not drawn.
const LEAST_PART: f64 = 0.01;

/// A bar for every step, then for every step one bar an op: its floor over its time.
pub(super) fn svg(report: &Report) -> String {
    let conditions = &report.conditions;
    let mut panels = vec![Panel::Bars(steps(&report.steps))];
    let drawn = report.steps.iter().map(ops).filter(|chart| !chart.bars.is_empty());
    panels.extend(drawn.map(Panel::Bars));
    Figure {
        title: format!("Steps of {}", conditions.model),
        subtitle: format!(
            "{}, {}, context {} tokens; the floor is measured in the same run",
            conditions.device, conditions.numerics, conditions.context_tokens
        ),
        panels,
    }
    .to_svg()
}

fn steps(steps: &[StepReport]) -> BarChart {
    let bars = steps.iter().map(|step| Bar {
        label: step.name.clone(),
        value: 100.0 * step.share().unwrap_or(0.0),
        text: format!("{:.2} ms, {:.0} tok/s", step.wall_us / 1e3, step.tokens_per_s()),
        group: 0,
    });
    chart("Whole steps", bars.collect())
}

fn ops(step: &StepReport) -> BarChart {
    let all_us = step.kernels_us().unwrap_or(0.0);
    let bars = step.ops.iter().filter_map(|op| {
        let us = op.us.filter(|us| *us >= all_us * LEAST_PART)?;
        let part = us / all_us * 100.0;
        let value = 100.0 * op.share()?;
        Some(Bar {
            label: op.op.to_owned(),
            value,
            text: format!("{value:.0} %, {us:.0} us, {part:.0} % of the step"),
            group: 0,
        })
    });
    chart(&step.name, bars.collect())
}

fn chart(title: &str, bars: Vec<Bar>) -> BarChart {
    BarChart {
        title: title.to_owned(),
        x_label: "floor over time, %".to_owned(),
        groups: vec!["floor over time".to_owned()],
        limit: Some(100.0),
        bars,
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn every_step_and_every_op_that_matters_is_drawn() {
        let svg = svg(&report());
        assert!(
            svg.starts_with("<svg") && svg.contains("decode 1 x 1") && svg.contains("prefill 64"),
            "{svg}"
        );
        assert!(svg.contains("norm_linears") && svg.contains("1.50 ms"), "{svg}");
        // A millionth of the step.
        assert!(!svg.contains("embed"), "{svg}");
    }
}
