// Causal attention of new tokens over a paged KV cache (arXiv 2309.06180), for prefill and decode alike:
// grouped query heads, sliding windows, sinks, latent caches (MLA, absorbed), bf16 or FP8 (E4M3) keys and
// values. The contract is `paged_attention.rs`'s; the CPU form's layout of pages is another one.
//
// A *row* is one query head of one new token; rows that share a KV head are packed: row r of a sequence is
// token r / group. A block takes ROWS rows of one sequence and one KV head over the chunks [first_chunk,
// end_chunk) of 256 absolute positions. With `partials` it leaves each chunk's state there, and
// `attention_merge` joins them; without, it takes all chunks and joins them itself. **Both give the same bits**,
// because each chunk starts anew, goes in tiles at fixed positions, and is joined in ascending order by the same
// arithmetic. So neither batch, nor chunking of the prompt, nor the cut, nor the page size can change a bit.
//
// Pages: `keys` [page][kv_head][offset][KEY_DIM], `values` alike with VALUE_DIM; latent: `keys` alone,
// whose first VALUE_DIM elements are the value. Entries of pages beyond a sequence's end are never read.
// Grid: (items, kv heads). Block: 128 threads. GUIDE.md goes through this file line by line.
#include "attention.cuh"

constexpr int CHUNK = 256, WARPS = 4, THREADS = 32 * WARPS;

// What one block does; `paged_attention.rs` (CUDA) plans these.
struct Item {
    uint32_t query;                   // row of `q` and `out` with the sequence's first new token
    uint32_t tokens;                  // new tokens
    uint32_t start;                   // absolute position of the first of them
    uint32_t table;                   // where the sequence's page numbers begin in `tables`
    uint32_t first_row;               // of the packed rows
    uint32_t first_chunk, end_chunk;  // positions, in CHUNKs
    uint32_t slot;                    // where the state of `first_chunk` goes in `partials`
};

struct Shape {
    uint32_t kv_heads, group, page_shift, window;
};

// Elements of a state in `partials`: outputs, then maximum and sum of each row.
__device__ __forceinline__ uint64_t partial_floats(int rows, int value_dim) {
    return uint64_t(rows) * (value_dim + 2);
}

template <int KEY_DIM, int VALUE_DIM, bool LATENT, bool FP8, int ROW_TILES, int TILE, int STAGES>
struct Attention {
    static constexpr int ROWS = 16 * ROW_TILES, KEY_UNITS = KEY_DIM / 8, VALUE_UNITS = VALUE_DIM / 8;
    static constexpr int VALUE_ROW_UNITS = LATENT ? KEY_UNITS : VALUE_UNITS;
    // Bytes in shared memory. FP8 tiles arrive as they are in a stage and are widened into `keys` and
    // `values`.
    static constexpr int QUERY = ROWS * KEY_DIM * 2, WEIGHTS = ROWS * TILE * 2, MAXIMA = WARPS * ROWS * 4;
    static constexpr int KEYS = TILE * KEY_DIM * 2, VALUES = LATENT ? 0 : TILE * VALUE_DIM * 2;
    static constexpr int STAGE = (KEYS + VALUES) / (FP8 ? 2 : 1);
    static constexpr int SHARED = QUERY + WEIGHTS + MAXIMA + STAGES * STAGE + (FP8 ? KEYS + VALUES : 0);
    using State = RowState<KEY_DIM, VALUE_DIM, VALUE_ROW_UNITS, ROW_TILES, WARPS, TILE>;

    const Item& item;
    const Shape& shape;
    const uint32_t* tables;
    const unsigned char *key_pages, *value_pages;
    unsigned char *query, *weights, *stages, *wide;
    float* maxima;
    int warp, lane;
    float score_scale;
    int limit_end;  // positions that any row sees end here

