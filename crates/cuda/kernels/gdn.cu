// Gated DeltaNet of one layer: convolution and gates of prompts; rounds, from projections to the gated norm, against base
// state and ring. Chunks of prompts: gdn_chunks.cu. What gdn_state.cuh declares stands before this file.

#define L2_EPS 1e-6f
#define COLUMNS 4 // neighbouring ones that a lane has
static_assert(KEY_DIM <= 128 && VALUE_DIM <= 128 && KEY_DIM % 4 == 0 && VALUE_DIM % 4 == 0, "a warp has a row of a head");

__device__ __forceinline__ float decay(double log) { return expf((float)log); }

// Four neighbouring elements of a state as stored, and of raw inputs.
#if STATE_F16
typedef uint2 Four;
typedef uint2 FourInputs;
__device__ __forceinline__ float4 widen(const Four &four) {
    return make_float4(f16_to_f32(four.x & 0xffff), f16_to_f32(four.x >> 16), f16_to_f32(four.y & 0xffff), f16_to_f32(four.y >> 16));
}
__device__ __forceinline__ Four narrow(const float4 &v) {
    return make_uint2(narrow(v.x) | (u32)narrow(v.y) << 16, narrow(v.z) | (u32)narrow(v.w) << 16);
}
__device__ __forceinline__ float4 widen_inputs(const FourInputs &four) {
    return make_float4(low_bf16(four.x), high_bf16(four.x), low_bf16(four.y), high_bf16(four.y));
}
#else
typedef float4 Four;
typedef float4 FourInputs;
__device__ __forceinline__ float4 widen(const Four &four) { return four; }
__device__ __forceinline__ Four narrow(const float4 &v) { return v; }
__device__ __forceinline__ float4 widen_inputs(const FourInputs &four) { return four; }
#endif
__device__ __forceinline__ float4 zeros() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
// Four neighbouring activations.
__device__ __forceinline__ float4 load_activations(const activation *from) {
    uint2 bits = *(const uint2 *)from;
    return make_float4(low_bf16(bits.x), high_bf16(bits.x), low_bf16(bits.y), high_bf16(bits.y));
}

