// Rotary position embedding (arXiv 2104.09864) of new queries and keys, fused with writing keys and values
// to their pages: `rope.rs`'s contract, `attention.cu`'s pages.
//
// A row of `x` is [heads * key_dim], one of `kv` [kv_heads * key_dim | kv_heads * value_dim], both of one token and mostly
// the two parts of one row: queries are turned in place, keys and values go to the pages and stay as they were. Of a head, `2 * half`
// elements from `rotated_from` on turn by row `token` of `cosines` and `sines` [tokens, half].
// `slots[token]` = page * page_size + offset; NO_SLOT writes nothing. Every element is computed alone.
//
// `rope_write_*` takes heads of any size, `rope_heads_*` those of 64 or 128 elements whose parts are packets
// of 8, normalised on the way where the model does so: queries and keys, with the bits of `rms_norm` of each.
#include "norm.cuh"

constexpr uint32_t NO_SLOT = 0xffffffffu;
constexpr int THREADS = 256;

struct Layout {
    uint32_t stride, kv_stride, heads, kv_heads, key_dim, value_dim, rotated_from, half, interleaved, page_shift;
};

// Two elements of a page from two f32.
__device__ __forceinline__ void store_pair(uint16_t* page, uint64_t at, float low, float high, float) {
    reinterpret_cast<uint32_t*>(page)[at / 2] = bf16_pair(low, high);
}
__device__ __forceinline__ void store_pair(uint8_t* page, uint64_t at, float low, float high, float by) {
    reinterpret_cast<uint16_t*>(page)[at / 2] = uint16_t(f32_to_e4m3(low * by) | f32_to_e4m3(high * by) << 8);
}

// Where a slot's vector of `kv_head` begins in pages of vectors of `dim`.
__device__ __forceinline__ uint64_t vector_at(uint32_t slot, const Layout& layout, uint32_t kv_head,
                                              uint32_t dim) {
    const uint32_t page = slot >> layout.page_shift, offset = slot & ((1u << layout.page_shift) - 1);
    return (((uint64_t(page) * layout.kv_heads + kv_head) << layout.page_shift) + offset) * dim;
}

struct Turned {
    float x, y;
};
__device__ __forceinline__ Turned turn(float x, float y, float c, float s) {
    return {fmaf(x, c, -(y * s)), fmaf(y, c, x * s)};
}

// === rope_write: grid: (tokens), block: 256 threads ===

// Turns all heads of one token; keys go to `keys`.
template <class Page>
__device__ __forceinline__ void turn_heads(uint16_t* row, uint16_t* own_keys, const Layout& layout, const float* c,
                                           const float* s, uint32_t slot, Page* keys, float key_by) {
    const uint32_t quads = layout.half / 2;  // of two pairs each
    for (uint32_t i = threadIdx.x; i < (layout.heads + layout.kv_heads) * quads; i += THREADS) {
        const uint32_t head = i / quads, pair = i % quads * 2;
        // Two words hold two pairs: (0, 2) and (1, 3) of their elements by halves, (0, 1) and (2, 3)
        // interleaved.
        const uint32_t at = layout.rotated_from + (layout.interleaved ? 2 * pair : pair);
        const uint32_t further = at + (layout.interleaved ? 2 : layout.half);
        uint16_t* vector = head < layout.heads ? row + head * layout.key_dim
                                               : own_keys + (head - layout.heads) * layout.key_dim;
        uint32_t* words[2] = {reinterpret_cast<uint32_t*>(vector + at),
                              reinterpret_cast<uint32_t*>(vector + further)};
        float e[4] = {bf16_low(*words[0]), bf16_high(*words[0]), bf16_low(*words[1]), bf16_high(*words[1])};
        if (layout.interleaved) {
            const Turned a = turn(e[0], e[1], c[pair], s[pair]),
                         b = turn(e[2], e[3], c[pair + 1], s[pair + 1]);
            e[0] = a.x, e[1] = a.y, e[2] = b.x, e[3] = b.y;
        } else {
            const Turned a = turn(e[0], e[2], c[pair], s[pair]),
                         b = turn(e[1], e[3], c[pair + 1], s[pair + 1]);
            e[0] = a.x, e[2] = a.y, e[1] = b.x, e[3] = b.y;
        }
        if (head < layout.heads) {
            *words[0] = bf16_pair(e[0], e[1]);
            *words[1] = bf16_pair(e[2], e[3]);
        } else if (slot != NO_SLOT) {
            const uint64_t to = vector_at(slot, layout, head - layout.heads, layout.key_dim);
            store_pair(keys, to + at, e[0], e[1], key_by);
            store_pair(keys, to + further, e[2], e[3], key_by);
        }
    }
}

