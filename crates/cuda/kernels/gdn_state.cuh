// What the two Gated DeltaNet units share; it stands before each of them when they are compiled.
// Compiled for: KEY_HEADS, VALUE_HEADS, KEY_DIM and VALUE_DIM (at most 128), CONV_WIDTH, STATE_F16.
//
// Base states are `[slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]`, rings `[slots, RING_TOKENS, RING_ENTRY]` with entries
// `k̂ of the key heads | u`, both in the state type; the log-decays of the entries `[slots, RING_TOKENS, VALUE_HEADS]`
// are f32. Sums of log-decays are f64: after a token that forgets everything the small differences between the
// following sums would be lost in f32.
#include "common.cuh"

#define KEY_COLUMNS (KEY_HEADS * KEY_DIM)
#define VALUE_COLUMNS (VALUE_HEADS * VALUE_DIM)
#define CHANNELS (2 * KEY_COLUMNS + VALUE_COLUMNS)
#define B_COLUMN (CHANNELS + VALUE_COLUMNS)
#define A_COLUMN (B_COLUMN + VALUE_HEADS)
#define LOG_DECAY_COLUMN CHANNELS
#define BETA_COLUMN (CHANNELS + VALUE_HEADS)
#define RING_ENTRY (KEY_COLUMNS + VALUE_COLUMNS)
#define STATE (KEY_DIM * VALUE_DIM)
#define GROUP_HEADS (VALUE_HEADS / KEY_HEADS)
#define KEY_HEAD(HEAD) ((HEAD) / GROUP_HEADS)

// An element of a base state, `k̂` or `u` as stored, and a raw convolution input. Halves saturate; NaN stays NaN.
#if STATE_F16
typedef u16 stored;
typedef u16 stored_input;
__device__ __forceinline__ float widen(stored bits) { return f16_to_f32(bits); }
__device__ __forceinline__ stored narrow(float value) {
    value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ float widen_input(stored_input bits) { return bf16_to_f32(bits); }
__device__ __forceinline__ stored_input narrow_input(float value) { return f32_to_bf16(value); }
#else
typedef float stored;
typedef float stored_input;
__device__ __forceinline__ float widen(stored value) { return value; }
__device__ __forceinline__ stored narrow(float value) { return value; }
__device__ __forceinline__ float widen_input(stored_input value) { return value; }
__device__ __forceinline__ stored_input narrow_input(float value) { return value; }
#endif
__device__ __forceinline__ float round_state(float value) { return widen(narrow(value)); }

struct ScanParams {
    Step step;
    const float *mixed;
    stored *base; // all of this layer
    stored *ring;
    float *log_decays;
    u32 *readers; // `[slots, KEY_HEADS]`, zero between launches
    activation *out;
    u32 mixed_cols, out_cols;
};