    __device__ __forceinline__ Attention(const Item& item, const Shape& shape, const uint32_t* tables,
                                         const void* keys, const void* values, float score_scale)
        : item(item),
          shape(shape),
          tables(tables + item.table),
          key_pages(static_cast<const unsigned char*>(keys)),
          value_pages(static_cast<const unsigned char*>(values)),
          score_scale(score_scale) {
        query = shared_memory();
        weights = query + QUERY;
        maxima = reinterpret_cast<float*>(weights + WEIGHTS);
        stages = weights + WEIGHTS + MAXIMA;
        wide = stages + STAGES * STAGE;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const uint32_t rows = item.tokens * shape.group;
        limit_end = int(item.start + (min_of(item.first_row + ROWS, rows) - 1) / shape.group + 1);
    }

    // The absolute positions [from, to) that a packed row sees; none for a row past the last.
    struct Seen {
        int from, to;
    };
    __device__ __forceinline__ Seen seen(uint32_t row) const {
        const uint32_t token = row / shape.group;
        if (token >= item.tokens) return {0, 0};
        const int to = int(item.start + token + 1);
        return {shape.window == 0 || to < int(shape.window) ? 0 : to - int(shape.window), to};
    }

    __device__ __forceinline__ void load_query(const uint16_t* q, uint32_t q_stride, int kv_head) {
        for (int i = threadIdx.x; i < ROWS * KEY_UNITS; i += THREADS) {
            const int row = i / KEY_UNITS, unit = i % KEY_UNITS;
            const uint32_t packed = item.first_row + row, token = packed / shape.group;
            const uint64_t at = uint64_t(item.query + token) * q_stride +
                                uint64_t(kv_head * shape.group + packed % shape.group) * KEY_DIM + unit * 8;
            async_copy_16(unit_of<KEY_UNITS>(query, row, unit), q + at, token < item.tokens);
        }
    }

    // Starts copying one tile of keys or values; positions from `limit_end` on become zeros, since whatever
    // stale number lies there would turn a weight of 0 into NaN.
    template <int DIM>
    __device__ __forceinline__ void load_rows(unsigned char* to, const unsigned char* pages, int tile,
                                              int kv_head) {
        constexpr int BYTES = FP8 ? DIM : 2 * DIM, UNITS = BYTES / 16;
#pragma unroll 4
        for (int i = threadIdx.x; i < TILE * UNITS; i += THREADS) {
            const int row = i / UNITS, unit = i % UNITS, position = tile * TILE + row;
            const bool valid = position < limit_end;
            const uint32_t page = tables[(valid ? position : limit_end - 1) >> shape.page_shift];
            const uint32_t offset = uint32_t(position) & ((1u << shape.page_shift) - 1);
            const uint64_t vector =
                ((uint64_t(page) * shape.kv_heads + kv_head) << shape.page_shift) + offset;
            unsigned char* at = FP8 ? to + i * 16 : unit_of<DIM / 8>(to, row, unit);
            async_copy_16(at, pages + vector * BYTES + unit * 16, valid);
        }
    }

    __device__ __forceinline__ void load_tile(int tile, int stage, int kv_head) {
        unsigned char* to = stages + stage * STAGE;
        load_rows<KEY_DIM>(to, key_pages, tile, kv_head);
        if (!LATENT) load_rows<VALUE_DIM>(to + KEYS / (FP8 ? 2 : 1), value_pages, tile, kv_head);
    }

    // FP8 rows of DIM elements to swizzled bf16 ones; every E4M3 number is a bf16 number.
    template <int DIM>
    __device__ __forceinline__ void widen(unsigned char* to, const unsigned char* from) const {
        for (int i = threadIdx.x; i < TILE * DIM / 16; i += THREADS) {
            const Packet codes = load_packet(from + i * 16);
            for (int half = 0; half < 2; ++half) {
                Packet out;
                for (int j = 0; j < 4; ++j) {
                    const uint32_t pair = codes.words[2 * half + j / 2] >> (16 * (j % 2));
                    out.words[j] = bf16_pair(e4m3_to_f32(pair & 0xff), e4m3_to_f32(pair >> 8 & 0xff));
                }
                store_packet(unit_of<DIM / 8>(to, i / (DIM / 16), i % (DIM / 16) * 2 + half), out);
            }
        }
    }

