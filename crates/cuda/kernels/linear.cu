// Products of at most eight tokens, and of weights that are not packed.
#include "linear_sums.cuh"

// Adds the warps' runs in order and stores the sums of a block.
template <int MT>
__device__ __forceinline__ void add_runs(const LinearParams &p, const Part &part, const BlockTiles<MT> &tiles,
                                         const Sums<MT, 1> &run, float (*runs)[MT * TILE_ROWS][9]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) runs[warp][i * TILE_ROWS + g + k / 2 * 8][t * 2 + k % 2] = run.v[i][0][k];
    __syncthreads();
    auto sum_of = [&](u32 output, u32 token) {
        float sum = 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; split++) sum += runs[split][output][token];
        return sum;
    };
    u32 outputs = tiles.outputs();
    for (u32 i = threadIdx.x; i < p.rows * outputs; i += SPLITS * 32) {
        u32 output = i % outputs, token = i / outputs;
        float sum = sum_of(output, token);
        if (p.mode == MODE_SWIGLU) sum = swiglu(sum, sum_of(outputs + output, token));
        store(p, part, token, tiles.first_output() + output, sum);
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
__device__ __forceinline__ void eight_tokens(const LinearParams &p, const Part &part) {
    typedef Ring<FORMAT, MT, RING> WarpRing;
    extern __shared__ __align__(16) u8 memory[];
    const Matrix &m = part.matrix;
    const BlockTiles<MT> tiles(p, part, blockIdx.x - part.first_block);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    u32 first_group = warp * m.groups / SPLITS;
    int halves = 2 * ((warp + 1) * m.groups / SPLITS - first_group);
    WarpRing &ring = ((WarpRing *)memory)[warp];

    // The next half to copy, of each stream, for this lane.
    const u8 *codes[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) codes[i] = tiles.codes(i, first_group, 2 * WarpRing::HALF_BYTES) + lane * 16;
    bool copies_scales = FORMAT != FORMAT_BF16 && lane < MT * 2;
    const u16 *scales = tiles.scales(min(lane / 2, MT - 1), first_group) + lane % 2 * 8;
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
    add_runs<MT>(p, part, tiles, run, (float(*)[MT * TILE_ROWS][9])memory);
}

// Halves in a ring: what shared memory of 99 KB a block allows, or that of the data-center cards.
#define MUCH_SHARED (__CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200))
#define BF16_RING 3
// A number of row tiles for every number of SMs: few enough for all of them to have blocks, many enough to share tokens.
// Small bf16 matrices on the same inputs as int4 ones share their launch, a row tile a block.
#define EIGHT(NAME, FORMAT, MT, RING)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2) NAME(const LinearParams p) {                                  \
        let_successor_start();                                                                                         \
        const Part part = part_of(p, blockIdx.x);                                                                      \
        if (FORMAT == FORMAT_INT4 && part.matrix.format == FORMAT_BF16) eight_tokens<FORMAT_BF16, 1, BF16_RING>(p, part); \
        else eight_tokens<FORMAT, MT, RING>(p, part);                                                                  \
    }

EIGHT(int4_2, FORMAT_INT4, 2, MUCH_SHARED ? 6 : 4)
EIGHT(int4_3, FORMAT_INT4, 3, MUCH_SHARED ? 5 : 4)
EIGHT(int4_4, FORMAT_INT4, 4, MUCH_SHARED ? 4 : 3)
EIGHT(int8_2, FORMAT_INT8, 2, 3)
EIGHT(int8_4, FORMAT_INT8, 4, 2)
EIGHT(bf16_1, FORMAT_BF16, 1, BF16_RING)

// F32 and F16 weights: f32 products, a warp per output and token. grid (ceil(outputs / 8), rows)
extern "C" __global__ void __launch_bounds__(256) plain(const LinearParams p) {
    start_in_order();
    const Part part = part_of(p, blockIdx.x);
    u32 output = (blockIdx.x - part.first_block) * 8 + threadIdx.x / 32, lane = threadIdx.x & 31, row = blockIdx.y;
    if (output >= part.matrix.rows) return;
    const activation *x = input_row(p, row);
    auto sum_of = [&](const Matrix &m) {
        float sum = 0.0f;
        for (u32 col = lane; col < m.cols; col += 32) sum = fmaf(matrix_value(m, output, col), bf16_to_f32(x[col]), sum);
        return warp_sum(sum);
    };
    float sum = sum_of(part.matrix);
    if (p.mode == MODE_SWIGLU) sum = swiglu(sum, sum_of(p.parts[1].matrix));
    if (lane == 0) store(p, part, row, output, sum);
}
