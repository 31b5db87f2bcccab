// Attention of decode and verify rows on tensor cores: keys and values on the m16 side of mma.m16n8k16, straight from
// memory into registers; query vectors on n8. A block has a split of the positions for some rows of a span that stand
// at the same splits, so that keys and values are read once for all of them; a row's bits are those it has alone.
// Compiled for: HEAD_DIM (a multiple of 8, at most 256), QUERY_HEADS, KV_HEADS, KV_TYPE (bf16 or int8).
#include "attention.cuh"

#define WARPS 4
// Rows of a span that share a block: three tiles of eight query vectors are what registers allow.
#define MANY_ROWS (24 / HEADS_PER_KV < 8 ? 24 / HEADS_PER_KV : 8)
#define CHUNKS ((HEAD_DIM + 31) / 32) // of 32 dims, eight a lane
// Bytes of a query in shared memory, an odd multiple of 64, and of a vector's weights: no two lanes in one bank.
#define QUERY_STRIDE (CHUNKS * 64 + (CHUNKS % 2 ? 0 : 64))
#define WEIGHTS_STRIDE (PAGE_TOKENS * 2 + 32)

// Eight elements of a stored vector.
struct Eight {
#if KV_TYPE == KV_INT8
    u32 words[2];
#else
    u32 words[4];
#endif
};
__device__ __forceinline__ Eight load_eight(const kv *from) {
    Eight eight;
#if KV_TYPE == KV_INT8
    uint2 v = *(const uint2 *)from;
    eight.words[0] = v.x, eight.words[1] = v.y;
#else
    uint4 v = *(const uint4 *)from;
    eight.words[0] = v.x, eight.words[1] = v.y, eight.words[2] = v.z, eight.words[3] = v.w;
#endif
    return eight;
}
__device__ __forceinline__ Eight no_eight() {
    Eight eight;
    for (u32 &word : eight.words) word = 0;
    return eight;
}
// Elements 2 i and 2 i + 1 as bf16.
__device__ __forceinline__ u32 pair_of(const Eight &eight, int i) {
#if KV_TYPE == KV_INT8
    return codes_to_bf16(__byte_perm(eight.words[i / 2], 0, i % 2 ? 0x4342 : 0x4140));
#else
    return eight.words[i];
#endif
}
// Element i of two vectors as bf16.
__device__ __forceinline__ u32 across(const Eight &first, const Eight &second, int i) {
#if KV_TYPE == KV_INT8
    return codes_to_bf16(__byte_perm(first.words[i / 4], second.words[i / 4], (i & 3) * 0x11 + (4 + (i & 3)) * 0x1100));
#else
    return __byte_perm(first.words[i / 2], second.words[i / 2], i % 2 ? 0x7632 : 0x5410);
#endif
}

// The rows of a block: `count` rows of a span from `row` on, and the pages of their split.
struct Group {
    Span span;
    u32 row, count, positions; // that the first row sees
    u32 first_page, end_page;
};
// False where another block has the row, or none.
template <int ROWS> __device__ __forceinline__ bool find_group(const AttendParams &p, Group &group) {
    u32 place = blockIdx.z;
    group.row = p.first_row + place;
    if (!has_row(p.step, group.row)) return false;
    group.span = p.step.spans[p.step.row_span[group.row]];
    u32 within = group.row - group.span.first_row;
    group.positions = group.span.position + within + 1;
    u32 per_split = pages_per_split(pages_of(group.positions));
    bool leads = place == 0 || within % ROWS == 0 || per_split != pages_per_split(pages_of(group.positions - 1));
    if (!leads) return false;
    u32 most = min(min(ROWS - within % ROWS, group.span.rows - within), gridDim.z - place);
    group.count = 1;
    while (group.count < most && pages_per_split(pages_of(group.positions + group.count)) == per_split) group.count++;
    group.first_page = blockIdx.x * per_split;
    group.end_page = min(group.first_page + per_split, pages_of(group.positions + group.count - 1));
    return group.first_page < group.end_page;
}

// What a lane holds of a page's keys: the rows of its warp's 16 positions, eight dims of every chunk.
struct Keys {
    Eight rows[2][CHUNKS];
#if KV_TYPE == KV_INT8
    u16 scales[2], value_scales[2];
#endif
};
__device__ __forceinline__ void load_keys(Keys &keys, const Kv &kv, size_t vector) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        size_t at = vector + warp * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            u32 dim = chunk * 32 + (lane & 3) * 8;
            keys.rows[half][chunk] = dim < HEAD_DIM ? load_eight(kv.keys + at * HEAD_DIM + dim) : no_eight();
        }