    // Scales and masks the scores, and tells the block the largest of each row among this warp's positions.
    __device__ __forceinline__ void bound_scores(float (&scores)[ROW_TILES][State::KEY_TILES][4], int tile) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * r + 8 * half + lane / 4;
                const Seen sees = seen(item.first_row + row);
                float top = NEGATIVE_INFINITY;
#pragma unroll
                for (int k = 0; k < State::KEY_TILES; ++k) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int position = tile * TILE + warp * State::KEYS + 8 * k + lane % 4 * 2 + j;
                        float& score = scores[r][k][2 * half + j];
                        score = position >= sees.from && position < sees.to ? score * score_scale
                                                                            : NEGATIVE_INFINITY;
                        top = fmaxf(top, score);
                    }
                }
                top = fmaxf(top, shuffle_xor(top, 1));
                top = fmaxf(top, shuffle_xor(top, 2));
                if (lane % 4 == 0) maxima[warp * ROWS + row] = top;
            }
        }
    }

    // Leaves the weights 2^(score - maximum) in shared memory, as bf16.
    __device__ __forceinline__ void store_weights(const float (&scores)[ROW_TILES][State::KEY_TILES][4],
                                                  const State& state) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * r + 8 * half + lane / 4;
#pragma unroll
                for (int k = 0; k < State::KEY_TILES; ++k) {
                    const float low = rescale(scores[r][k][2 * half], state.maximum[r][half]);
                    const float high = rescale(scores[r][k][2 * half + 1], state.maximum[r][half]);
                    const int unit = warp * State::KEY_TILES + k;
                    auto at = reinterpret_cast<uint32_t*>(unit_of<TILE / 8>(weights, row, unit)) + lane % 4;
                    *at = bf16_pair(low, high);
                }
            }
        }
    }

    // Adds one tile, which lies in shared memory, to the state.
    __device__ __forceinline__ void add_tile(State& state, int tile, int stage) {
        unsigned char* keys = stages + stage * STAGE;
        unsigned char* values = LATENT ? keys : keys + KEYS;
        if (FP8) {
            unsigned char* wide_values = LATENT ? wide : wide + KEYS;
            widen<KEY_DIM>(wide, keys);
            if (!LATENT) widen<VALUE_DIM>(wide_values, keys + KEYS / 2);
            keys = wide, values = wide_values;
            sync_block();
        }
        float scores[ROW_TILES][State::KEY_TILES][4] = {};
        State::multiply_keys(scores, query, keys, warp, lane);
        bound_scores(scores, tile);
        sync_block();
        state.raise_maximum(maxima, lane);
        store_weights(scores, state);
        sync_block();
        state.multiply_values(weights, values, warp, lane);
    }

    // Goes through all chunks; `end_of_chunk` gets each one's state, or, CARRIED, that of all of them.
    template <bool CARRIED, class End>
    __device__ __forceinline__ void run(int kv_head, End end_of_chunk) {
        constexpr int TILES = CHUNK / TILE;
        // Tiles that no row sees change nothing: the first row sees farthest back, `limit_end` is the last
        // row's.
        const int first = max_of(int(item.first_chunk) * TILES, seen(item.first_row).from / TILE);
        const int end = min_of(int(item.end_chunk) * TILES, (limit_end + TILE - 1) / TILE);
        for (int s = 0; s < STAGES - 1; ++s) {
            if (first + s < end) load_tile(first + s, s, kv_head);
            async_copy_commit();
        }
        State state;
        state.clear();
        for (int tile = first; tile < end; ++tile) {
            const int stage = (tile - first) % STAGES;
            async_copy_wait<STAGES - 2>();
            // The tile is there for all, and all are done with the stage that is filled next.
            sync_block();
            const int ahead = tile + STAGES - 1;
            if (ahead < end) load_tile(ahead, (ahead - first) % STAGES, kv_head);
            async_copy_commit();
            add_tile(state, tile, stage);
            if ((!CARRIED && (tile + 1) % TILES == 0) || tile + 1 == end) {
                state.end_chunk();
                end_of_chunk(state);
                state.clear();
            }
        }
        async_copy_wait<0>();
    }

    // Calls `f(row in the block, half, row tile)` for the rows of this lane that exist.
    template <class F>
    __device__ __forceinline__ void each_row(F f) const {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * r + 8 * half + lane / 4;
                if (item.first_row + row < item.tokens * shape.group) f(row, half, r);
            }
        }
    }

    __device__ __forceinline__ int column(int c) const {
        return warp * State::COLUMNS + 8 * c + lane % 4 * 2;
    }

    __device__ __forceinline__ void store_partial(const State& state, float* partials, uint32_t slot,
                                                  int kv_head) const {
        float* to = partials + (uint64_t(slot) * shape.kv_heads + kv_head) * partial_floats(ROWS, VALUE_DIM);
        each_row([&](int row, int half, int r) {
#pragma unroll
            for (int c = 0; c < State::COLUMN_TILES; ++c) {
                for (int j = 0; j < 2; ++j)
                    to[row * VALUE_DIM + column(c) + j] = state.out[r][c][2 * half + j];
            }
            if (warp == 0 && lane % 4 == 0) {
                to[ROWS * VALUE_DIM + 2 * row] = state.maximum[r][half];
                to[ROWS * VALUE_DIM + 2 * row + 1] = state.sum[r][half];
            }
        });
    }

    __device__ __forceinline__ void store_out(const State& state, uint16_t* out, const float* sinks,
                                              float value_scale, int kv_head) const {
        each_row([&](int row, int half, int r) {
            const uint32_t packed = item.first_row + row, token = packed / shape.group;
            const uint32_t head = kv_head * shape.group + packed % shape.group;
            const float sink = sinks != nullptr ? sinks[head] * LOG2_E : NEGATIVE_INFINITY;
            const Finish finish(state.maximum[r][half], state.sum[r][half], sink, value_scale);
            uint16_t* to =
                out + (uint64_t(item.query + token) * shape.kv_heads * shape.group + head) * VALUE_DIM;
#pragma unroll
            for (int c = 0; c < State::COLUMN_TILES; ++c) {
                *reinterpret_cast<uint32_t*>(to + column(c)) =
                    bf16_pair(finish(state.out[r][c][2 * half]), finish(state.out[r][c][2 * half + 1]));
            }
        });
    }
};

