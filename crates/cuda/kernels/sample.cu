// Drawing tokens without sorting, and log-probabilities.
//
// `tiles` reads all logits: the largest of every tile of 128 tokens (NaN where the tile has one) and, for log-probabilities,
// the tile's sum of exponentials; rows with a mask, penalties, bias or banned ids get an adjusted copy. `sample`, a block per
// row, ends a row at once whose logits are no distribution, so that all after that sees numbers and −∞ alone. It looks into
// those tiles only that can hold a token in question.
//
// A token is a 64-bit key: its logit mapped to an ordered integer, then the complement of its id, so that keys differ
// and the larger key is the likelier token, the smaller id among equals. Cuts (top-k, top-p) are found by fixing the
// key's bytes from the top, with counts or masses per byte value. Masses are integers (2^40 for the likeliest token):
// integer sums do not depend on their order.
#include "common.cuh"

#define BLOCK 512
#define TILE 128
#define TILES_BLOCK 256
#define TILES_A_WARP 4
#define BLOCK_TILES (TILES_BLOCK / 32 * TILES_A_WARP)
#define BLOCK_TOKENS (BLOCK_TILES * TILE)

struct SampleRow {
    u64 seed, position;
    const u32 *seen;   // (id, occurrences) pairs
    const u32 *bias;   // (id, f32 bits) pairs
    const u32 *banned; // ids
    const u32 *mask;   // a bit for each id below the limit; null: all of them
    u32 seen_len, bias_len, banned_len;
    u32 logits_row, vocab_limit, top_k, top, flags;
    float temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
    u32 token; // given, where FLAG_DRAW is not set
    u32 unused;
};
#define UNSOUND 0xffffffffu // no token: the logits are no distribution
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
    float *adjusted; // `[rows of this launch, logits_cols]`
    float *maxima;   // `[rows of this launch, 2, tiles]`: of logits as they are, of adjusted ones
    double *sums;    // `[rows of this launch, tiles]`: Σ e^(logit − the tile's largest)
    const SampleRow *rows;
    SampleResult *results;
    TopToken *top; // `[rows of this launch, top_capacity]`
    u32 logits_cols, tiles, top_capacity, unused;
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
__device__ __forceinline__ bool is_adjusted(const SampleRow &row) {
    return (row.flags & FLAG_DRAW) && (row.mask || row.seen_len + row.bias_len + row.banned_len > 0);
}
__device__ __forceinline__ bool is_in_mask(const SampleRow &row, u32 token) {
    return !row.mask || row.mask[token / 32] >> (token % 32) & 1;
}

// Penalties and bias on the block's tokens, which begin with `first`; what is banned becomes −∞, as what is no number then.
__device__ void adjust(const SampleRow &row, float *logits, u32 first, u32 limit) {
    u32 tokens = min(limit - first, BLOCK_TOKENS);
    for (u32 i = threadIdx.x; i < row.seen_len; i += TILES_BLOCK) {
        u32 at = row.seen[2 * i] - first, occurrences = row.seen[2 * i + 1];
        if (at >= tokens) continue;
        float logit = logits[at];
        logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        logit = __fsub_rn(logit, __fmul_rn(row.frequency_penalty, (float)occurrences));
        if (occurrences > 0) logit = __fsub_rn(logit, row.presence_penalty);
        logits[at] = not_nan(logit);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.bias_len; i += TILES_BLOCK) {
        u32 token = row.bias[2 * i], at = token - first;
        if (at >= tokens) continue;
        // An id may come more than once: the thread of its first entry adds them all, in their order.
        bool repeated = false;
        for (u32 before = 0; before < i; before++) repeated |= row.bias[2 * before] == token;
        for (u32 entry = i; !repeated && entry < row.bias_len; entry++)
            if (row.bias[2 * entry] == token)
                logits[at] = not_nan(logits[at] + __uint_as_float(row.bias[2 * entry + 1]));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.banned_len; i += TILES_BLOCK)
        if (row.banned[i] - first < tokens) logits[row.banned[i] - first] = -INFINITY_F32;
    __syncthreads();
}

