// From logits to a token id, as `worker/src/sampler.rs` defines it, the same id for the same logits:
// temperature, min-p, top-k, top-p, then a draw that depends on (seed, position) alone; here also the chosen
// token's log-probability. And scores: what a log-probability is made of (`worker/src/logprobs.rs`). What
// changes logits before is `rules.cu`.
//
// Weights e^((logit - max) / temperature) are integers, in units of 2^-40: their sums are exact in any
// order, so neither the order in which threads add nor the batch can change a choice, and the CPU's is the
// same. All cuts are one question, "which element, in descending order, takes the running sum past a
// target?". A row is read three times: for its largest logit; for its weights and how they spread over bins
// of equal width below the largest; and, by the bins' sums, for the few elements of the bin in which the
// answer lies. The first two are done by several blocks a row, each for its part of the ids.
//
// Grid: (parts, rows), and (rows) for `sample` and `score`. Block: 512 threads. Shared: `Spread` or `Finder`.
#include "numbers.cuh"
#ifndef KEYWAY_EMULATE
#include <math.h>
#endif

constexpr int THREADS = 512, WARPS = THREADS / 32;
// Bins of a row, and elements that are sorted at once: `sample.rs` reserves memory for them.
constexpr uint32_t BINS = 1024, GATHERED = 2048;
constexpr float UNIT = 0x1p40f;
// Below this, a temperature means the most likely token (`sampler.rs`).
constexpr float GREEDY_TEMPERATURE = 1e-5f;
// e^-28 is less than a unit: what is so far below the largest weighs nothing.
constexpr float WEIGHTLESS = 28.0f;
// How far below the largest logit the bins of a score reach: of what lies further down, few are among the
// likeliest.
constexpr float SCORED = 64.0f;

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

// What blocks exchange to sum up.
struct Sums {
    uint64_t of_warps[WARPS];
    uint32_t keys[WARPS], ids[WARPS];
};

// The sum over the block, in every thread.
__device__ __forceinline__ uint64_t sum_exactly(uint64_t value, Sums& sums) {
    for (unsigned mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    sync_block();
    if (threadIdx.x % 32 == 0) sums.of_warps[threadIdx.x / 32] = value;
    sync_block();
    uint64_t sum = 0;
    for (int i = 0; i < WARPS; ++i) sum += sums.of_warps[i];
    return sum;
}

// The sum of the values of this thread and all before it.
__device__ __forceinline__ uint64_t running_sum(uint64_t value, Sums& sums) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (unsigned step = 1; step < 32; step *= 2) {
        const uint64_t before = shuffle(value, lane >= step ? lane - step : lane);
        if (lane >= step) value += before;
    }
    sync_block();
    if (lane == 31) sums.of_warps[warp] = value;
    sync_block();
    for (unsigned i = 0; i < warp; ++i) value += sums.of_warps[i];
    return value;
}

// Makes each of `n` numbers the sum of itself and all before it.
__device__ __forceinline__ void make_running(uint64_t* numbers, uint32_t n, Sums& sums) {
    sync_block();
    const uint32_t each = (n + THREADS - 1) / THREADS, first = min_of(n, threadIdx.x * each), end = min_of(n, first + each);
    uint64_t own = 0;
    for (uint32_t i = first; i < end; ++i) own += numbers[i];
    uint64_t sum = running_sum(own, sums) - own;
    for (uint32_t i = first; i < end; ++i) numbers[i] = sum += numbers[i];
    sync_block();
}

// The first of `n` running sums that exceeds `target`; n - 1 if none does.
__device__ __forceinline__ uint32_t first_above(const uint64_t* running, uint32_t n, uint64_t target) {
    uint32_t low = 0, high = n - 1;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (running[middle] > target) high = middle;
        else low = middle + 1;
    }
    return low;
}

// An element of a row; `after` orders by descending logit, then ascending id.
struct Place {
    uint32_t key, id;
    __device__ __forceinline__ bool after(const Place& other) const {
        return key != other.key ? key < other.key : id > other.id;
    }
};
// After all others.
__device__ __forceinline__ Place nowhere() { return {0, 0xffffffffu}; }

