// What the matrix products share: their parameters, and the way of weights and tokens into registers and shared memory.
#pragma once
#include "common.cuh"

// A matrix among those that one launch multiplies, all of one format and width.
struct Part {
    Matrix matrix;
    u32 out_column;
    u32 first_block; // of the launch's blocks along outputs
};
#define MAX_PARTS 4

struct LinearParams {
    Part parts[MAX_PARTS];
    const activation *x; // rows of `x_cols`, zero-padded to whole groups
    const u32 *indices;  // rows of x, or null: row i of x
    void *out;           // activations, or f32 in MODE_RAW
    float *sums;         // linear_rounds.cu: runs of split blocks
    u32 *arrivals;       // linear_rounds.cu: how many of a block's runs are there; 0 between launches
    u32 part_count, x_cols, out_cols, rows, mode;
    u32 whole_blocks; // linear_rounds.cu: blocks along outputs that are not split
};
#define MODE_ROUND 0  // out = round(sum)
#define MODE_ADD 1    // out = round(out + sum)
#define MODE_RAW 2    // out = sum
#define MODE_SWIGLU 3 // two parts of as many outputs, side by side in every block: out = round(silu(round(a)) · round(b))

__device__ __forceinline__ float swiglu(float gate, float up) {
    return silu(round_activation(gate)) * round_activation(up);
}

// The row tiles of a block: TILES of one matrix or, for MODE_SWIGLU, half as many of each of two. Past the last of a
// matrix it is the last again, and what is computed from it is not stored.
template <int TILES> struct BlockTiles {
    const u8 *first_data, *second_data;
    const u16 *first_scales, *second_scales;
    u32 block, per_matrix, last_row, groups;
    __device__ __forceinline__ BlockTiles(const LinearParams &p, const Part &part, u32 block_in_part) : block(block_in_part) {
        bool pairs = p.mode == MODE_SWIGLU;
        first_data = part.matrix.data, second_data = pairs ? p.parts[1].matrix.data : first_data;
        first_scales = part.matrix.scales, second_scales = pairs ? p.parts[1].matrix.scales : first_scales;
        per_matrix = pairs ? TILES / 2 : TILES;
        last_row = (part.matrix.rows + TILE_ROWS - 1) / TILE_ROWS - 1, groups = part.matrix.groups;
    }
    // Index of the tile of `group` among a matrix's tiles.
    __device__ __forceinline__ size_t index(u32 tile, u32 group) const {
        u32 row = block * per_matrix + (tile >= per_matrix ? tile - per_matrix : tile);
        return (size_t)min(row, last_row) * groups + group;
    }
    __device__ __forceinline__ const u8 *codes(u32 tile, u32 group, u32 bytes) const {
        return (tile >= per_matrix ? second_data : first_data) + index(tile, group) * bytes;
    }
    __device__ __forceinline__ const u16 *scales(u32 tile, u32 group) const {
        return (tile >= per_matrix ? second_scales : first_scales) + index(tile, group) * TILE_ROWS;
    }
    // Outputs that the block stores, from which one on.
    __device__ __forceinline__ u32 outputs() const { return per_matrix * TILE_ROWS; }
    __device__ __forceinline__ u32 first_output() const { return block * outputs(); }
};

// The part that a block works on, chosen without an index so that it stays in registers.
__device__ __forceinline__ Part part_of(const LinearParams &p, u32 block) {
    Part part = p.parts[0];
#pragma unroll
    for (u32 i = 1; i < MAX_PARTS; i++)
        if (i < p.part_count && block >= p.parts[i].first_block) part = p.parts[i];
    return part;
}

__device__ __forceinline__ const activation *input_row(const LinearParams &p, u32 row) {
    return p.x + (size_t)(p.indices ? p.indices[row] : row) * p.x_cols;
}

