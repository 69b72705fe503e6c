// Which block of a launch is the last to finish its share: it alone goes on, with what all others left in
// memory. Saves a launch where what is left is small.
#pragma once

#include "platform.cuh"

#ifdef KEYWAY_EMULATE
#include "../emulate/ticket.h"
#else

// Orders what this thread wrote or read, and what it saw others write before a barrier, before what it writes
// and reads next: for the device.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

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
