// What the kernels of a mixture-of-experts layer tell each other: the items of work that `moe_group` lists and the grouped
// products take. No arithmetic but the gate at a product's end.
#pragma once

#include "gate.cuh"

// Some of the rows that one expert serves, by their places: grouped by expert, ascending by slot inside a group.
struct alignas(16) ExpertRows {
    uint32_t expert, first, end, unused;
};

// What a product's end makes of its sums. A gated product has 2 W outputs, of W gates and W values beside each
// other in eights: outputs 16 q .. 16 q + 7 are gates 8 q .., the next eight their values.
constexpr uint32_t TOGETHER = 8;
enum Gate : uint32_t { NO_GATE, SILU, CLAMPED };

struct Ending {
    const uint16_t* bias;  // of this expert, or null
    uint16_t* y;
    uint32_t n;  // outputs, of a gated product twice as many as `y` has columns
    uint32_t gate;
    float alpha, limit;
    const uint32_t* rows;  // by place, the row of `y`; null: the place itself

    __device__ __forceinline__ uint64_t row(uint32_t place) const { return rows != nullptr ? rows[place] : place; }

    __device__ __forceinline__ float biased(uint32_t output, float sum) const {
        return bias != nullptr ? sum + bf16_to_f32(bias[output]) : sum;
    }
    __device__ __forceinline__ void plain(uint32_t place, uint32_t output, float sum) const {
        y[row(place) * n + output] = f32_to_bf16(biased(output, sum));
    }
    // `output` is the gate's.
    __device__ __forceinline__ void gated_pair(uint32_t place, uint32_t output, float gate_sum, float value_sum) const {
        const float g = biased(output, gate_sum), v = biased(output + TOGETHER, value_sum);
        const float h = gate == SILU ? silu_gate(g, v) : clamped_gate(g, v, alpha, limit);
        y[row(place) * (n / 2) + output / (2 * TOGETHER) * TOGETHER + output % TOGETHER] = f32_to_bf16(h);
    }
};