// The first of all threads' places in the above order, in every thread.
__device__ __forceinline__ Place first_over_block(Place best, Sums& sums) {
    for (unsigned mask = 16; mask > 0; mask /= 2) {
        const Place other{shuffle_xor(best.key, mask), shuffle_xor(best.id, mask)};
        if (best.after(other)) best = other;
    }
    sync_block();
    if (threadIdx.x % 32 == 0) sums.keys[threadIdx.x / 32] = best.key, sums.ids[threadIdx.x / 32] = best.id;
    sync_block();
    for (int i = 0; i < WARPS; ++i) {
        const Place other{sums.keys[i], sums.ids[i]};
        if (best.after(other)) best = other;
    }
    return best;
}

// What a block found in its part of a row: its first place; the sums of weights at the row's temperature,
// also of the equal pieces that its warps had, and at 1; how many elements weigh enough, or, for a score, are
// at least the token's logit.
struct Part {
    Place best;
    uint64_t weights, weights_at_1;
    uint32_t count, unused;
    uint64_t of_warps[WARPS];
};

// The memory in which the blocks of a row leave what they found: all parts, then each part's weights and
// counts by bin.
struct Work {
    unsigned char* row;
    uint32_t parts;

    __device__ __forceinline__ Work(uint32_t* work, uint32_t row, uint32_t parts)
        : row(reinterpret_cast<unsigned char*>(work) + uint64_t(row) * parts * (sizeof(Part) + BINS * 12)), parts(parts) {}

    __device__ __forceinline__ Part& part(uint32_t i) const { return reinterpret_cast<Part*>(row)[i]; }
    __device__ __forceinline__ uint64_t* weights(uint32_t i) const {
        return reinterpret_cast<uint64_t*>(row + parts * sizeof(Part)) + i * BINS;
    }
    __device__ __forceinline__ uint32_t* counts(uint32_t i) const {
        return reinterpret_cast<uint32_t*>(row + parts * (sizeof(Part) + BINS * 8)) + i * BINS;
    }
    // The row's first place: of its largest logit.
    __device__ __forceinline__ Place best() const {
        Place best = nowhere();
        for (uint32_t i = 0; i < parts; ++i) {
            const Place other = part(i).best;
            if (best.after(other)) best = other;
        }
        return best;
    }
};

// A range of ids.
struct Ids {
    uint32_t begin, end;
    // The one of `pieces` equal pieces that has this number.
    __device__ __forceinline__ Ids piece(uint32_t number, uint32_t pieces) const {
        const uint32_t each = (end - begin + pieces - 1) / pieces, from = min_of(end, begin + number * each);
        return {from, min_of(end, from + each)};
    }
};

// Calls `f(id, logit)` of the ids for which this thread, the `first` of every `apart`, stands. Several loads
// are under way at once: one after another they would be waited for.
template <int AT_ONCE = 8, class F>
__device__ __forceinline__ void each_logit(const float* logits, Ids ids, uint32_t first, uint32_t apart, F f) {
    for (uint32_t id = ids.begin + first; id < ids.end; id += AT_ONCE * apart) {
        float some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) some[i] = id + i * apart < ids.end ? logits[id + i * apart] : 0.0f;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (id + i * apart < ids.end) f(id + i * apart, some[i]);
    }
}

// Of each row's parameters: temperature, top-p, min-p as f32; top-k; seed and position in two words each,
// lower first.
struct Parameters {
    float temperature, top_p, min_p;
    uint32_t top_k, seed[2], position[2];

    __device__ __forceinline__ bool is_greedy() const { return temperature < GREEDY_TEMPERATURE; }
    // Whether the order of logits may matter, so that bins are needed.
    __device__ __forceinline__ bool cuts() const { return !is_greedy() && (top_k > 0 || top_p < 1.0f); }
};

// A row as its candidates see it: those of at least the weight `least`, by so many bins of equal width for
// each unit below the largest logit.
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
    // Never descends as logits do; what is no number comes last.
    __device__ __forceinline__ uint32_t bin(float logit) const {
        if (!(logit == logit)) return BINS - 1;
        const float below = maximum - logit, at = below * bins;
        if (!(below > 0.0f)) return 0;
        return at < float(BINS - 1) ? uint32_t(at) : BINS - 1;
    }
};

__device__ __forceinline__ Row row_of(const float* logits, uint32_t vocabulary, float maximum, const Parameters& by) {
    const float bins = float(BINS) / (WEIGHTLESS * by.temperature);
    return {logits, vocabulary, maximum, by.temperature, bins, max_of(uint64_t(1), uint64_t(by.min_p * UNIT))};
}

