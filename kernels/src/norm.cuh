// What RMSNorm does with 8 elements of a row, for rows (`rms_norm.cu`) and for heads on their way to be
// turned (`rope.cu`): the same bits in both.
#pragma once

#include "numbers.cuh"

// Adds their squares to a thread's sum, in order.
__device__ __forceinline__ float add_squares(const Packet& values, float squares) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float low = bf16_low(values.words[j]), high = bf16_high(values.words[j]);
        squares = fmaf(low, low, squares);
        squares = fmaf(high, high, squares);
    }
    return squares;
}

// What a row is multiplied by, from the sum of its squares.
__device__ __forceinline__ float norm_scale(float squares, uint32_t width, float eps) {
    const float mean = squares / float(width);
    return 1.0f / sqrtf(mean + eps);
}

__device__ __forceinline__ Packet normalised(const Packet& values, float scale, const Packet& weight) {
    Packet out;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        out.words[j] = bf16_pair(bf16_low(values.words[j]) * scale * bf16_low(weight.words[j]),
                                 bf16_high(values.words[j]) * scale * bf16_high(weight.words[j]));
    return out;
}
