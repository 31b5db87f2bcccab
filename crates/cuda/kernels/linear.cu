// Matrix products: weights on the m16 side of mma.m16n8k16, tokens on n8, f32 accumulators.
//
// One order of summation whatever the number of tokens: the columns are cut into SPLITS runs of whole groups; within a
// run each group is summed by eight mma from zero and enters the run's sum times the group's scale; the runs' sums are
// added from the first to the last. So a row's bits do not depend on its company, nor on which kernel ran.
#include "linear.cuh"

#define SPLITS 8

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same from zero.
__device__ __forceinline__ void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Sums of MT · 16 outputs × NT · 8 tokens, as mma lays them out.
template <int MT, int NT> struct Sums {
    float v[MT][NT][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) v[m][n][i] = 0.0f;
    }
};

// group += half of weights · half of tokens; the first half of a group starts it from zero.
template <int FORMAT, int MT, int NT, bool FIRST>
__device__ __forceinline__ void add_half(Sums<MT, NT> &group, const uint4 (&raw)[MT][Pieces<FORMAT>::COUNT],
                                         const uint4 (&x)[NT][2]) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) decode<FORMAT, NT == 1>(raw[m], s, a[m]);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            u32 b0 = word_of(x[n][s / 2], s % 2 * 2), b1 = word_of(x[n][s / 2], s % 2 * 2 + 1);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                if (FIRST && s == 0) mma_first(group.v[m][n], a[m], b0, b1);
                else mma(group.v[m][n], a[m], b0, b1);
            }
        }
    }
}

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

// run += scale · group
template <int FORMAT, int MT, int NT>
__device__ __forceinline__ void end_group(Sums<MT, NT> &run, const Sums<MT, NT> &group, const u32 (&scales)[MT]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
        float low = FORMAT == FORMAT_BF16 ? 1.0f : f16_to_f32(scales[m] & 0xffff);
        float high = FORMAT == FORMAT_BF16 ? 1.0f : f16_to_f32(scales[m] >> 16);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                run.v[m][n][i] = fmaf(i < 2 ? low : high, group.v[m][n][i], run.v[m][n][i]);
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

#define HALF_STRIDE (64 + 8) // elements of a staged half row: 16 bytes more keep eight rows off each other's banks

// What a warp of `eight_tokens` has in shared memory: RING halves of MT row tiles and of eight tokens, and the scales of
// the groups that UNROLL halves are in.
template <int FORMAT, int MT, int RING> struct Ring {
    static const u32 HALF_BYTES = Pieces<FORMAT>::COUNT * 512;
    // Whole groups and whole rings, so that every place is known when this is compiled.
    static const int UNROLL = RING % 2 ? 2 * RING : RING;
    u8 codes[RING][MT][HALF_BYTES];
    u16 tokens[RING][8][HALF_STRIDE];
    u16 scales[UNROLL / 2][MT][TILE_ROWS];
};

// At most eight tokens: weights, scales and tokens come through a ring in shared memory, RING − 1 halves ahead. (Held
// in registers, loads share the six barriers that a warp can wait on, and more of them ahead are slower.) A block has MT
// row tiles, its warps have one run of columns each. grid (ceil(row tiles / MT))
template <int FORMAT, int MT, int RING>
__device__ __forceinline__ void eight_tokens(const LinearParams &p) {
    typedef Ring<FORMAT, MT, RING> WarpRing;
    extern __shared__ __align__(16) u8 memory[];
    let_successor_start();
    const Part part = part_of(p, blockIdx.x);
    const Matrix &m = part.matrix;
    u32 block_in_part = blockIdx.x - part.first_block;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    u32 last_tile_row = (m.rows + TILE_ROWS - 1) / TILE_ROWS - 1;
    u32 first_group = warp * m.groups / SPLITS;
    int halves = 2 * ((warp + 1) * m.groups / SPLITS - first_group);
    WarpRing &ring = ((WarpRing *)memory)[warp];

    // The next half to copy, of each stream, for this lane. Past the last tile row: compute it again, to no effect.
    const u8 *codes[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) {
        size_t tile = (size_t)min(block_in_part * MT + i, last_tile_row) * m.groups + first_group;
        codes[i] = m.data + tile * 2 * WarpRing::HALF_BYTES + lane * 16;
    }
    bool copies_scales = FORMAT != FORMAT_BF16 && lane < MT * 2;
    size_t scale_tile = (size_t)min(block_in_part * MT + lane / 2, last_tile_row) * m.groups + first_group;
    const u16 *scales = m.scales + scale_tile * TILE_ROWS + lane % 2 * 8;
    // `ahead` counts from the half that the streams stand at; with `slot`, it is known when this is compiled.
    auto copy_weights = [&](int slot, int ahead) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < Pieces<FORMAT>::COUNT; j++)
                copy_async(&ring.codes[slot % RING][i][j * 512 + lane * 16],
                           codes[i] + ahead * (int)WarpRing::HALF_BYTES + j * 512, true);
        if (slot % 2 == 0 && copies_scales)
            copy_async(&ring.scales[slot / 2 % (WarpRing::UNROLL / 2)][lane / 2][lane % 2 * 8],
                       scales + ahead / 2 * TILE_ROWS, true);
    };
