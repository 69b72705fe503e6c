// What the stand-in for the CUDA driver keeps: contexts, streams whose work waits, memory, modules; and how
// it reports what it refuses. The rules are in the calls (`libcuda.cpp`, `stream_calls.h`, `memory_calls.h`).
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "../launch.h"

namespace driver {

// cuda.h's numbers.
enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    INVALID_CLUSTER_SIZE = 912,
};

struct Named {
    Result code;
    const char *name, *text;
};
constexpr Named NAMES[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {INVALID_CLUSTER_SIZE, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "cluster misconfiguration"},
};

// === what a test asks for, by environment variables ===

inline const char* text_of(const char* name, const char* otherwise = "") {
    const char* text = std::getenv(name);
    return text ? text : otherwise;
}
inline uint64_t number_of(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct Settings {
    // 75, 80, 86, 89, 90, 100, 103, 110, 120, 121.
    unsigned capability = number_of("STAND_IN_CAPABILITY", 90);
    unsigned devices = number_of("STAND_IN_DEVICES", 1);
    int version = number_of("STAND_IN_DRIVER_VERSION", 13000);
    size_t memory = number_of("STAND_IN_MEMORY", size_t(1) << 30);
    // What every module's load comes to.
    Result modules = Result(number_of("STAND_IN_FAILING_MODULES", SUCCESS));
    // Launches, of graphs too, that fail: all from this one on, the first being 1; all while a file is there.
    uint64_t launches_from = number_of("STAND_IN_FAILING_LAUNCHES_FROM", ~uint64_t(0));
    std::string launches_while = text_of("STAND_IN_FAILING_LAUNCHES_WHILE");
    // How they fail: those from 700 on but 701 at their stream's end, and everything after them.
    Result launches = Result(number_of("STAND_IN_LAUNCH_FAILURE", LAUNCH_OUT_OF_RESOURCES));
    // Where a line for each refusal goes, and at the end one with the counts; nowhere else but to stderr if
    // absent.
    std::string report = text_of("STAND_IN_REPORT");

    // Shared memory that a block may ask for.
    int shared_optin() const {
        switch (capability) {
            case 75: return 64 << 10;
            case 80: return 163 << 10;
            case 86: case 89: case 120: case 121: return 99 << 10;
            default: return 227 << 10;
        }
    }
};

struct Context {
    unsigned device = 0, retained = 0;
    // After a kernel's fault every call fails with it.
    Result broken = SUCCESS;
    size_t used = 0;
};

// Work on a stream, which runs when it is waited for, or at once: callers must be right either way.
struct Work {
    std::function<Result()> run;
    // Page-locked memory that it reads or writes.
    uintptr_t host = 0, host_end = 0;
};

struct Capture {
    std::thread::id thread;
    unsigned mode = 0;
    bool is_invalid = false;
    std::vector<Work> works;
};

struct Stream {
    Context* context = nullptr;
    std::deque<Work> waiting;
    uint64_t begun = 0, done = 0;
    std::unique_ptr<Capture> capture;
};

struct Event {
    Context* context = nullptr;
    bool is_timed = false;
    Stream* stream = nullptr;
    // The work on the stream before it.
    uint64_t behind = 0;
    bool is_captured = false;
    std::chrono::steady_clock::time_point at{};
};

// Memory that was freed stays here, untouchable: no address comes twice.
struct Memory {
    std::unique_ptr<emulate::Buffer> buffer;
    Context* context;
    // Freed for those who call, and for the work that waits.
    bool is_freed = false, is_gone = false;
    // What other processes map; of memory from the pool there is none.
    int file = -1;
};

// Code of a fatbin.
struct Code {
    bool is_there = false, is_machine = false, is_exact = false;
    unsigned architecture = 0;

    std::string name() const {
        return (is_machine ? "sm_" : "compute_") + std::to_string(architecture) + (is_exact ? "a" : "");
    }
    // Whether its kernels wait for earlier launches themselves (`platform.cuh`): PTX for 8.0 has no word for it.
    bool waits() const { return architecture >= 90; }
};

struct Function {
    std::string name;
    const Kernel* kernel;
    Code code;
    int shared_bytes = 48 << 10;
};

struct Module {
    std::string name;
    std::map<std::string, Function> functions;
};

struct Graph {
    std::vector<Work> works;
};

struct Pinned {
    size_t bytes;
};

struct State {
    std::recursive_mutex lock;
    Settings settings;
    bool is_initialised = false;
    std::map<unsigned, Context> contexts;
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::set<Module*> modules;
    std::set<Function*> functions;
    std::set<Graph*> graphs, instances;
    std::map<uintptr_t, Memory> memories;
    std::map<uintptr_t, Pinned> pinned;
    // Mapped memory of other processes, with its pages.
    std::map<uintptr_t, std::pair<void*, size_t>> mapped;
    emulate::Random random{1};
    uint64_t calls = 0, launches = 0, kernels = 0, replays = 0, captures = 0, refused = 0;

    void note(const std::string& line) const {
        std::FILE* file = settings.report.empty() ? stderr : std::fopen(settings.report.c_str(), "a");
        if (!file) return;
        std::fprintf(file, "%s\n", line.c_str());
        if (file == stderr) std::fflush(file);
        else std::fclose(file);
    }
};

// Never destroyed: threads may still call while the process ends.
inline State& state = *new State;
inline thread_local Context* current = nullptr;

// One call of the driver: nobody else's meanwhile.
struct Call {
    const char* name;
    std::lock_guard<std::recursive_mutex> guard{state.lock};
    uint64_t number = ++state.calls;

    // A mistake of who calls: what a test must not see.
    Result refuse(Result code, const std::string& why) const {
        ++state.refused;
        state.note(std::string("REFUSED ") + name + ": " + why);
        return code;
    }
    // Whether the thread has a context that works.
    Result check() const {
        if (!state.is_initialised) return refuse(NOT_INITIALIZED, "before cuInit");
        if (!current) return refuse(INVALID_CONTEXT, "no context on this thread");
        return current->broken;
    }
    // The same of a call that no thread may make while it captures a stream: such a capture is lost.
    Result check_unsafe() const {
        if (Result code = check()) return code;
        for (Stream* stream : state.streams) {
            Capture* capture = stream->capture.get();
            if (!capture || (capture->mode == 1 && capture->thread != std::this_thread::get_id())) continue;
            if (capture->mode == 2) continue;
            capture->is_invalid = true;
            return refuse(CAPTURE_UNSUPPORTED, "while a stream is captured");
        }
        return SUCCESS;
    }
};

}  // namespace driver
