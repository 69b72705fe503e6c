// Tiles of 16-bit elements in shared memory, in an order that ldmatrix reads without bank conflicts. Not
// what is in them.
#pragma once

#include "platform.cuh"

// Where 16-byte unit `unit` of row `row` lies in a tile of UNITS units a row: rotated inside groups, so
// that the eight rows that ldmatrix reads at once lie in eight different groups of banks.
template <int UNITS>
__device__ __forceinline__ int swizzled(int row, int unit) {
    static_assert(UNITS % 8 == 0 || UNITS == 4, "");
    return row * UNITS + (UNITS % 8 == 0 ? unit ^ (row & 7) : unit ^ (row >> 1 & 3));
}

template <int UNITS>
__device__ __forceinline__ unsigned char* unit_of(unsigned char* tile, int row, int unit) {
    return tile + swizzled<UNITS>(row, unit) * 16;
}
