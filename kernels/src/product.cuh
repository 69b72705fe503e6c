// The product of bf16 weights (`matmul.cu` says how they lie) by the matrix units of a warp: one block's tile of rows by its tile of
// outputs. Which rows these are, and what becomes of the sums, is for those who include it. Reads through
// asynchronous copies; K is summed in splits, each in ascending order, so that no tile size changes a bit.
#pragma once

#include "codes.cuh"
#include "tile.cuh"

namespace warp_product {

// One weight and the rows of one block: those from `first` to `end`.
struct Operands {
    const uint16_t* x;
    const unsigned char* weights;
    const float* scales;
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

template <int BLOCK_M, int BLOCK_N, int WARPS_M, int WARPS_N, int STAGES, bool GATHERED>
struct Product {
    static constexpr int ROWS = BLOCK_M, OUTPUTS = BLOCK_N, THREADS = 32 * WARPS_M * WARPS_N;
    static constexpr int M_TILES = BLOCK_M / WARPS_M / 16, N_TILES = BLOCK_N / WARPS_N / 8;
    static constexpr int ROWS_BYTES = BLOCK_M * TILE_K * 2;
    static constexpr int IMAGE = codes_of(BF16), IMAGES = BLOCK_N / TILE_N, STAGE = ROWS_BYTES + IMAGES * IMAGE;
    static constexpr int SHARED = STAGES * STAGE;
    static constexpr int COPIES = ROWS_BYTES / 16 / THREADS;  // of a thread, for a tile of rows
    static_assert(COPIES * THREADS * 16 == ROWS_BYTES, "");
    using Sums = float[M_TILES][N_TILES][4];

    const Operands& p;
    int warp_m, warp_n, lane, tiles_k;
    uint32_t sources[GATHERED ? COPIES : 1];  // the rows of x that this thread copies

    __device__ __forceinline__ explicit Product(const Operands& operands) : p(operands) {
        const int warp = threadIdx.x / 32;
        warp_m = warp / WARPS_N, warp_n = warp % WARPS_N, lane = threadIdx.x % 32;
        tiles_k = p.k / TILE_K;
        if (!GATHERED) return;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const uint32_t m = p.first + copied_row(c);
            sources[GATHERED ? c : 0] = m >= p.end ? 0 : p.slots == nullptr ? m : p.slots[m] / p.top;
        }
    }

    __device__ __forceinline__ static int copied_row(int c) { return (threadIdx.x + c * THREADS) / 8; }

    __device__ __forceinline__ static unsigned char* stage(int i) {
        return shared_memory() + i % STAGES * STAGE;
    }

    __device__ __forceinline__ void load_rows(int tile, unsigned char* to) const {
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const int row = copied_row(c), unit = (threadIdx.x + c * THREADS) % 8;
            const uint32_t m = p.first + row;
            const uint32_t source = GATHERED ? sources[c] : m < p.end ? m : 0;
            const uint64_t at = uint64_t(source) * p.k + tile * TILE_K + unit * 8;
            async_copy_16(unit_of<8>(to, row, unit), p.x + at, m < p.end);
        }
    }

    __device__ __forceinline__ void load_weights(int tile, unsigned char* to) const {
#pragma unroll
        for (int i = threadIdx.x; i < IMAGES * IMAGE / 16; i += THREADS) {
            const int image = i / (IMAGE / 16), unit = i % (IMAGE / 16);
            const uint32_t tile_n = p.tile * IMAGES + image;
            const bool valid = tile_n * TILE_N < p.n;
            const uint64_t at = (uint64_t(valid ? tile_n : 0) * tiles_k + tile) * IMAGE + unit * 16;
            async_copy_16(to + ROWS_BYTES + i * 16, p.weights + at, valid);
        }
    }

    __device__ __forceinline__ void load(int tile, unsigned char* to) const {
        load_rows(tile, to);
        load_weights(tile, to);
    }

