// Packed weights and what their codes are worth: from the words of an image (`matmul.cu` says how they lie)
// to the fragments of a matrix instruction, in as few instructions as can be had. Every value is exact in
// bf16.
#pragma once

#include "numbers.cuh"

namespace warp_product {

constexpr int TILE_K = 64, TILE_N = 64, GROUP_TILES = 2;

enum Weight { BF16, INT8, INT4, FP8, MXFP4 };

// Bytes of the codes in an image, and whether groups of 128 inputs have scales of their own.
constexpr int codes_of(Weight weight) {
    return weight == BF16 ? 8192 : weight == INT8 || weight == FP8 ? 4096 : 2048;
}
constexpr bool is_scaled(Weight weight) { return weight == INT8 || weight == INT4 || weight == FP8; }

// The seven bits of 128 + i in bf16 are i; a code's eighth bit, in the exponent of -128, makes that -256.
__device__ __forceinline__ void decode_int8(uint32_t (&b)[2], uint32_t codes) {
#pragma unroll
    for (int i = 0; i < 2; ++i, codes >>= 8)
        b[i] = bf16_pair_plus(and_or(codes, 0x007f007fu, 0x43004300u), and_or(codes, 0x00800080u, 0xc300c300u));
}

// 128 + i, less 136: codes are 8 too large.
__device__ __forceinline__ void decode_int4(uint32_t (&b)[2][2], uint32_t codes) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        b[i / 2][i % 2] = bf16_pair_plus(and_or(codes >> 4 * i, 0x000f000fu, 0x43004300u), 0xc308c308u);
}

// E4M3's exponent and mantissa, moved to those of a bf16, are 2^120 too small. NaN becomes 480. The first of
// a half word's two codes lies where bf16 has it, the second in what that leaves.
__device__ __forceinline__ void decode_fp8(uint32_t (&b)[2], uint32_t codes) {
    b[0] = bf16_pair_times(codes & 0x87f087f0u, 0x7b807b80u);
    b[1] = bf16_pair_times((codes << 4 & 0x80f080f0u) | (codes >> 4 & 0x07000700u), 0x7b807b80u);
}

// E8M0 is a bf16's exponent, but for 2^-127, which is subnormal; NaN becomes infinity, and no less visible.
__device__ __forceinline__ uint32_t power_pair(uint32_t exponent) {
    const uint32_t power = (exponent & 0xff) << 7;
    return (power == 0 ? 0x0040u : power) * 0x00010001u;
}

// E2M1's exponent and mantissa, moved to those of a bf16, are 2^126 too small. Both products are exact. Of a
// half word's four codes the first lies where bf16 has it, sign in bit 15, the rest in bits 8 to 6; the
// second three bits lower; the others' signs in bits 14 and 13, the rest in bits 11 to 9 and 2 to 0.
__device__ __forceinline__ void decode_mxfp4(uint32_t (&b)[2][2], uint32_t codes, uint32_t power) {
    const uint32_t pairs[4] = {codes & 0x81c081c0u, codes << 3 & 0x81c081c0u,
                               (codes << 1 & 0x80008000u) | (codes >> 3 & 0x01c001c0u),
                               (codes << 2 & 0x80008000u) | (codes << 6 & 0x01c001c0u)};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        b[i / 2][i % 2] = bf16_pair_times(bf16_pair_times(pairs[i], 0x7e807e80u), power);
}

}  // namespace warp_product
