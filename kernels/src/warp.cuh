// What a warp finds of its lanes' whole numbers in one instruction (sm_80 and later): all lanes get it.
#pragma once

#include "platform.cuh"

#ifdef KEYWAY_EMULATE
template <class F>
inline uint32_t reduced_over_warp(uint32_t value, F f) {
    for (unsigned mask = 16; mask > 0; mask /= 2) value = f(value, shuffle_xor(value, mask));
    return value;
}
inline uint32_t largest_in_warp(uint32_t value) {
    return reduced_over_warp(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
inline uint32_t smallest_in_warp(uint32_t value) {
    return reduced_over_warp(value, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
}
inline uint32_t sum_in_warp(uint32_t value) {
    return reduced_over_warp(value, [](uint32_t a, uint32_t b) { return a + b; });
}
#else
constexpr unsigned ALL_LANES = 0xffffffffu;
__device__ __forceinline__ uint32_t largest_in_warp(uint32_t value) { return __reduce_max_sync(ALL_LANES, value); }
__device__ __forceinline__ uint32_t smallest_in_warp(uint32_t value) { return __reduce_min_sync(ALL_LANES, value); }
__device__ __forceinline__ uint32_t sum_in_warp(uint32_t value) { return __reduce_add_sync(ALL_LANES, value); }
#endif
