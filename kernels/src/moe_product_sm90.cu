// `moe_product.cu`'s products for Hopper, bf16 weights, by warpgroups: the sums of `matmul_sm90.cu`, bit for bit. Same arguments,
// same contract. Grid: (n tiles of 128, the most items there can be). Block: 256 threads.
#include "moe.cuh"
#include "product_sm90.cuh"

using namespace warpgroup_product;

template <int ROWS, class K>
__device__ __forceinline__ void write(const K& kernel, const Operands& p, const Ending& ending,
                                      const typename K::Sums& total) {
    if (ending.gate == NO_GATE) {
        kernel.each(total, [&](uint32_t m, uint32_t n, float sum) { ending.plain(m, n, sum); });
        return;
    }
    // A thread's outputs n and n + 8 are a gate and its value.
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
        if (i / 2 % 2 == 1) continue;
        const uint32_t m = kernel.row(i), n = kernel.output(i);
        if (m < p.end && n < p.n) ending.gated_pair(m, n, total[i], total[i + 2]);
    }
}

template <int ROWS, int STAGES>
__device__ __forceinline__ void product(Operands p, Ending ending, const ExpertRows* items,
                                        const uint32_t* item_count) {
    using K = Product<ROWS, STAGES, true>;
    if (blockIdx.y >= *item_count) return;
    const ExpertRows item = items[blockIdx.y];
    const uint64_t tiles = uint64_t((p.n + OUTPUTS - 1) / OUTPUTS) * (p.k / TILE_K);
    p.weights += item.expert * tiles * IMAGE;
    if (ending.bias != nullptr) ending.bias += uint64_t(item.expert) * p.n;
    p.first = item.first, p.end = item.end;
    K kernel(p);
    typename K::Sums total;
    kernel.run_all(total);
    write<ROWS>(kernel, p, ending, total);
}

#define MOE_PRODUCT(name, rows, stages)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                  \
        name(const uint16_t* x, const unsigned char* weights, const float*, const uint16_t* bias,          \
             uint16_t* y, const ExpertRows* items, const uint32_t* item_count, const uint32_t* slots,      \
             uint32_t top, uint32_t n, uint32_t k, uint32_t split_tiles, uint32_t gate, float alpha,       \
             float limit, uint32_t to_slots) {                                                             \
        product<rows, stages>(Operands{x, weights, n, k, split_tiles, 0, 0, slots, top},                   \
                              Ending{bias, y, n, gate, alpha, limit, to_slots ? slots : nullptr}, items,   \
                              item_count);                                                                 \
    }

MOE_PRODUCT(moe_product_sm90_16, 16, 6)
MOE_PRODUCT(moe_product_sm90_64, 64, 5)
MOE_PRODUCT(moe_product_sm90_128, 128, 5)
