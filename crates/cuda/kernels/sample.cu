// Drawing tokens without sorting, and log-probabilities. A block per row.
//
// A token is a 64-bit key: its logit mapped to an ordered integer, then the complement of its id, so that keys differ
// and the larger key is the likelier token, the smaller id among equals. Cuts (top-k, top-p) are found by fixing the
// key's bytes from the top, with counts or masses per byte value. Masses are integers (2^40 for the likeliest token):
// integer sums do not depend on their order.
#include "common.cuh"

#define BLOCK 1024

struct SampleRow {
    u64 seed, position;
    const u32 *seen;   // (id, occurrences) pairs
    const u32 *bias;   // (id, f32 bits) pairs
    const u32 *banned; // ids
    u32 seen_len, bias_len, banned_len;
    u32 logits_row, vocab_limit, top_k, top, flags;
    float temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
    u32 token; // given, where FLAG_DRAW is not set
    u32 unused;
};
#define FLAG_DRAW 1
#define FLAG_REPORT 2

struct SampleResult {
    double total; // Σ e^(logit − largest)
    u32 token;
    float logit, largest;
    u32 top_len;
};
struct TopToken {
    u32 token;
    float logit;
};

struct SampleParams {
    const float *logits;
    float *scratch; // `[rows of this launch, vocab]`
    const SampleRow *rows;
    SampleResult *results;
    TopToken *top; // `[rows of this launch, top_capacity]`
    u32 logits_cols, top_capacity;
};

__device__ __forceinline__ float not_nan(float x) { return x != x ? -INFINITY_F32 : x; }
__device__ __forceinline__ u64 key_of(float logit, u32 token) {
    u32 bits = __float_as_uint(logit + 0.0f); // −0 is 0
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (u32)~token;
}
__device__ __forceinline__ u32 token_of(u64 key) { return ~(u32)key; }
__device__ __forceinline__ float logit_of(u64 key) {
    u32 bits = key >> 32;
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__shared__ u64 warp_keys[32];
__shared__ double warp_sums[32];
__shared__ u32 counts[256];
__shared__ u64 masses[256];
__shared__ u64 chosen;
__shared__ u64 above;

__device__ __forceinline__ u64 block_max(u64 key) {
    for (int offset = 16; offset > 0; offset >>= 1) key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warp_keys[threadIdx.x / 32] = key;
    __syncthreads();
    for (u32 i = 0; i < BLOCK / 32; i++) key = max(key, warp_keys[i]);
    return key;
}
__device__ __forceinline__ double block_total(double value) {
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0.0;
    for (u32 i = 0; i < BLOCK / 32; i++) sum += warp_sums[i];
    return sum;
}
__device__ __forceinline__ u64 block_count(u64 value) {
    __syncthreads();
    if (threadIdx.x == 0) chosen = 0;
    __syncthreads();
    if (value) atomicAdd(&chosen, value);
    __syncthreads();
    u64 result = chosen;
    __syncthreads();
    return result;
}

// The key below which everything is cut, from the likeliest down, when `reached(count, mass)` first holds: the counts
// and masses are those of all tokens down to and with the key. `visit(token, key, mass)` is false for tokens that are
// out of it. 0 when it never holds.
template <typename Visit, typename Reached>
__device__ u64 cut(u32 limit, Visit visit, Reached reached) {
    u64 prefix = 0, count_above = 0, mass_above = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) counts[threadIdx.x] = 0, masses[threadIdx.x] = 0;
        __syncthreads();
        for (u32 token = threadIdx.x; token < limit; token += BLOCK) {
            u64 key, mass;
            if (!visit(token, key, mass)) continue;
            if (shift < 56 && key >> (shift + 8) != prefix >> (shift + 8)) continue;
            u32 digit = key >> shift & 255;
            atomicAdd(&counts[digit], 1u);
            if (mass) atomicAdd(&masses[digit], mass);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 count = count_above, mass = mass_above;
            int digit = 255;
            for (; digit >= 0; digit--) {
                if (counts[digit] && reached(count + counts[digit], mass + masses[digit])) break;
                count += counts[digit], mass += masses[digit];
            }
            // Hand over through shared memory: digit + 1, or 0 for none.
            chosen = (u64)(digit + 1), above = count;
            warp_keys[0] = mass, warp_keys[1] = digit >= 0 ? counts[digit] : 0;
        }
        __syncthreads();
        if (chosen == 0) return 0;
        prefix |= (chosen - 1) << shift;
        count_above = above, mass_above = warp_keys[0];
        // A single token has that prefix: it and all above it are kept.
        if (warp_keys[1] == 1) return prefix;
    }
    return prefix;
}

