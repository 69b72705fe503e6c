// The experts' products: each row of x by the weight of the expert that serves it, y[place] = x[row] w[expert]^T (+ bias),
// with the gate of a feed-forward layer at the end where there is one. Weights of all experts one after another, each packed as for
// `matmul.cu`, whose sums these are, bit for bit: a row's result depends on its expert alone.
//
// What there is to do stands in `items` (`moe_group`). Grid: (n tiles, the most items there can be); blocks past the
// last item return at once, so that a captured graph serves whatever the router chose. Row `place` of x is slots[place] / top, or
// `place` itself where `slots` is null; row `place` of y is `slots[place]` where `to_slots` is set, else `place`.
//
// `moe_product_pair_*` are both products of a layer, where items have up to 16 rows (`moe_pair.cuh`). Grid: the tiles of
// both of the most items there can be.
#include "moe_pair.cuh"
#include "product_few.cuh"

using namespace warp_product;

template <class K>
__device__ __forceinline__ void write(const K& kernel, const Operands& p, const Ending& ending,
                                      const typename K::Sums& total) {
    if (ending.gate == NO_GATE) {
        kernel.each(total, [&](uint32_t m, uint32_t n, float sum) { ending.plain(m, n, sum); });
        return;
    }
#pragma unroll
    for (int i = 0; i < K::M_TILES; ++i)
#pragma unroll
        for (int j = 0; j < K::N_TILES; j += 2)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32_t m = kernel.row(i, e), n = kernel.column(j, e);
                if (m < p.end && n < p.n) ending.gated_pair(m, n, total[i][j][e], total[i][j + 1][e]);
            }
}

// An item's rows, and its expert's weight.
__device__ __forceinline__ void take_item(Operands& p, Ending& ending, uint64_t image, const ExpertRows& item) {
    const uint64_t tiles = uint64_t((p.n + TILE_N - 1) / TILE_N) * (p.k / TILE_K);
    p.weights += item.expert * tiles * image;
    if (p.scales != nullptr) p.scales += uint64_t(item.expert) * (p.k / (GROUP_TILES * TILE_K)) * p.n;
    if (ending.bias != nullptr) ending.bias += uint64_t(item.expert) * p.n;
    p.first = item.first, p.end = item.end;
}

template <class K>
__device__ __forceinline__ void product(Operands p, Ending ending, const ExpertRows* items, const uint32_t* item_count) {
    if (blockIdx.y >= *item_count) return;
    take_item(p, ending, K::IMAGE, items[blockIdx.y]);
    K kernel(p);
    typename K::Sums total;
    kernel.run_all(total);
    write(kernel, p, ending, total);
}

// Block: as of `matmul_few`.
template <class K>
__device__ __forceinline__ void product_few(Operands p, Ending ending, const ExpertRows* items,
                                            const uint32_t* item_count, int warps_n, int kept_rows) {
    if (blockIdx.y >= *item_count) return;
    take_item(p, ending, K::IMAGE, items[blockIdx.y]);
    const K kernel(p, warps_n, kept_rows);
    typename K::Sums total;
    kernel.run_all(total);
    if (kernel.warp_k == 0) write(kernel, p, ending, total);
}

#define MOE_PRODUCT(name, form)                                                                               \
    extern "C" __global__ void __launch_bounds__(form::THREADS, 256 / form::THREADS)                          \
        name(const uint16_t* x, const unsigned char* weights, const float* scales, const uint16_t* bias,      \
             uint16_t* y, const ExpertRows* items, const uint32_t* item_count, const uint32_t* slots,         \
             uint32_t top, uint32_t n, uint32_t k, uint32_t split_tiles, uint32_t gate, float alpha,          \
             float limit, uint32_t to_slots) {                                                                \
        follow();                                                                                             \
        product<form>(Operands{x, weights, scales, n, k, split_tiles, 0, 0, slots, top, blockIdx.x},          \
                      Ending{bias, y, n, gate, alpha, limit, to_slots ? slots : nullptr}, items, item_count); \
    }

MOE_PRODUCT(moe_product_bf16_16, Rows16<true>)
MOE_PRODUCT(moe_product_bf16_64, Rows64<true>)
MOE_PRODUCT(moe_product_bf16_128, Rows128<true>)

#define MOE_PRODUCT_FEW(name, form)                                                                           \
    extern "C" __global__ void __launch_bounds__(few_product::form::THREADS_MAX, 1)                           \
        name(const uint16_t* x, const unsigned char* weights, const float* scales, const uint16_t* bias,      \
             uint16_t* y, const ExpertRows* items, const uint32_t* item_count, const uint32_t* slots,         \
             uint32_t top, uint32_t n, uint32_t k, uint32_t split_tiles, uint32_t gate, float alpha,          \
             float limit, uint32_t to_slots, uint32_t warps_n, uint32_t kept_rows) {                          \
        follow();                                                                                             \
        product_few<few_product::form>(                                                                       \
            Operands{x, weights, scales, n, k, split_tiles, 0, 0, slots, top, blockIdx.x},                    \
            Ending{bias, y, n, gate, alpha, limit, to_slots ? slots : nullptr}, items, item_count, warps_n,   \
            kept_rows);                                                                                       \
    }

