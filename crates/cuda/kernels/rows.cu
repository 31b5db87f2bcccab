// Ops that look at one row alone: embedding, norms, gates, gathers; and the staging of a product's input.
#include "common.cuh"

#define BLOCK 256

__shared__ float partial[32];

// `1 / sqrt(mean(x²) + eps)` of a row, the same bits in every thread.
template <typename Load>
__device__ __forceinline__ float inverse_rms(u32 cols, float eps, Load load) {
    float sum = 0.0f;
    for (u32 col = threadIdx.x; col < cols; col += BLOCK) {
        float x = load(col);
        sum = fmaf(x, x, sum);
    }
    return 1.0f / sqrtf(block_sum(sum, partial) / (float)cols + eps);
}

struct EmbedParams {
    Matrix table;
    const u32 *tokens;
    float *out;
    u32 out_cols;
};
// grid (rows)
extern "C" __global__ void __launch_bounds__(BLOCK) embed(const EmbedParams p) {
    u32 row = blockIdx.x, token = p.tokens[row];
    float *out = p.out + (size_t)row * p.out_cols;
    for (u32 col = threadIdx.x; col < p.table.cols; col += BLOCK)
        out[col] = round_activation(matrix_value(p.table, token, col));
}

struct NormParams {
    const float *x;
    const u32 *indices;  // rows of x, or null: row i of x
    const float *weight; // of the norm; not read by `stage`
    float *out;          // f32 result, where `staged` is null
    u16 *staged;         // bf16 result `[rows, padded]`, zero-padded
    u32 x_cols, out_cols, cols, padded;
    float eps;
};
// Four neighbouring values of a row; `whole` where rows begin on 16 bytes and have whole fours.
__device__ __forceinline__ float4 load_four(const float *x, u32 col, u32 cols, bool whole) {
    if (whole) return *(const float4 *)(x + col);
    return make_float4(x[col], col + 1 < cols ? x[col + 1] : 0.0f, col + 2 < cols ? x[col + 2] : 0.0f,
                       col + 3 < cols ? x[col + 3] : 0.0f);
}

#define NORM_BLOCK 512

// grid (rows)
extern "C" __global__ void __launch_bounds__(NORM_BLOCK) rms_norm(const NormParams p) {
    const float *x = p.x + (size_t)(p.indices ? p.indices[blockIdx.x] : blockIdx.x) * p.x_cols;
    bool whole = p.x_cols % 4 == 0 && p.cols % 4 == 0;
    float sum = 0.0f;
#pragma unroll 4
    for (u32 col = threadIdx.x * 4; col < p.cols; col += NORM_BLOCK * 4) {
        float4 v = load_four(x, col, p.cols, whole);
        sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
    }
    float factor = 1.0f / sqrtf(block_sum(sum, partial) / (float)p.cols + p.eps);
    u32 width = p.staged ? p.padded : p.cols;
#pragma unroll 4
    for (u32 col = threadIdx.x * 4; col < width; col += NORM_BLOCK * 4) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (col < p.cols) {
            v = load_four(x, col, p.cols, whole);
            float4 w = load_four(p.weight, col, p.cols, p.cols % 4 == 0);
            v = make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
        }
        if (p.staged) {
            u32 low = f32_to_bf16(v.x) | (u32)f32_to_bf16(v.y) << 16, high = f32_to_bf16(v.z) | (u32)f32_to_bf16(v.w) << 16;
            *(uint2 *)(p.staged + (size_t)blockIdx.x * p.padded + col) = make_uint2(low, high);
        } else {
            const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (col + i < p.cols)
                    p.out[(size_t)blockIdx.x * p.out_cols + col + i] = round_activation(values[i]);
        }
    }
}

