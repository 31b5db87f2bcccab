//! Which charts a report becomes.

use std::collections::BTreeMap;

use crate::measure::server_line;
use crate::protocol::Protocol;
use crate::report::{Report, RowReport};
use crate::svg::{Bar, BarChart, Figure, LineChart, Panel, Series};
use crate::table;

/// Throughput and time to the first token against concurrency, prompt reading against length, and a bar for each
/// row of a fixed shape; whatever of it was measured.
pub fn figure(report: &Report) -> Figure {
    let of = |protocol| report.rows.iter().filter(move |row| row.row.protocol == protocol);
    let cohort: Vec<&RowReport> = of(Protocol::Cohort).collect();
    let prefill: Vec<&RowReport> = of(Protocol::Prefill).collect();
    let shaped: Vec<&RowReport> = of(Protocol::Batch).chain(of(Protocol::Long)).collect();
    let mut panels = Vec::new();
    if has_figures(&cohort) {
        panels.extend([throughput(&cohort), first_token(&cohort)].map(Panel::Lines));
    }
    if has_figures(&shaped) {
        panels.push(Panel::Bars(bars(&shaped)));
    }
    if has_figures(&prefill) {
        panels.extend([reading(&prefill), waiting(&prefill)].map(Panel::Lines));
    }
    let conditions = &report.conditions;
    Figure {
        title: server_line(&conditions.server),
        subtitle: format!(
            "measured {} from {}, {} endpoint",
            conditions.started_utc,
            conditions.client_host,
            conditions.dialect.name()
        ),
        panels,
    }
}

fn has_figures(rows: &[&RowReport]) -> bool {
    rows.iter().any(|row| row.first_token_ms.is_some())
}

/// A curve over the concurrency.
fn over_concurrency(name: &str, rows: &[&RowReport], value: fn(&RowReport) -> Option<f64>) -> Series {
    let point = |row: &&RowReport| Some((row.row.concurrency as f64, value(row)?));
    Series { name: name.to_owned(), points: rows.iter().filter_map(point).collect() }
}

fn throughput(cohort: &[&RowReport]) -> LineChart {
    LineChart {
        title: "Chats: throughput".into(),
        x_label: "requests at once".into(),
        y_label: "tokens/s".into(),
        series: vec![
            over_concurrency("decode, all streams", cohort, |row| row.decode_tokens_per_s),
            over_concurrency("overall", cohort, |row| row.output_tokens_per_s),
            over_concurrency("each stream", cohort, |row| row.stream_tokens_per_s),
        ],
    }
}

fn first_token(cohort: &[&RowReport]) -> LineChart {
    LineChart {
        title: "Chats: time to first token".into(),
        x_label: "requests at once".into(),
        y_label: "ms".into(),
        series: vec![
            over_concurrency("median", cohort, |row| row.first_token_ms.map(|first| first.p50)),
            over_concurrency("mean", cohort, |row| row.first_token_ms.map(|first| first.mean)),
            over_concurrency("99 of 100", cohort, |row| row.first_token_ms.map(|first| first.p99)),
        ],
    }
}

/// A curve over the prompt's length for each concurrency.
fn over_length(rows: &[&RowReport], value: fn(&RowReport) -> Option<f64>) -> Vec<Series> {
    let mut curves: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        if let (Some(tokens), Some(value)) = (row.row.prompts.tokens(), value(row)) {
            curves.entry(row.row.concurrency).or_default().push((tokens as f64, value));
        }
    }
    curves
        .into_iter()
        .map(|(concurrency, points)| Series { name: format!("{concurrency} at once"), points })
        .collect()
}

fn reading(prefill: &[&RowReport]) -> LineChart {
    LineChart {
        title: "Reading prompts".into(),
        x_label: "prompt tokens".into(),
        y_label: "prompt tokens/s".into(),
        series: over_length(prefill, |row| row.prompt_tokens_per_s),
    }
}

fn waiting(prefill: &[&RowReport]) -> LineChart {
    LineChart {
        title: "Time to first token, mean".into(),
        x_label: "prompt tokens".into(),
        y_label: "s".into(),
        series: over_length(prefill, |row| row.first_token_ms.map(|first| first.mean / 1e3)),
    }
}

fn bars(rows: &[&RowReport]) -> BarChart {
    let mut bars = Vec::new();
    for row in rows {
        let name = table::name(row);
        let rates = [row.decode_tokens_per_s, row.steady_tokens_per_s, row.output_tokens_per_s];
        for (group, rate) in rates.into_iter().enumerate() {
            // One label for the bars of a row.
            let label = if group == 0 { name.clone() } else { String::new() };
            let Some(value) = rate else { continue };
            bars.push(Bar { label, value, text: table::figure(Some(value)), group });
        }
    }
    BarChart {
        title: "Fixed shapes: throughput (prompt/answer tokens, C requests at once)".into(),
        x_label: "tokens/s".into(),
        groups: ["decode", "steady", "overall"].map(str::to_owned).to_vec(),
        limit: None,
        bars,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Prompts;
    use crate::protocol::Row;
    use crate::report::tests::report_of;
    use crate::sample::Sample;
    use crate::server::Abilities;

    fn row(protocol: Protocol, prompts: Prompts, concurrency: usize) -> RowReport {
        let row = Row { protocol, prompts, concurrency, requests: 1, output_tokens: 3, exact_output: false };
        let sample = Sample {
            chunk_us: vec![100_000, 110_000, 120_000],
            end_us: 120_000,
            prompt_tokens: 16,
            completion_tokens: 3,
            ..Sample::default()
        };
        RowReport::new(&row, 120_000, vec![sample; concurrency], Abilities::default())
    }

    #[test]
    fn what_was_measured_is_drawn() {
        let report = report_of(vec![
            row(Protocol::Cohort, Prompts::Chats, 1),
            row(Protocol::Cohort, Prompts::Chats, 2),
            row(Protocol::Batch, Prompts::RandomTokens(16), 2),
            row(Protocol::Prefill, Prompts::RandomTokens(16), 1),
            row(Protocol::Prefill, Prompts::RandomTokens(32), 1),
        ]);
        let figure = figure(&report);
        assert_eq!(figure.panels.len(), 5);
        let Panel::Lines(throughput) = &figure.panels[0] else { panic!("{figure:?}") };
        assert_eq!(throughput.series[0].points, [(1.0, 100.0), (2.0, 200.0)]);
        let Panel::Bars(bars) = &figure.panels[2] else { panic!("{figure:?}") };
        assert_eq!(bars.bars[0].label, "batch 16/3 C2");
        let Panel::Lines(reading) = &figure.panels[3] else { panic!("{figure:?}") };
        assert_eq!(reading.series[0].points.iter().map(|point| point.0).collect::<Vec<f64>>(), [16.0, 32.0]);
    }

    #[test]
    fn what_was_not_measured_is_not() {
        let skipped =
            RowReport::skipped(&row(Protocol::Prefill, Prompts::RandomTokens(9), 1).row, "x".into());
        assert_eq!(figure(&report_of(vec![skipped])).panels, []);
    }
}