MOE_PRODUCT_FEW(moe_product_int8_16, Few<INT8>)
MOE_PRODUCT_FEW(moe_product_int8_64, Many<INT8>)
MOE_PRODUCT_FEW(moe_product_int4_16, Few<INT4>)
MOE_PRODUCT_FEW(moe_product_int4_64, Many<INT4>)
MOE_PRODUCT_FEW(moe_product_fp8_16, Few<FP8>)
MOE_PRODUCT_FEW(moe_product_fp8_64, Many<FP8>)
MOE_PRODUCT_FEW(moe_product_mxfp4_16, Few<MXFP4>)
MOE_PRODUCT_FEW(moe_product_mxfp4_64, Many<MXFP4>)

// === both products of few rows ===

struct Both {
    Operands first, second;
    Ending gated, plain;
    ProductPair pair;

    // What this block multiplies, and where that goes. False if there is nothing for it.
    __device__ __forceinline__ bool take(Share& share, Operands& p, Ending& ending, uint64_t image) const {
        if (!pair.take(share)) return false;
        p = share.is_second ? second : first, ending = share.is_second ? plain : gated;
        p.tile = share.tile;
        take_item(p, ending, image, pair.items[share.item]);
        return true;
    }
};

template <class K>
__device__ __forceinline__ void product_pair(const Both& both) {
    Share share;
    Operands p;
    Ending ending;
    if (!both.take(share, p, ending, K::IMAGE)) return;
    K kernel(p);
    typename K::Sums total;
    kernel.run_all(total, RowsAreThere{share});
    write(kernel, p, ending, total);
    if (!share.is_second) share.rows.give();
}

// Block: as many warps for either product, of which so many are beside each other.
template <class K>
__device__ __forceinline__ void product_pair_few(const Both& both, int warps_n, int down_warps_n, int kept_rows) {
    Share share;
    Operands p;
    Ending ending;
    if (!both.take(share, p, ending, K::IMAGE)) return;
    const K kernel(p, share.is_second ? down_warps_n : warps_n, kept_rows);
    typename K::Sums total;
    kernel.run_all(total, RowsAreThere{share});
    if (kernel.warp_k == 0) write(kernel, p, ending, total);
    if (!share.is_second) share.rows.give();
}

// `outputs` and `down_outputs`: of a tile.
#define BOTH(outputs, down_outputs)                                                                           \
    Both {                                                                                                    \
        Operands{x, weights, scales, n, k, split_tiles, 0, 0, slots, top, 0},                                 \
            Operands{h, down, down_scales, down_n, n / 2, down_split_tiles, 0, 0, nullptr, 1, 0},             \
            Ending{bias, h, n, gate, alpha, limit, nullptr},                                                  \
            Ending{down_bias, y, down_n, NO_GATE, 0.0f, 0.0f, nullptr},                                       \
            ProductPair {                                                                                            \
            items, item_count, counts, (n + outputs - 1) / (outputs), (down_n + down_outputs - 1) / (down_outputs) \
        }                                                                                                     \
    }

extern "C" __global__ void __launch_bounds__(Rows16<true>::THREADS, 256 / Rows16<true>::THREADS)
    moe_product_pair_bf16(PAIR_PARAMETERS) {
    follow();
    product_pair<Rows16<true>>(BOTH(Rows16<true>::OUTPUTS, Rows16<true>::OUTPUTS));
}

#define MOE_PAIR_FEW(name, form)                                                                              \
    extern "C" __global__ void __launch_bounds__(few_product::form::THREADS_MAX, 1)                           \
        name(PAIR_PARAMETERS, uint32_t warps_n, uint32_t down_warps_n, uint32_t kept_rows) {                  \
        follow();                                                                                             \
        product_pair_few<few_product::form>(                                                                  \
            BOTH(warps_n * few_product::OUTPUTS, down_warps_n * few_product::OUTPUTS), warps_n, down_warps_n, \
            kept_rows);                                                                                       \
    }

MOE_PAIR_FEW(moe_product_pair_int8, Few<INT8>)
MOE_PAIR_FEW(moe_product_pair_int4, Few<INT4>)
MOE_PAIR_FEW(moe_product_pair_fp8, Few<FP8>)
MOE_PAIR_FEW(moe_product_pair_mxfp4, Few<MXFP4>)
