// Number formats, reductions in a fixed order and the layout of a packed matrix. No header of any toolkit: this
// file is all that a kernel includes.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

#define INFINITY_F32 __int_as_float(0x7f800000)

__device__ __forceinline__ float bf16_to_f32(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u16 f32_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// The activation type: every op rounds its results so. Rows of a buffer of activations begin on 256 bytes and are
// zero-padded to whole groups of columns, so that a product reads them as they are.
typedef u16 activation;
__device__ __forceinline__ float from_activation(activation value) { return bf16_to_f32(value); }
__device__ __forceinline__ activation to_activation(float value) { return f32_to_bf16(value); }
__device__ __forceinline__ float round_activation(float value) { return from_activation(to_activation(value)); }
__device__ __forceinline__ float f16_to_f32(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ u16 f32_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Sum over a warp, the same bits in every lane: a butterfly adds the same pairs in every lane, and addition commutes.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Maximum over a warp, in every lane.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// Sum over a block of at most 1024 threads in a fixed order; `partial` has 32 elements of shared memory.
__device__ __forceinline__ float block_sum(float value, float *partial) {
    value = warp_sum(value);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = value;
    __syncthreads();
    float sum = 0.0f;
    for (u32 warp = 0; warp < (blockDim.x + 31) / 32; warp++) sum += partial[warp];
    return sum;
}

// ---- order of kernels -----------------------------------------------------------------------------------------
// From sm_90 on a kernel is launched while its predecessor still runs. It may read what no kernel of its step has written
// before it (weights, states that an earlier step has left) at once, everything else after `wait_for_predecessors`; its own
// successor may be launched from the beginning.

__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// How a kernel begins that has nothing to do early.
__device__ __forceinline__ void start_in_order() {
    let_successor_start();
    wait_for_predecessors();
}

// ---- weight matrices ------------------------------------------------------------------------------------------

#define FORMAT_F32 0
#define FORMAT_F16 1
#define FORMAT_BF16 2
#define FORMAT_INT8 3
#define FORMAT_INT4 4

#define GROUP 128
#define TILE_ROWS 16

// A matrix `[rows, cols]`. F32 and F16 are row-major. The others are tiles of 16 rows and 128 columns, all tiles of a
// row of tiles one after another, zero-padded to whole tiles, in the order in which the lanes of a warp hold the A
// operand of mma.m16n8k16 (see `tile_place`); `scales` is `[row tiles, groups, 16]` f16 (see `scale_place`).
struct Matrix {
    const u8 *data;
    const u16 *scales;
    u32 rows;
    u32 cols;
    u32 groups;
    u32 format;
};

// Where an element of a tile lies. A lane (g = lane / 4, t = lane % 4) owns, of each half of 64 columns, columns
// 16 t .. 16 t + 15 of rows g and g + 8: its operands of four mma steps, four consecutive columns each. The products
// of one mma then run over columns 16 t + 4 s + (0..3) for t = 0..3, in weights and activations alike.
struct TilePlace {
    u32 half;   // of 64 columns
    u32 high;   // 1: row g + 8
    u32 lane;
    u32 column; // 0..15 within the lane's own
};
__device__ __forceinline__ TilePlace tile_place(u32 row, u32 col) {
    TilePlace place;
    place.half = (col & 127) >> 6;
    place.high = (row & 15) >> 3;
    place.lane = (row & 7) * 4 + ((col & 63) >> 4);
    place.column = col & 15;
    return place;
}

// Byte offsets within a tile; each lane's pieces are 16 bytes, a warp's 512 in a row.
// int4: [half][lane][high][2 words]; the word of columns 8 w .. 8 w + 7 holds the even column of pair p at bits 4 p,
//       the odd one at 16 + 4 p, so that one mask gives two bf16 halves.
__device__ __forceinline__ u32 int4_word(TilePlace p) {
    return p.half * 512 + p.lane * 16 + p.high * 8 + (p.column >> 3) * 4;
}
__device__ __forceinline__ u32 int4_shift(u32 column) { return ((column & 7) >> 1) * 4 + (column & 1) * 16; }
// int8: [half][high][lane][4 words]; the word of columns 4 w .. 4 w + 3 has them at bytes 0, 2, 1, 3.
__device__ __forceinline__ u32 int8_byte(TilePlace p) {
    return (p.half * 2 + p.high) * 512 + p.lane * 16 + (p.column >> 2) * 4 + (p.column & 1) * 2 + ((p.column & 3) >> 1);
}
// bf16: [half][high][columns 0..7 or 8..15][lane][8].
__device__ __forceinline__ u32 bf16_byte(TilePlace p) {
    return ((p.half * 2 + p.high) * 2 + (p.column >> 3)) * 512 + p.lane * 16 + (p.column & 7) * 2;
}
__host__ __device__ __forceinline__ u32 tile_bytes(u32 format) {
    return format == FORMAT_INT4 ? 1024 : format == FORMAT_INT8 ? 2048 : 4096;
}

// Where a row's scale lies among the 16 of a tile: rows g and g + 8, which a lane needs, are neighbours.
__device__ __forceinline__ u32 scale_place(u32 row) { return (row & 7) * 2 + ((row & 15) >> 3); }

// The value at `[row, col]`: the definition that every product must agree with.
__device__ __forceinline__ float matrix_value(const Matrix &m, u32 row, u32 col) {
    if (m.format == FORMAT_F32) return ((const float *)m.data)[(size_t)row * m.cols + col];
    if (m.format == FORMAT_F16) return f16_to_f32(((const u16 *)m.data)[(size_t)row * m.cols + col]);
    size_t tile = (size_t)(row / TILE_ROWS) * m.groups + col / GROUP;
    const u8 *data = m.data + tile * tile_bytes(m.format);
    TilePlace place = tile_place(row, col);
    if (m.format == FORMAT_BF16) return bf16_to_f32(*(const u16 *)(data + bf16_byte(place)));
    float scale = f16_to_f32(m.scales[tile * TILE_ROWS + scale_place(row)]);
    if (m.format == FORMAT_INT8) return (float)(i8)data[int8_byte(place)] * scale;
    u32 word = *(const u32 *)(data + int4_word(place));
    return (float)((int)(word >> int4_shift(place.column) & 15) - 8) * scale;
}

// ---- steps ----------------------------------------------------------------------------------------------------

#define PAGE_TOKENS 64
#define RING_TOKENS 32
#define CONV_RING 20
#define MAX_ROUND_ROWS 16
#define CHUNK_TOKENS 64

struct Span {
    u32 first_row, rows, position, slot, ring_len, first_page, first_chunk, chunks;
};
struct Chunk {
    u32 first_row, rows;
};
// The step's rows, uploaded once.
struct Step {
    const u32 *counts; // rows, spans
    const u32 *logit_rows;
    const u32 *tokens;
    const u32 *row_span;
    const Span *spans;
    const Chunk *chunks;
    const u32 *page_table;
};

// A replayed round has the grid of the largest step that it is for: blocks past the step's own rows and spans have
// nothing to do, and must not touch a cache.
__device__ __forceinline__ bool has_row(const Step &step, u32 row) { return row < step.counts[0]; }
__device__ __forceinline__ bool has_span(const Step &step, u32 span) { return span < step.counts[1]; }