// Four neighbouring columns of a row of `mixed`, whose rows follow one another: on 16 bytes if their width allows that.
#define MIXED_ALIGNED (VALUE_HEADS % 2 == 0)
__device__ __forceinline__ float4 load_mixed(const float *from) {
    return MIXED_ALIGNED ? *(const float4 *)from : make_float4(from[0], from[1], from[2], from[3]);
}
__device__ __forceinline__ void store_mixed(float *to, const float4 &v) {
    if (MIXED_ALIGNED) *(float4 *)to = v;
    else to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

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

// The functions below take the parameters of either kind of kernel.

// A row's own raw inputs from a channel on, as the ring stores them.
template <typename P> __device__ __forceinline__ FourInputs own_inputs(const P &p, u32 row, u32 channel) {
    const activation *from = p.projected + (size_t)row * p.projected_cols + channel;
#if STATE_F16
    return *(const uint2 *)from;
#else
    return load_activations(from);
#endif
}

template <typename P>
__device__ __forceinline__ FourInputs *ring_inputs(const P &p, const Span &span, u32 position, u32 channel) {
    return (FourInputs *)(p.conv + ((size_t)span.slot * CONV_RING + position % CONV_RING) * CHANNELS + channel);
}

template <typename P> __device__ __forceinline__ float log_decay_of(const P &p, u32 row, u32 head) {
    float a = from_activation(p.projected[(size_t)row * p.projected_cols + A_COLUMN + head]);
    return p.decay_rate[head] * softplus(a + p.dt_bias[head]);
}
template <typename P> __device__ __forceinline__ float beta_of(const P &p, u32 row, u32 head) {
    return sigmoid(from_activation(p.projected[(size_t)row * p.projected_cols + B_COLUMN + head]));
}

// First channel of a head of q, k (`unit` below 2 · KEY_HEADS) or v, and its channels.
__device__ __forceinline__ u32 first_channel(u32 unit) {
    return unit < 2 * KEY_HEADS ? unit * KEY_DIM : 2 * KEY_COLUMNS + (unit - 2 * KEY_HEADS) * VALUE_DIM;
}
__device__ __forceinline__ u32 channels_of(u32 unit) { return unit < 2 * KEY_HEADS ? KEY_DIM : VALUE_DIM; }

// Convolution and SiLU of a head's channels, and the norm of q and k, by a warp, whose lanes have four channels each; gives
// `store` those of its lane. `remembers`: the raw inputs enter the ring as well. The at most 16 positions that a round
// writes and the 3 before them that other blocks may read still are 19 different places of its 20.
template <typename P, typename Store>
__device__ __forceinline__ void mix_head(const P &p, const Span &span, u32 row, u32 unit, bool remembers, Store store) {
    u32 index = row - span.first_row, position = span.position + index, col = (threadIdx.x & 31) * COLUMNS;
    u32 channel = first_channel(unit) + col;
    bool has_columns = col < channels_of(unit);
    // All loads before the first use: the inputs of this step, of the ring, or 0 before position 0; and the taps, whose
    // words are those of the channels one after another.
    FourInputs inputs[CONV_WIDTH];
    float taps[COLUMNS * CONV_WIDTH];
#pragma unroll
    for (u32 age = 0; age < CONV_WIDTH; age++) {
        inputs[age] = FourInputs();
        if (!has_columns || age > position) continue;
        inputs[age] = age <= index ? own_inputs(p, row - age, channel) : *ring_inputs(p, span, position - age, channel);
    }
#pragma unroll
    for (u32 i = 0; i < CONV_WIDTH; i++) {
        float4 four = has_columns ? ((const float4 *)(p.taps + channel * CONV_WIDTH))[i] : zeros();
        taps[i * 4] = four.x, taps[i * 4 + 1] = four.y, taps[i * 4 + 2] = four.z, taps[i * 4 + 3] = four.w;
    }
    if (remembers && has_columns) *ring_inputs(p, span, position, channel) = inputs[0];
    float4 mixed = zeros();
#pragma unroll
    for (u32 tap = 0; tap < CONV_WIDTH; tap++) {
        float4 input = widen_inputs(inputs[CONV_WIDTH - 1 - tap]);
        mixed.x = fmaf(taps[tap], input.x, mixed.x), mixed.y = fmaf(taps[CONV_WIDTH + tap], input.y, mixed.y);
        mixed.z = fmaf(taps[2 * CONV_WIDTH + tap], input.z, mixed.z), mixed.w = fmaf(taps[3 * CONV_WIDTH + tap], input.w, mixed.w);
    }
    mixed = make_float4(silu(mixed.x), silu(mixed.y), silu(mixed.z), silu(mixed.w));
    float factor = 1.0f;
    if (unit < 2 * KEY_HEADS) {
        float squares = fmaf(mixed.w, mixed.w, fmaf(mixed.z, mixed.z, fmaf(mixed.y, mixed.y, mixed.x * mixed.x)));
        factor = (unit < KEY_HEADS ? p.query_scale : 1.0f) / sqrtf(warp_sum(squares) + L2_EPS);
    }
    if (!has_columns) return;
    store(col, make_float4(round_activation(mixed.x * factor), round_activation(mixed.y * factor),
                           round_activation(mixed.z * factor), round_activation(mixed.w * factor)));
}

#define PREPARE_UNITS (2 * KEY_HEADS + VALUE_HEADS)
// A warp per head of q, k or v, one more for the gates. grid (ceil((PREPARE_UNITS + 1) / 4), rows)
extern "C" __global__ void __launch_bounds__(128, 4) prepare(const PrepareParams p) {
    start_in_order();
    u32 lane = threadIdx.x & 31, unit = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y;
    if (unit > PREPARE_UNITS || !has_row(p.step, row)) return;
    Span span = p.step.spans[p.step.row_span[row]];
    float *mixed = p.mixed + (size_t)row * p.mixed_cols;
    if (unit == PREPARE_UNITS) {
        for (u32 head = lane; head < VALUE_HEADS; head += 32) {
            mixed[LOG_DECAY_COLUMN + head] = log_decay_of(p, row, head);
            mixed[BETA_COLUMN + head] = beta_of(p, row, head);
        }
        return;
    }
    float *to = mixed + first_channel(unit);
    mix_head(p, span, row, unit, span.chunks == 0, [&](u32 col, float4 values) { store_mixed(to + col, values); });
}

// Puts the last raw inputs of each span of a prompt into the ring, after `prepare` has read it.
// grid (ceil(CHANNELS / 1024), CONV_RING, spans)
extern "C" __global__ void __launch_bounds__(256) remember(const PrepareParams p) {
    start_in_order();
    u32 channel = (blockIdx.x * 256 + threadIdx.x) * COLUMNS;
    if (!has_span(p.step, blockIdx.z)) return;
    Span span = p.step.spans[blockIdx.z];
    if (channel >= CHANNELS || blockIdx.y >= span.rows) return;
    u32 index = span.rows - 1 - blockIdx.y, position = span.position + index;
    *ring_inputs(p, span, position, channel) = own_inputs(p, span.first_row + index, channel);
}

#define WARPS 8
#define PART_KEYS ((KEY_DIM + WARPS - 1) / WARPS) // of a warp, which has all value columns of them

struct RoundParams {
    Step step;
    const activation *projected;
    const float *taps, *decay_rate, *dt_bias;
    stored_input *conv;
    const float *mixed; // instead of what is above, where the op is the scan alone
    const float *norm;
    stored *base; // all of this layer
    stored *ring;
    float *log_decays;
    u32 *readers; // `[slots, KEY_HEADS]`, zero between launches
    activation *out;
    u32 projected_cols, mixed_cols, out_cols;
    float query_scale, eps;
    u32 unused;
};

__device__ __forceinline__ void add_scaled(float4 &sum, float factor, const float4 &v) {
    sum.x = fmaf(factor, v.x, sum.x), sum.y = fmaf(factor, v.y, sum.y);
    sum.z = fmaf(factor, v.z, sum.z), sum.w = fmaf(factor, v.w, sum.w);
}

template <int ROWS> struct RoundShared {
    static const int TOGETHER = ROWS < 4 ? ROWS : 4; // rows that are multiplied with the state together
    // Otherwise the state is read where it lies: memory of 99 KB a block, which all cards have, holds no more.
    static const bool HOLDS_STATE = STATE_F16 && ROWS <= 8;
    // Keys of the ring while it is folded and the weights are made, then the parts' sums.
    union {
        stored keys[RING_TOKENS][KEY_DIM];
        float sums[2][WARPS][TOGETHER][VALUE_DIM];
    };
    stored corrected[RING_TOKENS][VALUE_DIM];
    stored state[HOLDS_STATE ? STATE : 8];
    float row_keys[ROWS][KEY_DIM], row_queries[ROWS][KEY_DIM], row_values[ROWS][VALUE_DIM];
    float totals[2][ROWS][VALUE_DIM]; // Sᵀ k̂ and Sᵀ q̂, then the outputs in place of the second
    double logs[RING_TOKENS];
    float row_logs[RING_TOKENS], betas[RING_TOKENS];
    float key_weights[ROWS][RING_TOKENS], query_weights[ROWS][RING_TOKENS];
    bool appends;

    // Four elements of a row of the state; `column` is where `base` points to as well.
    __device__ __forceinline__ float4 state_at(const stored *base, u32 key, u32 column) const {
        return widen(*(const Four *)(HOLDS_STATE ? state + key * VALUE_DIM + column : base + key * VALUE_DIM));
    }
};

template <int BYTES> __device__ __forceinline__ void copy_async(void *to, const void *from) {
    u32 shared = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(BYTES));
}
// Has lines brought to the L2 by the block's threads.
__device__ __forceinline__ void prefetch(const void *from, u32 bytes) {
    for (u32 at = threadIdx.x * 128; at < bytes; at += WARPS * 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8 *)from + at));
}

