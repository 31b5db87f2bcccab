//! The memory plan: every byte, computed from shapes before anything is allocated.
//!
//! [`plan`] is a pure function of what a model needs, what the device has and what the user asked for. Nothing
//! is probed: the same input gives the same plan on any machine, also for a card that is not there. After start
//! nothing grows, so a plan that fits is a server that does not run out of memory.

use std::fmt;

use thiserror::Error;

use crate::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use crate::{CacheSpec, Geometry, KvType, StateType};

use crate::host_plan::host_part;
pub use crate::host_plan::{HostMemory, HostPlan, least_host_bytes};

/// Sequences that the plan chooses at most; more only where the user asks for them.
const MOST_CHOSEN_SEQUENCES: usize = 64;

/// Context that the plan makes room for before it adds a second sequence.
const COMFORTABLE_CONTEXT_TOKENS: usize = 32_768;

/// KV tokens that the plan adds with each further sequence.
const TOKENS_PER_SEQUENCE: usize = 4096;

/// Weights of one group of matrices (`body`, `head`, `embedding`, …) as the device stores them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanWeight {
    /// Name for people.
    pub group: String,
    /// Formats and parameters, for people; may be empty.
    pub detail: String,
    /// Exact bytes on the device.
    pub bytes: u64,
}

/// What the user fixed; `None` lets the plan choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanOptions {
    /// Sequences that run at once: state slots.
    pub max_sequences: Option<usize>,
    /// Longest prompt + generation.
    pub max_context_tokens: Option<usize>,
    /// KV tokens over all sequences.
    pub kv_tokens: Option<usize>,
    /// Storage of keys and values.
    pub kv_type: KvType,
    /// Storage of recurrent states.
    pub state_type: StateType,
    /// Rows of a prefill slice at most.
    pub prefill_rows: usize,
    /// Bytes of the host store at most; 0: none.
    pub host_cache_bytes: u64,
}

impl Default for PlanOptions {
    /// Everything chosen, bf16 KV, f32 states, slices of 256 rows, no host store.
    fn default() -> Self {
        Self {
            max_sequences: None,
            max_context_tokens: None,
            kv_tokens: None,
            kv_type: KvType::Bf16,
            state_type: StateType::F32,
            prefill_rows: 256,
            host_cache_bytes: 0,
        }
    }
}

/// Bytes of the activation buffers for `(rows of a step, rows of logits)`, each with a name. Must not shrink when
/// either number grows.
pub type WorkspaceBytes<'a> = &'a dyn Fn(usize, usize) -> Vec<(&'static str, u64)>;

/// Everything a plan depends on.
#[derive(Clone, Copy)]
pub struct PlanInput<'a> {
    /// Shapes of the caches and the longest context of the model.
    pub geometry: &'a Geometry,
    /// The weights by group.
    pub weights: &'a [PlanWeight],
    /// The activation buffers.
    pub workspace: WorkspaceBytes<'a>,
    /// Bytes that the plan may use, all together.
    pub budget_bytes: u64,
    /// How the device keeps pages and states in host memory.
    pub host: HostMemory,
    /// What the user fixed.
    pub options: PlanOptions,
}

/// What a row of the plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlanSection {
    /// Weights of the model.
    Weights,
    /// Activation buffers and logits.
    Workspace,
    /// Recurrent states.
    States,
    /// Keys and values.
    Kv,
    /// Pages and states in host memory, where that is the device's as well.
    Host,
}

impl PlanSection {
    /// Name used in the table and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Workspace => "workspace",
            Self::States => "states",
            Self::Kv => "kv",
            Self::Host => "host",
        }
    }
}

/// One row of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRow {
    /// What it is for.
    pub section: PlanSection,
    /// Name within the section.
    pub name: String,
    /// How the bytes come about, for people; may be empty.
    pub detail: String,
    /// Exact bytes.
    pub bytes: u64,
}

/// Where every byte goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    rows: Vec<PlanRow>,
    /// Bytes that the plan may use.
    pub budget_bytes: u64,
    /// KV pages of [`PAGE_TOKENS`] tokens.
    pub pages: usize,
    /// State slots: sequences that run at once.
    pub slots: usize,
    /// Longest prompt + generation of one sequence.
    pub max_context_tokens: usize,
    /// Rows of a step at most.
    pub max_rows: usize,
    /// Rows of logits at most.
    pub max_logit_rows: usize,
    /// Rows of a prefill slice at most.
    pub prefill_rows: usize,
    /// Storage of keys and values.
    pub kv_type: KvType,
    /// Storage of recurrent states.
    pub state_type: StateType,
    /// The host store; its bytes are among the rows only where the device's memory is the host's.
    pub host: Option<HostPlan>,
}

