// The parts of paged attention that decode and prefill share: what a block's rows see, how their keys and
// values come to shared memory, and the arithmetic of weights and of joining states. **Decode and prefill
// agree in every bit because each element goes through the same operations in the same order in both**;
// `attention.cu` says what is computed.
#pragma once

#include "numbers.cuh"
#include "tile.cuh"

constexpr int CHUNK = 256;

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

// Elements of a state in `partials`: outputs, then reference and sum of each row.
__device__ __forceinline__ uint64_t partial_floats(int rows, int value_dim) {
    return uint64_t(rows) * (value_dim + 2);
}

// Two floats that are stored and loaded at once.
struct alignas(8) Pair {
    float low, high;
};
__device__ __forceinline__ void store_pair(float* to, float low, float high) {
    *reinterpret_cast<Pair*>(to) = Pair{low, high};
}

// 2^(from - to); 0 for a row that has seen nothing yet.
__device__ __forceinline__ float rescale(float from, float to) {
    return from == NEGATIVE_INFINITY ? 0.0f : exp2_fast(from - to);
}

// What a row's scores are held against: their largest so far, but for a growth of at most 2^8, which floats
// bear: so sums are rescaled seldom. `top`: the largest of a tile's scores.
__device__ __forceinline__ float raised(float reference, float top) {
    return top > reference + 8.0f ? top : reference;
}

// A score's weight: 2^(score * scale - reference). A row that has seen nothing has scores of minus infinity
// alone, which weigh 0 against anything finite.
struct Weigh {
    float scale, against;
    __device__ __forceinline__ Weigh(float scale, float reference)
        : scale(scale), against(reference == NEGATIVE_INFINITY ? 0.0f : -reference) {}
    __device__ __forceinline__ float operator()(float score) const {
        return exp2_flushed(fmaf(score, scale, against));
    }
};

// Joins what later positions gave to what earlier ones gave. Always in this order, in this arithmetic: the
// split and the whole form of attention agree in every bit because both call this.
struct Merge {
    float reference, earlier, later;
    __device__ __forceinline__ Merge(float earlier_reference, float later_reference)
        : reference(fmaxf(earlier_reference, later_reference)),
          earlier(rescale(earlier_reference, reference)),
          later(rescale(later_reference, reference)) {}
    __device__ __forceinline__ float operator()(float a, float b) const {
        return fmaf(a, earlier, b * later);
    }
};

// What turns a row's sums into its output: division by the softmax's denominator, which a sink may have
// joined.
struct Finish {
    float numerator, denominator;
    __device__ __forceinline__ Finish(float reference, float sum, float sink, float value_scale) {
        const float top = fmaxf(reference, sink);
        const float own = rescale(reference, top);
        numerator = own * value_scale;
        denominator = fmaf(sum, own, rescale(sink, top));
    }
    __device__ __forceinline__ float operator()(float value) const { return value * numerator / denominator; }
};

// What a lane's weights of a tile add up to: those of each quarter of the positions first, in their order.
__device__ __forceinline__ float sum_of_quarters(float a, float b, float c, float d) {
    return (a + b) + (c + d);
}