// What a head of a slot has in memory.
struct HeadStates {
    stored *base, *ring_keys, *ring_corrected;
    float *log_decays;
    __device__ __forceinline__ HeadStates(const RoundParams &p, u32 slot, u32 head) {
        base = p.base + ((size_t)slot * VALUE_HEADS + head) * STATE;
        stored *ring = p.ring + (size_t)slot * RING_TOKENS * RING_ENTRY;
        ring_keys = ring + KEY_HEAD(head) * KEY_DIM, ring_corrected = ring + KEY_COLUMNS + head * VALUE_DIM;
        log_decays = p.log_decays + (size_t)slot * RING_TOKENS * VALUE_HEADS;
    }
};

// Has ring and state copied into shared memory, and what else a round reads brought near. Nothing of it is written by
// the kernels that this step has launched before, so it need not wait for them.
template <int ROWS, bool WHOLE>
__device__ __forceinline__ void fetch(const RoundParams &p, RoundShared<ROWS> &s, const Span &span, u32 head, const HeadStates &states) {
    const u32 KEY_FOURS = KEY_DIM / 4, VALUE_FOURS = VALUE_DIM / 4, THREADS = WARPS * 32;
    for (u32 i = threadIdx.x; i < span.ring_len * KEY_FOURS; i += THREADS) {
        u32 entry = i / KEY_FOURS, at = i % KEY_FOURS * 4;
        copy_async<sizeof(Four)>(&s.keys[entry][at], states.ring_keys + entry * RING_ENTRY + at);
    }
    for (u32 i = threadIdx.x; i < span.ring_len * VALUE_FOURS; i += THREADS) {
        u32 entry = i / VALUE_FOURS, at = i % VALUE_FOURS * 4;
        copy_async<sizeof(Four)>(&s.corrected[entry][at], states.ring_corrected + entry * RING_ENTRY + at);
    }
    if (RoundShared<ROWS>::HOLDS_STATE) {
        const u32 PIECES = STATE * sizeof(stored) / 16;
#pragma unroll
        for (u32 n = 0; n < (PIECES + THREADS - 1) / THREADS; n++) {
            u32 i = n * THREADS + threadIdx.x;
            if (i < PIECES) copy_async<16>((u8 *)s.state + i * 16, (const u8 *)states.base + i * 16);
        }
    } else {
        prefetch(states.base, STATE * sizeof(stored));
    }
    if (!WHOLE) return;
    u32 units[3] = {KEY_HEAD(head), KEY_HEADS + KEY_HEAD(head), 2 * KEY_HEADS + head};
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
        prefetch(p.taps + first_channel(units[i]) * CONV_WIDTH, channels_of(units[i]) * CONV_WIDTH * 4);
        u32 age = threadIdx.x / 32 % (CONV_WIDTH + 1), line = threadIdx.x & 31;
        if (age > 0 && age < CONV_WIDTH && age <= span.position && line * 128 < channels_of(units[i]) * sizeof(stored_input))
            asm volatile("prefetch.global.L2 [%0];" ::"l"(
                (const u8 *)ring_inputs(p, span, span.position - age, first_channel(units[i])) + line * 128));
    }
    prefetch(p.norm, VALUE_DIM * 4);
}

