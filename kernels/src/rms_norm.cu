// RMSNorm (arXiv 1910.07467) of rows, or of heads inside rows, with the residual's addition fused in: `sum
// = x + residual` (if there is one; written back to it), `out = sum / sqrt(mean(sum^2) + eps) * weight`,
// bf16 with f32 sums.
//
// One block takes one head of one row and never a part of it; a thread's elements and the order of the
// block's sum follow from `width` alone. So a row's bits do not depend on the rows beside it. Grid: (heads,
// rows). Block: 32 to 512 threads, whole warps, a function of `width`. Shared: a float per warp, and as many
// more as make it packets.
//
// A step of one sequence waits for each of these to end, so `rms_norm_N` waits for memory once: a thread keeps
// its N packets of 8 elements, all asked for before the first is used, and the weight's before earlier launches
// have ended. `rms_norm` reads rows of any width twice.
#include "norm.cuh"

constexpr int THREADS_MAX = 512;

// Head h of row r begins at element r * stride + h * pitch (`first` is in the pointer); `out` may be `x`.
// `residual`, if not null, lies as `x` does. All strides, pitches and `width` are multiples of 8.
struct Rows {
    const uint16_t* x;
    uint16_t* residual;
    const uint16_t* weight;
    uint16_t* out;
    uint32_t width, stride, pitch, out_stride, out_pitch;
    float eps;

    __device__ __forceinline__ uint64_t at() const {
        return uint64_t(blockIdx.y) * stride + uint64_t(blockIdx.x) * pitch;
    }
    __device__ __forceinline__ uint64_t out_at() const {
        return uint64_t(blockIdx.y) * out_stride + uint64_t(blockIdx.x) * out_pitch;
    }
};

// The sum over the block, in the order of `sum_over_block`: what the warps have found is read at once.
__device__ __forceinline__ float sum_of_squares(float value) {
    for (unsigned mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    const uint32_t warps = blockDim.x / 32;
    float sum = 0.0f;
    if (warps == 1) return sum + value;
    float* found = reinterpret_cast<float*>(shared_memory());
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = value;
    sync_block();
    Packet four[THREADS_MAX / 128];
#pragma unroll
    for (int i = 0; i < THREADS_MAX / 128; ++i)
        if (i * 4 < warps) four[i] = load_packet(found + 4 * i);
#pragma unroll
    for (int i = 0; i < THREADS_MAX / 32; ++i)
        if (i < warps) sum += from_bits(four[i / 4].words[i % 4]);
    return sum;
}

__device__ __forceinline__ Packet sum_of(const Packet& a, const Packet& b) {
    Packet sum;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        sum.words[j] = bf16_pair(bf16_low(a.words[j]) + bf16_low(b.words[j]),
                                 bf16_high(a.words[j]) + bf16_high(b.words[j]));
    return sum;
}

template <int KEPT>
__device__ __forceinline__ void normalise_kept(const Rows& rows) {
    Packet own[KEPT], more[KEPT], weight[KEPT];
    const uint32_t first = threadIdx.x * 8, step = blockDim.x * 8;
    // No launch changes a weight.
#pragma unroll
    for (int k = 0; k < KEPT; ++k)
        if (first + k * step < rows.width) weight[k] = load_packet(rows.weight + first + k * step);
    follow();
    const bool adds = rows.residual != nullptr;
    const uint16_t* x = rows.x + rows.at() + first;
    uint16_t* residual = rows.residual + rows.at() + first;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        if (first + k * step >= rows.width) continue;
        own[k] = load_packet(x + k * step);
        if (adds) more[k] = load_packet(residual + k * step);
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        if (first + k * step >= rows.width) continue;
        if (adds) {
            own[k] = sum_of(own[k], more[k]);
            store_packet(residual + k * step, own[k]);
        }
        squares = add_squares(own[k], squares);
    }
    const float scale = norm_scale(sum_of_squares(squares), rows.width, rows.eps);
    uint16_t* out = rows.out + rows.out_at() + first;
#pragma unroll
    for (int k = 0; k < KEPT; ++k)
        if (first + k * step < rows.width) store_packet(out + k * step, normalised(own[k], scale, weight[k]));
}

__device__ __forceinline__ void normalise_any(const Rows& rows) {
    follow();
    const uint64_t at = rows.at(), out_at = rows.out_at();
    float squares = 0.0f;
    for (uint32_t i = threadIdx.x * 8; i < rows.width; i += blockDim.x * 8) {
        Packet values = load_packet(rows.x + at + i);
        if (rows.residual != nullptr) {
            values = sum_of(values, load_packet(rows.residual + at + i));
            store_packet(rows.residual + at + i, values);
        }
        squares = add_squares(values, squares);
    }
    const float scale = norm_scale(sum_of_squares(squares), rows.width, rows.eps);
    const uint16_t* sums = rows.residual != nullptr ? rows.residual : rows.x;
    for (uint32_t i = threadIdx.x * 8; i < rows.width; i += blockDim.x * 8) {
        const Packet values = load_packet(sums + at + i), weight = load_packet(rows.weight + i);
        store_packet(rows.out + out_at + i, normalised(values, scale, weight));
    }
}

#define RMS_NORM(name, normalise)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX)                                              \
        name(const uint16_t* x, uint16_t* residual, const uint16_t* weight, uint16_t* out, uint32_t width, \
             uint32_t stride, uint32_t pitch, uint32_t out_stride, uint32_t out_pitch, float eps) {        \
        normalise(Rows{x, residual, weight, out, width, stride, pitch, out_stride, out_pitch, eps});       \
    }

RMS_NORM(rms_norm, normalise_any)
RMS_NORM(rms_norm_1, normalise_kept<1>)
RMS_NORM(rms_norm_2, normalise_kept<2>)
RMS_NORM(rms_norm_4, normalise_kept<4>)
