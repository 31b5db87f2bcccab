// Attention of one layer: q/k norm with RoPE and KV append; softmax over pages, split over positions; the gate.
// Compiled for: HEAD_DIM (a multiple of 8, at most 256), ROPE_DIMS, QUERY_HEADS, KV_HEADS, KV_TYPE.
#include "attention.cuh"

#define MAX_SPLITS 32
#define PARTIAL (HEAD_DIM + 2) // weighted sum of values, maximum, sum of weights
#define WARPS 4
#define SCORES_AT_ONCE (KV_TYPE == KV_F32 ? 1 : 2) // what registers allow

// A warp stores a vector. Int8: scale max|x| / 127 in f16, codes x / scale to the nearest even, NaN for a scale where
// something is not finite (`quantize_vector` in numeric.rs).
__device__ __forceinline__ void store_vector(kv *elements, u16 *scales, size_t vector, const float *x, u32 lane) {
    kv *to = elements + vector * HEAD_DIM;
#if KV_TYPE == KV_INT8
    float largest = 0.0f;
    bool finite = true;
    for (u32 i = lane; i < HEAD_DIM; i += 32) {
        largest = fmaxf(largest, fabsf(x[i]));
        finite = finite && fabsf(x[i]) < INFINITY_F32;
    }
    largest = warp_max(largest);
    finite = __all_sync(0xffffffffu, finite);
    u16 bits = finite ? f32_to_f16(fminf(largest / 127.0f, 65504.0f)) : 0x7e00;
    float scale = f16_to_f32(bits);
    for (u32 i = lane; i < HEAD_DIM; i += 32)
        to[i] = scale > 0.0f ? (i8)fminf(fmaxf(rintf(x[i] / scale), -127.0f), 127.0f) : (i8)0;
    if (lane == 0) scales[vector] = bits;
#elif KV_TYPE == KV_BF16
    for (u32 i = lane; i < HEAD_DIM; i += 32) to[i] = f32_to_bf16(x[i]);
#else
    for (u32 i = lane; i < HEAD_DIM; i += 32) to[i] = x[i];
#endif
}

struct PrepareParams {
    Step step;
    const activation *projected;
    const float *q_norm;
    const float *k_norm;
    const float *inverse; // `[ROPE_DIMS / 2]`
    activation *query;
    Kv kv;
    u32 projected_cols, query_cols;
    float eps;
};
// grid (ceil((QUERY_HEADS + KV_HEADS) / WARPS), rows); a warp per head
extern "C" __global__ void __launch_bounds__(WARPS * 32) prepare(const PrepareParams p) {
    start_in_order();
    __shared__ float heads[WARPS][HEAD_DIM];
    u32 lane = threadIdx.x & 31, unit = blockIdx.x * WARPS + threadIdx.x / 32, row = blockIdx.y;
    if (unit >= QUERY_HEADS + KV_HEADS || !has_row(p.step, row)) return;
    float *head = heads[threadIdx.x / 32];
    Span span = p.step.spans[p.step.row_span[row]];
    u32 position = span.position + row - span.first_row;
    const activation *input = p.projected + (size_t)row * p.projected_cols;
    bool is_query = unit < QUERY_HEADS;
    u32 kv_head = unit - QUERY_HEADS;
    const activation *x = input + (is_query ? unit * 2 : 2 * QUERY_HEADS + kv_head) * HEAD_DIM;
    const float *norm = is_query ? p.q_norm : p.k_norm;

    float sum = 0.0f;
    for (u32 i = lane; i < HEAD_DIM; i += 32) sum = fmaf(from_activation(x[i]), from_activation(x[i]), sum);
    float factor = 1.0f / sqrtf(warp_sum(sum) / (float)HEAD_DIM + p.eps);
    for (u32 i = lane; i < HEAD_DIM; i += 32) head[i] = from_activation(x[i]) * factor * norm[i];
    __syncwarp();
    for (u32 i = lane; i < ROPE_DIMS / 2; i += 32) {
        float sine, cosine, a = head[i], b = head[i + ROPE_DIMS / 2];
        sincosf((float)position * p.inverse[i], &sine, &cosine);
        head[i] = a * cosine - b * sine;
        head[i + ROPE_DIMS / 2] = b * cosine + a * sine;
    }
    __syncwarp();
    if (is_query) {
        activation *query = p.query + (size_t)row * p.query_cols + unit * HEAD_DIM;
        for (u32 i = lane; i < HEAD_DIM; i += 32) query[i] = to_activation(head[i]);
        return;
    }
    u32 page = p.step.page_table[span.first_page + position / PAGE_TOKENS];
    size_t vector = first_vector(page, kv_head) + position % PAGE_TOKENS;
    const activation *value = input + (2 * QUERY_HEADS + KV_HEADS + kv_head) * HEAD_DIM;
    store_vector(p.kv.keys, p.kv.key_scales, vector, head, lane);
    for (u32 i = lane; i < HEAD_DIM; i += 32) head[i] = from_activation(value[i]); // each lane's own
    store_vector(p.kv.values, p.kv.value_scales, vector, head, lane);
}

