// The kernels under test, by the names that launches use: the very sources that nvcc compiles.
#pragma once

#define KEYWAY_EMULATE 1
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../src/attention.cuh"
#include "../src/attention_latent_sm90.cuh"
#include "../src/bulk.cuh"
#include "../src/choice.cuh"
#include "../src/cluster.cuh"
#include "../src/gate.cuh"
#include "../src/moe.cuh"
#include "../src/moe_pair.cuh"
#include "../src/norm.cuh"
#include "../src/numbers.cuh"
#include "../src/peer.cuh"
#include "../src/pipeline_sm90.cuh"
#include "../src/product.cuh"
#include "../src/product_few.cuh"
#include "../src/product_sm90.cuh"
#include "../src/system.cuh"
#include "../src/ticket.cuh"
#include "../src/tile.cuh"
#include "../src/warp.cuh"

// Each file's own names stay in a namespace of its own.
namespace attention_cu {
#include "../src/attention.cu"
}
namespace attention_sm90_cu {
#include "../src/attention_sm90.cu"
#undef ATTENTION_SM90
#undef ATTENTION_LATENT_SM90
}
namespace elementwise_cu {
#include "../src/elementwise.cu"
}
namespace gather_cu {
#include "../src/gather.cu"
}
namespace matmul_cu {
#include "../src/matmul.cu"
#undef MATMUL
#undef MATMUL_FEW
}  // namespace matmul_cu
namespace matmul_sm90_cu {
#include "../src/matmul_sm90.cu"
#undef MATMUL
#undef PARAMETERS
#undef PROBLEM
}  // namespace matmul_sm90_cu
namespace moe_cu {
#include "../src/moe.cu"
}
namespace moe_product_cu {
#include "../src/moe_product.cu"
#undef MOE_PRODUCT
#undef MOE_PRODUCT_FEW
#undef MOE_PAIR_FEW
#undef BOTH
}
namespace moe_product_sm90_cu {
#include "../src/moe_product_sm90.cu"
}
namespace peer_cu {
#include "../src/peer.cu"
#undef PEER
#undef PEER_HERE
}  // namespace peer_cu
namespace rope_cu {
#include "../src/rope.cu"
}
namespace probe_cu {
#include "../src/probe.cu"
}
namespace rules_cu {
#include "../src/rules.cu"
}
namespace sample_cu {
#include "../src/sample.cu"
}
namespace rms_norm_cu {
#include "../src/rms_norm.cu"
}
using namespace attention_cu;
using namespace attention_sm90_cu;
using namespace elementwise_cu;
using namespace gather_cu;
using namespace matmul_cu;
using namespace matmul_sm90_cu;
using namespace moe_cu;
using namespace moe_product_cu;
using namespace moe_product_sm90_cu;
using namespace peer_cu;
using namespace rms_norm_cu;
using namespace rules_cu;
using namespace rope_cu;
using namespace probe_cu;
using namespace sample_cu;

// What a parameter is, as launches say of their arguments.
enum class Parameter : uint64_t { WORD, POINTER, FLOAT };

template <class T>
constexpr Parameter parameter() {
    static_assert(std::is_pointer_v<T> || sizeof(T) == 4, "a parameter is an address or of four bytes");
    if (std::is_pointer_v<T>) return Parameter::POINTER;
    return std::is_floating_point_v<T> ? Parameter::FLOAT : Parameter::WORD;
}

struct Kernel {
    // Bytes of each argument, and what it is.
    std::vector<size_t> sizes;
    std::vector<Parameter> parameters;
    std::function<void(const uint64_t*)> call;
};

template <class... A, size_t... I>
Kernel entry(void (*kernel)(A...), std::index_sequence<I...>) {
    return {{sizeof(A)...}, {parameter<A>()...}, [=](const uint64_t* arguments) {
                std::tuple<std::decay_t<A>...> typed;
                (std::memcpy(&std::get<I>(typed), &arguments[I], sizeof(std::get<I>(typed))), ...);
                kernel(std::get<I>(typed)...);
            }};
}

template <class... A>
Kernel entry(void (*kernel)(A...)) {
    return entry(kernel, std::index_sequence_for<A...>{});
}

#define KERNEL(name) {#name, entry(name)}

