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
#include "numbers.cuh"
#include "tile.cuh"

constexpr int TILE_K = 64, OUTPUTS = 64, WARPGROUPS = 2, THREADS = 128 * WARPGROUPS;
constexpr int IMAGE = OUTPUTS * TILE_K * 2;  // bytes of a packed weight's tile

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
struct Matmul {
    static constexpr int ROWS_BYTES = ROWS * TILE_K * 2, STAGE = ROWS_BYTES + WARPGROUPS * IMAGE;
    // Lane 4 g + t of warp w holds outputs 16 w + g and + 8, of rows 8 j + 2 t and the next.
    using Sums = float[ROWS / 2];

    const Problem& p;
    int tiles_k;

    __device__ __forceinline__ explicit Matmul(const Problem& problem)
        : p(problem), tiles_k(problem.k / TILE_K) {}

    __device__ __forceinline__ static unsigned char* stage(int i) {
        return shared_memory() + i % STAGES * STAGE;
    }

    __device__ __forceinline__ void load(int tile, unsigned char* to) const {
#pragma unroll
        for (int i = threadIdx.x; i < ROWS_BYTES / 16; i += THREADS) {
            const int row = i / 8, unit = i % 8;
            const uint32_t m = blockIdx.y * ROWS + row;
            const uint64_t at = uint64_t(m < p.m ? m : 0) * p.k + tile * TILE_K + unit * 8;
            async_copy_16(unit_of<8>(to, row, unit), p.x + at, m < p.m);
        }
#pragma unroll
        for (int i = threadIdx.x; i < WARPGROUPS * IMAGE / 16; i += THREADS) {
            const int image = i / (IMAGE / 16), unit = i % (IMAGE / 16);
            const uint32_t tile_n = blockIdx.x * WARPGROUPS + image;
            const bool valid = tile_n * OUTPUTS < p.n;
            const uint64_t at = (uint64_t(valid ? tile_n : 0) * tiles_k + tile) * IMAGE + unit * 16;
            async_copy_16(to + ROWS_BYTES + i * 16, p.weights + at, valid);
        }
    }

    __device__ __forceinline__ static void clear(Sums& sums) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
    }

    // Starts the products of one tile; they run until `warpgroup_wait`.
    __device__ __forceinline__ static void multiply(Sums& sums, unsigned char* rows) {
        unsigned char* weights = rows + ROWS_BYTES + threadIdx.x / 128 * IMAGE;
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            warpgroup_mma(sums, swizzled_operand(weights + 32 * step), swizzled_operand(rows + 32 * step));
        }
        warpgroup_commit();
    }

    template <class F>
    __device__ __forceinline__ void each(const Sums& sums, F f) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            const uint32_t n =
                (blockIdx.x * WARPGROUPS + warp / 4) * OUTPUTS + warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8;
            const uint32_t m = blockIdx.y * ROWS + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (m < p.m && n < p.n) f(m, n, sums[i]);
        }
    }

    // Goes through the tiles [first, end); `end_of_split` gets each split's sum.
    template <class End>
    __device__ __forceinline__ void run(int first, int end, End end_of_split) {
        for (int s = 0; s < STAGES - 2; ++s) {
            if (first + s < end) load(first + s, stage(s));
            async_copy_commit();
        }
        for (int split = first; split < end; split += p.split_tiles) {
            Sums part;
            clear(part);
            for (int tile = split; tile < min_of(split + int(p.split_tiles), end); ++tile) {
                async_copy_wait<STAGES - 3>();
                // What ordinary copies wrote, the matrix units read by another path.
                fence_for_matrix_units();
                sync_block();
                multiply(part, stage(tile - first));
                // All have passed the barrier, and so had finished the products of two tiles before, whose stage
                // is filled now. This tile's products run meanwhile.
                warpgroup_wait<1>(part);
                if (tile + STAGES - 2 < end) load(tile + STAGES - 2, stage(tile - first + STAGES - 2));
                async_copy_commit();
            }
            warpgroup_wait<0>(part);
            end_of_split(part);
        }
        async_copy_wait<0>();
    }
};

template <class K>
__device__ __forceinline__ void matmul(const Problem& p) {
    K kernel(p);
    if (p.partials != nullptr) {
        const int first = blockIdx.z * p.split_tiles;
        kernel.run(first, min_of(first + int(p.split_tiles), kernel.tiles_k), [&](typename K::Sums& part) {
            float* to = p.partials + uint64_t(blockIdx.z) * p.m * p.n;
            kernel.each(part, [&](uint32_t m, uint32_t n, float sum) { to[uint64_t(m) * p.n + n] = sum; });
        });
        return;
    }
    typename K::Sums total;
    K::clear(total);
    kernel.run(0, kernel.tiles_k, [&](typename K::Sums& part) {
#pragma unroll
        for (int i = 0; i < int(sizeof(total) / 4); ++i) total[i] += part[i];
    });
    kernel.each(total, [&](uint32_t m, uint32_t n, float sum) { store(p, m, n, sum); });
}

// Splits in blocks of their own are added by `matmul_reduce` of `matmul.cu`.
#define MATMUL(name, rows, stages)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                   \
        name(const uint16_t* x, const unsigned char* weights, const float*, const uint16_t* bias, void* y,  \
             float* partials, uint32_t m, uint32_t n, uint32_t k, uint32_t split_tiles, uint32_t wide_y) {  \
        matmul<Matmul<rows, stages>>(Problem{x, weights, bias, y, partials, m, n, k, split_tiles, wide_y}); \
    }

MATMUL(matmul_sm90_16, 16, 6)
MATMUL(matmul_sm90_64, 64, 5)
MATMUL(matmul_sm90_128, 128, 5)