// Copies elements [from, to) of each KV head's vector to its page.
template <class Page>
__device__ __forceinline__ void copy_heads(const uint16_t* vectors, uint32_t dim, uint32_t from, uint32_t to,
                                           const Layout& layout, uint32_t slot, Page* pages, float by) {
    const uint32_t pairs = (to - from) / 2;
    for (uint32_t i = threadIdx.x; i < layout.kv_heads * pairs; i += THREADS) {
        const uint32_t head = i / pairs, at = from + i % pairs * 2;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(vectors + head * dim + at);
        store_pair(pages, vector_at(slot, layout, head, dim) + at, bf16_low(word), bf16_high(word), by);
    }
}

template <class Page>
__device__ __forceinline__ void rope_write(uint16_t* x, uint16_t* kv, const float* cosines, const float* sines,
                                           const uint32_t* slots, Page* keys, Page* values,
                                           const Layout& layout, float key_by, float value_by) {
    uint16_t* row = x + uint64_t(blockIdx.x) * layout.stride;
    const uint64_t angles = uint64_t(blockIdx.x) * layout.half;
    const uint32_t slot = slots[blockIdx.x], turned_to = layout.rotated_from + 2 * layout.half;
    uint16_t* own_keys = kv + uint64_t(blockIdx.x) * layout.kv_stride;
    turn_heads(row, own_keys, layout, cosines + angles, sines + angles, slot, keys, key_by);
    if (slot == NO_SLOT) return;
    copy_heads(own_keys, layout.key_dim, 0, layout.rotated_from, layout, slot, keys, key_by);
    copy_heads(own_keys, layout.key_dim, turned_to, layout.key_dim, layout, slot, keys, key_by);
    copy_heads(own_keys + layout.kv_heads * layout.key_dim, layout.value_dim, 0, layout.value_dim, layout,
               slot, values, value_by);
}

// `key_by` and `value_by` are one over the scales of an FP8 cache, which saturates at 448.
#define ROPE_WRITE(name, Page)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                              \
        name(uint16_t* x, uint16_t* kv, const float* cosines, const float* sines, const uint32_t* slots, \
             Page* keys, Page* values, uint32_t stride, uint32_t kv_stride, uint32_t heads,            \
             uint32_t kv_heads, uint32_t key_dim, uint32_t value_dim, uint32_t rotated_from,           \
             uint32_t half, uint32_t interleaved, uint32_t page_shift, float key_by, float value_by) { \
        follow();                                                                                      \
        const Layout layout{stride,       kv_stride, heads,       kv_heads,  key_dim, value_dim,       \
                            rotated_from, half,      interleaved, page_shift};                         \
        rope_write(x, kv, cosines, sines, slots, keys, values, layout, key_by, value_by);              \
    }

ROPE_WRITE(rope_write_bf16, uint16_t)
ROPE_WRITE(rope_write_fp8, uint8_t)

// === rope_heads ===
//
// A lane has 8 elements of a head, dim / 8 lanes have it; what they hold together passes between them. Grid:
// (parts, tokens); block: 128 threads. The heads of one token, queries, keys and values, go round the parts'
// groups of lanes. `x` is as above with keys and values in the same row, its stride, `rotated_from` and
// `half` multiples of 8.
constexpr int HEAD_THREADS = 128;

// The weights of both norms, or null, and what keeps their divisors from 0.
struct Norms {
    const uint16_t *queries, *keys;
    float eps;
};

// Where a lane stands in the part that turns: it is in its first or its second half, or outside.
template <bool INTERLEAVED>
struct Place {
    uint32_t in_part, half;  // elements