inline const std::map<std::string, Kernel> kernels = {
    KERNEL(attention_64_bf16_16),
    KERNEL(attention_64_bf16_128),
    KERNEL(attention_64_fp8_16),
    KERNEL(attention_64_fp8_128),
    KERNEL(attention_128_bf16_16),
    KERNEL(attention_128_bf16_128),
    KERNEL(attention_128_fp8_16),
    KERNEL(attention_128_fp8_128),
    KERNEL(attention_latent_bf16_16),
    KERNEL(attention_latent_fp8_16),
    KERNEL(attention_128_bf16_16_carried),
    KERNEL(attention_128_bf16_128_carried),
    KERNEL(attention_merge),
    KERNEL(attention_sm90_64_bf16),
    KERNEL(attention_sm90_64_bf16_apart),
    KERNEL(attention_sm90_128_bf16),
    KERNEL(attention_sm90_128_bf16_apart),
    KERNEL(attention_sm90_latent_bf16),
    KERNEL(attention_sm90_latent_bf16_apart),
    KERNEL(clamped_gate_mul),
    KERNEL(fill_in),
    KERNEL(gather),
    KERNEL(gather_packed),
    KERNEL(matmul_bf16_16),
    KERNEL(matmul_bf16_64),
    KERNEL(matmul_bf16_128),
    KERNEL(matmul_int8_16),
    KERNEL(matmul_int8_64),
    KERNEL(matmul_int4_16),
    KERNEL(matmul_int4_64),
    KERNEL(matmul_fp8_16),
    KERNEL(matmul_fp8_64),
    KERNEL(matmul_mxfp4_16),
    KERNEL(matmul_mxfp4_64),
    KERNEL(matmul_reduce),
    KERNEL(matmul_sm90_16),
    KERNEL(matmul_sm90_64),
    KERNEL(matmul_sm90_128),
    KERNEL(matmul_sm90_192),
    KERNEL(matmul_sm90_256),
    KERNEL(matmul_sm90_256_whole),
    KERNEL(matmul_sm90_128_clustered),
    KERNEL(matmul_sm90_256_clustered),
    KERNEL(matmul_sm90_256_whole_clustered),
    KERNEL(moe_choose),
    KERNEL(moe_combine),
    KERNEL(moe_group),
    KERNEL(moe_product_bf16_16),
    KERNEL(moe_product_bf16_64),
    KERNEL(moe_product_bf16_128),
    KERNEL(moe_product_int4_16),
    KERNEL(moe_product_int4_64),
    KERNEL(moe_product_fp8_16),
    KERNEL(moe_product_fp8_64),
    KERNEL(moe_product_mxfp4_16),
    KERNEL(moe_product_mxfp4_64),
    KERNEL(moe_product_int8_16),
    KERNEL(moe_product_pair_bf16),
    KERNEL(moe_product_pair_fp8),
    KERNEL(moe_product_pair_int4),
    KERNEL(moe_product_pair_int8),
    KERNEL(moe_product_pair_mxfp4),
    KERNEL(moe_product_int8_64),
    KERNEL(moe_product_sm90_16),
    KERNEL(moe_product_sm90_pair),
    KERNEL(moe_product_sm90_64),
    KERNEL(moe_product_sm90_128),
    KERNEL(moe_product_sm90_256),
    KERNEL(moe_product_sm90_256_whole),
    KERNEL(moe_route),
    KERNEL(copy),
    KERNEL(matrix_peak),
    KERNEL(peer_combine_receive),
    KERNEL(peer_combine_send),
    KERNEL(peer_dispatch_receive),
    KERNEL(peer_dispatch_send),
    KERNEL(peer_plan),
    KERNEL(peer_reset),
    KERNEL(apply_rules),
    KERNEL(rms_norm),
    KERNEL(rms_norm_1),
    KERNEL(rms_norm_2),
    KERNEL(rms_norm_4),
    KERNEL(rope_heads_bf16),
    KERNEL(rope_heads_fp8),
    KERNEL(rope_write_bf16),
    KERNEL(rope_write_fp8),
    KERNEL(sample),
    KERNEL(sample_peaks),
    KERNEL(score),
    KERNEL(silu_mul),
    KERNEL(write_later),
};
