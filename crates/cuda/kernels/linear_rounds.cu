// Products of the more than eight tokens of a round on the warpgroup tensor cores of Hopper cards (sm_90a). Sums have the
// order of linear_sums.cuh, and the bits: wgmma adds as mma.sync does.
//
// A block has 4 or 8 row tiles, a warp for each, and 16, 32 or 64 tokens, arranged. Weights and tokens of a group come
// through stages in shared memory; the first warp has them copied. Blocks that would leave SMs idle are split: a block for
// each run of columns, whose sums meet in memory.
#include "hopper.cuh"

#define SPLITS 8

template <int FORMAT, int TILES, int TOKENS, int STAGES> struct RoundShared {
    static const u32 TILE_BYTES = Pieces<FORMAT>::COUNT * 1024, OUTPUTS = TILES * TILE_ROWS;
    u8 tokens[STAGES][2][TOKENS * SQUARE * 2];
    u8 codes[STAGES][TILES][TILE_BYTES];
    u16 scales[STAGES][TILES][TILE_ROWS];
    // Sums of the runs so far: touched eight times in all, so not worth registers.
    float totals[TOKENS][OUTPUTS + 4];
    u64 full[STAGES], empty[STAGES];
    bool last;
};

// What a block works on: a stretch of groups of its tiles.
struct Work {
    bool split;
    u32 block, split_block, run, first, count; // `first`, `count`: groups
};
__device__ __forceinline__ Work work_of(const LinearParams &p) {
    Work work;
    work.split = blockIdx.y >= p.whole_blocks;
    u32 unit = work.split ? blockIdx.y - p.whole_blocks : 0, groups = p.parts[0].matrix.groups;
    work.split_block = unit / SPLITS;
    work.block = work.split ? p.whole_blocks + work.split_block : blockIdx.y;
    work.run = unit % SPLITS;
    work.first = work.run * groups / SPLITS;
    work.count = (work.split ? (work.run + 1) * groups / SPLITS : groups) - work.first;
    return work;
}

// What the first warp copies: lanes 0 to TILES − 1 the weights of a tile each, lanes 0 and 1 a half of the tokens.
template <int FORMAT, int TILES, int TOKENS, int STAGES> struct Copier {
    typedef RoundShared<FORMAT, TILES, TOKENS, STAGES> Shared;
    static const u32 SCALE_BYTES = FORMAT == FORMAT_BF16 ? 0 : TILE_ROWS * 2, TOKEN_BYTES = TOKENS * SQUARE * 2;
    const u8 *codes, *tokens;
    const u16 *scales;
    u32 lane;
    __device__ __forceinline__ Copier(const LinearParams &p, const BlockTiles<TILES> &tiles, const Work &work) {
        lane = threadIdx.x & 31;
        codes = tiles.codes(lane % TILES, work.first, Shared::TILE_BYTES);
        scales = tiles.scales(lane % TILES, work.first);
        tokens = (const u8 *)p.x + square_place(blockIdx.x, p.parts[0].matrix.groups, work.first * 2 + (lane & 1));
    }
    __device__ __forceinline__ void copy_weights(Shared &s, u32 at, u32 stage) const {
        if (lane == 0) expect_bytes(&s.full[stage], TILES * (Shared::TILE_BYTES + SCALE_BYTES) + 2 * TOKEN_BYTES);
        __syncwarp();
        if (lane >= TILES) return;
        copy_bytes(s.codes[stage][lane], codes + (size_t)at * Shared::TILE_BYTES, Shared::TILE_BYTES, &s.full[stage]);
        if (FORMAT != FORMAT_BF16)
            copy_bytes(s.scales[stage][lane], scales + (size_t)at * TILE_ROWS, SCALE_BYTES, &s.full[stage]);
    }
    __device__ __forceinline__ void copy_tokens(Shared &s, u32 at, u32 stage) const {
        if (lane < 2) copy_bytes(s.tokens[stage][lane], tokens + (size_t)at * 2 * SQUARE_BYTES, TOKEN_BYTES, &s.full[stage]);
    }
};

// 16 outputs of each warp, all tokens; the sums of all runs end in `totals`.
template <int FORMAT, int TILES, int TOKENS, int STAGES>
__device__ __forceinline__ void multiply_groups(RoundShared<FORMAT, TILES, TOKENS, STAGES> &s, const Work &work, u32 groups,
                                                const Copier<FORMAT, TILES, TOKENS, STAGES> &copier) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, run_index = work.run;
    float run[TOKENS / 2], group[TOKENS / 2];
