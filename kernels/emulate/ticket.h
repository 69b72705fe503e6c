// What `ticket.cuh` wraps, done on the CPU. Blocks run one after another in random order and every store is
// seen at once, so a missing fence shows nowhere here: `kernels/build --check` looks for it.
#pragma once

#include "instructions.h"

inline void fence_device() {}