impl MemoryPlan {
    /// The rows: weights, workspace, states, KV, host.
    pub fn rows(&self) -> &[PlanRow] {
        &self.rows
    }
    /// Sum of all rows.
    pub fn total_bytes(&self) -> u64 {
        self.rows.iter().fold(0, |sum, row| sum.saturating_add(row.bytes))
    }
    /// What is left of the budget.
    pub fn left_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.total_bytes())
    }
    /// KV tokens over all sequences.
    pub fn kv_tokens(&self) -> usize {
        self.pages.saturating_mul(PAGE_TOKENS)
    }
    /// The caches to make.
    pub fn cache_spec(&self, geometry: &Geometry) -> CacheSpec {
        cache_spec(geometry, (self.kv_type, self.state_type), self.pages, self.slots)
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// An option is out of range or contradicts another.
    #[error("{0}")]
    Option(String),
    /// The least that was asked for is more than the budget.
    #[error(
        "the plan needs {} ({needed_bytes} bytes), the budget is {} ({budget_bytes} bytes): weights {}, workspace {}, \
         {slots} states {}, {kv_tokens} KV tokens {}{}; {hint}",
        readable(*needed_bytes), readable(*budget_bytes), readable(*weight_bytes), readable(*workspace_bytes),
        readable(*state_bytes), readable(*kv_bytes), host_part(*host_bytes)
    )]
    DoesNotFit {
        /// Bytes of the smallest plan with these options.
        needed_bytes: u64,
        /// Bytes there are.
        budget_bytes: u64,
        /// Part of the weights.
        weight_bytes: u64,
        /// Part of the activation buffers.
        workspace_bytes: u64,
        /// Sequences asked for.
        slots: usize,
        /// Part of the recurrent states.
        state_bytes: u64,
        /// KV tokens asked for.
        kv_tokens: usize,
        /// Part of the KV pages.
        kv_bytes: u64,
        /// Part of the host store.
        host_bytes: u64,
        /// What would fit.
        hint: String,
    },
}

/// Plans the memory.
///
/// One sequence can always hold `max_context_tokens`. What the user fixed is kept or refused. What is left open is
/// chosen on one ladder: first pages for one sequence, then sequence after sequence, each with its pages, so that
/// more budget never gives fewer pages nor fewer sequences.
pub fn plan(input: &PlanInput<'_>) -> Result<MemoryPlan, PlanError> {
    let planner = Planner::new(input)?;
    let slots = match input.options.max_sequences {
        Some(sequences) => sequences,
        None => planner.choose_sequences(),
    };
    let least = planner.least_pages();
    if planner.total_bytes(slots, least) > input.budget_bytes {
        return Err(planner.refusal(slots, least));
    }
    let pages = match input.options.kv_tokens {
        Some(tokens) => tokens.div_ceil(PAGE_TOKENS),
        None => planner.fill_pages(slots).max(least),
    };
    Ok(planner.write(slots, pages))
}

/// The caches of a geometry.
pub fn cache_spec(
    geometry: &Geometry,
    (kv_type, state_type): (KvType, StateType),
    pages: usize,
    slots: usize,
) -> CacheSpec {
    CacheSpec {
        kv_layers: geometry.kv_layers(),
        attention: geometry.attention,
        kv_type,
        pages,
        gdn_layers: geometry.gdn_layers(),
        gdn: geometry.gdn,
        state_type,
        slots,
    }
}

struct Planner<'a> {
    input: &'a PlanInput<'a>,
    page_bytes: u64,
    slot_bytes: u64,
    weight_bytes: u64,
    host: Option<HostPlan>,
}

