// Products of a prompt's tokens on the warpgroup tensor cores of Hopper cards (sm_90a).
//
// out[token][output]: outputs are the left operand's rows, 16 of each warp and decoded in its registers; tokens are the
// right operand, in shared memory. Every group of 128 columns is summed from zero by eight wgmma and enters the sum times
// its scale, groups in their order: so a row's bits do not depend on its company. They differ from those of linear.cu.
//
// Tokens come as `arrange` has laid them out: 64 tokens by 64 columns are 8 KB as wgmma wants them in shared memory, and a
// copy is one instruction of one thread. (Copies of 4 bytes that sort columns on their way took half of the time.)
#include "linear.cuh"

#define OUTPUTS 128 // of a block: two warpgroups
#define STAGES 4    // groups of tokens in shared memory
#define SUM_STRIDE (OUTPUTS + 4)
#define SQUARE 64 // tokens and columns of an arranged square
#define SQUARE_BYTES (SQUARE * SQUARE * 2)

#define SUMS_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_128 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d (+)= 64 outputs × 16 columns · 16 columns × tokens, for a warpgroup; reads shared memory and registers until it is
// waited for.
__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 tokens, bool adds) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SUMS_64 "}, {%32, %33, %34, %35}, %36, "
        "p, 1, 1, 0;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"((int)adds));
}
__device__ __forceinline__ void multiply(float (&d)[64], const u32 (&a)[4], u64 tokens, bool adds) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_128 "}, {%64, %65, %66, %67}, %68, "
        "p, 1, 1, 0;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"((int)adds));
}

__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_multiplying() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finish_multiplying() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }
__device__ __forceinline__ void expect_arrivals(u64 *barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u64 *barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void expect_bytes(u64 *barrier, u32 bytes) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(shared_address(barrier)),
                 "r"(bytes) : "memory");
}
// Waits for the barrier's phase of this parity.
__device__ __forceinline__ void wait_for(u64 *barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    } while (!done);
}
__device__ __forceinline__ void copy_square(u8 *to, const u8 *from, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(SQUARE_BYTES), "r"(shared_address(barrier)) : "memory");
}

// The descriptor of 64 columns of tokens, rows of 128 bytes, swizzled by 128 bytes: eight rows are 1,024 bytes.
__device__ __forceinline__ u64 tokens_at(const u8 *half) {
    u64 address = (u32)__cvta_generic_to_shared(half);
    return address >> 4 | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Where `arrange` puts a square: groups of 128 columns one after another, two halves each.
__device__ __forceinline__ size_t square_place(u32 square_row, u32 groups, u32 half) {
    return ((size_t)square_row * groups * 2 + half) * SQUARE_BYTES;
}

struct ArrangeParams {
    const activation *x; // rows of `x_cols`, zero-padded to whole groups
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
    const u32 *from = (const u32 *)(p.x + (size_t)row * p.x_cols + half * 64) + piece % 8;
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
            copy_square(to + i * SQUARE_BYTES, (const u8 *)p.x + square_place(row, groups, index * 2 + i / SQUARES), &full[stage]);
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
