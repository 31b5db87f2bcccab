// Ops that look at one row alone: embedding, norms, gates, gathers.
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
    activation *out;
    u32 out_cols;
};
// grid (rows)
extern "C" __global__ void __launch_bounds__(BLOCK) embed(const EmbedParams p) {
    start_in_order();
    u32 row = blockIdx.x, token = p.tokens[row];
    activation *out = p.out + (size_t)row * p.out_cols;
    for (u32 col = threadIdx.x; col < p.table.cols; col += BLOCK)
        out[col] = to_activation(matrix_value(p.table, token, col));
}

// `*_cols` are the lengths of rows in memory, `cols` what is in them. Zeros are written from there to `filled_cols`.
struct NormParams {
    const activation *x;
    const float *weight;
    activation *out;
    u32 x_cols, out_cols, cols, filled_cols;
    float eps;
};
// Four neighbouring values of a row of activations; those past the row's end are its padding: 0.
__device__ __forceinline__ float4 load_four(const activation *x, u32 col) {
    uint2 v = *(const uint2 *)(x + col);
    return make_float4(low_bf16(v.x), high_bf16(v.x), low_bf16(v.y), high_bf16(v.y));
}
__device__ __forceinline__ void store_four(activation *out, float4 v) {
    *(uint2 *)out = make_uint2(to_activation(v.x) | (u32)to_activation(v.y) << 16,
                               to_activation(v.z) | (u32)to_activation(v.w) << 16);
}

#define NORM_BLOCK 512

// grid (rows)
extern "C" __global__ void __launch_bounds__(NORM_BLOCK) rms_norm(const NormParams p) {
    start_in_order();
    const activation *x = p.x + (size_t)blockIdx.x * p.x_cols;
    activation *out = p.out + (size_t)blockIdx.x * p.out_cols;
    float sum = 0.0f;
#pragma unroll 4
    for (u32 col = threadIdx.x * 4; col < p.cols; col += NORM_BLOCK * 4) {
        float4 v = load_four(x, col);
        sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
    }
    float factor = 1.0f / sqrtf(block_sum(sum, partial) / (float)p.cols + p.eps);
#pragma unroll 4
    for (u32 col = threadIdx.x * 4; col + 3 < p.cols; col += NORM_BLOCK * 4) {
        float4 v = load_four(x, col), w = *(const float4 *)(p.weight + col);
        store_four(out + col, make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w));
    }
    for (u32 col = p.cols / 4 * 4 + threadIdx.x; col < max(p.cols, p.filled_cols); col += NORM_BLOCK)
        out[col] = col < p.cols ? to_activation(from_activation(x[col]) * factor * p.weight[col]) : to_activation(0.0f);
}

struct MtpParams {
    Matrix table;
    const u32 *tokens;
    const activation *hidden;
    const float *embed_norm;
    const float *hidden_norm;
    activation *out;
    u32 hidden_cols, hidden_width, out_cols;
    float eps;
};
// grid (rows)
extern "C" __global__ void __launch_bounds__(BLOCK) mtp_combine(const MtpParams p) {
    start_in_order();
    u32 row = blockIdx.x, token = p.tokens[row], cols = p.table.cols;
    const activation *hidden = p.hidden + (size_t)row * p.hidden_cols;
    activation *out = p.out + (size_t)row * p.out_cols;
    float factor = inverse_rms(cols, p.eps, [&](u32 col) { return matrix_value(p.table, token, col); });
    for (u32 col = threadIdx.x; col < cols; col += BLOCK)
        out[col] = to_activation(matrix_value(p.table, token, col) * factor * p.embed_norm[col]);
    factor = inverse_rms(p.hidden_width, p.eps, [&](u32 col) { return from_activation(hidden[col]); });
    for (u32 col = threadIdx.x; col < p.hidden_width; col += BLOCK)
        out[cols + col] = to_activation(from_activation(hidden[col]) * factor * p.hidden_norm[col]);
}

struct SwigluParams {
    const activation *gate_up;
    activation *out;
    u32 in_cols, out_cols, width;
};
// grid (ceil(width / (4 · BLOCK)), rows)
extern "C" __global__ void __launch_bounds__(BLOCK) swiglu(const SwigluParams p) {
    start_in_order();
    u32 col = (blockIdx.x * BLOCK + threadIdx.x) * 4;
    const activation *gate = p.gate_up + (size_t)blockIdx.y * p.in_cols, *up = gate + p.width;
    activation *out = p.out + (size_t)blockIdx.y * p.out_cols;
    if (p.width % 4 == 0 && col < p.width) {
        float4 g = load_four(gate, col), u = load_four(up, col);
        store_four(out + col, make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w));
        return;
    }
    for (u32 i = col; i < min(col + 4, p.width); i++)
        out[i] = to_activation(silu(from_activation(gate[i])) * from_activation(up[i]));
}

struct GatedNormParams {
    const activation *scanned;
    const activation *projected;
    const float *norm;
    activation *out;
    u32 scanned_cols, projected_cols, out_cols, z_column, heads, dim;
    float eps;
};
// grid (ceil(heads / warps), rows); a warp per head
extern "C" __global__ void __launch_bounds__(BLOCK) gated_norm(const GatedNormParams p) {
    start_in_order();
    u32 head = blockIdx.x * (BLOCK / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (head >= p.heads) return;
    const activation *x = p.scanned + (size_t)blockIdx.y * p.scanned_cols + head * p.dim;
    const activation *z = p.projected + (size_t)blockIdx.y * p.projected_cols + p.z_column + head * p.dim;
    activation *out = p.out + (size_t)blockIdx.y * p.out_cols + head * p.dim;
    float sum = 0.0f;
    for (u32 i = lane; i < p.dim; i += 32) sum = fmaf(from_activation(x[i]), from_activation(x[i]), sum);
    float factor = 1.0f / sqrtf(warp_sum(sum) / (float)p.dim + p.eps);
    for (u32 i = lane; i < p.dim; i += 32) out[i] = to_activation(from_activation(x[i]) * factor * p.norm[i] * silu(from_activation(z[i])));
}

struct GatherParams {
    const activation *from;
    const u32 *indices;
    activation *to;
    u32 cols, from_cols, to_cols;
};
// grid (rows)
extern "C" __global__ void __launch_bounds__(BLOCK) gather(const GatherParams p) {
    start_in_order();
    const activation *from = p.from + (size_t)p.indices[blockIdx.x] * p.from_cols;
    activation *to = p.to + (size_t)blockIdx.x * p.to_cols;
    for (u32 col = threadIdx.x; col < p.cols; col += BLOCK) to[col] = from[col];
}
