// Causal attention of new tokens over a paged KV cache (arXiv 2309.06180), for prefill and decode alike:
// grouped query heads, sliding windows, sinks, latent caches (MLA, absorbed), bf16 or FP8 (E4M3) keys and
// values. The contract is `paged_attention.rs`'s; the CPU form's layout of pages is another one.
//
// A *row* is one query head of one new token; rows that share a KV head are packed: row r of a sequence is
// token r / group. A block takes 16 rows (`attention_decode.cuh`) or 128 (`attention_prefill.cuh`) of one
// sequence and one KV head over the chunks [first_chunk, end_chunk) of 256 absolute positions. With
// `partials` it leaves each chunk's state there, and `attention_merge` joins them; without, it takes all
// chunks and joins them itself. **All give the same bits**, because each chunk starts anew, goes in tiles at
// fixed positions, and is joined in ascending order by the same arithmetic. So neither batch, nor chunking of
// the prompt, nor the cut, nor the page size can change a bit.
//
// Pages: `keys` [page][kv_head][offset][KEY_DIM], `values` alike with VALUE_DIM; latent: `keys` alone,
// whose first VALUE_DIM elements are the value. Entries of pages beyond a sequence's end are never read.
// Grid: (items, kv heads). GUIDE.md goes through decode line by line.
#include "attention_decode.cuh"
#include "attention_prefill.cuh"

// `q` rows are `q_stride` elements apart; `sinks` [heads] or null; `window` 0 means none; `partials` null
// means whole. `score_scale` holds the softmax's scale, the keys' and log2(e).
template <class A, bool CARRIED>
__device__ __forceinline__ void attend(const Item* items, const uint32_t* tables, const uint16_t* q,
                                       uint32_t q_stride, const void* keys, const void* values,
                                       const float* sinks, uint16_t* out, float* partials, Shape shape,
                                       float score_scale, float value_scale) {
    // Read again where it is needed: there are no registers to keep it in.
    const Item& item = items[blockIdx.x];
    if (item.tokens == 0) return;
    A attention(item, shape, tables, keys, values, score_scale);
    if (partials != nullptr) {
        uint32_t slot = item.slot;
        attention.template run<CARRIED>(
            q, q_stride, [&](typename A::State& state) { attention.leave(state, partials, slot++); });
        return;
    }
    typename A::State total;
    total.clear();
    attention.template run<CARRIED>(q, q_stride, [&](typename A::State& state) { total.join(state); });
    attention.finish(total, out, sinks, value_scale);
}

// `blocks`: how many a processor holds at once.
#define ATTENTION(name, blocks, carried, ...)                                                            \
    using name##_form = __VA_ARGS__;                                                                     \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, blocks)                           \
        name(const Item* items, const uint32_t* tables, const uint16_t* q, uint32_t q_stride,            \
             const void* keys, const void* values, const float* sinks, uint16_t* out, float* partials,   \
             uint32_t kv_heads, uint32_t group, uint32_t page_shift, uint32_t window, float score_scale, \
             float value_scale) {                                                                        \
        follow();                                                                                        \
        attend<__VA_ARGS__, carried>(items, tables, q, q_stride, keys, values, sinks, out, partials,     \
                                     Shape{kv_heads, group, page_shift, window}, score_scale,            \
                                     value_scale);                                                       \
    }

// Shared memory is `SHARED` of each. All but latents' fit into the 99 KB
// that the smallest GPUs give a block.
#define DECODE(dim, fp8, stages) Decode<dim, dim, false, fp8, 64, stages>
#define DECODE_LATENT(fp8) Decode<576, 512, true, fp8, 32, 3>
ATTENTION(attention_64_bf16_16, 3, false, DECODE(64, false, 4))
ATTENTION(attention_64_bf16_128, 1, false, Prefill<64, false, 3>)
ATTENTION(attention_64_fp8_16, 3, false, DECODE(64, true, 4))
ATTENTION(attention_64_fp8_128, 1, false, Prefill<64, true, 2>)
ATTENTION(attention_128_bf16_16, 2, false, DECODE(128, false, 3))
ATTENTION(attention_128_bf16_128, 1, false, Prefill<128, false, 3>)
ATTENTION(attention_128_fp8_16, 3, false, DECODE(128, true, 4))
ATTENTION(attention_128_fp8_128, 1, false, Prefill<128, true, 2>)
ATTENTION(attention_latent_bf16_16, 1, false, DECODE_LATENT(false))
ATTENTION(attention_latent_fp8_16, 1, false, DECODE_LATENT(true))

// What fixed chunks cost: the same with one state for all chunks of a block, so that bits depend on how the
// batch was cut. `kernels/check` times these beside the others; nothing else launches them.
ATTENTION(attention_128_bf16_16_carried, 2, true, DECODE(128, false, 3))
ATTENTION(attention_128_bf16_128_carried, 1, true, Prefill<128, false, 3>)

constexpr int MERGE_THREADS = 128;

// Joins the chunks that blocks left in `partials`, in ascending order, and writes `out`. An item here spans
// all chunks of its rows. Grid: (items, kv heads, rows). Block: 128 threads, each some columns.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    attention_merge(const Item* items, const float* partials, const float* sinks, uint16_t* out,
                    uint32_t kv_heads, uint32_t group, uint32_t rows, uint32_t value_dim, float value_scale) {
    follow();
    // Chunks that are read at once: the joining of one needs the one before, reading it does not.
    constexpr int AT_ONCE = 16;
    const Item item = items[blockIdx.x];
    const uint32_t row = blockIdx.z, packed = item.first_row + row;
    if (packed >= item.tokens * group) return;
    const uint32_t head = blockIdx.y * group + packed % group;
    const float sink = sinks != nullptr ? sinks[head] * LOG2_E : NEGATIVE_INFINITY;
    const uint64_t floats = partial_floats(rows, value_dim), stride = kv_heads * floats;
    const float* states = partials + item.slot * stride + blockIdx.y * floats;
    const uint32_t chunks = item.end_chunk - item.first_chunk;
    uint16_t* to = out + (uint64_t(item.query + packed / group) * kv_heads * group + head) * value_dim;
    for (uint32_t column = 2 * threadIdx.x; column < value_dim; column += 2 * MERGE_THREADS) {
        float reference = NEGATIVE_INFINITY, sum = 0.0f, low = 0.0f, high = 0.0f;
        for (uint32_t chunk = 0; chunk < chunks; chunk += AT_ONCE) {
            Pair of_row[AT_ONCE], values[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float* state = states + min_of(chunk + i, chunks - 1) * stride;
                of_row[i] = *reinterpret_cast<const Pair*>(state + uint64_t(rows) * value_dim + 2 * row);
                values[i] = *reinterpret_cast<const Pair*>(state + uint64_t(row) * value_dim + column);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (chunk + i >= chunks) break;
                const Merge merge(reference, of_row[i].low);
                reference = merge.reference;
                sum = merge(sum, of_row[i].high);
                low = merge(low, values[i].low);
                high = merge(high, values[i].high);
            }
        }
        const Finish finish(reference, sum, sink, value_scale);
        *reinterpret_cast<uint32_t*>(to + column) = bf16_pair(finish(low), finish(high));
    }
}