// A block's sums by bin. Weights are in two words: 64-bit additions to shared memory would be loops.
struct Spread {
    Sums sums;
    uint32_t counts[BINS], low[BINS], high[BINS];

    __device__ __forceinline__ void clear() {
        for (uint32_t i = threadIdx.x; i < BINS; i += THREADS) counts[i] = low[i] = high[i] = 0;
        sync_block();
    }
    __device__ __forceinline__ void add(uint32_t bin, uint64_t weight) {
        atomic_add(&counts[bin], 1u);
        const uint32_t own = uint32_t(weight), carry = atomic_add(&low[bin], own) + own < own;
        if (const uint32_t rest = uint32_t(weight >> 32) + carry) atomic_add(&high[bin], rest);
    }
    __device__ __forceinline__ void leave(uint64_t* weights_to, uint32_t* counts_to) const {
        sync_block();
        for (uint32_t i = threadIdx.x; i < BINS; i += THREADS)
            weights_to[i] = low[i] | uint64_t(high[i]) << 32, counts_to[i] = counts[i];
    }
};

// `logits` [rows, vocabulary] f32. Leaves the first place of each part in `work`.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sample_peaks(const float* logits, uint32_t* work, uint32_t vocabulary) {
    follow();
    Sums& sums = *reinterpret_cast<Sums*>(shared_memory());
    const float* own = logits + uint64_t(blockIdx.y) * vocabulary;
    const Ids ids = Ids{0, vocabulary}.piece(blockIdx.x, gridDim.x);
    Place best = nowhere();
    each_logit(own, ids, threadIdx.x, THREADS, [&](uint32_t id, float logit) {
        const Place place{key_of(logit), id};
        if (best.after(place)) best = place;
    });
    best = first_over_block(best, sums);
    if (threadIdx.x == 0) Work(work, blockIdx.y, gridDim.x).part(blockIdx.x).best = best;
}

// The weights of each part, behind `sample_peaks`; by bins too where the row's parameters may cut.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sample_weights(const float* logits, const Parameters* parameters, uint32_t* work, uint32_t vocabulary) {
    follow();
    Spread& spread = *reinterpret_cast<Spread*>(shared_memory());
    const Work to(work, blockIdx.y, gridDim.x);
    const Parameters by = parameters[blockIdx.y];
    const float* own = logits + uint64_t(blockIdx.y) * vocabulary;
    const Row row = row_of(own, vocabulary, own[to.best().id], by);
    const bool greedy = by.is_greedy(), cuts = by.cuts();
    const float weightless = row.maximum - WEIGHTLESS * max_of(1.0f, by.temperature);
    if (cuts) spread.clear();
    const Ids ids = Ids{0, vocabulary}.piece(blockIdx.x, gridDim.x).piece(threadIdx.x / 32, WARPS);
    uint64_t weights = 0, weights_at_1 = 0;
    uint32_t count = 0;
    each_logit(own, ids, threadIdx.x % 32, 32, [&](uint32_t, float logit) {
        if (logit < weightless || !(logit > NEGATIVE_INFINITY)) return;
        const uint64_t at_1 = weight_of(logit, row.maximum, 1.0f);
        weights_at_1 += at_1;
        if (greedy) return;
        const uint64_t weight = by.temperature == 1.0f ? at_1 : weight_of(logit, row.maximum, by.temperature);
        if (weight < row.least) return;
        weights += weight, ++count;
        if (cuts) spread.add(row.bin(logit), weight);
    });
    weights = sum_exactly(weights, spread.sums);
    const uint64_t of_warp = threadIdx.x < WARPS ? spread.sums.of_warps[threadIdx.x] : 0;
    weights_at_1 = sum_exactly(weights_at_1, spread.sums);
    count = uint32_t(sum_exactly(count, spread.sums));
    if (threadIdx.x == 0) {
        Part& part = to.part(blockIdx.x);
        part.weights = weights, part.weights_at_1 = weights_at_1, part.count = count;
    }
    if (threadIdx.x < WARPS) to.part(blockIdx.x).of_warps[threadIdx.x] = of_warp;
    if (cuts) spread.leave(to.weights(blockIdx.x), to.counts(blockIdx.x));
}

