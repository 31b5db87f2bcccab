//! What is asked of a server: the protocols, each a list of rows, each row a closed loop of requests.
//!
//! A row keeps `concurrency` requests in flight: as soon as one ends, the next begins, until `requests` are done.
//! `docs/protocols.md` says what each figure means.

use serde::Serialize;

use crate::BenchError;

/// A protocol by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Eight chats at concurrency 1, 2, 4 and 8; answers end by themselves, at 1,024 tokens at most.
    Cohort,
    /// 256 requests at concurrency 64: 128 prompt tokens and 512 generated ones, then 256 and 256.
    Batch,
    /// Prompts of 1,024 to 102,400 tokens and one generated token each.
    Prefill,
    /// One prompt of 100,000 tokens with 256 generated ones; four of 60,000 at once with 1,024.
    Long,
    /// What comes back: one and eight conversations in turn about 24,000 tokens each, three questions a conversation; 64
    /// prompts of 5,800 tokens at once, first each of its own, then all with the same beginning.
    Reuse,
}

/// One row: what is asked, how often, and how much of it at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Where it belongs.
    pub protocol: Protocol,
    /// What each request says.
    pub prompts: Prompts,
    /// Requests in flight.
    pub concurrency: usize,
    /// Requests in all, at least `concurrency`.
    pub requests: usize,
    /// Most tokens of an answer, or exactly as many.
    pub output_tokens: usize,
    /// Whether answers shall have exactly `output_tokens`: the end-of-text token is ignored where the server can.
    pub exact_output: bool,
}

/// What requests say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompts {
    /// The eight chats.
    Chats,
    /// Random words, so many tokens exactly.
    RandomTokens(usize),
    /// Random words, so many tokens exactly, the same in every request, and a few of its own.
    SharedTokens(usize),
    /// Conversations that take turns, each about so many random tokens of its own: its first question holds them, the
    /// following ones, and the answers before, come behind.
    Talks {
        /// How many.
        talks: usize,
        /// Tokens of the first question.
        tokens: usize,
    },
}

/// Changes to the protocols' numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Overrides {
    /// Concurrencies instead of the protocol's; empty: the protocol's.
    pub concurrency: Vec<usize>,
    /// Requests of each row.
    pub requests: Option<usize>,
    /// Prompt lengths of batch, prefill, long and reuse rows; empty: the protocol's.
    pub prompt_tokens: Vec<usize>,
    /// Answer lengths of cohort (at most), batch, long and reuse rows (exactly).
    pub output_tokens: Option<usize>,
}

/// Prompt tokens, concurrency, requests and generated tokens of a row.
type Shape = (usize, usize, usize, usize);

/// Requests and their shapes as Protocol P1 of the reference system fixes them.
const BATCH: [Shape; 2] = [(128, 64, 256, 512), (256, 64, 256, 256)];
const PREFILL: [Shape; 12] = [
    (1_024, 1, 16, 1),
    (1_024, 4, 32, 1),
    (1_024, 16, 64, 1),
    (4_096, 1, 8, 1),
    (4_096, 4, 16, 1),
    (4_096, 16, 32, 1),
    (16_384, 1, 4, 1),
    (16_384, 4, 8, 1),
    (16_384, 8, 16, 1),
    (65_536, 1, 2, 1),
    (65_536, 2, 4, 1),
    (102_400, 1, 2, 1),
];
const LONG: [Shape; 2] = [(100_000, 1, 1, 256), (60_000, 4, 4, 1_024)];
/// Conversations that take turns, tokens of their first questions, questions of each.
const TALKS: [usize; 2] = [1, 8];
const TALK_TOKENS: usize = 24_000;
const TALK_TURNS: usize = 3;
/// Prompts with and without a common beginning.
const SHARED: Shape = (5_800, 64, 64, 16);
const TALK_OUTPUT_TOKENS: usize = 32;
const COHORT_CONCURRENCY: [usize; 4] = [1, 2, 4, 8];
const COHORT_REQUESTS: usize = 8;
const COHORT_OUTPUT_TOKENS: usize = 1_024;

