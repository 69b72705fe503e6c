// Attention of up to 16 rows a block. Its four warps share the work twice: each takes a quarter of a tile's
// positions for the scores, then a quarter of the output's columns; maxima and weights cross between them in
// shared memory. Every element is one chain over fixed positions, so neither split changes a bit.
#pragma once

#include "attention.cuh"

template <int KEY_DIM, int VALUE_DIM, bool LATENT, bool FP8, int TILE, int STAGES>
struct Decode : Rows<KEY_DIM, VALUE_DIM, LATENT, FP8, 16, 128, TILE> {
    using Base = Rows<KEY_DIM, VALUE_DIM, LATENT, FP8, 16, 128, TILE>;
    static constexpr int WARPS = 4, THREADS = 128, ROWS = 16;
    static constexpr int KEY_UNITS = KEY_DIM / 8, STEPS = KEY_DIM / 16, TILE_UNITS = TILE / 8;
    static constexpr int VALUE_ROW_UNITS = LATENT ? KEY_UNITS : VALUE_DIM / 8;
    static constexpr int OWN_KEYS = TILE / WARPS, KEY_TILES = OWN_KEYS / 8;
    static constexpr int COLUMNS = VALUE_DIM / WARPS, COLUMN_TILES = COLUMNS / 8;
    static_assert(OWN_KEYS == (LATENT ? 8 : 16), "a warp's share of positions is one ldmatrix");
    static_assert(COLUMNS % 16 == 0, "a warp's share of columns is whole pairs of tiles");
    // Bytes in shared memory. The query lies where the last stage will be, until it is in registers; a
    // latent's is too long for those and stays. FP8 latents are widened as a whole, since every warp needs
    // them as values.
    static constexpr int WEIGHTS = ROWS * TILE * 2, MAXIMA = WARPS * ROWS * 4;
    static constexpr int QUARTERS = LATENT ? WARPS * 2 * 32 * 4 : 0;  // others' lie where keys were
    static constexpr int KEPT_QUERY = LATENT ? Base::QUERY : 0, WIDE = LATENT && FP8 ? Base::WIDE : 0;
    static constexpr int SHARED = STAGES * Base::STAGE + WEIGHTS + MAXIMA + QUARTERS + KEPT_QUERY + WIDE;
    using State = RowState<COLUMN_TILES>;
    using Scores = float[KEY_TILES][4];
    using Seen = typename Base::Seen;
    using Base::item, Base::lane, Base::limit_end, Base::warp;

    unsigned char *stages, *weights, *query, *wide;
    float* maxima;
    Seen all, own[2];  // what every row sees, and this lane's two
    uint32_t q[LATENT ? 1 : STEPS][4];

    __device__ __forceinline__ Decode(const Item& item, const Shape& shape, const uint32_t* tables,
                                      const void* keys, const void* values, float score_scale)
        : Base(item, shape, tables, keys, values, score_scale) {
        stages = shared_memory();
        weights = stages + STAGES * Base::STAGE;
        maxima = reinterpret_cast<float*>(weights + WEIGHTS);
        unsigned char* rest = weights + WEIGHTS + MAXIMA + QUARTERS;
        query = LATENT ? rest : stages + (STAGES - 1) * Base::STAGE;
        wide = rest + KEPT_QUERY;
        const uint32_t end = min_of(item.first_row + ROWS, item.tokens * shape.group);
        all = Seen{Base::seen(end - 1).from, Base::seen(item.first_row).to};
        for (int half = 0; half < 2; ++half) own[half] = Base::seen(item.first_row + 8 * half + lane / 4);
    }

    // A latent's vectors do not fall evenly on threads.
    __device__ __forceinline__ void load_latents(int tile, unsigned char* to) {
#pragma unroll 4
        for (int i = threadIdx.x; i < TILE * Base::VECTOR_UNITS; i += THREADS) {
            const int row = i / Base::VECTOR_UNITS, unit = i % Base::VECTOR_UNITS, position = tile * TILE + row;
            const bool valid = position < limit_end;
            const uint32_t page = Base::tables[(valid ? position : limit_end - 1) >> Base::shape.page_shift];
            const uint64_t at = uint64_t(Base::vector_at(page, position)) * Base::VECTOR + unit * 16;
            unsigned char* of_unit = FP8 ? to + i * 16 : unit_of<KEY_UNITS>(to, row, unit);
            async_copy_16(of_unit, Base::key_pages + at, valid);
        }
    }

    __device__ __forceinline__ void load(int tile, int stage) {
        unsigned char* to = stages + stage * Base::STAGE;
        if constexpr (LATENT) {
            load_latents(tile, to);
        } else {
            Base::load_tile(tile, to);
            Base::look_up(tile + 1);
        }
    }