// Sums of the log-decays that the lanes of one warp have, from the first to each: what follows an entry does not change
// the bits of its sum.
__device__ __forceinline__ void sum_logs(double *logs, float log, u32 count) {
    u32 lane = threadIdx.x & 31;
    double sum = log;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        double before = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += before;
    }
    if (lane < count) logs[lane] = sum;
}

// S ← G_R S + Σ_j (G_R / G_j) k̂_j u_jᵀ of a warp's keys, for a full ring.
template <int ROWS> __device__ __forceinline__ void fold(RoundShared<ROWS> &s, stored *base) {
    u32 column = (threadIdx.x & 31) * COLUMNS, warp = threadIdx.x / 32;
    double last = s.logs[RING_TOKENS - 1];
    float *weights = s.key_weights[0];
    if (threadIdx.x < RING_TOKENS) weights[threadIdx.x] = decay(last - s.logs[threadIdx.x]);
    __syncthreads();
    float factor = decay(last);
    const u32 TOGETHER = 4; // keys that share what is read of the ring
    u32 end = min((warp + 1) * PART_KEYS, KEY_DIM);
    for (u32 first = warp * PART_KEYS; first < end && column < VALUE_DIM; first += TOGETHER) {
        float4 sums[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            float4 v = s.state_at(base, min(first + i, end - 1), column);
            sums[i] = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
        }
        for (u32 j = 0; j < RING_TOKENS; j++) {
            float4 u = widen(*(const Four *)&s.corrected[j][column]);
            float weight = weights[j];
            u = make_float4(u.x * weight, u.y * weight, u.z * weight, u.w * weight);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) add_scaled(sums[i], widen(s.keys[j][min(first + i, end - 1)]), u);
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (first + i >= end) break;
            Four folded = narrow(sums[i]);
            *(Four *)(base + (first + i) * VALUE_DIM) = folded;
            if (RoundShared<ROWS>::HOLDS_STATE) *(Four *)&s.state[(first + i) * VALUE_DIM + column] = folded;
        }
    }
    __syncthreads();
}

