// `product.cuh`'s product for Hopper, bf16 weights: by warpgroups (`matmul_sm90.cu` says why operands are
// swapped). Two of them, of 64 outputs each, make one block.
#pragma once

#include "numbers.cuh"
#include "tile.cuh"

namespace warpgroup_product {

constexpr int TILE_K = 64, OUTPUTS = 64, WARPGROUPS = 2, THREADS = 128 * WARPGROUPS;
constexpr int IMAGE = OUTPUTS * TILE_K * 2;  // bytes of a packed weight's tile

// One weight and the rows of one block: those from `first` to `end`.
struct Operands {
    const uint16_t* x;
    const unsigned char* weights;
    uint32_t n, k, split_tiles, first, end;
    // Row r of x belongs to `slots[r] / top`; null: to r.
    const uint32_t* slots;
    uint32_t top;
    uint32_t tile;  // the block's, of outputs
};

// What a block does before it reads rows, with its first weights under way: nothing.
struct AtOnce {
    static constexpr bool WAITS = false;
    __device__ __forceinline__ void operator()() const {}
};

template <int ROWS, int STAGES, bool GATHERED>
struct Product {
    static constexpr int BLOCK_ROWS = ROWS;
    static constexpr int ROWS_BYTES = ROWS * TILE_K * 2, STAGE = ROWS_BYTES + WARPGROUPS * IMAGE;
    static constexpr int SHARED = STAGES * STAGE;
    // Lane 4 g + t of warp w holds outputs 16 w + g and + 8, of rows 8 j + 2 t and the next.
    using Sums = float[ROWS / 2];

    static constexpr int UNITS = ROWS_BYTES / 16, COPIES = (UNITS + THREADS - 1) / THREADS;

    const Operands& p;
    int tiles_k;
    uint32_t sources[GATHERED ? COPIES : 1];  // the rows of x that this thread copies

    __device__ __forceinline__ explicit Product(const Operands& operands)
        : p(operands), tiles_k(operands.k / TILE_K) {
        if (!GATHERED) return;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const uint32_t m = p.first + (threadIdx.x + c * THREADS) / 8;
            sources[GATHERED ? c : 0] = m >= p.end ? 0 : p.slots == nullptr ? m : p.slots[m] / p.top;
        }
    }

    __device__ __forceinline__ static unsigned char* stage(int i) {
        return shared_memory() + i % STAGES * STAGE;
    }

    __device__ __forceinline__ void load_rows(int tile, unsigned char* to) const {
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const int i = threadIdx.x + c * THREADS, row = i / 8, unit = i % 8;
            if (i >= UNITS) break;
            const uint32_t m = p.first + row;
            const uint32_t source = GATHERED ? sources[c] : m < p.end ? m : 0;
            const uint64_t at = uint64_t(source) * p.k + tile * TILE_K + unit * 8;
            async_copy_16(unit_of<8>(to, row, unit), p.x + at, m < p.end);
        }
    }

    __device__ __forceinline__ void load_weights(int tile, unsigned char* to) const {
#pragma unroll
        for (int i = threadIdx.x; i < WARPGROUPS * IMAGE / 16; i += THREADS) {
            const int image = i / (IMAGE / 16), unit = i % (IMAGE / 16);
            const uint32_t tile_n = p.tile * WARPGROUPS + image;
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

    // Where sum i of this thread belongs.
    __device__ __forceinline__ uint32_t output(int i) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return (p.tile * WARPGROUPS + warp / 4) * OUTPUTS + warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8;
    }
    __device__ __forceinline__ uint32_t row(int i) const {
        return p.first + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    }

    template <class F>
    __device__ __forceinline__ void each(const Sums& sums, F f) const {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i)
            if (row(i) < p.end && output(i) < p.n) f(row(i), output(i), sums[i]);
    }

    __device__ __forceinline__ void load(int tile, unsigned char* to) const {
        load_rows(tile, to);
        load_weights(tile, to);
    }

    // Goes through the tiles [first, end); `end_of_split` gets each split's sum. Where the weight is the
    // launch's own, its first tiles are loaded while earlier launches end: none of them changes it. `ready`
    // returns when rows may be read.
    template <class End, class Ready = AtOnce>
    __device__ __forceinline__ void run(int first, int end, End end_of_split, const Ready& ready = {}) {
        if (!GATHERED || Ready::WAITS) {
            for (int s = 0; s < STAGES - 2; ++s)
                if (first + s < end) load_weights(first + s, stage(s));
            if (!GATHERED) follow();
            ready();
        }
        for (int s = 0; s < STAGES - 2; ++s) {
            if (first + s < end) {
                if (GATHERED && !Ready::WAITS) load(first + s, stage(s));
                else load_rows(first + s, stage(s));
            }
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
                // All have passed the barrier, and so had finished the products of two tiles before, whose
                // stage is filled now. This tile's products run meanwhile.
                warpgroup_wait<1>(part);
                if (tile + STAGES - 2 < end) load(tile + STAGES - 2, stage(tile - first + STAGES - 2));
                async_copy_commit();
            }
            warpgroup_wait<0>(part);
            end_of_split(part);
        }
        async_copy_wait<0>();
    }

    // All splits, one after another.
    template <class Ready = AtOnce>
    __device__ __forceinline__ void run_all(Sums& total, const Ready& ready = {}) {
        clear(total);
        const auto add = [&](Sums& part) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) total[i] += part[i];
        };
        run(0, tiles_k, add, ready);
    }
};

// The form that kernels have.
template <bool GATHERED>
using Rows16 = Product<16, 6, GATHERED>;

}  // namespace warpgroup_product
