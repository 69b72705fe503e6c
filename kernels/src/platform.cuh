// The instructions that kernels use, each behind a function: PTX on a GPU, plain C++ in `emulate/`. Kernels contain no
// `asm` of their own, so the same source runs on both. No arithmetic of any operation here.
#pragma once

#ifdef KEYWAY_EMULATE
#include "../emulate/instructions.h"
#else

#include <stdint.h>

// The block's dynamic shared memory; every kernel lays it out itself.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char bytes[];
    return bytes;
}

__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }

template <class T>
__device__ __forceinline__ T shuffle(T value, unsigned from) {
    return __shfl_sync(0xffffffffu, value, from);
}
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, unsigned mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
__device__ __forceinline__ uint32_t votes(bool vote) { return __ballot_sync(0xffffffffu, vote); }

// On shared or global memory; returns what was there.
template <class T>
__device__ __forceinline__ T atomic_add(T* address, T value) {
    return atomicAdd(address, value);
}

// 2^x with a relative error of about 2^-22; 2^-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory in the background, or writes zeros there and reads nothing.
__device__ __forceinline__ void async_copy_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// Ends a group of this thread's copies; `async_copy_wait` waits until at most LEFT groups are under way.
__device__ __forceinline__ void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void async_copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8x8 matrices of 16-bit elements into a warp's registers; lane 8 i + r gives the address of row r of matrix i.
__device__ __forceinline__ void load_matrix(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrix_transposed(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// d += a b on 16x8, inner dimension 16, bf16 with f32 sums. Lane 4 g + t holds d (g, 2t..) and (g + 8, 2t..).
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
