// `moe_product.cu`'s products for Hopper, bf16 weights, by warpgroups: the sums of `matmul_sm90.cu`, bit for
// bit. Same arguments, same contract. Grid: (n tiles of 128, the most items there can be). Block: 256
// threads.
//
// `moe_product_sm90_pair` is both products of a layer, where items have up to 16 rows (`moe_pair.cuh`).
//
// From 64 rows an item on, blocks stay and go through the pieces of work (`pipeline_sm90.cuh`): a grid of any
// number of blocks, of 384 threads.
#include "moe_pair.cuh"
#include "pipeline_sm90.cuh"
#include "product_sm90.cuh"

template <class K>
__device__ __forceinline__ void write(const K& kernel, const warpgroup_product::Operands& p, const Ending& ending,
                                      const typename K::Sums& total) {
    if (ending.gate == NO_GATE) {
        kernel.each(total, [&](uint32_t m, uint32_t n, float sum) { ending.plain(m, n, sum); });
        return;
    }
    // A thread's outputs n and n + 8 are a gate and its value.
#pragma unroll
    for (int i = 0; i < K::BLOCK_ROWS / 2; ++i) {
        if (i / 2 % 2 == 1) continue;
        const uint32_t m = kernel.row(i), n = kernel.output(i);
        if (m < p.end && n < p.n) ending.gated_pair(m, n, total[i], total[i + 2]);
    }
}

// An item's rows, and its expert's weight.
__device__ __forceinline__ void take_item(warpgroup_product::Operands& p, Ending& ending, const ExpertRows& item) {
    using namespace warpgroup_product;
    const uint64_t tiles = uint64_t((p.n + OUTPUTS - 1) / OUTPUTS) * (p.k / TILE_K);
    p.weights += item.expert * tiles * IMAGE;
    if (ending.bias != nullptr) ending.bias += uint64_t(item.expert) * p.n;
    p.first = item.first, p.end = item.end;
}

template <class K>
__device__ __forceinline__ void product(warpgroup_product::Operands p, Ending ending, const ExpertRows* items,
                                        const uint32_t* item_count) {
    if (blockIdx.y >= *item_count) return;
    take_item(p, ending, items[blockIdx.y]);
    K kernel(p);
    typename K::Sums total;
    kernel.run_all(total);
    write(kernel, p, ending, total);
}

// An item's rows by each tile of outputs in turn, so that blocks that run at once share the rows.
struct ItemPieces {
    const pipelined_product::Operands& p;
    const unsigned char* weights;
    const ExpertRows* items;
    uint32_t tiles_n, count;
    uint64_t expert_bytes;

    __device__ __forceinline__ bool operator()(uint32_t i, pipelined_product::Piece& piece) const {
        if (i >= count) return false;
        const ExpertRows item = items[i / tiles_n];
        piece.weights = weights + item.expert * expert_bytes;
        piece.first = item.first, piece.end = item.end;
        piece.tile_n = i % tiles_n * 2;
        piece.from = 0, piece.to = p.k / 64;
        piece.other = item.expert;
        return true;
    }
};

