// The products of `product_sm90.cuh`, bit for bit, for blocks that stay: a block goes from one piece of work
// to the next, and two of its warpgroups multiply what the third brings. Weights come by bulk copies, rows of
// x by ordinary ones; a stage is filled again as soon as its products are done, also while the sums before
// are written.
//
// 64 outputs are the fixed side of each warpgroup's product, up to 256 rows its variable one.
//
// Two blocks of a cluster may go through pieces with the same weights side by side. Each brings one of a
// stage's two tiles of weights to both, so weights are asked for once. A stage is filled again when both
// blocks are done with it.
#pragma once

#include "bulk.cuh"
#include "cluster.cuh"
#include "numbers.cuh"
#include "tile.cuh"
#include "wide_sm90.cuh"

namespace pipelined_product {

constexpr int TILE_K = 64, OUTPUTS = 64, WARPGROUPS = 2;
constexpr int CONSUMERS = 128 * WARPGROUPS, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
constexpr int IMAGE = OUTPUTS * TILE_K * 2;  // bytes of a packed weight's tile
// Rows that are staged at once on their way out, and their bytes for a warpgroup.
constexpr int CHUNK = 64, STAGING = CHUNK * OUTPUTS * 2;
// Blocks of a cluster that share copies of weights.
constexpr int CLUSTER = 2;

// Some rows by 128 outputs over the tiles [from, to) of K.
struct Piece {
    const unsigned char* weights;  // of its expert
    uint32_t first, end;           // rows
    uint32_t tile_n;               // the first warpgroup's tile of outputs
    int from, to;
    uint32_t other;  // a split or an expert
};

struct Operands {
    const uint16_t* x;
    uint32_t n, k;
    int split_tiles;
    // Row r of x belongs to `slots[r] / top`; null: to r.
    const uint32_t* slots;
    uint32_t top;
};

// Of a split's sums that were added up so far, a thread has KEPT in registers and the rest in shared memory;
// WHOLE: pieces have one split, and nothing is added up. BLOCKS: those that share weights, or 1; piece i is
// of block i % BLOCKS of a cluster, and pieces that they have at once differ in their rows alone.
template <int ROWS, int STAGES, int KEPT, bool WHOLE, bool GATHERED, int BLOCKS = 1>
struct Pipeline {
    static constexpr int BLOCK_ROWS = ROWS, CLUSTER_BLOCKS = BLOCKS;
    static constexpr int ROWS_BYTES = ROWS * TILE_K * 2, STAGE = ROWS_BYTES + WARPGROUPS * IMAGE;
    static constexpr int STASHED = WHOLE ? 0 : ROWS / 2 - KEPT;
    static constexpr int STAGING_AT = STAGES * STAGE, STASH_AT = STAGING_AT + WARPGROUPS * STAGING;
    static constexpr int BARRIERS_AT = STASH_AT + STASHED * CONSUMERS * 4;
    static constexpr int SOURCES_AT = BARRIERS_AT + 2 * STAGES * 8, SHARED = SOURCES_AT + ROWS * 4;
    static_assert(SHARED <= 227 << 10, "more shared memory than a block can have");
    static_assert(BLOCKS == 1 || BLOCKS == WARPGROUPS, "a block brings the tile of one warpgroup");

    const Operands& p;
    int tiles_k;
    // Which stage is next, and the parity of its use.
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ explicit Pipeline(const Operands& operands)
        : p(operands), tiles_k(operands.k / TILE_K) {}

    // `full` counts the arrival that announces the weights and one of every producer, `empty` one of every
    // consuming warp of every block that shares them.
    __device__ __forceinline__ static uint64_t* full(uint32_t stage) {
        return reinterpret_cast<uint64_t*>(shared_memory() + BARRIERS_AT) + stage;
    }
    __device__ __forceinline__ static uint64_t* empty(uint32_t stage) { return full(STAGES + stage); }
    __device__ __forceinline__ static uint32_t* sources() {
        return reinterpret_cast<uint32_t*>(shared_memory() + SOURCES_AT);
    }

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    // Goes through the pieces that `works(i, piece)` gives until it says false; `end(piece, sums)` gets a
    // piece's.
    template <class Works, class End>
    __device__ __forceinline__ void run(const Works& works, const End& end) {
        if (threadIdx.x == 0) {
            for (uint32_t s = 0; s < STAGES; ++s) {
                barrier_init(full(s), 1 + PRODUCERS);
                barrier_init(empty(s), BLOCKS * CONSUMERS / 32);
            }
            fence_barriers();
        }
        if (BLOCKS > 1) sync_cluster();
        else sync_block();
        if (threadIdx.x >= CONSUMERS) {
            fewer_registers<40>();
            produce(works);
        } else {
            more_registers<232>();
            consume(works, end);
        }
        // The other block may still have to arrive at this one's barriers.
        if (BLOCKS > 1) sync_cluster();
    }