// Finds elements of a row by running sums in descending order, with the sums by bin that the parts left.
struct Finder {
    Sums sums;
    // Up to and with each bin; at first only counts where weights are not asked for.
    uint64_t counts[BINS], weights[BINS];
    // The elements of bins `first` to `last` in order, as `~key` and id, and the sums of weights up to and
    // with each.
    uint64_t elements[GATHERED], running[GATHERED];
    // Of the search by digits.
    uint32_t digits_low[256], digits_high[256];
    uint32_t gathered, first, last;

    // What was found: an element, and the sum of weights up to and with it.
    struct Found {
        uint32_t id;
        uint64_t weights;
    };

    __device__ __forceinline__ uint64_t count_before(uint32_t bin) const { return bin > 0 ? counts[bin - 1] : 0; }
    __device__ __forceinline__ uint64_t weight_before(uint32_t bin) const { return bin > 0 ? weights[bin - 1] : 0; }

    __device__ __forceinline__ void load(const Work& work) {
        for (uint32_t bin = threadIdx.x; bin < BINS; bin += THREADS) {
            uint64_t count = 0, weight = 0;
            for (uint32_t i = 0; i < work.parts; ++i) count += work.counts(i)[bin], weight += work.weights(i)[bin];
            counts[bin] = count, weights[bin] = weight;
        }
        make_running(counts, BINS, sums);
        make_running(weights, BINS, sums);
        if (threadIdx.x == 0) first = 1, last = 0;
        sync_block();
    }

