// Gated DeltaNet of one layer: convolution and gates; rounds against base state and ring; chunks of a prompt.
// Compiled for: KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM (at most 256 each), CONV_WIDTH.
//
// Base states are `[slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]` f32. A ring entry is `k̂ of the key heads | u | log-decay
// of the value heads`. Sums of log-decays are f64: after a token that forgets everything the small differences between
// the following sums would be lost in f32.
#include "common.cuh"

#define KEY_COLUMNS (KEY_HEADS * KEY_DIM)
#define VALUE_COLUMNS (VALUE_HEADS * VALUE_DIM)
#define CHANNELS (2 * KEY_COLUMNS + VALUE_COLUMNS)
#define B_COLUMN (CHANNELS + VALUE_COLUMNS)
#define A_COLUMN (B_COLUMN + VALUE_HEADS)
#define LOG_DECAY_COLUMN CHANNELS
#define BETA_COLUMN (CHANNELS + VALUE_HEADS)
#define RING_ENTRY (KEY_COLUMNS + VALUE_COLUMNS + VALUE_HEADS)
#define STATE (KEY_DIM * VALUE_DIM)
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
    float *conv; // `[slots, CONV_RING, CHANNELS]` of this layer
    float *mixed;
    u32 projected_cols, mixed_cols;
    float query_scale;
};

// Raw input of a channel `age` tokens before a row: of this step, of the ring, or 0 before position 0.
__device__ __forceinline__ float raw_input(const PrepareParams &p, const Span &span, u32 row, u32 age, u32 channel) {
    u32 index = row - span.first_row, position = span.position + index;
    if (age > position) return 0.0f;
    if (age <= index) return from_activation(p.projected[(size_t)(row - age) * p.projected_cols + channel]);
    return p.conv[((size_t)span.slot * CONV_RING + (position - age) % CONV_RING) * CHANNELS + channel];
}

