// Products of a prompt's tokens on the warpgroup tensor cores of Hopper cards (sm_90a).
//
// out[token][output]: outputs are the left operand's rows, 16 of each warp and decoded in its registers; tokens are the
// right operand, in shared memory. Every group of 128 columns is summed from zero by eight wgmma and enters the sum times
// its scale, groups in their order: so a row's bits do not depend on its company. They differ from those of linear.cu.
//
// Tokens come as `arrange` has laid them out: 64 tokens by 64 columns are 8 KB as wgmma wants them in shared memory, and a
// copy is one instruction of one thread. (Copies of 4 bytes that sort columns on their way took half of the time.)
#include "hopper.cuh"

#define OUTPUTS 128 // of a block: two warpgroups
#define STAGES 4    // groups of tokens in shared memory
#define SUM_STRIDE (OUTPUTS + 4)

struct ArrangeParams {
    const activation *x; // rows of `x_cols`, zero-padded to whole groups
    const u32 *indices;  // rows of x, or null: row i of x
    u8 *out;
    u32 rows, x_cols, groups, unused;
};

// A thread has 16 bytes of the result: element h · 8 + t · 2 + e of step s of a half is its column t · 16 + s · 4 + h · 2 + e,
// which is where `decode` has it in weights; pieces of 16 bytes are swizzled within their 128-byte row.
// grid (ceil(groups · 16 / 128), rows)
extern "C" __global__ void __launch_bounds__(128) arrange(const ArrangeParams p) {
    start_in_order();
    u32 piece = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, half = piece / 8;
    if (half >= p.groups * 2) return;
    const u32 *from = (const u32 *)(p.x + (size_t)(p.indices ? p.indices[row] : row) * p.x_cols + half * 64) + piece % 8;
    uint4 words = make_uint4(from[0], from[8], from[16], from[24]);
    u32 place = row % SQUARE * 128 + ((piece ^ row) % 8) * 16;
    *(uint4 *)(p.out + square_place(row / SQUARE, p.groups, half) + place) = words;
}

// The last warp: copies the block's tokens, group after group, into the stages that the others have done with.
template <int TOKENS>
__device__ __forceinline__ void copy_tokens(const LinearParams &p, u8 *memory, u64 *full, u64 *empty, u32 groups) {
    const u32 SQUARES = TOKENS / SQUARE;
    u32 last_row = (p.rows - 1) / SQUARE;
    for (u32 index = 0; index < groups; index++) {
        u32 stage = index % STAGES;
        if (index >= STAGES) wait_for(&empty[stage], index / STAGES - 1 & 1);
        expect_bytes(&full[stage], 2 * SQUARES * SQUARE_BYTES);
        u8 *to = memory + stage * 2 * SQUARES * SQUARE_BYTES;
#pragma unroll
        for (u32 i = 0; i < 2 * SQUARES; i++) {
            // Past the last token: the last square again, to no effect.
            u32 row = min(blockIdx.x * SQUARES + i % SQUARES, last_row);
            copy_bytes(to + i * SQUARE_BYTES, (const u8 *)p.x + square_place(row, groups, index * 2 + i / SQUARES), SQUARE_BYTES,
                       &full[stage]);
        }
    }
}

// The sums of a warp: 16 outputs, all tokens of the block.
template <int FORMAT, int TOKENS>
__device__ __forceinline__ void multiply_groups(const Matrix &m, u32 tile_row, const u8 *memory, u64 *full, u64 *empty,
                                                float (&sums)[TOKENS / 2]) {
    const u32 HALF = Pieces<FORMAT>::COUNT * 512, HALF_STAGE = TOKENS * 128;
    u32 lane = threadIdx.x & 31;
    const u8 *codes = m.data + (size_t)tile_row * m.groups * 2 * HALF;
    const u16 *scales = m.scales + (size_t)tile_row * m.groups * TILE_ROWS + lane / 4 * 2;
    uint4 raw[2][Pieces<FORMAT>::COUNT];
    u32 next_scales = 0;
    auto load_weights = [&](u32 index) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) load_half<FORMAT>(codes + (size_t)(index * 2 + half) * HALF, lane, raw[half]);
        if (FORMAT != FORMAT_BF16) next_scales = *(const u32 *)(scales + (size_t)index * TILE_ROWS);
    };
    float group[TOKENS / 2];
