// The parts of a mixture-of-experts layer around the experts' products (`moe.rs` and `moe/route.rs` have the definitions): the
// router's choice, the grouping of slots by expert, and the sum of the experts' outputs. A slot is a token's choice of
// an expert: token * top + choice. Every number of rows may be anything; experts are at most 1024.
#include "moe.cuh"

constexpr int EXPERTS_MAX = 1024, LANES = 32, HELD = EXPERTS_MAX / LANES;
// A token's slot in the KV cache, if there is none: it only fills up a batch. And the place of a slot without an expert.
constexpr uint32_t NO_SLOT = 0xffffffffu, NO_PLACE = 0xffffffffu;

// === moe_route ===
//
// logits [tokens, experts] f32 to ids and weights [tokens, top]. One warp a token; block: 128 threads, grid:
// tokens / 4. Lane l holds experts l, l + 32, …. Shared memory: a float for each expert, by warp. Experts rank by score plus
// `bias` (null: none), equal ones by ascending number; NaN ranks last. Slot order is the order of choice. A token whose
// `kv_slots` (null: all have one) is NO_SLOT chooses nobody, so that no weight is read for it: its ids are `experts`, its weights 0.
enum Scoring : uint32_t { SOFTMAX_ALL, SOFTMAX_TOP, SIGMOID };

struct Router {
    uint32_t experts, top, scoring, renormalise;
    float scale;
    // `keep` of `groups` equal groups take part, ranked by their best expert or the sum of their two best.
    uint32_t groups, keep, by_two;
};

__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

template <class F>
__device__ __forceinline__ float over_warp(float value, F f) {
    for (unsigned mask = 16; mask > 0; mask /= 2) value = f(value, shuffle_xor(value, mask));
    return value;
}

// The experts of one token, as one lane sees them.
struct Choice {
    const Router& r;
    const float* row;
    float* ranks;  // of all lanes, in shared memory
    int lane;

    __device__ __forceinline__ float largest() const {
        float best = NEGATIVE_INFINITY;
        for (uint32_t e = lane; e < r.experts; e += LANES) best = row[e] > best ? row[e] : best;
        return over_warp(best, [](float a, float b) { return a > b ? a : b; });
    }
    __device__ __forceinline__ float total(float max) const {
        float sum = 0.0f;
        for (uint32_t e = lane; e < r.experts; e += LANES) sum += exp_fast(row[e] - max);
        return over_warp(sum, [](float a, float b) { return a + b; });
    }
    __device__ __forceinline__ static float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

    // For softmax the logits, where these rank alike: probabilities may round to equal values.
    __device__ __forceinline__ void rank(const float* bias, float max, float sum) const {
        const bool sums = bias != nullptr || (r.groups > 0 && r.by_two);
        for (uint32_t e = lane; e < r.experts; e += LANES) {
            float value = row[e];
            if (r.scoring == SIGMOID) value = sigmoid(value);
            else if (r.scoring == SOFTMAX_ALL && sums) value = exp_fast(value - max) / sum;
            if (bias != nullptr) value += bias[e];
            ranks[e] = value == value ? value : NEGATIVE_INFINITY;
        }
        sync_warp();
    }

    __device__ __forceinline__ float group_score(uint32_t group) const {
        const uint32_t size = r.experts / r.groups;
        float best = NEGATIVE_INFINITY, second = NEGATIVE_INFINITY;
        for (uint32_t e = group * size; e < (group + 1) * size; ++e) {
            const float value = ranks[e];
            second = value > best ? best : value > second ? value : second;
            best = value > best ? value : best;
        }
        return r.by_two && size > 1 ? best + second : best;
    }

    // Takes the experts of all but the best groups out of the choice; of equal groups the lower one is better. A lane
    // has group `lane`: there are at most 32.
    __device__ __forceinline__ void drop_groups() const {
        const bool mine = uint32_t(lane) < r.groups;
        const float score = mine ? group_score(lane) : NEGATIVE_INFINITY;
        uint32_t better = 0;
        for (uint32_t other = 0; other < r.groups; ++other) {
            const float theirs = shuffle(score, other);
            better += theirs > score || (theirs == score && other < uint32_t(lane));
        }
        const uint32_t kept = lanes_where(mine && better < r.keep), size = r.experts / r.groups;
        for (uint32_t e = lane; e < r.experts; e += LANES)
            if (!(kept >> (e / size) & 1)) ranks[e] = NEGATIVE_INFINITY;
        sync_warp();
    }

