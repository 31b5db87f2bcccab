// Gated DeltaNet of one layer: the chunks of a prompt on tensor cores. What gdn_state.cuh declares stands before this
// file.
//
// With G_i the product of a chunk's first i decays: A_ij = β_i (G_i/G_j)(k̂_j·k̂_i) for j < i, P_ij = (G_i/G_j)(k̂_j·q̂_i)
// for j ≤ i; U = (I + A)⁻¹ diag(β) (V − diag(G) K S); O = diag(G) Q S + P U; S ← G_n S + Σ_j (G_n/G_j) k̂_j u_jᵀ.
//
// A warp has 16 value columns of one head, as the m16 side of every product, from the first chunk to the last: Sᵀ, Uᵀ
// and Oᵀ are accumulators of mma.m16n8k16, and an accumulator of one product is the left operand of the next without
// leaving the registers. Only A and P are shared. The triangular system is solved by blocks of 16 tokens with the
// inverses of its diagonal blocks.
//
// k̂, q̂ and v are bf16 already. What is not (S, U, A, P) enters as a sum of two bf16 terms, 16 bits of mantissa: products
// are exact to 2⁻¹⁶, halves of a state exact altogether. All sums are f32 and their order is fixed by the chunk.

#define CHUNK_WARPS 4
#define CHUNK_COLUMNS (CHUNK_WARPS * 16)
#define KEY_TILES ((KEY_DIM + 15) / 16)
#define TOKEN_TILES (CHUNK_TOKENS / 16)
// Elements of staged bf16 rows: an odd number of 16-byte pieces keeps eight rows off each other's banks.
#define KEY_STRIDE (KEY_TILES * 16 + 8)
#define VALUE_STRIDE (CHUNK_COLUMNS + 8)
#define WEIGHT_STRIDE (CHUNK_TOKENS + 8)
#define INVERSE_STRIDE 24

struct ChunkShared {
    u16 keys[CHUNK_TOKENS][KEY_STRIDE];
    u16 queries[CHUNK_TOKENS][KEY_STRIDE];
    u16 values[CHUNK_TOKENS][VALUE_STRIDE];
    u16 key_weights[2][CHUNK_TOKENS][WEIGHT_STRIDE];      // −A in two terms
    u16 query_weights[2][CHUNK_TOKENS][WEIGHT_STRIDE];    // P in two terms
    u16 inverses[2][TOKEN_TILES][16][INVERSE_STRIDE];     // of I + A's diagonal blocks, in two terms
    float diagonal[TOKEN_TILES][16][16];                  // −A's diagonal blocks
    float log_high[CHUNK_TOKENS], log_low[CHUNK_TOKENS];  // log G_i in two terms: f64 is slow on many cards
    float decays[CHUNK_TOKENS], to_end[CHUNK_TOKENS];     // G_i and G_n / G_i
    float betas[CHUNK_TOKENS];
};

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Two values as bf16 pairs whose sum they are to 16 bits.
__device__ __forceinline__ void split_pair(float x, float y, u32 &first, u32 &second) {
    first = pack_bf16(x, y);
    second = pack_bf16(x - low_bf16(first), y - high_bf16(first));
}

// A left operand (16 value columns, 16 of what is summed over) in two terms.
struct Split {
    u32 first[4], second[4];
};

