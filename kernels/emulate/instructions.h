// What `platform.cuh` wraps, done on the CPU: barriers, shuffles, asynchronous copies and the matrix
// instructions, with the fragment layouts of the PTX ISA 9.0 (sections 9.7.14 "warp-level matrix", 9.7.9
// "data movement"). A product of a matrix instruction is summed in float64 and rounded once; hardware
// rounds its own way, which only a GPU shows.
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
inline uint32_t shared_address(const void* p) {
    return uint32_t(static_cast<const unsigned char*>(p) - emulate::block->shared);
}

// Launches are done one after another.
inline void wait_for_earlier_launches() {}
inline void follow() {}

inline void sync_block() {
    unsigned threads = emulate::block->fibers.size();
    emulate::meet(emulate::block->barriers[0], threads, "sync_block", [] {});
}

inline void sync_warp() {
    emulate::meet(emulate::warp().meeting, 32, "sync_warp", [] {});
}

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

inline uint32_t lanes_where(bool set) {
    exchange(set, 0, "lanes_where");
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t(emulate::warp().taken[lane] != 0) << lane;
    return bits;
}
inline int count_bits(uint32_t bits) { return __builtin_popcount(bits); }

inline uint32_t and_or(uint32_t bits, uint32_t mask, uint32_t more) { return (bits & mask) | more; }
template <class T>
T in_register(T value) {
    return value;
}

template <class T>
T atomic_add(T* address, T value) {
    T old = *address;
    *address = old + value;
    return old;
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float exp2_flushed(float x) {
    const float y = std::exp2(x);
    return y < 0x1p-126f ? 0.0f : y;
}

// === cp.async (PTX 9.7.9.25) ===

namespace emulate {

template <int BYTES>
void async_copy(void* shared, const void* global, bool valid) {
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(valid ? global : nullptr)) % BYTES != 0)
        fail("async_copy: not aligned to its size");
    auto copy = [=] {
        if (valid) std::memcpy(shared, global, BYTES);
        else std::memset(shared, 0, BYTES);
    };
    if (happens_at_once()) copy();
    else current->gathering.push_back(copy);
}

}  // namespace emulate

inline void async_copy_16(void* shared, const void* global, bool valid) {
    emulate::async_copy<16>(shared, global, valid);
}
inline void async_copy_16(uint32_t shared, const void* global, bool valid) {
    emulate::async_copy<16>(shared_memory() + shared, global, valid);
}
inline void async_copy_4(uint32_t shared, const void* global, bool valid) {
    emulate::async_copy<4>(shared_memory() + shared, global, valid);
}

template <size_t N>
void load_shared(uint32_t (&out)[N], uint32_t shared) {
    if (shared % (4 * N) != 0) emulate::fail("load_shared: not aligned to its size");
    std::memcpy(out, shared_memory() + shared, 4 * N);
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

// Matrix i's row r is what lane 8 i + r points at. Lane l receives, of matrix i, the elements (l / 4, 2 (l
// % 4)) and the one to its right; transposed, (2 (l % 4), l / 4) and the one below it.
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

// m16n8k16: lane l = 4 g + t holds d (g, 2t..), (g + 8, 2t..); a (g, 2t..), (g + 8, 2t..), (g, 2t + 8..),
// (g + 8, 2t + 8..); b (2t.., g), (2t + 8.., g), two elements a register.
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
inline void load_matrix(uint32_t (&out)[4], uint32_t row) { load_matrix(out, shared_memory() + row); }
inline void load_matrix_transposed(uint32_t (&out)[4], const void* row) {
    emulate::load_matrices(out, row, true);
}

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t b[2] = {b0, b1};
    emulate::Mma mine{d, a, b};
    emulate::Warp& warp = emulate::warp();
    warp.registers[emulate::lane()] = &mine;
    emulate::meet(warp.meeting, 32, "mma", [&] { emulate::mma_16_8_16(warp); });
}

// === wgmma (PTX 9.7.15) ===