// Whether this block is the one that writes the keys and log-decays of the round's entries, which all blocks of a key
// head share. Without a fold nobody reads those entries. With one, they hold what the other blocks fold: the block that
// has read last writes.
template <int ROWS>
__device__ __forceinline__ bool appends(const RoundParams &p, RoundShared<ROWS> &s, u32 slot, u32 head, bool folds) {
    if (!folds) return head % GROUP_HEADS == 0;
    if (threadIdx.x == 0) {
        u32 *readers = p.readers + slot * KEY_HEADS + KEY_HEAD(head);
        __threadfence();
        s.appends = atomicAdd(readers, 1) == GROUP_HEADS - 1;
        if (s.appends) *readers = 0;
    }
    __syncthreads();
    return s.appends;
}

// The rows' queries, keys, values and gates, from projections or as an earlier op has left them. The last warp has the
// gates alone: it is the one that sums their logs.
template <int ROWS, bool WHOLE>
__device__ __forceinline__ void mix_rows(const RoundParams &p, RoundShared<ROWS> &s, const Span &span, u32 head) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, key_head = KEY_HEAD(head);
    if (warp == WARPS - 1) {
        if (lane < span.rows) {
            u32 row = span.first_row + lane;
            const float *mixed = p.mixed + (size_t)row * p.mixed_cols;
            s.row_logs[lane] = WHOLE ? log_decay_of(p, row, head) : mixed[LOG_DECAY_COLUMN + head];
            s.betas[lane] = WHOLE ? beta_of(p, row, head) : mixed[BETA_COLUMN + head];
        }
        __syncwarp();
        return;
    }
    for (u32 i = warp; i < span.rows * 3; i += WARPS - 1) {
        u32 t = i / 3, row = span.first_row + t, kind = i % 3;
        u32 unit = kind == 2 ? 2 * KEY_HEADS + head : kind * KEY_HEADS + key_head;
        float *to = kind == 0 ? s.row_queries[t] : kind == 1 ? s.row_keys[t] : s.row_values[t];
        auto store = [&](u32 col, float4 values) { *(float4 *)(to + col) = kind == 1 ? widen(narrow(values)) : values; };
        if (WHOLE) {
            mix_head(p, span, row, unit, kind == 2 || head % GROUP_HEADS == 0, store);
        } else if (lane * COLUMNS < channels_of(unit)) {
            store(lane * COLUMNS, load_mixed(p.mixed + (size_t)row * p.mixed_cols + first_channel(unit) + lane * COLUMNS));
        }
    }
}

// (G_t / G_j) k̂_j·k̂_t and (G_t / G_j) k̂_j·q̂_t, by eight lanes each.
template <int ROWS> __device__ __forceinline__ void weigh_entries(RoundShared<ROWS> &s, u32 rows, u32 before) {
    const u32 LANES = 8;
    u32 lane = threadIdx.x % LANES, all = before + rows;
    for (u32 first = threadIdx.x / 32 * (32 / LANES); first < rows * all; first += WARPS * 32 / LANES) {
        u32 pair = first + threadIdx.x % 32 / LANES, t = min(pair / all, rows - 1), j = pair % all;
        float with_key = 0.0f, with_query = 0.0f;
#pragma unroll
        for (u32 d = lane * 4; d < KEY_DIM; d += LANES * 4) {
            float4 entry = j < before ? widen(*(const Four *)&s.keys[j][d]) : *(const float4 *)&s.row_keys[j - before][d];
            float4 key = *(const float4 *)&s.row_keys[t][d], query = *(const float4 *)&s.row_queries[t][d];
            with_key = fmaf(entry.x, key.x, fmaf(entry.y, key.y, fmaf(entry.z, key.z, fmaf(entry.w, key.w, with_key))));
            with_query = fmaf(entry.x, query.x, fmaf(entry.y, query.y, fmaf(entry.z, query.z, fmaf(entry.w, query.w, with_query))));
        }
#pragma unroll
        for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
            with_key += __shfl_xor_sync(0xffffffffu, with_key, distance);
            with_query += __shfl_xor_sync(0xffffffffu, with_query, distance);
        }
        if (lane > 0 || pair >= rows * all || j > before + t) continue;
        float weight = decay(s.logs[before + t] - s.logs[j]);
        s.key_weights[t][j] = weight * with_key, s.query_weights[t][j] = weight * with_query;
    }
}

