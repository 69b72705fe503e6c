// What `cluster.cuh` wraps, done on the CPU (PTX ISA 9.0, sections 9.7.13.4 "barrier.cluster", 9.7.9.23
// "mapa", and as in `bulk.h`). What one block does to another comes at once or later, and never to a block
// that has ended.
#pragma once

#include "bulk.h"

namespace emulate {

// The most blocks that a cluster of any device may have.
constexpr unsigned CLUSTER_MAX = 8;

inline Block& block_of_cluster(uint32_t number) {
    if (number >= block->cluster->blocks.size()) fail("a cluster has no such block");
    Block& other = *block->cluster->blocks[number];
    if (other.unfinished == 0) fail("a block reaches into another one's memory, which has ended");
    return other;
}

// What lies in the other block's shared memory where `here` does in this one's.
template <class T>
T* there(const Block& other, T* here) {
    const size_t at = reinterpret_cast<unsigned char*>(here) - block->shared;
    return reinterpret_cast<T*>(other.shared + at);
}

// What a copy brought must have been read before the next one comes to its place.
inline void note_fill(Block& to, const Range& range) {
    for (Fill& fill : to.fills) {
        if (!fill.range.meets(range)) continue;
        if (!fill.is_read) fail("a copy to a cluster's block into what was not read there yet");
        fill = {range, false};
        return;
    }
    to.fills.push_back({range, false});
}

}  // namespace emulate

inline uint32_t block_in_cluster() { return emulate::block->number; }

inline void sync_cluster() {
    emulate::Cluster& cluster = *emulate::block->cluster;
    const size_t threads = cluster.blocks.size() * emulate::block->fibers.size();
    // It releases: arrivals are done before, unlike bulk copies.
    emulate::meet(cluster.meeting, threads, "sync_cluster", [&cluster] {
        for (emulate::Block* b : cluster.blocks) emulate::run_all(b->arrivals);
    });
}

inline void barrier_arrive_at(uint64_t* barrier, uint32_t block) {
    emulate::Block& other = emulate::block_of_cluster(block);
    emulate::Barrier* state = &emulate::barrier_at(other, emulate::there(other, barrier));
    auto arrive = [=] { emulate::arrive(*state, 0); };
    if (&other == emulate::block || emulate::happens_at_once()) arrive();
    else other.arrivals.push_back(arrive);
}

inline void bulk_copy_to(uint32_t blocks, void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    emulate::check_bulk_copy(shared, global, bytes);
    for (uint32_t number = 0; blocks >> number != 0; ++number) {
        if ((blocks >> number & 1) == 0) continue;
        emulate::Block& other = emulate::block_of_cluster(number);
        void* target = emulate::there(other, static_cast<unsigned char*>(shared));
        emulate::note_fill(other, emulate::range_in(other, target, bytes));
        emulate::copy_to(other, target, global, bytes, emulate::there(other, barrier));
    }
}
