// The attention of `attention_prefill.cuh`, bit for bit, by Hopper's products of a warpgroup: their sums have
// the bits of `mma`'s, which `kernels/check` compares. Blocks stay and go from one piece of work to the next.
// Two warpgroups have 64 rows each, query and weights in registers; the third brings keys and values, also
// of the next piece. While values are multiplied, the next tile's scores become weights (arXiv 2407.08608).
#pragma once

#include "attention.cuh"
#include "bulk.cuh"
#include "wide_sm90.cuh"

template <int DIM>
struct Pipelined : Rows<DIM, DIM, false, false, 128, 128, 64> {
    using Base = Rows<DIM, DIM, false, false, 128, 128, 64>;
    static constexpr int TILE = 64, UNITS = DIM / 8, STEPS = DIM / 16, TILE_STEPS = TILE / 16, STAGES = 5;
    static constexpr int TILES = CHUNK / TILE;  // of a chunk
    // Tiles that are copied before one is waited for: a consumer goes on where two more are there.
    static constexpr uint32_t AHEAD = 1;
    static_assert(AHEAD + 4 <= STAGES, "producers wait for a stage whose readers wait for them");
    static constexpr int WARPGROUPS = 2, CONSUMERS = 128 * WARPGROUPS, PRODUCERS = 128,
                         THREADS = CONSUMERS + PRODUCERS;
    // Keys, then values; of each, 64 elements of every position lie together, as the matrix units want them.
    static constexpr int PANEL = TILE * 128;
    static constexpr int STAGES_AT = (Base::QUERY + 1023) / 1024 * 1024;
    static constexpr int BARRIERS_AT = STAGES_AT + STAGES * Base::STAGE;
    // Columns in eights whose joined sums lie in shared memory: registers do not hold them all.
    static constexpr int STASHED = DIM == 128 ? 6 : 0;
    static constexpr int STASH_AT = BARRIERS_AT + (2 * STAGES + 2) * 8;
    static constexpr int SHARED = STASH_AT + STASHED * 4 * CONSUMERS * 4;
    // Of what is merged afterwards nothing is stashed.
    static constexpr int SHARED_APART = STASH_AT;
    using State = RowState<UNITS>;
    using Seen = typename Base::Seen;
    using Base::Base;
    using Base::item, Base::lane, Base::limit_end, Base::shape, Base::warp;

    // Which use of the stages is next, and which piece of work this is: what the parities of barriers follow.
    struct Turn {
        uint32_t memory;  // where the block's shared memory begins
        uint32_t stage = 0, parity = 0, piece = 0;
        __device__ __forceinline__ Turn() : memory(in_register(shared_address(shared_memory()))) {}
        __device__ __forceinline__ void advance() {
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        __device__ __forceinline__ uint32_t before(uint32_t uses) const {
            return stage < uses ? stage + STAGES - uses : stage - uses;
        }
        // Where a stage's barriers and its keys are. `query_full` counts every producer, the others a lane of
        // every warp that writes or reads.
        __device__ __forceinline__ uint32_t full(uint32_t stage) const {
            return memory + BARRIERS_AT + 8 * stage;
        }
        __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return full(STAGES + stage); }
        __device__ __forceinline__ uint32_t query_full() const { return full(2 * STAGES); }
        __device__ __forceinline__ uint32_t query_empty() const { return full(2 * STAGES + 1); }
        __device__ __forceinline__ uint32_t keys(uint32_t stage) const {
            return memory + STAGES_AT + stage * Base::STAGE;
        }
    };