impl Protocol {
    /// The name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cohort => "cohort",
            Self::Batch => "batch",
            Self::Prefill => "prefill",
            Self::Long => "long",
            Self::Reuse => "reuse",
        }
    }

    /// Its rows, in the order in which they are run.
    pub fn rows(self, overrides: &Overrides) -> Result<Vec<Row>, BenchError> {
        let rows = match self {
            Self::Cohort => cohort(overrides),
            Self::Batch => self.shaped(&BATCH, overrides),
            Self::Prefill => {
                let one_token = Overrides { output_tokens: None, ..overrides.clone() };
                self.shaped(&PREFILL, &one_token)
            }
            Self::Long => self.shaped(&LONG, overrides),
            Self::Reuse => self.reuse(overrides),
        };
        let short = rows.iter().filter(|row| row.requests < row.concurrency);
        match short.max_by_key(|row| row.concurrency) {
            None => Ok(rows),
            Some(row) => Err(BenchError::Settings(format!(
                "{} requests are fewer than the {} that protocol `{}` keeps in flight: raise --requests or lower \
                 --concurrency",
                row.requests,
                row.concurrency,
                self.name()
            ))),
        }
    }

    /// Conversations by `concurrency` of the overrides, but in turn; the other rows as they are shaped.
    fn reuse(self, overrides: &Overrides) -> Vec<Row> {
        let talks = if overrides.concurrency.is_empty() { &TALKS[..] } else { &overrides.concurrency };
        let lengths =
            if overrides.prompt_tokens.is_empty() { &[TALK_TOKENS][..] } else { &overrides.prompt_tokens };
        let talk = |&tokens: &usize| {
            talks.iter().map(move |&talks| Row {
                protocol: self,
                prompts: Prompts::Talks { talks, tokens },
                concurrency: 1,
                requests: overrides.requests.unwrap_or(talks * TALK_TURNS),
                output_tokens: overrides.output_tokens.unwrap_or(TALK_OUTPUT_TOKENS),
                exact_output: true,
            })
        };
        let at_once = self.shaped(&[SHARED], overrides).into_iter().flat_map(|row| {
            let tokens = row.prompts.tokens();
            let shared = tokens.map(|tokens| Row { prompts: Prompts::SharedTokens(tokens), ..row.clone() });
            std::iter::once(row).chain(shared)
        });
        once_each(lengths.iter().flat_map(talk).chain(at_once))
    }

    fn shaped(self, shapes: &[Shape], overrides: &Overrides) -> Vec<Row> {
        let shapes = with_lengths(shapes, &overrides.prompt_tokens).into_iter();
        let rows = shapes.flat_map(|shape| with_concurrency(shape, overrides));
        once_each(rows.map(|(prompt_tokens, concurrency, requests, output_tokens)| Row {
            protocol: self,
            prompts: Prompts::RandomTokens(prompt_tokens),
            concurrency,
            requests: overrides.requests.unwrap_or(requests.max(concurrency)),
            output_tokens: overrides.output_tokens.unwrap_or(output_tokens),
            exact_output: true,
        }))
    }
}

/// Rows that differ in an overridden number alone have become one.
fn once_each(rows: impl Iterator<Item = Row>) -> Vec<Row> {
    let mut each = Vec::new();
    for row in rows {
        if !each.contains(&row) {
            each.push(row);
        }
    }
    each
}

impl Row {
    /// Tokens that the longest request takes, prompt and answer, if the row fixes that.
    pub fn context_tokens(&self) -> Option<usize> {
        match self.prompts {
            Prompts::Chats => None,
            Prompts::RandomTokens(tokens) => Some(tokens + self.output_tokens),
            Prompts::SharedTokens(tokens) => Some(tokens + OWN_TOKENS + self.output_tokens),
            Prompts::Talks { talks, tokens } => {
                Some(tokens + self.requests.div_ceil(talks) * (OWN_TOKENS + self.output_tokens))
            }
        }
    }
}

/// What a question of a few words takes at most, with what a chat puts around it and the answer before.
const OWN_TOKENS: usize = 64;

impl Prompts {
    /// Length of what is drawn for them, tokens.
    pub(crate) fn tokens(self) -> Option<usize> {
        match self {
            Self::Chats => None,
            Self::RandomTokens(tokens) | Self::SharedTokens(tokens) | Self::Talks { tokens, .. } => {
                Some(tokens)
            }
        }
    }
}

fn cohort(overrides: &Overrides) -> Vec<Row> {
    let concurrency = match overrides.concurrency.as_slice() {
        [] => &COHORT_CONCURRENCY,
        chosen => chosen,
    };
    let row = |&concurrency: &usize| Row {
        protocol: Protocol::Cohort,
        prompts: Prompts::Chats,
        concurrency,
        requests: overrides.requests.unwrap_or(COHORT_REQUESTS.max(concurrency)),
        output_tokens: overrides.output_tokens.unwrap_or(COHORT_OUTPUT_TOKENS),
        exact_output: false,
    };
    concurrency.iter().map(row).collect()
}

/// The shapes of the chosen lengths. A length that the protocol has keeps its rows; any other is measured as the
/// protocol's longest one below it, or its shortest.
fn with_lengths(shapes: &[Shape], lengths: &[usize]) -> Vec<Shape> {
    if lengths.is_empty() {
        return shapes.to_vec();
    }
    let mut chosen = Vec::new();
    for &length in lengths {
        let known = shapes.iter().map(|shape| shape.0);
        let like = known.clone().filter(|&known| known <= length).max().or(known.min());
        chosen.extend(
            shapes.iter().filter(|shape| Some(shape.0) == like).map(|&(_, c, n, out)| (length, c, n, out)),
        );
    }
    chosen
}

