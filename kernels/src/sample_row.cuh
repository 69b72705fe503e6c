// A row of logits as drawing sees it: in which order its elements stand, what each weighs, and how several
// threads read it.
#pragma once

#include "numbers.cuh"

constexpr uint32_t THREADS = 512, WARPS = THREADS / 32;
// Bins of equal width below a row's largest logit.
constexpr uint32_t BINS = 1024;
constexpr float UNIT = 0x1p40f;
// Below this, a temperature means the most likely token (`sampler.rs`).
constexpr float GREEDY_TEMPERATURE = 1e-5f;
// e^-28 is less than a unit: what is so far below the largest weighs nothing.
constexpr float WEIGHTLESS = 28.0f;

// Orders as the numbers do: a larger key for a larger logit, one for both zeros, of which adding zero makes
// one; 0 for NaN, which is nobody's key.
__device__ __forceinline__ uint32_t key_of(float logit) {
    const uint32_t bits = to_bits(logit + 0.0f);
    return logit == logit ? bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u) : 0;
}

// An element of a row in one number, which is less the earlier it comes: by descending logit, then by
// ascending id.
using Place = uint64_t;
__device__ __forceinline__ Place place_of(float logit, uint32_t id) {
    return uint64_t(~key_of(logit)) << 32 | id;
}
__device__ __forceinline__ uint32_t id_of(Place place) { return uint32_t(place); }
// The logit, but 0 for both zeros.
__device__ __forceinline__ float logit_of(Place place) {
    const uint32_t key = ~uint32_t(place >> 32);
    return from_bits(key >> 31 ? key & 0x7fffffffu : ~key);
}
// After all others.
constexpr Place NOWHERE = ~Place(0);