// grid (ceil(tiles / BLOCK_TILES), rows)
extern "C" __global__ void __launch_bounds__(TILES_BLOCK) tiles(const SampleParams p) {
    __shared__ float copy[BLOCK_TOKENS];
    start_in_order();
    const SampleRow row = p.rows[blockIdx.y];
    const float *logits = p.logits + (size_t)row.logits_row * p.logits_cols;
    u32 limit = min(row.vocab_limit, p.logits_cols), first = blockIdx.x * BLOCK_TOKENS;
    u32 lane = threadIdx.x & 31, first_tile = threadIdx.x / 32 * TILES_A_WARP;
    float *maxima = p.maxima + (size_t)blockIdx.y * 2 * p.tiles + blockIdx.x * BLOCK_TILES;
    double *sums = p.sums + (size_t)blockIdx.y * p.tiles + blockIdx.x * BLOCK_TILES;
    bool adjusted = is_adjusted(row);
    if (first >= limit) return;

    float values[TILES_A_WARP][TILE / 32];
#pragma unroll
    for (u32 i = 0; i < TILES_A_WARP; i++)
#pragma unroll
        for (u32 j = 0; j < TILE / 32; j++) {
            u32 at = (first_tile + i) * TILE + j * 32 + lane;
            values[i][j] = first + at < limit ? logits[first + at] : -INFINITY_F32;
            if (adjusted)
                copy[at] = first + at < limit && is_in_mask(row, first + at) ? values[i][j] : -INFINITY_F32;
        }
#pragma unroll
    for (u32 i = 0; i < TILES_A_WARP; i++) {
        u32 tile = first_tile + i;
        if (blockIdx.x * BLOCK_TILES + tile >= p.tiles) break;
        float largest = values[i][0];
        bool nan = largest != largest;
#pragma unroll
        for (u32 j = 1; j < TILE / 32; j++) {
            largest = fmaxf(largest, values[i][j]);
            nan |= values[i][j] != values[i][j];
        }
        largest = warp_max(largest);
        if (__any_sync(0xffffffffu, nan)) largest = __int_as_float(0x7fffffff);
        if (lane == 0) maxima[tile] = largest;
        if (!(row.flags & FLAG_REPORT)) continue;
        double sum = 0.0;
        for (u32 j = 0; j < TILE / 32; j++) {
            if (first + tile * TILE + j * 32 + lane >= limit) break;
            // Equal infinities differ by nothing.
            sum += values[i][j] == largest ? 1.0 : exp((double)values[i][j] - (double)largest);
        }
        for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane == 0) sums[tile] = sum;
    }
    if (!adjusted) return;
    __syncthreads();
    adjust(row, copy, first, limit);
    float *to = p.adjusted + (size_t)blockIdx.y * p.logits_cols + first;
    for (u32 i = 0; i < TILES_A_WARP; i++) {
        u32 tile = first_tile + i;
        float largest = -INFINITY_F32;
        for (u32 at = tile * TILE + lane; at < (tile + 1) * TILE && first + at < limit; at += 32) {
            to[at] = copy[at];
            largest = fmaxf(largest, copy[at]);
        }
        largest = warp_max(largest);
        if (lane == 0 && blockIdx.x * BLOCK_TILES + tile < p.tiles) maxima[p.tiles + tile] = largest;
    }
}

// A row of logits with the largest of each tile.
struct Logits {
    const float *values, *maxima;
    u32 limit, tiles; // of tokens below the limit
};

#define MOST_CANDIDATES 2048
// Most likely tokens that are looked for among candidates: tiles hold more tokens than the one that chose them.
#define MOST_NARROWED (MOST_CANDIDATES / 4)

__shared__ u64 warp_keys[32];
__shared__ double warp_sums[32];
__shared__ u32 counts[256];
__shared__ u64 masses[256];
__shared__ u64 shared_sum;
__shared__ struct {
    u64 digit, count, count_above, mass_above;
} found;
__shared__ u32 candidate_count;
__shared__ u32 candidate_tokens[MOST_CANDIDATES];
__shared__ float candidate_logits[MOST_CANDIDATES];

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
    if (threadIdx.x == 0) shared_sum = 0;
    __syncthreads();
    if (value) atomicAdd(&shared_sum, value);
    __syncthreads();
    return shared_sum;
}

