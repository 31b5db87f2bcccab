// Attention of one layer: q/k norm with RoPE and KV append; softmax over pages, split over positions; the gate.
// Compiled for: HEAD_DIM (a multiple of 8, at most 256), ROPE_DIMS, QUERY_HEADS, KV_HEADS, KV_F32.
#include "common.cuh"

#define HEADS_PER_KV (QUERY_HEADS / KV_HEADS)
#define MAX_SPLITS 32
#define PARTIAL (HEAD_DIM + 2) // weighted sum of values, maximum, sum of weights
#define WARPS 4

#if KV_F32
#define SCORES_AT_ONCE 1 // what registers allow
typedef float kv;
__device__ __forceinline__ kv to_kv(float x) { return x; }
__device__ __forceinline__ float from_kv(kv x) { return x; }
#else
#define SCORES_AT_ONCE 2
typedef u16 kv;
__device__ __forceinline__ kv to_kv(float x) { return f32_to_bf16(x); }
__device__ __forceinline__ float from_kv(kv x) { return bf16_to_f32(x); }
#endif

// Keys and values of a layer are `[pages, KV_HEADS, PAGE_TOKENS, HEAD_DIM]`: a head of a page is contiguous.
__device__ __forceinline__ size_t page_offset(u32 page, u32 kv_head) {
    return ((size_t)page * KV_HEADS + kv_head) * (PAGE_TOKENS * HEAD_DIM);
}

struct PrepareParams {
    Step step;
    const activation *projected;
    const float *q_norm;
    const float *k_norm;
    const float *inverse; // `[ROPE_DIMS / 2]`
    activation *query;
    kv *keys;
    kv *values;
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
    size_t at = page_offset(page, kv_head) + position % PAGE_TOKENS * HEAD_DIM;
    const activation *value = input + (2 * QUERY_HEADS + KV_HEADS + kv_head) * HEAD_DIM;
    for (u32 i = lane; i < HEAD_DIM; i += 32) {
        p.keys[at + i] = to_kv(head[i]);
        p.values[at + i] = to_kv(from_activation(value[i]));
    }
}

struct AttendParams {
    Step step;
    const activation *query;
    const activation *projected;
    const kv *keys;
    const kv *values;
    float *partials; // `[rows of this launch, QUERY_HEADS, MAX_SPLITS, PARTIAL]`
    activation *out;
    u32 first_row, query_cols, projected_cols, out_cols;
    float scale;
};

// Pages of a row with `positions` positions, per split: a function of the position alone, so that bits do not
// depend on the company.
__device__ __forceinline__ u32 pages_per_split(u32 pages) { return (pages + MAX_SPLITS - 1) / MAX_SPLITS; }

__device__ __forceinline__ void load_eight(const kv *from, float (&to)[8]) {
#if KV_F32
    float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
#else
    uint4 v = *(const uint4 *)from;
    to[0] = low_bf16(v.x), to[1] = high_bf16(v.x), to[2] = low_bf16(v.y), to[3] = high_bf16(v.y);
    to[4] = low_bf16(v.z), to[5] = high_bf16(v.z), to[6] = low_bf16(v.w), to[7] = high_bf16(v.w);
#endif
}

// One row, one kv head with all its query heads, one split of the positions, page after page with a running maximum.
// Scores: a warp per position, eight dims a lane. Values: two columns a thread. grid (MAX_SPLITS, KV_HEADS, rows)
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
        size_t at = page_offset(p.step.page_table[span.first_page + logical], kv_head);
        u32 count = min(PAGE_TOKENS, positions - logical * PAGE_TOKENS);
#pragma unroll SCORES_AT_ONCE
        for (u32 i = warp; i < count; i += WARPS) {
            float key[8];
#pragma unroll
            for (int d = 0; d < 8; d++) key[d] = 0.0f;
            if (has_dims) load_eight(p.keys + at + i * HEAD_DIM + lane * 8, key);
#pragma unroll
            for (int h = 0; h < HEADS_PER_KV; h++) {
                float dot = 0.0f;
#pragma unroll
                for (int d = 0; d < 8; d++) dot = fmaf(q[h][d], key[d], dot);
                dot = warp_sum(dot);
                if (lane == 0) scores[h][i] = dot;
            }
        }
        __syncthreads();
        for (u32 h = warp; h < HEADS_PER_KV; h += WARPS) {
            float a = lane < count ? scores[h][lane] : -INFINITY_F32;
            float b = lane + 32 < count ? scores[h][lane + 32] : -INFINITY_F32;
            float largest = fmaxf(a, b);
#pragma unroll
            for (int offset = 16; offset > 0; offset >>= 1)
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
            float before = maxima[h];
            largest = fmaxf(largest, before);
            a = lane < count ? expf(a - largest) : 0.0f;
            b = lane + 32 < count ? expf(b - largest) : 0.0f;
            scores[h][lane] = a, scores[h][lane + 32] = b;
            float sum = warp_sum(a + b);
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
            const kv *value = p.values + at + col;
#pragma unroll 8
            for (u32 i = 0; i < count; i++) {
#if KV_F32
                float2 v = *(const float2 *)(value + i * HEAD_DIM);
                float v0 = v.x, v1 = v.y;
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
