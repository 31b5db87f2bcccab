//! The work of a step, op by op: the bytes that must move and the operations that must be done, from shapes alone.
//!
//! Every byte counts once however often a device reads it: weights once a step, keys and values once for all rows of a
//! sequence, activations once in and once out of every op. Divided by what a device can do this is a floor: what is
//! measured above it is the device's own.

use qwill_device::{Batch, Geometry, KvType, LayerKind, Phase, RING_TOKENS, Span, StateType, WeightFormat};

use crate::names::{
    ATTENTION_INPUTS, ATTENTION_OUTPUT, EMBEDDING, GDN_INPUTS, GDN_OUTPUT, HEAD, MLP_INPUTS, MLP_OUTPUT,
    in_layer, matrix_shape,
};

/// Tokens of a chunk that the prefill's operations are counted for.
const CHUNK: u64 = qwill_device::batch::CHUNK_TOKENS as u64;

/// Which units of a device do an op's arithmetic at best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Products of matrices.
    Matrix,
    /// Everything else.
    Vector,
}

/// Work of an op over all layers of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpCost {
    /// The op, as a device names it.
    pub op: &'static str,
    /// Bytes that must be read or written.
    pub bytes: u64,
    /// Additions and multiplications; a multiply-add is two.
    pub operations: u64,
    /// Who does them.
    pub arithmetic: Arithmetic,
}

/// How a model's numbers are stored.
#[derive(Clone, Copy)]
pub struct StoredAs<'a> {
    /// Format of a matrix by its canonical name.
    pub matrix: &'a dyn Fn(&str) -> WeightFormat,
    /// Keys and values.
    pub kv_type: KvType,
    /// Recurrent states, rings and raw convolution inputs.
    pub state_type: StateType,
    /// Bytes of an element of an activation buffer.
    pub activation_bytes: u64,
}

/// The ops of [`crate::Model::forward`] and [`crate::Model::sample`] for a batch with logits of some rows, in the
/// order in which they first run.
pub fn step_costs(
    geometry: &Geometry,
    stored: &StoredAs<'_>,
    batch: &Batch,
    logit_rows: usize,
) -> Vec<OpCost> {
    let mut costs = Costs { geometry, stored, batch, rows: batch.rows() as u64, found: Vec::new() };
    costs.embed();
    for (layer, kind) in geometry.layers.iter().enumerate() {
        match kind {
            LayerKind::Gdn => costs.gdn(layer),
            LayerKind::Attention => costs.attention(layer),
        }
        costs.mlp(layer);
    }
    costs.finish(logit_rows as u64);
    costs.found
}

struct Costs<'a> {
    geometry: &'a Geometry,
    stored: &'a StoredAs<'a>,
    batch: &'a Batch,
    rows: u64,
    found: Vec<OpCost>,
}