template <class K>
__device__ __forceinline__ void product_in_pieces(const pipelined_product::Operands& p, const unsigned char* weights,
                                                  const Ending& ending, const ExpertRows* items,
                                                  const uint32_t* item_count) {
    using namespace pipelined_product;
    const uint32_t tiles_n = (p.n + 127) / 128;
    const uint64_t expert_bytes = uint64_t((p.n + OUTPUTS - 1) / OUTPUTS) * (p.k / TILE_K) * IMAGE;
    K kernel(p);
    kernel.run(ItemPieces{p, weights, items, tiles_n, *item_count * tiles_n, expert_bytes},
               [&](const Piece& piece, const auto& sums) {
        float bias[2] = {};
        for (int i = 0; i < 2; ++i) {
            const uint32_t n = kernel.output(piece, 2 * i);
            if (ending.bias != nullptr && n < p.n)
                bias[i] = bf16_to_f32(ending.bias[uint64_t(piece.other) * p.n + n]);
        }
        const auto value = [&](const auto& sums, int i) {
            return ending.bias != nullptr ? sums[i] + bias[i / 2 % 2] : sums[i];
        };
        const auto row_of = [&](uint32_t m) { return uint32_t(ending.row(m)); };
        if (ending.gate == NO_GATE) {
            kernel.template store<false>(piece, sums, ending.y, p.n, row_of, value);
            return;
        }
        // A thread's sums i and i + 2, of outputs n and n + 8, are a gate and its value.
        const auto gated = [&](const auto& sums, int i) {
            const float g = value(sums, i), v = value(sums, i + 2);
            return ending.gate == SILU ? silu_gate(g, v) : clamped_gate(g, v, ending.alpha, ending.limit);
        };
        kernel.template store<true>(piece, sums, ending.y, p.n / 2, row_of, gated);
    });
}

#define MOE_PARAMETERS \
    const uint16_t *x, const unsigned char *weights, const float *, const uint16_t *bias, uint16_t *y, \
        const ExpertRows *items, const uint32_t *item_count, const uint32_t *slots, uint32_t top, uint32_t n, \
        uint32_t k, uint32_t split_tiles, uint32_t gate, float alpha, float limit, uint32_t to_slots
#define ENDING \
    Ending { bias, y, n, gate, alpha, limit, to_slots ? slots : nullptr }

extern "C" __global__ void __launch_bounds__(warpgroup_product::THREADS) moe_product_sm90_16(MOE_PARAMETERS) {
    follow();
    const warpgroup_product::Operands operands{x, weights, n, k, split_tiles, 0, 0, slots, top, blockIdx.x};
    product<warpgroup_product::Rows16<true>>(operands, ENDING, items, item_count);
}

// Both products of few rows; bf16 has no scales.
extern "C" __global__ void __launch_bounds__(warpgroup_product::THREADS) moe_product_sm90_pair(PAIR_PARAMETERS) {
    follow();
    using namespace warpgroup_product;
    constexpr uint32_t TILE = OUTPUTS * WARPGROUPS;
    const ProductPair pair{items, item_count, counts, (n + TILE - 1) / TILE, (down_n + TILE - 1) / TILE};
    Share share;
    if (!pair.take(share)) return;
    Operands p{share.is_second ? h : x,
               share.is_second ? down : weights,
               share.is_second ? down_n : n,
               share.is_second ? n / 2 : k,
               share.is_second ? down_split_tiles : split_tiles,
               0,
               0,
               share.is_second ? nullptr : slots,
               share.is_second ? 1 : top,
               share.tile};
    Ending ending = share.is_second ? Ending{down_bias, y, down_n, NO_GATE, 0.0f, 0.0f, nullptr}
                                    : Ending{bias, h, n, gate, alpha, limit, nullptr};
    take_item(p, ending, items[share.item]);
    using K = Rows16<true>;
    K kernel(p);
    K::Sums total;
    kernel.run_all(total, RowsAreThere{share});
    write(kernel, p, ending, total);
    if (!share.is_second) share.rows.give();
}

#define MOE_PRODUCT(name, form) \
    extern "C" __global__ void __launch_bounds__(pipelined_product::THREADS, 1) name(MOE_PARAMETERS) { \
        follow();                                                                                  \
        product_in_pieces<pipelined_product::form>( \
            pipelined_product::Operands{x, n, k, int(split_tiles), slots, top}, weights, ENDING, items, \
            item_count); \
    }

MOE_PRODUCT(moe_product_sm90_64, Rows64<true>)
MOE_PRODUCT(moe_product_sm90_128, Rows128<true>)
MOE_PRODUCT(moe_product_sm90_256, Rows256<true>)
MOE_PRODUCT(moe_product_sm90_256_whole, Whole256<true>)
