// How the products of rounds sum: weights on the m16 side of mma.m16n8k16, tokens on n8, f32 accumulators.
//
// One order of summation whatever the number of tokens: the columns are cut into SPLITS runs of whole groups; within a
// run each group is summed by eight mma from zero and enters the run's sum times the group's scale; the runs' sums are
// added from the first to the last. So a row's bits do not depend on its company, nor on which kernel ran.
#pragma once
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
