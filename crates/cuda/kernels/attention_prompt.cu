// Attention of prompt rows on tensor cores: a running softmax over the positions, 32 at a time from position 0 on, for 64
// query vectors at once. Everything about a row is done in an order that its position fixes: a block of positions that
// it does not see leaves its maximum, sum and output as they are, and no product may be joined with a sum here but not
// there.
// Compiled for: HEAD_DIM (a multiple of 8, at most 256), QUERY_HEADS, KV_HEADS, KV_TYPE (bf16 or int8), SHARED_BYTES.
#include "attention.cuh"

#define TILE 64  // query vectors of a block: rows of a span with all heads of a kv head, heads fastest
#define BLOCK 32 // positions at a time, half a page
#define WARPS 4  // 16 query vectors each
#define THREADS (WARPS * 32)
#define DIM ((HEAD_DIM + 15) / 16 * 16) // zero-padded
#define PIECES (DIM / 8)                // of 8 elements
// Bytes of a vector in shared memory, an odd multiple of 16: eight rows of 16 bytes lie in different banks.
#define STRIDE (DIM * 2 + 16)
#define VECTORS_BYTES (BLOCK * STRIDE)

#if KV_TYPE == KV_INT8
#define BUFFERS 1 // codes arrive beside it and are widened into it
#define CODE_BYTES (BLOCK * HEAD_DIM)
#define ARRIVING_BYTES (2 * CODE_BYTES + 2 * BLOCK * 2)
#else
#define BUFFERS 2
#define ARRIVING_BYTES 0
#endif
// 101376 at 256 dims in bf16: what sm_86 has, to the byte.
static_assert(SHARED_BYTES == TILE * STRIDE + 2 * BUFFERS * VECTORS_BYTES + ARRIVING_BYTES, "what the launch gives");

struct PromptParams {
    Step step;
    const activation *query;
    const activation *projected;
    Kv kv;
    activation *out;
    u32 query_cols, projected_cols, out_cols;
    float scale;
};

// ---- moving ---------------------------------------------------------------------------------------------------

// Starts to copy 16 (8) bytes to shared memory, zeros from `bytes` on.
__device__ __forceinline__ void copy_16(u32 to, const void *from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_8(u32 to, const void *from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}
__device__ __forceinline__ void store_16(u32 to, const u32 (&from)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]),
                 "r"(from[3]));
}

// ---- arithmetic -----------------------------------------------------------------------------------------------

// Over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// ---- the kernel -----------------------------------------------------------------------------------------------

// What a block attends with: rows of one span, all heads of one kv head.
struct Work {
    Span span;
    u32 kv_head;
    u32 first;   // query vector, among rows · HEADS_PER_KV of the span
    u32 vectors; // of the span
    u32 end;     // positions that the last row sees
    u32 shared;  // address of shared memory: queries, keys, values, then what arrives

    __device__ __forceinline__ u32 keys(u32 buffer) const { return shared + TILE * STRIDE + buffer * VECTORS_BYTES; }
    __device__ __forceinline__ u32 values(u32 buffer) const { return keys(BUFFERS) + buffer * VECTORS_BYTES; }
    __device__ __forceinline__ u32 arriving() const { return values(BUFFERS); }
    __device__ __forceinline__ u32 row(u32 vector) const { return min(vector, vectors - 1) / HEADS_PER_KV; }
};

// Starts to copy the queries, zeros in what is padded.
__device__ __forceinline__ void copy_queries(const PromptParams &p, const Work &work) {
    for (u32 i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
        u32 at = i / PIECES, col = i % PIECES * 8, vector = work.first + at;
        u32 row = work.span.first_row + work.row(vector), head = work.kv_head * HEADS_PER_KV + vector % HEADS_PER_KV;
        u32 bytes = vector < work.vectors && col < HEAD_DIM ? 16 : 0;
        const activation *from = p.query + (size_t)row * p.query_cols + head * HEAD_DIM + (bytes ? col : 0);
        copy_16(work.shared + at * STRIDE + col * 2, from, bytes);
    }
}

