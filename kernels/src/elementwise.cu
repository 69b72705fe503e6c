// The gated activations of the feed-forward part (`elementwise.rs`): row r of `gate_up` is [gate | up],
// each `width` long. silu_mul: out = gate / (1 + e^-gate) * up. clamped_gate_mul (gpt-oss): out = (up + 1)
// * gate / (1 + e^(-alpha gate)) with gate at most `limit` and up within -limit..=limit; NaN passes
// through. Every element is computed alone. Grid: (packets of 8 columns / 128, rows). Block: 128 threads.
// `width` is a multiple of 8.
#include "gate.cuh"

constexpr int THREADS = 128;

template <class F>
__device__ __forceinline__ void each_pair(const uint16_t* gate_up, uint16_t* out, uint32_t width, F f) {
    const uint32_t column = (blockIdx.x * THREADS + threadIdx.x) * 8;
    if (column >= width) return;
    const uint16_t* row = gate_up + uint64_t(blockIdx.y) * 2 * width + column;
    const Packet gate = load_packet(row), up = load_packet(row + width);
    Packet result;
    for (int i = 0; i < 4; ++i) {
        result.words[i] = bf16_pair(f(bf16_low(gate.words[i]), bf16_low(up.words[i])),
                                    f(bf16_high(gate.words[i]), bf16_high(up.words[i])));
    }
    store_packet(out + uint64_t(blockIdx.y) * width + column, result);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul(const uint16_t* gate_up, uint16_t* out, uint32_t width) {
    follow();
    each_pair(gate_up, out, width, silu_gate);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    clamped_gate_mul(const uint16_t* gate_up, uint16_t* out, uint32_t width, float alpha, float limit) {
    follow();
    each_pair(gate_up, out, width,
              [=](float gate, float up) { return clamped_gate(gate, up, alpha, limit); });
}
