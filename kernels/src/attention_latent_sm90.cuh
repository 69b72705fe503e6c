// Attention over latents (MLA, absorbed) of bf16 for Hopper: 64 rows a block by the products of a warpgroup,
// bit for bit what `attention_decode.cuh` makes of 16. Two warpgroups share the work twice: each has one of
// two tiles of positions for the scores, then half of the columns; maxima, weights and sums cross between
// them in shared memory. A third warpgroup brings latents. Blocks stay and go from one item to the next.
#pragma once

#include "attention.cuh"
#include "bulk.cuh"
#include "wide_sm90.cuh"

struct Latents : Rows<576, 512, true, false, 64, 128, 64> {
    using Base = Rows<576, 512, true, false, 64, 128, 64>;
    // Positions that a row's reference is held against at once, as in decode; a stage has a pair of tiles.
    static constexpr int TILE = 32, PAIR = 64, PAIRS = CHUNK / PAIR, STAGES = 2;
    static constexpr int WARPGROUPS = 2, CONSUMERS = 128 * WARPGROUPS, PRODUCERS = 128,
                         THREADS = CONSUMERS + PRODUCERS;
    static constexpr int COLUMNS = 512 / WARPGROUPS, COLUMN_TILES = COLUMNS / 8;
    // The query, then the stages; of each, 64 elements of every row lie together, as the matrix units want
    // them.
    static constexpr int PANELS = 576 / 64, PANEL = PAIR * 128;
    static constexpr int WEIGHTS_AT = Base::QUERY + STAGES * Base::STAGE;
    static constexpr int MAXIMA_AT = WEIGHTS_AT + PANEL, SUMS_AT = MAXIMA_AT + WARPGROUPS * 64 * 4;
    static constexpr int BARRIERS_AT = SUMS_AT + WARPGROUPS * 2 * 128 * 4;
    static constexpr int SHARED = BARRIERS_AT + (2 * STAGES + 1) * 8;
    // Of what a block's items so far are joined to, if it joins them itself.
    static constexpr uint32_t JOINED_FLOATS = 64 * 512;
    using State = RowState<COLUMN_TILES>;
    using Scores = float[TILE / 2];
    using Base::Base;
    using Base::item, Base::lane, Base::limit_end, Base::shape;

    // Which use of the stages is next, and which item of the block this is: what the parities follow.
    struct Turn {
        uint32_t memory;  // where the block's shared memory begins
        uint32_t stage = 0, parity = 0, items = 0;
        __device__ __forceinline__ Turn() : memory(in_register(shared_address(shared_memory()))) {}
        __device__ __forceinline__ void advance() {
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        // These count a lane of every warp that writes or reads.
        __device__ __forceinline__ uint32_t full() const { return memory + BARRIERS_AT + 8 * stage; }
        __device__ __forceinline__ uint32_t empty() const { return full() + 8 * STAGES; }
        __device__ __forceinline__ uint32_t query_empty() const { return memory + BARRIERS_AT + 16 * STAGES; }
        __device__ __forceinline__ uint32_t latents() const {
            return memory + Base::QUERY + stage * Base::STAGE;
        }
    };