    // `ids` and `weights` [top] of the best, in that order.
    __device__ __forceinline__ void choose(const float* bias, uint32_t* ids, float* weights) const {
        const float max = r.scoring == SIGMOID ? 0.0f : largest();
        const float sum = r.scoring == SOFTMAX_ALL ? total(max) : 1.0f;
        rank(bias, max, sum);
        if (r.groups > 0) drop_groups();
        float chosen = 0.0f;
        uint32_t given = 0;
        for (uint32_t slot = 0; slot < r.top; ++slot) {
            const uint32_t expert = best(given);
            if (expert % LANES == uint32_t(lane)) given |= 1u << expert / LANES;
            const float logit = row[expert];
            const float weight = r.scoring == SIGMOID ? sigmoid(logit) : exp_fast(logit - max) / sum;
            chosen += weight;
            if (lane == 0) ids[slot] = expert, weights[slot] = weight;
        }
        sync_warp();
        // DeepSeek-V3 adds 1e-20 to the sum it divides by; it vanishes in every sum of softmax weights.
        float divisor = r.scoring == SOFTMAX_TOP ? chosen : 1.0f;
        if (r.renormalise) divisor = chosen + 1e-20f;
        if (lane == 0)
            for (uint32_t slot = 0; slot < r.top; ++slot) weights[slot] = weights[slot] / divisor * r.scale;
    }

    // Nobody: of a token that only fills up a batch.
    __device__ __forceinline__ void choose_nobody(uint32_t* ids, float* weights) const {
        for (uint32_t slot = lane; slot < r.top; slot += LANES) ids[slot] = r.experts, weights[slot] = 0.0f;
    }

    // The best expert that this lane has not given away; `given` has a bit for each of its experts.
    __device__ __forceinline__ uint32_t best(uint32_t given) const {
        float best = NEGATIVE_INFINITY;
        uint32_t expert = EXPERTS_MAX;
        for (uint32_t e = lane, i = 0; e < r.experts; e += LANES, ++i) {
            if (given >> i & 1) continue;
            if (expert == EXPERTS_MAX || ranks[e] > best) best = ranks[e], expert = e;
        }
        for (unsigned mask = 16; mask > 0; mask /= 2) {
            const float theirs = shuffle_xor(best, mask);
            const uint32_t other = shuffle_xor(expert, mask);
            const bool theirs_wins =
                other != EXPERTS_MAX &&
                (expert == EXPERTS_MAX || theirs > best || (theirs == best && other < expert));
            if (theirs_wins) best = theirs, expert = other;
        }
        return expert;
    }
};

extern "C" __global__ void __launch_bounds__(128)
    moe_route(const float* logits, const float* bias, const uint32_t* kv_slots, uint32_t* ids, float* weights,
              uint32_t tokens, uint32_t experts, uint32_t top, uint32_t scoring, uint32_t renormalise,
              float scale, uint32_t groups, uint32_t keep, uint32_t by_two) {
    follow();
    const Router router{experts, top, scoring, renormalise, scale, groups, keep, by_two};
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const uint32_t token = blockIdx.x * 4 + warp;
    if (token >= tokens) return;
    float* ranks = reinterpret_cast<float*>(shared_memory()) + warp * experts;
    const Choice choice{router, logits + uint64_t(token) * experts, ranks, lane};
    ids += uint64_t(token) * top, weights += uint64_t(token) * top;
    if (kv_slots != nullptr && kv_slots[token] == NO_SLOT) choice.choose_nobody(ids, weights);
    else choice.choose(bias, ids, weights);
}

// === moe_group ===
//
// ids [slots] to `places` (by slot), `slots_at` (by place) and the items of the grouped products: each expert's places in
// pieces of `block_rows`, experts ascending. Grid: experts; block: 256 threads; shared memory: a count for each expert. Each
// block counts all ids, so that one launch does: 32,768 of them are 128 KB from the second-level cache.
// Counts are integers: the order in which they are added shows nowhere. A slot without an expert (an id that is none) gets
// NO_PLACE and is in no item.
constexpr int GROUPERS = 256;

extern "C" __global__ void __launch_bounds__(GROUPERS)
    moe_group(const uint32_t* ids, uint32_t slots, uint32_t experts, uint32_t block_rows, uint32_t* places,
              uint32_t* slots_at, ExpertRows* items, uint32_t* item_count) {
    follow();
    uint32_t* counts = reinterpret_cast<uint32_t*>(shared_memory());
    uint32_t* before = counts + experts;  // places and items of lower experts, and what each warp has found
    const uint32_t expert = blockIdx.x, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (uint32_t e = threadIdx.x; e < experts + 2 + GROUPERS / LANES; e += GROUPERS) counts[e] = 0;
    sync_block();
    for (uint32_t slot = threadIdx.x; slot < slots; slot += GROUPERS) {
        if (ids[slot] < experts) atomic_add(&counts[ids[slot]], 1u);
        else if (expert == 0) places[slot] = NO_PLACE;
    }
    sync_block();
    for (uint32_t e = threadIdx.x; e < expert; e += GROUPERS) {
        atomic_add(&before[0], counts[e]);
        atomic_add(&before[1], (counts[e] + block_rows - 1) / block_rows);
    }
    sync_block();
    const uint32_t first = before[0], first_item = before[1], count = counts[expert];
    const uint32_t own_items = (count + block_rows - 1) / block_rows;
    if (expert + 1 == experts && threadIdx.x == 0) *item_count = first_item + own_items;
    for (uint32_t i = threadIdx.x; i < own_items; i += GROUPERS) {
        const uint32_t from = first + i * block_rows;
        items[first_item + i] = ExpertRows{expert, from, min_of(from + block_rows, first + count), 0};
    }
    if (count == 0) return;
    uint32_t* found = before + 2;  // by warp
    uint32_t next = first;
    for (uint32_t start = 0; start < slots; start += GROUPERS) {
        const uint32_t slot = start + threadIdx.x;
        const bool mine = slot < slots && ids[slot] == expert;
        const uint32_t lanes = lanes_where(mine);
        if (lane == 0) found[warp] = count_bits(lanes);
        sync_block();
        uint32_t place = next + count_bits(lanes & ((1u << lane) - 1));
        for (uint32_t w = 0; w < GROUPERS / LANES; ++w) {
            if (w < warp) place += found[w];
            next += found[w];
        }
        if (mine) places[slot] = place, slots_at[place] = slot;
        sync_block();
    }
}