struct AttendParams {
    Step step;
    const activation *query;
    const activation *projected;
    Kv kv;
    float *partials; // `[rows of this launch, QUERY_HEADS, MAX_SPLITS, PARTIAL]`
    activation *out;
    u32 first_row, query_cols, projected_cols, out_cols;
    float scale;
};

// Pages of a row with `positions` positions, per split: a function of the position alone, so that bits do not
// depend on the company.
__device__ __forceinline__ u32 pages_per_split(u32 pages) { return (pages + MAX_SPLITS - 1) / MAX_SPLITS; }

// Four codes as f32, exact: a byte with its top bit flipped is the low mantissa of 2^23.
__device__ __forceinline__ void widen_codes(u32 codes, float *to) {
    codes ^= 0x80808080u;
#pragma unroll
    for (u32 i = 0; i < 4; i++) to[i] = __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
}

__device__ __forceinline__ void load_eight(const kv *from, float (&to)[8]) {
#if KV_TYPE == KV_F32
    float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
#elif KV_TYPE == KV_INT8
    uint2 v = *(const uint2 *)from;
    widen_codes(v.x, to), widen_codes(v.y, to + 4);
#else
    uint4 v = *(const uint4 *)from;
    to[0] = low_bf16(v.x), to[1] = high_bf16(v.x), to[2] = low_bf16(v.y), to[3] = high_bf16(v.y);
    to[4] = low_bf16(v.z), to[5] = high_bf16(v.z), to[6] = low_bf16(v.w), to[7] = high_bf16(v.w);
#endif
}

