// y[m][n] = sum over k of x[m][k] w[n][k] (+ bias[n]), for a few rows and for many: bf16 rows, bf16, int8, int4,
// FP8 (E4M3) or MXFP4 weights, f32 sums.
//
// Weights are packed once into tiles of 64 outputs by 64 inputs, [n / 64][k / 64], each an image of what
// lies in shared memory, so that loading one is a plain copy (`matmul.rs`, CUDA, packs them):
//   bf16  [64 outputs][8 units of 16 bytes], unit u of output n at u ^ (n % 8)
//   int8  [8 groups of 8 outputs][32 lanes][16]: lane 4 g + t holds, of output g, for each of four steps of 16
//         inputs, those at 2t, 2t + 1, 2t + 8, 2t + 9, plus 128
//   int4  the same in nibbles, lower first, plus 8
//   fp8   as int8, the four in the order 2t + 8, 2t, 2t + 9, 2t + 1, which takes the fewest instructions to spread
//   mxfp4 the nibbles of int4, codes of E2M1; then [64 outputs][2], each 32 inputs' E8M0
// int8, int4 and fp8 have one f32 scale per output and 128 inputs, `scales` [K / 128][N]. Their codes' values are
// exact in bf16, so that a group is summed exactly like bf16 weights and scaled as a whole, in f32: nothing of a scale is
// lost, as it would be were code times scale rounded to bf16. A value of MXFP4, a code times a power of two, is a bf16: products
// have the bits of the same values kept in bf16.
//
// The order of every sum follows from the weight's shape alone: K is cut into `splits` ranges of
// `split_tiles` tiles, each summed on its own and added in ascending order. Splits go to blocks of their
// own (`partials`, then `matmul_reduce`) or are taken one after another by one block: **the same bits**.
// The rows per block follow M; they cannot change a sum. Grid: (n tiles, m tiles, splits or 1). x, bias, y
// row-major; K a multiple of 64 (128 for int8, int4, fp8).
#include "product.cuh"

using namespace warp_product;

struct Problem {
    const uint16_t* x;
    const unsigned char* weights;
    const float* scales;
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

template <class K, int BLOCK_M>
__device__ __forceinline__ void matmul(const Problem& p) {
    const Operands operands{p.x, p.weights, p.scales, p.n, p.k, p.split_tiles, blockIdx.y * BLOCK_M, p.m, nullptr, 1};
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

#define MATMUL(name, weight, block_m, ...)                                                               \
    extern "C" __global__ void __launch_bounds__(Product<weight, block_m, __VA_ARGS__>::THREADS,         \
                                                 256 / Product<weight, block_m, __VA_ARGS__>::THREADS)   \
        name(const uint16_t* x, const unsigned char* weights, const float* scales, const uint16_t* bias, \
             void* y, float* partials, uint32_t m, uint32_t n, uint32_t k, uint32_t split_tiles,         \
             uint32_t wide_y) {                                                                          \
        matmul<Product<weight, block_m, __VA_ARGS__>, block_m>(                                          \
            Problem{x, weights, scales, bias, y, partials, m, n, k, split_tiles, wide_y});               \
    }

MATMUL(matmul_bf16_16, BF16, 16, 64, 1, 4, 5)
MATMUL(matmul_bf16_64, BF16, 64, 64, 2, 2, 4)
MATMUL(matmul_bf16_128, BF16, 128, 128, 2, 4, 3)
MATMUL(matmul_int8_16, INT8, 16, 64, 1, 4, 6)
MATMUL(matmul_int8_64, INT8, 64, 64, 2, 2, 4)
MATMUL(matmul_int4_16, INT4, 16, 64, 1, 4, 8)
MATMUL(matmul_int4_64, INT4, 64, 64, 2, 2, 4)
MATMUL(matmul_fp8_16, FP8, 16, 64, 1, 4, 6)
MATMUL(matmul_fp8_64, FP8, 64, 64, 2, 2, 4)
MATMUL(matmul_mxfp4_16, MXFP4, 16, 64, 1, 4, 8)
MATMUL(matmul_mxfp4_64, MXFP4, 64, 64, 2, 2, 4)

// Adds the splits in ascending order. Grid: (columns / 256, rows). Block: 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    matmul_reduce(const float* partials, const uint16_t* bias, void* y, uint32_t splits, uint32_t m,
                  uint32_t n, uint32_t wide_y) {
    const uint32_t column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (column >= n) return;
    float total = 0.0f;
    for (uint32_t split = 0; split < splits; ++split)
        total += partials[(uint64_t(split) * m + row) * n + column];
    const Problem p{nullptr, nullptr, nullptr, bias, y, nullptr, m, n, 0, 0, wide_y};
    store(p, row, column, total);
}