__device__ __forceinline__ void store(const LinearParams &p, const Part &part, u32 row, u32 output, float sum) {
    if (row >= p.rows || output >= part.matrix.rows) return;
    size_t at = (size_t)row * p.out_cols + part.out_column + output;
    if (p.mode == MODE_RAW) {
        ((float *)p.out)[at] = sum;
        return;
    }
    activation *out = (activation *)p.out + at;
    if (p.mode == MODE_ADD) sum += from_activation(*out);
    *out = to_activation(sum);
}

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// The 16-byte pieces of one half tile (64 columns) that a lane holds.
template <int FORMAT> struct Pieces;
template <> struct Pieces<FORMAT_INT4> { static const int COUNT = 1; };
template <> struct Pieces<FORMAT_INT8> { static const int COUNT = 2; };
template <> struct Pieces<FORMAT_BF16> { static const int COUNT = 4; };

__device__ __forceinline__ uint4 load_weight(const u8 *address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

template <int FORMAT>
__device__ __forceinline__ void load_half(const u8 *half, u32 lane, uint4 (&raw)[Pieces<FORMAT>::COUNT]) {
#pragma unroll
    for (int i = 0; i < Pieces<FORMAT>::COUNT; i++) raw[i] = load_weight(half + i * 512 + lane * 16);
}

__device__ __forceinline__ u32 word_of(const uint4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// (word & mask) | 128.0 in both halves, as one instruction or, where registers are short, two with constants in them.
template <bool ONE> __device__ __forceinline__ u32 masked_or_128(u32 word, u32 mask) {
    if (!ONE) return (word & mask) | 0x43004300u;
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "r"(mask), "r"(0x43004300u));
    return d;
}
// 128 + code in bf16 has the code in its low bits; minus 136 it is the signed code, exactly.
template <bool ONE> __device__ __forceinline__ u32 decode_int4(u32 word) {
    return fma_bf16x2(masked_or_128<ONE>(word, 0x000f000fu), 0x3f803f80u, 0xc308c308u);
}
// (128 + low seven bits) − (128 or 256): two's complement, exactly.
template <bool ONE> __device__ __forceinline__ u32 decode_int8(u32 word) {
    return fma_bf16x2(masked_or_128<ONE>(word, 0x00800080u), 0xbf80bf80u, masked_or_128<ONE>(word, 0x007f007fu));
}

// The A operand of step s (0..3) of a half: registers (row g | g + 8) × (columns 0,1 | 2,3).
template <int FORMAT, bool ONE>
__device__ __forceinline__ void decode(const uint4 (&raw)[Pieces<FORMAT>::COUNT], int s, u32 (&a)[4]) {
    if (FORMAT == FORMAT_INT4) {
        u32 low = (s < 2 ? raw[0].x : raw[0].y) >> (s % 2 * 8), high = (s < 2 ? raw[0].z : raw[0].w) >> (s % 2 * 8);
        a[0] = decode_int4<ONE>(low), a[1] = decode_int4<ONE>(high);
        a[2] = decode_int4<ONE>(low >> 4), a[3] = decode_int4<ONE>(high >> 4);
    } else if (FORMAT == FORMAT_INT8) {
        u32 low = word_of(raw[0], s), high = word_of(raw[Pieces<FORMAT>::COUNT / 2], s);
        a[0] = decode_int8<ONE>(low), a[1] = decode_int8<ONE>(high);
        a[2] = decode_int8<ONE>(low >> 8), a[3] = decode_int8<ONE>(high >> 8);
    } else {
        const uint4 &low = raw[s / 2], &high = raw[(s / 2 + 2) % Pieces<FORMAT>::COUNT];
        a[0] = word_of(low, s % 2 * 2), a[1] = word_of(high, s % 2 * 2);
        a[2] = word_of(low, s % 2 * 2 + 1), a[3] = word_of(high, s % 2 * 2 + 1);
    }
}

__device__ __forceinline__ void copy_async(void *to, const void *from, bool wanted) {
    u32 shared = (u32)__cvta_generic_to_shared(to), bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
