// Gated DeltaNet of one layer: convolution and gates; rounds against base state and ring. Chunks: gdn_chunks.cu.
// What gdn_state.cuh declares stands before this file.

#define L2_EPS 1e-6f
#define COLUMNS 32 // value columns of a block
#define LOADS(DIM) ((DIM + 31) / 32)

__device__ __forceinline__ float decay(double log) { return expf((float)log); }

struct PrepareParams {
    Step step;
    const activation *projected;
    const float *taps; // `[CHANNELS, CONV_WIDTH]`
    const float *decay_rate;
    const float *dt_bias;
    stored_input *conv; // `[slots, CONV_RING, CHANNELS]` of this layer
    float *mixed;
    u32 projected_cols, mixed_cols;
    float query_scale;
};

// A row's own raw input of a channel as the ring stores it.
__device__ __forceinline__ stored_input own_input(const PrepareParams &p, u32 row, u32 channel) {
    return narrow_input(from_activation(p.projected[(size_t)row * p.projected_cols + channel]));
}

__device__ __forceinline__ stored_input *ring_input(const PrepareParams &p, const Span &span, u32 position, u32 channel) {
    return p.conv + ((size_t)span.slot * CONV_RING + position % CONV_RING) * CHANNELS + channel;
}

// Raw input of a channel `age` tokens before a row: of this step, of the ring, or 0 before position 0.
__device__ __forceinline__ float raw_input(const PrepareParams &p, const Span &span, u32 row, u32 age, u32 channel) {
    u32 index = row - span.first_row, position = span.position + index;
    if (age > position) return 0.0f;
    if (age <= index) return widen_input(own_input(p, row - age, channel));
    return widen_input(*ring_input(p, span, position - age, channel));
}

#define PREPARE_UNITS (2 * KEY_HEADS + VALUE_HEADS)
// A warp per head of q, k or v, one more for the gates. In a round it also puts the raw inputs into the ring: the at
// most 16 positions written and the 3 before them that other blocks may read still are 19 different places of its 20.
// grid (ceil((PREPARE_UNITS + 1) / 4), rows)
extern "C" __global__ void __launch_bounds__(128) prepare(const PrepareParams p) {
    start_in_order();
    u32 lane = threadIdx.x & 31, unit = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y;
    if (unit > PREPARE_UNITS || !has_row(p.step, row)) return;
    Span span = p.step.spans[p.step.row_span[row]];
    bool in_round = span.chunks == 0;
    const activation *input = p.projected + (size_t)row * p.projected_cols;
    float *mixed = p.mixed + (size_t)row * p.mixed_cols;
    if (unit == PREPARE_UNITS) {
        for (u32 head = lane; head < VALUE_HEADS; head += 32) {
            mixed[LOG_DECAY_COLUMN + head] =
                p.decay_rate[head] * softplus(from_activation(input[A_COLUMN + head]) + p.dt_bias[head]);
            mixed[BETA_COLUMN + head] = sigmoid(from_activation(input[B_COLUMN + head]));
        }
        return;
    }
    const u32 WIDEST = LOADS(KEY_DIM) > LOADS(VALUE_DIM) ? LOADS(KEY_DIM) : LOADS(VALUE_DIM);
    bool is_value = unit >= 2 * KEY_HEADS;
    u32 dim = is_value ? VALUE_DIM : KEY_DIM;
    u32 first = is_value ? 2 * KEY_COLUMNS + (unit - 2 * KEY_HEADS) * VALUE_DIM : unit * KEY_DIM;
    float values[WIDEST], squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WIDEST; i++) {
        u32 col = lane + i * 32, channel = first + col;
        values[i] = 0.0f;
        if (col >= dim) continue;
        if (in_round) *ring_input(p, span, span.position + row - span.first_row, channel) = own_input(p, row, channel);
        float sum = 0.0f;
#pragma unroll
        for (u32 tap = 0; tap < CONV_WIDTH; tap++)
            sum = fmaf(p.taps[channel * CONV_WIDTH + tap], raw_input(p, span, row, CONV_WIDTH - 1 - tap, channel), sum);
        values[i] = silu(sum);
        squares = fmaf(values[i], values[i], squares);
    }
    float factor = 1.0f;
    if (!is_value) factor = (unit < KEY_HEADS ? p.query_scale : 1.0f) / sqrtf(warp_sum(squares) + L2_EPS);
