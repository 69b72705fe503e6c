// What `bulk.cuh` wraps, done on the CPU (PTX ISA 9.0, sections 9.7.13.15 "mbarrier" and 9.7.9.25
// "cp.async.bulk"). A copy happens at once, at some later moment, or when no thread can go on without it.
#pragma once

#include "instructions.h"

constexpr bool HAS_BULK_COPIES = true;

namespace emulate {

inline Barrier& barrier_at(const uint64_t* address) {
    auto found = block->memory_barriers.find(address);
    if (found == block->memory_barriers.end()) fail("a barrier in shared memory that was not initialised");
    return found->second;
}

inline void end_phase(Barrier& barrier) {
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
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % 16 != 0)
        emulate::fail("bulk_copy: not aligned to 16 bytes");
    if (bytes == 0) emulate::fail("bulk_copy: of nothing");
    emulate::Barrier* state = &emulate::barrier_at(barrier);
    auto copy = [=] {
        std::memcpy(shared, global, bytes);
        state->bytes -= bytes;
        emulate::end_phase(*state);
    };
    if (emulate::happens_at_once()) copy();
    else emulate::block->copies.push_back(copy);
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
