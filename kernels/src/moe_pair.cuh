// Both products of the experts of few tokens in one launch, the sums of `moe_product.cu` bit for bit: who does
// what. Blocks number themselves. The first numbers are the tiles of the first product, an item's after
// another's; then come those of the second. A block of the second asks for its first weights, waits until all
// tiles of its item's first product are there, and then reads these rows. Lower numbers never wait for higher
// ones, so it ends however many blocks a device holds at once. Who waits reads weights meanwhile.
#pragma once

#include "moe.cuh"
#include "ticket.cuh"

// What a block does: a tile of an item's outputs.
struct Share {
    uint32_t item, tile;
    bool is_second;
    Handover rows;  // of the item, from the first product to the second
};

struct ProductPair {
    const ExpertRows* items;
    const uint32_t* item_count;
    uint32_t* counts;       // 0 between launches: how many blocks have a number; by item, what `Handover` counts
    uint32_t first_tiles, second_tiles;  // of an item

    // False if there is nothing for this block to do. Grid: at least as many blocks as there are tiles.
    __device__ __forceinline__ bool take(Share& share) const {
        const uint32_t there = *item_count;
        const uint32_t number = take_number(gridDim.x, counts, *reinterpret_cast<uint32_t*>(shared_memory()));
        const uint32_t of_first = there * first_tiles;
        share.is_second = number >= of_first;
        const uint32_t left = share.is_second ? number - of_first : number;
        const uint32_t tiles = share.is_second ? second_tiles : first_tiles;
        share.item = left / tiles, share.tile = left % tiles;
        share.rows = Handover{counts + 1 + share.item, first_tiles, second_tiles};
        return share.item < there;
    }
};

// When a block may read the rows that it multiplies.
struct RowsAreThere {
    static constexpr bool WAITS = true;
    const Share& share;

    __device__ __forceinline__ void operator()() const {
        if (share.is_second) share.rows.take();
    }
};

// `x` and on are of the first product, `down` and on of the second, whose rows are those of `h` by place.
#define PAIR_PARAMETERS                                                                                       \
    const uint16_t *x, const unsigned char *weights, const float *scales, const uint16_t *bias, uint16_t *h,  \
        const unsigned char *down, const float *down_scales, const uint16_t *down_bias, uint16_t *y,          \
        const ExpertRows *items, const uint32_t *item_count, const uint32_t *slots, uint32_t *counts,         \
        uint32_t top, uint32_t n, uint32_t k, uint32_t split_tiles, uint32_t gate, float alpha, float limit,  \
        uint32_t down_n, uint32_t down_split_tiles
