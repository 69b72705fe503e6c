// From logits to a token id, as `worker/src/sampler.rs` defines it, the same id for the same logits:
// temperature, min-p, top-k, top-p, then a draw that depends on (seed, position) alone; here also the chosen
// token's log-probability. And `score`: what a log-probability is made of (`worker/src/logprobs.rs`). What changes logits before
// is `rules.cu`.
//
// Weights e^((logit - max) / temperature) are integers, in units of 2^-40: their sums are exact in any
// order, so neither the order in which threads add nor the batch can change a choice, and the CPU's is the
// same. All cuts are one question, "which element, in descending order, takes the running sum past a
// target?", answered by a radix descent over 32-bit keys in four passes. Grid: (rows). Block: 512 threads. Shared:
// `Scratch`.
#include "numbers.cuh"
#ifndef KEYWAY_EMULATE
#include <math.h>
#endif

constexpr int THREADS = 512, BINS = 256;
constexpr float UNIT = 0x1p40f;
// Below this, a temperature means the most likely token (`sampler.rs`).
constexpr float GREEDY_TEMPERATURE = 1e-5f;

struct Scratch {
    uint64_t bins[BINS];
    uint64_t below;  // what of the target is left inside the bin
    uint64_t sums[THREADS / 32];
    uint32_t bin, found;
    uint32_t keys[THREADS / 32], ids[THREADS / 32];
};

// Orders as the numbers do: a larger key for a larger logit, one for both zeros; 0 for NaN, which is nobody's
// key.
__device__ __forceinline__ uint32_t key_of(float logit) {
    const uint32_t bits = logit == 0.0f ? 0 : to_bits(logit);
    if (!(logit == logit)) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// e^x for x <= 0 in the bits of `scalar::exp` of `scalar.rs`, which explains it: every operation is rounded
// once and by the standard, and no product is added to anything that a compiler could contract.
__device__ __forceinline__ float exp_exactly(float x) {
    constexpr float HIGH = 0.693147180559945309f, LOW = float(0.693147180559945309 - double(HIGH));
    constexpr float FACTORS[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    const float shifted = fmaf(x, LOG2_E, 12582912.0f), n = shifted - 12582912.0f;
    const float r = fmaf(n, -LOW, fmaf(n, -HIGH, x));
    float p = 1.0f / 5040.0f;
#pragma unroll
    for (float factor : FACTORS) p = fmaf(r, p, factor);
    const float result = p * from_bits((to_bits(shifted) << 23) + (127u << 23));
    return x < -87.0f ? 0.0f : result;
}

// 0 for what is no number.
__device__ __forceinline__ uint64_t weight_of(float logit, float maximum, float temperature) {
    const float weight = exp_exactly((logit - maximum) / temperature) * UNIT;
    return weight > 0.0f ? uint64_t(weight) : 0;
}

// XXH3 (64 bits, seeded) of the position's 8 bytes; doc/xxhash_spec.md of xxHash 0.8, "XXH3 algorithm for
// small inputs".
__device__ __forceinline__ uint64_t hash_position(uint64_t position, uint64_t seed) {
    constexpr uint64_t PRIME = 0x9fb21c651e98df25, SECRET = 0x1cad21f72c81017c ^ 0xdb979083e96dd4de;
    const uint32_t low = uint32_t(seed);
    const uint64_t swapped = (low >> 24) | (low >> 8 & 0xff00) | (low << 8 & 0xff0000) | low << 24;
    uint64_t h = (position >> 32 | position << 32) ^ (SECRET - (seed ^ swapped << 32));
    h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
    h *= PRIME;
    h ^= (h >> 35) + 8;
    h *= PRIME;
    return h ^ h >> 28;
}

// floor(a b / 2^64)
__device__ __forceinline__ uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef KEYWAY_EMULATE
    return uint64_t((unsigned __int128)(a)*b >> 64);
#else
    return __umul64hi(a, b);
#endif
}

// The sum over the block, in every thread.
__device__ __forceinline__ uint64_t sum_exactly(uint64_t value, Scratch& scratch) {
    for (unsigned mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    sync_block();
    if (threadIdx.x % 32 == 0) scratch.sums[threadIdx.x / 32] = value;
    sync_block();
    uint64_t sum = 0;
    for (int i = 0; i < THREADS / 32; ++i) sum += scratch.sums[i];
    return sum;
}

// An element of a row; `after` orders by descending logit, then ascending id.
struct Place {
    uint32_t key, id;
    __device__ __forceinline__ bool after(const Place& other) const {
        return key != other.key ? key < other.key : id > other.id;
    }
};

// The first of all threads' places in the above order, in every thread.
__device__ __forceinline__ Place first_over_block(Place best, Scratch& scratch) {
    for (unsigned mask = 16; mask > 0; mask /= 2) {
        const Place other{shuffle_xor(best.key, mask), shuffle_xor(best.id, mask)};
        if (best.after(other)) best = other;
    }
    sync_block();
    if (threadIdx.x % 32 == 0)
        scratch.keys[threadIdx.x / 32] = best.key, scratch.ids[threadIdx.x / 32] = best.id;
    sync_block();
    for (int i = 0; i < THREADS / 32; ++i) {
        const Place other{scratch.keys[i], scratch.ids[i]};
        if (best.after(other)) best = other;
    }
    return best;
}

// Among the ids below `vocabulary`, in descending order of `key(id)`: the key at which the running sum of
// `measure(id)` exceeds `target` (which the whole sum does). `target` becomes what of it lies beyond the
// greater keys.
template <class Key, class Measure>
__device__ __forceinline__ uint32_t descend(uint32_t vocabulary, uint64_t& target, Scratch& scratch, Key key,
                                            Measure measure) {
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        sync_block();
        if (threadIdx.x < BINS) scratch.bins[threadIdx.x] = 0;
        sync_block();
        for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) {
            const uint32_t own = key(id);
            const bool inside = shift == 24 || own >> (shift + 8) == prefix >> (shift + 8);
            const uint64_t amount = inside ? measure(id) : 0;
            if (amount > 0) atomic_add(&scratch.bins[own >> shift & 0xff], amount);
        }
        sync_block();
        if (threadIdx.x == 0) {
            uint64_t left = target;
            uint32_t bin = BINS - 1;
            while (bin > 0 && left >= scratch.bins[bin]) left -= scratch.bins[bin--];
            scratch.bin = bin, scratch.below = left;
        }
        sync_block();
        prefix |= scratch.bin << shift;
        target = scratch.below;
    }
    return prefix;
}