#define PREPARE_UNITS (2 * KEY_HEADS + VALUE_HEADS)
// A warp per head of q, k or v, one more for the gates. grid (ceil((PREPARE_UNITS + 1) / 4), rows)
extern "C" __global__ void __launch_bounds__(128) prepare(const PrepareParams p) {
    start_in_order();
    u32 lane = threadIdx.x & 31, unit = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y;
    if (unit > PREPARE_UNITS || !has_row(p.step, row)) return;
    Span span = p.step.spans[p.step.row_span[row]];
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

// Puts the last raw inputs of each span into the ring, after `prepare` has read it.
// grid (ceil(CHANNELS / 256), CONV_RING, spans)
extern "C" __global__ void __launch_bounds__(256) remember(const PrepareParams p) {
    start_in_order();
    u32 channel = blockIdx.x * 256 + threadIdx.x;
    if (!has_span(p.step, blockIdx.z)) return;
    Span span = p.step.spans[blockIdx.z];
    if (channel >= CHANNELS || blockIdx.y >= span.rows) return;
    u32 index = span.rows - 1 - blockIdx.y, position = span.position + index;
    p.conv[((size_t)span.slot * CONV_RING + position % CONV_RING) * CHANNELS + channel] =
        from_activation(p.projected[(size_t)(span.first_row + index) * p.projected_cols + channel]);
}

struct ScanParams {
    Step step;
    const float *mixed;
    float *base; // of this layer
    float *ring; // `[slots, RING_TOKENS, RING_ENTRY]` of this layer
    activation *out;
    u32 mixed_cols, out_cols;
};

#define KEY_HEAD(HEAD) ((HEAD) / (VALUE_HEADS / KEY_HEADS))
#define FOLD_KEYS 16
#define VALUE_THREADS ((VALUE_DIM + 31) / 32 * 32)

// S ← G_R S + Σ_j (G_R / G_j) k̂_j u_jᵀ for spans whose ring is full. A launch of its own: the scan overwrites entries
// whose keys several value heads still need here.
// grid (ceil(KEY_DIM / FOLD_KEYS), VALUE_HEADS, spans), VALUE_THREADS threads
extern "C" __global__ void __launch_bounds__(VALUE_THREADS) fold(const ScanParams p) {
    start_in_order();
    __shared__ double logs[RING_TOKENS];
    __shared__ float keys[RING_TOKENS][FOLD_KEYS];
    if (!has_span(p.step, blockIdx.z)) return;
    Span span = p.step.spans[blockIdx.z];
    if (span.ring_len != RING_TOKENS) return;
    u32 head = blockIdx.y, first_key = blockIdx.x * FOLD_KEYS, col = threadIdx.x;
    const float *ring = p.ring + (size_t)span.slot * RING_TOKENS * RING_ENTRY;
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (u32 j = 0; j < RING_TOKENS; j++) {
            sum += (double)ring[j * RING_ENTRY + KEY_COLUMNS + VALUE_COLUMNS + head];
            logs[j] = sum;
        }
    }
    __syncthreads();
    double last = logs[RING_TOKENS - 1];
    for (u32 i = threadIdx.x; i < RING_TOKENS * FOLD_KEYS; i += VALUE_THREADS) {
        u32 j = i / FOLD_KEYS, d = first_key + i % FOLD_KEYS;
        keys[j][i % FOLD_KEYS] =
            d < KEY_DIM ? decay(last - logs[j]) * ring[j * RING_ENTRY + KEY_HEAD(head) * KEY_DIM + d] : 0.0f;
    }
    __syncthreads();
    if (col >= VALUE_DIM) return;
    float corrected[RING_TOKENS];
#pragma unroll
    for (u32 j = 0; j < RING_TOKENS; j++) corrected[j] = ring[j * RING_ENTRY + KEY_COLUMNS + head * VALUE_DIM + col];
    float *base = p.base + ((size_t)span.slot * VALUE_HEADS + head) * STATE + col;
    float factor = decay(last);
    for (u32 i = 0; i < FOLD_KEYS && first_key + i < KEY_DIM; i++) {
        float value = base[(first_key + i) * VALUE_DIM] * factor;
#pragma unroll
        for (u32 j = 0; j < RING_TOKENS; j++) value = fmaf(keys[j][i], corrected[j], value);
        base[(first_key + i) * VALUE_DIM] = value;
    }
}

#define PARTS 4
#define PART_KEYS ((KEY_DIM + PARTS - 1) / PARTS)

template <int ROWS> struct RoundShared {
    double logs[RING_TOKENS];
    float row_keys[ROWS][KEY_DIM];
    float row_queries[ROWS][KEY_DIM];
    // Keys of the ring while the weights are made, then the parts' sums.
    union {
        float keys[RING_TOKENS][KEY_DIM];
        float sums[2][PARTS][ROWS][COLUMNS];
    };
    float key_weights[ROWS][RING_TOKENS];
    float query_weights[ROWS][RING_TOKENS];
    float corrected[RING_TOKENS][COLUMNS];
};