    // Gathers and sorts the elements of the bins `from` to `to` for which `is_one(logit)`; they must be at
    // most GATHERED.
    template <class IsOne>
    __device__ __forceinline__ void gather(const Row& row, uint32_t from, uint32_t to, IsOne is_one) {
        sync_block();
        if (threadIdx.x == 0) gathered = 0, first = from, last = to;
        sync_block();
        // Most elements lie below these bins, which one comparison says.
        const bool has_end = to < BINS - 1 && row.maximum < -NEGATIVE_INFINITY;
        each_logit(row.logits, {0, row.vocabulary}, threadIdx.x, THREADS, [&](uint32_t id, float logit) {
            if (has_end && (row.maximum - logit) * row.bins >= float(to + 1)) return;
            const uint32_t bin = row.bin(logit);
            if (bin < from || bin > to || !is_one(logit)) return;
            const uint32_t at = atomic_add(&gathered, 1u);
            if (at < GATHERED) elements[at] = uint64_t(~key_of(logit)) << 32 | id;
        });
        sync_block();
        const uint32_t n = min_of(gathered, GATHERED);
        uint32_t size = 1;
        while (size < n) size *= 2;
        for (uint32_t i = n + threadIdx.x; i < size; i += THREADS) elements[i] = ~uint64_t(0);
        // A bitonic network (Batcher 1968).
        for (uint32_t run = 2; run <= size; run *= 2) {
            for (uint32_t apart = run / 2; apart > 0; apart /= 2) {
                sync_block();
                for (uint32_t pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                    const uint32_t low = pair / apart * apart * 2 + pair % apart, high = low + apart;
                    const uint64_t a = elements[low], b = elements[high];
                    if ((a > b) == ((low & run) == 0)) elements[low] = b, elements[high] = a;
                }
            }
        }
        sync_block();
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) running[i] = row.weight(row.logits[uint32_t(elements[i])]);
        make_running(running, n, sums);
    }

    // Brings the bin's elements, and if they are few those of all bins before. False if even its own are too
    // many.
    __device__ __forceinline__ bool bring(const Row& row, uint32_t bin) {
        if (first <= bin && bin <= last) return true;
        const uint32_t from = counts[bin] <= GATHERED ? 0 : bin;
        if (counts[bin] - count_before(from) > GATHERED) return false;
        gather(row, from, bin, [&](float logit) { return row.weight(logit) > 0; });
        return true;
    }

    // The candidate that takes the running sum, of weights or of ones for a count, past `target`.
    __device__ __forceinline__ Found find(const Row& row, uint64_t target, bool by_count) {
        const uint64_t* sums_by_bin = by_count ? counts : weights;
        const uint32_t bin = first_above(sums_by_bin, BINS, target);
        const bool brought = bring(row, bin);
        const uint32_t from = brought ? first : bin;
        target -= from > 0 ? sums_by_bin[from - 1] : 0;
        if (!brought) return by_digits(row, bin, target, by_count);
        return at(by_count ? uint32_t(target) : first_above(running, gathered, target));
    }

    __device__ __forceinline__ Found at(uint32_t i) const {
        return {uint32_t(elements[i]), weight_before(first) + running[i]};
    }

    // The same among the candidates of one bin that has too many to sort: a descent over the keys' digits in
    // four passes, then the id among equals.
    __device__ __forceinline__ Found by_digits(const Row& row, uint32_t bin, uint64_t target, bool by_count) {
        auto measure = [&](uint64_t weight) { return by_count ? uint64_t(weight > 0) : weight; };
        uint32_t prefix = 0;
        auto weight_inside = [&](float logit) { return row.bin(logit) == bin ? row.weight(logit) : 0; };
        for (int shift = 24; shift >= 0; shift -= 8) {
            sync_block();
            if (threadIdx.x < 256) digits_low[threadIdx.x] = digits_high[threadIdx.x] = 0;
            sync_block();
            const uint32_t whole = (row.vocabulary + THREADS - 1) / THREADS * THREADS;
            for (uint32_t id = threadIdx.x; id < whole; id += THREADS) {
                const float logit = id < row.vocabulary ? row.logits[id] : NEGATIVE_INFINITY;
                const uint32_t key = key_of(logit);
                const bool inside = shift == 24 || key >> (shift + 8) == prefix >> (shift + 8);
                const uint64_t weight = inside ? weight_inside(logit) : 0;
                add_digit(key >> shift & 0xff, measure(weight));
            }
            sync_block();
            uint32_t digit = 255;
            for (; digit > 0; --digit) {
                const uint64_t sum = digits_low[digit] | uint64_t(digits_high[digit]) << 32;
                if (target < sum) break;
                target -= sum;
            }
            prefix |= digit << shift;
        }
        // Those before the key, one of those with it, and how many of these come before the one that is
        // wanted.
        uint64_t greater = 0, own = 0;
        for (uint32_t id = threadIdx.x; id < row.vocabulary; id += THREADS) {
            const float logit = row.logits[id];
            const uint32_t key = key_of(logit);
            if (key < prefix || row.bin(logit) != bin) continue;
            const uint64_t weight = row.weight(logit);
            if (key > prefix) greater += weight;
            else own = weight;
        }
        greater = sum_exactly(greater, sums);
        own = largest(own);
        const uint64_t before = target / measure(own);
        const uint32_t id = by_ids(row, {0, row.vocabulary}, before, [&](float logit) {
            return uint64_t(key_of(logit) == prefix);
        });
        return {id, weight_before(bin) + greater + (before + 1) * own};
    }

    // The largest of all threads' numbers.
    __device__ __forceinline__ uint64_t largest(uint64_t number) {
        for (unsigned mask = 16; mask > 0; mask /= 2) number = max_of(number, shuffle_xor(number, mask));
        sync_block();
        if (threadIdx.x % 32 == 0) sums.of_warps[threadIdx.x / 32] = number;
        sync_block();
        for (int i = 0; i < WARPS; ++i) number = max_of(number, sums.of_warps[i]);
        return number;
    }

    // Adds what the lanes of a warp have; where all have one digit, as many equal logits do, at once.
    __device__ __forceinline__ void add_digit(uint32_t digit, uint64_t amount) {
        const uint32_t some = lanes_where(amount > 0);
        if (some == 0) return;
        unsigned lane = 0;
        while (!(some >> lane & 1)) ++lane;
        const uint32_t common = shuffle(digit, lane);
        const bool alike = lanes_where(amount > 0 && digit != common) == 0;
        if (alike) {
            for (unsigned mask = 16; mask > 0; mask /= 2) amount += shuffle_xor(amount, mask);
            if (threadIdx.x % 32 != 0) return;
            digit = common;
        }
        if (amount == 0) return;
        const uint32_t own = uint32_t(amount), carry = atomic_add(&digits_low[digit], own) + own < own;
        if (const uint32_t rest = uint32_t(amount >> 32) + carry) atomic_add(&digits_high[digit], rest);
    }

    // Of these ids in ascending order, the one that takes the sum of `measure(logit)` past `target`. Each
    // warp sums a piece; the piece in which it lies is cut up again.
    template <class Measure>
    __device__ __forceinline__ uint32_t by_ids(const Row& row, Ids ids, uint64_t target, Measure measure) {
        while (ids.end - ids.begin > WARPS) {
            uint64_t sum = 0;
            each_logit<4>(row.logits, ids.piece(threadIdx.x / 32, WARPS), threadIdx.x % 32, 32,
                       [&](uint32_t, float logit) { sum += measure(logit); });
            for (unsigned mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
            sync_block();
            if (threadIdx.x % 32 == 0) sums.of_warps[threadIdx.x / 32] = sum;
            sync_block();
            ids = ids.piece(first_piece(sums.of_warps, WARPS, target), WARPS);
        }
        uint32_t id = ids.begin;
        for (; id + 1 < ids.end; ++id) {
            const uint64_t own = measure(row.logits[id]);
            if (target < own) break;
            target -= own;
        }
        return id;
    }

    // The first of `n` pieces whose sum takes the sum of all before it past `target`, of which these are
    // taken off.
    __device__ __forceinline__ static uint32_t first_piece(const uint64_t* sums, uint32_t n, uint64_t& target) {
        uint32_t piece = 0;
        for (; piece + 1 < n && target >= sums[piece]; ++piece) target -= sums[piece];
        return piece;
    }
};

