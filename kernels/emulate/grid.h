// Runs a CUDA grid on the CPU for tests: every CUDA thread is a fiber, some blocks are there at once, all of
// a cluster among them, and whoever may run is chosen at random, so that a missing barrier shows as a wrong
// result under some seed, and a block that waits for one that may never come as a deadlock. One
// operating-system thread runs all of it: what real hardware does at once here happens in some order. Not for
// speed, and no model of time.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulate {

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};

[[noreturn]] inline void fail(const char* what, const char* detail = "") {
    std::fprintf(stderr, "emulator: %s %s\n", what, detail);
    std::fflush(nullptr);
    std::_Exit(3);
}

// splitmix64 (Steele, Lea, Flood 2014): the order in which threads run is a function of the launch's seed.
struct Random {
    uint64_t state = 0;
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    uint64_t below(uint64_t n) { return next() % n; }
    bool coin() { return next() & 1; }
};

using Work = std::function<void()>;
struct Block;

// One CUDA thread.
struct Fiber {
    Block* home = nullptr;
    std::unique_ptr<char[]> stack;
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    Dim index;
    unsigned rank = 0;
    bool finished = false;
    const char* sleeps_in = "";
    // cp.async: copies of the group being gathered, and of committed groups, oldest first.
    std::vector<Work> gathering;
    std::deque<std::vector<Work>> committed;
};

// Where `size` fibers wait for each other. The last one to come acts for all of them.
struct Meeting {
    unsigned arrived = 0;
    const char* what = "";
    std::vector<Fiber*> sleepers;
};

struct Warp {
    Meeting meeting;
    uint64_t given[32], taken[32];
    void* registers[32];
};

// Bytes of a block's shared memory, from its beginning.
struct Range {
    size_t begin, end;
    bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// Four warps, whose matrix products run behind their backs.
struct Warpgroup {
    Meeting meeting;
    std::vector<uint64_t> given;
    std::vector<Work> gathering;
    std::deque<std::vector<Work>> committed;
    // What products that nobody has waited for may still read, by groups like those, though they be done.
    std::vector<Range> reads;
    std::deque<std::vector<Range>> reads_committed;
    void finish(size_t left) {
        while (committed.size() > left) {
            for (Work& one : committed.front()) one();
            committed.pop_front();
        }
    }
};

// A barrier in shared memory: arrivals that its phase still lacks, and bytes announced or come too early.
struct Barrier {
    unsigned arrivals = 0, left = 0, phase = 0;
    int64_t bytes = 0;
    std::vector<Fiber*> sleepers;
};

// Blocks that run at once, and know each other by their number in it.
struct Cluster {
    std::vector<Block*> blocks;
    Meeting meeting;
    // The block that goes on whenever it can, so that others begin late; a number that no block has: none.
    size_t ahead = 0;
};

// What a copy from a block of a cluster brought into this one's shared memory.
struct Fill {
    Range range;
    bool is_read;
};

struct Block {
    Dim index;
    Cluster* cluster = nullptr;
    unsigned number = 0;  // in its cluster
    std::vector<Fill> fills;
    std::vector<Fiber> fibers;
    std::vector<Fiber*> runnable;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    Meeting barriers[16];
    std::map<const void*, Barrier> memory_barriers;
    // What is under way to this block: bulk copies, and arrivals of its cluster's other blocks.
    std::vector<Work> copies, arrivals;
    unsigned char* shared = nullptr;
    unsigned unfinished = 0;
    bool can_go_on() const { return !runnable.empty() || is_awaiting(); }
    bool is_awaiting() const { return !copies.empty() || !arrivals.empty(); }
};

inline Block* block;
inline Fiber* current;
inline Random random;
inline Work body;
inline Dim threadIdx, blockIdx, blockDim, gridDim;

// === switching between the scheduler and a fiber ===

#if defined(__x86_64__)
inline void* scheduler_stack_pointer;
extern "C" void emulate_switch(void** from, void* to);
asm(R"(
.text
.weak emulate_switch
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
inline void to_scheduler() { emulate_switch(&current->stack_pointer, scheduler_stack_pointer); }
inline void to_fiber(Fiber& fiber) { emulate_switch(&scheduler_stack_pointer, fiber.stack_pointer); }
#else
inline ucontext_t scheduler_context;
inline void to_scheduler() { swapcontext(&current->context, &scheduler_context); }
inline void to_fiber(Fiber& fiber) { swapcontext(&scheduler_context, &fiber.context); }
#endif

constexpr size_t STACK_BYTES = 64 << 10;

inline void run_all(std::vector<Work>& work) {
    for (Work& one : work) one();
    work.clear();
}

[[noreturn]] inline void fiber_main() {
    body();
    for (auto& group : current->committed) run_all(group);
    run_all(current->gathering);
    current->finished = true;
    --block->unfinished;
    to_scheduler();
    fail("a finished thread ran on");
}

inline void start(Fiber& fiber) {
    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
#if defined(__x86_64__)
    auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + STACK_BYTES) & ~uintptr_t{63};
    auto stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;  // fiber_main returns nowhere; keeps the alignment that a call leaves
    *--stack = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; ++i) *--stack = nullptr;
    fiber.stack_pointer = stack;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&fiber_main), 0);
