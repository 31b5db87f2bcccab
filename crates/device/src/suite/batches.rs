//! Random steps: sequences of all lengths, shuffled pages, slots in any order.

use super::Random;
use crate::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use crate::{Batch, Chunk, Phase, Span};

/// Above this many history pages a span reads the same few pages again and again: long contexts without the memory.
const DISTINCT_HISTORY_PAGES: usize = 6;

/// One sequence of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct SpanPlan {
    pub(super) rows: usize,
    pub(super) position: usize,
    pub(super) ring_len: usize,
}

/// A step and how many pages and slots a cache needs for it, with a few that nobody uses.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) batch: Batch,
    pub(super) pages: usize,
    pub(super) slots: usize,
}

/// Lays out the sequences in one step; every choice that the plans leave open is random.
pub(super) fn step(random: &mut Random, phase: Phase, plans: &[SpanPlan], vocab: usize) -> Step {
    let logical: Vec<Vec<usize>> = plans.iter().map(|plan| page_names(random, plan)).collect();
    let used: usize = logical.iter().map(|names| names.iter().max().map_or(0, |name| name + 1)).sum();
    let (pages, slots) = (used + 3, plans.len() + 2);
    let mut page_ids: Vec<u32> = (0..pages as u32).collect();
    let mut slot_ids: Vec<usize> = (0..slots).collect();
    random.shuffle(&mut page_ids);
    random.shuffle(&mut slot_ids);

    let mut batch =
        Batch { phase, tokens: Vec::new(), spans: Vec::new(), page_table: Vec::new(), chunks: Vec::new() };
    let mut taken = 0;
    for ((plan, names), slot) in plans.iter().zip(logical).zip(slot_ids) {
        let span = Span {
            first_row: batch.tokens.len(),
            rows: plan.rows,
            position: plan.position,
            slot,
            ring_len: plan.ring_len,
            first_page: batch.page_table.len(),
        };
        batch.tokens.extend((0..plan.rows).map(|_| random.below(vocab) as u32));
        batch.page_table.extend(names.iter().map(|name| page_ids[taken + name]));
        taken += names.iter().max().map_or(0, |name| name + 1);
        batch.spans.push(span);
    }
    if phase == Phase::Prefill {
        batch.chunks = random_chunks(random, &batch.spans);
    }
    Step { batch, pages, slots }
}

/// For each logical page of a span, which of its own pages it is: pages that are written, and those after them,
/// are always distinct.
fn page_names(random: &mut Random, plan: &SpanPlan) -> Vec<usize> {
    let pages = (plan.position + plan.rows).div_ceil(PAGE_TOKENS);
    let history = plan.position / PAGE_TOKENS;
    if history <= DISTINCT_HISTORY_PAGES {
        return (0..pages).collect();
    }
    let read_only = (0..history).map(|_| random.below(DISTINCT_HISTORY_PAGES));
    let written = (0..pages - history).map(|page| DISTINCT_HISTORY_PAGES + page);
    read_only.collect::<Vec<_>>().into_iter().chain(written).collect()
}

fn random_chunks(random: &mut Random, spans: &[Span]) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for (index, span) in spans.iter().enumerate() {
        let mut done = 0;
        while done < span.rows {
            let most = CHUNK_TOKENS.min(span.rows - done);
            // Mostly as long as can be, sometimes short: both happen in prompts with many messages.
            let rows = if random.chance(0.7) { most } else { random.between(1, most) };
            chunks.push(Chunk { span: index, first_row: span.first_row + done, rows });
            done += rows;
        }
    }
    chunks
}

/// The batch of some spans only, in the order given, and the rows that they had.
pub(super) fn only_spans(batch: &Batch, chosen: &[usize]) -> (Batch, Vec<usize>) {
    let mut part = Batch {
        phase: batch.phase,
        tokens: Vec::new(),
        spans: Vec::new(),
        page_table: Vec::new(),
        chunks: Vec::new(),
    };
    let mut rows = Vec::new();
    for index in chosen {
        let span = &batch.spans[*index];
        let first_row = rows.len();
        let chunks = batch.chunks.iter().filter(|chunk| chunk.span == *index);
        part.chunks.extend(chunks.map(|chunk| Chunk {
            span: part.spans.len(),
            first_row: chunk.first_row - span.first_row + first_row,
            rows: chunk.rows,
        }));
        let first_page = part.page_table.len();
        part.page_table.extend_from_slice(&batch.page_table[span.first_page..span.first_page + span.pages()]);
        part.spans.push(Span { first_row, first_page, ..span.clone() });
        rows.extend(span.first_row..span.first_row + span.rows);
    }
    part.tokens = rows.iter().map(|row| batch.tokens[*row]).collect();
    (part, rows)
}

/// `(span, row, absolute position)` of every row.
pub(super) fn rows_of(batch: &Batch) -> impl Iterator<Item = (&Span, usize, usize)> {
    batch
        .spans
        .iter()
        .flat_map(|span| (0..span.rows).map(move |i| (span, span.first_row + i, span.position + i)))
}

/// What a failure's message says about a step.
pub(super) fn describe(batch: &Batch) -> String {
    let span = |span: &Span| {
        let Span { rows, position, slot, ring_len, .. } = span;
        format!("{rows} rows at {position} (slot {slot}, ring {ring_len})")
    };
    let spans: Vec<String> = batch.spans.iter().map(span).collect();
    let chunks: Vec<usize> = batch.chunks.iter().map(|chunk| chunk.rows).collect();
    format!("{:?}: {}; chunks {chunks:?}", batch.phase, spans.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rows: usize, position: usize) -> SpanPlan {
        SpanPlan { rows, position, ring_len: 0 }
    }

    #[test]
    fn random_steps_are_consistent_and_written_pages_are_never_shared() {
        let mut random = Random::new(5, "steps");
        for _ in 0..200 {
            let plans: Vec<SpanPlan> =
                (0..random.between(1, 6)).map(|_| plan(random.between(1, 140), random.below(900))).collect();
            let Step { batch, pages, .. } = step(&mut random, Phase::Prefill, &plans, 100);
            batch.check().unwrap();
            let mut written: Vec<(usize, usize)> =
                rows_of(&batch).map(|(span, _, position)| batch.place(span, position)).collect();
            assert!(written.iter().all(|(page, _)| *page < pages));
            let cells = written.len();
            written.sort_unstable();
            written.dedup();
            assert_eq!(written.len(), cells, "two rows share a cell");
        }
    }

    #[test]
    fn a_part_keeps_each_sequence_as_it_was() {
        let mut random = Random::new(6, "parts");
        let step = step(&mut random, Phase::Prefill, &[plan(70, 3), plan(1, 64), plan(130, 0)], 100);
        let (part, rows) = only_spans(&step.batch, &[2, 0]);
        part.check().unwrap();
        assert_eq!(rows, (71..201).chain(0..70).collect::<Vec<_>>());
        for (new, old) in part.spans.iter().zip([2, 0]) {
            let old = &step.batch.spans[old];
            for offset in 0..new.rows {
                let position = new.position + offset;
                assert_eq!(part.place(new, position), step.batch.place(old, position));
            }
        }
    }
}
