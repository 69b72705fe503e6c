// Finds elements of a row by running sums in descending order: among the likeliest that its blocks listed,
// and where the answer lies further on, among all of one bin.
#pragma once

#include "sample_work.cuh"

struct Finder : Common {
    // What was found: an element, and the sum of weights up to and with it.
    struct Found {
        uint32_t id;
        uint64_t weights;
    };

    // Up to and with each bin.
    uint64_t counts[BINS], weights[BINS];
    // The elements from some bin on, whose number is `first`, to the bin `last`; or those of the list.
    Sorted sorted;
    // Of the search by digits.
    uint32_t digits_low[256], digits_high[256];
    uint32_t gathered, first, final, found;
    // The sums of all weights at 1, and of all candidates'; where bins are.
    uint64_t at_1, total;
    const Joint* joint;
    Place chosen;
    // Elements of the list, 0 if it is not there or no longer; whether bins were made.
    uint32_t listed, has_bins;

    __device__ __forceinline__ uint64_t count_before(uint32_t bin) const {
        return bin > 0 ? counts[bin - 1] : 0;
    }
    __device__ __forceinline__ uint64_t weight_before(uint32_t bin) const {
        return bin > 0 ? weights[bin - 1] : 0;
    }

    // Brings the row's list of `n` into order; this thread has `own` of them, and what comes after all
    // threads'.
    __device__ __forceinline__ void take_list(const Joint& joint, uint32_t n, Place own) {
        if (n > GATHERED) n = 0;
        if (threadIdx.x == 0) listed = n;
        if (threadIdx.x < n) sorted.elements[threadIdx.x] = own;
        for (uint32_t i = threadIdx.x + THREADS; i < n; i += THREADS) sorted.elements[i] = joint.list[i];
        sorted.sort(n);
    }

    // Goes on by bins. Where none were made all is one, which is too much to sort.
    __device__ __forceinline__ void take_bins() {
        sync_block();
        for (uint32_t bin = threadIdx.x; bin < BINS; bin += THREADS) {
            counts[bin] = has_bins ? joint->bin_counts[bin] : uint64_t(1) << 32;
            weights[bin] = has_bins ? joint->bin_weights[bin] : ~uint64_t(0);
        }
        if (has_bins) {
            make_running(counts, BINS, sums);
            make_running(weights, BINS, sums);
        }
        if (threadIdx.x == 0) {
            listed = 0, first = 1, final = 0;
            if (!has_bins) row.bins = 0.0f;
        }
        sync_block();
    }

    // Gathers and sorts the candidates of the bins `from` to `to`; they must be at most GATHERED.
    __device__ __forceinline__ void gather(uint32_t from, uint32_t to) {
        sync_block();
        if (threadIdx.x == 0) gathered = 0, first = from, final = to;
        sync_block();
        // Most elements lie below these bins, which one comparison says.
        const bool has_end = to < BINS - 1 && row.maximum < -NEGATIVE_INFINITY;
        each_logit<2>(row.logits, {0, row.vocabulary}, threadIdx.x, THREADS, [&](uint32_t id, float logit) {
            if (has_end && (row.maximum - logit) * row.bins >= float(to + 1)) return;
            const uint32_t bin = row.bin(logit);
            if (bin < from || bin > to || row.weight(logit) == 0) return;
            const uint32_t at = atomic_add(&gathered, 1u);
            if (at < GATHERED) sorted.elements[at] = place_of(logit, id);
        });
        sync_block();
        const uint32_t n = min_of(gathered, GATHERED);
        sorted.sort(n);
        sorted.weigh(row, n, sums);
    }

    // Brings the bin's elements, and if they are few those of all bins before. False if even its own are too
    // many.
    __device__ __forceinline__ bool bring(uint32_t bin) {
        if (first <= bin && bin <= final) return true;
        const uint32_t from = counts[bin] <= GATHERED ? 0 : bin;
        if (counts[bin] - count_before(from) > GATHERED) return false;
        gather(from, bin);
        return true;
    }

    // The candidate that takes the running sum, of weights or of ones for a count, past `target`: by bins.
    __device__ __forceinline__ Found find(uint64_t target, bool by_count) {
        const uint64_t* sums_by_bin = by_count ? counts : weights;
        const uint32_t bin = first_above(sums_by_bin, BINS, target);
        const bool brought = bring(bin);
        const uint32_t from = brought ? first : bin;
        target -= from > 0 ? sums_by_bin[from - 1] : 0;
        if (!brought) return by_digits(bin, target, by_count);
        const uint32_t at = by_count ? uint32_t(target) : first_above(sorted.running, gathered, target);
        return {id_of(sorted.elements[at]), weight_before(first) + sorted.running[at]};
    }

    // The same among the candidates of one bin that has too many to sort: a descent over the keys' digits in
    // four passes, then the id among equals.
    __device__ __forceinline__ Found by_digits(uint32_t bin, uint64_t target, bool by_count) {
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
        uint64_t greater = threadIdx.x == 0 ? weight_before(bin) : 0, own = 0;
        for (uint32_t id = threadIdx.x; id < row.vocabulary; id += THREADS) {
            const float logit = row.logits[id];
            const uint32_t key = key_of(logit);
            if (key < prefix || row.bin(logit) != bin) continue;
            const uint64_t weight = row.weight(logit);
            if (key > prefix) greater += weight;
            else own = weight;
        }
        greater = sum_exactly(greater, sums);
        own = largest(own, sums);
        const uint64_t before = target / measure(own);
        const uint32_t id = by_ids({0, row.vocabulary}, before, [&](float logit) {
            return uint64_t(key_of(logit) == prefix);
        });
        return {id, greater + (before + 1) * own};
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
            amount = sum_over_warp(amount);
            if (threadIdx.x % 32 != 0) return;
            digit = common;
        }
        if (amount == 0) return;
        const uint32_t own = uint32_t(amount), carry = atomic_add(&digits_low[digit], own) + own < own;
        if (const uint32_t rest = uint32_t(amount >> 32) + carry) atomic_add(&digits_high[digit], rest);
    }

    // Of these ids in ascending order, the one that takes the sum of `measure(logit)` past `target`. Each
    // warp sums a piece; the piece in which it lies is cut up again, until every id has a thread.
    template <class Measure>
    __device__ __forceinline__ uint32_t by_ids(Ids ids, uint64_t target, Measure measure) {
        while (ids.end - ids.begin > THREADS) {
            uint64_t sum = 0;
            each_logit<2>(row.logits, ids.piece(threadIdx.x / 32, WARPS), threadIdx.x % 32, 32,
                          [&](uint32_t, float logit) { sum += measure(logit); });
            sum = sum_over_warp(sum);
            sync_block();
            if (threadIdx.x % 32 == 0) sums.of_warps[threadIdx.x / 32] = sum;
            sync_block();
            uint32_t piece = 0;
            for (; piece + 1 < WARPS && target >= sums.of_warps[piece]; ++piece)
                target -= sums.of_warps[piece];
            ids = ids.piece(piece, WARPS);
        }
        const uint32_t id = ids.begin + threadIdx.x;
        const uint64_t own = id < ids.end ? measure(row.logits[id]) : 0;
        if (threadIdx.x == 0) found = ids.end - 1;
        const uint64_t sum = running_sum(own, sums);
        if (target < sum && target >= sum - own) found = id;
        sync_block();
        return found;
    }
};