    __device__ __forceinline__ bool turns() const { return in_part < 2 * half; }
    __device__ __forceinline__ bool is_first() const { return in_part < half; }
    // Who has what its elements form pairs with.
    __device__ __forceinline__ uint32_t partner(uint32_t lane) const {
        if (!turns()) return lane;
        return is_first() ? lane + half / 8 : lane - half / 8;
    }
    // Where its angles begin.
    __device__ __forceinline__ uint32_t angle() const {
        return INTERLEAVED ? in_part / 2 : is_first() ? in_part : in_part - half;
    }
};

// The cosines and sines of a lane's elements, of pairs that lie side by side one for both; the same in every
// head.
template <bool INTERLEAVED>
struct Angles {
    float c[INTERLEAVED ? 4 : 8], s[INTERLEAVED ? 4 : 8];

    __device__ __forceinline__ void load(const float* cosines, const float* sines) {
#pragma unroll
        for (int i = 0; i < (INTERLEAVED ? 4 : 8); i += 4) {
            const Packet four_c = load_packet(cosines + i), four_s = load_packet(sines + i);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                c[i + j] = from_bits(four_c.words[j]);
                s[i + j] = from_bits(four_s.words[j]);
            }
        }
    }
};

// The head's packet normalised; its lanes' sum is that of a warp of which they are the first, the others
// having nothing.
__device__ __forceinline__ Packet normalise(const Packet& values, const Packet& weight, uint32_t dim,
                                            float eps) {
    float squares = add_squares(values, 0.0f);
    if (dim > 64) squares += shuffle_xor(squares, 8);
#pragma unroll
    for (unsigned mask = 4; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
    return normalised(values, norm_scale(squares, dim, eps), weight);
}

// One element of a pair: its first is x of `turn`, its second y.
__device__ __forceinline__ float turn_one(float own, float other, float c, float s, bool is_first) {
    const float across = other * s;
    return fmaf(own, c, is_first ? -across : across);
}

// This lane's elements, turned if they turn. All lanes of the warp must come.
template <bool INTERLEAVED>
__device__ __forceinline__ void turn_packet(const Packet& values, const Place<INTERLEAVED>& place,
                                            const Angles<INTERLEAVED>& angles, bool turns, float (&e)[8]) {
    const uint32_t partner = place.partner(threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint32_t own = values.words[j], other = INTERLEAVED ? own : shuffle(own, partner);
        const float x = bf16_low(own), y = bf16_high(own);
        e[2 * j] = x, e[2 * j + 1] = y;
        if (!turns) continue;
        const float *c = angles.c + (INTERLEAVED ? j : 2 * j), *s = angles.s + (INTERLEAVED ? j : 2 * j);
        if (INTERLEAVED) {
            const Turned pair = turn(x, y, *c, *s);
            e[2 * j] = pair.x, e[2 * j + 1] = pair.y;
        } else {
            e[2 * j] = turn_one(x, bf16_low(other), c[0], s[0], place.is_first());
            e[2 * j + 1] = turn_one(y, bf16_high(other), c[1], s[1], place.is_first());
        }
    }
}

__device__ __forceinline__ Packet packet_of(const float (&e)[8]) {
    Packet packet;
#pragma unroll
    for (int j = 0; j < 4; ++j) packet.words[j] = bf16_pair(e[2 * j], e[2 * j + 1]);
    return packet;
}
// 8 elements of a page.
__device__ __forceinline__ void store_eight(uint16_t* page, uint64_t at, const float (&e)[8], float) {
    store_packet(page + at, packet_of(e));
}
__device__ __forceinline__ void store_eight(uint8_t* page, uint64_t at, const float (&e)[8], float by) {
    uint64_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= uint64_t(f32_to_e4m3(e[i] * by)) << 8 * i;
    *reinterpret_cast<uint64_t*>(page + at) = codes;
}

// Normalises and turns one head's packet, and puts it where it belongs. All lanes of the warp must come.
template <class Page, bool INTERLEAVED>
struct HeadWriter {
    const Layout& layout;
    const Angles<INTERLEAVED>& angles;
    const Place<INTERLEAVED>& place;
    const Packet &query_weight, &key_weight;
    bool normed;
    float eps, key_by, value_by;
    Page *keys, *values;
    uint32_t at, slot;  // of the packet in its head, and of the token

    __device__ __forceinline__ void write(uint32_t head, Packet own, uint16_t* row) const {
        const uint32_t dim = layout.key_dim, turned = layout.heads + layout.kv_heads;
        const bool is_query = head < layout.heads, is_value = head >= turned;
        if (normed) {
            Packet weight;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                weight.words[j] = is_query ? query_weight.words[j] : key_weight.words[j];
            const Packet other = normalise(own, weight, dim, eps);
            if (!is_value) own = other;
        }
        float e[8];
        turn_packet(own, place, angles, place.turns() && !is_value, e);
        if (is_query) {
            if (normed || place.turns()) store_packet(row + head * dim + at, packet_of(e));
        } else if (head < turned + layout.kv_heads && slot != NO_SLOT) {
            const uint32_t kv_head = head - (is_value ? turned : layout.heads);
            store_eight(is_value ? values : keys, vector_at(slot, layout, kv_head, dim) + at, e,
                        is_value ? value_by : key_by);
        }
    }
};

template <bool INTERLEAVED, class Page>
__device__ __forceinline__ void rope_heads(uint16_t* x, const float* cosines, const float* sines,
                                           const uint32_t* slots, const Norms& norms, Page* keys,
                                           Page* values, const Layout& layout, float key_by, float value_by) {
    const uint32_t dim = layout.key_dim, lane_bits = dim > 64 ? 4 : 3, group = threadIdx.x >> lane_bits;
    const uint32_t at = (threadIdx.x & ((1u << lane_bits) - 1)) * 8;
    const bool normed = norms.queries != nullptr;
    // No launch changes a weight.
    Packet query_weight{}, key_weight{};
    if (normed) query_weight = load_packet(norms.queries + at), key_weight = load_packet(norms.keys + at);
    follow();
    uint16_t* row = x + uint64_t(blockIdx.y) * layout.stride;
    const uint32_t count = layout.heads + 2 * layout.kv_heads, groups = HEAD_THREADS >> lane_bits;
    const auto load = [&](uint32_t head) {
        Packet own{};
        if (head < count) own = load_packet(row + head * dim + at);
        return own;
    };
    uint32_t head = blockIdx.x * groups + group;
    Packet own = load(head);
    const uint32_t slot = slots[blockIdx.y];
    // What stands before the part wraps round to behind it.
    const Place<INTERLEAVED> place{at - layout.rotated_from, layout.half};
    const uint64_t angle = uint64_t(blockIdx.y) * layout.half + place.angle();
    Angles<INTERLEAVED> angles{};
    if (place.turns()) angles.load(cosines + angle, sines + angle);
    const HeadWriter<Page, INTERLEAVED> writer{layout,    angles, place,    query_weight, key_weight, normed,
                                               norms.eps, key_by, value_by, keys,         values,     at,
                                               slot};
    // A warp goes round as a whole, since its lanes pass elements to each other; the next head's are asked
    // for meanwhile.
    for (uint32_t first = blockIdx.x * groups; first < count; first += gridDim.x * groups) {
        const Packet next = load(head + gridDim.x * groups);
        writer.write(head, own, row);
        head += gridDim.x * groups, own = next;
    }
}

#define ROPE_HEADS(name, Page)                                                                              \
    extern "C" __global__ void __launch_bounds__(HEAD_THREADS)                                              \
        name(uint16_t* x, const float* cosines, const float* sines, const uint32_t* slots,                  \
             const uint16_t* query_norm, const uint16_t* key_norm, Page* keys, Page* values,                \
             uint32_t stride, uint32_t heads, uint32_t kv_heads, uint32_t dim, uint32_t rotated_from,       \
             uint32_t half, uint32_t interleaved, uint32_t page_shift, float key_by, float value_by,        \
             float eps) {                                                                                   \
        const Layout layout{stride, stride,       heads, kv_heads,    dim,                                  \
                            dim,    rotated_from, half,  interleaved, page_shift};                          \
        const Norms norms{query_norm, key_norm, eps};                                                       \
        if (interleaved)                                                                                    \
            rope_heads<true>(x, cosines, sines, slots, norms, keys, values, layout, key_by, value_by);      \
        else rope_heads<false>(x, cosines, sines, slots, norms, keys, values, layout, key_by, value_by);    \
    }

ROPE_HEADS(rope_heads_bf16, uint16_t)
ROPE_HEADS(rope_heads_fp8, uint8_t)
