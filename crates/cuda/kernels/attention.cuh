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
