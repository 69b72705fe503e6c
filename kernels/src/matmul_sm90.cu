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
//
// From 64 rows on, blocks stay and go through the pieces of work (`pipeline_sm90.cuh`): a grid of any
// number of blocks, of 384 threads. `_clustered`: in clusters of two blocks, which share weights' copies.
#include "pipeline_sm90.cuh"
#include "product_sm90.cuh"

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

template <class K>
__device__ __forceinline__ void matmul(const Problem& p) {
    const warpgroup_product::Operands operands{
        p.x, p.weights, p.n, p.k, p.split_tiles, blockIdx.y * K::BLOCK_ROWS, p.m, nullptr, 1,
        blockIdx.x};
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

// Pieces of at most so many rows and one split, or all of K. Those that run at once should share rows as
// well as weights: 8 tiles of rows come before the next tile of outputs. A tile is of so many rows for each
// block of a cluster; of the last one, the second block may have none.
template <uint32_t BLOCKS>
struct Pieces {
    static constexpr uint32_t BAND = 8 / BLOCKS;
    const Problem& p;
    uint32_t block_rows, tiles_m, tiles_n, count;

    __device__ __forceinline__ Pieces(const Problem& problem, uint32_t rows) : p(problem), block_rows(rows) {
        tiles_m = (p.m + BLOCKS * rows - 1) / (BLOCKS * rows), tiles_n = (p.n + 127) / 128;
        const uint32_t tiles_k = p.k / 64;
        count = tiles_m * tiles_n * (p.partials == nullptr ? 1 : (tiles_k + p.split_tiles - 1) / p.split_tiles);
    }

    __device__ __forceinline__ bool operator()(uint32_t number, pipelined_product::Piece& piece) const {
        const uint32_t i = number / BLOCKS;
        if (i >= count) return false;
        const uint32_t plane = tiles_m * tiles_n, split = i / plane, in_plane = i % plane;
        const uint32_t band = in_plane / (BAND * tiles_n), in_band = in_plane % (BAND * tiles_n);
        const uint32_t height = min_of(tiles_m - band * BAND, BAND);
        piece.weights = p.weights;
        piece.first = ((band * BAND + in_band % height) * BLOCKS + number % BLOCKS) * block_rows;
        if (BLOCKS > 1) piece.first = min_of(piece.first, p.m);
        piece.end = min_of(piece.first + block_rows, p.m);
        piece.tile_n = in_band / height * 2;
        const int tiles_k = p.k / 64;
        piece.from = split * p.split_tiles;
        piece.to = p.partials == nullptr ? tiles_k : min_of(piece.from + int(p.split_tiles), tiles_k);
        piece.other = split;
        return true;
    }
};

// NARROW: into bf16 only, by all of K at once.
template <class K, bool NARROW>
__device__ __forceinline__ void matmul_in_pieces(const Problem& p) {
    const pipelined_product::Operands operands{p.x, p.n, p.k, int(p.split_tiles), nullptr, 1};
    K kernel(operands);
    const Pieces<K::CLUSTER_BLOCKS> pieces(p, K::BLOCK_ROWS);
    kernel.run(pieces, [&](const pipelined_product::Piece& piece, const auto& sums) {
        float bias[2] = {};
        for (int i = 0; i < 2; ++i) {
            const uint32_t n = kernel.output(piece, 2 * i);
            if (p.bias != nullptr && p.partials == nullptr && n < p.n) bias[i] = bf16_to_f32(p.bias[n]);
        }
        const bool biased = p.bias != nullptr && p.partials == nullptr;
        const auto value = [&](const auto& sums, int i) { return biased ? sums[i] + bias[i / 2 % 2] : sums[i]; };
        if (NARROW || (p.partials == nullptr && !p.wide_y)) {
            const auto same = [](uint32_t m) { return m; };
            kernel.template store<false>(piece, sums, static_cast<uint16_t*>(p.y), p.n, same, value);
        } else {
            float* to = p.partials == nullptr ? static_cast<float*>(p.y)
                                              : p.partials + uint64_t(piece.other) * p.m * p.n;
            kernel.store_f32(piece, sums, to, value);
        }
    });
}

#define PARAMETERS \
    const uint16_t *x, const unsigned char *weights, const float *, const uint16_t *bias, void *y, float *partials, \
        uint32_t m, uint32_t n, uint32_t k, uint32_t split_tiles, uint32_t wide_y
#define PROBLEM \
    Problem { x, weights, bias, y, partials, m, n, k, split_tiles, wide_y }

// Splits in blocks of their own are added by `matmul_reduce` of `matmul.cu`.
extern "C" __global__ void __launch_bounds__(warpgroup_product::THREADS) matmul_sm90_16(PARAMETERS) {
    // `run` follows earlier launches.
    matmul<warpgroup_product::Rows16<false>>(PROBLEM);
}

#define MATMUL(name, form, narrow) \
    extern "C" __global__ void __launch_bounds__(pipelined_product::THREADS, 1) name(PARAMETERS) { \
        follow();                                                                              \
        matmul_in_pieces<pipelined_product::form, narrow>(PROBLEM);                            \
    }

MATMUL(matmul_sm90_64, Rows64<false>, false)
MATMUL(matmul_sm90_128, Rows128<false>, false)
MATMUL(matmul_sm90_256, Rows256<false>, true)
MATMUL(matmul_sm90_192, Rows192<false>, true)
MATMUL(matmul_sm90_256_whole, Whole256<false>, true)
MATMUL(matmul_sm90_128_clustered, Clustered128, false)
MATMUL(matmul_sm90_256_clustered, Clustered256, true)
MATMUL(matmul_sm90_256_whole_clustered, ClusteredWhole256, true)
