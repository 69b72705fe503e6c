// What `platform.cuh` wraps, done on the CPU: barriers, shuffles, asynchronous copies and the matrix instructions, with the
// fragment layouts of the PTX ISA 9.0 (sections 9.7.14 "warp-level matrix", 9.7.9 "data movement"). A product of
// a matrix instruction is summed in float64 and rounded once; hardware rounds its own way, which only a GPU shows.
#pragma once

#include <cmath>

#include "grid.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

using emulate::blockDim;
using emulate::blockIdx;
using emulate::gridDim;
using emulate::threadIdx;

inline unsigned char* shared_memory() { return emulate::block->shared; }

inline void sync_block() {
    unsigned threads = emulate::block->fibers.size();
    emulate::meet(emulate::block->barriers[0], threads, "sync_block", [] {});
}

inline void sync_warp() { emulate::meet(emulate::warp().meeting, 32, "sync_warp", [] {}); }

// Exchanges 64-bit values inside a warp: the value of lane `from`.
inline uint64_t exchange(uint64_t value, unsigned from, const char* what) {
    emulate::Warp& warp = emulate::warp();
    warp.given[emulate::lane()] = value;
    emulate::meet(warp.meeting, 32, what, [&] { std::memcpy(warp.taken, warp.given, sizeof warp.given); });
    return warp.taken[from];
}

template <class T>
T shuffle_as(T value, unsigned from) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = exchange(bits, from, "shuffle");
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
T shuffle(T value, unsigned from) {
    return shuffle_as(value, from % 32);
}
template <class T>
T shuffle_xor(T value, unsigned mask) {
    return shuffle_as(value, emulate::lane() ^ mask);
}

inline uint32_t votes(bool vote) {
    exchange(vote, 0, "votes");
    uint32_t all = 0;
    for (unsigned i = 0; i < 32; ++i) all |= uint32_t(emulate::warp().taken[i] & 1) << i;
    return all;
}

template <class T>
T atomic_add(T* address, T value) {
    T old = *address;
    *address = old + value;
    return old;
}

inline float exp2_fast(float x) { return std::exp2(x); }

// === cp.async (PTX 9.7.9.25) ===

inline void async_copy_16(void* shared, const void* global, bool valid) {
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(valid ? global : nullptr)) % 16 != 0) {
        emulate::fail("async_copy_16: not aligned to 16 bytes");
    }
    auto copy = [=] {
        if (valid) std::memcpy(shared, global, 16);
        else std::memset(shared, 0, 16);
    };
    if (emulate::happens_at_once()) copy();
    else emulate::current->gathering.push_back(copy);
}

inline void async_copy_commit() {
    emulate::current->committed.push_back(std::move(emulate::current->gathering));
    emulate::current->gathering.clear();
}

template <int LEFT>
void async_copy_wait() {
    auto& groups = emulate::current->committed;
    while (groups.size() > LEFT) {
        emulate::run_all(groups.front());
        groups.pop_front();
    }
}

// === ldmatrix (PTX 9.7.14.5.15) and mma (9.7.14.5.14) ===

namespace emulate {

inline float bf16_value(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

struct LoadMatrix {
    uint32_t* out;
    const unsigned char* row;
};

// Matrix i's row r is what lane 8 i + r points at. Lane l receives, of matrix i, the elements (l / 4, 2 (l % 4))
// and the one to its right; transposed, (2 (l % 4), l / 4) and the one below it.
inline void load_matrices(uint32_t (&out)[4], const void* row, bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("load_matrix: not aligned to 16 bytes");
    LoadMatrix mine{out, static_cast<const unsigned char*>(row)};
    Warp& warp = emulate::warp();
    warp.registers[lane()] = &mine;
    auto at = [&warp](unsigned lane) { return static_cast<LoadMatrix*>(warp.registers[lane]); };
    meet(warp.meeting, 32, transposed ? "load_matrix transposed" : "load_matrix", [&] {
        for (unsigned l = 0; l < 32; ++l) {
            for (unsigned i = 0; i < 4; ++i) {
                uint16_t pair[2];
                for (unsigned j = 0; j < 2; ++j) {
                    unsigned r = l / 4, c = 2 * (l % 4) + j;
                    if (transposed) std::swap(r, c);
                    std::memcpy(&pair[j], at(8 * i + r)->row + 2 * c, 2);
                }
                std::memcpy(&at(l)->out[i], pair, 4);
            }
        }
    });
}

struct Mma {
    float* d;
    const uint32_t *a, *b;
};

// m16n8k16: lane l = 4 g + t holds d (g, 2t..), (g + 8, 2t..); a (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..);
// b (2t.., g), (2t + 8.., g), two elements a register.
inline void mma_16_8_16(Warp& warp) {
    float a[16][16], b[16][8];
    auto at = [&warp](unsigned lane) { return static_cast<Mma*>(warp.registers[lane]); };
    for (unsigned l = 0; l < 32; ++l) {
        unsigned g = l / 4, t = l % 4;
        for (unsigned j = 0; j < 2; ++j) {
            for (unsigned i = 0; i < 4; ++i) {
                a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + j] = bf16_value(at(l)->a[i] >> (16 * j));
            }
            for (unsigned i = 0; i < 2; ++i) b[2 * t + 8 * i + j][g] = bf16_value(at(l)->b[i] >> (16 * j));
        }
    }
    for (unsigned l = 0; l < 32; ++l) {
        for (unsigned i = 0; i < 4; ++i) {
            unsigned row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
            double sum = at(l)->d[i];
            for (unsigned k = 0; k < 16; ++k) sum += double(a[row][k]) * double(b[k][column]);
            at(l)->d[i] = float(sum);
        }
    }
}

}  // namespace emulate

inline void load_matrix(uint32_t (&out)[4], const void* row) { emulate::load_matrices(out, row, false); }
inline void load_matrix_transposed(uint32_t (&out)[4], const void* row) { emulate::load_matrices(out, row, true); }

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t b[2] = {b0, b1};
    emulate::Mma mine{d, a, b};
    emulate::Warp& warp = emulate::warp();
    warp.registers[emulate::lane()] = &mine;
    emulate::meet(warp.meeting, 32, "mma", [&] { emulate::mma_16_8_16(warp); });
}