    // === the producers ===

    template <class Works>
    __device__ __forceinline__ void produce(const Works& works) {
        const uint32_t thread = threadIdx.x - CONSUMERS, unit = thread % 8;
        Piece piece;
        for (uint32_t i = blockIdx.x; works(i, piece); i += gridDim.x) {
            if (GATHERED) find_sources(piece, thread);
            const uint32_t images = min_of((p.n + OUTPUTS - 1) / OUTPUTS - piece.tile_n, uint32_t(WARPGROUPS));
            const uint16_t* from = p.x + uint64_t(piece.from) * TILE_K + unit * 8;
            for (int tile = piece.from; tile < piece.to; ++tile, from += TILE_K) {
                barrier_wait(empty(stage), parity ^ 1);
                unsigned char* to = shared_memory() + stage * STAGE;
                if (thread == 0) {
                    barrier_expect(full(stage), images * IMAGE);
                    const unsigned char* image = piece.weights + (uint64_t(piece.tile_n) * tiles_k + tile) * IMAGE;
                    copy_weights(image, images, to + ROWS_BYTES);
                }
                copy_rows(piece, thread, from, to);
                copies_arrive(full(stage));
                advance();
            }
        }
        async_copy_commit();
        async_copy_wait<0>();
    }

    // A stage's tiles of weights, one or two.
    __device__ __forceinline__ void copy_weights(const unsigned char* image, uint32_t images,
                                                 unsigned char* to) const {
        const uint64_t next = uint64_t(tiles_k) * IMAGE;  // the tile of the next outputs
        if (BLOCKS > 1) {
            const uint32_t own = block_in_cluster();
            constexpr uint32_t ALL = (1 << BLOCKS) - 1;
            if (own < images) bulk_copy_to(ALL, to + own * IMAGE, image + own * next, IMAGE, full(stage));
            return;
        }
        bulk_copy(to, image, IMAGE, full(stage));
        if (images > 1) bulk_copy(to + IMAGE, image + next, IMAGE, full(stage));
    }

    // This warp's rows of x, 4 of every 16.
    __device__ __forceinline__ void find_sources(const Piece& piece, uint32_t thread) const {
        sync_warp();
        for (uint32_t i = thread % 32; i < ROWS / 4; i += 32) {
            const uint32_t row = i / 4 * 16 + thread / 32 * 4 + i % 4, m = piece.first + row;
            if (m < piece.end) sources()[row] = p.slots == nullptr ? m : p.slots[m] / p.top;
        }
        sync_warp();
    }

    // Rows behind the piece's end stay what they were: their sums go nowhere. `from` is this thread's unit of
    // row 0.
    __device__ __forceinline__ void copy_rows(const Piece& piece, uint32_t thread, const uint16_t* from,
                                              unsigned char* to) const {
        constexpr int STEP = PRODUCERS / 8;  // rows that all copy at once; of a thread, they lie alike in their eights
        const uint32_t row = thread / 8;
        const int left = int(piece.end - piece.first) - int(row);
        unsigned char* target = unit_of<8>(to, row, thread % 8);
        const uint16_t* source = from + uint64_t(piece.first + row) * p.k;
#pragma unroll
        for (int c = 0; c < ROWS / STEP; ++c) {
            if (c * STEP >= left) continue;
            if (GATHERED) source = from + uint64_t(sources()[row + c * STEP]) * p.k;
            async_copy_16(target + c * STEP * TILE_K * 2, source, true);
            if (!GATHERED) source += STEP * p.k;
        }
    }

    // === the consumers ===

