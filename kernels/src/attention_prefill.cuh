// Attention of 128 rows a block, the arithmetic of `attention_decode.cuh` element by element (arXiv
// 2307.08691 cuts the work so). Each of eight warps does 16 rows by itself: their query stays in registers,
// and the weights go from the sums of one product to the operand of the next without leaving them, so that
// warps meet only where tiles arrive.
#pragma once

#include "attention.cuh"

template <int DIM, bool FP8, int STAGES>
struct Prefill : Rows<DIM, DIM, false, FP8, 128, 256, 64> {
    using Base = Rows<DIM, DIM, false, FP8, 128, 256, 64>;
    static constexpr int THREADS = 256, TILE = 64, UNITS = DIM / 8, STEPS = DIM / 16, TILE_STEPS = TILE / 16;
    static constexpr int ROW = 2 * DIM;  // bytes
    // bf16: a stage is read where it was copied to, and filled anew when all are done with it. FP8: whoever
    // copied codes widens them, and may fill their stage at once; the others read what was widened, in one of
    // two places by turns.
    static constexpr int AHEAD = FP8 ? STAGES : STAGES - 1;
    static constexpr int SHARED = STAGES * Base::STAGE + (FP8 ? 2 * Base::WIDE : 0);
    using State = RowState<UNITS>;
    using Scores = float[TILE / 8][4];
    using Seen = typename Base::Seen;
    using Base::item, Base::lane, Base::warp;

    unsigned char *stages, *wide;
    Seen all;  // what every row of this warp sees; any sees at most 15 positions more at either end
    uint32_t q[STEPS][4];

    __device__ __forceinline__ Prefill(const Item& item, const Shape& shape, const uint32_t* tables,
                                       const void* keys, const void* values, float score_scale)
        : Base(item, shape, tables, keys, values, score_scale) {
        stages = shared_memory();
        wide = stages + STAGES * Base::STAGE;
        const int first_row = 16 * warp;
        const uint32_t first = item.first_row + first_row, rows = item.tokens * shape.group;
        all = Seen{0, 0};
        if (first < rows) {
            const Seen top = Base::seen(first), bottom = Base::seen(min_of(first + 16, rows) - 1);
            all = Seen{bottom.from, top.to};
        }
    }

    // Of what this thread copied itself.
    __device__ __forceinline__ void widen(const unsigned char* from, unsigned char* to) const {
        const int first = int(threadIdx.x) / Base::VECTOR_UNITS, unit = int(threadIdx.x) % Base::VECTOR_UNITS;
#pragma unroll 2
        for (int i = 0; i < 2 * Base::COPIES; ++i) {
            const int row = first + i / 2 * Base::STEP, values = i % 2;
            Packet even, odd;
            const unsigned char* codes = unit_of<Base::VECTOR_UNITS>(
                const_cast<unsigned char*>(from) + values * Base::STAGE / 2, row, unit);
            widen_codes(even.words, odd.words, load_packet(codes).words);
            store_packet(unit_of<UNITS>(to + values * Base::KEYS, row, 2 * unit), even);
            store_packet(unit_of<UNITS>(to + values * Base::KEYS, row, 2 * unit + 1), odd);
        }
    }

