// Attention over keys and values in f32, of all rows: exact products on plain cores.
// Compiled for: HEAD_DIM (a multiple of 8, at most 256), QUERY_HEADS, KV_HEADS, KV_TYPE (f32).
#include "attention.cuh"

#define WARPS 4

// One row, one kv head with all its query heads, one split of the positions, page after page with a running maximum.
// Scores: a warp per position, eight dims a lane. Values: two columns a thread. grid (MAX_SPLITS, KV_HEADS, rows)
extern "C" __global__ void __launch_bounds__(WARPS * 32, 4) attend_plain(const AttendParams p) {
    start_in_order();
    __shared__ float scores[HEADS_PER_KV][PAGE_TOKENS];
    __shared__ float maxima[HEADS_PER_KV], sums[HEADS_PER_KV], factors[HEADS_PER_KV];
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, kv_head = blockIdx.y, row = p.first_row + blockIdx.z;
    if (!has_row(p.step, row)) return;
    Span span = p.step.spans[p.step.row_span[row]];
    u32 positions = span.position + row - span.first_row + 1;
    u32 pages = pages_of(positions), per_split = pages_per_split(pages);
    u32 first = split * per_split, end = min(first + per_split, pages);
    if (first >= end) return;

    float q[HEADS_PER_KV][8];
    bool has_dims = lane * 8 < HEAD_DIM;
    const activation *query = p.query + (size_t)row * p.query_cols + kv_head * HEADS_PER_KV * HEAD_DIM + lane * 8;
#pragma unroll
    for (int h = 0; h < HEADS_PER_KV; h++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            q[h][i] = has_dims ? from_activation(query[h * HEAD_DIM + i]) * (p.scale * LOG2_E) : 0.0f;
    if (threadIdx.x < HEADS_PER_KV) maxima[threadIdx.x] = -INFINITY_F32, sums[threadIdx.x] = 0.0f;

    float out[HEADS_PER_KV][2];
#pragma unroll
    for (int h = 0; h < HEADS_PER_KV; h++) out[h][0] = out[h][1] = 0.0f;
    u32 col = threadIdx.x * 2;

    for (u32 logical = first; logical < end; logical++) {
        size_t vector = first_vector(p.step.page_table[span.first_page + logical], kv_head);
        u32 count = min(PAGE_TOKENS, positions - logical * PAGE_TOKENS);
#pragma unroll 1 // what registers allow
        for (u32 i = warp; i < count; i += WARPS) {
            float key[8];
#pragma unroll
            for (int d = 0; d < 8; d++) key[d] = 0.0f;
            if (has_dims) {
                const float4 *from = (const float4 *)(p.kv.keys + (vector + i) * HEAD_DIM + lane * 8);
                float4 a = from[0], b = from[1];
                key[0] = a.x, key[1] = a.y, key[2] = a.z, key[3] = a.w;
                key[4] = b.x, key[5] = b.y, key[6] = b.z, key[7] = b.w;
            }
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
            float before = maxima[h], largest = fmaxf(warp_max(fmaxf(a, b)), before);
            a = lane < count ? exp2f(a - largest) : 0.0f;
            b = lane + 32 < count ? exp2f(b - largest) : 0.0f;
            float sum = warp_sum(a + b);
            scores[h][lane] = a, scores[h][lane + 32] = b;
            __syncwarp();
            if (lane == 0) {
                float factor = exp2f(before - largest);
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
                float2 v = *(const float2 *)(value + i * HEAD_DIM);
#pragma unroll
                for (int h = 0; h < HEADS_PER_KV; h++) {
                    out[h][0] = fmaf(scores[h][i], v.x, out[h][0]);
                    out[h][1] = fmaf(scores[h][i], v.y, out[h][1]);
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