    // A piece's sums: lane 4 g + t of warp w holds outputs 16 w + g and + 8, of rows 8 j + 2 t and the next.
    struct Sums {
        static constexpr int COUNT = ROWS / 2, HERE = WHOLE || COUNT < KEPT ? COUNT : KEPT;
        float here[HERE];

        __device__ __forceinline__ static float& stashed(int i) {
            return reinterpret_cast<float*>(shared_memory() + STASH_AT)[(i - HERE) * CONSUMERS + threadIdx.x];
        }
        __device__ __forceinline__ float operator[](int i) const {
            return i < HERE ? here[i < HERE ? i : 0] : stashed(i);
        }

        __device__ __forceinline__ void add(const float (&part)[COUNT], bool is_first) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (i < HERE) here[i < HERE ? i : 0] = (WHOLE || is_first ? 0.0f : here[i < HERE ? i : 0]) + part[i];
                else stashed(i) = (is_first ? 0.0f : stashed(i)) + part[i];
            }
        }
    };

    template <class Works, class End>
    __device__ __forceinline__ void consume(const Works& works, const End& end) {
        Piece piece;
        for (uint32_t i = blockIdx.x; works(i, piece); i += gridDim.x) {
            Sums sums;
            const int step = WHOLE ? piece.to - piece.from : p.split_tiles;
            for (int split = piece.from; split < piece.to; split += step) {
                float part[ROWS / 2];
#pragma unroll
                for (int i = 0; i < ROWS / 2; ++i) part[i] = 0.0f;
                multiply_split(part, piece.end - piece.first, split, min_of(split + step, piece.to));
                sums.add(part, split == piece.from);
            }
            end(piece, sums);
        }
    }

    // By products as wide as the rows need.
    __device__ __forceinline__ void multiply_split(float (&part)[ROWS / 2], uint32_t rows, int first, int last) {
        if (ROWS > 64 && rows <= 64) multiply_tiles(first_of<32>(part), first, last);
        else if (ROWS > 128 && rows <= 128) multiply_tiles(first_of<ROWS < 128 ? 32 : 64>(part), first, last);
        else if (ROWS > 192 && rows <= 192) multiply_tiles(first_of<ROWS < 192 ? 32 : 96>(part), first, last);
        else multiply_tiles(part, first, last);
    }

    template <int COUNT, int ALL>
    __device__ __forceinline__ static float (&first_of(float (&part)[ALL]))[COUNT] {
        return reinterpret_cast<float (&)[COUNT]>(part);
    }

    // The tiles [tile, last) of K.
    template <int COUNT>
    __device__ __forceinline__ void multiply_tiles(float (&part)[COUNT], int tile, int last) {
        uint32_t before = 0;
        for (const int first = tile; tile < last; ++tile) {
            barrier_wait(full(stage), parity);
            fence_for_matrix_units();
            multiply<2 * COUNT>(part, shared_memory() + stage * STAGE);
            // While these products run, those of the tile before are over.
            warpgroup_wait<1>(part);
            if (tile > first) release(before);
            before = stage;
            advance();
        }
        warpgroup_wait<0>(part);
        release(before);
    }

    // This warp reads the stage no more: whoever may fill it knows.
    __device__ __forceinline__ static void release(uint32_t stage) {
        const uint32_t lane = threadIdx.x % 32;
        if (BLOCKS > 1) {
            if (lane < BLOCKS) barrier_arrive_at(empty(stage), lane);
        } else if (lane == 0) {
            barrier_arrive(empty(stage));
        }
    }

    // Starts the products of one tile; they run until `warpgroup_wait`.
    template <int WIDTH>
    __device__ __forceinline__ static void multiply(float (&part)[WIDTH / 2], unsigned char* rows) {
        unsigned char* weights = rows + ROWS_BYTES + threadIdx.x / 128 * IMAGE;
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step)
            warpgroup_mma(part, swizzled_operand(weights + 32 * step), swizzled_operand(rows + 32 * step));
        warpgroup_commit();
    }

    // === the way out ===

    // Where sum i of this thread belongs.
    __device__ __forceinline__ static uint32_t output(const Piece& piece, int i) {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return (piece.tile_n + warp / 4) * OUTPUTS + warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8;
    }
    __device__ __forceinline__ static uint32_t row(const Piece& piece, int i) {
        return piece.first + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    }

    // `y[m, n]` gets `value(sums, i)`, unrounded.
    template <class Value>
    __device__ __forceinline__ void store_f32(const Piece& piece, const Sums& sums, float* y,
                                              const Value& value) const {
        const uint32_t n = output(piece, 0), left = piece.end - min_of(row(piece, 0), piece.end);
        float* to = y + uint64_t(row(piece, 0)) * p.n + n;
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            const uint32_t down = i / 4 * 8 + i % 2, right = i / 2 % 2 * 8;
            if (down < left && n + right < p.n) to[uint64_t(down) * p.n + right] = value(sums, i);
        }
    }

    // `y[row_of(m), columns]` gets `value(sums, i)` for each i, rounded. HALVED: sums i and i + 2, of outputs
    // n and n + 8, make one value; outputs in sixteens become columns in eights. Sixteen bytes at a time, by
    // way of shared memory.
    template <bool HALVED, class RowOf, class Value>
    __device__ __forceinline__ void store(const Piece& piece, const Sums& sums, uint16_t* y, uint32_t columns,
                                          const RowOf& row_of, const Value& value) const {
        constexpr int UNITS = HALVED ? 4 : 8;  // of a row of this warpgroup
        const uint32_t group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const uint32_t first_column = (piece.tile_n + group) * UNITS * 8;
        unsigned char* staging = shared_memory() + STAGING_AT + group * STAGING;
        const bool in_units = columns % 8 == 0 && reinterpret_cast<uint64_t>(y) % 16 == 0;
#pragma unroll
        for (int chunk = 0; chunk < ROWS / CHUNK; ++chunk) {
            if (piece.first + chunk * CHUNK >= piece.end) break;
#pragma unroll
            for (int j = 0; j < CHUNK / 8; j += HALVED ? 4 : 2) {
                uint32_t four[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int i = (chunk * CHUNK / 8 + j + (HALVED ? q : q / 2)) * 4 + (HALVED ? 0 : q % 2 * 2);
                    four[q] = bf16_pair(value(sums, i), value(sums, i + 1));
                }
                const int eight = j + (HALVED ? lane / 8 : lane / 16), unit = HALVED ? warp : warp * 2 + lane / 8 % 2;
                store_matrix_transposed(four, unit_of<UNITS>(staging, eight * 8 + lane % 8, unit));
            }
            sync_some(1 + group, 128);
            for (uint32_t i = threadIdx.x % 128; i < CHUNK * UNITS; i += 128) {
                const uint32_t r = i / UNITS, unit = i % UNITS, m = piece.first + chunk * CHUNK + r;
                const uint32_t column = first_column + unit * 8;
                if (m >= piece.end || column >= columns) continue;
                const unsigned char* from = unit_of<UNITS>(staging, r, unit);
                uint16_t* to = y + uint64_t(row_of(m)) * columns + column;
                if (in_units) {
                    store_packet(to, load_packet(from));
                    continue;
                }
                for (uint32_t e = 0; e < 8 && column + e < columns; ++e)
                    to[e] = reinterpret_cast<const uint16_t*>(from)[e];
            }
            sync_some(1 + group, 128);
        }
    }
};

// The forms that kernels have, by the rows of a piece. Whole: of one split, whose sums need no room beside those
// of the split, which makes room for another stage.
template <bool GATHERED>
using Rows64 = Pipeline<64, 8, 32, false, GATHERED>;
template <bool GATHERED>
using Rows128 = Pipeline<128, 6, 64, false, GATHERED>;
template <bool GATHERED>
using Rows192 = Pipeline<192, 5, 96, false, GATHERED>;
template <bool GATHERED>
using Rows256 = Pipeline<256, 3, 64, false, GATHERED>;
template <bool GATHERED>
using Whole256 = Pipeline<256, 4, 0, true, GATHERED>;
// The same of two blocks that share weights.
using Clustered128 = Pipeline<128, 6, 64, false, false, CLUSTER>;
using Clustered256 = Pipeline<256, 3, 64, false, false, CLUSTER>;
using ClusteredWhole256 = Pipeline<256, 4, 0, true, false, CLUSTER>;

}  // namespace pipelined_product