// `q` rows are `q_stride` elements apart; `sinks` [heads] or null; `window` 0 means none; `partials` null
// means whole. `score_scale` holds the softmax's scale, the keys' and log2(e).
template <class A, bool CARRIED>
__device__ __forceinline__ void attend(const Item* items, const uint32_t* tables, const uint16_t* q,
                                       uint32_t q_stride, const void* keys, const void* values,
                                       const float* sinks, uint16_t* out, float* partials, Shape shape,
                                       float score_scale, float value_scale) {
    const Item item = items[blockIdx.x];
    const int kv_head = int(blockIdx.y);
    A attention(item, shape, tables, keys, values, score_scale);
    attention.load_query(q, q_stride, kv_head);
    if (partials != nullptr) {
        uint32_t slot = item.slot;
        attention.template run<CARRIED>(kv_head, [&](typename A::State& state) {
            attention.store_partial(state, partials, slot++, kv_head);
        });
        return;
    }
    typename A::State total;
    total.clear();
    attention.template run<CARRIED>(kv_head, [&](typename A::State& state) { total.join(state); });
    attention.store_out(total, out, sinks, value_scale, kv_head);
}

#define ATTENTION(name, key_dim, value_dim, latent, fp8, row_tiles, tile, stages, carried)               \
    extern "C" __global__ void __launch_bounds__(THREADS, latent           ? 1                           \
                                                          : row_tiles == 1 ? 3                           \
                                                                           : 2)                          \
        name(const Item* items, const uint32_t* tables, const uint16_t* q, uint32_t q_stride,            \
             const void* keys, const void* values, const float* sinks, uint16_t* out, float* partials,   \
             uint32_t kv_heads, uint32_t group, uint32_t page_shift, uint32_t window, float score_scale, \
             float value_scale) {                                                                        \
        using A = Attention<key_dim, value_dim, latent, fp8, row_tiles, tile, stages>;                   \
        attend<A, carried>(items, tables, q, q_stride, keys, values, sinks, out, partials,                        \
                  Shape{kv_heads, group, page_shift, window}, score_scale, value_scale);                 \
    }