// Two neighbouring accumulators as a left operand.
__device__ __forceinline__ Split split_tiles(const float (&a)[4], const float (&b)[4]) {
    Split split;
    split_pair(a[0], a[1], split.first[0], split.second[0]);
    split_pair(a[2], a[3], split.first[1], split.second[1]);
    split_pair(b[0], b[1], split.first[2], split.second[2]);
    split_pair(b[2], b[3], split.first[3], split.second[3]);
    return split;
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbouring accumulators += both terms of a left operand times 16 × 16 exact values.
__device__ __forceinline__ void multiply_exact(float (&x)[4], float (&y)[4], const Split &a, const u32 (&b)[4]) {
    multiply(x, a.first, b[0], b[1]), multiply(y, a.first, b[2], b[3]);
    multiply(x, a.second, b[0], b[1]), multiply(y, a.second, b[2], b[3]);
}

// The same with 16 × 16 values in two terms; the product of the second terms is below what counts.
__device__ __forceinline__ void multiply_split(float (&x)[4], float (&y)[4], const Split &a, const u32 (&first)[4],
                                               const u32 (&second)[4]) {
    multiply_exact(x, y, a, first);
    multiply(x, a.first, second[0], second[1]), multiply(y, a.first, second[2], second[3]);
}

// Four 8 × 8 matrices of bf16 from shared memory; a lane names a row, see the callers.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}

// Right operand (16 to sum over, 16 tokens) whose tokens are rows of `rows`: the tile's first row and column.
template <int STRIDE> __device__ __forceinline__ void load_rows(u32 (&b)[4], const u16 (*rows)[STRIDE], u32 row, u32 col) {
    u32 lane = threadIdx.x & 31;
    load_matrices(b, &rows[row + lane / 16 * 8 + lane % 8][col + lane / 8 % 2 * 8]);
}
// Right operand (16 tokens to sum over, 16 columns) from rows of tokens.
template <int STRIDE>
__device__ __forceinline__ void load_columns(u32 (&b)[4], const u16 (*rows)[STRIDE], u32 row, u32 col) {
    u32 lane = threadIdx.x & 31;
    load_matrices_transposed(b, &rows[row + lane / 8 % 2 * 8 + lane % 8][col + lane / 16 * 8]);
}
// Left operand (16 tokens, 16 to sum over) from rows of tokens.
template <int STRIDE> __device__ __forceinline__ void load_left(u32 (&a)[4], const u16 (*rows)[STRIDE], u32 row, u32 col) {
    u32 lane = threadIdx.x & 31;
    load_matrices(a, &rows[row + lane % 16][col + lane / 16 * 8]);
}

// Columns of a chunk's rows as bf16, WIDTH at a time; rows and columns that are not there are 0.
template <int WIDTH, int COLS, int STRIDE>
__device__ __forceinline__ void stage(u16 (*to)[STRIDE], const float *from, u32 from_cols, u32 rows, u32 cols) {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < CHUNK_TOKENS * (COLS / WIDTH); i += CHUNK_WARPS * 32) {
        u32 row = i / (COLS / WIDTH), col = i % (COLS / WIDTH) * WIDTH;
        const float *source = from + (size_t)row * from_cols + col;
        bool real = row < rows && col < cols;
        if (WIDTH == 4) {
            float4 v = real ? *(const float4 *)source : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            *(uint2 *)&to[row][col] = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        } else {
            to[row][col] = real ? f32_to_bf16(*source) : (u16)0;
        }
    }
}

// q̂, k̂ and the block's columns of v.
template <int WIDTH> __device__ __forceinline__ void stage_rows(const ScanParams &p, ChunkShared &s, Chunk chunk, u32 head) {
    const float *mixed = p.mixed + (size_t)chunk.first_row * p.mixed_cols, *query = mixed + KEY_HEAD(head) * KEY_DIM;
    u32 first_col = blockIdx.x * CHUNK_COLUMNS;
    const float *value = mixed + 2 * KEY_COLUMNS + head * VALUE_DIM + first_col;
    stage<WIDTH, KEY_TILES * 16>(s.queries, query, p.mixed_cols, chunk.rows, KEY_DIM);
    stage<WIDTH, KEY_TILES * 16>(s.keys, query + KEY_COLUMNS, p.mixed_cols, chunk.rows, KEY_DIM);
    stage<WIDTH, CHUNK_COLUMNS>(s.values, value, p.mixed_cols, chunk.rows, VALUE_DIM - first_col);
}