// A warp's 16 rows, in the layout of a product's sums: lane 4 g + t holds rows g and g + 8, of each 8 columns
// 2 t and 2 t + 1. `sum` is this lane's share until `end_chunk`.
template <int COLUMN_TILES>
struct RowState {
    float reference[2], sum[2];
    float out[COLUMN_TILES][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int half = 0; half < 2; ++half) reference[half] = NEGATIVE_INFINITY, sum[half] = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c)
            for (int i = 0; i < 4; ++i) out[c][i] = 0.0f;
    }

    // Of nothing yet, but for references that are known. `out` is left as it is.
    __device__ __forceinline__ void begin(const float (&of)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) reference[half] = of[half], sum[half] = 0.0f;
    }

    // Holds a row against another reference.
    __device__ __forceinline__ void raise(int half, float to) {
        const float by = rescale(reference[half], to);
        reference[half] = to;
        // Rounded by itself: a compiler could add the weights to it in one operation here and not there.
        sum[half] = multiply_rounded(sum[half], by);
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            out[c][2 * half] *= by;
            out[c][2 * half + 1] *= by;
        }
    }
    // Both rows; nothing changes where references are what they were.
    __device__ __forceinline__ void raise(const float (&to)[2]) {
        if (lanes_where(to[0] != reference[0] || to[1] != reference[1]) == 0) return;
        for (int half = 0; half < 2; ++half) raise(half, to[half]);
    }

    // Makes `sum` the row's.
    __device__ __forceinline__ void end_chunk() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += shuffle_xor(sum[half], 1);
            sum[half] += shuffle_xor(sum[half], 2);
        }
    }

    __device__ __forceinline__ void join(const RowState& later) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Merge merge(reference[half], later.reference[half]);
            reference[half] = merge.reference;
            sum[half] = merge(sum[half], later.sum[half]);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
                for (int i = 2 * half; i < 2 * half + 2; ++i) out[c][i] = merge(out[c][i], later.out[c][i]);
            }
        }
    }
};

// Sixteen E4M3 codes of each of four rows or so to bf16, every one exactly: of each word the codes 0 and 2 to
// `low`, 1 and 3 to `high`. So sixteen elements of a row become their even and their odd ones, 8 each: keys
// are stored and queries permuted like that, and of values it is columns that change places.
__device__ __forceinline__ void widen_codes(uint32_t (&low)[4], uint32_t (&high)[4],
                                            const uint32_t (&codes)[4]) {
    uint32_t carries = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t x = codes[i];
        // Exponent and mantissa, moved to those of a bf16, are 2^120 too small.
        low[i] = bf16_pair_times((x << 8 & 0x80008000u) | (x << 4 & 0x07f007f0u), 0x7b807b80u);
        high[i] = bf16_pair_times((x & 0x80008000u) | (x >> 4 & 0x07f007f0u), 0x7b807b80u);
        carries |= (x & 0x7f7f7f7fu) + 0x01010101u;
    }
    if ((carries & 0x80808080u) == 0) return;
    // A NaN is among them, which came out as 480.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint32_t& pair = i < 4 ? low[i % 4] : high[i % 4];
        if ((pair & 0x7fffu) == 0x43f0u) pair |= 0x7fc0u;
        if ((pair >> 16 & 0x7fffu) == 0x43f0u) pair |= 0x7fc00000u;
    }
}

// One block's rows and the keys and values that they see, by THREADS threads in tiles of TILE positions.
template <int KEY_DIM, int VALUE_DIM, bool LATENT, bool FP8, int ROWS, int THREADS, int TILE>
struct Rows {
    static constexpr int BLOCK_ROWS = ROWS, KEY_UNITS = KEY_DIM / 8, STEPS = KEY_DIM / 16;
    static constexpr int QUERY = ROWS * KEY_DIM * 2;  // bytes
    // Of a tile as bf16, and as it comes from the pages.
    static constexpr int KEYS = TILE * KEY_DIM * 2, VALUES = LATENT ? 0 : TILE * VALUE_DIM * 2;
    static constexpr int WIDE = KEYS + VALUES, STAGE = WIDE / (FP8 ? 2 : 1);
    static constexpr int VECTOR = FP8 ? KEY_DIM : 2 * KEY_DIM, VECTOR_UNITS = VECTOR / 16;
    static_assert(LATENT || KEY_DIM == VALUE_DIM, "keys and values are copied alike");
    // Where each thread copies the same unit of every STEP'th position.
    static constexpr int STEP = THREADS / VECTOR_UNITS, COPIES = LATENT ? 1 : TILE / STEP;

    const Item& item;
    const Shape& shape;
    const uint32_t* tables;
    const unsigned char *key_pages, *value_pages;
    int kv_head, warp, lane;
    float score_scale;
    int limit_end;           // positions that any row sees end here
    uint32_t pages[COPIES];  // of the tile that is copied next