// e^x for x <= 0 in the bits of `scalar::exp` of `scalar.rs`, which explains it: every operation is rounded
// once and by the standard, and no product is added to anything that a compiler could contract. `exp_within`
// is for x >= -87, or NaN.
__device__ __forceinline__ float exp_within(float x) {
    constexpr float HIGH = 0.693147180559945309f, LOW = float(0.693147180559945309 - double(HIGH));
    constexpr float FACTORS[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    const float shifted = fmaf(x, LOG2_E, 12582912.0f), n = shifted - 12582912.0f;
    const float r = fmaf(n, -LOW, fmaf(n, -HIGH, x));
    float p = 1.0f / 5040.0f;
#pragma unroll
    for (float factor : FACTORS) p = fmaf(r, p, factor);
    return p * from_bits((to_bits(shifted) << 23) + (127u << 23));
}
__device__ __forceinline__ float exp_exactly(float x) { return x < -87.0f ? 0.0f : exp_within(x); }

// 0 for what is no number.
__device__ __forceinline__ uint64_t weight_of(float logit, float maximum, float temperature) {
    const float weight = exp_exactly((logit - maximum) / temperature) * UNIT;
    return weight > 0.0f ? uint64_t(weight) : 0;
}

// The weight at temperature 1 of a logit that is at least `weightless`, else 0; without a branch, so that
// several are under way at once.
__device__ __forceinline__ uint64_t weight_at_1(float logit, float maximum, float weightless) {
    const float weight = exp_within(logit - maximum) * UNIT;
    return uint64_t(logit >= weightless ? weight : 0.0f);
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

// Of each row's parameters: temperature, top-p, min-p as f32; top-k; seed and position in two words each,
// lower first.
struct Parameters {
    float temperature, top_p, min_p;
    uint32_t top_k, seed[2], position[2];

    __device__ __forceinline__ bool is_greedy() const { return temperature < GREEDY_TEMPERATURE; }
    // Whether the order of logits may matter.
    __device__ __forceinline__ bool cuts() const { return !is_greedy() && (top_k > 0 || top_p < 1.0f); }
    // In [0, 1) in units of 2^-64: the upper 53 bits of the hash.
    __device__ __forceinline__ uint64_t number() const {
        const uint64_t by_seed = seed[0] | uint64_t(seed[1]) << 32;
        return hash_position(position[0] | uint64_t(position[1]) << 32, by_seed) >> 11 << 11;
    }
};

// A row as its candidates see it: those of at least the weight `least`, by so many bins for each unit below
// the largest logit.
struct Row {
    const float* logits;
    uint32_t vocabulary;
    float maximum, temperature, bins;
    uint64_t least;

    __device__ __forceinline__ uint64_t weight(float logit) const {
        if (!(logit > NEGATIVE_INFINITY)) return 0;
        const uint64_t weight = weight_of(logit, maximum, temperature);
        return weight >= least ? weight : 0;
    }
    // What is not at least this weighs nothing: at this temperature. NaN, which nothing reaches, if nothing
    // weighs anything, since the largest is not finite.
    __device__ __forceinline__ float weightless(float at) const {
        return maximum - maximum == 0.0f ? maximum - WEIGHTLESS * at : from_bits(0x7fffffffu);
    }
    // Never descends as logits do; what is no number comes last.
    __device__ __forceinline__ uint32_t bin(float logit) const {
        if (!(logit == logit)) return BINS - 1;
        const float below = maximum - logit, at = below * bins;
        if (!(below > 0.0f)) return 0;
        return at < float(BINS - 1) ? uint32_t(at) : BINS - 1;
    }
};

__device__ __forceinline__ Row row_of(const float* logits, uint32_t vocabulary, float maximum,
                                      const Parameters& by) {
    const float bins = float(BINS) / (WEIGHTLESS * by.temperature);
    const uint64_t least = max_of(uint64_t(1), uint64_t(by.min_p * UNIT));
    return {logits, vocabulary, maximum, by.temperature, bins, least};
}

// A range of ids.
struct Ids {
    uint32_t begin, end;
    // The one of `pieces` equal pieces that has this number. All begin at packets of memory if these do.
    __device__ __forceinline__ Ids piece(uint32_t number, uint32_t pieces) const {
        const uint32_t each = ((end - begin + pieces - 1) / pieces + 3) / 4 * 4;
        const uint32_t from = min_of(end, begin + number * each);
        return {from, min_of(end, from + each)};
    }
    __device__ __forceinline__ bool have(uint32_t id) const { return id - begin < end - begin; }

    // The logits of four ids from `id` on, NaN of those that are not among these; `id` may be "less than 0".
    // Lanes with none of these leave at once: what they would write, others' loads would be waited for.
    __device__ __forceinline__ Packet four(const float* logits, uint32_t id) const {
        constexpr uint32_t NONE = 0x7fffffffu;
        Packet some{{NONE, NONE, NONE, NONE}};
        if (end - begin >= 4 && id - begin <= end - begin - 4) {
            some = load_packet(logits + id);
        } else if (id + 3 - begin < end + 3 - begin) {
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j)
                if (have(id + j)) some.words[j] = to_bits(logits[id + j]);
        }
        return some;
    }
};

// The ids for which a thread, the `first` of every `apart`, stands: each has four that lie in one packet of
// memory, then four `apart` packets further. Several loads are under way at once, the first from the start:
// one after another they would be waited for.
template <int AT_ONCE>
struct Reader {
    const float* logits;
    Ids ids;
    // The packet that comes next, and the id at which the first begins, which may be "less than 0".
    uint32_t at, apart, begin;
    Packet some[AT_ONCE];

    __device__ __forceinline__ Reader(const float* logits, Ids ids, uint32_t first, uint32_t apart)
        : logits(logits), ids(ids), at(first), apart(apart),
          begin(ids.begin - uint32_t(reinterpret_cast<uintptr_t>(logits + ids.begin) / 4 % 4)) {
        load();
    }
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) some[i] = ids.four(logits, begin + 4 * (at + i * apart));
    }
    // Calls `f(id, logit)` of each, and of up to three ids beside them, with NaN.
    template <class F>
    __device__ __forceinline__ void each(F f) {
        while (4 * at < ids.end - begin) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) f(begin + 4 * (at + i * apart) + j, from_bits(some[i].words[j]));
            at += AT_ONCE * apart;
            load();
        }
    }
};

template <int AT_ONCE, class F>
__device__ __forceinline__ void each_logit(const float* logits, Ids ids, uint32_t first, uint32_t apart,
                                           F f) {
    Reader<AT_ONCE>(logits, ids, first, apart).each(f);
}
