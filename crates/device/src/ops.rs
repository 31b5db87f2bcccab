use crate::sample::ScoreRow;
use crate::{
    AttentionShape, Batch, CacheSpec, DeviceError, GdnShape, GdnState, Geometry, KvPage, MatrixData,
    SampleRow, Sampled,
};

/// Facts about a device that do not change after start.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceFacts {
    /// For people: `cpu (avx2, 2 threads)`.
    pub name: String,
    /// Memory that the plan may use.
    pub memory_bytes: u64,
    /// Activation numerics, see [`crate::Activations::name`].
    pub activations: crate::Activations,
}

/// What a buffer can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Results that are rounded as [`crate::Activations`] says; a device may store them in that type.
    Activation,
    /// f32: logits, and the `mixed` rows of [`Device::gdn_prepare`], whose gates are never rounded.
    Full,
}

/// The small weights of a GDN layer, on the device.
pub struct GdnWeights<D: Device + ?Sized> {
    /// Of [`Device::conv_taps`]: depthwise taps, the last one multiplies the newest sample.
    pub conv: D::Vector,
    /// `[value_heads]`: `−exp(A_log)`, so that log-decay = `decay_rate · softplus(a + dt_bias)`.
    pub decay_rate: D::Vector,
    /// `[value_heads]`.
    pub dt_bias: D::Vector,
    /// `[value_dim]`: weight of the output norm, plain (not 1 + w).
    pub norm: D::Vector,
}