#endif
}

// === what threads do with each other ===

inline void yield() {
    block->runnable.push_back(current);
    to_scheduler();
}

inline void wake(std::vector<Fiber*>& sleepers) {
    for (Fiber* fiber : sleepers) fiber->home->runnable.push_back(fiber);
    sleepers.clear();
}

inline void sleep(std::vector<Fiber*>& sleepers, const char* what) {
    current->sleeps_in = what;
    sleepers.push_back(current);
    to_scheduler();
}

// Returns when `size` fibers have called it; `act` runs once, before any of them goes on.
template <class Act>
void meet(Meeting& meeting, unsigned size, const char* what, Act act) {
    if (meeting.arrived == 0) meeting.what = what;
    if (std::strcmp(meeting.what, what) != 0) fail("threads of one warp diverge:", what);
    if (++meeting.arrived < size) return sleep(meeting.sleepers, what);
    meeting.arrived = 0;
    act();
    wake(meeting.sleepers);
    if (random.coin()) yield();
}

inline unsigned lane() { return current->rank % 32; }
inline Warp& warp() { return block->warps[current->rank / 32]; }

// Asynchronous work happens at once or when it is waited for: a kernel must be right either way.
inline bool happens_at_once() { return random.coin(); }

// === the scheduler ===

// Bulk copies and arrivals end in any order.
inline void finish_one() {
    const bool arrives = block->copies.empty() || (!block->arrivals.empty() && random.coin());
    std::vector<Work>& works = arrives ? block->arrivals : block->copies;
    size_t i = random.below(works.size());
    Work work = std::move(works[i]);
    works[i] = std::move(works.back());
    works.pop_back();
    work();
}

[[noreturn]] inline void fail_asleep(const Cluster& cluster) {
    for (const Block* b : cluster.blocks) {
        for (const Fiber& f : b->fibers) {
            if (f.finished) continue;
            std::fprintf(stderr, "emulator: block %u, thread %u sleeps in %s\n", b->number, f.rank, f.sleeps_in);
        }
    }
    fail("deadlock: the threads of a block or cluster wait for each other");
}

// Lets one of the block's threads go on, or one of its copies end.
inline void step(Block& b) {
    block = &b;
    blockIdx = b.index;
    if (b.is_awaiting() && (b.runnable.empty() || random.below(256) == 0)) return finish_one();
    size_t i = random.below(b.runnable.size());
    current = b.runnable[i];
    b.runnable[i] = b.runnable.back();
    b.runnable.pop_back();
    threadIdx = current->index;
    to_fiber(*current);
    if (b.unfinished == 0 && b.is_awaiting()) fail("a block ended before its bulk copies, or others' arrivals");
}

// The same of any block of a cluster that can.
inline void step(Cluster& cluster) {
    const size_t count = cluster.blocks.size();
    const size_t first = cluster.ahead < count ? cluster.ahead : random.below(count);
    for (size_t i = 0; i < count; ++i) {
        Block& b = *cluster.blocks[(first + i) % count];
        if (b.can_go_on()) return step(b);
    }
    fail_asleep(cluster);
}

inline bool has_ended(const Cluster& cluster) {
    for (const Block* b : cluster.blocks)
        if (b->unfinished > 0) return false;
    return true;
}

// Begins a block of a cluster; `shared` has been filled with poison.
inline void begin(Cluster& cluster, unsigned number, Dim index, unsigned char* shared) {
    Block& b = *cluster.blocks[number];
    unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    b.index = index, b.cluster = &cluster, b.number = number;
    b.fills.clear();
    b.fibers.resize(threads);
    b.warps.assign((threads + 31) / 32, Warp{});
    b.warpgroups.assign((threads + 127) / 128, Warpgroup{});
    for (Meeting& barrier : b.barriers) barrier = Meeting{};
    b.memory_barriers.clear();
    b.copies.clear(), b.arrivals.clear();
    b.shared = shared;
    b.unfinished = threads;
    b.runnable.clear();
    for (unsigned rank = 0; rank < threads; ++rank) {
        Fiber& fiber = b.fibers[rank];
        fiber.home = &b;
        fiber.rank = rank;
        fiber.index = {rank % blockDim.x, rank / blockDim.x % blockDim.y, rank / (blockDim.x * blockDim.y)};
        fiber.finished = false;
        fiber.gathering.clear();
        fiber.committed.clear();
        start(fiber);
        b.runnable.push_back(&fiber);
    }
}

}  // namespace emulate
