// What `ticket.cuh` wraps, done on the CPU. One thread runs at a time and every store is seen at once, so a
// missing fence shows nowhere here: `kernels/build --check` looks for it.
#pragma once

#include "instructions.h"

inline void fence_device() {}

namespace emulate {

// How often a block had to wait for others, and turns after which it does so in vain.
inline uint64_t waits = 0;
constexpr uint64_t TURNS_MAX = 50'000'000;

}  // namespace emulate

inline void wait_until(const uint32_t* p, uint32_t count) {
    for (uint64_t turn = 0; *static_cast<const volatile uint32_t*>(p) < count; ++turn) {
        if (turn == 0) ++emulate::waits;
        if (turn == emulate::TURNS_MAX) emulate::fail("a block waits in vain for others");
        emulate::yield();
    }
}