// Gates of a chunk, by one warp with two tokens a lane. Tokens that are not there forget nothing and write nothing.
__device__ __forceinline__ void stage_gates(const ScanParams &p, ChunkShared &s, Chunk chunk, u32 head) {
    u32 lane = threadIdx.x & 31;
    double logs[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 token = 2 * lane + i;
        const float *row = p.mixed + (size_t)(chunk.first_row + token) * p.mixed_cols;
        logs[i] = token < chunk.rows ? (double)row[LOG_DECAY_COLUMN + head] : 0.0;
        s.betas[token] = token < chunk.rows ? row[BETA_COLUMN + head] : 0.0f;
    }
    logs[1] += logs[0];
    double before = logs[1];
#pragma unroll
    for (u32 offset = 1; offset < 32; offset *= 2) {
        double other = __shfl_up_sync(0xffffffffu, before, offset);
        if (lane >= offset) before += other;
    }
    double end = __shfl_sync(0xffffffffu, before, 31);
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) before = 0.0;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        double log = before + logs[i];
        u32 token = 2 * lane + i;
        s.log_high[token] = (float)log;
        s.log_low[token] = (float)(log - (double)(float)log);
        s.decays[token] = expf((float)log);
        s.to_end[token] = expf((float)(end - log));
    }
}

// −A or P: 16 rows of it are a warp's at a time, short ones of the one kind with long ones of the other.
__device__ __forceinline__ void make_weights(ChunkShared &s) {
    u32 lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    for (u32 job = threadIdx.x / 32; job < 2 * TOKEN_TILES; job += CHUNK_WARPS) {
        bool of_keys = job < TOKEN_TILES;
        u32 tile = of_keys ? job : 2 * TOKEN_TILES - 1 - job;
        float sums[2 * TOKEN_TILES][4] = {};
#pragma unroll
        for (u32 k = 0; k < KEY_TILES; k++) {
            u32 a[4], b[4];
            load_left(a, of_keys ? s.keys : s.queries, tile * 16, k * 16);
#pragma unroll
            for (u32 other = 0; other < TOKEN_TILES; other++) {
                if (other > tile) break;
                load_rows(b, s.keys, other * 16, k * 16);
                multiply(sums[2 * other], a, b[0], b[1]), multiply(sums[2 * other + 1], a, b[2], b[3]);
            }
        }
        u16(*weights)[CHUNK_TOKENS][WEIGHT_STRIDE] = of_keys ? s.key_weights : s.query_weights;
#pragma unroll
        for (u32 n = 0; n < 2 * TOKEN_TILES; n++) {
            if (n / 2 > tile) break;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 i = tile * 16 + g + half * 8, j = n * 8 + 2 * t;
                float scale = of_keys ? -s.betas[i] : 1.0f, pair[2];
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    float log = (s.log_high[i] - s.log_high[j + e]) + (s.log_low[i] - s.log_low[j + e]);
                    bool counts = of_keys ? j + e < i : j + e <= i;
                    pair[e] = counts ? scale * __expf(log) * sums[n][half * 2 + e] : 0.0f;
                }
                u32 first, second;
                split_pair(pair[0], pair[1], first, second);
                *(u32 *)&weights[0][i][j] = first, *(u32 *)&weights[1][i][j] = second;
                if (of_keys && n / 2 == tile) *(float2 *)&s.diagonal[tile][i % 16][j % 16] = make_float2(pair[0], pair[1]);
            }
        }
    }
}

// (I + A)⁻¹ of the diagonal blocks by forward substitution: a block is a warp's, a column a lane's.
__device__ __forceinline__ void invert_blocks(ChunkShared &s) {
    u32 lane = threadIdx.x & 31;
    if (lane >= 16) return;
    for (u32 tile = threadIdx.x / 32; tile < TOKEN_TILES; tile += CHUNK_WARPS) {
        float column[16];
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            column[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
            for (u32 j = 0; j < i; j++) column[i] = fmaf(s.diagonal[tile][i][j], column[j], column[i]);
            u16 first = f32_to_bf16(column[i]);
            s.inverses[0][tile][i][lane] = first;
            s.inverses[1][tile][i][lane] = f32_to_bf16(column[i] - bf16_to_f32(first));
        }
    }
}

// What a warp has of a chunk: accumulators of 16 value columns (rows g and g + 8) and all tokens.
typedef float TokenTiles[2 * TOKEN_TILES][4];

