// Packs a matrix into tiles; runs once per matrix, at load.
#include "common.cuh"

#define BLOCK 256

struct PackParams {
    const u8 *source;       // as stored: row-major codes or elements
    const u16 *raw_scales;  // `[rows, groups of the stored columns]`, or null
    u8 *data;
    u16 *scales;
    u32 rows, cols, groups, format;
    u32 first_row;          // of the source's rows: a multiple of 16
    u32 source_rows;
};

__device__ __forceinline__ u32 code4(const PackParams &p, u32 row, u32 col) {
    if (row >= p.source_rows || col >= p.cols) return 8;
    u8 byte = p.source[(size_t)row * ((p.cols + 1) / 2) + col / 2];
    return col & 1 ? byte >> 4 : byte & 15;
}

// One 32-bit word of the packed data per thread; grid (words of a row of tiles / BLOCK, row tiles)
extern "C" __global__ void __launch_bounds__(BLOCK) pack(const PackParams p) {
    u32 words = p.groups * tile_bytes(p.format) / 4, word = blockIdx.x * BLOCK + threadIdx.x;
    u32 tile_row = blockIdx.y;
    u32 out_tile_row = p.first_row / TILE_ROWS + tile_row;
    if (p.scales && word < p.groups * TILE_ROWS) {
        u32 group = word / TILE_ROWS, row = tile_row * TILE_ROWS + word % TILE_ROWS;
        u32 stored = (p.cols + GROUP - 1) / GROUP;
        u16 scale = row < p.source_rows ? p.raw_scales[(size_t)row * stored + group] : 0;
        p.scales[((size_t)out_tile_row * p.groups + group) * TILE_ROWS + scale_place(row)] = scale;
    }
    if (word >= words) return;
    u32 bytes = tile_bytes(p.format), group = word / (bytes / 4), in_tile = word % (bytes / 4) * 4;
    u32 value = 0;
    if (p.format == FORMAT_INT4) {
        u32 half = in_tile / 512, lane = in_tile % 512 / 16, high = in_tile % 16 / 8, part = in_tile % 8 / 4;
        u32 row = tile_row * TILE_ROWS + high * 8 + lane / 4;
        u32 col = group * GROUP + half * 64 + lane % 4 * 16 + part * 8;
        for (u32 i = 0; i < 8; i++) value |= code4(p, row, col + i) << int4_shift(i);
    } else if (p.format == FORMAT_INT8) {
        u32 half = in_tile / 1024, high = in_tile % 1024 / 512, lane = in_tile % 512 / 16, part = in_tile % 16 / 4;
        u32 row = tile_row * TILE_ROWS + high * 8 + lane / 4;
        u32 col = group * GROUP + half * 64 + lane % 4 * 16 + part * 4;
        for (u32 i = 0; i < 4; i++) {
            u32 code = row < p.source_rows && col + i < p.cols ? p.source[(size_t)row * p.cols + col + i] : 0;
            value |= code << ((i & 1) * 16 + (i >> 1) * 8);
        }
    } else {
        u32 half = in_tile / 2048, high = in_tile % 2048 / 1024, part = in_tile % 1024 / 512;
        u32 lane = in_tile % 512 / 16, pair = in_tile % 16 / 4;
        u32 row = tile_row * TILE_ROWS + high * 8 + lane / 4;
        u32 col = group * GROUP + half * 64 + lane % 4 * 16 + part * 8 + pair * 2;
        for (u32 i = 0; i < 2; i++) {
            const u16 *source = (const u16 *)p.source;
            u32 bits = row < p.source_rows && col + i < p.cols ? source[(size_t)row * p.cols + col + i] : 0;
            value |= bits << (i * 16);
        }
    }
    ((u32 *)p.data)[(size_t)out_tile_row * words + word] = value;
}
