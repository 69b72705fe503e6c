// What blocks of a cluster do with each other, of sm_90 and later: a launch says how many blocks, beside each
// other along x, make one; they run at once. A block can arrive at another's barriers and copy into its
// shared memory. All blocks of a kernel lay theirs out alike, so a place there is named by this block's own
// address. No block may end while others may still reach into its memory: `sync_cluster` comes last.
#pragma once

#include "bulk.cuh"

#ifdef KEYWAY_EMULATE
#include "../emulate/cluster.h"
#else

// This block's number in its cluster.
__device__ __forceinline__ uint32_t block_in_cluster() {
    uint32_t number;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(number));
    return number;
}

// Waits until all threads of all blocks of the cluster have come here; what they did before can be seen then.
__device__ __forceinline__ void sync_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// `barrier_arrive` at the barrier that lies there in block `block` of the cluster. Says that matrix products
// that were waited for read no more. What this thread wrote by ordinary instructions the other block may not
// see after it: a release for the cluster would be a fence for the device (MEMBAR.ALL.GPU) in every tile.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t block) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(block)
        : "memory");
}

// `bulk_copy` into the memory of each block whose bit is set in `blocks`, read once; it arrives at the
// barrier that lies there in each of them. A block may announce these bytes to its barrier before or after
// they come.
__device__ __forceinline__ void bulk_copy_to(uint32_t blocks, void* shared, const void* global, uint32_t bytes,
                                             uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(uint16_t(blocks))
        : "memory");
}

#endif