#if KV_TYPE == KV_INT8
        keys.scales[half] = kv.key_scales[at], keys.value_scales[half] = kv.value_scales[at];
#endif
    }
}

// What a lane holds of a page's values: eight of its warp's 64 dims at 16 positions, 4 t + 0..3 of every 16. Zeros from
// `count` on: what lies there may be no number.
struct Values {
    Eight positions[PAGE_TOKENS / 16][4];
};
__device__ __forceinline__ void load_values(Values &values, const Kv &kv, size_t vector, u32 count) {
    u32 lane = threadIdx.x & 31, dim = threadIdx.x / 32 * 64 + lane / 4 * 8;
#pragma unroll
    for (int step = 0; step < PAGE_TOKENS / 16; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 at = step * 16 + (lane & 3) * 4 + i;
            bool there = at < count && dim < HEAD_DIM;
            values.positions[step][i] = there ? load_eight(kv.values + (vector + at) * HEAD_DIM + dim) : no_eight();
        }
    }
}

// Dot products of a warp's 16 positions with all queries.
template <int TILES>
__device__ __forceinline__ void multiply_keys(float (&scores)[TILES][4], const Keys &keys, const u8 *queries) {
    u32 lane = threadIdx.x & 31;
    const u8 *query = queries + lane / 4 * QUERY_STRIDE + (lane & 3) * 16;
#pragma unroll
    for (int n = 0; n < TILES; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const Eight &low = keys.rows[0][chunk], &high = keys.rows[1][chunk];
        u32 a[2][4] = {{pair_of(low, 0), pair_of(high, 0), pair_of(low, 1), pair_of(high, 1)},
                       {pair_of(low, 2), pair_of(high, 2), pair_of(low, 3), pair_of(high, 3)}};
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            uint4 b = *(const uint4 *)(query + n * 8 * QUERY_STRIDE + chunk * 64);
            mma(scores[n], a[0], b.x, b.y);
            mma(scores[n], a[1], b.z, b.w);
        }
    }
}

// Adds the weighted values of a page to a warp's 64 dims.
template <int TILES>
__device__ __forceinline__ void add_values(float (&out)[4][TILES][4], const Values &values, const u8 *weights) {
    u32 lane = threadIdx.x & 31;
    const u8 *weight = weights + lane / 4 * WEIGHTS_STRIDE + (lane & 3) * 8;
#pragma unroll
    for (int step = 0; step < PAGE_TOKENS / 16; step++) {
        const Eight(&v)[4] = values.positions[step];
        uint2 b[TILES];
#pragma unroll
        for (int n = 0; n < TILES; n++) b[n] = *(const uint2 *)(weight + n * 8 * WEIGHTS_STRIDE + step * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a[4] = {across(v[0], v[1], 2 * i), across(v[0], v[1], 2 * i + 1), across(v[2], v[3], 2 * i),
                        across(v[2], v[3], 2 * i + 1)};
#pragma unroll
            for (int n = 0; n < TILES; n++) mma(out[i][n], a, b[n].x, b[n].y);
        }
    }
}