fn with_concurrency(shape: Shape, overrides: &Overrides) -> Vec<Shape> {
    let (prompt, concurrency, requests, output) = shape;
    match overrides.concurrency.as_slice() {
        [] => vec![(prompt, concurrency, requests, output)],
        // The more at once, the more requests the row needs: by default those of the shape's own row.
        chosen => chosen.iter().map(|&chosen| (prompt, chosen, requests.max(chosen), output)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Protocol; 5] =
        [Protocol::Cohort, Protocol::Batch, Protocol::Prefill, Protocol::Long, Protocol::Reuse];

    fn shapes(protocol: Protocol, overrides: &Overrides) -> Vec<(usize, usize, usize, usize)> {
        let rows = protocol.rows(overrides).unwrap();
        let tokens = |row: &Row| row.context_tokens().map_or(0, |tokens| tokens - row.output_tokens);
        rows.iter().map(|row| (tokens(row), row.concurrency, row.requests, row.output_tokens)).collect()
    }

    #[test]
    fn protocols_are_what_they_are_called() {
        let none = Overrides::default();
        assert_eq!(
            shapes(Protocol::Cohort, &none),
            [(0, 1, 8, 1024), (0, 2, 8, 1024), (0, 4, 8, 1024), (0, 8, 8, 1024)]
        );
        assert_eq!(shapes(Protocol::Batch, &none), BATCH);
        assert_eq!(shapes(Protocol::Prefill, &none), PREFILL);
        assert_eq!(shapes(Protocol::Long, &none), LONG);
    }

    #[test]
    fn reuse_is_in_turn_and_then_at_once() {
        let rows = Protocol::Reuse.rows(&Overrides::default()).unwrap();
        let prompts: Vec<Prompts> = rows.iter().map(|row| row.prompts).collect();
        let talks = |talks| Prompts::Talks { talks, tokens: TALK_TOKENS };
        let (own, shared) = (Prompts::RandomTokens(5_800), Prompts::SharedTokens(5_800));
        assert_eq!(prompts, [talks(1), talks(8), own, shared]);
        let at_once: Vec<_> = rows.iter().map(|row| (row.concurrency, row.requests)).collect();
        assert_eq!(at_once, [(1, 3), (1, 24), (64, 64), (64, 64)]);
        let small = Overrides { concurrency: vec![2], prompt_tokens: vec![100], ..Overrides::default() };
        let rows = Protocol::Reuse.rows(&small).unwrap();
        assert_eq!(rows[0].prompts, Prompts::Talks { talks: 2, tokens: 100 });
        assert_eq!((rows[1].concurrency, rows[1].context_tokens()), (2, Some(116)));
        assert_eq!(rows.len(), 3);
    }

    #[test]
    fn lengths_choose_among_the_rows() {
        let chosen = Overrides { prompt_tokens: vec![2_048, 16_384], ..Overrides::default() };
        assert_eq!(
            shapes(Protocol::Prefill, &chosen),
            [
                (2_048, 1, 16, 1),
                (2_048, 4, 32, 1),
                (2_048, 16, 64, 1),
                (16_384, 1, 4, 1),
                (16_384, 4, 8, 1),
                (16_384, 8, 16, 1)
            ]
        );
        let short = Overrides { prompt_tokens: vec![16], concurrency: vec![2], ..Overrides::default() };
        assert_eq!(shapes(Protocol::Batch, &short), [(16, 2, 256, 512)]);
    }

    #[test]
    fn concurrency_and_requests_replace_the_protocols() {
        let small = Overrides {
            concurrency: vec![1, 3],
            requests: Some(4),
            output_tokens: Some(5),
            ..Overrides::default()
        };
        assert_eq!(shapes(Protocol::Cohort, &small), [(0, 1, 4, 5), (0, 3, 4, 5)]);
        // The three rows of a length have become one for each concurrency, and keep their single token.
        let rows = shapes(Protocol::Prefill, &small);
        assert_eq!(rows.len(), 10);
        assert!(rows.iter().all(|&(_, _, requests, output)| requests == 4 && output == 1));
    }

    #[test]
    fn fewer_requests_than_streams_are_refused() {
        let few = Overrides { requests: Some(4), ..Overrides::default() };
        let error = Protocol::Cohort.rows(&few).unwrap_err().to_string();
        assert!(error.contains("4 requests are fewer than the 8"), "{error}");
    }

    proptest! {
        #[test]
        fn no_row_comes_twice_and_none_lacks_requests(
            concurrency in prop::collection::vec(1..100usize, 0..4),
            prompt_tokens in prop::collection::vec(1..200_000usize, 0..4),
            output_tokens in prop::option::of(1..2000usize),
        ) {
            let overrides = Overrides { concurrency, requests: None, prompt_tokens, output_tokens };
            for protocol in ALL {
                let rows = protocol.rows(&overrides).unwrap();
                prop_assert!(!rows.is_empty());
                for (at, row) in rows.iter().enumerate() {
                    prop_assert!(row.requests >= row.concurrency);
                    prop_assert!(protocol == Protocol::Cohort || !rows[..at].contains(row));
                }
            }
        }
    }
}
