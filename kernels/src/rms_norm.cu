// RMSNorm (arXiv 1910.07467) of rows, or of heads inside rows, with the residual's addition fused in: `sum
// = x + residual` (if there is one; written back to it), `out = sum / sqrt(mean(sum^2) + eps) * weight`,
// bf16 with f32 sums.
//
// One block takes one head of one row and never a part of it; a thread's elements and the order of the
// block's sum follow from `width` alone. So a row's bits do not depend on the rows beside it. Grid: (heads,
// rows). Block: 32 to 1024 threads, whole warps, a function of `width`. Shared: a float per warp.
#include "numbers.cuh"

// Head h of row r begins at element r * stride + h * pitch (`first` is in the pointer); `out` may be `x`.
// `residual`, if not null, lies as `x` does. All strides, pitches and `width` are multiples of 8.
extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const uint16_t* x, uint16_t* residual, const uint16_t* weight, uint16_t* out, uint32_t width,
             uint32_t stride, uint32_t pitch, uint32_t out_stride, uint32_t out_pitch, float eps) {
    follow();
    const uint64_t at = uint64_t(blockIdx.y) * stride + uint64_t(blockIdx.x) * pitch;
    const uint64_t out_at = uint64_t(blockIdx.y) * out_stride + uint64_t(blockIdx.x) * out_pitch;
    float squares = 0.0f;
    for (uint32_t i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
        Packet values = load_packet(x + at + i);
        if (residual != nullptr) {
            Packet more = load_packet(residual + at + i);
            for (int j = 0; j < 4; ++j) {
                values.words[j] = bf16_pair(bf16_low(values.words[j]) + bf16_low(more.words[j]),
                                            bf16_high(values.words[j]) + bf16_high(more.words[j]));
            }
            store_packet(residual + at + i, values);
        }
        for (int j = 0; j < 4; ++j) {
            float low = bf16_low(values.words[j]), high = bf16_high(values.words[j]);
            squares = fmaf(low, low, squares);
            squares = fmaf(high, high, squares);
        }
    }
    const float mean = sum_over_block(squares, reinterpret_cast<float*>(shared_memory())) / float(width);
    const float scale = 1.0f / sqrtf(mean + eps);
    const uint16_t* sums = residual != nullptr ? residual : x;
    for (uint32_t i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
        Packet values = load_packet(sums + at + i), by = load_packet(weight + i);
        for (int j = 0; j < 4; ++j) {
            values.words[j] = bf16_pair(bf16_low(values.words[j]) * scale * bf16_low(by.words[j]),
                                        bf16_high(values.words[j]) * scale * bf16_high(by.words[j]));
        }
        store_packet(out + out_at + i, values);
    }
}
