// What `system.cuh` wraps, done on the CPU. One thread runs at a time and every store is seen at once, so a
// missing fence shows nowhere here; the clock is no time but a count of how often it was asked, on which
// other devices' writes may wait.
#pragma once

#include "instructions.h"

inline uint32_t load_acquire(const uint32_t* p) {
    if (emulate::random.coin()) emulate::yield();
    return *static_cast<const volatile uint32_t*>(p);
}

inline void store_relaxed(uint32_t* p, uint32_t value) { *static_cast<volatile uint32_t*>(p) = value; }

inline void fence_system() {}

namespace emulate {

// A word that another device writes when the clock has come so far.
struct Late {
    uint32_t* at;
    uint32_t value;
    uint64_t when;
};
inline std::vector<Late> late;
inline uint64_t now = 0;

}  // namespace emulate

// A microsecond a question.
inline uint64_t nanoseconds() {
    emulate::now += 1000;
    std::vector<emulate::Late> waiting;
    for (const emulate::Late& write : emulate::late) {
        if (write.when <= emulate::now) *write.at = write.value;
        else waiting.push_back(write);
    }
    emulate::late = waiting;
    return emulate::now;
}

// A launch that only the emulator knows: the word is written while a later one waits for it.
inline void write_later(uint32_t* at, uint32_t value, uint32_t microseconds) {
    if (threadIdx.x == 0) emulate::late.push_back({at, value, emulate::now + microseconds * uint64_t(1000)});
}

inline uint32_t lanes_like(uint32_t value) {
    exchange(value, 0, "lanes_like");
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t(emulate::warp().taken[lane] == value) << lane;
    return bits;
}