    __device__ __forceinline__ static void prepare_barriers() {
        uint64_t* barriers = reinterpret_cast<uint64_t*>(shared_memory() + BARRIERS_AT);
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < 2 * STAGES + 2; ++i) {
                const uint32_t warps = (i < STAGES ? PRODUCERS : CONSUMERS) / 32;
                barrier_init(barriers + i, i == 2 * STAGES ? PRODUCERS : warps);
            }
            fence_barriers();
        }
        sync_block();
    }

    // What an item's chunks so far are joined to.
    struct Joined {
        State state;

        __device__ __forceinline__ static float& stashed(int c, int i) {
            float* stash = reinterpret_cast<float*>(shared_memory() + STASH_AT);
            return stash[((c - (UNITS - STASHED)) * 4 + i) * CONSUMERS + threadIdx.x];
        }
        __device__ __forceinline__ float& at(int c, int i) {
            return c < UNITS - STASHED ? state.out[c][i] : stashed(c, i);
        }
        template <class F>
        __device__ __forceinline__ void each(const F& f) {
#pragma unroll
            for (int c = 0; c < UNITS; ++c)
                for (int i = 0; i < 4; ++i) f(c, i);
        }

        __device__ __forceinline__ void clear() {
            state.clear();
            each([&](int c, int i) { at(c, i) = 0.0f; });
        }
        // As `RowState::join`.
        __device__ __forceinline__ void join(const State& later) {
            const Merge merges[2] = {{state.reference[0], later.reference[0]},
                                     {state.reference[1], later.reference[1]}};
            for (int half = 0; half < 2; ++half) {
                state.reference[half] = merges[half].reference;
                state.sum[half] = merges[half](state.sum[half], later.sum[half]);
            }
            each([&](int c, int i) { at(c, i) = merges[i / 2](at(c, i), later.out[c][i]); });
        }
        __device__ __forceinline__ const State& whole() {
            each([&](int c, int i) { state.out[c][i] = at(c, i); });
            return state;
        }
    };

    // === the producers ===

    __device__ __forceinline__ void produce(Turn& turn, const uint16_t* q, uint32_t q_stride) const {
        barrier_wait(turn.query_empty(), turn.piece & 1 ^ 1);
        bring_query(q, q_stride);
        copies_arrive(reinterpret_cast<uint64_t*>(shared_memory() + BARRIERS_AT) + 2 * STAGES);
        uint32_t coming = 0;  // tiles
        for (int tile = Base::first_tile(), end = Base::end_tile(); tile < end; ++tile) {
            const uint32_t page = page_of(tile);
            barrier_wait(turn.empty(turn.stage), turn.parity ^ 1);
            bring_tile(tile, page, turn.keys(turn.stage));
            async_copy_commit();
            turn.advance();
            if (++coming <= AHEAD) continue;
            async_copy_wait<AHEAD>();
            announce(turn, coming--);
        }
        // All, since the query of the next piece is not asked for before the consumers have come to this one.
        async_copy_wait<0>();
        for (; coming > 0; --coming) announce(turn, coming);
    }
    // What this warp copied so many uses before is in shared memory.
    __device__ __forceinline__ void announce(const Turn& turn, uint32_t uses) const {
        fence_for_matrix_units();
        sync_warp();
        if (lane == 0) barrier_arrive(turn.full(turn.before(uses)));
    }

    // This thread among the producers; what follows of it is computed where it is needed, and takes no
    // registers before.
    __device__ __forceinline__ static uint32_t producer() { return in_register(threadIdx.x) - CONSUMERS; }

    // A thread copies the same unit of every STEP'th row.
    static constexpr uint32_t STEP = PRODUCERS / UNITS;
    __device__ __forceinline__ void bring_query(const uint16_t* q, uint32_t q_stride) const {
        const uint32_t thread = producer();
#pragma unroll 1
        for (uint32_t row = thread / UNITS; row < 128; row += STEP) {
            const uint32_t unit = thread % UNITS, packed = item.first_row + row, token = packed / shape.group;
            const uint64_t at = uint64_t(item.query + token) * q_stride +
                                uint64_t(Base::kv_head * shape.group + packed % shape.group) * DIM + unit * 8;
            async_copy_16(unit_of<UNITS>(shared_memory(), row, unit), q + at, token < item.tokens);
        }
    }

    // A warp copies ALIKE positions at once, COPIES times: 16 of a tile, whose page numbers its lanes hold.
    static constexpr uint32_t ALIKE = 32 / UNITS, COPIES = 16 / ALIKE;
    __device__ __forceinline__ uint32_t page_of(int tile) const {
        const uint32_t thread = producer();
        const uint32_t i = thread % 16, row = thread / 32 * ALIKE + i % ALIKE + i / ALIKE * STEP;
        return Base::tables[min_of(tile * TILE + int(row), limit_end - 1) >> shape.page_shift];
    }

    // Positions from `limit_end` on become zeros, as in `Rows::load_tile`.
    __device__ __forceinline__ void bring_tile(int tile, uint32_t page, uint32_t to) const {
        const uint32_t thread = producer();
        const uint32_t row = thread / UNITS, unit = thread % UNITS;
        to += unit / 8 * PANEL + swizzled<8>(row, unit % 8) * 16;
        const uint64_t within = unit * 16;
#pragma unroll
        for (uint32_t c = 0; c < COPIES; ++c) {
            const int position = tile * TILE + int(row + c * STEP);
            const uint32_t of_position = shuffle(page, c * ALIKE + thread % 32 / UNITS);
            const uint64_t at = uint64_t(Base::vector_at(of_position, position)) * Base::VECTOR + within;
            async_copy_16(to + c * STEP * 128, Base::key_pages + at, position < limit_end);
            async_copy_16(to + c * STEP * 128 + Base::KEYS, Base::value_pages + at, position < limit_end);
        }
    }

    // === the consumers ===

    // This warp reads it no more.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }

    __device__ __forceinline__ void read_query(uint32_t (&q)[STEPS][4], const Turn& turn) const {
        barrier_wait(turn.query_full(), turn.piece & 1);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            Base::query_fragment(q[step], shared_memory(), 16 * warp, step);
        release(turn.query_empty());
    }

    // Starts scores = q . keys, or out += weights . values, or out = where that is FRESH. They run until
    // `warpgroup_wait`.
    __device__ __forceinline__ static void multiply_keys(float (&scores)[TILE / 2],
                                                         const uint32_t (&q)[STEPS][4], uint32_t keys) {
        const Operand operand(shuffle(keys, 0));
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            warpgroup_mma<false>(scores, q[step], operand.further(step / 4 * PANEL + step % 4 * 32),
                                 step > 0);
        warpgroup_commit();
    }
    __device__ __forceinline__ static void multiply_values(State& state,
                                                           const uint32_t (&weights)[TILE_STEPS][4],
                                                           uint32_t keys, bool is_fresh) {
        const Operand operand(shuffle(keys, 0) + Base::KEYS, PANEL);
#pragma unroll
        for (int step = 0; step < TILE_STEPS; ++step)
            warpgroup_mma<true>(sums_of(state), weights[step], operand.further(step * 2048),
                                step > 0 || !is_fresh);
        warpgroup_commit();
    }
    __device__ __forceinline__ static float (&sums_of(State& state))[4 * UNITS] {
        return reinterpret_cast<float (&)[4 * UNITS]>(state.out);
    }

    // Scores to weights and their sums; says whether a row's reference, `to`, had to be raised for them.
    __device__ __forceinline__ bool weigh(float (&scores)[TILE / 2], float (&to)[2], float (&sums)[2]) const {
        float top[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float quarters[4];
#pragma unroll
            for (int k = 0; k < TILE / 8; ++k) {
                const float pair = fmaxf(scores[4 * k + 2 * half], scores[4 * k + 2 * half + 1]);
                quarters[k / 2] = k % 2 == 0 ? pair : fmaxf(quarters[k / 2], pair);
            }
            const float of_lane = fmaxf(fmaxf(quarters[0], quarters[1]), fmaxf(quarters[2], quarters[3]));
            top[half] = multiply_rounded(of_lane, Base::score_scale);
        }
        // A row's lanes ask each other for their largest only where one outgrows its reference.
        const bool grows = raised(to[0], top[0]) != to[0] || raised(to[1], top[1]) != to[1];
        const bool any_grows = lanes_where(grows) != 0;
        if (any_grows) {
            for (int half = 0; half < 2; ++half) top[half] = fmaxf(top[half], shuffle_xor(top[half], 1));
            for (int half = 0; half < 2; ++half) top[half] = fmaxf(top[half], shuffle_xor(top[half], 2));
            for (int half = 0; half < 2; ++half) to[half] = raised(to[half], top[half]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Weigh weight(Base::score_scale, to[half]);
            float quarters[TILE_STEPS];
#pragma unroll
            for (int k = 0; k < TILE / 8; ++k) {
                float &low = scores[4 * k + 2 * half], &high = scores[4 * k + 2 * half + 1];
                low = weight(low), high = weight(high);
                quarters[k / 2] = k % 2 == 0 ? low + high : quarters[k / 2] + (low + high);
            }
            sums[half] = sum_of_quarters(quarters[0], quarters[1], quarters[2], quarters[3]);
        }
        return any_grows;
    }
    __device__ __forceinline__ static bool is_masked(Seen all, int tile) {
        return lanes_where(!Base::is_seen(all, tile)) != 0;
    }
    __device__ __forceinline__ void mask(float (&scores)[TILE / 2], int tile) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Seen own = Base::seen(item.first_row + 16 * warp + 8 * half + lane / 4);
#pragma unroll
            for (int k = 0; k < TILE / 8; ++k) {
                for (int j = 0; j < 2; ++j) {
                    if (!own.holds(tile * TILE + 8 * k + lane % 4 * 2 + j))
                        scores[4 * k + 2 * half + j] = NEGATIVE_INFINITY;
                }
            }
        }
    }

    // Goes through an item's chunks; `end_of_chunk(number, state)` gets their states, EMPTY: also of those
    // that this warpgroup's rows see nothing of.
    template <bool EMPTY, class End>
    __device__ __forceinline__ void consume(Turn& turn, const End& end_of_chunk) const {
        uint32_t q[STEPS][4];
        read_query(q, turn);
        Seen all{0, 0}, any{0, 0};  // what every row of this warp sees, and any of this warpgroup
        const uint32_t rows = item.tokens * shape.group, of_warp = item.first_row + warp * 16;
        const uint32_t of_group = item.first_row + warp / 4 * 64;
        if (of_group < rows)
            any = {Base::seen(of_group).from, Base::seen(min_of(of_group + 64, rows) - 1).to};
        if (of_warp < rows) all = {Base::seen(min_of(of_warp + 16, rows) - 1).from, Base::seen(of_warp).to};

        // Tiles of which this warpgroup's rows see nothing would change nothing.
        const int end = Base::end_tile(), from = Base::first_tile();
        const int first = max_of(from, any.from / TILE), last = min_of(end, (any.to + TILE - 1) / TILE) - 1;
        State state;
        state.clear();
        const auto skip = [&](int tile, int to) {
            for (; tile < to; ++tile) {
                barrier_wait(turn.full(turn.stage), turn.parity);
                release(turn.empty(turn.stage));
                turn.advance();
            }
        };
        int chunk = from / TILES;  // whose state is next
        if (first > last) {
            skip(from, end);
        } else {
            skip(from, first);
            for (; EMPTY && chunk < first / TILES; ++chunk) end_of_chunk(chunk, state);
            consume_tiles(turn, q, all, state, first, last, [&](int of) { end_of_chunk(of, state); });
            chunk = last / TILES + 1;
            skip(last + 1, end);
        }
        state.clear();
        for (; EMPTY && chunk * TILES < end; ++chunk) end_of_chunk(chunk, state);
    }

    // The tiles [tile, last], their stages in turn. A chunk's first values are not added to what was there,
    // so `end_chunk` leaves `state.out` as it is.
    template <class End>
    __device__ __forceinline__ void consume_tiles(Turn& turn, const uint32_t (&q)[STEPS][4], Seen all,
                                                  State& state, int tile, int last,
                                                  const End& end_chunk) const {
        float scores[TILE / 2];
        uint32_t weights[TILE_STEPS][4];
        bool is_fresh = true, masked = is_masked(all, tile);
        barrier_wait(turn.full(turn.stage), turn.parity);
        warpgroup_arrive();
        multiply_keys(scores, q, turn.keys(turn.stage));
        warpgroup_wait<0>(scores);
        const auto weigh_tile = [&](bool is_first) {
            is_fresh = is_first || tile % TILES == 0;
            float to[2], sums[2];
            for (int half = 0; half < 2; ++half)
                to[half] = is_fresh ? NEGATIVE_INFINITY : state.reference[half];
            if (masked) mask(scores, tile);
            const bool grows = weigh(scores, to, sums);
            in_registers(scores);
            in_registers(sums);
            turn.advance();
            if (tile < last) barrier_wait(turn.full(turn.stage), turn.parity);
            if (!is_first) {
                warpgroup_wait<0>(sums_of(state));
                release(turn.empty(turn.before(2)));
                if (is_fresh) {
                    state.end_chunk();
                    end_chunk(tile / TILES - 1);
                }
            }
            if (is_fresh) state.begin(to);
            else if (grows) state.raise(to);
            for (int half = 0; half < 2; ++half) state.sum[half] += sums[half];
#pragma unroll
            for (int step = 0; step < TILE_STEPS; ++step) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = 4 * (2 * step + i / 2) + i % 2 * 2;
                    weights[step][i] = bf16_pair(scores[at], scores[at + 1]);
                }
            }
        };
        weigh_tile(true);
        while (tile < last) {
            warpgroup_arrive();
            multiply_keys(scores, q, turn.keys(turn.stage));
            multiply_values(state, weights, turn.keys(turn.before(1)), is_fresh);
            masked = is_masked(all, ++tile);
            warpgroup_wait<1>(scores);
            in_registers(scores);
            weigh_tile(false);
        }
        warpgroup_arrive();
        multiply_values(state, weights, turn.keys(turn.before(1)), is_fresh);
        warpgroup_wait<0>(sums_of(state));
        release(turn.empty(turn.before(1)));
        state.end_chunk();
        end_chunk(tile / TILES);
    }
};
