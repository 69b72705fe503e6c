// The parts of a mixture-of-experts layer around the experts' products (`moe.rs` and `moe/route.rs` have the
// definitions): the router's choice, the grouping of slots by expert, and the sum of the experts' outputs. A
// slot is a token's choice of an expert: token * top + choice. Every number of rows may be anything; experts
// are at most 1024.
#include "choice.cuh"
#include "moe.cuh"

// The place of a slot without an expert.
constexpr uint32_t NO_PLACE = 0xffffffffu;

// === moe_route ===
//
// logits [tokens, experts] f32 to ids and weights [tokens, top]. One warp a token (`choice.cuh`); block: 128
// threads, grid: tokens / 4. Shared memory, by warp: two floats for each expert, a word for each choice. A
// token whose `kv_slots` (null: all have one) is NO_SLOT chooses nobody, so that no weight is read for it:
// its ids are `experts`, its weights 0.
template <int HELD>
__device__ __forceinline__ void route_token(const Router& router, const float* logits, const float* bias,
                                            uint32_t kv_slot, uint32_t* ids, float* weights) {
    const uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    float* row = reinterpret_cast<float*>(shared_memory()) + warp * (2 * router.experts + router.top);
    const Choice<HELD> choice{router, row, row + router.experts,
                              reinterpret_cast<uint32_t*>(row + 2 * router.experts), lane};
    choice.fetch(logits, row);
    if (bias != nullptr) choice.fetch(bias, choice.ranks);
    async_copy_commit();
    async_copy_wait<0>();
    if (kv_slot == NO_SLOT) choice.choose_nobody(weights);
    else choice.choose(bias, weights);
    for (uint32_t slot = lane; slot < router.top; slot += LANES) ids[slot] = choice.picks[slot];
}

constexpr int ROUTE_TOKENS = 4, ROUTE_THREADS = 32 * ROUTE_TOKENS;

extern "C" __global__ void __launch_bounds__(ROUTE_THREADS)
    moe_route(const float* logits, const float* bias, const uint32_t* kv_slots, uint32_t* ids, float* weights,
              uint32_t tokens, uint32_t experts, uint32_t top, uint32_t scoring, uint32_t renormalise,
              float scale, uint32_t groups, uint32_t keep, uint32_t by_two) {
    follow();
    const Router router{experts, top, scoring, renormalise, scale, groups, keep, by_two};
    const uint32_t token = blockIdx.x * ROUTE_TOKENS + threadIdx.x / LANES;
    if (token >= tokens) return;
    const uint32_t kv_slot = kv_slots != nullptr ? kv_slots[token] : 0;
    logits += uint64_t(token) * experts, ids += uint64_t(token) * top, weights += uint64_t(token) * top;
    if (experts <= 4 * LANES) route_token<4>(router, logits, bias, kv_slot, ids, weights);
    else if (experts <= 8 * LANES) route_token<8>(router, logits, bias, kv_slot, ids, weights);
    else route_token<32>(router, logits, bias, kv_slot, ids, weights);
}

// === moe_group ===
//
// ids [slots] to `places` (by slot), `slots_at` (by place) and the items of the grouped products: each
// expert's places in pieces of `block_rows`, experts ascending. Grid: experts; block: 256 to 1024 threads;
// shared memory: a count for each expert, two words, one for each of 32 warps. Each block reads all ids, so
// that one launch does, and counts those of lower experts: 32,768 of them are 128 KB from the second-level
// cache. A warp has slots that follow each other, and knows how many of the block's own lie before them: so
// places ascend, and no round waits for another warp's. Counts are integers: the order in which they are
// added shows nowhere. A slot without an expert (an id that is none) gets NO_PLACE and is in no item.

constexpr int GROUP_THREADS_MAX = 1024, GROUPED_AT_ONCE = 8;

// A warp's slots, 32 of them a round; rounds' ids are asked for several at once.
struct WarpSlots {
    const uint32_t* ids;
    uint32_t slots, first, rounds;