// Rows of a round: S is read once for all of them, by four warps with a quarter of the keys each, a value column per
// lane, on its way while the weights of ring and rows are made; then one warp walks ring and rows in order.
// Compiled for several numbers of rows; the arithmetic of a row is the same in all.
template <int ROWS> __device__ __forceinline__ void scan_round(const ScanParams &p, RoundShared<ROWS> &s) {
    u32 lane = threadIdx.x & 31, part = threadIdx.x / 32, head = blockIdx.y, key_head = KEY_HEAD(head);
    if (!has_span(p.step, blockIdx.z)) return;
    Span span = p.step.spans[blockIdx.z];
    u32 rows = span.rows, before = span.ring_len == RING_TOKENS ? 0 : span.ring_len, all = before + rows;
    u32 col = blockIdx.x * COLUMNS + lane;
    bool has_column = col < VALUE_DIM;
    float *ring = p.ring + (size_t)span.slot * RING_TOKENS * RING_ENTRY;
    const float *mixed = p.mixed + (size_t)span.first_row * p.mixed_cols;
    const float *base = p.base + ((size_t)span.slot * VALUE_HEADS + head) * STATE + col;

    float state[PART_KEYS];
#pragma unroll
    for (u32 i = 0; i < PART_KEYS; i++) {
        u32 d = part * PART_KEYS + i;
        state[i] = has_column && d < KEY_DIM ? __ldg(base + d * VALUE_DIM) : 0.0f;
    }
    for (u32 i = threadIdx.x; i < rows * KEY_DIM; i += PARTS * 32) {
        const float *row = mixed + (size_t)(i / KEY_DIM) * p.mixed_cols + key_head * KEY_DIM + i % KEY_DIM;
        s.row_queries[i / KEY_DIM][i % KEY_DIM] = row[0];
        s.row_keys[i / KEY_DIM][i % KEY_DIM] = row[KEY_COLUMNS];
    }
    for (u32 i = threadIdx.x; i < before * KEY_DIM; i += PARTS * 32)
        s.keys[i / KEY_DIM][i % KEY_DIM] = ring[(i / KEY_DIM) * RING_ENTRY + key_head * KEY_DIM + i % KEY_DIM];
    for (u32 j = part; j < before; j += PARTS)
        s.corrected[j][lane] = has_column ? ring[j * RING_ENTRY + KEY_COLUMNS + head * VALUE_DIM + col] : 0.0f;
    // Warp 0 has an entry per lane and sums in order.
    if (part == 0) {
        float log = 0.0f;
        if (lane < before) log = ring[lane * RING_ENTRY + KEY_COLUMNS + VALUE_COLUMNS + head];
        else if (lane < all) log = mixed[(size_t)(lane - before) * p.mixed_cols + LOG_DECAY_COLUMN + head];
        double sum = 0.0;
        for (u32 j = 0; j < all; j++) {
            sum += (double)__shfl_sync(0xffffffffu, log, j);
            if (lane == j) s.logs[j] = sum;
        }
    }
    __syncthreads();
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
            float u = row[BETA_COLUMN + head] * (value - sum);
            s.corrected[entry][lane] = u;
            output = fmaf(s.query_weights[t][entry], u, output);
            if (has_column) {
                ring[entry * RING_ENTRY + KEY_COLUMNS + head * VALUE_DIM + col] = u;
                p.out[(size_t)(span.first_row + t) * p.out_cols + head * VALUE_DIM + col] = to_activation(output);
            }
        }
        return;
    }
    // Entries of this round that no other block writes; none reads them before the next step.
    if (blockIdx.x != 0) return;
    for (u32 t = threadIdx.x - 32; t < rows; t += (PARTS - 1) * 32)
        ring[(before + t) * RING_ENTRY + KEY_COLUMNS + VALUE_COLUMNS + head] =
            mixed[(size_t)t * p.mixed_cols + LOG_DECAY_COLUMN + head];
    if (head % (VALUE_HEADS / KEY_HEADS) != 0) return;
    for (u32 i = threadIdx.x - 32; i < rows * KEY_DIM; i += (PARTS - 1) * 32)
        ring[(before + i / KEY_DIM) * RING_ENTRY + key_head * KEY_DIM + i % KEY_DIM] = s.row_keys[i / KEY_DIM][i % KEY_DIM];
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

// ---- chunks of a prompt ---------------------------------------------------------------------------------------

#define CHUNK_WARPS 8
#define KEY_STRIDE (KEY_DIM + 2) // elements of a staged bf16 row: consecutive rows start one bank apart
#define WEIGHT_STRIDE (CHUNK_TOKENS + 1)
#define WARP_ROWS (CHUNK_TOKENS / CHUNK_WARPS)
#define WARP_KEYS ((KEY_DIM + CHUNK_WARPS - 1) / CHUNK_WARPS)