namespace emulate {

struct Wgmma {
    float* d;
    uint64_t a, b;
};

// Element (row, k) of an operand whose descriptor says: start, 1024 bytes between groups of eight rows,
// 128-byte swizzle. The swizzle is of addresses: bits 4 to 6 by bits 7 to 9.
inline float operand_element(uint64_t descriptor, unsigned row, unsigned k) {
    if (descriptor >> 62 != 1) fail("wgmma: a descriptor without 128-byte swizzle");
    uint64_t groups = (descriptor >> 32 & 0x3fff) << 4;
    uint64_t at = ((descriptor & 0x3fff) << 4) + row / 8 * groups + row % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    uint16_t bits;
    std::memcpy(&bits, block->shared + at, 2);
    return bf16_value(bits);
}

// m64nNk16: lane 4 g + t of warp w holds (16 w + g, 8 j + 2 t..) and (16 w + g + 8, 8 j + 2 t..) for each
// j, four registers.
inline void wgmma_64_n_16(const std::vector<Wgmma>& threads, unsigned n) {
    std::vector<float> a(64 * 16), b(n * 16);
    for (unsigned i = 0; i < 64 * 16; ++i) a[i] = operand_element(threads[0].a, i / 16, i % 16);
    for (unsigned i = 0; i < n * 16; ++i) b[i] = operand_element(threads[0].b, i / 16, i % 16);
    for (unsigned thread = 0; thread < 128; ++thread) {
        for (unsigned i = 0; i < n / 2; ++i) {
            unsigned row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8,
                     column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            double sum = threads[thread].d[i];
            for (unsigned k = 0; k < 16; ++k) sum += double(a[row * 16 + k]) * double(b[column * 16 + k]);
            threads[thread].d[i] = float(sum);
        }
    }
}

inline Warpgroup& warpgroup() { return block->warpgroups[current->rank / 128]; }

// Notes that products of this group read `rows` rows of an operand from now on, until they are waited for.
inline void begin_to_read(Warpgroup& group, uint64_t descriptor, unsigned rows) {
    const size_t begin = ((descriptor & 0x3fff) << 4) / 1024 * 1024;
    const Range range{begin, begin + rows / 8 * ((descriptor >> 32 & 0x3fff) << 4)};
    group.reads.push_back(range);
    for (Fill& fill : block->fills)
        if (fill.range.meets(range)) fill.is_read = true;
}

}  // namespace emulate

inline uint64_t swizzled_operand(const void* p) {
    uint64_t at = static_cast<const unsigned char*>(p) - emulate::block->shared;
    return (at >> 4 & 0x3fff) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

inline void fence_for_matrix_units() {}
inline void warpgroup_arrive() {
    emulate::meet(emulate::warpgroup().meeting, 128, "warpgroup_arrive", [] {});
}

template <int N>
void warpgroup_mma(float (&d)[N], uint64_t a, uint64_t b) {
    emulate::Warpgroup& group = emulate::warpgroup();
    group.given.resize(128 * 3);
    uint64_t* mine = &group.given[emulate::current->rank % 128 * 3];
    mine[0] = reinterpret_cast<uint64_t>(&d[0]), mine[1] = a, mine[2] = b;
    emulate::meet(group.meeting, 128, "warpgroup_mma", [&group] {
        std::vector<emulate::Wgmma> threads;
        for (unsigned i = 0; i < 128; ++i) {
            const uint64_t* of = &group.given[i * 3];
            if (of[1] != group.given[1] || of[2] != group.given[2])
                emulate::fail("wgmma: operands differ in a warpgroup");
            threads.push_back({reinterpret_cast<float*>(of[0]), of[1], of[2]});
        }
        group.gathering.push_back([threads] { emulate::wgmma_64_n_16(threads, 2 * N); });
        emulate::begin_to_read(group, threads[0].a, 64);
        emulate::begin_to_read(group, threads[0].b, 2 * N);
    });
}

// Groups run in order, as late as they may or at once.
inline void warpgroup_commit() {
    emulate::Warpgroup& group = emulate::warpgroup();
    emulate::meet(group.meeting, 128, "warpgroup_commit", [&group] {
        group.committed.push_back(std::move(group.gathering));
        group.gathering.clear();
        group.reads_committed.push_back(std::move(group.reads));
        group.reads.clear();
        if (emulate::happens_at_once()) group.finish(0);
    });
}

template <int LEFT, int N>
void warpgroup_wait(float (&)[N]) {
    emulate::Warpgroup& group = emulate::warpgroup();
    emulate::meet(group.meeting, 128, "warpgroup_wait", [&group] {
        group.finish(LEFT);
        while (group.reads_committed.size() > LEFT) group.reads_committed.pop_front();
    });
}