static_assert(sizeof(Sums) == 16 * WARPS && sizeof(Spread) == sizeof(Sums) + 12 * BINS &&
                  sizeof(Finder) <= sizeof(Sums) + 16 * (BINS + GATHERED) + 8 * 256 + 16 && sizeof(Part) == 32 + 8 * WARPS,
              "`sample.rs` reserves as much");

// The token of a row of which some weigh enough, by its parts' sums.
__device__ __forceinline__ uint32_t choose(const Row& row, const Parameters& by, const Work& work, Finder& finder) {
    uint64_t candidates = 0, total = 0;
    for (uint32_t i = 0; i < work.parts; ++i) candidates += work.part(i).count, total += work.part(i).weights;
    const uint64_t seed = by.seed[0] | uint64_t(by.seed[1]) << 32, position = by.position[0] | uint64_t(by.position[1]) << 32;
    // The upper 53 bits of the hash are a number in [0, 1).
    const uint64_t number = hash_position(position, seed) >> 11 << 11;
    const bool few = by.top_k > 0 && by.top_k < candidates;
    if (!few && by.top_p >= 1.0f) {
        uint64_t target = multiply_high(number, total);
        uint32_t part = 0;
        while (part + 1 < work.parts && target >= work.part(part).weights) target -= work.part(part++).weights;
        const uint32_t piece = Finder::first_piece(work.part(part).of_warps, WARPS, target);
        const Ids ids = Ids{0, row.vocabulary}.piece(part, work.parts).piece(piece, WARPS);
        return finder.by_ids(row, ids, target, [&](float logit) { return row.weight(logit); });
    }
    finder.load(work);
    // The last one that top-k keeps, the last one that top-p keeps of those, and the one that is drawn.
    // `total` is the weight of what is kept.
    uint32_t id = 0;
#pragma unroll 1
    for (int cut = few ? 0 : 1; cut < 3; ++cut) {
        if (cut == 1 && by.top_p >= 1.0f) continue;
        // The last one of top-p is the one that reaches what is wanted, that is, passes one less.
        const uint64_t wanted = uint64_t(double(by.top_p) * double(total));
        const uint64_t target = cut == 0   ? by.top_k - 1
                                : cut == 1 ? wanted - uint64_t(wanted > 0)
                                           : multiply_high(number, total);
        const Finder::Found found = finder.find(row, target, cut == 0);
        id = found.id, total = found.weights;
    }
    return id;
}

// `parameters` one per row; `tokens` and `logprobs` (of the logits given, at temperature 1) one per row;
// `work` as `sample_weights` left it, of `parts` parts a row.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sample(const float* logits, const Parameters* parameters, uint32_t* work, uint32_t* tokens, float* logprobs,
           uint32_t vocabulary, uint32_t parts) {
    follow();
    Finder& finder = *reinterpret_cast<Finder*>(shared_memory());
    const Work from(work, blockIdx.x, parts);
    const Parameters by = parameters[blockIdx.x];
    const float* own = logits + uint64_t(blockIdx.x) * vocabulary;
    const Place best = from.best();
    const Row row = row_of(own, vocabulary, own[best.id], by);
    uint64_t weights_at_1 = 0;
    bool some = false;
    for (uint32_t i = 0; i < parts; ++i)
        weights_at_1 += from.part(i).weights_at_1, some = some || from.part(i).count > 0;
    const uint32_t token = some ? choose(row, by, from, finder) : best.id;
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = token;
        logprobs[blockIdx.x] = own[token] - row.maximum - logf(float(double(weights_at_1) / double(UNIT)));
    }
}