    __device__ __forceinline__ void widen_latents(const unsigned char* from) const {
        for (int i = threadIdx.x; i < TILE * STEPS; i += THREADS) {
            Packet even, odd;
            widen_codes(even.words, odd.words, load_packet(from + i * 16).words);
            store_packet(unit_of<KEY_UNITS>(wide, i / STEPS, i % STEPS * 2), even);
            store_packet(unit_of<KEY_UNITS>(wide, i / STEPS, i % STEPS * 2 + 1), odd);
        }
    }

    // scores = query . key for this warp's positions of the tile.
    __device__ __forceinline__ void multiply_keys(Scores& scores, unsigned char* keys) {
        const int matrix = lane / 8, row = lane % 8;
        if constexpr (LATENT) {
            const int key = warp * OWN_KEYS + row;
#pragma unroll 4
            for (int step = 0; step < STEPS; step += 2) {
                uint32_t a[2][4], b[4];
                load_matrix(b, unit_of<KEY_UNITS>(keys, key, 2 * step + matrix));
                for (int i = 0; i < 2; ++i) {
                    Base::query_fragment(a[i], query, 0, step + i);
                    mma(scores[0], a[i], b[2 * i], b[2 * i + 1]);
                }
            }
        } else if constexpr (FP8) {
            const int key = warp * OWN_KEYS + matrix / 2 * 8 + row;
            // All at once: one after another each would be waited for.
            uint32_t codes[STEPS / 2][4], low[4], high[4];
#pragma unroll
            for (int step = 0; step < STEPS; step += 2)
                load_matrix(codes[step / 2], unit_of<STEPS>(keys, key, step + matrix % 2));
#pragma unroll
            for (int step = 0; step < STEPS; step += 2) {
                widen_codes(low, high, codes[step / 2]);
                for (int i = 0; i < 4; ++i) mma(scores[i / 2], q[step + i % 2], low[i], high[i]);
            }
        } else {
            const int key = warp * OWN_KEYS + matrix / 2 * 8 + row;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                uint32_t b[4];
                load_matrix(b, unit_of<KEY_UNITS>(keys, key, 2 * step + matrix % 2));
                for (int i = 0; i < 2; ++i) mma(scores[i], q[step], b[2 * i], b[2 * i + 1]);
            }
        }
    }

    // Masks the scores, and tells the block the largest of each row among this warp's positions.
    __device__ __forceinline__ void bound_scores(Scores& scores, int tile) {
        const bool masked = !Base::is_seen(all, tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = NEGATIVE_INFINITY;
#pragma unroll
            for (int k = 0; k < KEY_TILES; ++k) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = scores[k][2 * half + j];
                    const int position = tile * TILE + warp * OWN_KEYS + 8 * k + lane % 4 * 2 + j;
                    if (masked && !own[half].holds(position)) score = NEGATIVE_INFINITY;
                    top = fmaxf(top, score);
                }
            }
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            if (lane % 4 == 0) maxima[warp * ROWS + 8 * half + lane / 4] = top;
        }
    }

    // Takes the maxima of all warps into account, and leaves the weights in shared memory, as bf16, and what
    // each lane's add up to: a warp's positions are a quarter of the tile.
    __device__ __forceinline__ void weigh(State& state, const Scores& scores, float* quarters) {
        float to[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 8 * half + lane / 4;
            float top = NEGATIVE_INFINITY;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) top = fmaxf(top, maxima[w * ROWS + row]);
            to[half] = raised(state.reference[half], multiply_rounded(top, Base::score_scale));
            const Weigh weight(Base::score_scale, to[half]);
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < KEY_TILES; ++k) {
                auto at = reinterpret_cast<uint32_t*>(
                    unit_of<TILE_UNITS>(weights, row, warp * KEY_TILES + k));
                const float low = weight(scores[k][2 * half]), high = weight(scores[k][2 * half + 1]);
                at[lane % 4] = bf16_pair(low, high);
                sum = k == 0 ? low + high : sum + (low + high);
            }
            quarters[warp * 64 + half * 32 + lane] = sum;
        }
        state.raise(to);
    }

    __device__ __forceinline__ void add_sums(State& state, const float* quarters) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* of_lane = quarters + half * 32 + lane;
            state.sum[half] += sum_of_quarters(of_lane[0], of_lane[64], of_lane[128], of_lane[192]);
        }
    }

    // out += weights . values, for this warp's columns.
    __device__ __forceinline__ void multiply_values(State& state, unsigned char* values) {
        const int matrix = lane / 8, row = lane % 8;
        // FP8: an ldmatrix holds two units of sixteen columns, or one and twice as many positions.
        constexpr int UNITS = COLUMN_TILES / 2, PAIRED = UNITS % 2 == 0 ? 1 : 2;
        constexpr int LOADS = FP8 && !LATENT ? TILE_UNITS / 2 / PAIRED : 1;
        uint32_t codes[LOADS][4], low[4], high[4];
        if constexpr (FP8 && !LATENT) {
            static_assert(UNITS <= 2, "");
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int position = i * PAIRED * 16 + (PAIRED == 1 ? matrix % 2 * 8 : matrix * 8) + row;
                const int of_row = warp * UNITS + (PAIRED == 1 ? matrix / 2 : 0);
                load_matrix_transposed(codes[i], unit_of<STEPS>(values, position, of_row));
            }
        }