// Rows as they are, in bf16. grid (ceil(padded / (4 · BLOCK)), rows)
extern "C" __global__ void __launch_bounds__(BLOCK) stage(const NormParams p) {
    const float *x = p.x + (size_t)(p.indices ? p.indices[blockIdx.y] : blockIdx.y) * p.x_cols;
    u32 col = (blockIdx.x * BLOCK + threadIdx.x) * 4;
    if (col >= p.padded) return;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (col < p.cols) v = load_four(x, col, p.cols, p.x_cols % 4 == 0 && p.cols % 4 == 0);
    u32 low = f32_to_bf16(v.x) | (u32)f32_to_bf16(v.y) << 16, high = f32_to_bf16(v.z) | (u32)f32_to_bf16(v.w) << 16;
    *(uint2 *)(p.staged + (size_t)blockIdx.y * p.padded + col) = make_uint2(low, high);
}

struct MtpParams {
    Matrix table;
    const u32 *tokens;
    const float *hidden;
    const float *embed_norm;
    const float *hidden_norm;
    float *out;
    u32 hidden_cols, hidden_width, out_cols;
    float eps;
};
// grid (rows)
extern "C" __global__ void __launch_bounds__(BLOCK) mtp_combine(const MtpParams p) {
    u32 row = blockIdx.x, token = p.tokens[row], cols = p.table.cols;
    const float *hidden = p.hidden + (size_t)row * p.hidden_cols;
    float *out = p.out + (size_t)row * p.out_cols;
    float factor = inverse_rms(cols, p.eps, [&](u32 col) { return matrix_value(p.table, token, col); });
    for (u32 col = threadIdx.x; col < cols; col += BLOCK)
        out[col] = round_activation(matrix_value(p.table, token, col) * factor * p.embed_norm[col]);
    factor = inverse_rms(p.hidden_width, p.eps, [&](u32 col) { return hidden[col]; });
    for (u32 col = threadIdx.x; col < p.hidden_width; col += BLOCK)
        out[cols + col] = round_activation(hidden[col] * factor * p.hidden_norm[col]);
}

struct SwigluParams {
    const float *gate_up;
    float *out;
    u32 in_cols, out_cols, width;
};
// grid (ceil(width / BLOCK), rows)
extern "C" __global__ void __launch_bounds__(BLOCK) swiglu(const SwigluParams p) {
    u32 col = blockIdx.x * BLOCK + threadIdx.x;
    if (col >= p.width) return;
    const float *x = p.gate_up + (size_t)blockIdx.y * p.in_cols;
    p.out[(size_t)blockIdx.y * p.out_cols + col] = round_activation(silu(x[col]) * x[p.width + col]);
}

struct GatedNormParams {
    const float *scanned;
    const float *projected;
    const float *norm;
    float *out;
    u32 scanned_cols, projected_cols, out_cols, z_column, heads, dim;
    float eps;
};
// grid (ceil(heads / warps), rows); a warp per head
extern "C" __global__ void __launch_bounds__(BLOCK) gated_norm(const GatedNormParams p) {
    u32 head = blockIdx.x * (BLOCK / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (head >= p.heads) return;
    const float *x = p.scanned + (size_t)blockIdx.y * p.scanned_cols + head * p.dim;
    const float *z = p.projected + (size_t)blockIdx.y * p.projected_cols + p.z_column + head * p.dim;
    float *out = p.out + (size_t)blockIdx.y * p.out_cols + head * p.dim;
    float sum = 0.0f;
    for (u32 i = lane; i < p.dim; i += 32) sum = fmaf(x[i], x[i], sum);
    float factor = 1.0f / sqrtf(warp_sum(sum) / (float)p.dim + p.eps);
    for (u32 i = lane; i < p.dim; i += 32) out[i] = round_activation(x[i] * factor * p.norm[i] * silu(z[i]));
}

struct GatherParams {
    const float *from;
    const u32 *indices;
    float *to;
    u32 cols, to_cols;
};
// grid (rows)
extern "C" __global__ void __launch_bounds__(BLOCK) gather(const GatherParams p) {
    const float *from = p.from + (size_t)p.indices[blockIdx.x] * p.cols;
    float *to = p.to + (size_t)blockIdx.x * p.to_cols;
    for (u32 col = threadIdx.x; col < p.cols; col += BLOCK) to[col] = from[col];
}
