// A stand-in for the CUDA driver (`libcuda.so`), for tests on machines without a GPU: what cudarc resolves of
// it, with the driver's rules, over this machine's memory, and kernels that run in the emulator. A call that
// breaks a rule gets the driver's own error and is noted in the report. Not here: streams that run at once,
// graphs but by capture.
#include "memory_calls.h"
#include "stream_calls.h"

namespace driver {

namespace {

Result start(const Call& call) {
    if (state.settings.devices == 0) return NO_DEVICE;
    return state.is_initialised ? SUCCESS : call.refuse(NOT_INITIALIZED, "before cuInit");
}

// A device goes on by itself: what nobody waits for is done once nobody has called for a while, for other
// processes may.
void go_on() {
    for (uint64_t calls = 0;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        std::lock_guard<std::recursive_mutex> guard(state.lock);
        if (state.calls == calls)
            for (Stream* stream : state.streams) run_until(*stream, stream->begun);
        calls = state.calls;
    }
}

// As the process ends; from then on nobody else gets the lock.
void report() {
    state.lock.lock();
    if (state.settings.report.empty()) return;
    state.note("DONE launches=" + std::to_string(state.launches) + " kernels=" + std::to_string(state.kernels) +
               " captures=" + std::to_string(state.captures) + " replays=" + std::to_string(state.replays) +
               " refused=" + std::to_string(state.refused));
}

}  // namespace

// === the driver and its devices ===

API cuInit(unsigned flags) {
    CALL;
    if (flags != 0) return call.refuse(INVALID_VALUE, "flags");
    if (state.settings.devices == 0) return NO_DEVICE;
    if (!state.is_initialised) {
        emulate::catch_faults();
        std::atexit(report);
        std::thread(go_on).detach();
    }
    state.is_initialised = true;
    return SUCCESS;
}

API cuDriverGetVersion(int* version) {
    *version = state.settings.version;
    return SUCCESS;
}

API cuGetErrorName(int code, const char** name) {
    for (const Named& known : NAMES)
        if (known.code == code) return *name = known.name, SUCCESS;
    return INVALID_VALUE;
}

API cuGetErrorString(int code, const char** text) {
    for (const Named& known : NAMES)
        if (known.code == code) return *text = known.text, SUCCESS;
    return INVALID_VALUE;
}

API cuDeviceGetCount(int* count) {
    CALL;
    CHECK(start(call));
    *count = state.settings.devices;
    return SUCCESS;
}

API cuDeviceGet(int* device, int ordinal) {
    CALL;
    CHECK(start(call));
    if (ordinal < 0 || unsigned(ordinal) >= state.settings.devices) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API cuDeviceGetName(char* name, int length, int) {
    std::snprintf(name, length, "Stand-in for a GPU of %u.%u", state.settings.capability / 10,
                  state.settings.capability % 10);
    return SUCCESS;
}

API cuDeviceGetAttribute(int* value, int attribute, int) {
    CALL;
    CHECK(start(call));
    switch (attribute) {
        case 1: *value = 1024; break;                                // threads a block
        case 8: *value = 48 << 10; break;                            // shared memory without asking
        case 10: *value = 32; break;                                 // lanes
        case 16: *value = 2; break;                                  // multiprocessors, as the emulator has
        case 75: *value = state.settings.capability / 10; break;     // compute capability
        case 76: *value = state.settings.capability % 10; break;
        case 97: *value = state.settings.shared_optin(); break;      // shared memory that can be asked for
        case 115: *value = 1; break;                                 // memory pools
        default: return call.refuse(INVALID_VALUE, "attribute " + std::to_string(attribute));
    }
    return SUCCESS;
}

// === contexts ===

API cuDevicePrimaryCtxRetain(Context** context, int device) {
    CALL;
    CHECK(start(call));
    if (device < 0 || unsigned(device) >= state.settings.devices) return INVALID_DEVICE;
    *context = &state.contexts[device];
    (*context)->device = device, ++(*context)->retained;
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    CALL;
    auto found = state.contexts.find(device);
    if (found == state.contexts.end() || found->second.retained == 0)
        return call.refuse(INVALID_CONTEXT, "a context that nobody holds");
    --found->second.retained;
    return SUCCESS;
}

API cuCtxGetCurrent(Context** context) {
    CALL;
    CHECK(start(call));
    *context = current;
    return SUCCESS;
}

API cuCtxSetCurrent(Context* context) {
    CALL;
    CHECK(start(call));
    if (context && context->retained == 0) return call.refuse(INVALID_CONTEXT, "a context that was released");
    current = context;
    return SUCCESS;
}

API cuCtxSynchronize() {
    CALL;
    CHECK(call.check_unsafe());
    run_all(current);
    return current->broken;
}

// === modules and launches ===

API cuModuleLoadData(Module** module, const void* image) {
    CALL;
    CHECK(call.check_unsafe());
    return load(call, module, image);
}

API cuModuleUnload(Module* module) {
    CALL;
    if (!state.modules.count(module)) return call.refuse(INVALID_HANDLE, "no such module");
    for (auto& [name, function] : module->functions) state.functions.erase(&function);
    return forget(call, state.modules, module);
}

API cuModuleGetFunctionCount(unsigned* count, Module* module) {
    CALL;
    CHECK(call.check());
    if (!state.modules.count(module)) return call.refuse(INVALID_HANDLE, "no such module");
    *count = module->functions.size();
    return SUCCESS;
}

API cuModuleEnumerateFunctions(Function** functions, unsigned count, Module* module) {
    CALL;
    CHECK(call.check());
    if (!state.modules.count(module)) return call.refuse(INVALID_HANDLE, "no such module");
    for (auto& [name, function] : module->functions)
        if (count-- > 0) *functions++ = &function;
        else break;
    return SUCCESS;
}

API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    CALL;
    CHECK(call.check());
    if (!state.modules.count(module)) return call.refuse(INVALID_HANDLE, "no such module");
    auto found = module->functions.find(name);
    if (found == module->functions.end())
        return call.refuse(NOT_FOUND, module->name + " has no kernel " + name);
    *function = &found->second;
    return SUCCESS;
}

API cuFuncGetName(const char** name, Function* function) {
    CALL;
    if (!state.functions.count(function)) return call.refuse(INVALID_HANDLE, "no such function");
    *name = function->name.c_str();
    return SUCCESS;
}

API cuFuncLoad(Function* function) {
    CALL;
    CHECK(call.check_unsafe());
    return state.functions.count(function) ? SUCCESS : call.refuse(INVALID_HANDLE, "no such function");
}

constexpr int ATTRIBUTE_THREADS = 0, ATTRIBUTE_STATIC_SHARED = 1, ATTRIBUTE_DYNAMIC_SHARED = 8;

API cuFuncGetAttribute(int* value, int attribute, Function* function) {
    CALL;
    CHECK(call.check());
    if (!state.functions.count(function)) return call.refuse(INVALID_HANDLE, "no such function");
    switch (attribute) {
        case ATTRIBUTE_THREADS: *value = 1024; break;
        // `platform.cuh` has none. From 9.0 on a fatbin says a kilobyte, which is the system's.
        case ATTRIBUTE_STATIC_SHARED: *value = function->code.waits() ? 1024 : 0; break;
        case ATTRIBUTE_DYNAMIC_SHARED: *value = function->shared_bytes; break;
        default: return call.refuse(INVALID_VALUE, "attribute " + std::to_string(attribute));
    }
    return SUCCESS;
}

API cuFuncSetAttribute(Function* function, int attribute, int value) {
    CALL;
    CHECK(call.check());
    if (!state.functions.count(function)) return call.refuse(INVALID_HANDLE, "no such function");
    if (attribute != ATTRIBUTE_DYNAMIC_SHARED)
        return call.refuse(INVALID_VALUE, "attribute " + std::to_string(attribute));
    if (value < 0 || value > state.settings.shared_optin())
        return call.refuse(INVALID_VALUE, function->name + " asks for " + std::to_string(value) +
                                              " B of shared memory, the device has " +
                                              std::to_string(state.settings.shared_optin()));
    function->shared_bytes = value;
    return SUCCESS;
}

namespace {

Result launch(const Call& call, Function* function, const Shape& shape, Stream* stream, void** parameters) {
    CHECK(spoil(stream, check_launch(call, function, shape, parameters)));
    bool is_captured = state.streams.count(stream) && stream->capture;
    if (!is_captured && fails_as_asked()) return fail_as_asked(call, stream);
    const Kernel& kernel = *function->kernel;
    std::vector<uint64_t> words(kernel.sizes.size());
    for (size_t i = 0; i < words.size(); ++i) std::memcpy(&words[i], parameters[i], kernel.sizes[i]);
    std::string name = function->name;
    return put(call, stream, Work{[=, &kernel] { return run_kernel(kernel, name, shape, words); }});
}

}  // namespace

API cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x, unsigned y,
                   unsigned z, unsigned shared_bytes, Stream* stream, void** parameters, void** extra) {
    CALL;
    CHECK(call.check());
    if (extra) return call.refuse(INVALID_VALUE, "parameters in a buffer");
    return launch(call, function, Shape{{grid_x, grid_y, grid_z}, {x, y, z}, shared_bytes, {}}, stream, parameters);
}

