// `matmul.cu`'s product for Hopper, bf16 weights: the matrix units are fed straight from shared memory by
// warpgroups (`wgmma`). Same packed weights, same contract, other bits: a worker uses one of the two for
// all its products.
//
// Operands are swapped: the weight's 64 outputs are the instruction's fixed side, the rows of x its
// variable one (16, 64 or 128). So the tile of rows may follow the batch, while an element's chain over K,
// sixteen inputs an instruction, stays the same: batch invariance without padding small batches to 64 rows.
// Whether the hardware keeps that promise across its tile widths is what the equality tests on a GPU show.
// Grid: (n tiles, m tiles, splits or 1). Block: 256 threads, two warpgroups of 64 outputs each. K a
// multiple of 64.
#include "product_sm90.cuh"

using namespace warpgroup_product;

struct Problem {
    const uint16_t* x;
    const unsigned char* weights;
    const uint16_t* bias;
    void* y;
    float* partials;
    uint32_t m, n, k, split_tiles, wide_y;
};

// What `y` gets: bf16, or f32 for logits.
__device__ __forceinline__ void store(const Problem& p, uint32_t m, uint32_t n, float sum) {
    const uint64_t at = uint64_t(m) * p.n + n;
    const float value = p.bias != nullptr ? sum + bf16_to_f32(p.bias[n]) : sum;
    if (p.wide_y) static_cast<float*>(p.y)[at] = value;
    else static_cast<uint16_t*>(p.y)[at] = f32_to_bf16(value);
}

template <int ROWS, int STAGES>
__device__ __forceinline__ void matmul(const Problem& p) {
    using K = Product<ROWS, STAGES>;
    const Operands operands{p.x, p.weights, p.n, p.k, p.split_tiles, blockIdx.y * ROWS, p.m, nullptr, 1};
    K kernel(operands);
    if (p.partials != nullptr) {
        const int first = blockIdx.z * p.split_tiles;
        kernel.run(first, min_of(first + int(p.split_tiles), kernel.tiles_k), [&](typename K::Sums& part) {
            float* to = p.partials + uint64_t(blockIdx.z) * p.m * p.n;
            kernel.each(part, [&](uint32_t m, uint32_t n, float sum) { to[uint64_t(m) * p.n + n] = sum; });
        });
        return;
    }
    typename K::Sums total;
    kernel.run_all(total);
    kernel.each(total, [&](uint32_t m, uint32_t n, float sum) { store(p, m, n, sum); });
}

// Splits in blocks of their own are added by `matmul_reduce` of `matmul.cu`.
#define MATMUL(name, rows, stages)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                   \
        name(const uint16_t* x, const unsigned char* weights, const float*, const uint16_t* bias, void* y,  \
             float* partials, uint32_t m, uint32_t n, uint32_t k, uint32_t split_tiles, uint32_t wide_y) {  \
        matmul<rows, stages>(Problem{x, weights, bias, y, partials, m, n, k, split_tiles, wide_y}); \
    }

MATMUL(matmul_sm90_16, 16, 6)
MATMUL(matmul_sm90_64, 64, 5)
MATMUL(matmul_sm90_128, 128, 5)
