// Number formats and the vectors they travel in: bf16 pairs, FP8 (E4M3, as in `quant.rs`), and 16 bytes at
// once. Sums that must not depend on how a compiler contracts them are written with fmaf.
#pragma once

#include "platform.cuh"
#ifdef KEYWAY_EMULATE
#include <cmath>
#include <cstring>
#else
#include <math_constants.h>
#endif

constexpr float LOG2_E = 1.4426950408889634f;
#define NEGATIVE_INFINITY (-__builtin_huge_valf())

__device__ __forceinline__ float from_bits(uint32_t bits) {
#ifdef KEYWAY_EMULATE
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
#else
    return __uint_as_float(bits);
#endif
}

__device__ __forceinline__ uint32_t to_bits(float value) {
#ifdef KEYWAY_EMULATE
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
#else
    return __float_as_uint(value);
#endif
}

// bf16 is the upper half of an f32.
__device__ __forceinline__ float bf16_to_f32(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }
__device__ __forceinline__ float bf16_low(uint32_t pair) { return from_bits(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return from_bits(pair & 0xffff0000u); }

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ uint16_t f32_to_bf16(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Two elements, `low` at the lower address.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
#ifdef KEYWAY_EMULATE
    return uint32_t(f32_to_bf16(low)) | uint32_t(f32_to_bf16(high)) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

// Two elements by two; where a product is no bf16 it is rounded, subnormal ones too. (A product's own instruction is younger than
// sm_80: adding -0 changes nothing.)
__device__ __forceinline__ uint32_t bf16_pair_times(uint32_t a, uint32_t b) {
#ifdef KEYWAY_EMULATE
    return bf16_pair(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b));
#else
    uint32_t pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000u));
    return pair;
#endif
}

// The sum of two elements by two, rounded. (A multiply-add, which sm_80 has: multiplying by 1 changes nothing.)
__device__ __forceinline__ uint32_t bf16_pair_plus(uint32_t a, uint32_t b) {
#ifdef KEYWAY_EMULATE
    return bf16_pair(bf16_low(a) + bf16_low(b), bf16_high(a) + bf16_high(b));
#else
    uint32_t pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return pair;
#endif
}

// A product that no compiler adds to anything before it is rounded.
__device__ __forceinline__ float multiply_rounded(float a, float b) {
#ifdef KEYWAY_EMULATE
    return a * b;
#else
    return __fmul_rn(a, b);
#endif
}

// FP8 E4M3: its exponent and mantissa, moved to those of an f32, are 2^120 too small, subnormal codes too.
__device__ __forceinline__ float e4m3_to_f32(uint32_t code) {
    float magnitude = from_bits((code & 0x7f) << 20) * 0x1p120f;
    magnitude = (code & 0x7f) == 0x7f ? from_bits(0x7fc00000u) : magnitude;
    return from_bits(to_bits(magnitude) | (code & 0x80) << 24);
}

// Rounds to nearest, ties to even; beyond 448 becomes 448 (saturating, as cvt.satfinite does); NaN stays NaN.
__device__ __forceinline__ uint8_t f32_to_e4m3(float value) {
    uint32_t bits = to_bits(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint8_t(sign | 0x7f);
    if (magnitude >= 0x43e00000u) return uint8_t(sign | 0x7e);
    if (magnitude < 0x3c800000u) {
        // Below 2^-6 the codes are multiples of 2^-9: adding 2^14 leaves them in the low mantissa bits,
        // rounded.
        return uint8_t(sign | (to_bits(from_bits(magnitude) + 0x1p14f) & 0xf));
    }
    magnitude += 0x7ffff + (magnitude >> 20 & 1);
    uint32_t code = (magnitude >> 20) - (120 << 3);
    return uint8_t(sign | (code > 0x7e ? 0x7e : code));
}

template <class T>
__device__ __forceinline__ T min_of(T a, T b) {
    return a < b ? a : b;
}
template <class T>
__device__ __forceinline__ T max_of(T a, T b) {
    return a > b ? a : b;
}

// 16 bytes that are loaded and stored at once.
struct alignas(16) Packet {
    uint32_t words[4];
};

__device__ __forceinline__ Packet load_packet(const void* p) { return *static_cast<const Packet*>(p); }
__device__ __forceinline__ void store_packet(void* p, const Packet& packet) {
    *static_cast<Packet*>(p) = packet;
}

// Sums over a block of whole warps in an order that its size fixes. `scratch` has room for a float per
// warp; a barrier must come before it is used again.
__device__ __forceinline__ float sum_over_block(float value, float* scratch) {
    for (unsigned mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    unsigned warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    sync_block();
    float sum = 0.0f;
    for (unsigned warp = 0; warp < warps; ++warp) sum += scratch[warp];
    return sum;
}