impl<'a> Planner<'a> {
    fn new(input: &'a PlanInput<'a>) -> Result<Self, PlanError> {
        let options = &input.options;
        let at_least_one = |name: &str, value: Option<usize>| match value {
            Some(0) => Err(PlanError::Option(format!("{name} is 0, it must be at least 1"))),
            _ => Ok(()),
        };
        at_least_one("the number of sequences", options.max_sequences)?;
        at_least_one("the context", options.max_context_tokens)?;
        at_least_one("the number of KV tokens", options.kv_tokens)?;
        if options.prefill_rows < CHUNK_TOKENS {
            return Err(PlanError::Option(format!(
                "a prefill slice of {} rows is too small, a chunk has {CHUNK_TOKENS}",
                options.prefill_rows
            )));
        }
        if let Some(context) = options.max_context_tokens {
            if context > input.geometry.max_context {
                return Err(PlanError::Option(format!(
                    "a context of {context} tokens is longer than the model's {}",
                    input.geometry.max_context
                )));
            }
            if let Some(kv_tokens) = options.kv_tokens.filter(|tokens| *tokens < context) {
                return Err(PlanError::Option(format!(
                    "{kv_tokens} KV tokens cannot hold one sequence of {context} tokens"
                )));
            }
        }
        let spec = cache_spec(input.geometry, (options.kv_type, options.state_type), 1, 1);
        Ok(Self {
            input,
            page_bytes: spec.page_bytes(),
            slot_bytes: spec.slot_bytes(),
            host: HostPlan::within(&spec, options.host_cache_bytes)?,
            weight_bytes: input.weights.iter().fold(0, |sum, weight| sum.saturating_add(weight.bytes)),
        })
    }

    /// Rows of a step and of its logits: a slice, or one row of every sequence; logits of a whole chunk, so that a
    /// prompt's own log-probabilities can be had.
    fn step_rows(&self, slots: usize) -> (usize, usize) {
        (self.input.options.prefill_rows.max(slots), CHUNK_TOKENS.max(slots))
    }

    fn workspace(&self, slots: usize) -> Vec<(&'static str, u64)> {
        let (rows, logit_rows) = self.step_rows(slots);
        let mut buffers = (self.input.workspace)(rows, logit_rows);
        let staging_bytes = self.input.host.staging_bytes;
        if self.host.is_some() && staging_bytes > 0 {
            buffers.push(("state in transit", staging_bytes));
        }
        buffers
    }

    /// Bytes of the host store that count.
    fn host_bytes(&self) -> u64 {
        self.host.filter(|_| self.input.host.is_shared).map_or(0, |host| host.bytes())
    }