#pragma unroll
    for (u32 i = 0; i < TOKENS / 2; i++) sums[i] = group[i] = 0.0f;
    load_weights(0);
    for (u32 index = 0; index < m.groups; index++) {
        u32 stage = index % STAGES, weights[8][4], group_scales = next_scales;
#pragma unroll
        for (int step = 0; step < 8; step++) decode<FORMAT, true>(raw[step / 4], step % 4, weights[step]);
        if (index + 1 < m.groups) load_weights(index + 1);
        wait_for(&full[stage], index / STAGES & 1);
        u64 tokens = tokens_at(memory + stage * 2 * HALF_STAGE);
        begin_multiplying();
#pragma unroll
        for (int step = 0; step < 8; step++)
            multiply(group, weights[step], tokens + step / 4 * (HALF_STAGE / 16) + step % 4 * 2, step > 0);
        commit_multiplying();
        finish_multiplying();
        if (lane == 0) arrive(&empty[stage]);
        float low = FORMAT == FORMAT_BF16 ? 1.0f : f16_to_f32(group_scales & 0xffff);
        float high = FORMAT == FORMAT_BF16 ? 1.0f : f16_to_f32(group_scales >> 16);
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) sums[i] = fmaf(i % 4 < 2 ? low : high, group[i], sums[i]);
    }
}

// The barrier of the warps that multiply.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// Two warpgroups multiply, one copies and leaves them its registers. `p.x` is arranged.
// grid (ceil(rows / TOKENS), ceil(outputs / OUTPUTS))
template <int FORMAT, int TOKENS> __device__ __forceinline__ void prompt(const LinearParams &p) {
    extern __shared__ u8 unaligned[];
    __shared__ u64 full[STAGES], empty[STAGES];
    u8 *memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) expect_arrivals(&full[i], 1), expect_arrivals(&empty[i], 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_successor_start();
    const Part part = part_of(p, blockIdx.y);
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 256) return;
        wait_for_predecessors();
        copy_tokens<TOKENS>(p, memory, full, empty, part.matrix.groups);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        u32 first_token = blockIdx.x * TOKENS, first_output = (blockIdx.y - part.first_block) * OUTPUTS;
        // Past the end: compute the last tile row again, to no effect.
        u32 tile_row = min(first_output / TILE_ROWS + warp, (part.matrix.rows + TILE_ROWS - 1) / TILE_ROWS - 1);
        float sums[TOKENS / 2];
        multiply_groups<FORMAT, TOKENS>(part.matrix, tile_row, memory, full, empty, sums);
        // Through shared memory, so that neighbouring lanes store neighbouring outputs.
        meet();
        float(*tile)[SUM_STRIDE] = (float(*)[SUM_STRIDE])memory;
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++)
            tile[i / 4 * 8 + lane % 4 * 2 + i % 2][warp * TILE_ROWS + i / 2 % 2 * 8 + lane / 4] = sums[i];
        meet();
        wait_for_predecessors();
        for (u32 token = warp; token < TOKENS && first_token + token < p.rows; token += 8)
#pragma unroll
            for (u32 i = 0; i < OUTPUTS; i += 32)
                store(p, part, first_token + token, first_output + i + lane, tile[token][i + lane]);
    }
}

#define PROMPT(NAME, FORMAT, TOKENS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME(const LinearParams p) { prompt<FORMAT, TOKENS>(p); }
PROMPT(int4_prompt_64, FORMAT_INT4, 64)
PROMPT(int4_prompt_128, FORMAT_INT4, 128)
PROMPT(int8_prompt_64, FORMAT_INT8, 64)
PROMPT(int8_prompt_128, FORMAT_INT8, 128)
PROMPT(bf16_prompt_64, FORMAT_BF16, 64)
PROMPT(bf16_prompt_128, FORMAT_BF16, 128)
