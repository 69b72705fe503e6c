// What `wide_sm90.cuh` wraps beyond `instructions.h`: stmatrix (PTX ISA 9.0, section 9.7.14.5.16), and wgmma
// whose first operand is in registers or whose second one lies in columns (9.7.15.5).
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

namespace emulate {

// Element (row, k) of an operand whose rows lie along memory: 64 of them in 128 bytes, `stride` to the next
// 64; 1024 bytes between groups of eight k. Swizzled as in `operand_element`.
inline float column_element(uint64_t descriptor, unsigned row, unsigned k) {
    if (descriptor >> 62 != 1) fail("wgmma: a descriptor without 128-byte swizzle");
    uint64_t stride = (descriptor >> 16 & 0x3fff) << 4, groups = (descriptor >> 32 & 0x3fff) << 4;
    uint64_t at =
        ((descriptor & 0x3fff) << 4) + row / 64 * stride + k / 8 * groups + k % 8 * 128 + row % 64 * 2;
    at ^= (at >> 7 & 7) << 4;
    uint16_t bits;
    std::memcpy(&bits, block->shared + at, 2);
    return bf16_value(bits);
}

struct WgmmaOfRegisters {
    float* d;
    const uint32_t* a;
};

// As `wgmma_64_n_16`, and each warp's rows of `a` are as `mma_16_8_16` has them.
inline void wgmma_of_registers(const std::vector<WgmmaOfRegisters>& threads, uint64_t b, unsigned n,
                               bool columns, bool adds) {
    std::vector<float> all(n * 16);
    for (unsigned i = 0; i < n * 16; ++i)
        all[i] = columns ? column_element(b, i / 16, i % 16) : operand_element(b, i / 16, i % 16);
    for (unsigned thread = 0; thread < 128; ++thread) {
        const unsigned first =
            thread / 32 * 32 + thread % 32 / 4 * 4;  // of four that hold its rows
        for (unsigned i = 0; i < n / 2; ++i) {
            const unsigned half = i / 2 % 2, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            double sum = adds ? threads[thread].d[i] : 0.0f;
            for (unsigned k = 0; k < 16; ++k) {
                const uint32_t pair = threads[first + k % 8 / 2].a[half + k / 8 * 2];
                sum += double(bf16_value(pair >> (16 * (k % 2)))) * double(all[column * 16 + k]);
            }
            threads[thread].d[i] = float(sum);
        }
    }
}

}  // namespace emulate

struct Operand {
    uint32_t address, stride;
    explicit Operand(uint32_t address, uint32_t stride = 16) : address(address >> 4), stride(stride) {}
    uint64_t further(uint32_t bytes) const {
        return uint64_t(1024 >> 4 | 1u << 30) << 32 | (address + (bytes >> 4) | stride >> 4 << 16);
    }
};

template <bool COLUMNS, int N>
void warpgroup_mma(float (&d)[N], const uint32_t (&a)[4], uint64_t b, bool adds) {
    emulate::Warpgroup& group = emulate::warpgroup();
    group.given.resize(128 * 3);
    uint64_t* mine = &group.given[emulate::current->rank % 128 * 3];
    mine[0] = reinterpret_cast<uint64_t>(&d[0]), mine[1] = reinterpret_cast<uint64_t>(&a[0]), mine[2] = b;
    emulate::meet(group.meeting, 128, "warpgroup_mma of registers", [&group, adds] {
        std::vector<emulate::WgmmaOfRegisters> threads;
        const uint64_t b = group.given[2];
        for (unsigned i = 0; i < 128; ++i) {
            const uint64_t* of = &group.given[i * 3];
            if (of[2] != b) emulate::fail("wgmma: operands differ in a warpgroup");
            threads.push_back({reinterpret_cast<float*>(of[0]), reinterpret_cast<const uint32_t*>(of[1])});
        }
        group.gathering.push_back(
            [threads, b, adds] { emulate::wgmma_of_registers(threads, b, 2 * N, COLUMNS, adds); });
    });
}

template <int N>
void in_registers(float (&)[N]) {}