// What the host makes log-probabilities of: the token's logit, the largest, the sum of all weights beside it
// at temperature 1; how many logits are at least the token's; the likeliest ids and their logits, in the
// order in which tokens are kept.
constexpr uint32_t TOP = 20, NOT_WANTED = 0xffffffffu;
struct Score {
    float logit, maximum;
    uint32_t total[2], rank, unused;
    uint32_t ids[TOP];
    float logits[TOP];
};

// As `sample_weights`, for a score, of rows that are wanted; counts by bin are of all ids.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    score_weights(const float* logits, const uint32_t* wanted, const uint32_t* tokens, uint32_t* work, uint32_t vocabulary) {
    follow();
    if (wanted[blockIdx.y] == NOT_WANTED) return;
    Spread& spread = *reinterpret_cast<Spread*>(shared_memory());
    const Work to(work, blockIdx.y, gridDim.x);
    const float* own = logits + uint64_t(blockIdx.y) * vocabulary;
    const Row row{own, vocabulary, own[to.best().id], 1.0f, float(BINS) / SCORED, 1};
    const float token = own[tokens[blockIdx.y]];
    spread.clear();
    const Ids ids = Ids{0, vocabulary}.piece(blockIdx.x, gridDim.x);
    uint64_t weights = 0;
    uint32_t rank = 0;
    each_logit(own, ids, threadIdx.x, THREADS, [&](uint32_t, float logit) {
        weights += row.weight(logit), rank += logit >= token;
        atomic_add(&spread.counts[row.bin(logit)], 1u);
    });
    weights = sum_exactly(weights, spread.sums);
    rank = uint32_t(sum_exactly(rank, spread.sums));
    if (threadIdx.x == 0) {
        Part& part = to.part(blockIdx.x);
        part.weights_at_1 = weights, part.count = rank;
    }
    spread.leave(to.weights(blockIdx.x), to.counts(blockIdx.x));
}

// Of row r as many of the likeliest as `wanted[r]` says, at most TOP; nothing at all if that is NOT_WANTED.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    score(const float* logits, const uint32_t* wanted, const uint32_t* tokens, uint32_t* work, Score* scores,
          uint32_t vocabulary, uint32_t parts) {
    follow();
    const uint32_t top = min_of(wanted[blockIdx.x], vocabulary);
    if (wanted[blockIdx.x] == NOT_WANTED) return;
    Finder& finder = *reinterpret_cast<Finder*>(shared_memory());
    const Work from(work, blockIdx.x, parts);
    const float* own = logits + uint64_t(blockIdx.x) * vocabulary;
    Score& to = scores[blockIdx.x];
    const Row row{own, vocabulary, own[from.best().id], 1.0f, float(BINS) / SCORED, 1};
    if (threadIdx.x == 0) {
        uint64_t total = 0, rank = 0;
        for (uint32_t i = 0; i < parts; ++i) total += from.part(i).weights_at_1, rank += from.part(i).count;
        to.logit = own[tokens[blockIdx.x]], to.maximum = row.maximum, to.rank = uint32_t(rank);
        to.total[0] = uint32_t(total), to.total[1] = uint32_t(total >> 32);
    }
    if (top == 0) return;
    finder.load(from);
    const uint32_t bin = first_above(finder.counts, BINS, top - 1);
    if (finder.counts[bin] <= GATHERED) {
        finder.gather(row, 0, bin, [](float) { return true; });
        if (threadIdx.x < top) {
            const uint32_t id = uint32_t(finder.elements[threadIdx.x]);
            to.ids[threadIdx.x] = id, to.logits[threadIdx.x] = own[id];
        }
        return;
    }
    // Most logits lie in one bin: one after the other.
    Place last = nowhere();
    for (uint32_t i = 0; i < top; ++i) {
        Place best = nowhere();
        for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) {
            const Place place{key_of(own[id]), id};
            if (best.after(place) && (i == 0 || place.after(last))) best = place;
        }
        last = first_over_block(best, finder.sums);
        if (threadIdx.x == 0) to.ids[i] = last.id, to.logits[i] = own[last.id];
    }
}