#pragma unroll
    for (u32 i = 0; i < WIDEST; i++)
        if (lane + i * 32 < dim) mixed[first + lane + i * 32] = round_activation(values[i] * factor);
}

// Puts the last raw inputs of each span of a prompt into the ring, after `prepare` has read it.
// grid (ceil(CHANNELS / 256), CONV_RING, spans)
extern "C" __global__ void __launch_bounds__(256) remember(const PrepareParams p) {
    start_in_order();
    u32 channel = blockIdx.x * 256 + threadIdx.x;
    if (!has_span(p.step, blockIdx.z)) return;
    Span span = p.step.spans[blockIdx.z];
    if (channel >= CHANNELS || blockIdx.y >= span.rows) return;
    u32 index = span.rows - 1 - blockIdx.y, position = span.position + index;
    *ring_input(p, span, position, channel) = own_input(p, span.first_row + index, channel);
}

#define PARTS 4
#define PART_KEYS ((KEY_DIM + PARTS - 1) / PARTS)
#define COLUMN_BLOCKS ((VALUE_DIM + COLUMNS - 1) / COLUMNS)

template <int ROWS> struct RoundShared {
    double logs[RING_TOKENS];
    float row_keys[ROWS][KEY_DIM];
    float row_queries[ROWS][KEY_DIM];
    // Keys of the ring while it is folded and the weights are made, then the parts' sums.
    union {
        float keys[RING_TOKENS][KEY_DIM];
        float sums[2][PARTS][ROWS][COLUMNS];
    };
    float key_weights[ROWS][RING_TOKENS];
    float query_weights[ROWS][RING_TOKENS];
    float corrected[RING_TOKENS][COLUMNS];
    bool appends;
};

// Sums of the log-decays that the lanes of one warp have, in order.
__device__ __forceinline__ void sum_logs(double *logs, float log, u32 count) {
    double sum = 0.0;
    for (u32 j = 0; j < count; j++) {
        sum += (double)__shfl_sync(0xffffffffu, log, j);
        if ((threadIdx.x & 31) == j) logs[j] = sum;
    }
}

// S ← G_R S + Σ_j (G_R / G_j) k̂_j u_jᵀ of the block's columns, for a full ring.
template <int ROWS>
__device__ __forceinline__ void fold(const ScanParams &p, RoundShared<ROWS> &s, float (&state)[PART_KEYS], stored *base) {
    u32 lane = threadIdx.x & 31, part = threadIdx.x / 32;
    double last = s.logs[RING_TOKENS - 1];
    for (u32 j = part; j < RING_TOKENS; j += PARTS) s.corrected[j][lane] *= decay(last - s.logs[j]);
    __syncthreads();
    float factor = decay(last);
#pragma unroll
    for (u32 i = 0; i < PART_KEYS; i++) state[i] *= factor;
#pragma unroll 2
    for (u32 j = 0; j < RING_TOKENS; j++) {
        float u = s.corrected[j][lane];
#pragma unroll
        for (u32 i = 0; i < PART_KEYS; i++) {
            u32 d = part * PART_KEYS + i;
            if (d < KEY_DIM) state[i] = fmaf(s.keys[j][d], u, state[i]);
        }
    }
    bool has_column = blockIdx.x * COLUMNS + lane < VALUE_DIM;
#pragma unroll
    for (u32 i = 0; i < PART_KEYS; i++) {
        u32 d = part * PART_KEYS + i;
        stored value = narrow(state[i]);
        if (has_column && d < KEY_DIM) base[d * VALUE_DIM] = value;
        state[i] = widen(value);
    }
    __syncthreads();
}

