// Rotary position embedding (arXiv 2104.09864) of new queries and keys, fused with writing keys and values
// to their pages: `rope.rs`'s contract, `attention.cu`'s pages.
//
// A row of `x` is [heads * key_dim], one of `kv` [kv_heads * key_dim | kv_heads * value_dim], both of one token and mostly
// the two parts of one row: queries are turned in place, keys and values go to the pages and stay as they were. Of a head, `2 * half`
// elements from `rotated_from` on turn by row `token` of `cosines` and `sines` [tokens, half].
// `slots[token]` = page * page_size + offset; NO_SLOT writes nothing. Every element is computed alone.
// Grid: (tokens). Block: 256 threads.
#include "numbers.cuh"

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