    __device__ __forceinline__ static void prepare_barriers() {
        uint64_t* barriers = reinterpret_cast<uint64_t*>(shared_memory() + BARRIERS_AT);
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < 2 * STAGES + 1; ++i)
                barrier_init(barriers + i, (i < STAGES ? PRODUCERS : CONSUMERS) / 32);
            fence_barriers();
        }
        sync_block();
    }

    // This warp reads it no more.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }

    // === the producers: a thread copies the same unit of each panel, of every sixteenth row ===

    static constexpr uint32_t STEP = PRODUCERS / 8, COPIES = 64 / STEP;
    __device__ __forceinline__ static uint32_t producer() { return in_register(threadIdx.x) - CONSUMERS; }
    __device__ __forceinline__ static void bring_row(uint32_t to, uint32_t row, const void* from,
                                                     bool valid) {
        const uint32_t unit = producer() % 8;
        to += swizzled<8>(row, unit) * 16;
        const unsigned char* at = static_cast<const unsigned char*>(from) + unit * 16;
#pragma unroll
        for (uint32_t panel = 0; panel < PANELS; ++panel)
            async_copy_16(to + panel * PANEL, at + panel * 128, valid);
    }

    __device__ __forceinline__ void bring_query(const Turn& turn, const uint16_t* q, uint32_t q_stride) const {
#pragma unroll 1
        for (uint32_t row = producer() / 8; row < 64; row += STEP) {
            const uint32_t packed = item.first_row + row, token = packed / shape.group;
            const uint64_t at = uint64_t(item.query + token) * q_stride +
                                uint64_t(Base::kv_head * shape.group + packed % shape.group) * 576;
            bring_row(turn.memory, row, q + at, token < item.tokens);
        }
    }

    // Positions from `limit_end` on become zeros, as in `Rows::load_tile`.
    __device__ __forceinline__ void produce(Turn& turn, const uint16_t* q, uint32_t q_stride) const {
        const uint32_t first_row = producer() / 8;
        barrier_wait(turn.query_empty(), turn.items & 1 ^ 1);
        bring_query(turn, q, q_stride);
        for (int pair = Base::first_tile(), end = Base::end_tile(); pair < end; ++pair) {
            const int first = pair * PAIR + int(first_row);
            uint32_t pages[COPIES];
#pragma unroll
            for (uint32_t c = 0; c < COPIES; ++c)
                pages[c] = Base::tables[min_of(first + int(c * STEP), limit_end - 1) >> shape.page_shift];
            barrier_wait(turn.empty(), turn.parity ^ 1);
#pragma unroll
            for (uint32_t c = 0; c < COPIES; ++c) {
                const int position = first + int(c * STEP);
                const uint64_t at = uint64_t(Base::vector_at(pages[c], position)) * Base::VECTOR;
                bring_row(turn.latents(), first_row + c * STEP, Base::key_pages + at, position < limit_end);
            }
            // With the first pair of an item its query is there too.
            async_copy_commit();
            async_copy_wait<0>();
            fence_for_matrix_units();
            sync_warp();
            release(turn.full());
            turn.advance();
        }
    }

    // === the consumers ===

    __device__ __forceinline__ static int group() { return int(threadIdx.x) / 128; }
    __device__ __forceinline__ static int first_row() { return int(threadIdx.x) % 128 / 32 * 16; }
    __device__ __forceinline__ static int first_column() { return group() * COLUMNS; }

    // scores = query . latent, of this warpgroup's tile of the pair.
    __device__ __forceinline__ static void multiply_keys(Scores& scores, const Turn& turn) {
        const Operand query(shuffle(turn.memory, 0));
        const Operand keys(shuffle(turn.latents() + group() * TILE * 128, 0));
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < 576 / 16; ++step) {
            const uint32_t at = step / 4 * PANEL + step % 4 * 32;
            warpgroup_mma(scores, query.further(at), keys.further(at));
        }
        warpgroup_commit();
        warpgroup_wait<0>(scores);
    }

    // What every row of the block sees.
    __device__ __forceinline__ Base::Seen seen_by_all() const {
        const uint32_t end = min_of(item.first_row + 64, item.tokens * shape.group);
        return {Base::seen(end - 1).from, Base::seen(item.first_row).to};
    }

    // Masks the scores, and tells the block the largest of each row in this tile.
    __device__ __forceinline__ void bound(Scores& scores, int tile, Base::Seen all) const {
        float* maxima = reinterpret_cast<float*>(shared_memory() + MAXIMA_AT) + group() * 64;
        const bool masked = tile * TILE < all.from || (tile + 1) * TILE > all.to;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row() + 8 * half + lane / 4;
            if (masked) {
                const auto own = Base::seen(item.first_row + row);
#pragma unroll
                for (int i = 0; i < TILE / 4; ++i) {
                    const int position = tile * TILE + i / 2 * 8 + lane % 4 * 2 + i % 2;
                    if (!own.holds(position)) scores[i / 2 * 4 + 2 * half + i % 2] = NEGATIVE_INFINITY;
                }
            }
            float top = NEGATIVE_INFINITY;
#pragma unroll
            for (int i = 0; i < TILE / 4; ++i) top = fmaxf(top, scores[i / 2 * 4 + 2 * half + i % 2]);
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            if (lane % 4 == 0) maxima[row] = top;
        }
    }

    // What the rows are held against in each tile of the pair; leaves this tile's weights in shared memory,
    // as bf16, and what each lane's add up to.
    __device__ __forceinline__ void weigh(float (&to)[2][2], const State& state, const Scores& scores) const {
        const float* maxima = reinterpret_cast<const float*>(shared_memory() + MAXIMA_AT);
        float* sums = reinterpret_cast<float*>(shared_memory() + SUMS_AT) + group() * 256 + threadIdx.x % 128;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row() + 8 * half + lane / 4;
            to[0][half] =
                raised(state.reference[half], multiply_rounded(maxima[row], Base::score_scale));
            to[1][half] = raised(to[0][half], multiply_rounded(maxima[64 + row], Base::score_scale));
            const Weigh weight(Base::score_scale, group() == 0 ? to[0][half] : to[1][half]);
            float quarters[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float low = weight(scores[4 * k + 2 * half]);
                const float high = weight(scores[4 * k + 2 * half + 1]);
                auto at = reinterpret_cast<uint32_t*>(
                    unit_of<8>(shared_memory() + WEIGHTS_AT, row, group() * 4 + k));
                at[lane % 4] = bf16_pair(low, high);
                quarters[k] = low + high;
            }
            sums[half * 128] = sum_of_quarters(quarters[0], quarters[1], quarters[2], quarters[3]);
        }
    }

    __device__ __forceinline__ static float (&half_of(State& state, int half))[2 * COLUMN_TILES] {
        return reinterpret_cast<float (&)[2 * COLUMN_TILES]>(state.out[half * COLUMN_TILES / 2]);
    }

    // Adds a tile of the pair to this warpgroup's columns: out += weights . values.
    __device__ __forceinline__ void add_tile(State& state, int tile, const float (&to)[2],
                                             const Turn& turn) const {
        const float* sums =
            reinterpret_cast<const float*>(shared_memory() + SUMS_AT) + tile * 256 + threadIdx.x % 128;
        state.raise(to);
        for (int half = 0; half < 2; ++half) state.sum[half] += sums[half * 128];
        uint32_t weights[2][4];
        const int matrix = lane / 8, row = first_row() + matrix % 2 * 8 + lane % 8;
#pragma unroll
        for (int step = 0; step < 2; ++step)
            load_matrix(weights[step], unit_of<8>(shared_memory() + WEIGHTS_AT, row,
                                                  tile * 4 + 2 * step + matrix / 2));
        const Operand values(shuffle(turn.latents() + group() * (COLUMNS / 64 * PANEL), 0), PANEL);
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                warpgroup_mma<true>(half_of(state, half), weights[step],
                                    values.further(half * 2 * PANEL + (2 * tile + step) * 2048), true);
        }
        warpgroup_commit();
        warpgroup_wait<0>(half_of(state, 0));
        in_registers(half_of(state, 1));
    }

    // Goes through an item's chunks; `end_of_chunk(number, state)` gets their states.
    template <class End>
    __device__ __forceinline__ void consume(Turn& turn, const End& end_of_chunk) const {
        const auto all = seen_by_all();
        State state;
        state.clear();
        for (int pair = Base::first_tile(), end = Base::end_tile(); pair < end; ++pair) {
            barrier_wait(turn.full(), turn.parity);
            Scores scores = {};
            multiply_keys(scores, turn);
            if (pair + 1 == end) release(turn.query_empty());
            bound(scores, 2 * pair + group(), all);
            sync_some(1, CONSUMERS);
            float to[2][2];
            weigh(to, state, scores);
            sync_some(1, CONSUMERS);
            for (int tile = 0; tile < 2; ++tile) add_tile(state, tile, to[tile], turn);
            release(turn.empty());
            turn.advance();
            if ((pair + 1) % PAIRS != 0 && pair + 1 != end) continue;
            state.end_chunk();
            end_of_chunk(pair / PAIRS, state);
            state.clear();
        }
    }

    // What an item's chunks so far are joined to; as `RowState::join` does it. The outputs lie in the block's
    // own part of `partials`, where each thread finds its own: neither registers nor shared memory hold them.
    struct Joined {
        float reference[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {0.0f, 0.0f};

        // Place `i` of a thread has two neighbours of row half i % 2, in columns i / 2 * 8 and on.
        __device__ __forceinline__ static Pair* own(float* partials) {
            return reinterpret_cast<Pair*>(partials + blockIdx.x * JOINED_FLOATS) + threadIdx.x;
        }

        __device__ __forceinline__ void join(const State& later, float* partials, bool is_first) {
            const Merge merges[2] = {{reference[0], later.reference[0]}, {reference[1], later.reference[1]}};
            for (int half = 0; half < 2; ++half) {
                reference[half] = merges[half].reference;
                sum[half] = merges[half](sum[half], later.sum[half]);
            }
            // Read so many at once, so that few waits come behind each other.
            constexpr int AT_ONCE = 8;
#pragma unroll
            for (int first = 0; first < 2 * COLUMN_TILES; first += AT_ONCE) {
                Pair earlier[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    earlier[i] = is_first ? Pair{0.0f, 0.0f} : own(partials)[(first + i) * CONSUMERS];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const float* of = later.out[(first + i) / 2] + 2 * (i % 2);
                    own(partials)[(first + i) * CONSUMERS] = Pair{merges[i % 2](earlier[i].low, of[0]),
                                                                  merges[i % 2](earlier[i].high, of[1])};
                }
            }
        }
    };

    // As `Rows::store_out`.
    __device__ __forceinline__ void store_joined(const Joined& total, float* partials, uint16_t* out,
                                                 const float* sinks, float value_scale) const {
        for (int half = 0; half < 2; ++half) {
            const uint32_t packed = item.first_row + first_row() + 8 * half + lane / 4;
            if (packed >= item.tokens * shape.group) continue;
            const uint32_t token = packed / shape.group, head = packed % shape.group;
            const float sink = sinks != nullptr ? sinks[head] * LOG2_E : NEGATIVE_INFINITY;
            const Finish finish(total.reference[half], total.sum[half], sink, value_scale);
            uint16_t* to = out + (uint64_t(item.query + token) * shape.group + head) * 512 + first_column() +
                           lane % 4 * 2;
#pragma unroll 8
            for (int i = 0; i < COLUMN_TILES; ++i) {
                const Pair pair = Joined::own(partials)[(2 * i + half) * CONSUMERS];
                *reinterpret_cast<uint32_t*>(to + 8 * i) = bf16_pair(finish(pair.low), finish(pair.high));
            }
        }
    }
};