    // The weights' fragments of one step of 16 inputs, for this warp's columns.
    __device__ __forceinline__ void fragments(uint32_t (&b)[N_TILES][2], unsigned char* images,
                                                 int step) const {
        const int matrix = lane / 8, row = lane % 8;
#pragma unroll
        for (int i = 0; i < N_TILES; i += 2) {
            const int output = (warp_n * N_TILES + i + matrix / 2) * 8 + row;
            unsigned char* image = images + output / TILE_N * IMAGE;
            uint32_t four[4];
            load_matrix(four, unit_of<8>(image, output % TILE_N, 2 * step + matrix % 2));
            b[i][0] = four[0], b[i][1] = four[1], b[i + 1][0] = four[2], b[i + 1][1] = four[3];
        }
    }

    __device__ __forceinline__ void multiply(Sums& sums, unsigned char* rows) const {
        const int matrix = lane / 8, row = lane % 8;
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            uint32_t a[M_TILES][4], b[N_TILES][2];
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
                load_matrix(a[i], unit_of<8>(rows, (warp_m * M_TILES + i) * 16 + matrix % 2 * 8 + row,
                                             2 * step + matrix / 2));
            }
            fragments(b, rows + ROWS_BYTES, step);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
                for (int j = 0; j < N_TILES; ++j) mma(sums[i][j], a[i], b[j][0], b[j][1]);
            }
        }
    }

    __device__ __forceinline__ static void clear(Sums& sums) {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            for (int j = 0; j < N_TILES; ++j)
                for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
    }

    __device__ __forceinline__ uint32_t column(int j, int e) const {
        return p.tile * BLOCK_N + (warp_n * N_TILES + j) * 8 + lane % 4 * 2 + e % 2;
    }
    __device__ __forceinline__ uint32_t row(int i, int e) const {
        return p.first + (warp_m * M_TILES + i) * 16 + lane / 4 + e / 2 * 8;
    }

    template <class F>
    __device__ __forceinline__ void each(const Sums& sums, F f) const {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            for (int j = 0; j < N_TILES; ++j)
                for (int e = 0; e < 4; ++e)
                    if (row(i, e) < p.end && column(j, e) < p.n) f(row(i, e), column(j, e), sums[i][j][e]);
    }

    // Goes through the tiles [first, end); `end_of_split` gets each split's sum. `ready` returns when rows may
    // be read.
    template <class End, class Ready = AtOnce>
    __device__ __forceinline__ void run(int first, int end, End end_of_split, const Ready& ready = {}) {
        if (Ready::WAITS) {
            for (int s = 0; s < STAGES - 1; ++s)
                if (first + s < end) load_weights(first + s, stage(s));
            ready();
        }
        for (int s = 0; s < STAGES - 1; ++s) {
            if (first + s < end) {
                if (Ready::WAITS) load_rows(first + s, stage(s));
                else load(first + s, stage(s));
            }
            async_copy_commit();
        }
        Sums part;
        clear(part);
        for (int tile = first; tile < end; ++tile) {
            async_copy_wait<STAGES - 2>();
            sync_block();
            if (tile + STAGES - 1 < end) load(tile + STAGES - 1, stage(tile - first + STAGES - 1));
            async_copy_commit();
            multiply(part, stage(tile - first));
            if ((tile + 1) % int(p.split_tiles) == 0 || tile + 1 == end) {
                end_of_split(part);
                clear(part);
            }
        }
        async_copy_wait<0>();
    }

    // All splits, one after another.
    template <class Ready = AtOnce>
    __device__ __forceinline__ void run_all(Sums& total, const Ready& ready = {}) {
        clear(total);
        const auto add = [&](Sums& part) {
#pragma unroll
            for (int i = 0; i < M_TILES; ++i)
                for (int j = 0; j < N_TILES; ++j)
                    for (int e = 0; e < 4; ++e) total[i][j][e] += part[i][j][e];
        };
        run(0, tiles_k, add, ready);
    }
};

// The forms that kernels have, by the rows of a block.
template <bool GATHERED>
using Rows16 = Product<16, 64, 1, 4, 5, GATHERED>;
template <bool GATHERED>
using Rows64 = Product<64, 64, 2, 2, 4, GATHERED>;
template <bool GATHERED>
using Rows128 = Product<128, 128, 2, 4, 3, GATHERED>;

}  // namespace warp_product