    __device__ __forceinline__ Rows(const Item& item, const Shape& shape, const uint32_t* tables,
                                    const void* keys, const void* values, float score_scale,
                                    int kv_head = int(blockIdx.y))
        : item(item),
          shape(shape),
          tables(tables + item.table),
          key_pages(static_cast<const unsigned char*>(keys)),
          value_pages(static_cast<const unsigned char*>(values)),
          kv_head(kv_head),
          score_scale(score_scale) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const uint32_t end = min_of(item.first_row + ROWS, item.tokens * shape.group);
        limit_end = seen(end - 1).to;
    }

    // The absolute positions [from, to) that a packed row sees; none for a row past the last.
    struct Seen {
        int from, to;
        __device__ __forceinline__ bool holds(int position) const { return position >= from && position < to; }
    };
    __device__ __forceinline__ Seen seen(uint32_t row) const {
        const uint32_t token = row / shape.group;
        if (token >= item.tokens) return {0, 0};
        const int to = int(item.start + token + 1);
        return {shape.window == 0 || to < int(shape.window) ? 0 : to - int(shape.window), to};
    }

    // The tiles of the item: those that no row sees change nothing. The first row sees farthest back.
    __device__ __forceinline__ int first_tile() const {
        return max_of(int(item.first_chunk) * (CHUNK / TILE), seen(item.first_row).from / TILE);
    }
    __device__ __forceinline__ int end_tile() const {
        return min_of(int(item.end_chunk) * (CHUNK / TILE), (limit_end + TILE - 1) / TILE);
    }

    __device__ __forceinline__ void load_query(unsigned char* to, const uint16_t* q, uint32_t q_stride) {
        for (int i = threadIdx.x; i < ROWS * KEY_UNITS; i += THREADS) {
            const int row = i / KEY_UNITS, unit = i % KEY_UNITS;
            const uint32_t packed = item.first_row + row, token = packed / shape.group;
            const uint64_t at = uint64_t(item.query + token) * q_stride +
                                uint64_t(kv_head * shape.group + packed % shape.group) * KEY_DIM + unit * 8;
            async_copy_16(unit_of<KEY_UNITS>(to, row, unit), q + at, token < item.tokens);
        }
    }

    // The order that `widen_codes` gives keys. A barrier must come before and after.
    __device__ __forceinline__ void permute_query(unsigned char* query) const {
        for (int i = threadIdx.x; i < ROWS * STEPS; i += THREADS) {
            const int row = i / STEPS, step = i % STEPS;
            unsigned char* first = unit_of<KEY_UNITS>(query, row, 2 * step);
            unsigned char* second = unit_of<KEY_UNITS>(query, row, 2 * step + 1);
            const Packet a = load_packet(first), b = load_packet(second);
            Packet even, odd;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const Packet& from = w < 2 ? a : b;
                const uint32_t x = from.words[2 * w % 4], y = from.words[2 * w % 4 + 1];
                even.words[w] = (x & 0xffffu) | y << 16;
                odd.words[w] = x >> 16 | (y & 0xffff0000u);
            }
            store_packet(first, even);
            store_packet(second, odd);
        }
    }

    // The first operand of the products with keys: 16 rows of the query, 16 elements.
    __device__ __forceinline__ void query_fragment(uint32_t (&a)[4], unsigned char* query, int first_row,
                                                   int step) const {
        const int matrix = lane / 8, row = first_row + matrix % 2 * 8 + lane % 8;
        load_matrix(a, unit_of<KEY_UNITS>(query, row, 2 * step + matrix / 2));
    }

    // Reads the page numbers of a tile, so that they are there when it is copied.
    __device__ __forceinline__ void look_up(int tile) {
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const int position = tile * TILE + int(threadIdx.x) / VECTOR_UNITS + c * STEP;
            pages[c] = tables[min_of(position, limit_end - 1) >> shape.page_shift];
        }
    }

    // The number of a position's vector among all; the launcher knows that there are fewer than 2^32.
    __device__ __forceinline__ uint32_t vector_at(uint32_t page, int position) const {
        const uint32_t offset = uint32_t(position) & ((1u << shape.page_shift) - 1);
        return ((page * shape.kv_heads + kv_head) << shape.page_shift) + offset;
    }

    // Starts copying a tile that was looked up: FP8 rows of DIM bytes or bf16 ones, swizzled. Positions from
    // `limit_end` on become zeros, since whatever stale number lies there would turn a weight of 0 into NaN.
    __device__ __forceinline__ void load_tile(int tile, unsigned char* to) {
        const int first = int(threadIdx.x) / VECTOR_UNITS, unit = int(threadIdx.x) % VECTOR_UNITS;
        const unsigned char *keys = key_pages + unit * 16, *values = value_pages + unit * 16;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const int row = first + c * STEP, position = tile * TILE + row;
            const bool valid = position < limit_end;
            const uint64_t at = uint64_t(vector_at(pages[c], position)) * VECTOR;
            unsigned char* of_row = unit_of<VECTOR_UNITS>(to, row, unit);
            async_copy_16(of_row, keys + at, valid);
            async_copy_16(of_row + TILE * VECTOR, values + at, valid);
        }
    }

    // Whether every row sees all of a tile: then nothing is masked.
    __device__ __forceinline__ static bool is_seen(Seen all, int tile) {
        return tile * TILE >= all.from && (tile + 1) * TILE <= all.to;
    }

    // Where lane's sums `out[2 u + k]` and the like go: f(column, low, high) for pairs of neighbours.
    template <class State, class F>
    __device__ __forceinline__ void each_pair(const State& state, int half, int u, F f) const {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float *even = state.out[2 * u] + 2 * half, *odd = state.out[2 * u + 1] + 2 * half;
            if (FP8) f(16 * u + lane % 4 * 4 + 2 * k, even[k], odd[k]);
            else if (k == 0) f(16 * u + lane % 4 * 2, even[0], even[1]);
            else f(16 * u + 8 + lane % 4 * 2, odd[0], odd[1]);
        }
    }

    // Leaves a state of 16 rows from `first_row` of the block on and of the columns from `first_column` on.
    template <int COLUMN_TILES>
    __device__ __forceinline__ void store_partial(const RowState<COLUMN_TILES>& state, float* partials,
                                                  uint32_t slot, int first_row, int first_column) const {
        float* to = partials + (uint64_t(slot) * shape.kv_heads + kv_head) * partial_floats(ROWS, VALUE_DIM);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + 8 * half + lane / 4;
            if (item.first_row + row >= item.tokens * shape.group) continue;
#pragma unroll
            for (int u = 0; u < COLUMN_TILES / 2; ++u) {
                each_pair(state, half, u, [&](int column, float low, float high) {
                    float* at = to + row * VALUE_DIM + first_column + column;
                    store_pair(at, low, high);
                });
            }
            if (first_column == 0 && lane % 4 == 0)
                store_pair(to + ROWS * VALUE_DIM + 2 * row, state.reference[half], state.sum[half]);
        }
    }

    template <int COLUMN_TILES>
    __device__ __forceinline__ void store_out(const RowState<COLUMN_TILES>& state, uint16_t* out,
                                              const float* sinks, float value_scale, int first_row,
                                              int first_column) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t packed = item.first_row + first_row + 8 * half + lane / 4;
            if (packed >= item.tokens * shape.group) continue;
            const uint32_t token = packed / shape.group, head = kv_head * shape.group + packed % shape.group;
            const float sink = sinks != nullptr ? sinks[head] * LOG2_E : NEGATIVE_INFINITY;
            const Finish finish(state.reference[half], state.sum[half], sink, value_scale);
            uint16_t* to =
                out + (uint64_t(item.query + token) * shape.kv_heads * shape.group + head) * VALUE_DIM;
#pragma unroll
            for (int u = 0; u < COLUMN_TILES / 2; ++u) {
                each_pair(state, half, u, [&](int column, float low, float high) {
                    *reinterpret_cast<uint32_t*>(to + first_column + column) =
                        bf16_pair(finish(low), finish(high));
                });
            }
        }
    }
};
