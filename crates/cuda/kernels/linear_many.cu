// Products of more than eight tokens on cards of every kind: to 64 in rounds, any number in prompts.
#include "linear_sums.cuh"

// Scales of a lane's rows in one group: f16 bits of rows g (low half) and g + 8 of each row tile.
template <int FORMAT, int MT>
__device__ __forceinline__ void load_scales(const Matrix &matrix, const u32 (&tile_rows)[MT], u32 index, u32 lane,
                                            u32 (&scales)[MT]) {
#pragma unroll
    for (int m = 0; m < (FORMAT == FORMAT_BF16 ? 0 : MT); m++) {
        const u16 *at = matrix.scales + ((size_t)tile_rows[m] * matrix.groups + index) * TILE_ROWS + lane / 4 * 2;
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(scales[m]) : "l"(at));
    }
}

// Adds the warps' runs in order and stores the sums of a block.
template <int MT, int NT>
__device__ __forceinline__ void add_runs(const LinearParams &p, const Part &part, const Sums<MT, NT> &run,
                                         float (*runs)[MT * TILE_ROWS][NT * 8 + 1], u32 block_in_part,
                                         u32 first_token) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                runs[warp][i * TILE_ROWS + g + k / 2 * 8][n * 8 + t * 2 + k % 2] = run.v[i][n][k];
    __syncthreads();
    for (u32 i = threadIdx.x; i < MT * TILE_ROWS * NT * 8; i += SPLITS * 32) {
        u32 output = i % (MT * TILE_ROWS), token = i / (MT * TILE_ROWS);
        if (first_token + token >= p.rows) break;
        float sum = 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; split++) sum += runs[split][output][token];
        store(p, part, first_token + token, block_in_part * MT * TILE_ROWS + output, sum);
    }
}

// Up to 64 tokens: a block has MT row tiles, its warps have one run of columns each. Weights are read straight into
// registers, AHEAD half tiles ahead. grid (ceil(row tiles / MT), ceil(rows / (8 NT)))
template <int FORMAT, int MT, int NT, int AHEAD>
__device__ __forceinline__ void few_tokens(const LinearParams &p) {
    extern __shared__ __align__(16) u8 memory[];
    float(*runs)[MT * TILE_ROWS][NT * 8 + 1] = (float(*)[MT * TILE_ROWS][NT * 8 + 1])memory;
    let_successor_start();
    const Part part = part_of(p, blockIdx.x);
    const Matrix &m = part.matrix;
    u32 block_in_part = blockIdx.x - part.first_block;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    u32 all_tile_rows = (m.rows + TILE_ROWS - 1) / TILE_ROWS, first_token = blockIdx.y * NT * 8;
    u32 first = warp * m.groups / SPLITS, end = (warp + 1) * m.groups / SPLITS;
    const u32 HALF = Pieces<FORMAT>::COUNT * 512;

    u32 tile_rows[MT];
    const u8 *tiles[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) {
        // Past the end: compute the last tile row again, to no effect.
        tile_rows[i] = min(block_in_part * MT + i, all_tile_rows - 1);
        tiles[i] = m.data + (size_t)tile_rows[i] * m.groups * 2 * HALF;
    }
    Sums<MT, NT> run, group;
    run.clear();
    // Rings in registers: AHEAD (even) halves of weights with their groups' scales, one half of tokens. Scales come
    // from memory like weights, and tokens from L2: neither may be waited for when they are needed.
    uint4 ahead[AHEAD][MT][Pieces<FORMAT>::COUNT], x_ahead[NT][2];
    u32 scales[AHEAD / 2][MT];
    const activation *inputs[NT];
    auto load_tokens = [&](u32 half) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            u32 token = first_token + n * 8 + g;
            x_ahead[n][0] = x_ahead[n][1] = make_uint4(0, 0, 0, 0);
            if (token < p.rows && half < 2 * end) {
                const uint4 *source = (const uint4 *)(inputs[n] + half * 64);
                x_ahead[n][0] = source[0], x_ahead[n][1] = source[1];
            }
        }
    };