impl Costs<'_> {
    fn add(&mut self, op: &'static str, arithmetic: Arithmetic, bytes: u64, operations: u64) {
        match self.found.iter_mut().find(|cost| cost.op == op) {
            Some(cost) => {
                cost.bytes += bytes;
                cost.operations += operations;
            }
            None => self.found.push(OpCost { op, bytes, operations, arithmetic }),
        }
    }

    /// Bytes of so many activations of every row.
    fn activations(&self, columns: usize) -> u64 {
        self.rows * columns as u64 * self.stored.activation_bytes
    }

    fn shape(&self, name: &str) -> (u64, u64) {
        let (outputs, inputs) = matrix_shape(self.geometry, name);
        (outputs as u64, inputs as u64)
    }

    fn weight_bytes(&self, name: &str) -> u64 {
        let (outputs, inputs) = matrix_shape(self.geometry, name);
        (self.stored.matrix)(name).matrix_bytes(outputs, inputs)
    }

    fn embed(&mut self) {
        let row = (self.stored.matrix)(EMBEDDING).matrix_bytes(1, self.geometry.hidden);
        let bytes = self.rows * row + self.activations(self.geometry.hidden);
        self.add("embed", Arithmetic::Vector, bytes, 0);
    }

    /// Matrices on one normed input.
    fn norm_linears(&mut self, layer: usize, modules: &[&str]) {
        let (mut bytes, mut operations) = (self.geometry.hidden as u64 * 4, 0);
        bytes += self.activations(self.geometry.hidden);
        for module in modules {
            let name = in_layer(layer, module);
            let (outputs, inputs) = self.shape(&name);
            bytes += self.weight_bytes(&name) + self.activations(outputs as usize);
            operations += 2 * self.rows * outputs * inputs;
        }
        self.add("norm_linears", Arithmetic::Matrix, bytes, operations);
    }

    /// A product added to the residual stream.
    fn linear_add(&mut self, layer: usize, module: &str) {
        let name = in_layer(layer, module);
        let (outputs, inputs) = self.shape(&name);
        let activations = self.activations(inputs as usize) + 2 * self.activations(outputs as usize);
        let operations = 2 * self.rows * outputs * inputs;
        self.add("linear_add", Arithmetic::Matrix, self.weight_bytes(&name) + activations, operations);
    }

    fn attention(&mut self, layer: usize) {
        self.norm_linears(layer, &ATTENTION_INPUTS);
        let shape = &self.geometry.attention;
        let (query, kv) = (shape.query_columns(), shape.kv_columns());
        let token_bytes = (2 * shape.kv_heads * self.stored.kv_type.vector_bytes(shape.head_dim)) as u64;

        let moved = self.activations(2 * query + 2 * kv) + self.rows * token_bytes;
        // A norm's square, sum and two products, and the rotation of a pair: six an element.
        let operations = 6 * self.rows * (query + kv) as u64;
        self.add("attention_prepare", Arithmetic::Vector, moved, operations);

        let (mut read, mut pairs) = (0, 0);
        for Span { rows, position, .. } in &self.batch.spans {
            let (rows, position) = (*rows as u64, *position as u64);
            read += (position + rows) * token_bytes;
            pairs += rows * position + rows * (rows + 1) / 2;
        }
        let bytes = self.activations(3 * query) + read;
        self.add("attention", Arithmetic::Matrix, bytes, 4 * query as u64 * pairs);
        self.linear_add(layer, ATTENTION_OUTPUT);
    }

    fn gdn(&mut self, layer: usize) {
        self.norm_linears(layer, &GDN_INPUTS);
        let shape = &self.geometry.gdn;
        let (channels, heads) = (shape.conv_channels(), shape.value_heads);
        let spans = self.batch.spans.len() as u64;

        let history = (shape.conv_width - 1) as u64 * channels as u64 * self.element();
        let moved = self.activations(channels + 2 * heads) + self.mixed();
        let bytes = moved + spans * history + self.rows * channels as u64 * self.element();
        let operations = self.rows * channels as u64 * 2 * shape.conv_width as u64;
        self.add("gdn_prepare", Arithmetic::Vector, bytes, operations);

        let moved = self.mixed() + self.activations(shape.value_columns());
        let states: u64 = self.batch.spans.iter().map(|span| self.state_bytes(span)).sum();
        let (arithmetic, operations) = self.scan_operations();
        self.add("gdn_scan", arithmetic, moved + states, operations);

        let bytes = self.activations(3 * shape.value_columns());
        self.add("gated_norm", Arithmetic::Vector, bytes, 8 * self.rows * shape.value_columns() as u64);
        self.linear_add(layer, GDN_OUTPUT);
    }

    /// Bytes of an element of state, ring or convolution inputs.
    fn element(&self) -> u64 {
        self.stored.state_type.bytes() as u64
    }

    /// Bytes of the mixed rows, whose gates are never rounded.
    fn mixed(&self) -> u64 {
        self.rows * self.geometry.gdn.mixed() as u64 * 4
    }

    /// State and ring of one layer and sequence. Rows read the state and the ring's entries and add entries; a full ring
    /// is folded into the state first, which is then written too. A prompt reads the state once and writes it once.
    fn state_bytes(&self, span: &Span) -> u64 {
        let shape = &self.geometry.gdn;
        let state = shape.state_elements() as u64 * self.element();
        // The log-decays stay f32.
        let entry = (shape.key_columns() + shape.value_columns()) as u64 * self.element()
            + shape.value_heads as u64 * 4;
        match self.batch.phase {
            Phase::Prefill => 2 * state,
            Phase::Rows => {
                let folded = if span.ring_len == RING_TOKENS { state } else { 0 };
                state + folded + (span.ring_len + span.rows) as u64 * entry
            }
        }
    }

    /// One step of the rule takes seven operations an element of the state: decay, the key's product, the update and the
    /// query's product. In chunks of C tokens, per token and value head: products of keys and queries with the state and
    /// the state's update, 6 · key · value; keys with keys and queries with keys, 4 · C · key; the two products of the
    /// C × C matrices with the values, 4 · C · value.
    fn scan_operations(&self) -> (Arithmetic, u64) {
        let shape = &self.geometry.gdn;
        let (key, value) = (shape.key_dim as u64, shape.value_dim as u64);
        let heads = self.rows * shape.value_heads as u64;
        match self.batch.phase {
            Phase::Rows => (Arithmetic::Vector, heads * 7 * key * value),
            Phase::Prefill => (Arithmetic::Matrix, heads * (6 * key * value + 4 * CHUNK * (key + value))),
        }
    }

    fn mlp(&mut self, layer: usize) {
        self.norm_linears(layer, &MLP_INPUTS);
        let width = self.geometry.intermediate;
        self.add("swiglu", Arithmetic::Vector, self.activations(3 * width), 5 * self.rows * width as u64);
        self.linear_add(layer, MLP_OUTPUT);
    }

    fn finish(&mut self, logit_rows: u64) {
        let (hidden, vocab) = (self.geometry.hidden, self.geometry.vocab as u64);
        let bytes = self.activations(2 * hidden) + hidden as u64 * 4;
        self.add("rms_norm", Arithmetic::Vector, bytes, 4 * self.rows * hidden as u64);
        if logit_rows > 0 {
            let matrix = if self.geometry.tied_head { EMBEDDING } else { HEAD };
            let inputs = logit_rows * hidden as u64 * self.stored.activation_bytes;
            let logits = logit_rows * vocab * 4;
            let operations = 2 * logit_rows * vocab * hidden as u64;
            self.add("head", Arithmetic::Matrix, self.weight_bytes(matrix) + inputs + logits, operations);
            self.add("sample", Arithmetic::Vector, logits, logit_rows * vocab);
        }
    }
}

