// The instructions that kernels use, each behind a function: PTX on a GPU, plain C++ in `emulate/`. Kernels
// contain no `asm` of their own, so the same source runs on both. No arithmetic of any operation here.
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

// Waits until the launches before this one are done and what they wrote can be seen. Every kernel begins with
// it or with `follow`: on a device that has it a launch's blocks take their places while the one before still
// runs (`gpu.rs`), and what comes after the next launch relies on each having waited.
__device__ __forceinline__ void wait_for_earlier_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The same, and lets the next launch's blocks take their places from now on. Not for kernels that wait for
// another rank: on a GPU that ranks share, those places may be what the other rank needs.
__device__ __forceinline__ void follow() {
    wait_for_earlier_launches();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
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

// A bit for each lane of the warp.
__device__ __forceinline__ uint32_t lanes_where(bool set) { return __ballot_sync(0xffffffffu, set); }
__device__ __forceinline__ int count_bits(uint32_t bits) { return __popc(bits); }

// (bits & mask) | more, in one instruction, where `more` is not known to the compiler: two constants would
// take two.
__device__ __forceinline__ uint32_t and_or(uint32_t bits, uint32_t mask, uint32_t more) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(bits), "r"(mask), "r"(more));
    return out;
}
// Keeps what a loop needs in a register, where the compiler would rather compute it in every turn.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}
template <class T>
__device__ __forceinline__ const T* in_register(const T* p) {
    asm volatile("" : "+l"(p));
    return p;
}

// On shared or global memory; returns what was there.
template <class T>
__device__ __forceinline__ T atomic_add(T* address, T value) {
    return atomicAdd(address, value);
}

__device__ __forceinline__ uint64_t atomic_add(uint64_t* address, uint64_t value) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}

// 2^x with a relative error of about 2^-22; 2^-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x in one instruction, with a relative error of about 2^-22; what is below 2^-126 is 0.
__device__ __forceinline__ float exp2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory in the background, or writes zeros there and reads nothing.
__device__ __forceinline__ void async_copy_16(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void async_copy_16(void* shared, const void* global, bool valid) {
    async_copy_16(shared_address(shared), global, valid);
}
// The same of 4 bytes.
__device__ __forceinline__ void async_copy_4(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}
// Words of shared memory.
__device__ __forceinline__ void load_shared(uint32_t (&out)[1], uint32_t shared) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out[0]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t (&out)[2], uint32_t shared) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t (&out)[4], uint32_t shared) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared)
                 : "memory");
}
// Ends a group of this thread's copies; `async_copy_wait` waits until at most LEFT groups are under way.
__device__ __forceinline__ void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void async_copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8x8 matrices of 16-bit elements into a warp's registers; lane 8 i + r gives the address of row r of
// matrix i.
__device__ __forceinline__ void load_matrix(uint32_t (&out)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_matrix(uint32_t (&out)[4], const void* row) {
    load_matrix(out, shared_address(row));
}
__device__ __forceinline__ void load_matrix_transposed(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// d += a b on 16x8, inner dimension 16, bf16 with f32 sums. Lane 4 g + t holds d (g, 2t..) and (g + 8, 2t..).
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// === Hopper: products of a warpgroup (four warps), both operands in shared memory ===
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Describes rows of 128 bytes at multiples of 128, swizzled as `tile.cuh` does in units of 8, eight rows
// every 1024 bytes; `p` may be 32 bytes further for each sixteen elements along the row.
__device__ __forceinline__ uint64_t swizzled_operand(const void* p) {
    return uint64_t(shared_address(p) >> 4 & 0x3fff) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
           uint64_t(1) << 62;
}

// What this thread wrote to shared memory becomes visible to the matrix units; a barrier must follow.
__device__ __forceinline__ void fence_for_matrix_units() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Before the first product that uses registers written by ordinary instructions.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
__device__ __forceinline__ void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most LEFT groups are under way; `d` must not be touched before LEFT was 0.
template <int LEFT, int N>
__device__ __forceinline__ void warpgroup_wait(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    if (LEFT > 0) return;
    // Names the registers, so that the compiler moves no use of them before the wait.
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d += a b^T on 64 x 2 N, inner dimension 16, bf16 with f32 sums.
__device__ __forceinline__ void warpgroup_mma(float (&d)[8], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void warpgroup_mma(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b));
}
#endif

#endif