__device__ __forceinline__ u64 mix(u64 bits) {
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
    return bits ^ bits >> 31;
}
__device__ __forceinline__ float gumbel(u64 seed, u64 position, u32 token) {
    u64 key = mix(seed ^ 0x9e3779b97f4a7c15ull);
    key = mix(key ^ position * 0xd1b54a32d192ed03ull);
    key = mix(key ^ (u64)token * 0x8cb92ba72f3d8dd7ull);
    double uniform = ((double)(key >> 40) + 0.5) / 16777216.0;
    return (float)(-log(-log(uniform)));
}
// Noise lies between −2.9 and 17.4: a token this far below the likeliest one cannot win.
#define NOISE_SPAN 21.0f

// Penalties and bias on a copy of the row; NaN becomes −∞, as does what is banned.
__device__ void adjust(const SampleRow &row, const float *logits, float *scratch, u32 limit) {
    for (u32 token = threadIdx.x; token < limit; token += BLOCK) scratch[token] = not_nan(logits[token]);
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.seen_len; i += BLOCK) {
        u32 token = row.seen[2 * i], occurrences = row.seen[2 * i + 1];
        if (token >= limit) continue;
        float logit = scratch[token];
        logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        logit = __fsub_rn(logit, __fmul_rn(row.frequency_penalty, (float)occurrences));
        if (occurrences > 0) logit = __fsub_rn(logit, row.presence_penalty);
        scratch[token] = not_nan(logit);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (u32 i = 0; i < row.bias_len; i++) {
            u32 token = row.bias[2 * i];
            if (token < limit) scratch[token] = not_nan(scratch[token] + __uint_as_float(row.bias[2 * i + 1]));
        }
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.banned_len; i += BLOCK)
        if (row.banned[i] < limit) scratch[row.banned[i]] = -INFINITY_F32;
    __syncthreads();
}

// Nothing may be drawn: the largest logit that is not banned, or the largest of all.
__device__ u32 fallback(const SampleRow &row, const float *logits, float *scratch, u32 limit) {
    for (u32 token = threadIdx.x; token < limit; token += BLOCK) scratch[token] = not_nan(logits[token]);
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.banned_len; i += BLOCK)
        if (row.banned[i] < limit) scratch[row.banned[i]] = __int_as_float(0x7fffffff); // NaN: banned
    __syncthreads();
    u64 allowed = 0, any = 0;
    for (u32 token = threadIdx.x; token < limit; token += BLOCK) {
        any = max(any, key_of(not_nan(logits[token]), token));
        if (scratch[token] == scratch[token]) allowed = max(allowed, key_of(scratch[token], token));
    }
    allowed = block_max(allowed), any = block_max(any);
    return allowed ? token_of(allowed) : any ? token_of(any) : 0;
}

