// Modules and launches: which device a fatbin suits, which kernels it holds, what a launch may ask for.
#pragma once

#include "memory.h"

#include <dirent.h>

namespace driver {

// === fatbins, as nvcc 13 writes them: a header, then code for architectures, each with a header ===

constexpr uint32_t FATBIN_MAGIC = 0xba55ed50;
constexpr uint16_t PTX = 1, MACHINE_CODE = 2;
// Of code for one architecture's own features, such as sm_90a, or for those of its family, such as sm_100f.
constexpr uint64_t EXACT = 0x100000, FAMILY = 0x200000;

template <class T>
T field(const unsigned char* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline size_t fatbin_bytes(const unsigned char* image) {
    return field<uint32_t>(image) == FATBIN_MAGIC ? field<uint16_t>(image + 6) + field<uint64_t>(image + 8) : 0;
}

// What a device runs of a fatbin: machine code for itself alone, else the newest for an older minor version of
// its major one, else the newest PTX that is not newer than it, which the driver compiles first.
inline Code code_for(const unsigned char* image, unsigned capability) {
    const unsigned char* end = image + fatbin_bytes(image);
    Code best;
    for (const unsigned char* at = image + field<uint16_t>(image + 6); at < end;) {
        auto kind = field<uint16_t>(at);
        auto architecture = field<uint32_t>(at + 28);
        auto flags = field<uint64_t>(at + 40);
        at += field<uint32_t>(at + 4) + field<uint64_t>(at + 8);
        Code code{true, kind == MACHINE_CODE, (flags & EXACT) != 0, architecture};
        bool is_bound = kind == MACHINE_CODE || flags & FAMILY;
        if (architecture > capability || (code.is_exact && architecture != capability)) continue;
        if (is_bound && architecture / 10 != capability / 10) continue;
        auto rank = [](const Code& code) {
            return std::make_tuple(code.is_there, code.is_machine, code.is_exact, code.architecture);
        };
        if (rank(code) > rank(best)) best = code;
    }
    return best;
}

// === which kernels a fatbin holds; their names in it are compressed ===

inline std::string read_file(const std::string& path) {
    std::string bytes;
    if (std::FILE* file = std::fopen(path.c_str(), "rb")) {
        char part[1 << 16];
        for (size_t n; (n = std::fread(part, 1, sizeof part, file)) > 0;) bytes.append(part, n);
        std::fclose(file);
    }
    return bytes;
}

// By their names, those of `kernels/bin`.
inline const std::map<std::string, std::string>& fatbins() {
    static const auto& all = *[] {
        auto* found = new std::map<std::string, std::string>;
        const std::string folder = FATBINS, end = ".fatbin";
        if (DIR* open = opendir(folder.c_str())) {
            while (const dirent* entry = readdir(open)) {
                std::string name = entry->d_name;
                if (name.size() <= end.size() || name.substr(name.size() - end.size()) != end) continue;
                (*found)[name.substr(0, name.size() - end.size())] = read_file(folder + "/" + name);
            }
            closedir(open);
        }
        return found;
    }();
    return all;
}

// A kernel's name begins with its module's; others are listed, or taken to be in all.
inline std::string module_of(const std::string& kernel) {
    static const std::map<std::string, std::string> others = {
        {"silu_mul", "elementwise"}, {"clamped_gate_mul", "elementwise"}, {"fill_in", "gather"}, {"copy", "probe"},
        {"matrix_peak", "probe"},    {"apply_rules", "rules"},            {"score", "sample"},
    };
    auto other = others.find(kernel);
    if (other != others.end()) return other->second;
    std::string longest;
    for (auto& [name, bytes] : fatbins()) {
        bool is_part = kernel == name || kernel.compare(0, name.size() + 1, name + "_") == 0;
        if (is_part && name.size() > longest.size()) longest = name;
    }
    return longest;
}

inline Result load(const Call& call, Module** module, const void* image) {
    auto bytes = static_cast<const unsigned char*>(image);
    if (Result asked = state.settings.modules) return asked;
    size_t size = fatbin_bytes(bytes);
    if (size == 0) return call.refuse(INVALID_IMAGE, "no fatbin");
    if (state.settings.version < 13000) return UNSUPPORTED_PTX_VERSION;
    std::string found;
    for (auto& [name, file] : fatbins())
        if (file.size() == size && std::memcmp(file.data(), bytes, size) == 0) found = name;
    if (found.empty()) return call.refuse(INVALID_IMAGE, "a fatbin that is not in " FATBINS);
    Code code = code_for(bytes, state.settings.capability);
    if (!code.is_there) return call.refuse(NO_BINARY_FOR_GPU, found + " has no code for this device");
    state.note("CODE " + found + " " + code.name());
    auto loaded = std::make_unique<Module>();
    loaded->name = found;
    for (auto& [name, kernel] : kernels) {
        std::string holder = module_of(name);
        if (!holder.empty() && holder != found) continue;
        Function& function = loaded->functions[name];
        function.name = name, function.kernel = &kernel, function.code = code;
        state.functions.insert(&function);
    }
    *module = loaded.release();
    state.modules.insert(*module);
    return SUCCESS;
}

// === launches ===

struct Shape {
    emulate::Dim grid, threads;
    unsigned shared_bytes;
    emulate::Dim cluster;
};

// Blocks of a cluster on any device that has them.
constexpr unsigned CLUSTER_MAX = emulate::CLUSTER_MAX;

inline Result check_clusters(const Call& call, const std::string& name, const Shape& shape) {
    auto& [grid, threads, shared, cluster] = shape;
    if (cluster.x == 0 || cluster.y == 0 || cluster.z == 0) return call.refuse(INVALID_VALUE, name + ": no cluster");
    uint64_t blocks = uint64_t(cluster.x) * cluster.y * cluster.z;
    if (blocks == 1) return SUCCESS;
    if (state.settings.capability < 90) return call.refuse(NOT_SUPPORTED, name + ": no clusters on this device");
    if (blocks > CLUSTER_MAX) return call.refuse(INVALID_CLUSTER_SIZE, name + ": too many blocks in a cluster");
    if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0)
        return call.refuse(INVALID_VALUE, name + ": a grid that is not made of whole clusters");
    // The driver takes them; `grid.h` does not.
    if (cluster.y * cluster.z > 1) return call.refuse(INVALID_VALUE, name + ": clusters not along x alone");
    return SUCCESS;
}

inline Result check_launch(const Call& call, const Function* function, const Shape& shape, void** parameters) {
    if (!state.functions.count(const_cast<Function*>(function)))
        return call.refuse(INVALID_HANDLE, "no such function");
    auto& [grid, threads, shared, cluster] = shape;
    auto refuse = [&](const char* what) {
        auto of = [](const emulate::Dim& dim) {
            return std::to_string(dim.x) + "x" + std::to_string(dim.y) + "x" + std::to_string(dim.z);
        };
        return call.refuse(INVALID_VALUE, function->name + ": " + what + " (grid " + of(grid) + ", block " +
                                              of(threads) + ", " + std::to_string(shared) + " B of shared memory, " +
                                              std::to_string(function->shared_bytes) + " allowed)");
    };
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return refuse("no blocks");
    if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) return refuse("too many blocks");
    if (threads.x == 0 || threads.y == 0 || threads.z == 0) return refuse("no threads");
    uint64_t count = uint64_t(threads.x) * threads.y * threads.z;
    if (count > 1024 || threads.z > 64) return refuse("too many threads");
    if (int64_t(shared) > function->shared_bytes) return refuse("too much shared memory");
    if (!function->kernel->sizes.empty() && !parameters) return refuse("no parameters");
    for (size_t i = 0; i < function->kernel->sizes.size(); ++i)
        if (!parameters[i]) return refuse("too few parameters");
    return check_clusters(call, function->name, shape);
}

