// The kernels under test, by the names that launches use: the very sources that nvcc compiles.
#pragma once

#define KEYWAY_EMULATE 1
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "../src/rms_norm.cu"

struct Kernel {
    size_t arguments;
    std::function<void(const uint64_t*)> call;
};

template <class... A, size_t... I>
Kernel entry(void (*kernel)(A...), std::index_sequence<I...>) {
    return {sizeof...(A), [=](const uint64_t* arguments) {
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
    KERNEL(rms_norm),
};
