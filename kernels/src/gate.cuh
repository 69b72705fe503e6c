// The gates of feed-forward layers, for one pair of numbers (`elementwise.rs` has their definitions). Not where the numbers lie.
#pragma once

#include "numbers.cuh"

// a / (1 + e^-(steepness a)); the product with log2(e) is rounded before the exponential, as in `scalar.rs`.
__device__ __forceinline__ float gated(float a, float steepness) {
    return a / (1.0f + exp2_fast(-steepness * a * LOG2_E));
}

__device__ __forceinline__ float silu_gate(float gate, float up) { return gated(gate, 1.0f) * up; }

// gpt-oss's: the gate at most `limit`, up within -limit..=limit; NaN passes through.
__device__ __forceinline__ float clamped_gate(float gate, float up, float alpha, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return (up + 1.0f) * gated(gate, alpha);
}