    template <class F>
    __device__ __forceinline__ void each(F f) const {
        for (uint32_t round = 0; round < rounds; round += GROUPED_AT_ONCE) {
            uint32_t found[GROUPED_AT_ONCE];
#pragma unroll
            for (int i = 0; i < GROUPED_AT_ONCE; ++i) {
                const uint32_t slot = first + (round + i) * LANES + threadIdx.x % LANES;
                found[i] = round + i < rounds && slot < slots ? ids[slot] : NO_PLACE;
            }
#pragma unroll
            for (int i = 0; i < GROUPED_AT_ONCE; ++i)
                if (round + i < rounds) f(first + (round + i) * LANES + threadIdx.x % LANES, found[i]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(GROUP_THREADS_MAX)
    moe_group(const uint32_t* ids, uint32_t slots, uint32_t experts, uint32_t block_rows, uint32_t* places,
              uint32_t* slots_at, ExpertRows* items, uint32_t* item_count) {
    follow();
    uint32_t* counts = reinterpret_cast<uint32_t*>(shared_memory());
    // Places and items of lower experts; by warp, the block's own.
    uint32_t *before = counts + experts, *found = before + 2;
    const uint32_t expert = blockIdx.x, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (uint32_t e = threadIdx.x; e < experts + 2; e += blockDim.x) counts[e] = 0;
    sync_block();
    const uint32_t rounds = (slots + blockDim.x - 1) / blockDim.x;
    const WarpSlots warps{ids, slots, warp * rounds * LANES, rounds};
    uint32_t own = 0;
    warps.each([&](uint32_t slot, uint32_t id) {
        own += id == expert;
        if (id < expert) atomic_add(&counts[id], 1u);
        if (expert == 0 && id >= experts && slot < slots) places[slot] = NO_PLACE;
    });
    own = sum_in_warp(own);
    if (lane == 0) found[warp] = own;
    sync_block();
    uint32_t lower = 0, lower_items = 0;
    for (uint32_t e = threadIdx.x; e < expert; e += blockDim.x)
        lower += counts[e], lower_items += (counts[e] + block_rows - 1) / block_rows;
    if (warp * LANES < expert) {
        lower = sum_in_warp(lower), lower_items = sum_in_warp(lower_items);
        if (lane == 0) atomic_add(&before[0], lower), atomic_add(&before[1], lower_items);
    }
    const uint32_t of_warp = lane < blockDim.x / LANES ? found[lane] : 0, count = sum_in_warp(of_warp);
    const uint32_t in_lower_warps = sum_in_warp(lane < warp ? of_warp : 0);
    sync_block();
    const uint32_t first = before[0], first_item = before[1];
    const uint32_t own_items = (count + block_rows - 1) / block_rows;
    if (expert + 1 == experts && threadIdx.x == 0) *item_count = first_item + own_items;
    for (uint32_t i = threadIdx.x; i < own_items; i += blockDim.x) {
        const uint32_t from = first + i * block_rows;
        items[first_item + i] = ExpertRows{expert, from, min_of(from + block_rows, first + count), 0};
    }
    if (own == 0) return;
    uint32_t next = first + in_lower_warps;
    warps.each([&](uint32_t slot, uint32_t id) {
        const uint32_t lanes = lanes_where(id == expert);
        const uint32_t place = next + count_bits(lanes & ((1u << lane) - 1));
        if (id == expert) places[slot] = place, slots_at[place] = slot;
        next += count_bits(lanes);
    });
}

// === moe_choose ===
//
// Of a few tokens in one launch: what the router's product left to be added, `moe_route` and `moe_group`,
// with their bits. `sums` [splits, tokens, experts] f32 and `router_bias` bf16 (null: none) are added as
// `matmul_reduce` adds them. Grid: 1; block: a warp for each token, at most 32, and a thread for each expert.
// Shared memory in words: two and two floats of each token for each expert, one for each slot, 32 for each
// token, 32. Items have 2^row_shift rows.
struct RouterSums {
    const float* sums;
    uint32_t splits, stride;  // between splits
    const uint16_t* bias;
};

// Code for Blackwell has no registers for 8 in a block of 32 warps.
#if __CUDA_ARCH__ >= 1000
constexpr int SUMS_AT_ONCE = 4;
#else
constexpr int SUMS_AT_ONCE = 8;
#endif

// Adds up this lane's logits, AT_ONCE at a time: what is read of up to 4 splits of these is asked for before
// any is added.
template <int AT_ONCE>
__device__ __forceinline__ void add_splits(const RouterSums& from, uint32_t experts, uint32_t lane,
                                           float* row) {
    constexpr int SPLITS = 4;
    for (uint32_t first = lane; first < experts; first += AT_ONCE * LANES) {
        const float* sums = from.sums + first;
        float totals[AT_ONCE] = {};
        uint16_t bias[AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (from.bias != nullptr && first + i * LANES < experts) bias[i] = from.bias[first + i * LANES];
        for (uint32_t split = 0; split < from.splits; split += SPLITS) {
            float parts[SPLITS][AT_ONCE];
#pragma unroll
            for (int i = 0; i < SPLITS * AT_ONCE; ++i) {
                const uint32_t s = i / AT_ONCE, e = i % AT_ONCE * LANES;
                const bool there = split + s < from.splits && first + e < experts;
                parts[s][i % AT_ONCE] = there ? sums[uint64_t(s) * from.stride + e] : 0.0f;
            }
            // What is not there adds 0 to a sum that is never -0.
#pragma unroll
            for (int i = 0; i < SPLITS * AT_ONCE; ++i) totals[i % AT_ONCE] += parts[i / AT_ONCE][i % AT_ONCE];
            sums += SPLITS * uint64_t(from.stride);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * LANES >= experts) continue;
            row[first + i * LANES] = from.bias != nullptr ? totals[i] + bf16_to_f32(bias[i]) : totals[i];
        }
    }
}

// Returns the bits of this lane's experts that the token chose.
template <int HELD>
__device__ __forceinline__ uint32_t choose_token(const Router& router, const RouterSums& from,
                                                 const float* bias, uint32_t kv_slot, float* row,
                                                 uint32_t* picks, float* weights) {
    const Choice<HELD> choice{router, row, row + router.experts, picks, threadIdx.x % LANES};
    if (bias != nullptr) choice.fetch(bias, choice.ranks);
    async_copy_commit();
    add_splits<(HELD < SUMS_AT_ONCE ? HELD : SUMS_AT_ONCE)>(from, router.experts, choice.lane, row);
    async_copy_wait<0>();
    if (kv_slot != NO_SLOT) return choice.choose(bias, weights);
    choice.choose_nobody(weights);
    return 0;
}

// Places and items of a few tokens' slots, by a thread for each expert. `taken` [tokens, 32] has, by lane, a
// bit for each of its experts that the token chose, so that an expert's slots are counted without a look at
// the others'.
struct FewGroups {
    const uint32_t *taken, *ids;
    uint32_t *firsts, *choosers, *totals;  // by expert, its first place and a bit for each token; by warp
    uint32_t tokens, experts, top, row_shift;

    __device__ __forceinline__ void list(ExpertRows* items, uint32_t* item_count) const {
        const uint32_t expert = threadIdx.x, warp = expert / LANES, lane = expert % LANES;
        uint32_t who = 0;
        if (expert < experts)
            for (uint32_t token = 0; token < tokens; ++token)
                who |= (taken[token * LANES + lane] >> warp & 1) << token;
        const uint32_t count = count_bits(who), rows = 1u << row_shift;
        const uint32_t own_items = (count + rows - 1) >> row_shift;
        // Slots and items of all experts up to this one, in the halves of a word: there are fewer than 2^16
        // slots.
        uint32_t both = count | own_items << 16;
        for (uint32_t distance = 1; distance < LANES; distance *= 2) {
            const uint32_t below = shuffle(both, (lane - distance) % LANES);
            if (lane >= distance) both += below;
        }
        if (lane == LANES - 1) totals[warp] = both;
        sync_block();
        for (uint32_t lower = 0; lower < warp; ++lower) both += totals[lower];
        if (expert >= experts) return;
        const uint32_t end = both & 0xffff, first = end - count;
        firsts[expert] = first, choosers[expert] = who;
        ExpertRows* item = items + (both >> 16) - own_items;
        for (uint32_t from = first; from < end; from += rows)
            *item++ = ExpertRows{expert, from, min_of(from + rows, end), 0};
        if (expert + 1 == experts) *item_count = both >> 16;
    }

    __device__ __forceinline__ void place(uint32_t* places, uint32_t* slots_at) const {
        for (uint32_t slot = threadIdx.x; slot < tokens * top; slot += blockDim.x) {
            const uint32_t expert = ids[slot];
            uint32_t place = NO_PLACE;
            if (expert < experts) {
                place = firsts[expert] + count_bits(choosers[expert] & ((1u << slot / top) - 1));
                slots_at[place] = slot;
            }
            places[slot] = place;
        }
    }
};

constexpr int CHOOSE_TOKENS_MAX = 32;

extern "C" __global__ void __launch_bounds__(32 * CHOOSE_TOKENS_MAX)
    moe_choose(const float* sums, uint32_t splits, const uint16_t* router_bias, const float* bias,
               const uint32_t* kv_slots, float* weights, uint32_t tokens, uint32_t experts, uint32_t top,
               uint32_t scoring, uint32_t renormalise, float scale, uint32_t groups, uint32_t keep,
               uint32_t by_two, uint32_t row_shift, uint32_t* places, uint32_t* slots_at, ExpertRows* items,
               uint32_t* item_count) {
    follow();
    const Router router{experts, top, scoring, renormalise, scale, groups, keep, by_two};
    const uint32_t token = threadIdx.x / LANES;
    uint32_t* firsts = reinterpret_cast<uint32_t*>(shared_memory());
    uint32_t *choosers = firsts + experts, *totals = choosers + experts, *taken = totals + LANES;
    uint32_t* ids = taken + tokens * LANES;
    if (token < tokens) {
        const uint32_t kv_slot = kv_slots != nullptr ? kv_slots[token] : 0;
        const RouterSums from{sums + uint64_t(token) * experts, splits, tokens * experts, router_bias};
        float* row = reinterpret_cast<float*>(ids + tokens * top) + token * 2 * experts;
        float* own = weights + token * top;
        uint32_t *picks = ids + token * top, *chosen = &taken[threadIdx.x];
        if (experts <= 4 * LANES) *chosen = choose_token<4>(router, from, bias, kv_slot, row, picks, own);
        else if (experts <= 8 * LANES) *chosen = choose_token<8>(router, from, bias, kv_slot, row, picks, own);
        else *chosen = choose_token<32>(router, from, bias, kv_slot, row, picks, own);
    }
    sync_block();
    const FewGroups grouped{taken, ids, firsts, choosers, totals, tokens, experts, top, row_shift};
    grouped.list(items, item_count);
    sync_block();
    grouped.place(places, slots_at);
}

// === moe_combine ===
//
// out[t] = sum over the slots s of t, in order, of weights[s] * rows[places[s]], and behind them `shared[t]`
// (null: none), what an expert gave that serves every token: in f32, rounded once. Slots without a place add
// nothing. Rows, shared and out bf16, `width` a multiple of 8. Grid: (packets of 8 columns / 128, tokens).
// Block: 128 threads.
constexpr int COMBINE_THREADS = 128;

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    moe_combine(const uint16_t* rows, const uint32_t* places, const float* weights, const uint16_t* shared,
                uint16_t* out, uint32_t top, uint32_t width) {
    follow();
    const uint32_t column = (blockIdx.x * COMBINE_THREADS + threadIdx.x) * 8;
    if (column >= width) return;
    float sums[8] = {};
    for (uint32_t choice = 0; choice < top; ++choice) {
        const uint64_t slot = uint64_t(blockIdx.y) * top + choice;
        const uint32_t place = places[slot];
        if (place == NO_PLACE) continue;
        const float weight = weights[slot];
        const Packet row = load_packet(rows + uint64_t(place) * width + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[2 * i] = fmaf(weight, bf16_low(row.words[i]), sums[2 * i]);
            sums[2 * i + 1] = fmaf(weight, bf16_high(row.words[i]), sums[2 * i + 1]);
        }
    }
    const uint64_t at = uint64_t(blockIdx.y) * width + column;
    if (shared != nullptr) {
        const Packet row = load_packet(shared + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[2 * i] += bf16_low(row.words[i]);
            sums[2 * i + 1] += bf16_high(row.words[i]);
        }
    }
    Packet result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.words[i] = bf16_pair(sums[2 * i], sums[2 * i + 1]);
    store_packet(out + at, result);
}