// === moe_choose ===
//
// Of a few tokens in one launch: what the router's product left to be added, `moe_route` and `moe_group`, with their bits. `sums`
// [splits, tokens, experts] f32 and `router_bias` bf16 (null: none) are added as `matmul_reduce` adds them. Grid: 1; block: a
// warp for each token, at most 32. Shared memory: two words for each expert, one for each slot, two floats for each expert
// of each token. Items have 2^row_shift rows.
extern "C" __global__ void __launch_bounds__(1024)
    moe_choose(const float* sums, uint32_t splits, const uint16_t* router_bias, const float* bias,
               const uint32_t* kv_slots, float* weights, uint32_t tokens, uint32_t experts, uint32_t top,
               uint32_t scoring, uint32_t renormalise, float scale, uint32_t groups, uint32_t keep,
               uint32_t by_two, uint32_t row_shift, uint32_t* places, uint32_t* slots_at, ExpertRows* items,
               uint32_t* item_count) {
    follow();
    const Router router{experts, top, scoring, renormalise, scale, groups, keep, by_two};
    const uint32_t slots = tokens * top, token = threadIdx.x / LANES;
    uint32_t* counts = reinterpret_cast<uint32_t*>(shared_memory());
    uint32_t *firsts = counts + experts, *ids = firsts + experts;
    for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    if (token < tokens) {
        float* row = reinterpret_cast<float*>(ids + slots) + token * 2 * experts;
        const Choice choice{router, row, row + experts, int(threadIdx.x % LANES)};
        for (uint32_t e = choice.lane; e < experts; e += LANES) {
            float total = 0.0f;
            for (uint32_t split = 0; split < splits; ++split)
                total += sums[(uint64_t(split) * tokens + token) * experts + e];
            row[e] = router_bias != nullptr ? total + bf16_to_f32(router_bias[e]) : total;
        }
        sync_warp();
        const bool nobody = kv_slots != nullptr && kv_slots[token] == NO_SLOT;
        if (nobody) choice.choose_nobody(ids + token * top, weights + token * top);
        else choice.choose(bias, ids + token * top, weights + token * top);
    }
    sync_block();
    for (uint32_t slot = threadIdx.x; slot < slots; slot += blockDim.x)
        if (ids[slot] < experts) atomic_add(&counts[ids[slot]], 1u);
    sync_block();
    const uint32_t more = (1u << row_shift) - 1;
    for (uint32_t expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        uint32_t first = 0, item = 0;
        for (uint32_t e = 0; e < expert; ++e) first += counts[e], item += (counts[e] + more) >> row_shift;
        firsts[expert] = first;
        const uint32_t end = first + counts[expert];
        for (uint32_t from = first; from < end; from += more + 1, ++item)
            items[item] = ExpertRows{expert, from, min_of(from + more + 1, end), 0};
        if (expert + 1 == experts) *item_count = item;
    }
    sync_block();
    for (uint32_t slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        const uint32_t expert = ids[slot];
        uint32_t place = expert < experts ? firsts[expert] : NO_PLACE;
        if (expert < experts) {
            for (uint32_t before = 0; before < slot; ++before) place += ids[before] == expert;
            slots_at[place] = slot;
        }
        places[slot] = place;
    }
}

// === moe_combine ===
//
// out[t] = sum over the slots s of t, in order, of weights[s] * rows[places[s]], and behind them `shared[t]` (null: none), what an
// expert gave that serves every token: in f32, rounded once. Slots without a place add nothing. Rows, shared and out bf16, `width`
// a multiple of 8. Grid: (packets of 8 columns / 128, tokens). Block: 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    moe_combine(const uint16_t* rows, const uint32_t* places, const float* weights, const uint16_t* shared,
                uint16_t* out, uint32_t top, uint32_t width) {
    follow();
    const uint32_t column = (blockIdx.x * 128 + threadIdx.x) * 8;
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