// Runs a kernel whose parameters are words; those that were addresses of freed memory are its fault.
inline Result run_kernel(const Kernel& kernel, const std::string& name, const Shape& shape,
                         const std::vector<uint64_t>& words) {
    for (size_t i = 0; i < words.size(); ++i) {
        const Memory* memory = kernel.sizes[i] == 8 ? memory_at(words[i], 1) : nullptr;
        if (!memory || !memory->is_gone) continue;
        ++state.refused;
        state.note("REFUSED " + name + ": parameter " + std::to_string(i) + " is memory that was freed");
        return ILLEGAL_ADDRESS;
    }
    ++state.kernels;
    emulate::run_grid(kernel, shape.grid, shape.cluster.x, shape.threads, shape.shared_bytes, state.kernels,
                      words.data());
    for (auto& [begin, memory] : state.memories)
        if (!memory.is_gone) memory.buffer->check();
    return SUCCESS;
}

// Whether this launch fails because a test wants it so.
inline bool fails_as_asked() {
    const Settings& settings = state.settings;
    ++state.launches;
    if (state.launches >= settings.launches_from) return true;
    return !settings.launches_while.empty() && access(settings.launches_while.c_str(), F_OK) == 0;
}

// A fault that is found once the stream comes to it, or a launch that is not taken.
inline Result fail_as_asked(const Call& call, Stream* stream) {
    Result failure = state.settings.launches;
    if (failure < ILLEGAL_ADDRESS || failure == LAUNCH_OUT_OF_RESOURCES) return failure;
    return put(call, stream, Work{[=] { return failure; }});
}

}  // namespace driver