#pragma unroll
    for (u32 i = 0; i < TOKENS / 2; i++) run[i] = group[i] = 0.0f;
    u32 stage = 0, parity = 0;
    for (u32 at = 0; at < work.count; at++) {
        u32 weights[8][4];
        wait_for(&s.full[stage], parity);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 raw[Pieces<FORMAT>::COUNT];
#pragma unroll
            for (int i = 0; i < Pieces<FORMAT>::COUNT; i++)
                raw[i] = *(const uint4 *)&s.codes[stage][warp][(half * Pieces<FORMAT>::COUNT + i) * 512 + lane * 16];
#pragma unroll
            for (int step = 0; step < 4; step++) decode<FORMAT, true>(raw, step, weights[half * 4 + step]);
        }
        u32 scales = FORMAT == FORMAT_BF16 ? 0 : *(const u32 *)&s.scales[stage][warp][lane / 4 * 2];
        u64 tokens = tokens_at(s.tokens[stage][0]);
        begin_multiplying();
#pragma unroll
        for (int step = 0; step < 8; step++)
            multiply(group, weights[step], tokens + step / 4 * (TOKENS * SQUARE * 2 / 16) + step % 4 * 2, step > 0);
        commit_multiplying();
        // Meanwhile the stage before this one, which the other warps have done with or will soon, is filled again.
        if (warp == 0 && at > 0 && at - 1 + STAGES < work.count) {
            u32 before = stage == 0 ? STAGES - 1 : stage - 1;
            wait_for(&s.empty[before], stage == 0 ? parity ^ 1 : parity);
            copier.copy_weights(s, at - 1 + STAGES, before);
            copier.copy_tokens(s, at - 1 + STAGES, before);
        }
        finish_multiplying();
        __syncwarp(); // all lanes have read their weights
        if (lane == 0) arrive(&s.empty[stage]);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        float low = FORMAT == FORMAT_BF16 ? 1.0f : f16_to_f32(scales & 0xffff);
        float high = FORMAT == FORMAT_BF16 ? 1.0f : f16_to_f32(scales >> 16);
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) run[i] = fmaf(i % 4 < 2 ? low : high, group[i], run[i]);
        // The run ends here; those without groups add nothing.
        if ((run_index + 1) * groups / SPLITS > work.first + at + 1) continue;
        while (run_index + 1 < SPLITS && (run_index + 1) * groups / SPLITS <= work.first + at + 1) run_index++;
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) {
            s.totals[i / 4 * 8 + lane % 4 * 2 + i % 2][warp * TILE_ROWS + i / 2 % 2 * 8 + lane / 4] += run[i];
            run[i] = 0.0f;
        }
    }
}

// Stores four neighbouring outputs of a row, of which the matrix may have fewer.
__device__ __forceinline__ void store_four(const LinearParams &p, const Part &part, u32 row, u32 output, float4 sums) {
    size_t at = (size_t)row * p.out_cols + part.out_column + output;
    if (p.mode == MODE_RAW || output + 3 >= part.matrix.rows || at % 4 != 0) {
        store(p, part, row, output, sums.x), store(p, part, row, output + 1, sums.y);
        store(p, part, row, output + 2, sums.z), store(p, part, row, output + 3, sums.w);
        return;
    }
    uint2 *out = (uint2 *)((activation *)p.out + at);
    if (p.mode == MODE_ADD) {
        uint2 v = *out;
        sums.x += low_bf16(v.x), sums.y += high_bf16(v.x), sums.z += low_bf16(v.y), sums.w += high_bf16(v.y);
    }
    *out = make_uint2(to_activation(sums.x) | (u32)to_activation(sums.y) << 16,
                      to_activation(sums.z) | (u32)to_activation(sums.w) << 16);
}

// A thread stores four neighbouring outputs of a token at once.
template <int TILES, int TOKENS, typename SumsOf>
__device__ __forceinline__ void store_block(const LinearParams &p, const Part &part, const BlockTiles<TILES> &tiles, SumsOf sums_of) {
    constexpr u32 FOURS = TILES * TILE_ROWS / 4, THREADS = TILES * 32;
    u32 first_token = blockIdx.x * TOKENS, tokens = min(TOKENS, p.rows - first_token);
    if (p.mode == MODE_SWIGLU) {
        u32 output = threadIdx.x % (FOURS / 2) * 4;
#pragma unroll 2
        for (u32 token = threadIdx.x / (FOURS / 2); token < tokens; token += THREADS / (FOURS / 2)) {
            float4 gate = sums_of(token, output), up = sums_of(token, FOURS * 2 + output);
            store_four(p, part, first_token + token, tiles.first_output() + output,
                       make_float4(swiglu(gate.x, up.x), swiglu(gate.y, up.y), swiglu(gate.z, up.z), swiglu(gate.w, up.w)));
        }
        return;
    }
    u32 output = threadIdx.x % FOURS * 4;
#pragma unroll 2
    for (u32 token = threadIdx.x / FOURS; token < tokens; token += THREADS / FOURS)
        store_four(p, part, first_token + token, tiles.first_output() + output, sums_of(token, output));
}

