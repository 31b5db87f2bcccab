//! A report for people: one table per kind of row.

use std::fmt::Write as _;

use crate::measure::server_line;
use crate::protocol::{Prompts, Protocol};
use crate::report::{Report, RowReport};
use crate::stats::Summary;

/// A heading over one or more columns, the columns' own headings below it, and their cells.
struct Columns {
    heading: &'static str,
    names: &'static [&'static str],
    cells: fn(&RowReport) -> Vec<String>,
}

/// Rows that generate.
const GENERATION: [Columns; 5] = [
    Columns {
        heading: "",
        names: &["", "C", "n", "prompt", "answer"],
        cells: |row| {
            let mean = |tokens: Option<Summary>| figure(tokens.map(|tokens| tokens.mean));
            vec![
                row.row.protocol.name().to_owned(),
                row.row.concurrency.to_string(),
                requests(row),
                mean(row.prompt_tokens),
                mean(row.completion_tokens),
            ]
        },
    },
    FIRST_TOKEN,
    Columns {
        heading: "between chunks, ms",
        names: &["p50", "p90", "p99"],
        cells: |row| row.gap_ms.map_or(vec![NONE.into(); 3], |gap| figures(&[gap.p50, gap.p90, gap.p99])),
    },
    Columns {
        heading: "tokens/s",
        names: &["stream", "decode", "steady", "overall"],
        cells: |row| {
            let rates = [
                row.stream_tokens_per_s,
                row.decode_tokens_per_s,
                row.steady_tokens_per_s,
                row.output_tokens_per_s,
            ];
            rates.map(figure).to_vec()
        },
    },
    WALL,
];

/// Rows that read prompts.
const PREFILL: [Columns; 4] = [
    Columns {
        heading: "",
        names: &["", "prompt", "C", "n"],
        cells: |row| {
            let tokens = row.row.prompts.tokens().map_or(NONE.to_owned(), |tokens| tokens.to_string());
            let protocol = row.row.protocol.name().to_owned();
            vec![protocol, tokens, row.row.concurrency.to_string(), requests(row)]
        },
    },
    FIRST_TOKEN,
    Columns { heading: "", names: &["prompt tokens/s"], cells: |row| vec![figure(row.prompt_tokens_per_s)] },
    WALL,
];

/// Rows that come back to what was said.
const REUSE: [Columns; 5] = [
    Columns {
        heading: "",
        names: &["", "prompt", "C", "n"],
        cells: |row| {
            let (kind, tokens) = match row.row.prompts {
                Prompts::Talks { talks, tokens } => (format!("{talks} in turn"), tokens),
                Prompts::SharedTokens(tokens) => ("shared".to_owned(), tokens),
                Prompts::RandomTokens(tokens) => ("not shared".to_owned(), tokens),
                Prompts::Chats => (NONE.to_owned(), 0),
            };
            vec![kind, tokens.to_string(), row.row.concurrency.to_string(), requests(row)]
        },
    },
    Columns {
        heading: "first token, p50 ms",
        names: &["first question", "later", "later/first"],
        cells: |row| {
            let Some(reuse) = &row.reuse else { return vec![NONE.into(); 3] };
            let middle = |ms: Option<Summary>| figure(ms.map(|ms| ms.p50));
            let share = reuse.later_share().map_or(NONE.to_owned(), per_cent);
            vec![middle(reuse.first_question_ms), middle(reuse.later_question_ms), share]
        },
    },
    Columns {
        heading: "",
        names: &["hits"],
        cells: |row| {
            let hits = row
                .reuse
                .as_ref()
                .filter(|reuse| reuse.later_questions > 0)
                .and_then(|reuse| Some(format!("{}/{}", reuse.hits?, reuse.later_questions)));
            vec![hits.unwrap_or(NONE.into())]
        },
    },
    Columns {
        heading: "",
        names: &["cached"],
        cells: |row| {
            let share = row.reuse.as_ref().and_then(|reuse| reuse.cached_share);
            vec![share.map_or(NONE.to_owned(), per_cent)]
        },
    },
    WALL,
];

const FIRST_TOKEN: Columns = Columns {
    heading: "first token, ms",
    names: &["mean", "p50", "p99"],
    cells: |row| {
        row.first_token_ms.map_or(vec![NONE.into(); 3], |first| figures(&[first.mean, first.p50, first.p99]))
    },
};

