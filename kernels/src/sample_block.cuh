// What the threads of a block find out together: sums, running sums, and an order.
#pragma once

#include "sample_row.cuh"

// Elements that are sorted at once: `sample.rs` reserves memory for them.
constexpr uint32_t GATHERED = 2048;
// So few are sorted by counting, in one step.
constexpr uint32_t COUNTED = 256;

// What warps exchange.
struct Sums {
    uint64_t of_warps[WARPS];
};

__device__ __forceinline__ uint64_t sum_over_warp(uint64_t value) {
    for (unsigned mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

// The sum over the block, in every thread.
__device__ __forceinline__ uint64_t sum_exactly(uint64_t value, Sums& sums) {
    value = sum_over_warp(value);
    sync_block();
    if (threadIdx.x % 32 == 0) sums.of_warps[threadIdx.x / 32] = value;
    sync_block();
    return sum_over_warp(threadIdx.x % 32 < WARPS ? sums.of_warps[threadIdx.x % 32] : 0);
}

// The largest of all threads' numbers, in every thread.
__device__ __forceinline__ uint64_t largest(uint64_t number, Sums& sums) {
    auto over_warp = [](uint64_t number) {
        for (unsigned mask = 16; mask > 0; mask /= 2) number = max_of(number, shuffle_xor(number, mask));
        return number;
    };
    number = over_warp(number);
    sync_block();
    if (threadIdx.x % 32 == 0) sums.of_warps[threadIdx.x / 32] = number;
    sync_block();
    return over_warp(threadIdx.x % 32 < WARPS ? sums.of_warps[threadIdx.x % 32] : 0);
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
    return value + sum_over_warp(lane < warp ? sums.of_warps[lane] : 0);
}

// Makes each of `n` numbers the sum of itself and all before it.
__device__ __forceinline__ void make_running(uint64_t* numbers, uint32_t n, Sums& sums) {
    sync_block();
    const uint32_t each = (n + THREADS - 1) / THREADS;
    const uint32_t first = min_of(n, threadIdx.x * each), end = min_of(n, first + each);
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

// Elements of a row in order, and the sums of weights up to and with each.
struct Sorted {
    Place elements[GATHERED];
    uint64_t running[GATHERED];

    // Brings `n` elements, which threads have put here, into order.
    __device__ __forceinline__ void sort(uint32_t n) {
        sync_block();
        if (n <= COUNTED) by_counting(n);
        else by_exchanges(n);
        sync_block();
    }

    // No two are equal, so that each one's number is how many come before it.
    __device__ __forceinline__ void by_counting(uint32_t n) {
        const Place own = threadIdx.x < n ? elements[threadIdx.x] : NOWHERE;
        uint32_t before = 0;
        if (threadIdx.x < n)
#pragma unroll 8
            for (uint32_t i = 0; i < n; ++i) before += elements[i] < own;
        sync_block();
        if (threadIdx.x < n) elements[before] = own;
    }

    // A bitonic network (Batcher 1968). A warp's pairs lie among the same 64 elements as long as they are at
    // most 32 apart: nobody else waits for these.
    __device__ __forceinline__ void by_exchanges(uint32_t n) {
        uint32_t size = COUNTED;
        while (size < n) size *= 2;
        for (uint32_t i = n + threadIdx.x; i < size; i += THREADS) elements[i] = NOWHERE;
        sync_block();
        for (uint32_t run = 2; run <= size; run *= 2) {
            for (uint32_t apart = run / 2; apart > 0; apart /= 2) {
                for (uint32_t pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                    const uint32_t low = pair / apart * apart * 2 + pair % apart, high = low + apart;
                    const Place a = elements[low], b = elements[high];
                    if ((a > b) == ((low & run) == 0)) elements[low] = b, elements[high] = a;
                }
                // What comes next is `apart / 2` apart, or from one end of a run to the other.
                if (apart > 32 || (apart == 1 && run >= 64)) sync_block();
                else sync_warp();
            }
        }
    }

    // Once they are sorted.
    __device__ __forceinline__ void weigh(const Row& row, uint32_t n, Sums& sums) {
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) running[i] = row.weight(logit_of(elements[i]));
        make_running(running, n, sums);
    }
};