#pragma unroll
    for (int slot = 0; slot < AHEAD; slot++) {
        if (2 * first + slot >= 2 * end) break;
        if (slot % 2 == 0) load_scales<FORMAT, MT>(m, tile_rows, first + slot / 2, lane, scales[slot / 2]);
#pragma unroll
        for (int i = 0; i < MT; i++) load_half<FORMAT>(tiles[i] + (size_t)(2 * first + slot) * HALF, lane, ahead[slot][i]);
    }
    // Weights are on their way; tokens are the predecessor's.
    wait_for_predecessors();
#pragma unroll
    for (int n = 0; n < NT; n++) inputs[n] = input_row(p, min(first_token + n * 8 + g, p.rows - 1)) + t * 16;
    load_tokens(2 * first);
    for (u32 block = 2 * first; block < 2 * end; block += AHEAD) {
#pragma unroll
        for (int slot = 0; slot < AHEAD; slot++) {
            u32 half = block + slot;
            if (half >= 2 * end) break;
            uint4 x[NT][2], raw[MT][Pieces<FORMAT>::COUNT];
#pragma unroll
            for (int n = 0; n < NT; n++) x[n][0] = x_ahead[n][0], x[n][1] = x_ahead[n][1];
            load_tokens(half + 1);
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int j = 0; j < Pieces<FORMAT>::COUNT; j++) raw[i][j] = ahead[slot][i][j];
                if (half + AHEAD < 2 * end)
                    load_half<FORMAT>(tiles[i] + (size_t)(half + AHEAD) * HALF, lane, ahead[slot][i]);
            }
            if (slot % 2 == 0) {
                add_half<FORMAT, MT, NT, true>(group, raw, x);
            } else {
                add_half<FORMAT, MT, NT, false>(group, raw, x);
                end_group<FORMAT, MT, NT>(run, group, scales[slot / 2]);
                if (half + AHEAD < 2 * end)
                    load_scales<FORMAT, MT>(m, tile_rows, (half + AHEAD) / 2, lane, scales[slot / 2]);
            }
        }
    }
    add_runs<MT, NT>(p, part, run, runs, block_in_part, first_token);
}

#define TILE_TOKENS 64
#define TILE_STRIDE (GROUP + 8) // elements of a staged row: 16 bytes more keep eight rows off each other's banks

// Many tokens: a block has 128 outputs and 64 tokens, a warp 32 of each; the tokens of the next group come through
// shared memory while this one is multiplied. grid (ceil(rows / 64), ceil(outputs / 128))
template <int FORMAT>
__device__ __forceinline__ void many_tokens(const LinearParams &p) {
    const int MT = 2, NT = 4;
    extern __shared__ __align__(16) u8 memory[];
    u16(*tokens)[TILE_TOKENS][TILE_STRIDE] = (u16(*)[TILE_TOKENS][TILE_STRIDE])memory;
    // Sums of the runs so far, a column per thread: touched eight times in all, so not worth registers.
    float(*totals)[256] = (float(*)[256])(memory + 2 * TILE_TOKENS * TILE_STRIDE * sizeof(u16));
    start_in_order();
    const Part part = part_of(p, blockIdx.y);
    const Matrix &m = part.matrix;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    u32 all_tile_rows = (m.rows + TILE_ROWS - 1) / TILE_ROWS, first_token = blockIdx.x * TILE_TOKENS;
    u32 first_tile_row = (blockIdx.y - part.first_block) * 8 + warp / 2 * MT, warp_token = warp % 2 * 32;
    const u32 HALF = Pieces<FORMAT>::COUNT * 512;

    auto fetch = [&](u32 index) {
#pragma unroll
        for (int i = 0; i < TILE_TOKENS * GROUP / 8 / 256; i++) {
            u32 piece = i * 256 + threadIdx.x, token = piece / 16, col = piece % 16 * 8;
            bool wanted = first_token + token < p.rows;
            const activation *from = input_row(p, wanted ? first_token + token : 0) + index * GROUP + col;
            copy_async(&tokens[index & 1][token][col], from, wanted);
        }
        commit_copies();
    };
    u32 tile_rows[MT];
    const u8 *tiles[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) {
        tile_rows[i] = min(first_tile_row + i, all_tile_rows - 1);
        tiles[i] = m.data + (size_t)tile_rows[i] * m.groups * 2 * HALF;
    }
    Sums<MT, NT> run, group;
    run.clear();
    auto end_run = [&](bool first) {
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++) {
            float &sum = run.v[i / (NT * 4)][i / 4 % NT][i % 4];
            totals[i][threadIdx.x] = (first ? 0.0f : totals[i][threadIdx.x]) + sum;
            sum = 0.0f;
        }
    };
    uint4 next[MT][Pieces<FORMAT>::COUNT], raw[MT][Pieces<FORMAT>::COUNT];
