// What the device itself reaches, to judge the other kernels by in the same minute: a plain copy, and
// matrix products of registers. No operation of a model. Grid: as many blocks as fill the device. Block:
// 256 threads.
#include "numbers.cuh"

constexpr int THREADS = 256;
// Words of matrix fragments that a thread starts from.
constexpr int SEED_WORDS = 6;

// to = from, `packets` of 16 bytes, four in flight per thread.
extern "C" __global__ void __launch_bounds__(THREADS) copy(const void* from, void* to, uint32_t packets) {
    follow();
    const Packet* source = static_cast<const Packet*>(from);
    Packet* target = static_cast<Packet*>(to);
    const uint64_t stride = uint64_t(gridDim.x) * THREADS;
    for (uint64_t i = uint64_t(blockIdx.x) * THREADS + threadIdx.x; i < packets; i += 4 * stride) {
        Packet four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (i + j * stride < packets) four[j] = source[i + j * stride];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (i + j * stride < packets) target[i + j * stride] = four[j];
    }
}

// Eight independent chains of 16x8x16 products per warp, `rounds` long: 8 * 4096 operations a round and
// warp. `seed` is data.
extern "C" __global__ void __launch_bounds__(THREADS)
    matrix_peak(const uint32_t* seed, float* out, uint32_t rounds) {
    follow();
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = seed[threadIdx.x * SEED_WORDS + i];
    for (int i = 0; i < 2; ++i) b[i] = seed[threadIdx.x * SEED_WORDS + 4 + i];
    float sums[8][4] = {};
    for (uint32_t round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < 8; ++i) mma(sums[i], a, b[0], b[1]);
    }
    float all = 0.0f;
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 4; ++j) all += sums[i][j];
    out[blockIdx.x * THREADS + threadIdx.x] = all;
}