// Rows 16 for decode, 64 for prefill. Shared memory is `Attention::SHARED`, which the launcher computes
// alike.
ATTENTION(attention_64_bf16_16, 64, 64, false, false, 1, 64, 4, false)
ATTENTION(attention_64_bf16_64, 64, 64, false, false, 4, 64, 2, false)
ATTENTION(attention_64_fp8_16, 64, 64, false, true, 1, 64, 4, false)
ATTENTION(attention_64_fp8_64, 64, 64, false, true, 4, 64, 2, false)
ATTENTION(attention_128_bf16_16, 128, 128, false, false, 1, 64, 3, false)
ATTENTION(attention_128_bf16_64, 128, 128, false, false, 4, 64, 2, false)
ATTENTION(attention_128_fp8_16, 128, 128, false, true, 1, 64, 3, false)
ATTENTION(attention_128_fp8_64, 128, 128, false, true, 4, 64, 2, false)
ATTENTION(attention_latent_bf16_16, 576, 512, true, false, 1, 32, 3, false)
ATTENTION(attention_latent_fp8_16, 576, 512, true, true, 1, 32, 3, false)

// What fixed chunks cost: the same with one state for all chunks of a block, so that bits depend on how the batch was cut.
// `kernels/check` times these beside the others; nothing else launches them.
ATTENTION(attention_128_bf16_16_carried, 128, 128, false, false, 1, 64, 3, true)
ATTENTION(attention_128_bf16_64_carried, 128, 128, false, false, 4, 64, 2, true)

// Joins the chunks that blocks left in `partials`, in ascending order, and writes `out`. An item here spans
// all chunks of its rows. Grid: (items, kv heads, rows). Block: 128 threads, each some columns.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_merge(const Item* items, const float* partials, const float* sinks, uint16_t* out,
                    uint32_t kv_heads, uint32_t group, uint32_t rows, uint32_t value_dim, float value_scale) {
    const Item item = items[blockIdx.x];
    const uint32_t row = blockIdx.z, packed = item.first_row + row;
    if (packed >= item.tokens * group) return;
    const uint32_t head = blockIdx.y * group + packed % group;
    const float sink = sinks != nullptr ? sinks[head] * LOG2_E : NEGATIVE_INFINITY;
    const uint64_t floats = partial_floats(rows, value_dim);
    uint16_t* to = out + (uint64_t(item.query + packed / group) * kv_heads * group + head) * value_dim;
    for (uint32_t column = 2 * threadIdx.x; column < value_dim; column += 2 * THREADS) {
        float maximum = NEGATIVE_INFINITY, sum = 0.0f, low = 0.0f, high = 0.0f;
        for (uint32_t chunk = item.first_chunk; chunk < item.end_chunk; ++chunk) {
            const uint32_t slot = item.slot + chunk - item.first_chunk;
            const float* state = partials + (uint64_t(slot) * kv_heads + blockIdx.y) * floats;
            const float* of_row = state + uint64_t(rows) * value_dim + 2 * row;
            const Merge merge(maximum, of_row[0]);
            maximum = merge.maximum;
            sum = merge(sum, of_row[1]);
            low = merge(low, state[row * value_dim + column]);
            high = merge(high, state[row * value_dim + column + 1]);
        }
        const Finish finish(maximum, sum, sink, value_scale);
        *reinterpret_cast<uint32_t*>(to + column) = bf16_pair(finish(low), finish(high));
    }
}