// Sᵀ k̂_t and Sᵀ q̂_t: a warp sums over its keys, the warps' sums are added from the first to the last.
template <int ROWS>
__device__ __forceinline__ void read_state(RoundShared<ROWS> &s, const stored *base, u32 rows) {
    const int TOGETHER = RoundShared<ROWS>::TOGETHER, AHEAD = 8;
    u32 warp = threadIdx.x / 32, column = (threadIdx.x & 31) * COLUMNS;
    for (u32 first = 0; first < rows; first += TOGETHER) {
        float4 from_key[TOGETHER], from_query[TOGETHER];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) from_key[t] = from_query[t] = zeros();
        u32 end = min((warp + 1) * PART_KEYS, KEY_DIM);
#pragma unroll 1
        for (u32 d = warp * PART_KEYS; d < end && column < VALUE_DIM; d += AHEAD) {
            float4 state[AHEAD];
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) state[i] = s.state_at(base, min(d + i, KEY_DIM - 1), column);
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                if (d + i >= end) break;
#pragma unroll
                for (int t = 0; t < TOGETHER; t++) {
                    u32 row = min(first + t, rows - 1);
                    add_scaled(from_key[t], s.row_keys[row][d + i], state[i]);
                    add_scaled(from_query[t], s.row_queries[row][d + i], state[i]);
                }
            }
        }
        __syncthreads(); // the keys of the ring, or the sums before, have been read
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            if (column >= VALUE_DIM) break;
            *(float4 *)&s.sums[0][warp][t][column] = from_key[t], *(float4 *)&s.sums[1][warp][t][column] = from_query[t];
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < 2 * TOGETHER * VALUE_DIM; i += WARPS * 32) {
            u32 which = i / (TOGETHER * VALUE_DIM), t = i / VALUE_DIM % TOGETHER, col = i % VALUE_DIM;
            float sum = 0.0f;
#pragma unroll
            for (u32 part = 0; part < WARPS; part++) sum += s.sums[which][part][t][col];
            if (first + t < rows) s.totals[which][first + t][col] = sum;
        }
    }
    __syncthreads();
}

// The norm of a row's outputs of a head, and its gate, by a warp.
struct NormedHead {
    float4 norm, gate;
    __device__ __forceinline__ NormedHead() : norm(zeros()), gate(zeros()) {}
    __device__ __forceinline__ NormedHead(const RoundParams &p, u32 row, u32 head, u32 column) {
        norm = *(const float4 *)(p.norm + column);
        gate = load_activations(p.projected + (size_t)row * p.projected_cols + CHANNELS + head * VALUE_DIM + column);
    }
    __device__ __forceinline__ void store(const RoundParams &p, u32 row, u32 head, u32 column, const float4 &x, float factor) const {
        activation *out = p.out + (size_t)row * p.out_cols + head * VALUE_DIM + column;
        *(uint2 *)out = make_uint2(
            to_activation(x.x * factor * norm.x * silu(gate.x)) | (u32)to_activation(x.y * factor * norm.y * silu(gate.y)) << 16,
            to_activation(x.z * factor * norm.z * silu(gate.z)) | (u32)to_activation(x.w * factor * norm.w * silu(gate.w)) << 16);
    }
};