// Whether this block is the one that writes the keys and log-decays of the round's entries, which all blocks of a key
// head share. Without a fold nobody reads those entries. With one, they hold what the other blocks fold: the block that
// has read last writes.
template <int ROWS>
__device__ __forceinline__ bool appends(const ScanParams &p, RoundShared<ROWS> &s, u32 slot, u32 head, bool folds) {
    if (!folds) return blockIdx.x == 0 && head % GROUP_HEADS == 0;
    if (threadIdx.x == 0) {
        u32 *readers = p.readers + slot * KEY_HEADS + KEY_HEAD(head);
        __threadfence();
        s.appends = atomicAdd(readers, 1) == GROUP_HEADS * COLUMN_BLOCKS - 1;
        if (s.appends) *readers = 0;
    }
    __syncthreads();
    return s.appends;
}

// Rows of a round: S is read once for all of them, by four warps with a quarter of the keys each, a value column per
// lane, on its way while the weights of ring and rows are made; then one warp walks ring and rows in order.
// Compiled for several numbers of rows; the arithmetic of a row is the same in all.
template <int ROWS> __device__ __forceinline__ void scan_round(const ScanParams &p, RoundShared<ROWS> &s) {
    if (!has_span(p.step, blockIdx.z)) return;
    u32 lane = threadIdx.x & 31, part = threadIdx.x / 32, head = blockIdx.y, key_head = KEY_HEAD(head);
    Span span = p.step.spans[blockIdx.z];
    bool folds = span.ring_len == RING_TOKENS;
    u32 rows = span.rows, before = folds ? 0 : span.ring_len, all = before + rows;
    u32 col = blockIdx.x * COLUMNS + lane;
    bool has_column = col < VALUE_DIM;
    stored *ring = p.ring + (size_t)span.slot * RING_TOKENS * RING_ENTRY;
    float *log_decays = p.log_decays + (size_t)span.slot * RING_TOKENS * VALUE_HEADS;
    const float *mixed = p.mixed + (size_t)span.first_row * p.mixed_cols;
    stored *base = p.base + ((size_t)span.slot * VALUE_HEADS + head) * STATE + col;

    stored raw[PART_KEYS];
#pragma unroll
    for (u32 i = 0; i < PART_KEYS; i++) {
        u32 d = part * PART_KEYS + i;
        raw[i] = has_column && d < KEY_DIM ? base[d * VALUE_DIM] : (stored)0;
    }
    for (u32 i = threadIdx.x; i < rows * KEY_DIM; i += PARTS * 32) {
        const float *row = mixed + (size_t)(i / KEY_DIM) * p.mixed_cols + key_head * KEY_DIM + i % KEY_DIM;
        s.row_queries[i / KEY_DIM][i % KEY_DIM] = row[0];
        s.row_keys[i / KEY_DIM][i % KEY_DIM] = round_state(row[KEY_COLUMNS]);
    }
    for (u32 i = threadIdx.x; i < span.ring_len * KEY_DIM; i += PARTS * 32)
        s.keys[i / KEY_DIM][i % KEY_DIM] = widen(ring[(i / KEY_DIM) * RING_ENTRY + key_head * KEY_DIM + i % KEY_DIM]);
    for (u32 j = part; j < span.ring_len; j += PARTS)
        s.corrected[j][lane] = has_column ? widen(ring[j * RING_ENTRY + KEY_COLUMNS + head * VALUE_DIM + col]) : 0.0f;
    // Warp 0 has an entry per lane, the ring's before the rows'.
    float row_log = 0.0f;
    if (part == 0) {
        float log = lane < span.ring_len ? log_decays[lane * VALUE_HEADS + head] : 0.0f;
        if (before <= lane && lane < all)
            row_log = mixed[(size_t)(lane - before) * p.mixed_cols + LOG_DECAY_COLUMN + head];
        sum_logs(s.logs, lane < span.ring_len ? log : row_log, folds ? RING_TOKENS : all);
    }
    __syncthreads();
    float state[PART_KEYS];
#pragma unroll
    for (u32 i = 0; i < PART_KEYS; i++) state[i] = widen(raw[i]);
    bool is_writer = appends(p, s, span.slot, head, folds);
    if (folds) {
        fold(p, s, state, base);
        if (part == 0) sum_logs(s.logs, row_log, all);
        __syncthreads();
    }
    // (G_t / G_j) k̂_j·k̂_t and (G_t / G_j) k̂_j·q̂_t
    for (u32 i = part; i < rows * all; i += PARTS) {
        u32 t = i / all, j = i % all;
        if (j > before + t) continue;
        const float *key = j < before ? s.keys[j] : s.row_keys[j - before];
        float with_key = 0.0f, with_query = 0.0f;
#pragma unroll
        for (u32 d = lane; d < KEY_DIM; d += 32) {
            with_key = fmaf(key[d], s.row_keys[t][d], with_key);
            with_query = fmaf(key[d], s.row_queries[t][d], with_query);
        }
        with_key = warp_sum(with_key), with_query = warp_sum(with_query);
        if (lane == 0) {
            float weight = decay(s.logs[before + t] - s.logs[j]);
            s.key_weights[t][j] = weight * with_key, s.query_weights[t][j] = weight * with_query;
        }
    }
    __syncthreads();
    for (u32 t = 0; t < rows; t++) {
        float from_key = 0.0f, from_query = 0.0f;
#pragma unroll
        for (u32 i = 0; i < PART_KEYS; i++) {
            u32 d = part * PART_KEYS + i;
            if (d >= KEY_DIM) break;
            from_key = fmaf(state[i], s.row_keys[t][d], from_key);
            from_query = fmaf(state[i], s.row_queries[t][d], from_query);
        }
        s.sums[0][part][t][lane] = from_key, s.sums[1][part][t][lane] = from_query;
    }
    __syncthreads();
    if (part == 0) {
        for (u32 t = 0; t < rows; t++) {
            u32 entry = before + t;
            const float *row = mixed + (size_t)t * p.mixed_cols;
            float predicted = 0.0f, read = 0.0f;
#pragma unroll
            for (u32 i = 0; i < PARTS; i++) predicted += s.sums[0][i][t][lane], read += s.sums[1][i][t][lane];
            float factor = decay(s.logs[entry]), sum = factor * predicted, output = factor * read;
#pragma unroll 4
            for (u32 j = 0; j < entry; j++) {
                sum = fmaf(s.key_weights[t][j], s.corrected[j][lane], sum);
                output = fmaf(s.query_weights[t][j], s.corrected[j][lane], output);
            }
            float value = has_column ? row[2 * KEY_COLUMNS + head * VALUE_DIM + col] : 0.0f;
            float u = round_state(row[BETA_COLUMN + head] * (value - sum));
            s.corrected[entry][lane] = u;
            output = fmaf(s.query_weights[t][entry], u, output);
            if (has_column) {
                ring[entry * RING_ENTRY + KEY_COLUMNS + head * VALUE_DIM + col] = narrow(u);
                p.out[(size_t)(span.first_row + t) * p.out_cols + head * VALUE_DIM + col] = to_activation(output);
            }
        }
        return;
    }
    if (!is_writer) return;
    for (u32 i = threadIdx.x - 32; i < rows * GROUP_HEADS; i += (PARTS - 1) * 32) {
        u32 t = i / GROUP_HEADS, of_group = key_head * GROUP_HEADS + i % GROUP_HEADS;
        log_decays[(before + t) * VALUE_HEADS + of_group] = mixed[(size_t)t * p.mixed_cols + LOG_DECAY_COLUMN + of_group];
    }
    for (u32 i = threadIdx.x - 32; i < rows * KEY_DIM; i += (PARTS - 1) * 32)
        ring[(before + i / KEY_DIM) * RING_ENTRY + key_head * KEY_DIM + i % KEY_DIM] =
            narrow(s.row_keys[i / KEY_DIM][i % KEY_DIM]);
}

// At most so many rows in every span. grid (ceil(VALUE_DIM / COLUMNS), VALUE_HEADS, spans)
#define SCAN_ROWS(ROWS)                                                                                                \
    extern "C" __global__ void __launch_bounds__(PARTS * 32, 4) scan_rows_##ROWS(const ScanParams p) {                 \
        __shared__ RoundShared<ROWS> shared;                                                                           \
        start_in_order();                                                                                              \
        scan_round<ROWS>(p, shared);                                                                                   \
    }
SCAN_ROWS(1)
SCAN_ROWS(4)
SCAN_ROWS(16)