const WALL: Columns =
    Columns { heading: "", names: &["wall, s"], cells: |row| vec![figure(Some(row.wall_s))] };

/// What stands where there is no figure.
const NONE: &str = "-";

/// Between columns, and between groups of them.
const GAP: &str = "  ";
const GROUP_GAP: &str = "   ";

/// The whole report as text, lines of at most about 115 columns.
pub fn table(report: &Report) -> String {
    let conditions = &report.conditions;
    let mut text = format!("{} ({})\n", server_line(&conditions.server), conditions.server.url);
    let _ = writeln!(text, "{}, from {}", conditions.started_utc, conditions.client_host);
    let kinds: [(&[Columns], &[Protocol]); 3] = [
        (&GENERATION, &[Protocol::Cohort, Protocol::Batch, Protocol::Long]),
        (&PREFILL, &[Protocol::Prefill]),
        (&REUSE, &[Protocol::Reuse]),
    ];
    for (columns, protocols) in kinds {
        let run = report.rows.iter().filter(|row| row.skipped.is_none());
        let rows: Vec<&RowReport> = run.filter(|row| protocols.contains(&row.row.protocol)).collect();
        if !rows.is_empty() {
            text.push('\n');
            write_rows(&mut text, columns, &rows);
        }
    }
    write_notes(&mut text, report);
    text
}

fn write_rows(text: &mut String, groups: &[Columns], rows: &[&RowReport]) {
    // cells[group][row][column], the names as the first row
    let cells: Vec<Vec<Vec<String>>> = groups
        .iter()
        .map(|group| {
            let names = group.names.iter().map(|name| (*name).to_owned()).collect();
            std::iter::once(names).chain(rows.iter().map(|row| (group.cells)(row))).collect()
        })
        .collect();
    let widths: Vec<Vec<usize>> =
        groups.iter().zip(&cells).map(|(group, lines)| column_widths(group.heading, lines)).collect();
    let mut heading = String::new();
    for (group, widths) in groups.iter().zip(&widths) {
        let width = group_width(widths);
        let _ = write!(heading, "{:>width$}{GROUP_GAP}", group.heading);
    }
    let _ = writeln!(text, "{}", heading.trim_end());
    for line in 0..=rows.len() {
        let parts: Vec<String> = cells
            .iter()
            .zip(&widths)
            .map(|(lines, widths)| {
                let aligned = lines[line].iter().zip(widths).map(|(cell, width)| format!("{cell:>width$}"));
                aligned.collect::<Vec<String>>().join(GAP)
            })
            .collect();
        let _ = writeln!(text, "{}", parts.join(GROUP_GAP).trim_end());
    }
}

/// Wide enough for every cell; the first column also makes room for the heading over all of them.
fn column_widths(heading: &str, lines: &[Vec<String>]) -> Vec<usize> {
    let columns = lines.first().map_or(0, Vec::len);
    let mut widths: Vec<usize> = (0..columns)
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    let missing = heading.len().saturating_sub(group_width(&widths));
    if let Some(first) = widths.first_mut() {
        *first += missing;
    }
    widths
}

fn group_width(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1)
}

fn write_notes(text: &mut String, report: &Report) {
    let mut notes = Vec::new();
    if report.conditions.warm_up_failed > 0 {
        notes.push(format!("warm-up: {} requests failed", report.conditions.warm_up_failed));
    }
    for row in &report.rows {
        let name = name(row);
        notes.extend(row.skipped.iter().map(|reason| format!("{name}: not run, {reason}")));
        if let Some(tokens) = row.tokens_per_round {
            notes.push(format!("{name}: {tokens:.2} tokens a round, by the server's draft counters"));
        }
        notes.extend(row.notes.iter().map(|note| format!("{name}: {note}")));
    }
    if report.interrupted {
        notes.push("interrupted: the remaining rows were not run".to_owned());
    }
    if !notes.is_empty() {
        let _ = writeln!(text, "\n{}", notes.join("\n"));
    }
}

/// A row by name: `cohort C4`, `prefill 4096 C1`.
pub(crate) fn name(row: &RowReport) -> String {
    let tokens = match row.row.prompts {
        Prompts::Chats => String::new(),
        Prompts::Talks { talks, tokens } => format!(" {talks} × {tokens}"),
        Prompts::SharedTokens(tokens) => format!(" shared {tokens}"),
        Prompts::RandomTokens(tokens) if row.row.protocol == Protocol::Prefill => format!(" {tokens}"),
        Prompts::RandomTokens(tokens) => format!(" {tokens}/{}", row.row.output_tokens),
    };
    format!("{}{tokens} C{}", row.row.protocol.name(), row.row.concurrency)
}