#pragma unroll
    for (int slot = 0; slot < RING - 1; slot++)
        if (slot < halves) copy_weights(slot, slot);

    // Weights are on their way; tokens are the predecessor's. A lane copies 16 bytes of two tokens' halves; of tokens
    // that do not exist nothing is copied, and what is computed from them is not stored.
    wait_for_predecessors();
    u32 token = lane / 8, column = lane % 8 * 8;
    bool has_first = token < p.rows, has_second = token + 4 < p.rows;
    const activation *first_source = input_row(p, has_first ? token : 0) + first_group * GROUP + column;
    const activation *second_source = input_row(p, has_second ? token + 4 : 0) + first_group * GROUP + column;
    auto copy_tokens = [&](int slot, int ahead) {
        if (has_first) copy_async(&ring.tokens[slot % RING][token][column], first_source + ahead * 64, true);
        if (has_second) copy_async(&ring.tokens[slot % RING][token + 4][column], second_source + ahead * 64, true);
    };
#pragma unroll
    for (int slot = 0; slot < RING - 1; slot++) {
        if (slot < halves) copy_tokens(slot, slot);
        commit_copies();
    }
    Sums<MT, 1> run, group;
    run.clear();
    for (; halves > 0; halves -= WarpRing::UNROLL) {
        u32 group_scales[MT];
#pragma unroll
        for (int slot = 0; slot < WarpRing::UNROLL; slot++) {
            if (slot % 2 == 0 && slot >= halves) break;
            wait_for_copies<RING - 2>();
            __syncwarp();
            // Into the place of the half before this one, which all lanes have read.
            if (slot + RING - 1 < halves) {
                copy_weights(slot + RING - 1, slot + RING - 1);
                copy_tokens(slot + RING - 1, slot + RING - 1);
            }
            commit_copies();
            uint4 x[1][2], raw[MT][Pieces<FORMAT>::COUNT];
            const uint4 *own_token = (const uint4 *)&ring.tokens[slot % RING][g][t * 16];
            x[0][0] = own_token[0], x[0][1] = own_token[1];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                // Read with the first half: the copies of the second one may overwrite them.
                if (slot % 2 == 0) group_scales[i] = *(const u32 *)&ring.scales[slot / 2][i][g * 2];
#pragma unroll
                for (int j = 0; j < Pieces<FORMAT>::COUNT; j++)
                    raw[i][j] = *(const uint4 *)&ring.codes[slot % RING][i][j * 512 + lane * 16];
            }
            if (slot % 2 == 0) {
                add_half<FORMAT, MT, 1, true>(group, raw, x);
            } else {
                add_half<FORMAT, MT, 1, false>(group, raw, x);
                end_group<FORMAT, MT, 1>(run, group, group_scales);
            }
        }
#pragma unroll
        for (int i = 0; i < MT; i++) codes[i] += WarpRing::UNROLL * WarpRing::HALF_BYTES;
        scales += WarpRing::UNROLL / 2 * TILE_ROWS;
        first_source += WarpRing::UNROLL * 64;
        second_source += WarpRing::UNROLL * 64;
    }
    // The rings have been read to their ends by all warps: the runs' sums take their place.
    __syncthreads();
    add_runs<MT, 1>(p, part, run, (float(*)[MT * TILE_ROWS][9])memory, block_in_part, 0);
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

// Halves in a ring: what shared memory of 99 KB a block allows, or that of the data-center cards.
#define MUCH_SHARED (__CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200))
// At most eight tokens; `wide` for many outputs: more row tiles share the tokens.
#define EIGHT(NAME, FORMAT, MT, RING)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) NAME(const LinearParams p) { eight_tokens<FORMAT, MT, RING>(p); }
// At most so many tokens; the halves ahead are what registers allow.
#define FEW(NAME, FORMAT, MT, NT, AHEAD)                                                                               \
    extern "C" __global__ void __launch_bounds__(256) NAME(const LinearParams p) { few_tokens<FORMAT, MT, NT, AHEAD>(p); }
// Any number of tokens.
#define MANY(NAME, FORMAT, BLOCKS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(const LinearParams p) { many_tokens<FORMAT>(p); }

EIGHT(int4_wide_8, FORMAT_INT4, 4, MUCH_SHARED ? 4 : 3)
EIGHT(int4_8, FORMAT_INT4, 2, MUCH_SHARED ? 6 : 4)
FEW(int4_16, FORMAT_INT4, 4, 2, 2)
FEW(int4_32, FORMAT_INT4, 3, 4, 2)
MANY(int4_64, FORMAT_INT4, TWO_BLOCKS)
EIGHT(int8_8, FORMAT_INT8, 2, 3)
FEW(int8_16, FORMAT_INT8, 2, 2, 2)
FEW(int8_32, FORMAT_INT8, 2, 4, 2)
MANY(int8_64, FORMAT_INT8, 1)
EIGHT(bf16_8, FORMAT_BF16, 1, 3)
FEW(bf16_16, FORMAT_BF16, 2, 2, 2)
MANY(bf16_64, FORMAT_BF16, 1)

// F32 and F16 weights: f32 products, a warp per output and token. grid (ceil(outputs / 8), rows)
extern "C" __global__ void __launch_bounds__(256) plain(const LinearParams p) {
    start_in_order();
    const Part part = part_of(p, blockIdx.x);
    const Matrix &m = part.matrix;
    u32 output = (blockIdx.x - part.first_block) * 8 + threadIdx.x / 32, lane = threadIdx.x & 31, row = blockIdx.y;
    if (output >= m.rows) return;
    const activation *x = input_row(p, row);
    float sum = 0.0f;
    for (u32 col = lane; col < m.cols; col += 32) sum = fmaf(matrix_value(m, output, col), bf16_to_f32(x[col]), sum);
    sum = warp_sum(sum);
    if (lane == 0) store(p, part, row, output, sum);
}