#pragma unroll
    for (int i = 0; i < MT; i++) load_half<FORMAT>(tiles[i], lane, next[i]);
    fetch(0);
    u32 split = 0;
    for (u32 index = 0; index < m.groups; index++) {
        // A new run starts here; runs may be empty.
        while (split + 1 < SPLITS && (split + 1) * m.groups / SPLITS <= index) {
            end_run(split == 0);
            split++;
        }
        u32 scales[MT];
        load_scales<FORMAT, MT>(m, tile_rows, index, lane, scales);
        wait_for_copies<0>();
        __syncthreads();
        if (index + 1 < m.groups) fetch(index + 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int j = 0; j < Pieces<FORMAT>::COUNT; j++) raw[i][j] = next[i][j];
                if (index * 2 + half + 1 < m.groups * 2)
                    load_half<FORMAT>(tiles[i] + (size_t)(index * 2 + half + 1) * HALF, lane, next[i]);
            }
            uint4 x[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 *source = (const uint4 *)&tokens[index & 1][warp_token + n * 8 + g][half * 64 + t * 16];
                x[n][0] = source[0], x[n][1] = source[1];
            }
            if (half == 0) add_half<FORMAT, MT, NT, true>(group, raw, x);
            else add_half<FORMAT, MT, NT, false>(group, raw, x);
        }
        end_group<FORMAT, MT, NT>(run, group, scales);
    }
    end_run(split == 0);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                store(p, part, first_token + warp_token + n * 8 + t * 2 + k % 2,
                      (first_tile_row + i) * TILE_ROWS + g + k / 2 * 8, totals[(i * NT + n) * 4 + k][threadIdx.x]);
}

// sm_80 schedules more loads ahead and would spill at half the registers.
#define TWO_BLOCKS (__CUDA_ARCH__ == 800 ? 1 : 2)

// At most so many tokens; the halves ahead are what registers allow.
#define FEW(NAME, FORMAT, MT, NT, AHEAD)                                                                               \
    extern "C" __global__ void __launch_bounds__(256) NAME(const LinearParams p) { few_tokens<FORMAT, MT, NT, AHEAD>(p); }
// Any number of tokens.
#define MANY(NAME, FORMAT, BLOCKS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(const LinearParams p) { many_tokens<FORMAT>(p); }

FEW(int4_16, FORMAT_INT4, 4, 2, 2)
FEW(int4_32, FORMAT_INT4, 3, 4, 2)
MANY(int4_64, FORMAT_INT4, TWO_BLOCKS)
FEW(int8_16, FORMAT_INT8, 2, 2, 2)
FEW(int8_32, FORMAT_INT8, 2, 4, 2)
MANY(int8_64, FORMAT_INT8, 1)
FEW(bf16_16, FORMAT_BF16, 2, 2, 2)
MANY(bf16_64, FORMAT_BF16, 1)