// How a launch is made, and the attributes that are used here: the driver's structs.
struct LaunchAttribute {
    int id;
    char unused[4];
    unsigned values[3];
    char rest[52];
};
static_assert(sizeof(LaunchAttribute) == 72);
constexpr int ATTRIBUTE_CLUSTER_DIMENSION = 4, ATTRIBUTE_PROGRAMMATIC_SERIALIZATION = 6;
struct LaunchConfig {
    unsigned grid_x, grid_y, grid_z, x, y, z, shared_bytes;
    Stream* stream;
    const LaunchAttribute* attributes;
    unsigned attribute_count;
};

API cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** parameters, void** extra) {
    CALL;
    CHECK(call.check());
    if (extra) return call.refuse(INVALID_VALUE, "parameters in a buffer");
    const LaunchConfig& by = *config;
    Shape shape{{by.grid_x, by.grid_y, by.grid_z}, {by.x, by.y, by.z}, by.shared_bytes, {}};
    for (unsigned i = 0; i < by.attribute_count; ++i) {
        const auto& [id, unused, values, rest] = by.attributes[i];
        if (id == ATTRIBUTE_CLUSTER_DIMENSION) shape.cluster = {values[0], values[1], values[2]};
        else if (id != ATTRIBUTE_PROGRAMMATIC_SERIALIZATION)
            return call.refuse(INVALID_VALUE, "launch attribute " + std::to_string(id));
        else if (values[0] != 0 && state.functions.count(function) && !function->code.waits())
            return call.refuse(INVALID_VALUE, function->name + " would not wait for earlier launches");
    }
    return launch(call, function, shape, by.stream, parameters);
}

}  // namespace driver