// By the first warp: the largest digit at which `reached` holds of the counts and masses from 255 down to it.
template <typename Reached> __device__ void find_digit(u64 count_above, u64 mass_above, Reached reached) {
    u32 lane = threadIdx.x, first = 255 - lane * 8;
    u64 own_count = 0, own_mass = 0;
    for (u32 i = 0; i < 8; i++) own_count += counts[first - i], own_mass += masses[first - i];
    u64 count = own_count, mass = own_mass;
    for (int offset = 1; offset < 32; offset <<= 1) {
        u64 other_count = __shfl_up_sync(0xffffffffu, count, offset);
        u64 other_mass = __shfl_up_sync(0xffffffffu, mass, offset);
        if (lane >= offset) count += other_count, mass += other_mass;
    }
    count += count_above - own_count, mass += mass_above - own_mass;
    int digit = -1;
    for (u32 i = 0; i < 8; i++) {
        u32 here = first - i;
        if (counts[here] && reached(count + counts[here], mass + masses[here])) {
            digit = here;
            break;
        }
        count += counts[here], mass += masses[here];
    }
    u32 lanes = __ballot_sync(0xffffffffu, digit >= 0);
    if (lane == (lanes ? __ffs(lanes) - 1 : 0)) found = {(u64)(digit + 1), digit < 0 ? 0 : counts[digit], count, mass};
}

// The key below which everything is cut, from the likeliest of `len` entries down, when `reached(count, mass)` first
// holds: the counts and masses are those of all entries down to and with the key. `key_at(entry)` is 0 for entries that
// are out of it. 0 when it never holds. Where no more than `enough` entries are left above it, a smaller key will do.
template <typename KeyAt, typename MassAt, typename Reached>
__device__ u64 cut(u32 len, u64 enough, KeyAt key_at, MassAt mass_at, Reached reached) {
    u64 prefix = 0, count_above = 0, mass_above = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) counts[threadIdx.x] = 0, masses[threadIdx.x] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < len; i += BLOCK) {
            u64 key = key_at(i);
            if (!key || (shift < 56 && key >> (shift + 8) != prefix >> (shift + 8))) continue;
            u32 digit = key >> shift & 255;
            atomicAdd(&counts[digit], 1u);
            u64 mass = mass_at(i);
            if (mass) atomicAdd(&masses[digit], mass);
        }
        __syncthreads();
        if (threadIdx.x < 32) find_digit(count_above, mass_above, reached);
        __syncthreads();
        if (found.digit == 0) return 0;
        prefix |= (found.digit - 1) << shift;
        count_above = found.count_above, mass_above = found.mass_above;
        // A single entry has that prefix: it and all above it are kept.
        if (found.count == 1 || count_above + found.count <= enough) return prefix;
    }
    return prefix;
}

__device__ __forceinline__ u64 no_mass(u32) { return 0; }

__device__ __forceinline__ u64 mix(u64 bits) {
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
    return bits ^ bits >> 31;
}
// The 24 bits that a token's noise is made of.
__device__ __forceinline__ u32 noise_bits(const SampleRow &row, u32 token) {
    u64 key = mix(row.seed ^ 0x9e3779b97f4a7c15ull);
    key = mix(key ^ row.position * 0xd1b54a32d192ed03ull);
    return mix(key ^ (u64)token * 0x8cb92ba72f3d8dd7ull) >> 40;
}
__device__ __noinline__ float gumbel(u32 bits) {
    return (float)(-log(-log(((double)bits + 0.5) / 16777216.0)));
}
// Whether noise of these bits could be more than `least`: −ln(−ln u) > d needs 1 − u ≤ −ln u < e^−d. Few tokens get past
// this, and f64 logarithms are slow on most cards.
__device__ __forceinline__ bool may_exceed(u32 bits, float least) {
    return (16777215.5f - (float)bits) * (1.0f / 16777216.0f) < 1.001f * expf(-least) + 1e-7f;
}
// Noise lies between −2.9 and 17.4: a token this far below the likeliest one cannot win.
#define NOISE_SPAN 21.0f
// e^−28 of 2^40 is less than 1: a token this far below the likeliest one has no mass.
#define MASS_SPAN 28.0f

