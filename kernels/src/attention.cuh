// The parts of paged attention that do not know about pages or batches: running softmax state of a tile of
// rows, its product with keys and values in shared memory, and the merging of two states. `attention.cu`
// says what is computed.
#pragma once

#include "numbers.cuh"
#include "tile.cuh"

// 2^(from - to); 0 for a row that has seen nothing yet.
__device__ __forceinline__ float rescale(float from, float to) {
    return from == NEGATIVE_INFINITY ? 0.0f : exp2_fast(from - to);
}

// Joins what later positions gave to what earlier ones gave. Always in this order, in this arithmetic: the
// split and the whole form of attention agree in every bit because both call this.
struct Merge {
    float maximum, earlier, later;
    __device__ __forceinline__ Merge(float earlier_maximum, float later_maximum)
        : maximum(fmaxf(earlier_maximum, later_maximum)),
          earlier(rescale(earlier_maximum, maximum)),
          later(rescale(later_maximum, maximum)) {}
    __device__ __forceinline__ float operator()(float a, float b) const {
        return fmaf(a, earlier, b * later);
    }
};

// What turns a row's sums into its output: division by the softmax's denominator, which a sink may have
// joined.
struct Finish {
    float numerator, denominator;
    __device__ __forceinline__ Finish(float maximum, float sum, float sink, float value_scale) {
        const float top = fmaxf(maximum, sink);
        const float own = rescale(maximum, top);
        numerator = own * value_scale;
        denominator = fmaf(sum, own, rescale(sink, top));
    }
    __device__ __forceinline__ float operator()(float value) const { return value * numerator / denominator; }
};

// A block's rows (ROW_TILES times 16 of them) against one tile of positions after another. Warps share the
// work twice: each takes TILE / WARPS of the positions for the scores, then VALUE_DIM / WARPS of the
// output's columns. Every element is one chain over fixed positions, so neither split changes a bit.
template <int KEY_DIM, int VALUE_DIM, int VALUE_UNITS_PER_ROW, int ROW_TILES, int WARPS, int TILE>
struct RowState {
    static constexpr int KEY_UNITS = KEY_DIM / 8, TILE_UNITS = TILE / 8;
    static constexpr int KEYS = TILE / WARPS, KEY_TILES = KEYS / 8;
    static constexpr int COLUMNS = VALUE_DIM / WARPS, COLUMN_TILES = COLUMNS / 8;
    static_assert(KEYS == 16 || KEYS == 8, "a warp's share of positions is one ldmatrix");
    static_assert(COLUMNS % 16 == 0, "a warp's share of columns is whole pairs of tiles");

    // Of rows (g, g + 8) of each row tile, lane = 4 g + t. `sum` is this lane's share until `end_chunk`.
    float maximum[ROW_TILES][2], sum[ROW_TILES][2];
    float out[ROW_TILES][COLUMN_TILES][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            for (int half = 0; half < 2; ++half) maximum[r][half] = NEGATIVE_INFINITY, sum[r][half] = 0.0f;
            for (int c = 0; c < COLUMN_TILES; ++c)
                for (int i = 0; i < 4; ++i) out[r][c][i] = 0.0f;
        }
    }

    // scores = query . key for this warp's positions of the tile.
    __device__ __forceinline__ static void multiply_keys(float (&scores)[ROW_TILES][KEY_TILES][4],
                                                         unsigned char* query, unsigned char* keys, int warp,
                                                         int lane) {
        constexpr int STEPS = KEYS == 16 ? 1 : 2;  // of 16 elements that one ldmatrix of keys feeds
        const int matrix = lane / 8, row = lane % 8;
        const int key = warp * KEYS + (KEYS == 16 ? matrix / 2 * 8 + row : row);
        const int key_unit = KEYS == 16 ? matrix % 2 : matrix;
#pragma unroll 4
        for (int unit = 0; unit < KEY_UNITS; unit += 2 * STEPS) {
            uint32_t b[4];
            load_matrix(b, unit_of<KEY_UNITS>(keys, key, unit + key_unit));
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    uint32_t a[4];
                    load_matrix(a, unit_of<KEY_UNITS>(query, 16 * r + matrix % 2 * 8 + row,
                                                      unit + 2 * step + matrix / 2));
                    if (KEYS == 16) {
                        mma(scores[r][0], a, b[0], b[1]);
                        mma(scores[r][KEY_TILES - 1], a, b[2], b[3]);
                    } else {
                        mma(scores[r][0], a, b[2 * step], b[2 * step + 1]);
                    }
                }
            }
        }
    }

    // out += weights . values and sum += weights, for this warp's columns.
    __device__ __forceinline__ void multiply_values(unsigned char* weights, unsigned char* values, int warp,
                                                    int lane) {
        const int matrix = lane / 8, row = lane % 8;
#pragma unroll
        for (int unit = 0; unit < TILE_UNITS; unit += 2) {
            uint32_t a[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                load_matrix(a[r],
                            unit_of<TILE_UNITS>(weights, 16 * r + matrix % 2 * 8 + row, unit + matrix / 2));
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[r][i % 2] += bf16_low(a[r][i]) + bf16_high(a[r][i]);
            }
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c += 2) {
                uint32_t b[4];
                load_matrix_transposed(b,
                                       unit_of<VALUE_UNITS_PER_ROW>(values, unit * 8 + matrix % 2 * 8 + row,
                                                                    (warp * COLUMN_TILES + c) + matrix / 2));
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    mma(out[r][c], a[r], b[0], b[1]);
                    mma(out[r][c + 1], a[r], b[2], b[3]);
                }
            }
        }
    }

    // Takes the tile's maximum into account: of every row over all warps' positions. Needs a barrier before
    // and gives none after.
    __device__ __forceinline__ void raise_maximum(const float* maxima, int lane) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * r + 8 * half + lane / 4;
                float top = maximum[r][half];
#pragma unroll
                for (int w = 0; w < WARPS; ++w) top = fmaxf(top, maxima[w * 16 * ROW_TILES + row]);
                const float by = rescale(maximum[r][half], top);
                maximum[r][half] = top;
                sum[r][half] *= by;
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; ++c) {
                    out[r][c][2 * half] *= by;
                    out[r][c][2 * half + 1] *= by;
                }
            }
        }
    }

    // Makes `sum` the row's.
    __device__ __forceinline__ void end_chunk() {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                sum[r][half] += shuffle_xor(sum[r][half], 1);
                sum[r][half] += shuffle_xor(sum[r][half], 2);
            }
        }
    }

    __device__ __forceinline__ void join(const RowState& later) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Merge merge(maximum[r][half], later.maximum[r][half]);
                maximum[r][half] = merge.maximum;
                sum[r][half] = merge(sum[r][half], later.sum[r][half]);
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; ++c) {
                    for (int i = 2 * half; i < 2 * half + 2; ++i)
                        out[r][c][i] = merge(out[r][c][i], later.out[r][c][i]);
                }
            }
        }
    }
};