// A row, and which of its elements are still candidates: those not after `last`, and of at least `least`
// weight.
struct Row {
    const float* logits;
    uint32_t vocabulary;
    float maximum, temperature;
    Place last;
    uint64_t least;

    __device__ __forceinline__ uint64_t weight(uint32_t id) const {
        const float logit = logits[id];
        if (!(logit > NEGATIVE_INFINITY) || Place{key_of(logit), id}.after(last)) return 0;
        const uint64_t weight = weight_of(logit, maximum, temperature);
        return weight >= least ? weight : 0;
    }

    __device__ __forceinline__ uint64_t total(Scratch& scratch) const {
        uint64_t sum = 0;
        for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) sum += weight(id);
        return sum_exactly(sum, scratch);
    }

    // The element that takes the running sum, in descending order, past `target`. Equal logits have equal
    // measures.
    template <class Measure>
    __device__ __forceinline__ Place find(uint64_t target, Scratch& scratch, Measure measure) const {
        const float* row = logits;
        const uint32_t key =
            descend(vocabulary, target, scratch, [=](uint32_t id) { return key_of(row[id]); }, measure);
        // How many of the elements with this very logit come before: they have ascending ids, and a descent
        // finds the id.
        auto counts = [=](uint32_t id) { return uint64_t(key_of(row[id]) == key && measure(id) > 0); };
        sync_block();
        for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) {
            // All of them write the same.
            if (counts(id)) scratch.below = measure(id);
        }
        sync_block();
        uint64_t before = target / scratch.below;
        sync_block();
        const uint32_t inverted =
            descend(vocabulary, before, scratch, [](uint32_t id) { return ~id; }, counts);
        return {key, ~inverted};
    }
};

// Of each row's parameters: temperature, top-p, min-p as f32; top-k; seed and position in two words each,
// lower first.
struct Parameters {
    float temperature, top_p, min_p;
    uint32_t top_k, seed[2], position[2];
};