// Over the eight lanes that share a column of an accumulator.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Both kernels give a row the same bits: sums in one order, and no product that a compiler may join with a sum.
template <int ROWS> __device__ __forceinline__ void attend(const AttendParams &p) {
    constexpr int TILES = (ROWS * HEADS_PER_KV + 7) / 8, VECTORS = TILES * 8;
    __shared__ __align__(16) u8 queries[VECTORS * QUERY_STRIDE];
    __shared__ __align__(16) u8 weights[VECTORS * WEIGHTS_STRIDE];
    __shared__ float reduced[WARPS][VECTORS];
    start_in_order();
    Group group;
    if (!find_group<ROWS>(p, group)) return;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, kv_head = blockIdx.y;
    u32 end = group.positions + group.count - 1; // positions that the last row sees
    auto vector_of = [&](u32 page) { return first_vector(p.step.page_table[group.span.first_page + page], kv_head); };

    Keys keys;
    Values values;
    size_t vector = vector_of(group.first_page);
    load_keys(keys, p.kv, vector);
    load_values(values, p.kv, vector, end - group.first_page * PAGE_TOKENS);
    for (u32 i = threadIdx.x; i < VECTORS * CHUNKS * 4; i += WARPS * 32) {
        u32 at = i / (CHUNKS * 4), dim = i % (CHUNKS * 4) * 8;
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (at < group.count * HEADS_PER_KV && dim < HEAD_DIM) {
            size_t row = group.row + at / HEADS_PER_KV, head = kv_head * HEADS_PER_KV + at % HEADS_PER_KV;
            eight = *(const uint4 *)(p.query + row * p.query_cols + head * HEAD_DIM + dim);
        }
        *(uint4 *)(queries + at * QUERY_STRIDE + dim * 2) = eight;
    }
    __syncthreads();

    float largest[TILES][2], sums[TILES][2], out[4][TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        largest[n][0] = largest[n][1] = -INFINITY_F32, sums[n][0] = sums[n][1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) out[i][n][0] = out[i][n][1] = out[i][n][2] = out[i][n][3] = 0.0f;
    }
    for (u32 page = group.first_page; page < group.end_page; page++) {
        float scores[TILES][4];
        multiply_keys(scores, keys, queries);
        float scales[2] = {p.scale * LOG2_E, p.scale * LOG2_E};
#if KV_TYPE == KV_INT8
        float value_scales[2] = {f16_to_f32(keys.value_scales[0]), f16_to_f32(keys.value_scales[1])};
        scales[0] *= f16_to_f32(keys.scales[0]), scales[1] *= f16_to_f32(keys.scales[1]);
#endif
        bool last = page + 1 == group.end_page;
        if (!last) vector = vector_of(page + 1);
        // The next page is on its way while this one is worked on.
        if (!last) load_keys(keys, p.kv, vector);

        // The largest score of each query vector in this page.
        u32 position = page * PAGE_TOKENS + warp * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 seen = group.positions + (n * 8 + (lane & 3) * 2 + (i & 1)) / HEADS_PER_KV;
                scores[n][i] = position + i / 2 * 8 < seen ? __fmul_rn(scores[n][i], scales[i / 2]) : -INFINITY_F32;
            }
            float even = column_max(fmaxf(scores[n][0], scores[n][2]));
            float odd = column_max(fmaxf(scores[n][1], scores[n][3]));
            if (lane < 4) *(float2 *)&reduced[warp][n * 8 + lane * 2] = make_float2(even, odd);
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 column = n * 8 + (lane & 3) * 2 + i;
                float before = largest[n][i], now = before;
#pragma unroll
                for (int other = 0; other < WARPS; other++) now = fmaxf(now, reduced[other][column]);
                float factor = exp2_fast(before - now);
                float first = exp2_fast(__fsub_rn(scores[n][i], now)), second = exp2_fast(__fsub_rn(scores[n][i + 2], now));
                largest[n][i] = now, sums[n][i] = fmaf(sums[n][i], factor, first + second);
#if KV_TYPE == KV_INT8
                // A weight of 0 stays 0, whatever lies beyond the end.
                first = first > 0.0f ? first * value_scales[0] : 0.0f;
                second = second > 0.0f ? second * value_scales[1] : 0.0f;
#endif
                u16 *weight = (u16 *)(weights + column * WEIGHTS_STRIDE) + warp * 16 + lane / 4;
                weight[0] = f32_to_bf16(first), weight[8] = f32_to_bf16(second);
#pragma unroll
                for (int m = 0; m < 4; m++) out[m][n][i] *= factor, out[m][n][i + 2] *= factor;
            }
        }
        __syncthreads();
        if (warp * 64 < HEAD_DIM) add_values(out, values, weights);
        __syncwarp(); // keeps the loads behind the products: 12 bytes would spill on sm_120 (NVRTC 12.9)
        if (!last) load_values(values, p.kv, vector, end - (page + 1) * PAGE_TOKENS);
    }

#pragma unroll
    for (int n = 0; n < TILES; n++) {
        float even = column_sum(sums[n][0]), odd = column_sum(sums[n][1]);
        if (lane < 4) *(float2 *)&reduced[warp][n * 8 + lane * 2] = make_float2(even, odd);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 column = n * 8 + (lane & 3) * 2 + i;
            if (column >= group.count * HEADS_PER_KV) continue;
            u32 head = kv_head * HEADS_PER_KV + column % HEADS_PER_KV, place = blockIdx.z + column / HEADS_PER_KV;
            float *partial = p.partials + (((size_t)place * QUERY_HEADS + head) * MAX_SPLITS + blockIdx.x) * PARTIAL;
            u32 dim = warp * 64 + lane / 4 * 8;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if (dim < HEAD_DIM) *(float2 *)(partial + dim + 2 * m) = make_float2(out[m][n][i], out[m][n][i + 2]);
            }
            if (warp == 0 && lane < 4) {
                partial[HEAD_DIM] = largest[n][i];
                partial[HEAD_DIM + 1] = ((reduced[0][column] + reduced[1][column]) + reduced[2][column]) + reduced[3][column];
            }
        }
    }
}

// grid (MAX_SPLITS, KV_HEADS, rows)
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) attend_one(const AttendParams p) { attend<1>(p); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) attend_many(const AttendParams p) { attend<MANY_ROWS>(p); }