// K S or Q S.
__device__ __forceinline__ void read_state(const u16 (*rows)[KEY_STRIDE], const float (&state)[2 * KEY_TILES][4],
                                           TokenTiles &sums) {
#pragma unroll
    for (u32 k = 0; k < KEY_TILES; k++) {
        Split part = split_tiles(state[2 * k], state[2 * k + 1]);
#pragma unroll
        for (u32 tile = 0; tile < TOKEN_TILES; tile++) {
            u32 b[4];
            load_rows(b, rows, tile * 16, k * 16);
            multiply_exact(sums[2 * tile], sums[2 * tile + 1], part, b);
        }
    }
}

// U from the right-hand sides, block after block of 16 tokens.
__device__ __forceinline__ void solve(const ChunkShared &s, TokenTiles &right, Split (&u)[TOKEN_TILES]) {
#pragma unroll
    for (u32 block = 0; block < TOKEN_TILES; block++) {
        Split known = split_tiles(right[2 * block], right[2 * block + 1]);
        u32 first[4], second[4];
        load_rows(first, s.inverses[0][block], 0, 0), load_rows(second, s.inverses[1][block], 0, 0);
        float x[4] = {}, y[4] = {};
        multiply_split(x, y, known, first, second);
        u[block] = split_tiles(x, y);
#pragma unroll
        for (u32 later = block + 1; later < TOKEN_TILES; later++) {
            load_rows(first, s.key_weights[0], later * 16, block * 16);
            load_rows(second, s.key_weights[1], later * 16, block * 16);
            multiply_split(right[2 * later], right[2 * later + 1], u[block], first, second);
        }
    }
}

// O += P U.
__device__ __forceinline__ void read_chunk(const ChunkShared &s, const Split (&u)[TOKEN_TILES], TokenTiles &output) {
#pragma unroll
    for (u32 block = 0; block < TOKEN_TILES; block++)
#pragma unroll
        for (u32 tile = block; tile < TOKEN_TILES; tile++) {
            u32 first[4], second[4];
            load_rows(first, s.query_weights[0], tile * 16, block * 16);
            load_rows(second, s.query_weights[1], tile * 16, block * 16);
            multiply_split(output[2 * tile], output[2 * tile + 1], u[block], first, second);
        }
}

// Two values in two terms, times two factors.
__device__ __forceinline__ void scale_pair(u32 &first, u32 &second, float x, float y) {
    split_pair((low_bf16(first) + low_bf16(second)) * x, (high_bf16(first) + high_bf16(second)) * y, first, second);
}

// S ← round(G_n S + Σ_j (G_n/G_j) k̂_j u_jᵀ).
__device__ __forceinline__ void write_state(const ChunkShared &s, Split (&u)[TOKEN_TILES], float (&state)[2 * KEY_TILES][4]) {
    u32 t = threadIdx.x % 4;
    float decay = s.decays[CHUNK_TOKENS - 1];
#pragma unroll
    for (u32 n = 0; n < 2 * KEY_TILES; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) state[n][e] *= decay;
#pragma unroll
    for (u32 block = 0; block < TOKEN_TILES; block++) {
        const float *to_end = s.to_end + block * 16 + 2 * t;
#pragma unroll
        for (u32 part = 0; part < 4; part++)
            scale_pair(u[block].first[part], u[block].second[part], to_end[part / 2 * 8], to_end[part / 2 * 8 + 1]);
#pragma unroll
        for (u32 k = 0; k < KEY_TILES; k++) {
            u32 b[4];
            load_columns(b, s.keys, block * 16, k * 16);
            multiply_exact(state[2 * k], state[2 * k + 1], u[block], b);
        }
    }
#pragma unroll
    for (u32 n = 0; n < 2 * KEY_TILES; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) state[n][e] = round_state(state[n][e]);
}