// Makes the tokens with at least this logit the candidates; false where they are too many.
__device__ __noinline__ bool gather_from(const Logits &logits, float from) {
    u32 lane = threadIdx.x & 31;
    __syncthreads();
    if (threadIdx.x == 0) candidate_count = 0;
    __syncthreads();
    for (u32 base = threadIdx.x - lane; base < logits.tiles; base += BLOCK) {
        bool wanted = base + lane < logits.tiles && logits.maxima[base + lane] >= from;
        for (u32 tiles = __ballot_sync(0xffffffffu, wanted); tiles; tiles &= tiles - 1) {
            u32 first = (base + __ffs(tiles) - 1) * TILE + lane;
            for (u32 token = first; token < min(first - lane + TILE, logits.limit); token += 32) {
                float logit = logits.values[token];
                if (!(logit >= from)) continue;
                u32 slot = atomicAdd(&candidate_count, 1u);
                if (slot < MOST_CANDIDATES) candidate_tokens[slot] = token, candidate_logits[slot] = logit;
            }
        }
    }
    __syncthreads();
    return candidate_count <= MOST_CANDIDATES;
}

// Makes candidates among which the `count` likeliest tokens are; false where they are too many.
__device__ __noinline__ bool gather_likeliest(const Logits &logits, u32 count) {
    if (count > MOST_NARROWED) return false;
    // So many tiles have a token that large.
    u64 from = cut(
        logits.tiles, count + MOST_NARROWED / 4,
        [&](u32 tile) -> u64 {
            return logits.maxima[tile] > -INFINITY_F32 ? key_of(logits.maxima[tile], tile) : 0;
        },
        no_mass, [&](u64 reached, u64) { return reached >= count; });
    return from && gather_from(logits, logit_of(from));
}

// Tokens to look through: candidates, or all.
template <bool LISTED> struct Tokens {
    const Logits &logits;
    __device__ __forceinline__ u32 len() const { return LISTED ? candidate_count : logits.limit; }
    __device__ __forceinline__ u32 token(u32 i) const { return LISTED ? candidate_tokens[i] : i; }
    __device__ __forceinline__ float logit(u32 i) const {
        return LISTED ? candidate_logits[i] : logits.values[i];
    }
};

// Whether the logits are a distribution: none is NaN or +∞, and one at least is a number.
__device__ bool is_sound(const Logits &logits) {
    bool fit = true, any = false;
    for (u32 tile = threadIdx.x; tile < logits.tiles; tile += BLOCK) {
        float largest = logits.maxima[tile];
        fit &= largest < INFINITY_F32; // NaN is not
        any |= largest > -INFINITY_F32;
    }
    // Both for the whole block, in this order: every thread takes part in both.
    fit = __syncthreads_and(fit), any = __syncthreads_or(any);
    return fit && any;
}

// The likeliest token's key; 0 where no token can be drawn.
__device__ __noinline__ u64 likeliest(const Logits &logits) {
    u64 best = 0;
    for (u32 tile = threadIdx.x; tile < logits.tiles; tile += BLOCK)
        if (logits.maxima[tile] > -INFINITY_F32) best = max(best, key_of(logits.maxima[tile], tile));
    best = block_max(best);
    if (!best) return 0;
    u32 token = token_of(best) * TILE + threadIdx.x;
    u64 key = threadIdx.x < TILE && token < logits.limit ? key_of(logits.values[token], token) : 0;
    return block_max(key);
}

// Nothing may be drawn: of those in the mask the largest logit that is not banned, or the largest of all.
__device__ u32 fallback(const SampleRow &row, const float *logits, float *scratch, u32 limit) {
    for (u32 token = threadIdx.x; token < limit; token += BLOCK) scratch[token] = logits[token];
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.banned_len; i += BLOCK)
        if (row.banned[i] < limit) scratch[row.banned[i]] = __int_as_float(0x7fffffff); // NaN: banned
    __syncthreads();
    u64 allowed = 0, any = 0;
    for (u32 token = threadIdx.x; token < limit; token += BLOCK) {
        if (!is_in_mask(row, token)) continue;
        any = max(any, key_of(logits[token], token));
        if (scratch[token] == scratch[token]) allowed = max(allowed, key_of(scratch[token], token));
    }
    allowed = block_max(allowed), any = block_max(any);
    return allowed ? token_of(allowed) : any ? token_of(any) : 0;
}

