// What blocks of one launch may rely on of each other. Which is the last to finish its share: it alone goes on,
// with what all others left in memory, which saves a launch where what is left is small. And who may wait for
// whom: blocks start in any order, so they number themselves, and wait only for lower numbers, which run.
#pragma once

#include "platform.cuh"

#ifdef KEYWAY_EMULATE
#include "../emulate/ticket.h"
#else

// Orders what this thread wrote or read, and what it saw others write before a barrier, before what it writes
// and reads next: for the device.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Returns when `p` has come to `count`: what was written before it got there can be seen then.
__device__ __forceinline__ void wait_until(const uint32_t* p, uint32_t count) {
    uint32_t there;
    do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(there) : "l"(p) : "memory");
    while (there < count);
}

#endif

// Whether this is the last of `blocks` blocks to come here, in every thread: what the others wrote before is
// visible then. `done` was 0 before the launch; `last` lies in shared memory and is used for nothing else.
__device__ __forceinline__ bool is_last_of(uint32_t blocks, uint32_t* done, uint32_t& last) {
    sync_block();
    if (threadIdx.x == 0) {
        fence_device();
        last = atomic_add(done, 1u) + 1 == blocks;
        fence_device();
    }
    sync_block();
    return last != 0;
}

// How many blocks of the launch have asked before this one, in every thread. `asked` was 0 before the launch,
// and is again when all `blocks` have asked; `number` lies in shared memory, and may be used for anything else
// afterwards.
__device__ __forceinline__ uint32_t take_number(uint32_t blocks, uint32_t* asked, uint32_t& number) {
    if (threadIdx.x == 0) {
        number = atomic_add(asked, 1u);
        if (number + 1 == blocks) *asked = 0;
    }
    sync_block();
    const uint32_t own = number;
    sync_block();
    return own;
}

// A part of the work that `makers` blocks make and `takers` blocks go on with. `count` was 0 before the launch,
// and is again behind the last taker.
struct Handover {
    uint32_t* count;
    uint32_t makers, takers;

    // By a maker, behind all that its threads wrote.
    __device__ __forceinline__ void give() const {
        sync_block();
        if (threadIdx.x > 0) return;
        fence_device();
        atomic_add(count, 1u);
    }
    // By a taker, whose number is higher than the makers': all threads can see what these wrote.
    __device__ __forceinline__ void take() const {
        if (threadIdx.x == 0) {
            wait_until(count, makers);
            if (atomic_add(count, 1u) + 1 == makers + takers) *count = 0;
        }
        sync_block();
    }
};