// One row, one kv head with all its query heads, one split of the positions, page after page with a running maximum.
// Scores: a warp per position, eight dims a lane. Values: two columns a thread. Scales of keys multiply the scores,
// scales of values the weights. grid (MAX_SPLITS, KV_HEADS, rows)
extern "C" __global__ void __launch_bounds__(WARPS * 32, 4) attend(const AttendParams p) {
    start_in_order();
    __shared__ float scores[HEADS_PER_KV][PAGE_TOKENS];
    __shared__ float maxima[HEADS_PER_KV], sums[HEADS_PER_KV], factors[HEADS_PER_KV];
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, kv_head = blockIdx.y, row = p.first_row + blockIdx.z;
    if (!has_row(p.step, row)) return;
    Span span = p.step.spans[p.step.row_span[row]];
    u32 positions = span.position + row - span.first_row + 1;
    u32 pages = (positions + PAGE_TOKENS - 1) / PAGE_TOKENS, per_split = pages_per_split(pages);
    u32 first = split * per_split, end = min(first + per_split, pages);
    if (first >= end) return;

    float q[HEADS_PER_KV][8];
    bool has_dims = lane * 8 < HEAD_DIM;
    const activation *query = p.query + (size_t)row * p.query_cols + kv_head * HEADS_PER_KV * HEAD_DIM + lane * 8;
#pragma unroll
    for (int h = 0; h < HEADS_PER_KV; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) q[h][i] = has_dims ? from_activation(query[h * HEAD_DIM + i]) * p.scale : 0.0f;
    if (threadIdx.x < HEADS_PER_KV) maxima[threadIdx.x] = -INFINITY_F32, sums[threadIdx.x] = 0.0f;

    float out[HEADS_PER_KV][2];
#pragma unroll
    for (int h = 0; h < HEADS_PER_KV; h++) out[h][0] = out[h][1] = 0.0f;
    u32 col = threadIdx.x * 2;

    for (u32 logical = first; logical < end; logical++) {
        size_t vector = first_vector(p.step.page_table[span.first_page + logical], kv_head);
        u32 count = min(PAGE_TOKENS, positions - logical * PAGE_TOKENS);
#pragma unroll SCORES_AT_ONCE
        for (u32 i = warp; i < count; i += WARPS) {
            float key[8];
#pragma unroll
            for (int d = 0; d < 8; d++) key[d] = 0.0f;
            if (has_dims) load_eight(p.kv.keys + (vector + i) * HEAD_DIM + lane * 8, key);
#if KV_TYPE == KV_INT8
            float key_scale = f16_to_f32(p.kv.key_scales[vector + i]);
#endif
#pragma unroll
            for (int h = 0; h < HEADS_PER_KV; h++) {
                float dot = 0.0f;
#pragma unroll
                for (int d = 0; d < 8; d++) dot = fmaf(q[h][d], key[d], dot);
                dot = warp_sum(dot);
#if KV_TYPE == KV_INT8
                dot *= key_scale;
#endif
                if (lane == 0) scores[h][i] = dot;
            }
        }
        __syncthreads();
        for (u32 h = warp; h < HEADS_PER_KV; h += WARPS) {
            float a = lane < count ? scores[h][lane] : -INFINITY_F32;
            float b = lane + 32 < count ? scores[h][lane + 32] : -INFINITY_F32;
            float before = maxima[h], largest = fmaxf(warp_max(fmaxf(a, b)), before);
            a = lane < count ? expf(a - largest) : 0.0f;
            b = lane + 32 < count ? expf(b - largest) : 0.0f;
            float sum = warp_sum(a + b);
#if KV_TYPE == KV_INT8
            if (lane < count) a *= f16_to_f32(p.kv.value_scales[vector + lane]);
            if (lane + 32 < count) b *= f16_to_f32(p.kv.value_scales[vector + lane + 32]);
#endif
            scores[h][lane] = a, scores[h][lane + 32] = b;
            __syncwarp();
            if (lane == 0) {
                float factor = expf(before - largest);
                factors[h] = factor, maxima[h] = largest, sums[h] = fmaf(sums[h], factor, sum);
            }
        }
        __syncthreads();
        if (col < HEAD_DIM) {
#pragma unroll
            for (int h = 0; h < HEADS_PER_KV; h++) out[h][0] *= factors[h], out[h][1] *= factors[h];
            const kv *value = p.kv.values + vector * HEAD_DIM + col;
#pragma unroll 8
            for (u32 i = 0; i < count; i++) {
#if KV_TYPE == KV_F32
                float2 v = *(const float2 *)(value + i * HEAD_DIM);
                float v0 = v.x, v1 = v.y;
#elif KV_TYPE == KV_INT8
                u32 v = *(const u16 *)(value + i * HEAD_DIM) ^ 0x8080u;
                float v0 = __uint_as_float(0x4b000000u | (v & 255)) - 8388736.0f;
                float v1 = __uint_as_float(0x4b000000u | v >> 8) - 8388736.0f;
#else
                u32 v = *(const u32 *)(value + i * HEAD_DIM);
                float v0 = low_bf16(v), v1 = high_bf16(v);
#endif
#pragma unroll
                for (int h = 0; h < HEADS_PER_KV; h++) {
                    out[h][0] = fmaf(scores[h][i], v0, out[h][0]);
                    out[h][1] = fmaf(scores[h][i], v1, out[h][1]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < HEADS_PER_KV; h++) {
        size_t index = ((size_t)blockIdx.z * QUERY_HEADS + kv_head * HEADS_PER_KV + h) * MAX_SPLITS + split;
        float *partial = p.partials + index * PARTIAL;
        if (col < HEAD_DIM) partial[col] = out[h][0], partial[col + 1] = out[h][1];
        if (threadIdx.x == 0) partial[HEAD_DIM] = maxima[h], partial[HEAD_DIM + 1] = sums[h];
    }
}

// Adds the splits in order and applies the gate. grid (QUERY_HEADS, rows), HEAD_DIM threads
extern "C" __global__ void __launch_bounds__(256) combine(const AttendParams p) {
    start_in_order();
    u32 head = blockIdx.x, row = p.first_row + blockIdx.y, col = threadIdx.x;
    if (!has_row(p.step, row)) return;
    Span span = p.step.spans[p.step.row_span[row]];
    u32 positions = span.position + row - span.first_row + 1;
    u32 pages = (positions + PAGE_TOKENS - 1) / PAGE_TOKENS, per_split = pages_per_split(pages);
    u32 splits = (pages + per_split - 1) / per_split;
    const float *partial = p.partials + ((size_t)blockIdx.y * QUERY_HEADS + head) * MAX_SPLITS * PARTIAL;
    float largest = -INFINITY_F32, sum = 0.0f, total = 0.0f;
    for (u32 i = 0; i < splits; i++) largest = fmaxf(largest, partial[i * PARTIAL + HEAD_DIM]);
    for (u32 i = 0; i < splits; i++) {
        float factor = expf(partial[i * PARTIAL + HEAD_DIM] - largest);
        total = fmaf(partial[i * PARTIAL + HEAD_DIM + 1], factor, total);
        sum = fmaf(partial[i * PARTIAL + col], factor, sum);
    }
    float gate = from_activation(p.projected[(size_t)row * p.projected_cols + (2 * head + 1) * HEAD_DIM + col]);
    p.out[(size_t)row * p.out_cols + head * HEAD_DIM + col] = to_activation(sum / total * sigmoid(gate));
}