#if KV_TYPE == KV_INT8
__device__ __forceinline__ void copy_codes(u32 to, const i8 *from, u32 count) {
    const u32 size = HEAD_DIM % 16 == 0 ? 16 : 8;
    for (u32 at = threadIdx.x * size; at < CODE_BYTES; at += THREADS * size) {
        u32 bytes = at < count * HEAD_DIM ? size : 0;
        if (HEAD_DIM % 16 == 0) copy_16(to + at, from + (bytes ? at : 0), bytes);
        else copy_8(to + at, from + (bytes ? at : 0), bytes);
    }
}
// The f16 scales of a block of positions, by the first four threads.
__device__ __forceinline__ void copy_scales(u32 to, const u16 *from, u32 count) {
    u32 at = threadIdx.x * 8;
    if (at >= BLOCK) return;
    u32 bytes = at < count ? min(count - at, 8) * 2 : 0;
    copy_16(to + at * 2, from + (bytes ? at : 0), bytes);
}
__device__ __forceinline__ void widen(u32 to, const u8 *codes) {
    for (u32 i = threadIdx.x; i < BLOCK * PIECES; i += THREADS) {
        u32 vector = i / PIECES, col = i % PIECES * 8;
        uint2 eight = col < HEAD_DIM ? *(const uint2 *)(codes + vector * HEAD_DIM + col) : make_uint2(0, 0);
        u32 pairs[4] = {
            codes_to_bf16(__byte_perm(eight.x, 0, 0x4140)), codes_to_bf16(__byte_perm(eight.x, 0, 0x4342)),
            codes_to_bf16(__byte_perm(eight.y, 0, 0x4140)), codes_to_bf16(__byte_perm(eight.y, 0, 0x4342))};
        store_16(to + vector * STRIDE + col * 2, pairs);
    }
}
#else
__device__ __forceinline__ void copy_vectors(u32 to, const u16 *from, u32 count) {
    for (u32 i = threadIdx.x; i < BLOCK * PIECES; i += THREADS) {
        u32 vector = i / PIECES, col = i % PIECES * 8;
        u32 bytes = vector < count && col < HEAD_DIM ? 16 : 0;
        copy_16(to + vector * STRIDE + col * 2, from + (bytes ? vector * HEAD_DIM + col : 0), bytes);
    }
}
#endif

// Starts the copies of positions `BLOCK · block ..`, zeros from the end on: what lies there may be no number.
__device__ __forceinline__ void start_block(const PromptParams &p, const Work &work, u32 block) {
    u32 position = block * BLOCK, count = min(BLOCK, work.end - position);
    u32 page = p.step.page_table[work.span.first_page + position / PAGE_TOKENS];
    size_t vector = first_vector(page, work.kv_head) + position % PAGE_TOKENS;
#if KV_TYPE == KV_INT8
    u32 to = work.arriving();
    copy_codes(to, p.kv.keys + vector * HEAD_DIM, count);
    copy_codes(to + CODE_BYTES, p.kv.values + vector * HEAD_DIM, count);
    copy_scales(to + 2 * CODE_BYTES, p.kv.key_scales + vector, count);
    copy_scales(to + 2 * CODE_BYTES + 2 * BLOCK, p.kv.value_scales + vector, count);
#else
    copy_vectors(work.keys(block % BUFFERS), p.kv.keys + vector * HEAD_DIM, count);
    copy_vectors(work.values(block % BUFFERS), p.kv.values + vector * HEAD_DIM, count);
#endif
    end_copies();
}