// The filters and the noise of a row over some tokens; `top` is the likeliest one's logit over the temperature.
template <bool LISTED> struct Draw {
    const SampleRow &row;
    const Tokens<LISTED> tokens;
    float top;

    // The logit over the temperature; −∞ for a token that is out of the running.
    __device__ __forceinline__ float scaled(u32 i) const {
        float logit = __fdiv_rn(tokens.logit(i), row.temperature);
        if (!(row.min_p > 0.0f)) return logit;
        float below = __fsub_rn(logit, top), least = fminf(row.min_p, 1.0f);
        // The exact test is for those near the border.
        bool in = below >= logf(least) - 1e-3f && exp((double)below) >= (double)least;
        return in ? logit : -INFINITY_F32;
    }
    __device__ __forceinline__ u64 key(u32 i) const {
        float logit = scaled(i);
        return logit > -INFINITY_F32 ? key_of(logit, tokens.token(i)) : 0;
    }
    __device__ __forceinline__ u64 mass(u32 i) const {
        float logit = scaled(i);
        return logit > -INFINITY_F32 ? (u64)(expf(__fsub_rn(logit, top)) * 1099511627776.0f) : 0;
    }
    // Of tokens with at least this key.
    __device__ u64 mass_from(u64 least) const {
        u64 sum = 0;
#pragma unroll 4
        for (u32 i = threadIdx.x; i < tokens.len(); i += BLOCK) sum += key(i) >= least ? mass(i) : 0;
        return block_count(sum);
    }
    // The smallest key that top-k keeps.
    __device__ u64 most_likely(u64 wanted) const {
        u64 remaining = 0;
        for (u32 i = threadIdx.x; i < tokens.len(); i += BLOCK) remaining += key(i) > 0;
        if (block_count(remaining) <= wanted) return 1;
        return cut(
            tokens.len(), 0, [&](u32 i) { return key(i); }, no_mass,
            [&](u64 count, u64) { return count >= wanted; });
    }
    // The smallest key that is kept where this mass is to be reached, of tokens with at least a key.
    __device__ u64 nucleus(u64 least, double wanted) const {
        auto kept = [&](u32 i) -> u64 { u64 k = key(i); return k >= least ? k : 0; };
        return cut(
            tokens.len(), 0, kept, [&](u32 i) { return mass(i); },
            [&](u64, u64 mass) { return (double)mass >= wanted; });
    }
    // The largest logit with noise among tokens with at least a key; `sure` is one that can be had.
    __device__ u64 winner(u64 least, u64 sure) const {
        u64 best = sure;
#pragma unroll 4
        for (u32 i = threadIdx.x; i < tokens.len(); i += BLOCK) {
            float logit = scaled(i);
            if (logit < top - NOISE_SPAN) continue;
            u32 token = tokens.token(i), bits = noise_bits(row, token);
            if (!may_exceed(bits, logit_of(best) - logit) || key_of(logit, token) < least) continue;
            best = max(best, key_of(logit + gumbel(bits), token));
        }
        return block_max(best);
    }
    // Not inlined: six copies of it took 8 s to compile.
    __device__ __noinline__ u32 run(double nucleus_mass, u64 sure) const {
        u64 least = row.top_k > 0 ? most_likely(row.top_k) : 1;
        if (row.top_p < 1.0f) {
            double wanted = nucleus_mass < 0.0 ? (double)row.top_p * (double)mass_from(least) : nucleus_mass;
            least = max(least, nucleus(least, wanted));
        }
        return token_of(winner(least, sure));
    }
};

