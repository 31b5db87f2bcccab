//! A step's rows: which sequence each belongs to, where it stands, where its caches are.

/// Committed tokens that a GDN layer keeps beside its base state before folding them in. Part of the
/// numerics: the state is rounded to its storage type only when the ring is full.
pub const RING_TOKENS: usize = 32;

/// Most rows that one sequence may have in a decode round.
pub const MAX_ROUND_ROWS: usize = 16;

/// Tokens of a KV page.
pub const PAGE_TOKENS: usize = 64;

/// Rows of a GDN prefill chunk at most.
pub const CHUNK_TOKENS: usize = 64;

/// Raw convolution inputs kept per sequence and GDN layer, at index `position % CONV_RING`. Enough for the
/// rows of one round and the `conv_width − 1` inputs before them, so that a rejected row is simply
/// overwritten.
pub const CONV_RING: usize = MAX_ROUND_ROWS + 4;

/// Which arithmetic a step uses: bits may differ between phases, never within one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Prompt tokens: GDN in chunks, carried in full precision.
    Prefill,
    /// Decode and verify rows: GDN against base state and ring, [`MAX_ROUND_ROWS`] per sequence at most.
    Rows,
}

/// The consecutive rows of one sequence in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// First row in the batch.
    pub first_row: usize,
    /// Number of rows, at least 1.
    pub rows: usize,
    /// Absolute position in the sequence of the first row.
    pub position: usize,
    /// State slot of the sequence.
    pub slot: usize,
    /// Ring entries that precede the first row (rows phase). Equal to [`RING_TOKENS`]: the device folds the
    /// ring into the base state first and the ring is then empty, so that the rows' entries go to 0, 1, …
    /// Otherwise `ring_len + rows <= RING_TOKENS`.
    pub ring_len: usize,
    /// Where this span's page table starts in [`Batch::page_table`]; it has
    /// `ceil((position + rows) / PAGE_TOKENS)` entries.
    pub first_page: usize,
}

impl Span {
    /// Entries of the span's page table.
    pub fn pages(&self) -> usize {
        (self.position + self.rows).div_ceil(PAGE_TOKENS)
    }
}

/// Rows of one GDN prefill chunk: at most [`CHUNK_TOKENS`], within one span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the span.
    pub span: usize,
    /// First row in the batch.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
}

/// One step's rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Arithmetic of this step.
    pub phase: Phase,
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// The sequences, in row order, without gaps.
    pub spans: Vec<Span>,
    /// Physical page of each logical page, all spans one after another.
    pub page_table: Vec<u32>,
    /// GDN chunks of a prefill step, in row order, covering all rows; empty in the rows phase. Chunk
    /// boundaries are a function of the sequence's tokens alone, never of the slice.
    pub chunks: Vec<Chunk>,
}

impl Batch {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Physical page and offset in it of a position of a span.
    pub fn place(&self, span: &Span, position: usize) -> (usize, usize) {
        let page = self.page_table[span.first_page + position / PAGE_TOKENS];
        (page as usize, position % PAGE_TOKENS)
    }

    /// Checks the structure that every op relies on. Returns what is wrong, with the numbers.
    pub fn check(&self) -> Result<(), String> {
        let mut next_row = 0;
        for (index, span) in self.spans.iter().enumerate() {
            if span.rows == 0 || span.first_row != next_row {
                return Err(format!(
                    "span {index} has rows {}+{}, expected at {next_row}",
                    span.first_row, span.rows
                ));
            }
            next_row += span.rows;
            if span.first_page + span.pages() > self.page_table.len() {
                return Err(format!(
                    "span {index} needs {} pages, table holds {}",
                    span.pages(),
                    self.page_table.len()
                ));
            }
            if self.phase == Phase::Rows {
                let base = if span.ring_len == RING_TOKENS { 0 } else { span.ring_len };
                if span.rows > MAX_ROUND_ROWS || base + span.rows > RING_TOKENS {
                    return Err(format!("span {index}: {} rows on a ring of {}", span.rows, span.ring_len));
                }
            }
        }
        if next_row != self.rows() {
            return Err(format!("spans cover {next_row} rows of {}", self.rows()));
        }
        self.check_chunks()
    }

    fn check_chunks(&self) -> Result<(), String> {
        if self.phase == Phase::Rows {
            return if self.chunks.is_empty() { Ok(()) } else { Err("chunks in a decode round".into()) };
        }
        let mut next_row = 0;
        for chunk in &self.chunks {
            let Some(span) = self.spans.get(chunk.span) else {
                return Err(format!("chunk of span {} of {}", chunk.span, self.spans.len()));
            };
            let inside = chunk.first_row >= span.first_row
                && chunk.first_row + chunk.rows <= span.first_row + span.rows;
            if chunk.first_row != next_row || !inside || chunk.rows == 0 || chunk.rows > CHUNK_TOKENS {
                return Err(format!("chunk rows {}+{}, expected at {next_row}", chunk.first_row, chunk.rows));
            }
            next_row += chunk.rows;
        }
        if next_row == self.rows() {
            Ok(())
        } else {
            Err(format!("chunks cover {next_row} rows of {}", self.rows()))
        }
    }
}

/// Rows of one kind for measurements: every sequence in its own slot with its own pages.
pub fn round_batch(sequences: usize, rows: usize, context_tokens: usize, ring_len: usize) -> Batch {
    let pages = (context_tokens + rows).div_ceil(PAGE_TOKENS);
    let span = |index: usize| Span {
        first_row: index * rows,
        rows,
        position: context_tokens,
        slot: index,
        ring_len,
        first_page: index * pages,
    };
    Batch {
        phase: Phase::Rows,
        tokens: varied_tokens(sequences * rows),
        spans: (0..sequences).map(span).collect(),
        page_table: (0..(sequences * pages) as u32).collect(),
        chunks: Vec::new(),
    }
}

/// A whole prompt of one sequence in one step, for measurements.
pub fn prompt_batch(tokens: usize) -> Batch {
    let chunk = |first_row| Chunk { span: 0, first_row, rows: CHUNK_TOKENS.min(tokens - first_row) };
    Batch {
        phase: Phase::Prefill,
        tokens: varied_tokens(tokens),
        spans: vec![Span { first_row: 0, rows: tokens, position: 0, slot: 0, ring_len: 0, first_page: 0 }],
        page_table: (0..tokens.div_ceil(PAGE_TOKENS) as u32).collect(),
        chunks: (0..tokens).step_by(CHUNK_TOKENS).map(chunk).collect(),
    }
}

/// Ids that every vocabulary of the family has, few of them twice in a row.
fn varied_tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|n| n * 37 % 8000).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_for_measurements_are_valid() {
        for (sequences, rows) in [(1, 1), (1, 16), (64, 1), (3, 4)] {
            let batch = round_batch(sequences, rows, 512, 8);
            assert_eq!(batch.check(), Ok(()));
            assert_eq!(batch.rows(), sequences * rows);
        }
        for tokens in [1, 63, 64, 65, 2048] {
            assert_eq!(prompt_batch(tokens).check(), Ok(()));
        }
    }
}