struct ChunkShared {
    double logs[CHUNK_TOKENS];
    float betas[CHUNK_TOKENS];
    float state[KEY_DIM][COLUMNS];
    float corrected[CHUNK_TOKENS][COLUMNS];
    float key_weights[CHUNK_TOKENS][WEIGHT_STRIDE];   // (G_i / G_j) k̂_j·k̂_i, j < i
    float query_weights[CHUNK_TOKENS][WEIGHT_STRIDE]; // (G_i / G_j) k̂_j·q̂_i, j ≤ i
    u16 keys[CHUNK_TOKENS][KEY_STRIDE];               // q̂ and k̂ are bf16 already
    u16 queries[CHUNK_TOKENS][KEY_STRIDE];
};

__device__ __forceinline__ void load_chunk(const ScanParams &p, ChunkShared &s, Chunk chunk, u32 head) {
    u32 key_head = KEY_HEAD(head);
    const float *mixed = p.mixed + (size_t)chunk.first_row * p.mixed_cols;
    for (u32 i = threadIdx.x; i < CHUNK_TOKENS * KEY_DIM; i += CHUNK_WARPS * 32) {
        u32 row = i / KEY_DIM, d = i % KEY_DIM;
        const float *source = mixed + (size_t)row * p.mixed_cols + key_head * KEY_DIM + d;
        s.queries[row][d] = row < chunk.rows ? f32_to_bf16(source[0]) : 0;
        s.keys[row][d] = row < chunk.rows ? f32_to_bf16(source[KEY_COLUMNS]) : 0;
    }
    if (threadIdx.x < CHUNK_TOKENS) {
        const float *row = mixed + (size_t)threadIdx.x * p.mixed_cols;
        bool real = threadIdx.x < chunk.rows;
        s.logs[threadIdx.x] = real ? row[LOG_DECAY_COLUMN + head] : 0.0f;
        s.betas[threadIdx.x] = real ? row[BETA_COLUMN + head] : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (u32 i = 0; i < CHUNK_TOKENS; i++) sum += s.logs[i], s.logs[i] = sum;
    }
    __syncthreads();
}

// Each thread makes a square of 4 × 4 weights of both kinds.
__device__ __forceinline__ void make_weights(ChunkShared &s) {
    u32 first_i = threadIdx.x / 16 * 4, first_j = threadIdx.x % 16 * 4;
    if (first_j > first_i) return;
    float with_key[4][4] = {}, with_query[4][4] = {};
    for (u32 d = 0; d < KEY_DIM; d++) {
        float left[4], key[4], query[4];
#pragma unroll
        for (u32 x = 0; x < 4; x++) {
            left[x] = bf16_to_f32(s.keys[first_j + x][d]);
            key[x] = bf16_to_f32(s.keys[first_i + x][d]);
            query[x] = bf16_to_f32(s.queries[first_i + x][d]);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                with_key[i][j] = fmaf(left[j], key[i], with_key[i][j]);
                with_query[i][j] = fmaf(left[j], query[i], with_query[i][j]);
            }
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 row = first_i + i, other = first_j + j;
            if (other > row) continue;
            float weight = decay(s.logs[row] - s.logs[other]);
            s.key_weights[row][other] = weight * with_key[i][j];
            s.query_weights[row][other] = weight * with_query[i][j];
        }
}