__device__ u32 draw(const SampleRow &row, const Logits &logits, const float *as_they_are, float *scratch) {
    u64 best = likeliest(logits);
    if (!best) return fallback(row, as_they_are, scratch, logits.limit);
    float top = __fdiv_rn(logit_of(best), row.temperature);
    if (!(row.temperature > 0.0f) || !(fabsf(top) < INFINITY_F32)) return token_of(best);

    // The likeliest token passes every filter.
    u64 sure = key_of(top + gumbel(noise_bits(row, token_of(best))), token_of(best));
    const Draw<true> few = {row, {logits}, top};
    const Draw<false> all = {row, {logits}, top};
    if (row.top_k > 0) {
        bool listed = gather_likeliest(logits, min(row.top_k, logits.limit));
        return listed ? few.run(-1.0, sure) : all.run(-1.0, sure);
    }
    // What min-p leaves, or what the noise can lift: one more, and what the division and this product may have lost.
    float span = row.top_p < 1.0f ? MASS_SPAN : NOISE_SPAN;
    if (row.min_p > 0.0f) span = fminf(span, -logf(fminf(row.min_p, 1.0f)));
    span += 1.0f + fabsf(top) * 1e-6f;
    if (gather_from(logits, (top - span) * row.temperature)) return few.run(-1.0, sure);
    if (row.top_p >= 1.0f) return all.run(-1.0, sure);
    // The nucleus is most often among a few hundred.
    double wanted = (double)row.top_p * (double)all.mass_from(1);
    bool listed = gather_likeliest(logits, MOST_NARROWED) && (double)few.mass_from(1) >= wanted;
    return listed ? few.run(wanted, sure) : all.run(wanted, sure);
}

// Writes the row's `wanted` likeliest tokens, in any order.
template <bool LISTED> __device__ __noinline__ void report_top(const Tokens<LISTED> tokens, u32 wanted, u32 capacity, TopToken *top) {
    u32 len = tokens.len();
    u64 from = cut(
        len, 0, [&](u32 i) { return key_of(tokens.logit(i), tokens.token(i)); }, no_mass,
        [&](u64 count, u64) { return count >= (u64)wanted; });
    __syncthreads();
    if (threadIdx.x == 0) shared_sum = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < len; i += BLOCK) {
        float logit = tokens.logit(i);
        u32 token = tokens.token(i);
        if (key_of(logit, token) < from) continue;
        u64 slot = atomicAdd(&shared_sum, 1ull);
        if (slot < capacity) top[slot] = TopToken{token, logit};
    }
}

// The distribution's sum, the token's logit and the likeliest ones.
__device__ void report(const SampleParams &p, const SampleRow &row, const Logits &logits, SampleResult &result) {
    u64 best = likeliest(logits);
    result.largest = best ? logit_of(best) : -INFINITY_F32;
    const double *sums = p.sums + (size_t)blockIdx.x * p.tiles;
    double total = 0.0;
    for (u32 tile = threadIdx.x; tile < logits.tiles; tile += BLOCK) {
        float largest = logits.maxima[tile];
        total += largest == result.largest ? sums[tile]
                                           : sums[tile] * exp((double)largest - (double)result.largest);
    }
    result.total = block_total(total);
    result.logit = result.token < logits.limit ? logits.values[result.token] : -INFINITY_F32;
    u32 wanted = min(row.top, logits.limit);
    result.top_len = wanted;
    if (!wanted) return;
    TopToken *top = p.top + (size_t)blockIdx.x * p.top_capacity;
    if (gather_likeliest(logits, wanted)) report_top(Tokens<true>{logits}, wanted, p.top_capacity, top);
    else report_top(Tokens<false>{logits}, wanted, p.top_capacity, top);
}

// grid (rows)
extern "C" __global__ void __launch_bounds__(BLOCK, 1) sample(const SampleParams p) {
    start_in_order();
    const SampleRow row = p.rows[blockIdx.x];
    u32 limit = min(row.vocab_limit, p.logits_cols);
    Logits logits = {p.logits + (size_t)row.logits_row * p.logits_cols, p.maxima + (size_t)blockIdx.x * 2 * p.tiles, limit,
                     (limit + TILE - 1) / TILE};
    SampleResult result = {};
    result.token = row.token;
    if (!is_sound(logits)) {
        if (threadIdx.x == 0) result.token = UNSOUND, p.results[blockIdx.x] = result;
        return;
    }
    if (row.flags & FLAG_DRAW) {
        float *adjusted = p.adjusted + (size_t)blockIdx.x * p.logits_cols;
        Logits drawn = logits;
        if (is_adjusted(row)) drawn.values = adjusted, drawn.maxima += p.tiles;
        result.token = draw(row, drawn, logits.values, adjusted);
    }
    if (row.flags & FLAG_REPORT) report(p, row, logits, result);
    if (threadIdx.x == 0) p.results[blockIdx.x] = result;
}
