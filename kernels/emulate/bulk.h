// What `bulk.cuh` wraps, done on the CPU (PTX ISA 9.0, sections 9.7.13.15 "mbarrier" and 9.7.9.25
// "cp.async.bulk"). A copy happens at once, at some later moment, or when no thread can go on without it.
#pragma once

#include "instructions.h"

constexpr bool HAS_BULK_COPIES = true;

namespace emulate {

inline Barrier& barrier_at(Block& of, const uint64_t* address) {
    auto found = of.memory_barriers.find(address);
    if (found == of.memory_barriers.end()) fail("a barrier in shared memory that was not initialised");
    return found->second;
}
inline Barrier& barrier_at(const uint64_t* address) { return barrier_at(*block, address); }

inline void end_phase(Barrier& barrier) {
    if (barrier.left == 0 && barrier.bytes < 0) fail("more bytes come to a barrier than were announced to it");
    if (barrier.left > 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.left = barrier.arrivals;
    wake(barrier.sleepers);
}

inline void arrive(Barrier& barrier, int64_t bytes) {
    if (barrier.left == 0) fail("more arrivals at a barrier than it counts");
    --barrier.left;
    barrier.bytes += bytes;
    end_phase(barrier);
}

// A bulk copy may come at any time from now on: whatever product may still read there would see it.
inline void begin_to_fill(const Block& to, const Range& range) {
    for (const Warpgroup& group : to.warpgroups) {
        auto reads = [&](const std::vector<Range>& ranges) {
            for (const Range& read : ranges)
                if (read.meets(range)) fail("a bulk copy into what a matrix product may still read");
        };
        reads(group.reads);
        for (const auto& ranges : group.reads_committed) reads(ranges);
    }
}

inline Range range_in(const Block& of, const void* shared, uint32_t bytes) {
    const size_t begin = static_cast<const unsigned char*>(shared) - of.shared;
    return {begin, begin + bytes};
}

inline void check_bulk_copy(const void* shared, const void* global, uint32_t bytes) {
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % 16 != 0)
        fail("bulk_copy: not aligned to 16 bytes");
    if (bytes == 0) fail("bulk_copy: of nothing");
}

// Starts a copy to a block, which arrives at its barrier.
inline void copy_to(Block& to, void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    begin_to_fill(to, range_in(to, shared, bytes));
    Barrier* state = &barrier_at(to, barrier);
    auto copy = [=] {
        std::memcpy(shared, global, bytes);
        state->bytes -= bytes;
        end_phase(*state);
    };
    if (happens_at_once()) copy();
    else to.copies.push_back(copy);
}

}  // namespace emulate

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0) emulate::fail("barrier_init: not aligned to 8 bytes");
    if (emulate::block->memory_barriers.count(barrier)) emulate::fail("a barrier is initialised twice");
    *barrier = 0;  // it lies in shared memory, or this faults
    emulate::Barrier fresh;
    fresh.arrivals = fresh.left = arrivals;
    emulate::block->memory_barriers[barrier] = fresh;
}
inline void fence_barriers() {}

inline void barrier_arrive(uint64_t* barrier) { emulate::arrive(emulate::barrier_at(barrier), 0); }
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    emulate::arrive(emulate::barrier_at(barrier), bytes);
}

// Who is woken looks again: a thread that is two phases late waits for ever, as it would on a GPU.
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    emulate::Barrier& state = emulate::barrier_at(barrier);
    while ((state.phase & 1) == parity) emulate::sleep(state.sleepers, "barrier_wait");
    if (emulate::random.coin()) emulate::yield();
}

inline void barrier_arrive(uint32_t barrier) {
    barrier_arrive(reinterpret_cast<uint64_t*>(shared_memory() + barrier));
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    barrier_wait(reinterpret_cast<uint64_t*>(shared_memory() + barrier), parity);
}

inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    emulate::check_bulk_copy(shared, global, bytes);
    emulate::copy_to(*emulate::block, shared, global, bytes, barrier);
}

// Each thread's copies end as one, at another moment than its neighbours'.
inline void copies_arrive(uint64_t* barrier) {
    emulate::Barrier* state = &emulate::barrier_at(barrier);
    if (!emulate::current->committed.empty()) emulate::fail("copies_arrive: copies were committed to a group");
    auto arrive = [copies = std::move(emulate::current->gathering), state]() mutable {
        emulate::run_all(copies);
        emulate::arrive(*state, 0);
    };
    emulate::current->gathering.clear();
    if (emulate::happens_at_once()) arrive();
    else emulate::block->copies.push_back(arrive);
}

inline void sync_some(uint32_t id, uint32_t threads) {
    if (id == 0 || id > 15 || threads % 32 != 0) emulate::fail("sync_some: no such barrier");
    emulate::meet(emulate::block->barriers[id], threads, "sync_some", [] {});
}

template <int REGISTERS>
void fewer_registers() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "");
}
template <int REGISTERS>
void more_registers() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "");
}