/// How many requests succeeded, and of how many when not all did.
fn requests(row: &RowReport) -> String {
    let all = row.samples.len();
    if row.failed == 0 { all.to_string() } else { format!("{}/{all}", all - row.failed) }
}

fn figures(values: &[f64]) -> Vec<String> {
    values.iter().map(|&value| figure(Some(value))).collect()
}

fn per_cent(share: f64) -> String {
    format!("{} %", figure(Some(100.0 * share)))
}

/// Three digits or more, as many as a measurement is good for.
pub(crate) fn figure(value: Option<f64>) -> String {
    match value {
        None => NONE.to_owned(),
        Some(value) if value.abs() < 9.995 => format!("{value:.2}"),
        Some(value) if value.abs() < 99.95 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Row;
    use crate::report::tests::report_of;
    use crate::sample::Sample;
    use crate::server::Abilities;

    fn row(protocol: Protocol, prompts: Prompts, samples: Vec<Sample>) -> RowReport {
        let row =
            Row { protocol, prompts, concurrency: 2, requests: 2, output_tokens: 3, exact_output: true };
        RowReport::new(&row, 1_000_000, samples, Abilities::default())
    }

    fn sample() -> Sample {
        Sample {
            chunk_us: vec![123_456, 133_456, 143_456],
            end_us: 143_456,
            prompt_tokens: 16,
            completion_tokens: 3,
            ..Sample::default()
        }
    }

    #[test]
    fn every_kind_of_row_has_its_table_and_its_notes() {
        let cut = Sample { error: Some("cut".into()), ..Sample::default() };
        let chats = row(Protocol::Cohort, Prompts::Chats, vec![sample(), sample()]);
        let failing = row(Protocol::Batch, Prompts::RandomTokens(16), vec![sample(), cut]);
        let reading = row(Protocol::Prefill, Prompts::RandomTokens(16), vec![sample()]);
        let skipped = RowReport::skipped(&reading.row, "too long".into());
        let later = Sample { turn: 1, cached_tokens: Some(16), chunk_us: vec![12_345], ..sample() };
        let first = Sample { cached_tokens: Some(0), ..sample() };
        let talks = row(Protocol::Reuse, Prompts::Talks { talks: 1, tokens: 16 }, vec![first, later]);
        let text = table(&report_of(vec![chats, failing, reading, talks, skipped]));
        assert!(
            text.starts_with(
                "tiny, w4a8 kv=f32, qwill 0.1.0 (http://h:1/v1)\n2026-11-30T14:05:39Z, from here\n\n"
            ),
            "{text}"
        );
        let squeezed: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<&str>>().join(" ")).collect();
        for wanted in [
            "cohort 2 2 16.0 3.00 123 123 123 10.0 10.0 10.0 100 200 200 6.00 1.00",
            "batch 2 1/2 16.0 3.00 123 123 123 10.0 10.0 10.0 100 200 - 3.00 1.00",
            "prefill 16 2 1 123 123 123 16.0 1.00",
            "1 in turn 16 2 2 123 12.3 10.0 % 1/1 50.0 % 1.00",
            "batch 16/3 C2: 1 failed: cut",
            "prefill 16 C2: not run, too long",
        ] {
            assert!(squeezed.iter().any(|line| line == wanted), "{wanted}:\n{text}");
        }
        assert!(text.lines().all(|line| line.len() <= 116 && line == line.trim_end()), "{text}");
        // Headings end where their last column ends.
        let lines: Vec<&str> = text.lines().collect();
        let at = lines.iter().position(|line| line.contains("between chunks")).unwrap();
        let end = |line: &str, word: &str| line.find(word).unwrap() + word.len();
        assert_eq!(end(lines[at], "tokens/s"), end(lines[at + 1], "overall"), "{text}");
    }

    #[test]
    fn figures_keep_three_digits() {
        for (value, text) in [
            (0.0, "0.00"),
            (9.994, "9.99"),
            (9.996, "10.0"),
            (99.96, "100"),
            (1234.5, "1234"),
            (0.123, "0.12"),
        ] {
            assert_eq!(figure(Some(value)), text);
        }
        assert_eq!(figure(None), "-");
    }
}
