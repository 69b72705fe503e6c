// One launch on the CPU, and the buffers that it works on. Every buffer ends (or begins) at a page that may
// not be touched, and what lies between holds a pattern: an access outside a buffer is an error.
#pragma once

#include <algorithm>
#include <csignal>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

namespace emulate {

constexpr size_t PAGE = 4096;
// The most that a kernel may rely on: 16 bytes of a global buffer, and what a swizzled tile needs of shared
// memory.
constexpr size_t GLOBAL_ALIGNMENT = 16, SHARED_ALIGNMENT = 1024;
constexpr unsigned char PATTERN = 0xa5, POISON = 0xff;

struct Buffer {
    unsigned char *pages = nullptr, *data = nullptr;
    size_t page_bytes = 0, bytes = 0;

    // `file`: what the pages are shared through, or none; as long as `page_bytes_of(size)`.
    Buffer(size_t size, bool at_end, size_t alignment, int file = -1) : bytes(size) {
        page_bytes = page_bytes_of(size);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS;
        void* all = mmap(nullptr, page_bytes + 2 * PAGE, PROT_NONE, flags, -1, 0);
        if (all == MAP_FAILED) fail("out of memory");
        pages = static_cast<unsigned char*>(all) + PAGE;
        if (file >= 0) mmap(pages, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
        else mprotect(pages, page_bytes, PROT_READ | PROT_WRITE);
        std::memset(pages, PATTERN, page_bytes);
        data = at_end ? pages + page_bytes - (size + alignment - 1) / alignment * alignment : pages;
        std::memset(data, POISON, bytes);
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { munmap(pages - PAGE, page_bytes + 2 * PAGE); }

    static size_t page_bytes_of(size_t size) { return (size + PAGE - 1) / PAGE * PAGE + PAGE; }

    // Around what it holds, which may be much.
    void check() const {
        check(pages, data);
        check(data + bytes, pages + page_bytes);
    }
    static void check(const unsigned char* p, const unsigned char* end) {
        for (; p < end; ++p)
            if (*p != PATTERN) fail("a kernel wrote outside of a buffer");
    }
};

inline void on_fault(int) {
    const char message[] = "emulator: a kernel touched memory outside of its buffers\n";
    if (write(2, message, sizeof message - 1)) {
    }
    _exit(3);
}

// Has a fault end the process with a reason.
inline void catch_faults() {
    static char fault_stack[1 << 16];
    stack_t stack{};
    stack.ss_sp = fault_stack, stack.ss_size = sizeof fault_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action{};
    action.sa_handler = on_fault, action.sa_flags = SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

// Clusters that are there at once, at most: some launches have one, others two or three. A block without
// others is a cluster of one.
constexpr size_t RESIDENT_MAX = 3;

// Room for a cluster, and its blocks' shared memory.
struct Place {
    Block blocks[CLUSTER_MAX];
    Cluster cluster;
    std::vector<std::unique_ptr<Buffer>> shared;

    void make_room(size_t count, size_t shared_bytes) {
        cluster.blocks.clear(), shared.clear();
        for (size_t i = 0; i < count; ++i) {
            cluster.blocks.push_back(&blocks[i]);
            shared.push_back(std::make_unique<Buffer>(shared_bytes, random.coin(), SHARED_ALIGNMENT));
        }
    }
    // Blocks of a cluster lie beside each other along x.
    void begin(Dim first) {
        cluster.meeting = Meeting{};
        cluster.ahead = shared.size() > 1 ? random.below(2 * shared.size()) : 0;
        for (unsigned i = 0; i < shared.size(); ++i) {
            std::memset(shared[i]->data, POISON, shared[i]->bytes);
            emulate::begin(cluster, i, {first.x + i, first.y, first.z}, shared[i]->data);
        }
    }
    // How many bytes from the beginning on the blocks have used, `used` or more.
    size_t used(size_t used) const {
        for (const auto& one : shared) {
            one->check();
            size_t here = one->bytes;
            while (here > used && one->data[here - 1] == POISON) --here;
            used = std::max(used, here);
        }
        return used;
    }
};

// The first blocks of a grid's clusters, in the order in which they begin.
inline std::vector<Dim> order_of(Dim grid, unsigned cluster) {
    if (cluster == 0 || cluster > CLUSTER_MAX) fail("a cluster of no blocks, or of too many");
    if (grid.x % cluster != 0) fail("a grid that is not made of whole clusters");
    std::vector<Dim> order;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; x += cluster) order.push_back({x, y, z});
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    return order;
}

// Runs a grid of clusters of so many blocks, its blocks and threads in an order that `seed` decides; how many
// bytes at the end of its shared memory no block has written.
inline size_t run_grid(const Kernel& kernel, Dim grid, unsigned cluster, Dim threads, size_t shared_bytes,
                       uint64_t seed, const uint64_t* arguments) {
    gridDim = grid, blockDim = threads;
    random.state = seed;
    body = [&] { kernel.call(arguments); };
    const std::vector<Dim> order = order_of(grid, cluster);
    static Place places[RESIDENT_MAX];
    std::vector<Place*> resident;
    size_t next = 0, used = 0;
    const size_t at_once = std::min<size_t>(1 + random.below(RESIDENT_MAX), order.size());
    for (size_t i = 0; i < at_once; ++i) {
        places[i].make_room(cluster, shared_bytes);
        places[i].begin(order[next++]);
        resident.push_back(&places[i]);
    }
    while (!resident.empty()) {
        const size_t i = random.below(resident.size());
        Place& place = *resident[i];
        step(place.cluster);
        if (!has_ended(place.cluster)) continue;
        used = place.used(used);
        if (next < order.size()) place.begin(order[next++]);
        else resident.erase(resident.begin() + i);
    }
    for (Place& place : places) place.shared.clear();
    return shared_bytes - used;
}

}  // namespace emulate