#pragma unroll
        for (int unit = 0; unit < TILE_UNITS; unit += 2) {
            uint32_t a[4];
            load_matrix(a, unit_of<TILE_UNITS>(weights, matrix % 2 * 8 + row, unit + matrix / 2));
            if constexpr (FP8 && !LATENT) {
                if (PAIRED == 1 || unit / 2 % 2 == 0) widen_codes(low, high, codes[unit / 2 / PAIRED]);
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    const int i = PAIRED == 1 ? 2 * u : unit / 2 % 2 * 2;
                    mma(state.out[2 * u], a, low[i], low[i + 1]);
                    mma(state.out[2 * u + 1], a, high[i], high[i + 1]);
                }
            } else {
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; c += 2) {
                    uint32_t b[4];
                    load_matrix_transposed(
                        b, unit_of<VALUE_ROW_UNITS>(values, unit * 8 + matrix % 2 * 8 + row,
                                                    warp * COLUMN_TILES + c + matrix / 2));
                    mma(state.out[c], a, b[0], b[1]);
                    mma(state.out[c + 1], a, b[2], b[3]);
                }
            }
        }
    }

    // Adds one tile, which lies in shared memory, to the state.
    __device__ __forceinline__ void add_tile(State& state, int tile, unsigned char* stage) {
        unsigned char *keys = stage, *values = LATENT ? stage : stage + Base::STAGE / 2;
        if constexpr (LATENT && FP8) {
            widen_latents(stage);
            keys = values = wide;
            sync_block();
        }
        Scores scores = {};
        multiply_keys(scores, keys);
        bound_scores(scores, tile);
        sync_block();
        // Where the keys are that all are done with; a latent is its own value.
        float* quarters = LATENT ? maxima + MAXIMA / 4 : reinterpret_cast<float*>(keys);
        weigh(state, scores, quarters);
        sync_block();
        add_sums(state, quarters);
        multiply_values(state, values);
    }

    // Goes through all chunks; `end_of_chunk` gets each one's state, or, CARRIED, that of all of them.
    template <bool CARRIED, class End>
    __device__ __forceinline__ void run(const uint16_t* rows, uint32_t q_stride, End end_of_chunk) {
        const int first = Base::first_tile(), end = Base::end_tile();
        Base::load_query(query, rows, q_stride);
        async_copy_commit();
        if constexpr (!LATENT) Base::look_up(first);
        for (int s = 0; s < STAGES - 1; ++s) {
            if (first + s < end) load(first + s, s);
            async_copy_commit();
        }
        async_copy_wait<STAGES - 1>();
        sync_block();
        if (FP8) {
            Base::permute_query(query);
            sync_block();
        }
        if constexpr (!LATENT) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) Base::query_fragment(q[step], query, 0, step);
        }
        State state;
        state.clear();
        int stage = 0;
        for (int tile = first; tile < end; ++tile) {
            async_copy_wait<STAGES - 2>();
            // The tile is there for all, and all are done with the stage that is filled next.
            sync_block();
            const int ahead = tile + STAGES - 1;
            if (ahead < end) load(ahead, stage == 0 ? STAGES - 1 : stage - 1);
            async_copy_commit();
            add_tile(state, tile, stages + stage * Base::STAGE);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if ((!CARRIED && (tile + 1) % (CHUNK / TILE) == 0) || tile + 1 == end) {
                state.end_chunk();
                end_of_chunk(state);
                state.clear();
            }
        }
        async_copy_wait<0>();
    }

    __device__ __forceinline__ void leave(const State& state, float* partials, uint32_t slot) const {
        Base::store_partial(state, partials, slot, 0, warp * COLUMNS);
    }
    __device__ __forceinline__ void finish(const State& state, uint16_t* out, const float* sinks,
                                           float value_scale) const {
        Base::store_out(state, out, sinks, value_scale, 0, warp * COLUMNS);
    }
};
