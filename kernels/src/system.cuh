// What only messages between devices need, each instruction behind a function as in `platform.cuh`: memory
// that other devices and processes read and write at any moment, a clock to give up by, and lanes that hold
// the same.
#pragma once

#include "platform.cuh"

#ifdef KEYWAY_EMULATE
#include "../emulate/system.h"
#else

// A word that another device may write meanwhile. What its writer had written before `fence_system` is
// visible to whoever reads the word here, and behind a barrier to the whole block.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

// A word that another device may read meanwhile; a release if `fence_system` came before.
__device__ __forceinline__ void store_relaxed(uint32_t* p, uint32_t value) {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Orders what this thread wrote, and what it saw others write before a barrier, before what it writes next:
// for all devices.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// The device's clock, whatever its processors' frequency.
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// A bit for each lane of the warp whose value is this lane's.
__device__ __forceinline__ uint32_t lanes_like(uint32_t value) {
    return __match_any_sync(0xffffffffu, value);
}

#endif
