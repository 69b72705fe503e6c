// Causal attention over a paged KV cache of bf16 for Hopper: `attention.cu`'s contract and bits. Of prompts,
// by `attention_sm90.cuh`, 128 rows an item; of latents, for prompts and decode alike, by
// `attention_latent_sm90.cuh`, 64 rows an item. A block takes every so manieth of the `pieces`, which are the
// items for each KV head. `_apart` leaves every chunk's state in `partials`, for `attention_merge`; the
// others have all chunks of their rows and join them themselves, latents' by way of `partials`. Grid:
// (blocks).
#include "attention_latent_sm90.cuh"
#include "attention_sm90.cuh"

template <class A, bool APART>
__device__ __forceinline__ void attend_all(const Item* items, uint32_t pieces, const uint32_t* tables,
                                           const uint16_t* q, uint32_t q_stride, const void* keys,
                                           const void* values, const float* sinks, uint16_t* out,
                                           float* partials, Shape shape, float score_scale,
                                           float value_scale) {
    A::prepare_barriers();
    typename A::Turn turn;
    const auto piece = [&](uint32_t i) {
        return A(items[i / shape.kv_heads], shape, tables, keys, values, score_scale,
                 int(i % shape.kv_heads));
    };
    const auto each = [&](const auto& attend) {
        for (uint32_t i = blockIdx.x; i < pieces; i += gridDim.x) {
            if (items[i / shape.kv_heads].tokens == 0) continue;
            attend(i);
            ++turn.piece;
        }
    };
    if (threadIdx.x >= A::CONSUMERS) {
        fewer_registers<40>();
        each([&](uint32_t i) { piece(i).produce(turn, q, q_stride); });
        async_copy_commit();
        async_copy_wait<0>();
    } else {
        more_registers<232>();
        each([&](uint32_t i) {
            const A attention = piece(i);
            const int first_row = 16 * int(threadIdx.x / 32);
            if (APART) {
                attention.template consume<true>(turn, [&](int chunk, const typename A::State& state) {
                    const Item& item = attention.item;
                    attention.store_partial(state, partials, item.slot + chunk - item.first_chunk, first_row,
                                            0);
                });
                return;
            }
            typename A::Joined total;
            total.clear();
            attention.template consume<false>(
                turn, [&](int, const typename A::State& state) { total.join(state); });
            // Computed again, so that nothing of it takes registers until then.
            piece(in_register(i)).store_out(total.whole(), out, sinks, value_scale, first_row, 0);
        });
    }
}

#define ATTENTION_SM90(name, dim, apart)                                                                     \
    extern "C" __global__ void __launch_bounds__(Pipelined<dim>::THREADS, 1)                                 \
        name(const Item* items, uint32_t pieces, const uint32_t* tables, const uint16_t* q,                  \
             uint32_t q_stride, const void* keys, const void* values, const float* sinks, uint16_t* out,     \
             float* partials, uint32_t kv_heads, uint32_t group, uint32_t page_shift, uint32_t window,       \
             float score_scale, float value_scale) {                                                         \
        follow();                                                                                            \
        attend_all<Pipelined<dim>, apart>(items, pieces, tables, q, q_stride, keys, values, sinks, out,      \
                                          partials, Shape{kv_heads, group, page_shift, window}, score_scale, \
                                          value_scale);                                                      \
    }

ATTENTION_SM90(attention_sm90_64_bf16, 64, false)
ATTENTION_SM90(attention_sm90_64_bf16_apart, 64, true)
ATTENTION_SM90(attention_sm90_128_bf16, 128, false)
ATTENTION_SM90(attention_sm90_128_bf16_apart, 128, true)

template <bool APART>
__device__ __forceinline__ void attend_latents(const Item* items, uint32_t pieces, const uint32_t* tables,
                                               const uint16_t* q, uint32_t q_stride, const void* keys,
                                               const float* sinks, uint16_t* out, float* partials, Shape shape,
                                               float score_scale, float value_scale) {
    Latents::prepare_barriers();
    Latents::Turn turn;
    const auto each = [&](const auto& attend) {
        for (uint32_t i = blockIdx.x; i < pieces; i += gridDim.x) {
            if (items[i].tokens == 0) continue;
            attend(items[i], Latents(items[i], shape, tables, keys, nullptr, score_scale, 0));
            ++turn.items;
        }
    };
    if (threadIdx.x >= Latents::CONSUMERS) {
        fewer_registers<40>();
        each([&](const Item&, const Latents& attention) { attention.produce(turn, q, q_stride); });
        return;
    }
    more_registers<232>();
    each([&](const Item& item, const Latents& attention) {
        if (APART) {
            attention.consume(turn, [&](int chunk, const Latents::State& state) {
                attention.store_partial(state, partials, item.slot + chunk - item.first_chunk,
                                        Latents::first_row(), Latents::first_column());
            });
            return;
        }
        Latents::Joined total;
        const int first = attention.first_tile() / Latents::PAIRS;
        attention.consume(turn, [&](int chunk, const Latents::State& state) {
            total.join(state, partials, chunk == first);
        });
        attention.store_joined(total, partials, out, sinks, value_scale);
    });
}

#define ATTENTION_LATENT_SM90(name, apart)                                                                   \
    extern "C" __global__ void __launch_bounds__(Latents::THREADS, 1)                                        \
        name(const Item* items, uint32_t pieces, const uint32_t* tables, const uint16_t* q,                  \
             uint32_t q_stride, const void* keys, const void*, const float* sinks, uint16_t* out,            \
             float* partials, uint32_t kv_heads, uint32_t group, uint32_t page_shift, uint32_t window,       \
             float score_scale, float value_scale) {                                                         \
        follow();                                                                                            \
        attend_latents<apart>(items, pieces, tables, q, q_stride, keys, sinks, out, partials,                \
                              Shape{kv_heads, group, page_shift, window}, score_scale, value_scale);         \
    }

ATTENTION_LATENT_SM90(attention_sm90_latent_bf16, false)
ATTENTION_LATENT_SM90(attention_sm90_latent_bf16_apart, true)
