// What `wide_sm90.cuh` wraps beyond `instructions.h`: stmatrix (PTX ISA 9.0, section 9.7.14.5.16).
#pragma once

#include "instructions.h"

// The mirror of `load_matrix_transposed`.
inline void store_matrix_transposed(const uint32_t (&from)[4], void* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulate::fail("store_matrix: not aligned to 16 bytes");
    struct Mine {
        const uint32_t* from;
        unsigned char* row;
    } mine{from, static_cast<unsigned char*>(row)};
    emulate::Warp& warp = emulate::warp();
    warp.registers[emulate::lane()] = &mine;
    emulate::meet(warp.meeting, 32, "store_matrix transposed", [&warp] {
        auto at = [&warp](unsigned lane) { return static_cast<Mine*>(warp.registers[lane]); };
        for (unsigned lane = 0; lane < 32; ++lane) {
            for (unsigned i = 0; i < 4; ++i) {
                for (unsigned j = 0; j < 2; ++j) {
                    const uint16_t element = at(lane)->from[i] >> (16 * j);
                    std::memcpy(at(8 * i + lane % 4 * 2 + j)->row + lane / 4 * 2, &element, 2);
                }
            }
        }
    });
}