// The warp's columns of a chunk, once everything shared is there.
__device__ __forceinline__ void run_columns(const ScanParams &p, ChunkShared &s, Chunk chunk, u32 first_value_column,
                                            float (&state)[2 * KEY_TILES][4], u32 columns) {
    u32 lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    TokenTiles right = {};
    read_state(s.keys, state, right);
#pragma unroll
    for (u32 tile = 0; tile < TOKEN_TILES; tile++) {
        // Tokens 2 t and 2 t + 1 of the tile's first half, of its second half, in column g, then in column g + 8.
        u32 values[4];
        load_columns(values, s.values, tile * 16, threadIdx.x / 32 * 16);
#pragma unroll
        for (u32 e = 0; e < 8; e++) {
            u32 n = 2 * tile + e / 4, token = n * 8 + 2 * t + e % 2, pair = values[e / 2 % 2 * 2 + e / 4];
            float value = e % 2 ? high_bf16(pair) : low_bf16(pair);
            right[n][e % 4] = s.betas[token] * (value - s.decays[token] * right[n][e % 4]);
        }
    }
    Split u[TOKEN_TILES];
    solve(s, right, u);
    // The state is split anew: kept from the first time, its terms would take 64 registers that are not there.
#pragma unroll
    for (u32 n = 0; n < 2 * KEY_TILES; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) asm volatile("" : "+f"(state[n][e]));
    TokenTiles output = {};
    read_state(s.queries, state, output);
#pragma unroll
    for (u32 n = 0; n < 2 * TOKEN_TILES; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) output[n][e] *= s.decays[n * 8 + 2 * t + e % 2];
    read_chunk(s, u, output);
    activation *out = p.out + (size_t)(chunk.first_row + 2 * t) * p.out_cols + first_value_column + g;
#pragma unroll
    for (u32 n = 0; n < 2 * TOKEN_TILES; n++, out += 8 * p.out_cols)
#pragma unroll
        for (u32 e = 0; e < 4; e++)
            if (n * 8 + 2 * t + e % 2 < chunk.rows && g + e / 2 * 8 < columns)
                out[e % 2 * p.out_cols + e / 2 * 8] = to_activation(output[n][e]);
    write_state(s, u, state);
}

// CHUNK_COLUMNS columns of one value head of one span. grid (ceil(VALUE_DIM / CHUNK_COLUMNS), VALUE_HEADS, spans)
extern "C" __global__ void __launch_bounds__(CHUNK_WARPS * 32, 1) scan_chunks(const ScanParams p) {
    start_in_order();
    extern __shared__ __align__(16) u8 memory[];
    ChunkShared &s = *(ChunkShared *)memory;
    if (!has_span(p.step, blockIdx.z)) return;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, head = blockIdx.y;
    u32 first_col = blockIdx.x * CHUNK_COLUMNS + warp * 16;
    // Columns of the warp that exist; a warp without any still makes weights.
    u32 columns = first_col < VALUE_DIM ? min(16, VALUE_DIM - first_col) : 0;
    bool is_aligned = KEY_DIM % 4 == 0 && VALUE_DIM % 4 == 0 && p.mixed_cols % 4 == 0;
    Span span = p.step.spans[blockIdx.z];
    stored *base = p.base + ((size_t)span.slot * VALUE_HEADS + head) * STATE + first_col;
    float state[2 * KEY_TILES][4];
#pragma unroll
    for (u32 n = 0; n < 2 * KEY_TILES; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            u32 d = n * 8 + 2 * t + e % 2, col = g + e / 2 * 8;
            state[n][e] = d < KEY_DIM && col < columns ? widen(base[d * VALUE_DIM + col]) : 0.0f;
        }
    for (u32 i = 0; i < span.chunks; i++) {
        Chunk chunk = p.step.chunks[span.first_chunk + i];
        if (is_aligned) stage_rows<4>(p, s, chunk, head);
        else stage_rows<1>(p, s, chunk, head);
        if (warp == 0) stage_gates(p, s, chunk, head);
        __syncthreads();
        make_weights(s);
        __syncthreads();
        invert_blocks(s);
        __syncthreads();
        if (columns > 0) run_columns(p, s, chunk, head * VALUE_DIM + first_col, state, columns);
        __syncthreads();
    }
#pragma unroll
    for (u32 n = 0; n < 2 * KEY_TILES; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            u32 d = n * 8 + 2 * t + e % 2, col = g + e / 2 * 8;
            if (d < KEY_DIM && col < columns) base[d * VALUE_DIM + col] = narrow(state[n][e]);
        }
}
