// y[m][n] = sum over k of x[m][k] w[n][k] (+ bias[n]), for a few rows and for many: bf16 rows, bf16, int8, int4,
// FP8 (E4M3) or MXFP4 weights, f32 sums.
//
// Weights are packed once into tiles of 64 outputs by 64 inputs, [n / 64][k / 64], each an image of what
// lies in shared memory, so that loading one is a plain copy (`matmul.rs`, CUDA, packs them):
//   bf16  [64 outputs][8 units of 16 bytes], unit u of output n at u ^ (n % 8)
// and of the others what each lane of a warp needs to make fragments of, 16 bytes at once: lane 4 g + t holds, of
// output g of eight and of each of four steps of 16 inputs, those at 2t, 2t + 1, 2t + 8 and 2t + 9. A word's halves
// have the even and the odd ones.
//   int8  [8 groups of 8 outputs][32 lanes][4 steps]: of a half word the lower byte is the input at 2t (+ 1), the
//         upper the one 8 on
//   int4  [4 pairs of such groups][32 lanes][2 groups][2 pairs of steps]: from a half word's lowest nibble on,
//         2t (+ 1) and 8 on of one step and of the next, plus 8
//   fp8   as int8; the bits of a half word's two codes, from the highest:
//         s1 e2 e2 e2 s2 e1 e1 e1 e1 m1 m1 m1 e2 m2 m2 m2
//   mxfp4 as int4, of E2M1; the bits of a half word's four codes: s1 s3 s4 s2 e3 e3 m3 e1 e1 m1 e2 e2 m2 e4 e4 m4;
//         then the E8M0 of each 32 inputs, [4 pairs of groups of 8 outputs][8 outputs][2 groups][2]
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
#include "product_few.cuh"

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

// Where a split's sum goes, when another launch adds them.
__device__ __forceinline__ float* partial(const Problem& p, uint32_t m, uint32_t n) {
    return p.partials + (uint64_t(blockIdx.z) * p.m + m) * p.n + n;
}

__device__ __forceinline__ Operands operands(const Problem& p, uint32_t rows) {
    return {p.x, p.weights, p.scales, p.n, p.k, p.split_tiles, blockIdx.y * rows, p.m, nullptr, 1, blockIdx.x};
}

template <class K>
__device__ __forceinline__ void matmul(const Problem& p) {
    const Operands of = operands(p, K::ROWS);
    K kernel(of);
    if (p.partials != nullptr) {
        const int first = blockIdx.z * p.split_tiles;
        kernel.run(first, min_of(first + int(p.split_tiles), kernel.tiles_k), [&](typename K::Sums& part) {
            kernel.each(part, [&](uint32_t m, uint32_t n, float sum) { *partial(p, m, n) = sum; });
        });
        return;
    }
    typename K::Sums total;
    kernel.run_all(total);
    kernel.each(total, [&](uint32_t m, uint32_t n, float sum) { store(p, m, n, sum); });
}

// Block: `warps_n` warps of 16 outputs, as often as splits are summed at once; one where they are apart.
template <class K>
__device__ __forceinline__ void matmul_few(const Problem& p, int warps_n, int kept_rows) {
    const Operands of = operands(p, K::ROWS);
    const K kernel(of, warps_n, kept_rows);
    if (p.partials != nullptr) {
        kernel.run_split(blockIdx.z, [&](typename K::Sums& part) {
            kernel.each(part, [&](uint32_t m, uint32_t n, float sum) { *partial(p, m, n) = sum; });
        });
        return;
    }
    typename K::Sums total;
    kernel.run_all(total);
    kernel.each(total, [&](uint32_t m, uint32_t n, float sum) { store(p, m, n, sum); });
}

#define MATMUL(name, form)                                                                               \
    extern "C" __global__ void __launch_bounds__(form::THREADS, 256 / form::THREADS)                     \
        name(const uint16_t* x, const unsigned char* weights, const float* scales, const uint16_t* bias, \
             void* y, float* partials, uint32_t m, uint32_t n, uint32_t k, uint32_t split_tiles,         \
             uint32_t wide_y) {                                                                          \
        follow();                                                                                        \
        matmul<form>(Problem{x, weights, scales, bias, y, partials, m, n, k, split_tiles, wide_y});      \
    }

MATMUL(matmul_bf16_16, Rows16<false>)
MATMUL(matmul_bf16_64, Rows64<false>)
MATMUL(matmul_bf16_128, Rows128<false>)

#define MATMUL_FEW(name, form)                                                                           \
    extern "C" __global__ void __launch_bounds__(few_product::form::THREADS_MAX, 1)                      \
        name(const uint16_t* x, const unsigned char* weights, const float* scales, const uint16_t* bias, \
             void* y, float* partials, uint32_t m, uint32_t n, uint32_t k, uint32_t split_tiles,         \
             uint32_t wide_y, uint32_t warps_n, uint32_t kept_rows) {                                    \
        follow();                                                                                        \
        matmul_few<few_product::form>(                                                                   \
            Problem{x, weights, scales, bias, y, partials, m, n, k, split_tiles, wide_y}, warps_n, kept_rows); \
    }

MATMUL_FEW(matmul_int8_16, Few<INT8>)
MATMUL_FEW(matmul_int8_64, Many<INT8>)
MATMUL_FEW(matmul_int4_16, Few<INT4>)
MATMUL_FEW(matmul_int4_64, Many<INT4>)
MATMUL_FEW(matmul_fp8_16, Few<FP8>)
MATMUL_FEW(matmul_fp8_64, Many<FP8>)
MATMUL_FEW(matmul_mxfp4_16, Few<MXFP4>)
MATMUL_FEW(matmul_mxfp4_64, Many<MXFP4>)

constexpr int REDUCE_THREADS = 256;

// Adds the splits in ascending order. Grid: (columns / 256, rows). Block: 256 threads.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
    matmul_reduce(const float* partials, const uint16_t* bias, void* y, uint32_t splits, uint32_t m,
                  uint32_t n, uint32_t wide_y) {
    follow();
    const uint32_t column = blockIdx.x * REDUCE_THREADS + threadIdx.x, row = blockIdx.y;
    if (column >= n) return;
    float total = 0.0f;
    for (uint32_t split = 0; split < splits; ++split)
        total += partials[(uint64_t(split) * m + row) * n + column];
    const Problem p{nullptr, nullptr, nullptr, bias, y, nullptr, m, n, 0, 0, wide_y};
    store(p, row, column, total);
}