/// A device that can run a model of the family.
///
/// # Conventions of every op
/// * A buffer is a row-major f32 matrix `[capacity_rows, cols]`; an op reads and writes rows `0..rows` and
///   leaves the others alone. `rows` may be anything from 1 to the buffer's capacity.
/// * An output buffer's old contents never matter (tests poison them), unless the contract says "adds".
/// * Results are rounded as [`crate::Activations`] says; sums, norms, softmax, gates and states are f32.
/// * The bits of a row depend on that row's inputs, the shapes, the phase and the absolute position, never on
///   which rows or sequences run beside it nor on how many.
/// * Norm weights arrive as the factor itself: the model adds 1 to zero-centred weights in f32.
pub trait Device: Send + 'static {
    /// Activations `[capacity_rows, cols]`.
    type Buffer: Send;
    /// A weight matrix, packed as the device likes it.
    type Matrix: Send;
    /// A short f32 vector of weights.
    type Vector: Send;
    /// KV pages and recurrent states.
    type Cache: Send;
    /// Pages and states in host memory.
    type HostStore: Send;

    /// Name, memory, numerics.
    fn facts(&self) -> DeviceFacts;

    // ---- placing things on the device: only before serving starts ----

    /// Makes room for a weight matrix `[rows, cols]`, which [`Device::fill_rows`] then fills.
    fn empty_matrix(
        &mut self,
        format: crate::WeightFormat,
        rows: usize,
        cols: usize,
    ) -> Result<Self::Matrix, DeviceError>;
    /// Packs a block of rows into their place in `matrix`, from `first_row` on. The block has the matrix's format and
    /// inputs; it begins and ends at multiples of [`crate::matrix::BLOCK_ROWS`], or at the end of the matrix. Blocks
    /// may come in any order, every row once; a matrix is used only when all have come.
    fn fill_rows(
        &mut self,
        matrix: &mut Self::Matrix,
        first_row: usize,
        block: &MatrixData<'_>,
    ) -> Result<(), DeviceError>;
    /// Packs a whole weight matrix for this device.
    fn matrix(&mut self, data: &MatrixData<'_>) -> Result<Self::Matrix, DeviceError> {
        let mut matrix = self.empty_matrix(data.format(), data.rows, data.cols)?;
        self.fill_rows(&mut matrix, 0, data)?;
        Ok(matrix)
    }
    /// Bytes that [`Device::matrix`] will take for a matrix of this format and shape, exactly.
    fn matrix_bytes(&self, format: crate::WeightFormat, rows: usize, cols: usize) -> u64;
    /// Places a vector.
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError>;
    /// Places the taps of a depthwise convolution, `[conv_channels, taps]`, in the order the device likes; as many
    /// bytes as the values.
    fn conv_taps(&mut self, values: &[f32], taps: usize) -> Result<Self::Vector, DeviceError>;
    /// Makes a buffer `[rows, cols]`; contents are unspecified.
    fn buffer(&mut self, rows: usize, cols: usize, precision: Precision)
    -> Result<Self::Buffer, DeviceError>;
    /// Bytes that [`Device::buffer`] will take, exactly.
    fn buffer_bytes(&self, rows: usize, cols: usize, precision: Precision) -> u64;
    /// Makes the caches: pages unspecified, slots cleared.
    fn cache(&mut self, spec: &CacheSpec) -> Result<Self::Cache, DeviceError>;

    /// Bytes of work memory that [`Device::reserve`] will take, exactly. Must not shrink when either number of rows
    /// grows.
    fn scratch_bytes(&self, geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> u64;
    /// Makes the device's own work memory for steps of at most `max_rows` rows with logits of at most
    /// `max_logit_rows`: such steps then allocate no tensor.
    fn reserve(
        &mut self,
        geometry: &Geometry,
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Result<(), DeviceError>;

    // ---- a step ----

    /// Called once before the ops of a step, whose phase is the batch's from then on; a device with its own memory
    /// uploads the batch here. [`Batch::check`] holds.
    fn begin_step(&mut self, batch: &Batch) -> Result<(), DeviceError>;

    /// Starts to record a round: the ops until [`Device::end_recording`] are kept instead of run, for
    /// [`Device::replay`]. `batch` stands for every batch of the rows phase with at most as many rows whose spans have
    /// one row each where its have, and any number otherwise; logits are wanted of all rows, in their order.
    /// `false`: this device does not record, and nothing was begun.
    fn begin_recording(&mut self, _batch: &Batch) -> Result<bool, DeviceError> {
        Ok(false)
    }

    /// Ends a recording that was begun.
    fn end_recording(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Runs the smallest recording that fits the batch, in place of [`Device::begin_step`] and all ops of the step;
    /// logits row `i` then belongs to batch row `logit_rows[i]`. `false`: none fits, and nothing was done.
    fn replay(&mut self, _batch: &Batch, _logit_rows: &[usize]) -> Result<bool, DeviceError> {
        Ok(false)
    }

    /// `out[row] = table[batch.tokens[row]]`, dequantised. Token ids are below the table's rows.
    fn embed(
        &mut self,
        table: &Self::Matrix,
        batch: &Batch,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// `out[row] = x[row] · rsqrt(mean(x[row]²) + eps) · weight`.
    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Several matrices on one normed input: with `h = rms_norm(x)` as above (rounded to the activation type),
    /// `out[row] = parts[0]·h | parts[1]·h | …`, columns side by side. `out` has at least as many columns as the
    /// parts have rows together.
    fn norm_linears(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        norm: &Self::Vector,
        eps: f32,
        parts: &[&Self::Matrix],
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// `out[row] = matrix · input[row]`.
    fn linear(
        &mut self,
        rows: usize,
        input: &Self::Buffer,
        matrix: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Adds to the residual stream: `x[row] += matrix · input[row]`, one rounding of the sum.
    fn linear_add(
        &mut self,
        rows: usize,
        input: &Self::Buffer,
        matrix: &Self::Matrix,
        x: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// The first half of an MLP: [`Device::norm_linears`] of two matrices of `width` outputs, the gate first, then
    /// [`Device::swiglu`]. `gate_up` is work memory for both products: what it holds afterwards is not said. A device may
    /// do all of it at once; the result has the same bits.
    fn norm_swiglu(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        norm: &Self::Vector,
        eps: f32,
        (parts, width): ([&Self::Matrix; 2], usize),
        gate_up: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        self.norm_linears(rows, x, norm, eps, &parts, gate_up)?;
        self.swiglu(rows, width, gate_up, out)
    }

    /// `out[row][i] = silu(gate_up[row][i]) · gate_up[row][width + i]` for `i < width`, where
    /// `silu(x) = x / (1 + e^(−x))`; `gate_up` has `2·width` columns.
    fn swiglu(
        &mut self,
        rows: usize,
        width: usize,
        gate_up: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// q/k norm, RoPE and KV append of one attention layer.
    ///
    /// `projected` columns: per query head `query | gate`, then all keys, then all values
    /// ([`AttentionShape::projected`]). Writes `query[row]` = roped, normed queries `[query_heads · head_dim]`, and
    /// stores roped, normed keys and raw values at the row's position in pages of `kv_layer`, rounded to the KV
    /// type; [`crate::KvType::Int8`] quantises each head's vector by itself
    /// ([`crate::numeric::quantize_vector`]), so that stored bits depend on the token alone. Norm: RMS over a head with `q_norm`/`k_norm` `[head_dim]`. RoPE: dims `i` and `i + rope_dims/2` of
    /// the first `rope_dims` turn by `θ = f32(position) · f32(rope_theta^(−2i/rope_dims))`, product in f32:
    /// `(a, b) → (a cos θ − b sin θ, b cos θ + a sin θ)`. Gates stay where they are.
    fn attention_prepare(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        projected: &Self::Buffer,
        q_norm: &Self::Vector,
        k_norm: &Self::Vector,
        cache: &mut Self::Cache,
        query: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Causal softmax attention over the pages, then the sigmoid gate:
    /// `out[row][head] = σ(gate[row][head]) ⊙ Σ_p softmax_p(scale · query·key_p) value_p` over positions
    /// `p ≤` the row's own, with keys and values as they are stored. Where activations are bfloat16, a weight may be
    /// rounded to it before it multiplies a value (not before it is summed), as tensor cores need. `projected` is the
    /// input of [`Device::attention_prepare`] (for the gates).
    fn attention(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        query: &Self::Buffer,
        projected: &Self::Buffer,
        cache: &Self::Cache,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Convolution, gates and L2 norms of one GDN layer.
    ///
    /// `projected` columns: `q | k | v | z | b | a` ([`GdnShape`]). Raw `q | k | v` go to the slot's conv ring at
    /// `position % CONV_RING`; the causal depthwise convolution reads them and the previous `conv_width − 1` inputs
    /// there (positions before 0 count as 0) and ends in SiLU. Every raw input is used as the ring stores it: with
    /// [`crate::StateType::F16`] rounded to bfloat16 first. Writes `mixed[row]` = `q̂ | k̂ | v | log-decay | β`:
    /// q̂ and k̂ L2-normalised per head (`rsqrt(Σ² + 1e-6)`), q̂ also times `key_dim^(-1/2)`;
    /// `log-decay = decay_rate · softplus(a + dt_bias)` (softplus(x) = x above 20), `β = σ(b)`; the last two are
    /// never rounded. Spans may have any number of rows in the prefill phase.
    fn gdn_prepare(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        weights: &GdnWeights<Self>,
        projected: &Self::Buffer,
        cache: &mut Self::Cache,
        mixed: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// The gated delta rule of one GDN layer over `mixed` of [`Device::gdn_prepare`];
    /// `out[row]` = `[value_heads · value_dim]`.
    ///
    /// Per value head with state S `[key_dim, value_dim]`, decay `g = e^(log-decay)`:
    /// `S ← g S; u = β (v − Sᵀ k̂); S ← S + k̂ uᵀ; o = Sᵀ q̂`.
    ///
    /// *Prefill*: one [`crate::Chunk`] after another in the chunked (WY) form, each from the base state as stored to
    /// the base state as stored: after every chunk it is rounded to the [`crate::StateType`]. Chunks are fixed by the
    /// tokens, so slices leave no trace. The ring stays empty.
    ///
    /// *Rows*: with base state `S_b`, ring entries j = 1..m (`k̂_j`, `u_j`, `log-decay_j`) and `G_j` the product of the
    /// first j decays (a sum of logs), row t = m + 1 gets
    /// `pred = G_t S_bᵀ k̂_t + Σ_{j<t} (G_t/G_j)(k̂_j·k̂_t) u_j`, `u_t = β_t (v_t − pred)`,
    /// `o_t = G_t S_bᵀ q̂_t + Σ_{j≤t} (G_t/G_j)(k̂_j·q̂_t) u_j`, sums in index order, and appends entry t
    /// at ring index `t − 1`. A span whose `ring_len` is [`crate::RING_TOKENS`] first folds:
    /// `S_b ← G_R S_b + Σ_j (G_R/G_j) k̂_j u_jᵀ`, rounded to the state type.
    ///
    /// Every `k̂` and `u`, the row's own included, is used as stored: rounded to the state type before any product.
    /// Sums and decays are f32 or wider.
    fn gdn_scan(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        mixed: &Self::Buffer,
        cache: &mut Self::Cache,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// A GDN layer between its projections: [`Device::gdn_prepare`], [`Device::gdn_scan`] and [`Device::gated_norm`] one
    /// after another. `mixed` and `scanned` are work memory: what they hold afterwards is not said. A device may do rounds
    /// at once; rounds of the same rows have the same bits then, whatever stands beside them.
    fn gdn_layer(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        weights: &GdnWeights<Self>,
        projected: &Self::Buffer,
        cache: &mut Self::Cache,
        work: (&mut Self::Buffer, &mut Self::Buffer),
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        let (mixed, scanned) = work;
        self.gdn_prepare(batch, gdn_layer, shape, weights, projected, cache, mixed)?;
        self.gdn_scan(batch, gdn_layer, shape, mixed, cache, scanned)?;
        self.gated_norm(batch.rows(), shape, scanned, projected, &weights.norm, out)
    }

    /// Output norm and gate of a GDN layer, per value head over `value_dim`:
    /// `out = scanned · rsqrt(mean(scanned²) + eps) · norm · silu(z)`, z in `projected`, one rounding.
    fn gated_norm(
        &mut self,
        rows: usize,
        shape: &GdnShape,
        scanned: &Self::Buffer,
        projected: &Self::Buffer,
        norm: &Self::Vector,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Input of the MTP module: `out[row] = rms_norm(table[batch.tokens[row]], embed_norm) |
    /// rms_norm(hidden[row], hidden_norm)`.
    fn mtp_combine(
        &mut self,
        batch: &Batch,
        table: &Self::Matrix,
        hidden: &Self::Buffer,
        embed_norm: &Self::Vector,
        hidden_norm: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// `logits[i] = matrix · hidden[rows[i]]`, never rounded to the activation type.
    fn head(
        &mut self,
        rows: &[usize],
        hidden: &Self::Buffer,
        matrix: &Self::Matrix,
        logits: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Draws one token per entry from rows of `logits`; see [`SampleRow`]. A drawn token is the argmax over the
    /// kept tokens of `(logit / temperature) + gumbel(seed, position, token)`. A row whose logits are no distribution gives
    /// [`Sampled::unsound`].
    fn sample(&mut self, logits: &Self::Buffer, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, DeviceError>;

    /// Log-probabilities of given tokens, as [`Device::sample`] would report them.
    fn score(&mut self, logits: &Self::Buffer, rows: &[ScoreRow]) -> Result<Vec<Sampled>, DeviceError>;

    /// Waits until the ops so far are done, which a device may run in the background.
    fn wait(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    // ---- caches ----

    /// Zeroes a slot's base state; ring and conv ring need no clearing (positions before 0 read as 0).
    fn clear_slot(&mut self, cache: &mut Self::Cache, slot: usize) -> Result<(), DeviceError>;
    /// Copies all layers' state of a slot.
    fn copy_slot(&mut self, cache: &mut Self::Cache, from: usize, to: usize) -> Result<(), DeviceError>;
    /// Copies one page over all KV layers.
    fn copy_page(&mut self, cache: &mut Self::Cache, from: usize, to: usize) -> Result<(), DeviceError>;
    /// Reads one layer's state of a slot.
    fn read_state(
        &mut self,
        cache: &Self::Cache,
        gdn_layer: usize,
        slot: usize,
    ) -> Result<GdnState, DeviceError>;
    /// Writes one layer's state of a slot.
    fn write_state(
        &mut self,
        cache: &mut Self::Cache,
        gdn_layer: usize,
        slot: usize,
        state: &GdnState,
    ) -> Result<(), DeviceError>;
    /// Reads one page of one layer.
    fn read_page(&mut self, cache: &Self::Cache, kv_layer: usize, page: usize)
    -> Result<KvPage, DeviceError>;
    /// Writes one page of one layer, rounding to the KV type as [`Device::attention_prepare`] does.
    fn write_page(
        &mut self,
        cache: &mut Self::Cache,
        kv_layer: usize,
        page: usize,
        content: &KvPage,
    ) -> Result<(), DeviceError>;

    // ---- pages and states in host memory ----
    //
    // A host store is a number of granules of [`CacheSpec::granule_bytes`]. A stored page takes one, a stored state
    // [`CacheSpec::state_granules`], in any order and anywhere. Bytes are stored as they are, in an order that is the
    // device's own: what was stored and is loaded again has the same bits. Copies may still be under way when an op
    // returns; all ops behave as if they were not, and none of the first four waits for them.

    /// Takes host memory for so many granules, before serving starts; contents are unspecified. Pages and states of any
    /// cache of this spec, whatever its numbers of pages and slots, may then be stored in it.
    fn host_store(&mut self, spec: &CacheSpec, granules: usize) -> Result<Self::HostStore, DeviceError>;
    /// Bytes of the device's own memory that [`Device::host_store`] takes beside, exactly.
    fn host_staging_bytes(&self, spec: &CacheSpec) -> u64;
    /// Stores a page over all KV layers, as it is now.
    fn store_page(
        &mut self,
        cache: &Self::Cache,
        page: usize,
        store: &mut Self::HostStore,
        granule: u32,
    ) -> Result<(), DeviceError>;
    /// The reverse of [`Device::store_page`], into any page.
    fn load_page(
        &mut self,
        cache: &mut Self::Cache,
        page: usize,
        store: &Self::HostStore,
        granule: u32,
    ) -> Result<(), DeviceError>;
    /// Stores a slot's state over all GDN layers as a prefill that ended before `position` left it: the base states, and
    /// the raw convolution inputs at [`CacheSpec::stored_rows`]. The ring is taken to be empty. `granules` are as many
    /// as [`CacheSpec::state_granules`], each once.
    fn store_state(
        &mut self,
        cache: &Self::Cache,
        slot: usize,
        position: usize,
        store: &mut Self::HostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError>;
    /// The reverse of [`Device::store_state`], into any slot, at the same position. The ring is empty afterwards; other
    /// rows of the convolution ring mean nothing.
    fn load_state(
        &mut self,
        cache: &mut Self::Cache,
        slot: usize,
        position: usize,
        store: &Self::HostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError>;
    /// Whether all copies between caches and the store that were begun so far are done. Does not wait.
    fn stored(&mut self, store: &Self::HostStore) -> Result<bool, DeviceError>;
    /// The bytes of a granule. Waits for copies to it, so that it is best asked when [`Device::stored`].
    fn read_granule<'a>(&mut self, store: &'a Self::HostStore, granule: u32)
    -> Result<&'a [u8], DeviceError>;
    /// Sets the bytes of a granule, all of them, to what [`Device::read_granule`] gave on a device of this kind. Waits for
    /// copies to and from it.
    fn write_granule(
        &mut self,
        store: &mut Self::HostStore,
        granule: u32,
        bytes: &[u8],
    ) -> Result<(), DeviceError>;

    // ---- activations, for tests and tools ----

    /// Reads rows `0..rows`, row-major, `cols` of the buffer each.
    fn read(&mut self, buffer: &Self::Buffer, rows: usize) -> Result<Vec<f32>, DeviceError>;
    /// Writes the first rows of a buffer.
    fn write(&mut self, buffer: &mut Self::Buffer, values: &[f32]) -> Result<(), DeviceError>;
    /// `to[i] = from[rows[i]]`: gathers rows, e.g. the hidden states that feed a draft.
    fn gather(
        &mut self,
        rows: &[usize],
        from: &Self::Buffer,
        to: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;
}