__device__ u32 draw(const SampleRow &row, const float *logits, float *scratch, u32 limit) {
    // Without anything to adjust the row is read where it is.
    bool adjusted = row.seen_len + row.bias_len + row.banned_len > 0;
    if (adjusted) adjust(row, logits, scratch, limit);
    const float *adjusted_logits = adjusted ? scratch : logits;
    u64 best = 0;
    // Eight loads on their way at once: a row of 248,320 took 128 us with one at a time and a copy first, 105 so.
#pragma unroll 8
    for (u32 token = threadIdx.x; token < limit; token += BLOCK) {
        float logit = not_nan(adjusted_logits[token]);
        if (logit > -INFINITY_F32) best = max(best, key_of(logit, token));
    }
    best = block_max(best);
    if (!best) return fallback(row, logits, scratch, limit);
    float top = __fdiv_rn(logit_of(best), row.temperature);
    if (!(row.temperature > 0.0f) || !(fabsf(top) < INFINITY_F32)) return token_of(best);

    float least = fminf(row.min_p, 1.0f);
    // In the running and its logit over the temperature.
    auto in = [&](u32 token, float &logit) {
        logit = not_nan(adjusted_logits[token]);
        if (!(logit > -INFINITY_F32)) return false;
        logit = __fdiv_rn(logit, row.temperature);
        return !(row.min_p > 0.0f) || exp((double)__fsub_rn(logit, top)) >= (double)least;
    };
    u64 kept_from = 0;
    u64 remaining = 0;
    if (row.top_k > 0) {
        float logit;
        for (u32 token = threadIdx.x; token < limit; token += BLOCK) remaining += in(token, logit);
        remaining = block_count(remaining);
    }
    if (row.top_k > 0 && row.top_k < remaining) {
        u64 wanted = row.top_k;
        kept_from = cut(
            limit,
            [&](u32 token, u64 &key, u64 &mass) {
                float logit;
                if (!in(token, logit)) return false;
                key = key_of(logit, token), mass = 0;
                return true;
            },
            [&](u64 count, u64) { return count >= wanted; });
    }
    if (row.top_p < 1.0f) {
        auto visit = [&](u32 token, u64 &key, u64 &mass) {
            float logit;
            if (!in(token, logit)) return false;
            key = key_of(logit, token);
            if (key < kept_from) return false;
            mass = (u64)(exp((double)__fsub_rn(logit, top)) * 1099511627776.0);
            return true;
        };
        u64 total = 0;
        for (u32 token = threadIdx.x; token < limit; token += BLOCK) {
            u64 key, mass;
            if (visit(token, key, mass)) total += mass;
        }
        double wanted = (double)row.top_p * (double)block_count(total);
        kept_from = max(kept_from, cut(limit, visit, [&](u64, u64 mass) { return (double)mass >= wanted; }));
    }
    u64 winner = 0;
    for (u32 token = threadIdx.x; token < limit; token += BLOCK) {
        float logit;
        if (!in(token, logit) || logit < top - NOISE_SPAN || key_of(logit, token) < kept_from) continue;
        winner = max(winner, key_of(logit + gumbel(row.seed, row.position, token), token));
    }
    winner = block_max(winner);
    return winner ? token_of(winner) : token_of(best);
}

// grid (rows)
extern "C" __global__ void __launch_bounds__(BLOCK, 1) sample(const SampleParams p) {
    start_in_order();
    __shared__ u32 found;
    const SampleRow row = p.rows[blockIdx.x];
    const float *logits = p.logits + (size_t)row.logits_row * p.logits_cols;
    u32 limit = min(row.vocab_limit, p.logits_cols), token = row.token;
    SampleResult result = {};
    if (row.flags & FLAG_DRAW) token = draw(row, logits, p.scratch + (size_t)blockIdx.x * p.logits_cols, limit);
    result.token = token;
    if (row.flags & FLAG_REPORT) {
        u64 best = 0;
#pragma unroll 8
        for (u32 i = threadIdx.x; i < limit; i += BLOCK) best = max(best, key_of(not_nan(logits[i]), i));
        best = block_max(best);
        result.largest = best ? logit_of(best) : -INFINITY_F32;
        double total = 0.0;
        for (u32 i = threadIdx.x; i < limit; i += BLOCK) {
            float logit = not_nan(logits[i]);
            total += logit == result.largest ? 1.0 : exp((double)logit - (double)result.largest);
        }
        result.total = block_total(total);
        result.logit = token < limit ? not_nan(logits[token]) : -INFINITY_F32;
        u32 wanted = min(row.top, limit);
        if (wanted) {
            auto visit = [&](u32 i, u64 &key, u64 &mass) {
                key = key_of(not_nan(logits[i]), i), mass = 0;
                return true;
            };
            u64 from = cut(limit, visit, [&](u64 count, u64) { return count >= (u64)wanted; });
            __syncthreads();
            if (threadIdx.x == 0) found = 0;
            __syncthreads();
            for (u32 i = threadIdx.x; i < limit; i += BLOCK) {
                float logit = not_nan(logits[i]);
                if (key_of(logit, i) < from) continue;
                u32 slot = atomicAdd(&found, 1u);
                if (slot < p.top_capacity) p.top[(size_t)blockIdx.x * p.top_capacity + slot] = TopToken{i, logit};
            }
            result.top_len = wanted;
        }
    }
    if (threadIdx.x == 0) p.results[blockIdx.x] = result;
}