// Rows of a round, of one head: S is read for up to four of them at once; then a thread for each column walks ring and
// rows in order. Compiled for several numbers of rows and with what stands around the scan or without; the arithmetic of
// a row is the same in all.
template <int ROWS, bool WHOLE> __device__ __forceinline__ void scan_round(const RoundParams &p, RoundShared<ROWS> &s) {
    let_successor_start();
    // Of a replayed round's spans that are none, this is what an earlier step has left there.
    Span span = p.step.spans[blockIdx.y];
    if (!has_span(p.step, blockIdx.y)) return;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, head = blockIdx.x, key_head = KEY_HEAD(head), column = lane * COLUMNS;
    bool folds = span.ring_len == RING_TOKENS, has_columns = column < VALUE_DIM;
    u32 rows = span.rows, before = folds ? 0 : span.ring_len, all = before + rows;
    HeadStates states(p, span.slot, head);
    fetch<ROWS, WHOLE>(p, s, span, head, states);
    float log = 0.0f; // of the ring's entry with the lane's number
    if (warp == WARPS - 1 && lane < span.ring_len) log = states.log_decays[lane * VALUE_HEADS + head];
    wait_for_predecessors();

    mix_rows<ROWS, WHOLE>(p, s, span, head);
    float row_log = 0.0f; // of the entry that a row will be, after the ring's
    if (warp == WARPS - 1) {
        if (before <= lane && lane < all) row_log = s.row_logs[lane - before];
        sum_logs(s.logs, lane < span.ring_len ? log : row_log, folds ? RING_TOKENS : all);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    bool is_writer = appends(p, s, span.slot, head, folds);
    stored *base = states.base + column;
    if (folds) {
        fold(s, base);
        if (warp == WARPS - 1) sum_logs(s.logs, row_log, all);
        __syncthreads();
    }
    weigh_entries(s, rows, before);
    read_state(s, base, rows);
    NormedHead first_row;
    if (WHOLE && warp < rows && has_columns) first_row = NormedHead(p, span.first_row + warp, head, column);
    u32 col = threadIdx.x;
    if (col < VALUE_DIM) {
        for (u32 t = 0; t < rows; t++) {
            u32 entry = before + t;
            float factor = decay(s.logs[entry]), sum = factor * s.totals[0][t][col], output = factor * s.totals[1][t][col];
#pragma unroll 4
            for (u32 j = 0; j < entry; j++) {
                float u = widen(s.corrected[j][col]);
                sum = fmaf(s.key_weights[t][j], u, sum), output = fmaf(s.query_weights[t][j], u, output);
            }
            stored stored_u = narrow(s.betas[t] * (s.row_values[t][col] - sum));
            s.corrected[entry][col] = stored_u;
            output = round_activation(fmaf(s.query_weights[t][entry], widen(stored_u), output));
            states.ring_corrected[entry * RING_ENTRY + col] = stored_u;
            if (WHOLE) s.totals[1][t][col] = output;
            else p.out[(size_t)(span.first_row + t) * p.out_cols + head * VALUE_DIM + col] = to_activation(output);
        }
    } else if (is_writer) {
        // Of the log-decays, the heads' of the group: theirs come from what this block has read of them.
        for (u32 i = col - VALUE_DIM; i < rows * GROUP_HEADS; i += WARPS * 32 - VALUE_DIM) {
            u32 t = i / GROUP_HEADS, of_group = key_head * GROUP_HEADS + i % GROUP_HEADS, row = span.first_row + t;
            states.log_decays[(before + t) * VALUE_HEADS + of_group] =
                WHOLE ? log_decay_of(p, row, of_group) : p.mixed[(size_t)row * p.mixed_cols + LOG_DECAY_COLUMN + of_group];
        }
        for (u32 i = col - VALUE_DIM; i < rows * KEY_DIM; i += WARPS * 32 - VALUE_DIM)
            states.ring_keys[(before + i / KEY_DIM) * RING_ENTRY + i % KEY_DIM] = narrow(s.row_keys[i / KEY_DIM][i % KEY_DIM]);
    }
    if (!WHOLE) return;
    __syncthreads();
    for (u32 t = warp; t < rows; t += WARPS) {
        u32 row = span.first_row + t;
        NormedHead normed;
        if (has_columns) normed = t == warp ? first_row : NormedHead(p, row, head, column);
        float4 x = has_columns ? *(const float4 *)&s.totals[1][t][column] : zeros();
        float squares = fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, x.x * x.x)));
        float factor = 1.0f / sqrtf(warp_sum(squares) / (float)VALUE_DIM + p.eps);
        if (has_columns) normed.store(p, row, head, column, x, factor);
    }
}

// At most so many rows in every span. grid (VALUE_HEADS, spans)
#define ROUND(NAME, ROWS, BLOCKS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME(const RoundParams p) {                       \
        extern __shared__ __align__(16) u8 memory[];                                                                   \
        scan_round<ROWS, true>(p, *(RoundShared<ROWS> *)memory);                                                       \
    }
ROUND(layer_rows_1, 1, 3)
ROUND(layer_rows_4, 4, 2)
ROUND(layer_rows_8, 8, 2)
ROUND(layer_rows_16, 16, 2)

// The scan alone.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) scan_rows(const RoundParams p) {
    extern __shared__ __align__(16) u8 memory[];
    scan_round<MAX_ROUND_ROWS, false>(p, *(RoundShared<MAX_ROUND_ROWS> *)memory);
}
