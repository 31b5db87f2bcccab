// Where keys and values lie. Compiled for: HEAD_DIM, QUERY_HEADS, KV_HEADS, KV_TYPE.
#pragma once
#include "common.cuh"

#define HEADS_PER_KV (QUERY_HEADS / KV_HEADS)

#define KV_F32 0
#define KV_BF16 1
#define KV_INT8 2

#if KV_TYPE == KV_F32
typedef float kv;
#elif KV_TYPE == KV_BF16
typedef u16 kv;
#else
typedef i8 kv;
#endif

// Keys and values of a layer are vectors `[pages, KV_HEADS, PAGE_TOKENS, HEAD_DIM]`: a head of a page is contiguous.
// Int8 codes have f16 scales `[pages, KV_HEADS, PAGE_TOKENS]`; the other types have none.
struct Kv {
    kv *keys;
    kv *values;
    u16 *key_scales;
    u16 *value_scales;
};
// Index of the first vector of a head of a page.
__device__ __forceinline__ size_t first_vector(u32 page, u32 kv_head) {
    return ((size_t)page * KV_HEADS + kv_head) * PAGE_TOKENS;
}

// ---- rows, split over their positions -------------------------------------------------------------------------

#define MAX_SPLITS 32
#define PARTIAL (HEAD_DIM + 2) // weighted sum of values; base-2 logarithm of the largest weight; sum of weights
#define LOG2_E 1.4426950408889634f

__device__ __forceinline__ u32 pages_of(u32 positions) { return (positions + PAGE_TOKENS - 1) / PAGE_TOKENS; }
// Pages of a split of a row that sees `pages`: a function of the position alone, so that bits do not depend on the
// company.
__device__ __forceinline__ u32 pages_per_split(u32 pages) { return (pages + MAX_SPLITS - 1) / MAX_SPLITS; }

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

// ---- arithmetic -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// Two int8 codes, bytes 0 and 2, as bf16: 128 + (code & 127), less 128 or, where the code is negative, 256. Exact.
__device__ __forceinline__ u32 codes_to_bf16(u32 codes) {
    u32 biased = (codes & 0x007f007fu) | 0x43004300u, bias = (codes & 0x00800080u) | 0xc300c300u, pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(biased), "r"(0x3f803f80u), "r"(bias));
    return pair;
}