#[cfg(test)]
mod tests {
    use qwill_device::batch::{prompt_batch, round_batch};

    use super::*;

    fn stored() -> StoredAs<'static> {
        StoredAs {
            matrix: &|name| match name.rsplit('.').next() {
                Some("embed_tokens" | "lm_head") => WeightFormat::Int8,
                Some("in_proj_a" | "in_proj_b") => WeightFormat::Bf16,
                _ => WeightFormat::Int4,
            },
            kv_type: KvType::Bf16,
            state_type: StateType::F32,
            activation_bytes: 2,
        }
    }

    fn costs(batch: &Batch) -> Vec<OpCost> {
        step_costs(&Geometry::named("27b").unwrap(), &stored(), batch, batch.rows())
    }

    fn of(costs: &[OpCost], op: &str) -> OpCost {
        *costs.iter().find(|cost| cost.op == op).unwrap()
    }

    fn near(found: u64, expected: f64, share: f64) {
        assert!((found as f64 - expected).abs() <= expected * share, "{found} is not about {expected}");
    }

    /// Counts of the published geometry: a body of 24.327 G parameters at 0.515625 bytes, a head of 1.271 G at 1.015625,
    /// states of 37.75 M elements, 64 KiB of keys and values a token, 48.65 + 2.54 GFLOP a token.
    #[test]
    fn one_row_of_the_27b_moves_and_computes_the_published_amounts() {
        let costs = costs(&round_batch(1, 1, 1024, 0));
        let weights = of(&costs, "norm_linears").bytes + of(&costs, "linear_add").bytes;
        near(weights, 12.594e9, 0.003);
        near(of(&costs, "head").bytes, 1.291e9 + 1e6, 0.002);
        near(of(&costs, "gdn_scan").bytes, 37.75e6 * 4.0, 0.03);
        near(of(&costs, "attention").bytes, 1025.0 * 65_536.0, 0.01);
        let products = of(&costs, "norm_linears").operations + of(&costs, "linear_add").operations;
        near(products, 48.65e9 + 2.0 * 0.024e9, 0.001);
        near(of(&costs, "head").operations, 2.54e9, 0.002);
        near(of(&costs, "attention").operations, 0.393e6 * 1025.0, 0.001);
        near(of(&costs, "gdn_scan").operations, 0.264e9, 0.01);
    }

    #[test]
    fn more_rows_of_a_sequence_move_hardly_more_and_more_sequences_move_their_states() {
        let sum = |batch: &Batch| costs(batch).iter().map(|cost| cost.bytes).sum::<u64>();
        let one = sum(&round_batch(1, 1, 512, 8));
        near(sum(&round_batch(1, 8, 512, 8)), one as f64, 0.02);
        let added = of(&costs(&round_batch(9, 1, 512, 8)), "gdn_scan").bytes
            - of(&costs(&round_batch(1, 1, 512, 8)), "gdn_scan").bytes;
        // A state, eight entries of its ring and the new one, 1.58 MB each.
        near(added, 8.0 * (151e6 + 9.0 * 1.58e6), 0.02);
    }

    #[test]
    fn a_full_ring_writes_the_state_as_well() {
        let scan = |ring_len| of(&costs(&round_batch(2, 1, 512, ring_len)), "gdn_scan").bytes;
        near(scan(32) - scan(31), 2.0 * 151e6, 0.02);
    }

    #[test]
    fn states_in_halves_move_half_as_much() {
        let geometry = Geometry::named("27b").unwrap();
        let scan = |state_type| {
            let stored = StoredAs { state_type, ..stored() };
            of(&step_costs(&geometry, &stored, &round_batch(8, 1, 512, 8), 8), "gdn_scan").bytes
        };
        // But for the mixed rows, which stay f32.
        near(scan(StateType::F16), scan(StateType::F32) as f64 / 2.0, 0.02);
    }

    #[test]
    fn a_prompts_operations_follow_its_length_and_its_square() {
        let of_prompt = |tokens, op: &str| of(&costs(&prompt_batch(tokens)), op).operations;
        near(of_prompt(2048, "norm_linears"), 2.0 * of_prompt(1024, "norm_linears") as f64, 1e-9);
        near(of_prompt(2048, "attention"), 4.0 * of_prompt(1024, "attention") as f64, 0.001);
        // Half the square: a token sees itself and those before it.
        near(of_prompt(2048, "attention"), 0.393e6 * 2048.0 * 2048.0 / 2.0, 0.002);
    }
}