__device__ __forceinline__ uint32_t choose(Row row, const Parameters& by, uint32_t best, Scratch& scratch) {
    if (by.temperature < GREEDY_TEMPERATURE) return best;
    row.least = max_of(uint64_t(1), uint64_t(by.min_p * UNIT));
    uint64_t candidates = 0;
    for (uint32_t id = threadIdx.x; id < row.vocabulary; id += THREADS) candidates += row.weight(id) > 0;
    candidates = sum_exactly(candidates, scratch);
    if (candidates == 0) return best;
    const bool few = by.top_k > 0 && by.top_k < candidates;
    if (few)
        row.last = row.find(by.top_k - 1, scratch, [=](uint32_t id) { return uint64_t(row.weight(id) > 0); });
    if (by.top_p < 1.0f) {
        const uint64_t wanted = uint64_t(double(by.top_p) * double(row.total(scratch)));
        // The last one kept is the one that reaches what is wanted, that is, passes one less.
        const Row all = row;
        row.last =
            all.find(wanted > 0 ? wanted - 1 : 0, scratch, [=](uint32_t id) { return all.weight(id); });
    }
    const uint64_t seed = by.seed[0] | uint64_t(by.seed[1]) << 32,
                   position = by.position[0] | uint64_t(by.position[1]) << 32;
    // The upper 53 bits of the hash are a number in [0, 1).
    uint64_t target = multiply_high(hash_position(position, seed) >> 11 << 11, row.total(scratch));
    if (few || by.top_p < 1.0f)
        return row.find(target, scratch, [=](uint32_t id) { return row.weight(id); }).id;
    return ~descend(
        row.vocabulary, target, scratch, [](uint32_t id) { return ~id; },
        [=](uint32_t id) { return row.weight(id); });
}

// `logits` [rows, vocabulary] f32; `parameters` one per row; `tokens` and `logprobs` (of the logits given,
// at temperature 1) one per row.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sample(const float* logits, const Parameters* parameters, uint32_t* tokens, float* logprobs,
           uint32_t vocabulary) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared_memory());
    const float* own = logits + uint64_t(blockIdx.x) * vocabulary;
    Place best{0, 0xffffffffu};
    for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) {
        const Place place{key_of(own[id]), id};
        if (best.after(place)) best = place;
    }
    best = first_over_block(best, scratch);
    const Parameters by = parameters[blockIdx.x];
    Row row{own, vocabulary, own[best.id], by.temperature, Place{0, 0xffffffffu}, 1};
    const uint32_t token = choose(row, by, best.id, scratch);
    row.temperature = 1.0f;
    const uint64_t total = row.total(scratch);
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = token;
        logprobs[blockIdx.x] = own[token] - row.maximum - logf(float(double(total) / double(UNIT)));
    }
}

// What the host makes log-probabilities of: the token's logit, the largest, the sum of all weights beside it at temperature 1; how
// many logits are at least the token's; the likeliest ids and their logits, in the order in which tokens are kept.
constexpr uint32_t TOP = 20, NOT_WANTED = 0xffffffffu;
struct Score {
    float logit, maximum;
    uint32_t total[2], rank, unused;
    uint32_t ids[TOP];
    float logits[TOP];
};

// Of row r as many of the likeliest as `wanted[r]` says, at most TOP; nothing at all if that is NOT_WANTED.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    score(const float* logits, const uint32_t* wanted, const uint32_t* tokens, Score* scores, uint32_t vocabulary) {
    const uint32_t top = wanted[blockIdx.x];
    if (top == NOT_WANTED) return;
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared_memory());
    const float* own = logits + uint64_t(blockIdx.x) * vocabulary;
    Score& to = scores[blockIdx.x];
    Place last{0, 0};
    float maximum = 0.0f;
    for (uint32_t i = 0; i < max_of(1u, min_of(top, vocabulary)); ++i) {
        Place best{0, 0xffffffffu};
        for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) {
            const Place place{key_of(own[id]), id};
            if (best.after(place) && (i == 0 || place.after(last))) best = place;
        }
        last = first_over_block(best, scratch);
        if (i == 0) maximum = own[last.id];
        if (threadIdx.x == 0 && i < top) to.ids[i] = last.id, to.logits[i] = own[last.id];
    }
    const Row row{own, vocabulary, maximum, 1.0f, Place{0, 0xffffffffu}, 1};
    const uint64_t total = row.total(scratch);
    const float logit = own[tokens[blockIdx.x]];
    uint64_t rank = 0;
    for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) rank += own[id] >= logit;
    rank = sum_exactly(rank, scratch);
    if (threadIdx.x == 0) {
        to.logit = logit, to.maximum = maximum, to.rank = uint32_t(rank);
        to.total[0] = uint32_t(total), to.total[1] = uint32_t(total >> 32);
    }
}