// Scores of a warp's 16 query vectors against a block of keys.
__device__ __forceinline__ void multiply_keys(float (&scores)[BLOCK / 8][4], u32 queries, u32 keys) {
    u32 lane = threadIdx.x & 31;
    u32 query = queries + (lane & 15) * STRIDE + (lane >> 4) * 16;
    u32 key = keys + ((lane >> 4) * 8 + (lane & 7)) * STRIDE + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        u32 a[4], b[4];
        load_matrices(a, query + k * 32);
#pragma unroll
        for (int n = 0; n < BLOCK / 16; n++) {
            load_matrices(b, key + n * 16 * STRIDE + k * 32);
            mma(scores[2 * n], a, b[0], b[1]);
            mma(scores[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Adds the weighted values of a block; `weights` are laid out as the scores.
__device__ __forceinline__ void add_values(float (&out)[DIM / 8][4], const float (&weights)[BLOCK / 8][4], u32 values) {
    u32 lane = threadIdx.x & 31;
    u32 value = values + ((lane >> 3 & 1) * 8 + (lane & 7)) * STRIDE + (lane >> 4) * 16;
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) {
        const float(&low)[4] = weights[2 * k], (&high)[4] = weights[2 * k + 1];
        u32 a[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
                    pack_bf16(high[2], high[3])};
#pragma unroll
        for (int n = 0; n < DIM / 16; n++) {
            u32 b[4];
            load_transposed(b, value + k * 16 * STRIDE + n * 32);
            mma(out[2 * n], a, b[0], b[1]);
            mma(out[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// One of the two rows that a thread holds a part of: elements `2 · half` and `2 · half + 1` of every accumulator.
struct Softmax {
    float largest, sum; // the sum of this thread's columns
};

// Turns scores into weights `2^(score − largest)`; returns the factor on what was summed before.
__device__ __forceinline__ float soften(float (&scores)[BLOCK / 8][4], int half, Softmax &state) {
    float largest = state.largest;
#pragma unroll
    for (int n = 0; n < BLOCK / 8; n++) largest = fmaxf(largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    largest = row_max(largest);
    float factor = exp2_fast(state.largest - largest), sum = 0.0f;
#pragma unroll
    for (int n = 0; n < BLOCK / 8; n++) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
            scores[n][i] = exp2_fast(__fsub_rn(scores[n][i], largest));
            sum += scores[n][i];
        }
    }
    state.largest = largest, state.sum = fmaf(state.sum, factor, sum);
    return factor;
}

// Divides by the sums, applies the gates and writes a warp's rows.
__device__ __forceinline__ void write_rows(const PromptParams &p, const Work &work, u32 vector, int half,
                                           const float (&out)[DIM / 8][4], float sum) {
    float inverse = 1.0f / row_sum(sum);
    if (vector >= work.vectors) return;
    u32 row = work.span.first_row + vector / HEADS_PER_KV;
    u32 head = work.kv_head * HEADS_PER_KV + vector % HEADS_PER_KV, column = (threadIdx.x & 3) * 2;
    const activation *gates = p.projected + (size_t)row * p.projected_cols + (2 * head + 1) * HEAD_DIM + column;
    activation *to = p.out + (size_t)row * p.out_cols + head * HEAD_DIM + column;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
        u32 gate = *(const u32 *)(gates + n * 8);
        *(u32 *)(to + n * 8) = pack_bf16(out[n][2 * half] * inverse * sigmoid(low_bf16(gate)),
                                         out[n][2 * half + 1] * inverse * sigmoid(high_bf16(gate)));
    }
}

// grid (KV_HEADS, most tiles of a span, spans); the tiles with the most positions come first
extern "C" __global__ void __launch_bounds__(THREADS) attend_prompt(const PromptParams p) {
    start_in_order();
    extern __shared__ __align__(16) u8 shared[];
    Work work;
    work.span = p.step.spans[blockIdx.z];
    work.kv_head = blockIdx.x;
    work.first = (gridDim.y - 1 - blockIdx.y) * TILE;
    work.vectors = work.span.rows * HEADS_PER_KV;
    if (work.first >= work.vectors) return;
    work.end = work.span.position + work.row(work.first + TILE - 1) + 1;
    work.shared = (u32)__cvta_generic_to_shared(shared);

    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    u32 vectors[2] = {work.first + warp * 16 + lane / 4, work.first + warp * 16 + lane / 4 + 8};
    u32 seen[2] = {work.span.position + work.row(vectors[0]) + 1, work.span.position + work.row(vectors[1]) + 1};
    u32 all_see = work.span.position + work.row(work.first) + 1;
    float log_scale = p.scale * LOG2_E;
    Softmax states[2] = {{-INFINITY_F32, 0.0f}, {-INFINITY_F32, 0.0f}};
    float out[DIM / 8][4];
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;

    u32 blocks = (work.end + BLOCK - 1) / BLOCK;
    copy_queries(p, work);
    start_block(p, work, 0);
    for (u32 block = 0; block < blocks; block++) {
        wait_for_copies();
        __syncthreads();
#if KV_TYPE == KV_INT8
        const u8 *codes = shared + (work.arriving() - work.shared);
        widen(work.keys(0), codes);
        widen(work.values(0), codes + CODE_BYTES);
        float key_scales[BLOCK / 8][2], value_scales[BLOCK / 8][2];
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) {
            u32 at = n * 8 + (lane & 3) * 2;
            u32 pair = *(const u32 *)(codes + 2 * CODE_BYTES + at * 2);
            key_scales[n][0] = f16_to_f32(pair & 0xffff) * log_scale, key_scales[n][1] = f16_to_f32(pair >> 16) * log_scale;
            pair = *(const u32 *)(codes + 2 * CODE_BYTES + 2 * BLOCK + at * 2);
            value_scales[n][0] = f16_to_f32(pair & 0xffff), value_scales[n][1] = f16_to_f32(pair >> 16);
        }
        __syncthreads();
#endif
        if (block + 1 < blocks) start_block(p, work, block + 1);

        float scores[BLOCK / 8][4];
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
        multiply_keys(scores, work.shared + warp * 16 * STRIDE, work.keys(block % BUFFERS));
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
#if KV_TYPE == KV_INT8
                scores[n][i] = __fmul_rn(scores[n][i], key_scales[n][i & 1]);
#else
                scores[n][i] = __fmul_rn(scores[n][i], log_scale);
#endif
            }
        }
        if ((block + 1) * BLOCK > all_see) {
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 position = block * BLOCK + n * 8 + (lane & 3) * 2 + (i & 1);
                    if (position >= seen[i / 2]) scores[n][i] = -INFINITY_F32;
                }
            }
        }
        float factors[2] = {soften(scores, 0, states[0]), soften(scores, 1, states[1])};
        // A factor of 1 changes nothing, and is what most blocks after the first few have.
        if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) out[n][i] *= factors[i / 2];
            }
        }
#if KV_TYPE == KV_INT8
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] *= value_scales[n][i & 1];
        }
#endif
        add_values(out, scores, work.values(block % BUFFERS));
    }
    write_rows(p, work, vectors[0], 0, out, states[0].sum);
    write_rows(p, work, vectors[1], 1, out, states[1].sum);
}