    __device__ __forceinline__ void multiply_keys(Scores& scores, unsigned char* keys) const {
        const int matrix = lane / 8, row = lane % 8;
        const int at = (matrix / 2 * 8 + row) * ROW + ((matrix % 2 ^ row) << 4);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int k = 0; k < TILE / 8; k += 2) {
                uint32_t b[4];
                // `unit_of` of key 8 k + ... and unit 2 step + ..., written so that little is left to
                // compute.
                load_matrix(b, keys + (at ^ step << 5) + k * 8 * ROW);
                mma(scores[k], q[step], b[0], b[1]);
                mma(scores[k + 1], q[step], b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void mask(Scores& scores, int tile) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Seldom needed, and so no registers are kept for it.
            const Seen own = Base::seen(item.first_row + 16 * warp + 8 * half + lane / 4);
#pragma unroll
            for (int k = 0; k < TILE / 8; ++k) {
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    const int position = tile * TILE + 8 * k + lane % 4 * 2 + i % 2;
                    if (!own.holds(position)) scores[k][i] = NEGATIVE_INFINITY;
                }
            }
        }
    }

    // Scores to weights, as the first operand of their product with the values: `a[i]` for 16 positions each.
    __device__ __forceinline__ void weigh(State& state, Scores& scores, uint32_t (&a)[TILE_STEPS][4],
                                          int tile) const {
        if (!Base::is_seen(all, tile)) mask(scores, tile);
        float to[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = NEGATIVE_INFINITY;
#pragma unroll
            for (int k = 0; k < TILE / 8; ++k)
                top = fmaxf(top, fmaxf(scores[k][2 * half], scores[k][2 * half + 1]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            to[half] = raised(state.reference[half], multiply_rounded(top, Base::score_scale));
        }
        state.raise(to);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Weigh weight(Base::score_scale, state.reference[half]);
            float quarters[TILE_STEPS];
#pragma unroll
            for (int k = 0; k < TILE / 8; ++k) {
                const float low = weight(scores[k][2 * half]), high = weight(scores[k][2 * half + 1]);
                quarters[k / 2] = k % 2 == 0 ? low + high : quarters[k / 2] + (low + high);
                a[k / 2][half + k % 2 * 2] = bf16_pair(low, high);
            }
            state.sum[half] += sum_of_quarters(quarters[0], quarters[1], quarters[2], quarters[3]);
        }
    }

    __device__ __forceinline__ void multiply_values(State& state, const uint32_t (&a)[TILE_STEPS][4],
                                                    unsigned char* values) const {
        const int matrix = lane / 8, row = lane % 8;
        const int at = (matrix % 2 * 8 + row) * ROW + ((matrix / 2 ^ row) << 4);
#pragma unroll
        for (int step = 0; step < TILE_STEPS; ++step) {
#pragma unroll
            for (int c = 0; c < UNITS; c += 2) {
                uint32_t b[4];
                load_matrix_transposed(b, values + (at ^ c << 4) + step * 16 * ROW);
                mma(state.out[c], a[step], b[0], b[1]);
                mma(state.out[c + 1], a[step], b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void load(int tile, int stage) {
        Base::load_tile(tile, stages + stage * Base::STAGE);
        Base::look_up(tile + 1);
    }

    // Goes through all chunks; `end_of_chunk` gets each one's state, or, CARRIED, that of all of them.
    template <bool CARRIED, class End>
    __device__ __forceinline__ void run(const uint16_t* rows, uint32_t q_stride, End end_of_chunk) {
        const int first = Base::first_tile(), end = Base::end_tile();
        // Until it is in registers the query lies where no tile comes before the first barrier of the loop.
        static_assert(Base::QUERY <= (FP8 ? Base::WIDE : Base::STAGE), "the query lies where tiles come later");
        unsigned char* query =
            FP8 ? wide + (first + 1) % 2 * Base::WIDE : stages + (STAGES - 1) * Base::STAGE;
        Base::load_query(query, rows, q_stride);
        async_copy_commit();
        Base::look_up(first);
        for (int s = 0; s < AHEAD; ++s) {
            if (first + s < end) load(first + s, s);
            async_copy_commit();
        }
        async_copy_wait<AHEAD>();
        sync_block();
        if (FP8) {
            Base::permute_query(query);
            sync_block();
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) Base::query_fragment(q[step], query, 16 * warp, step);

        State state;
        state.clear();
        int stage = 0;
        for (int tile = first; tile < end; ++tile) {
            async_copy_wait<AHEAD - 1>();
            unsigned char* keys = stages + stage * Base::STAGE;
            if (FP8) {
                // The other place is still read; this one's readers were done before the barrier of the last
                // tile, and the query in it was in registers before that of the first.
                unsigned char* to = wide + tile % 2 * Base::WIDE;
                widen(keys, to);
                keys = to;
            }
            // The tile is there for all, and, of bf16, all are done with the stage that is filled next.
            sync_block();
            const int ahead = tile + AHEAD;
            if (ahead < end) load(ahead, FP8 ? stage : stage == 0 ? STAGES - 1 : stage - 1);
            async_copy_commit();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            // A tile of which a warp's rows see nothing would change nothing.
            if (tile * TILE < all.to + 16 && (tile + 1) * TILE > all.from - 16) {
                Scores scores = {};
                multiply_keys(scores, keys);
                uint32_t a[TILE_STEPS][4];
                weigh(state, scores, a, tile);
                multiply_values(state, a, keys + Base::KEYS);
            }
            if ((!CARRIED && (tile + 1) % (CHUNK / TILE) == 0) || tile + 1 == end) {
                state.end_chunk();
                end_of_chunk(state);
                state.clear();
            }
        }
        async_copy_wait<0>();
    }

    __device__ __forceinline__ void leave(const State& state, float* partials, uint32_t slot) const {
        Base::store_partial(state, partials, slot, 16 * warp, 0);
    }
    __device__ __forceinline__ void finish(const State& state, uint16_t* out, const float* sinks,
                                           float value_scale) const {
        Base::store_out(state, out, sinks, value_scale, 16 * warp, 0);
    }
};
