// The memory in which the blocks of a row leave what they found, and the bound that they draw from it: at or
// before which place the likeliest elements lie.
#pragma once

#include "sample_block.cuh"

// Of so many chunks of a row, at most, the first place is kept.
constexpr uint32_t CHUNKS = 256;
// Chunks are ranked in so many groups, which takes that much less than to rank them among all.
constexpr uint32_t GROUPS = 4, GROUP = CHUNKS / GROUPS;

// What a row's blocks found together.
struct Joint {
    // From here to `firsts` 0 before blocks add to it. Blocks that are done, and elements in `list`.
    uint32_t done, listed;
    // Of a draw: the sum of weights at 1, and of candidates their weights and how many there are. Of a score:
    // the sum of weights, and how many logits are at least the token's.
    uint64_t sums[3];
    // Candidates by bin.
    uint64_t bin_weights[BINS];
    uint32_t bin_counts[BINS];
    // The first place of each chunk.
    Place firsts[CHUNKS];
    // In any order, the likeliest, unless `listed` says that they were too many.
    Place list[GATHERED];
};

// All of that: each row has a `Joint`, and for each part the weights of the equal pieces that its warps had.
struct Work {
    Joint* joint;
    uint64_t* pieces;

    __device__ __forceinline__ Work(uint32_t* work, uint32_t row, uint32_t parts) {
        unsigned char* bytes = reinterpret_cast<unsigned char*>(work);
        joint = reinterpret_cast<Joint*>(bytes + row * (sizeof(Joint) + uint64_t(parts) * sizeof(Sums)));
        pieces = reinterpret_cast<uint64_t*>(joint + 1);
    }
};

// The most likely elements that a bound is asked for: with more of all chunks, too many lie before it.
__device__ __forceinline__ uint32_t most_of(uint32_t chunks) { return chunks - chunks / 8; }

// The first place of a row, and one at or before which at least so many elements lie as were asked for, but
// seldom many more.
struct Bound {
    Place first, last;
};

// Ranks the first places of chunks: as many elements as chunks come no later than the last of these. In each
// group a share of the elements is looked for, and the last of all is taken.
struct Ranking {
    Place places[GROUPS][GROUP];
    Place firsts[GROUPS], lasts[GROUPS];

    // Of the row's `chunks`, the first place of the one that this thread stands for, if any.
    __device__ __forceinline__ static Place own(const Work& work, uint32_t chunks) {
        return threadIdx.x < chunks ? work.joint->firsts[threadIdx.x] : NOWHERE;
    }

    // `place` is each thread's `own`; `wanted` is at least 1 and at most CHUNKS. Where the row has fewer
    // elements, or chunks, everything comes before the bound.
    __device__ __forceinline__ Bound bound(Place place, uint32_t wanted) {
        // No two may be equal.
        if (threadIdx.x < CHUNKS)
            places[threadIdx.x % GROUPS][threadIdx.x / GROUPS] =
                place == NOWHERE ? NOWHERE - threadIdx.x : place;
        sync_block();
        // Two threads count for each.
        static_assert(THREADS == 2 * CHUNKS, "a thread for each half");
        const uint32_t group = threadIdx.x / 2 / GROUP;
        const Place own = places[group][threadIdx.x / 2 % GROUP];
        uint32_t before = 0;
#pragma unroll 8
        for (uint32_t i = threadIdx.x % 2; i < GROUP; i += 2) before += places[group][i] < own;
        before += shuffle_xor(before, 1);
        if (threadIdx.x % 2 == 0) {
            if (before == 0) firsts[group] = own;
            if (before == (wanted + GROUPS - 1) / GROUPS - 1) lasts[group] = own;
        }
        sync_block();
        Bound bound{firsts[0], lasts[0]};
#pragma unroll
        for (uint32_t i = 1; i < GROUPS; ++i) {
            bound.first = min_of(bound.first, firsts[i]);
            bound.last = max_of(bound.last, lasts[i]);
        }
        return bound;
    }
};

// What both uses of a block's shared memory begin with. The row and what is asked of it lie here for the
// second, in which registers are scarce.
struct Common {
    Sums sums;
    Row row;
    Parameters by;
    uint32_t last, unused;
};

// What a block finds in its part of a row.
struct Scan : Common {
    Ranking ranking;
    uint64_t of_warps[3][WARPS];
    // Where this block's elements go in the row's list, and how many there are.
    uint32_t base, listed;
    Place list[GATHERED];
    // Candidates by bin. Weights are in two words: 64-bit additions to shared memory would be loops.
    uint32_t counts[BINS], low[BINS], high[BINS];

    // A barrier must follow.
    __device__ __forceinline__ void clear(bool bins) {
        if (threadIdx.x == 0) listed = 0;
        if (!bins) return;
        for (uint32_t i = threadIdx.x; i < BINS; i += THREADS) counts[i] = low[i] = high[i] = 0;
    }
    __device__ __forceinline__ void add(uint32_t bin, uint64_t weight) {
        atomic_add(&counts[bin], 1u);
        const uint32_t own = uint32_t(weight), carry = atomic_add(&low[bin], own) + own < own;
        if (const uint32_t rest = uint32_t(weight >> 32) + carry) atomic_add(&high[bin], rest);
    }
    // Lists what comes no later than `last` and is one of these ids.
    __device__ __forceinline__ void note(Ids ids, uint32_t id, float logit, Place last) {
        const Place place = place_of(logit, id);
        if (place > last || !ids.have(id)) return;
        const uint32_t at = atomic_add(&listed, 1u);
        if (at < GATHERED) list[at] = place;
    }

    // Adds what the block found to the row's. The sums are each thread's.
    __device__ __forceinline__ void leave(Joint& joint, const uint64_t (&own)[3], bool bins) {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane < 3) of_warps[lane][warp] = lane == 0 ? own[0] : lane == 1 ? own[1] : own[2];
        sync_block();
        if (warp < 3) {
            const uint64_t sum = sum_over_warp(lane < WARPS ? of_warps[warp][lane] : 0);
            if (lane == 0 && sum > 0) atomic_add(&joint.sums[warp], sum);
        }
        if (threadIdx.x == THREADS - 1) base = listed > 0 ? atomic_add(&joint.listed, listed) : 0;
        for (uint32_t i = threadIdx.x; bins && i < BINS; i += THREADS) {
            if (counts[i] == 0) continue;
            atomic_add(&joint.bin_counts[i], counts[i]);
            atomic_add(&joint.bin_weights[i], low[i] | uint64_t(high[i]) << 32);
        }
        sync_block();
        const uint32_t n = min_of(listed, GATHERED);
        for (uint32_t i = threadIdx.x; i < n && base + i < GATHERED; i += THREADS)
            joint.list[base + i] = list[i];
    }
};
