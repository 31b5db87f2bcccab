// Before and after the attention of one layer: q/k norm with RoPE and KV append; the sum of the splits and the gate.
// Compiled for: HEAD_DIM (a multiple of 8, at most 256), ROPE_DIMS, QUERY_HEADS, KV_HEADS, KV_TYPE.
#include "attention.cuh"

#define WARPS 4

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

// Adds the splits in order and applies the gate. grid (QUERY_HEADS, rows), HEAD_DIM threads
extern "C" __global__ void __launch_bounds__(256) combine(const AttendParams p) {
    start_in_order();
    u32 head = blockIdx.x, row = p.first_row + blockIdx.y, col = threadIdx.x;
    if (!has_row(p.step, row)) return;
    Span span = p.step.spans[p.step.row_span[row]];
    u32 positions = span.position + row - span.first_row + 1;
    u32 pages = pages_of(positions), per_split = pages_per_split(pages);
    u32 splits = (pages + per_split - 1) / per_split;
    const float *partial = p.partials + ((size_t)blockIdx.y * QUERY_HEADS + head) * MAX_SPLITS * PARTIAL;
    float largest = -INFINITY_F32, sum = 0.0f, total = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < splits; i++) largest = fmaxf(largest, partial[i * PARTIAL + HEAD_DIM]);
#pragma unroll 4
    for (u32 i = 0; i < splits; i++) {
        float factor = exp2f(partial[i * PARTIAL + HEAD_DIM] - largest);
        total = fmaf(partial[i * PARTIAL + HEAD_DIM + 1], factor, total);
        sum = fmaf(partial[i * PARTIAL + col], factor, sum);
    }
    float gate = from_activation(p.projected[(size_t)row * p.projected_cols + (2 * head + 1) * HEAD_DIM + col]);
    p.out[(size_t)row * p.out_cols + head * HEAD_DIM + col] = to_activation(sum / total * sigmoid(gate));
}