// The WY form by forward substitution: u_i = β_i (v_i − G_i Sᵀk̂_i − Σ_{j<i} (G_i/G_j)(k̂_j·k̂_i) u_j), then
// o_i = G_i Sᵀq̂_i + Σ_{j≤i} (G_i/G_j)(k̂_j·q̂_i) u_j and S ← G_n S + Σ_j (G_n/G_j) k̂_j u_jᵀ.
// A lane has a value column; a warp has eight rows, for the state a part of the keys.
__device__ __forceinline__ void run_chunk(const ScanParams &p, ChunkShared &s, Chunk chunk, u32 head) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, first = warp * WARP_ROWS;
    u32 col = blockIdx.x * COLUMNS + lane;
    bool has_column = col < VALUE_DIM;
    load_chunk(p, s, chunk, head);
    make_weights(s);
    float predicted[WARP_ROWS] = {}, output[WARP_ROWS] = {}, u[WARP_ROWS];
    for (u32 d = 0; d < KEY_DIM; d++) {
        float state = s.state[d][lane];
#pragma unroll
        for (u32 i = 0; i < WARP_ROWS; i++) {
            predicted[i] = fmaf(state, bf16_to_f32(s.keys[first + i][d]), predicted[i]);
            output[i] = fmaf(state, bf16_to_f32(s.queries[first + i][d]), output[i]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < WARP_ROWS; i++) {
        float factor = decay(s.logs[first + i]);
        predicted[i] *= factor, output[i] *= factor;
    }
    __syncthreads();
    for (u32 block = 0; block < CHUNK_WARPS; block++) {
        if (warp == block) {
#pragma unroll
            for (u32 i = 0; i < WARP_ROWS; i++) {
                u32 row = first + i;
#pragma unroll
                for (u32 j = 0; j < i; j++) predicted[i] = fmaf(s.key_weights[row][first + j], u[j], predicted[i]);
                float value = 0.0f;
                if (row < chunk.rows && has_column)
                    value = p.mixed[(size_t)(chunk.first_row + row) * p.mixed_cols + 2 * KEY_COLUMNS +
                                    head * VALUE_DIM + col];
                u[i] = s.betas[row] * (value - predicted[i]);
                s.corrected[row][lane] = u[i];
            }
        }
        __syncthreads();
        if (warp > block)
            for (u32 j = block * WARP_ROWS; j < (block + 1) * WARP_ROWS; j++) {
                float other = s.corrected[j][lane];
#pragma unroll
                for (u32 i = 0; i < WARP_ROWS; i++)
                    predicted[i] = fmaf(s.key_weights[first + i][j], other, predicted[i]);
            }
    }
#pragma unroll
    for (u32 i = 0; i < WARP_ROWS; i++) {
        u32 row = first + i;
        for (u32 j = 0; j <= row; j++) output[i] = fmaf(s.query_weights[row][j], s.corrected[j][lane], output[i]);
        if (row < chunk.rows && has_column)
            p.out[(size_t)(chunk.first_row + row) * p.out_cols + head * VALUE_DIM + col] = to_activation(output[i]);
    }
    __syncthreads();
    double last = s.logs[CHUNK_TOKENS - 1];
#pragma unroll
    for (u32 i = 0; i < WARP_ROWS; i++) s.corrected[first + i][lane] *= decay(last - s.logs[first + i]);
    __syncthreads();
    float factor = decay(last);
    for (u32 d = warp * WARP_KEYS; d < min((warp + 1) * WARP_KEYS, KEY_DIM); d++) {
        float state = s.state[d][lane] * factor;
        for (u32 j = 0; j < chunk.rows; j++) state = fmaf(bf16_to_f32(s.keys[j][d]), s.corrected[j][lane], state);
        s.state[d][lane] = state;
    }
    __syncthreads();
}

// One value head of one span, COLUMNS columns of its state in shared memory from the first chunk to the last.
// grid (ceil(VALUE_DIM / COLUMNS), VALUE_HEADS, spans)
extern "C" __global__ void __launch_bounds__(CHUNK_WARPS * 32) scan_chunks(const ScanParams p) {
    start_in_order();
    extern __shared__ __align__(16) u8 memory[];
    ChunkShared &s = *(ChunkShared *)memory;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, head = blockIdx.y;
    u32 col = blockIdx.x * COLUMNS + lane;
    Span span = p.step.spans[blockIdx.z];
    float *base = p.base + ((size_t)span.slot * VALUE_HEADS + head) * STATE + col;
    for (u32 d = warp; d < KEY_DIM; d += CHUNK_WARPS) s.state[d][lane] = col < VALUE_DIM ? base[d * VALUE_DIM] : 0.0f;
    __syncthreads();
    for (u32 i = 0; i < span.chunks; i++) run_chunk(p, s, p.step.chunks[span.first_chunk + i], head);
    if (col < VALUE_DIM)
        for (u32 d = warp; d < KEY_DIM; d += CHUNK_WARPS) base[d * VALUE_DIM] = s.state[d][lane];
}