    /// Everything but the pages.
    fn fixed_bytes(&self, slots: usize) -> u64 {
        let states = self.slot_bytes.saturating_mul(slots as u64);
        let first = self.weight_bytes.saturating_add(states).saturating_add(self.host_bytes());
        self.workspace(slots).iter().fold(first, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    fn total_bytes(&self, slots: usize, pages: usize) -> u64 {
        self.fixed_bytes(slots).saturating_add(self.page_bytes.saturating_mul(pages as u64))
    }

    fn fits(&self, slots: usize, pages: usize) -> bool {
        self.total_bytes(slots, pages) <= self.input.budget_bytes
    }

    /// Pages that the longest possible sequence uses.
    fn context_pages(&self) -> usize {
        self.input
            .options
            .max_context_tokens
            .unwrap_or(self.input.geometry.max_context)
            .div_ceil(PAGE_TOKENS)
            .max(1)
    }

    /// Pages without which the options cannot be met.
    fn least_pages(&self) -> usize {
        let options = &self.input.options;
        options.kv_tokens.or(options.max_context_tokens).map_or(1, |tokens| tokens.div_ceil(PAGE_TOKENS))
    }

    /// Pages that belong to a number of sequences on the ladder.
    fn rung_pages(&self, slots: usize) -> usize {
        let context = self.context_pages();
        let first = match self.input.options.max_context_tokens {
            Some(_) => context,
            None => context.min(COMFORTABLE_CONTEXT_TOKENS / PAGE_TOKENS),
        };
        first + (slots - 1) * context.min(TOKENS_PER_SEQUENCE / PAGE_TOKENS)
    }

    fn choose_sequences(&self) -> usize {
        let pages = |slots| match self.input.options.kv_tokens {
            Some(tokens) => tokens.div_ceil(PAGE_TOKENS),
            None => self.rung_pages(slots),
        };
        (2..=MOST_CHOSEN_SEQUENCES).take_while(|slots| self.fits(*slots, pages(*slots))).last().unwrap_or(1)
    }

    /// As many pages as the budget holds and the sequences can use; where the number of sequences was chosen, not
    /// more than the next rung has, so that the next rung does not take pages back.
    fn fill_pages(&self, slots: usize) -> usize {
        let left = self.input.budget_bytes.saturating_sub(self.fixed_bytes(slots));
        let affordable = usize::try_from(left / self.page_bytes.max(1)).unwrap_or(usize::MAX);
        let usable = slots.saturating_mul(self.context_pages());
        let next_rung = match self.input.options.max_sequences {
            None if slots < MOST_CHOSEN_SEQUENCES => self.rung_pages(slots + 1),
            _ => usize::MAX,
        };
        affordable.min(usable).min(next_rung)
    }

    fn write(&self, slots: usize, pages: usize) -> MemoryPlan {
        let options = &self.input.options;
        let row = |section, name: &str, detail: String, bytes| PlanRow {
            section,
            name: name.to_owned(),
            detail,
            bytes,
        };
        let mut rows: Vec<PlanRow> = Vec::new();
        for weight in self.input.weights {
            rows.push(row(PlanSection::Weights, &weight.group, weight.detail.clone(), weight.bytes));
        }
        for (name, bytes) in self.workspace(slots) {
            rows.push(row(PlanSection::Workspace, name, String::new(), bytes));
        }
        let each = format!("{slots} × {} {}", readable(self.slot_bytes), options.state_type.name());
        rows.push(row(PlanSection::States, "slots", each, self.slot_bytes.saturating_mul(slots as u64)));
        let each = format!("{pages} × {} {}", readable(self.page_bytes), options.kv_type.name());
        rows.push(row(PlanSection::Kv, "pages", each, self.page_bytes.saturating_mul(pages as u64)));
        if let Some(host) = self.host.filter(|_| self.input.host.is_shared) {
            let each = format!("{} × {}", host.granules, readable(host.granule_bytes));
            rows.push(row(PlanSection::Host, "pages, snapshots", each, host.bytes()));
        }
        let (max_rows, max_logit_rows) = self.step_rows(slots);
        let held = pages.saturating_mul(PAGE_TOKENS);
        MemoryPlan {
            rows,
            budget_bytes: self.input.budget_bytes,
            pages,
            slots,
            max_context_tokens: options
                .max_context_tokens
                .unwrap_or_else(|| held.min(self.input.geometry.max_context)),
            max_rows,
            max_logit_rows,
            prefill_rows: options.prefill_rows,
            kv_type: options.kv_type,
            state_type: options.state_type,
            host: self.host,
        }
    }

    fn refusal(&self, slots: usize, pages: usize) -> PlanError {
        let state_bytes = self.slot_bytes.saturating_mul(slots as u64);
        let kv_bytes = self.page_bytes.saturating_mul(pages as u64);
        let fixed = self.fixed_bytes(slots);
        PlanError::DoesNotFit {
            needed_bytes: fixed.saturating_add(kv_bytes),
            budget_bytes: self.input.budget_bytes,
            weight_bytes: self.weight_bytes,
            workspace_bytes: fixed
                .saturating_sub(self.weight_bytes)
                .saturating_sub(state_bytes)
                .saturating_sub(self.host_bytes()),
            host_bytes: self.host_bytes(),
            slots,
            state_bytes,
            kv_tokens: pages.saturating_mul(PAGE_TOKENS),
            kv_bytes,
            hint: self.what_fits(slots, pages),
        }
    }

    /// One change of the options that would fit, the mildest first.
    fn what_fits(&self, slots: usize, pages: usize) -> String {
        let fewer = largest(slots, |slots| self.fits(slots, pages));
        if fewer > 0 {
            return format!(
                "{fewer} sequences would fit with {} KV tokens",
                pages.saturating_mul(PAGE_TOKENS)
            );
        }
        let shorter = largest(pages, |pages| self.fits(slots, pages));
        if shorter > 0 {
            return format!("{slots} sequences would fit with {} KV tokens", shorter * PAGE_TOKENS);
        }
        let least = self.total_bytes(1, 1);
        if least <= self.input.budget_bytes {
            let shorter = largest(pages, |pages| self.fits(1, pages));
            return format!("1 sequence would fit with {} KV tokens", shorter * PAGE_TOKENS);
        }
        format!("one sequence of {PAGE_TOKENS} tokens needs {} ({least} bytes)", readable(least))
    }
}

/// Largest number in `1..=most` for which a test holds that fails from some number on; 0 if it never
/// holds.
fn largest(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = high - (high - low) / 2;
        if holds(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// Bytes for people: decimal units, as on data sheets.
pub(crate) fn readable(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.3} GB", value / 1e9),
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = ("total", "", "", self.total_bytes());
        let left = ("left", "", "", self.left_bytes());
        let rows = self
            .rows
            .iter()
            .map(|row| (row.section.name(), row.name.as_str(), row.detail.as_str(), row.bytes));
        let table: Vec<_> = rows.chain([total, left]).collect();
        let names = table.iter().map(|row| row.1.chars().count()).max().unwrap_or(0);
        let details = table.iter().map(|row| row.2.chars().count()).max().unwrap_or(0);
        let mut previous = "";
        for (section, name, detail, bytes) in table {
            let shown = if section == previous { "" } else { section };
            previous = section;
            writeln!(
                out,
                "{shown:<9}  {name:<names$}  {detail:<details$}  {:>10}  {bytes:>15} B",
                readable(bytes)
            )?;
        }
        write!(
            out,
            "budget {} ({} B): {} sequences, {} KV tokens, context {} tokens, slices of {} rows",
            readable(self.budget_bytes),
            self.budget_bytes,
            self.slots,
            self.kv_tokens(),
            self.max_context_tokens,
            self.prefill_rows
        )?;
        match &self.host {
            Some(host) => write!(out, "\nhost cache {host}"),
            None => write!(out, "\nno host cache: prompts are always computed from the start"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LayerKind, WeightFormat};

    /// A stored state of the 27B in halves.
    const STATE_BYTES: u64 = 75_497_472 + 48 * 3 * 10_240 * 2;

    /// Weights of a geometry: int4 body, int8 head and embedding.
    fn quantised(geometry: &Geometry) -> Vec<PlanWeight> {
        let int4 = |rows, cols| WeightFormat::Int4.matrix_bytes(rows, cols);
        let body = geometry.layers.iter().fold(0, |sum, kind| {
            let mixer = match kind {
                LayerKind::Gdn => {
                    let gdn = &geometry.gdn;
                    int4(gdn.conv_channels() + gdn.value_columns(), geometry.hidden)
                        + int4(geometry.hidden, gdn.value_columns())
                }
                LayerKind::Attention => {
                    let attention = &geometry.attention;
                    int4(attention.projected(), geometry.hidden)
                        + int4(geometry.hidden, attention.query_columns())
                }
            };
            let mlp = int4(2 * geometry.intermediate, geometry.hidden)
                + int4(geometry.hidden, geometry.intermediate);
            sum + mixer + mlp
        });
        let table = WeightFormat::Int8.matrix_bytes(geometry.vocab, geometry.hidden);
        [("body", body), ("head", table), ("embedding", table)]
            .map(|(group, bytes)| PlanWeight { group: group.to_owned(), detail: String::new(), bytes })
            .to_vec()
    }

    fn workspace(rows: usize, logit_rows: usize) -> Vec<(&'static str, u64)> {
        vec![("activations", rows as u64 * 200_000), ("logits", logit_rows as u64 * 993_280)]
    }

    fn plan_27b(budget_bytes: u64, options: PlanOptions) -> Result<MemoryPlan, PlanError> {
        let geometry = Geometry::named("27b").unwrap();
        let weights = quantised(&geometry);
        plan(&PlanInput {
            geometry: &geometry,
            weights: &weights,
            workspace: &workspace,
            budget_bytes,
            host: HostMemory { is_shared: false, staging_bytes: STATE_BYTES },
            options,
        })
    }

    #[test]
    fn the_27b_weights_have_the_published_sizes() {
        let weights = quantised(&Geometry::named("27b").unwrap());
        let gigabytes: Vec<f64> = weights.iter().map(|weight| weight.bytes as f64 / 1e9).collect();
        assert!((gigabytes[0] - 12.544).abs() < 5e-4, "body {}", gigabytes[0]);
        assert!((gigabytes[1] - 1.291).abs() < 5e-4, "head {}", gigabytes[1]);
        assert!((gigabytes[2] - 1.291).abs() < 5e-4, "embedding {}", gigabytes[2]);
    }

    #[test]
    fn a_24_gib_card_holds_the_27b_model_and_the_table_adds_up() {
        let plan = plan_27b(24 << 30, PlanOptions::default()).unwrap();
        assert!(plan.slots >= 4 && plan.max_context_tokens >= 32_768, "{plan}");
        assert_eq!(plan.total_bytes() + plan.left_bytes(), 24 << 30);
        let spec = plan.cache_spec(&Geometry::named("27b").unwrap());
        let caches =
            plan.rows().iter().filter(|row| matches!(row.section, PlanSection::States | PlanSection::Kv));
        assert_eq!(caches.map(|row| row.bytes).sum::<u64>(), spec.bytes());
        let text = plan.to_string();
        assert!(text.contains("embedding") && text.contains("total") && text.contains("left"), "{text}");
        let widths: Vec<usize> = text.lines().rev().skip(2).map(|line| line.chars().count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "columns are not aligned:\n{text}");
    }

    #[test]
    fn a_refusal_says_what_would_fit() {
        let asked =
            PlanOptions { max_sequences: Some(64), max_context_tokens: Some(32_768), ..Default::default() };
        let Err(PlanError::DoesNotFit { needed_bytes, budget_bytes, hint, .. }) = plan_27b(24 << 30, asked)
        else {
            panic!("64 states of 240 MB cannot fit");
        };
        assert!(needed_bytes > budget_bytes);
        let fitting: usize = hint.split(' ').next().unwrap().parse().unwrap();
        plan_27b(24 << 30, PlanOptions { max_sequences: Some(fitting), ..asked }).unwrap();
        plan_27b(24 << 30, PlanOptions { max_sequences: Some(fitting + 1), ..asked }).unwrap_err();
        let refusal = plan_27b(8 << 30, PlanOptions::default()).unwrap_err().to_string();
        assert!(
            refusal.contains("8589934592 bytes") && refusal.contains("one sequence of 64 tokens"),
            "{refusal}"
        );
    }

    /// Beside 64 states, int4 weights leave room for keys and values only where a state has 2 bytes an element.
    #[test]
    fn a_24_gib_card_holds_64_sequences_of_the_27b_model_with_f16_states() {
        let options = PlanOptions {
            max_sequences: Some(64),
            kv_tokens: Some(16_384),
            state_type: StateType::F16,
            ..Default::default()
        };
        let plan = plan_27b(24 << 30, options).unwrap();
        assert_eq!((plan.slots, plan.state_type), (64, StateType::F16));
        assert!(plan.to_string().contains("64 × 120.6 MB f16"), "{plan}");
        plan_27b(24 << 30, PlanOptions { state_type: StateType::F32, ..options }).unwrap_err();
    }

    #[test]
    fn a_host_cache_takes_room_for_one_state_of_a_card_and_all_of_itself_of_the_host() {
        let options = PlanOptions {
            max_sequences: Some(8),
            kv_tokens: Some(65_536),
            state_type: StateType::F16,
            host_cache_bytes: 8 << 30,
            ..Default::default()
        };
        let without = plan_27b(24 << 30, PlanOptions { host_cache_bytes: 0, ..options }).unwrap();
        let with = plan_27b(24 << 30, options).unwrap();
        assert_eq!((without.host, with.total_bytes() - without.total_bytes()), (None, STATE_BYTES));
        let host = with.host.unwrap();
        assert_eq!((host.granule_bytes, host.granules, host.state_granules), (4_456_448, 1927, 18));
        assert_eq!((host.bytes(), host.most_states()), (1927 * 4_456_448, 107));
        let text = with.to_string();
        let words = "host cache 8.588 GB: up to 107 snapshots of 78.4 MB, or 123328 KV tokens";
        assert!(text.ends_with(words), "{text}");

        let geometry = Geometry::named("27b").unwrap();
        let on_the_host = |budget_bytes| {
            let host = HostMemory { is_shared: true, staging_bytes: 0 };
            let weights = quantised(&geometry);
            plan(&PlanInput {
                geometry: &geometry,
                weights: &weights,
                workspace: &workspace,
                budget_bytes,
                host,
                options,
            })
        };
        let shared = on_the_host(64 << 30).unwrap();
        assert_eq!(shared.total_bytes(), without.total_bytes() + host.bytes());
        let refusal = on_the_host(24 << 30).unwrap_err().to_string();
        assert!(refusal.contains("host cache 8.588 GB"), "{refusal}");
    }

    #[test]
    fn contradicting_options_are_refused() {
        for options in [
            PlanOptions { max_sequences: Some(0), ..Default::default() },
            PlanOptions { max_context_tokens: Some(300_000), ..Default::default() },
            PlanOptions { max_context_tokens: Some(1000), kv_tokens: Some(999), ..Default::default() },
            PlanOptions { prefill_rows: 63, ..Default::default() },
        ] {
            assert!(matches!(plan_27b(24 << 30, options), Err(PlanError::Option(_))), "{options:?}");
        }
        let huge = PlanOptions { kv_tokens: Some(usize::MAX), ..Default::default() };
        assert!(matches!(plan_27b(24 << 30, huge), Err(PlanError::DoesNotFit { .. })));
    }
}