// grid (ceil(rows / TOKENS), whole blocks, then SPLITS for each split one)
template <int FORMAT, int TILES, int TOKENS, int STAGES> __device__ __forceinline__ void round(const LinearParams &p) {
    typedef RoundShared<FORMAT, TILES, TOKENS, STAGES> Shared;
    constexpr u32 OUTPUTS = Shared::OUTPUTS, THREADS = TILES * 32;
    extern __shared__ u8 unaligned[];
    Shared &s = *(Shared *)(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
    let_successor_start();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) expect_arrivals(&s.full[i], 1), expect_arrivals(&s.empty[i], TILES);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    Work work = work_of(p);
    const Part part = part_of(p, work.block);
    const BlockTiles<TILES> tiles(p, part, work.block - part.first_block);
    const Copier<FORMAT, TILES, TOKENS, STAGES> copier(p, tiles, work);
    if (threadIdx.x < 32) {
        __syncwarp();
        for (u32 at = 0; at < min(STAGES, work.count); at++) copier.copy_weights(s, at, at);
    }
    for (u32 i = threadIdx.x; i < TOKENS * (OUTPUTS + 4); i += THREADS) s.totals[0][i] = 0.0f;
    // Weights are on their way; tokens are the predecessor's.
    wait_for_predecessors();
    if (threadIdx.x < 32)
        for (u32 at = 0; at < min(STAGES, work.count); at++) copier.copy_tokens(s, at, at);
    __syncthreads();
    multiply_groups(s, work, part.matrix.groups, copier);
    __syncthreads();
    if (!work.split) {
        store_block<TILES, TOKENS>(p, part, tiles, [&](u32 token, u32 output) { return *(const float4 *)&s.totals[token][output]; });
        return;
    }
    u32 place = blockIdx.x * ((gridDim.y - p.whole_blocks) / SPLITS) + work.split_block;
    float4 *sums = (float4 *)p.sums + (size_t)place * SPLITS * TOKENS * OUTPUTS / 4;
    float4 *own = sums + work.run * TOKENS * OUTPUTS / 4;
    u32 tokens = min(TOKENS, p.rows - blockIdx.x * TOKENS);
    for (u32 i = threadIdx.x; i < tokens * OUTPUTS / 4; i += THREADS)
        __stcg(own + i, *(const float4 *)&s.totals[i / (OUTPUTS / 4)][i % (OUTPUTS / 4) * 4]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        s.last = atomicAdd(p.arrivals + place, 1) == SPLITS - 1;
        if (s.last) p.arrivals[place] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!s.last) return;
    store_block<TILES, TOKENS>(p, part, tiles, [&](u32 token, u32 output) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < SPLITS; i++) {
            float4 v = __ldcg(sums + ((i * TOKENS + token) * OUTPUTS + output) / 4);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        return sum;
    });
}

#define ROUND(NAME, FORMAT, TILES, TOKENS, STAGES, BLOCKS)                                                             \
    extern "C" __global__ void __launch_bounds__(TILES * 32, BLOCKS) NAME(const LinearParams p) {                      \
        round<FORMAT, TILES, TOKENS, STAGES>(p);                                                                       \
    }
ROUND(int4_round_16, FORMAT_INT4, 4, 16, 6, 4)
ROUND(int4_round_32, FORMAT_INT4, 8, 32, 5, 2)
ROUND(int4_round_64, FORMAT_INT4, 8, 64, 3, 2)
ROUND(int8_round_16, FORMAT_INT8, 8, 16, 4, 2)
ROUND(int8_round_32, FORMAT_INT8, 8, 32, 3, 2)
ROUND(int8_round_64, FORMAT_INT8, 8, 64, 2, 2)
ROUND(bf16_round_16, FORMAT_BF16, 8, 16, 2, 2)
ROUND(bf16_round_32, FORMAT_BF16, 8, 32, 2, 2)
ROUND(bf16_round_64, FORMAT_BF16, 8, 64, 2, 1)
