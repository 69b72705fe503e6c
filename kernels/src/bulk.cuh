// Barriers that lie in shared memory (mbarrier) and the bulk copies that arrive at them, of sm_90 and later;
// on older GPUs all of this compiles and does nothing, so a kernel asks `HAS_BULK_COPIES` first. No
// arithmetic.
//
// A barrier's phases have the parities 0, 1, 0, ... A phase is over when as many arrivals have come as
// `barrier_init` said and all bytes that were announced. A fresh barrier is in phase 0, so that a wait for
// parity 1 passes at once.
#pragma once

#include "platform.cuh"

#ifdef KEYWAY_EMULATE
#include "../emulate/bulk.h"
#else

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KEYWAY_BULK 1
#else
#define KEYWAY_BULK 0
#endif
constexpr bool HAS_BULK_COPIES = KEYWAY_BULK;

// By one thread. Then `fence_barriers` by the same thread, then a barrier of the block.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
#if KEYWAY_BULK
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void fence_barriers() {
#if KEYWAY_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One arrival; what this thread did before is seen by whoever waits for the phase. `barrier` is its address
// in shared memory.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if KEYWAY_BULK
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) { barrier_arrive(shared_address(barrier)); }
// One arrival that announces so many bytes of bulk copies; before these are started.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
#if KEYWAY_BULK
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}

// Waits until the phase of this parity is over. Nobody may be two phases late.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if KEYWAY_BULK
    uint32_t over;
    do {
        asm volatile(
            "{\n.reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n}"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (over == 0);
#endif
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    barrier_wait(shared_address(barrier), parity);
}

// Copies `bytes` in the background, which arrive at `barrier`; addresses and `bytes` are multiples of 16. By
// one thread. What bulk copies bring, the matrix units may read as well as any thread once the barrier's
// phase is over.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
#if KEYWAY_BULK
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// One arrival, as soon as all `async_copy_16` that this thread has started are done. Theirs are ordinary
// writes: before the matrix units read them, who waited needs `fence_for_matrix_units`.
__device__ __forceinline__ void copies_arrive(uint64_t* barrier) {
#if KEYWAY_BULK
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// A barrier of some of a block's warps, so many threads, all of which know it by `id` (1 to 15).
__device__ __forceinline__ void sync_some(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Registers of each thread of this warpgroup from here on, a multiple of 8: fewer, or more, which waits until
// others have given them up. By all its threads, in a kernel whose launch bounds name the blocks of a
// processor; of sm_90a alone.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

#endif
