// A router's choice of one token's experts by one warp, for `moe.cu`. Lane l holds experts l, l + 32, ….
// Experts rank by score plus `bias` (null: none), equal ones by ascending number; NaN ranks last. Slot order
// is the order of choice.
//
// A lane keeps its experts' ranks as whole numbers in registers, so that the warp finds the best of all in
// two instructions.
#pragma once

#include "numbers.cuh"
#include "warp.cuh"

constexpr uint32_t EXPERTS_MAX = 1024, LANES = 32;
// A token's slot in the KV cache, if there is none: it only fills up a batch.
constexpr uint32_t NO_SLOT = 0xffffffffu;

enum Scoring : uint32_t { SOFTMAX_ALL, SOFTMAX_TOP, SIGMOID };

struct Router {
    uint32_t experts, top, scoring, renormalise;
    float scale;
    // `keep` of `groups` equal groups take part, ranked by their best expert or the sum of their two best.
    uint32_t groups, keep, by_two;
};

__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * LOG2_E); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// Whole numbers in the order of what they stand for: both zeros are one, NaN is -inf. 0 is less than all.
__device__ __forceinline__ uint32_t to_order(float value) {
    const uint32_t bits = to_bits(value == value ? value + 0.0f : NEGATIVE_INFINITY);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_order(uint32_t order) {
    return from_bits(order >> 31 ? order & 0x7fffffffu : ~order);
}

// HELD: experts of a lane at most. More than 8 stay in shared memory: registers would not do for a block of
// 32 warps.
template <int HELD>
struct Choice {
    static constexpr bool IN_REGISTERS = HELD <= 8;
    static constexpr int KEPT = IN_REGISTERS ? HELD : 1, UNROLL = IN_REGISTERS ? HELD : 4;

    const Router& r;
    float *row, *ranks;  // of all lanes, in shared memory: each expert's logit and rank
    uint32_t* picks;     // the experts, in shared memory
    uint32_t lane;

    __device__ __forceinline__ bool has(int i) const { return i * int(LANES) < int(r.experts - lane); }

    // Begins to copy this lane's part of what there is for each expert; it is there when the lane has waited
    // for it.
    __device__ __forceinline__ void fetch(const float* from, float* to) const {
#pragma unroll 1
        for (uint32_t e = lane; e < r.experts; e += LANES)
            async_copy_4(shared_address(to + e), from + e, true);
    }

    // What `of` has of this lane's expert i; -inf where it has none. Registers have been `read` before.
    __device__ __forceinline__ float in_memory(const float* of, int i) const {
        return has(i) ? of[lane + i * LANES] : NEGATIVE_INFINITY;
    }
    __device__ __forceinline__ void read(const float* of, float (&own)[KEPT]) const {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) own[i] = in_memory(of, i);
    }
    __device__ __forceinline__ float value(const float* of, const float (&own)[KEPT], int i) const {
        return IN_REGISTERS ? own[IN_REGISTERS ? i : 0] : in_memory(of, i);
    }

    __device__ __forceinline__ float largest(const float (&own)[KEPT]) const {
        uint32_t best = 0;
#pragma unroll UNROLL
        for (int i = 0; i < HELD; ++i) best = max_of(best, to_order(value(row, own, i)));
        return from_order(largest_in_warp(best));
    }
    __device__ __forceinline__ float total(const float (&own)[KEPT], float max) const {
        float sum = 0.0f;
#pragma unroll UNROLL
        for (int i = 0; i < HELD; ++i) sum += has(i) ? exp_fast(value(row, own, i) - max) : 0.0f;
        for (unsigned mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        return sum;
    }

    // For softmax the logits, where these rank alike: probabilities may round to equal values.
    __device__ __forceinline__ void rank(const float* bias, float max, float sum) const {
        const bool sums = bias != nullptr || (r.groups > 0 && r.by_two);
        for (uint32_t e = lane; e < r.experts; e += LANES) {
            float value = row[e];
            if (r.scoring == SIGMOID) value = sigmoid(value);
            else if (r.scoring == SOFTMAX_ALL && sums) value = exp_fast(value - max) / sum;
            if (bias != nullptr) value += ranks[e];
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

    // Takes the experts of all but the best groups out of the choice; of equal groups the lower one is
    // better. A lane has group `lane`: there are at most 32.
    __device__ __forceinline__ void drop_groups() const {
        const bool mine = lane < r.groups;
        const float score = mine ? group_score(lane) : NEGATIVE_INFINITY;
        uint32_t better = 0;
        for (uint32_t other = 0; other < r.groups; ++other) {
            const float theirs = shuffle(score, other);
            better += theirs > score || (theirs == score && other < lane);
        }
        const uint32_t kept = lanes_where(mine && better < r.keep), size = r.experts / r.groups;
        for (uint32_t e = lane; e < r.experts; e += LANES)
            if (!(kept >> (e / size) & 1)) ranks[e] = NEGATIVE_INFINITY;
        sync_warp();
    }

    // The best experts by the ranks that `of` has, or `own`, into `picks`, best first. Returns a bit for each
    // of this lane's experts that was chosen.
    __device__ __forceinline__ uint32_t pick(const float* of, const float (&own)[KEPT]) const {
        uint32_t kept[KEPT], taken = 0;
        uint32_t* orders = IN_REGISTERS ? kept : reinterpret_cast<uint32_t*>(ranks) + lane;
        constexpr int APART = IN_REGISTERS ? 1 : LANES;
#pragma unroll UNROLL
        for (int i = 0; i < HELD; ++i)
            if (IN_REGISTERS || has(i)) orders[i * APART] = has(i) ? to_order(value(of, own, i)) : 0;
#pragma unroll 1
        for (uint32_t slot = 0; slot < r.top; ++slot) {
            uint32_t best = 0, at = 0;
#pragma unroll UNROLL
            for (int i = 0; i < HELD; ++i) {
                const uint32_t order = IN_REGISTERS || has(i) ? orders[i * APART] : 0;
                if (order > best) best = order, at = i;
            }
            const bool is_best = best == largest_in_warp(best);
            const uint32_t expert = smallest_in_warp(is_best ? at * LANES + lane : EXPERTS_MAX);
            const uint32_t mine = expert == at * LANES + lane ? at : HELD;
            if (IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < KEPT; ++i) kept[i] = mine == uint32_t(i) ? 0 : kept[i];
            }
            if (mine == HELD) continue;
            if (!IN_REGISTERS) orders[mine * APART] = 0;
            picks[slot] = expert;
            taken |= 1u << mine;
        }
        sync_warp();
        return taken;
    }

    // `picks` and `weights` [top] of the best, in that order; returns as `pick` does. `bias` is in `ranks`
    // already.
    __device__ __forceinline__ uint32_t choose(const float* bias, float* weights) const {
        float own[KEPT];
        read(row, own);
        const float* by = row;
        const float max = r.scoring == SIGMOID ? 0.0f : largest(own);
        const float sum = r.scoring == SOFTMAX_ALL ? total(own, max) : 1.0f;
        if (r.scoring == SIGMOID || bias != nullptr || r.groups > 0) {
            rank(bias, max, sum);
            if (r.groups > 0) drop_groups();
            read(by = ranks, own);
        }
        const uint32_t taken = pick(by, own);
        // Ranks have done their service: weights lie there until their sum is known.
        for (uint32_t slot = lane; slot < r.top; slot += LANES) {
            const float logit = row[picks[slot]];
            ranks[slot] = r.scoring == SIGMOID ? sigmoid(logit) : exp_fast(logit - max) / sum;
        }
        sync_warp();
        float divisor = 1.0f;
        if (r.scoring == SOFTMAX_TOP || r.renormalise) {
            float chosen = 0.0f;
            for (uint32_t slot = 0; slot < r.top; ++slot) chosen += ranks[slot];
            // DeepSeek-V3 adds 1e-20 to the sum it divides by; it vanishes in every sum of softmax weights.
            divisor = r.renormalise ? chosen + 1e-20f : chosen;
        }
        for (uint32_t slot = lane; slot < r.top; slot += LANES)
            weights[slot] = ranks[slot] / divisor * r.scale;
        return taken;
    }

    // Nobody: of a token that only fills up a batch.
    __device__ __forceinline__ void choose_nobody(float* weights) const {
        for (uint32_t slot = lane; slot < r.top; slot += LANES) picks[slot] = r.experts, weights[slot] = 0.0f;
    }
};
