// The driver's calls for memory, other processes' too.
#pragma once

#include "memory.h"

namespace driver {

API cuMemGetInfo_v2(size_t* free, size_t* total) {
    CALL;
    CHECK(call.check());
    *total = state.settings.memory, *free = *total - current->used;
    return SUCCESS;
}

API cuMemAllocAsync(uint64_t* address, size_t bytes, Stream* stream) {
    CALL;
    CHECK(call.check());
    if (!state.streams.count(stream)) return call.refuse(INVALID_HANDLE, "no such stream");
    // The driver would make a node of the graph of it, whose address holds within the graph alone.
    if (stream->capture) return spoil(stream, call.refuse(CAPTURE_UNSUPPORTED, "in a capture"));
    return allocate(call, address, bytes, false);
}

API cuMemFreeAsync(uint64_t address, Stream* stream) {
    CALL;
    CHECK(call.check());
    if (state.streams.count(stream) && stream->capture)
        return spoil(stream, call.refuse(CAPTURE_UNSUPPORTED, "in a capture"));
    Memory* memory = to_free(address);
    if (!memory) return call.refuse(INVALID_VALUE, "no buffer that is still there");
    memory->is_freed = true;
    return put(call, stream, Work{[=] { return retire(*memory), SUCCESS; }});
}

API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    CALL;
    CHECK(call.check_unsafe());
    return allocate(call, address, bytes, true);
}

API cuMemFree_v2(uint64_t address) {
    CALL;
    CHECK(call.check_unsafe());
    run_all(current);
    Memory* memory = to_free(address);
    if (!memory) return call.refuse(INVALID_VALUE, "no buffer that is still there");
    memory->is_freed = true;
    return retire(*memory), SUCCESS;
}

API cuMemHostAlloc(void** host, size_t bytes, unsigned) {
    CALL;
    CHECK(call.check_unsafe());
    if (bytes == 0) return call.refuse(INVALID_VALUE, "no bytes");
    *host = std::aligned_alloc(emulate::PAGE, (bytes + emulate::PAGE - 1) / emulate::PAGE * emulate::PAGE);
    if (!*host) return OUT_OF_MEMORY;
    std::memset(*host, emulate::POISON, bytes);
    state.pinned[reinterpret_cast<uintptr_t>(*host)] = {bytes};
    return SUCCESS;
}

API cuMemFreeHost(void* host) {
    CALL;
    CHECK(call.check_unsafe());
    auto begin = reinterpret_cast<uintptr_t>(host);
    auto found = state.pinned.find(begin);
    if (found == state.pinned.end()) return call.refuse(INVALID_VALUE, "no page-locked memory");
    for (const Stream* stream : state.streams)
        for (const Work& work : stream->waiting)
            if (overlaps(work, begin, begin + found->second.bytes))
                return call.refuse(INVALID_VALUE, "page-locked memory that a copy still uses");
    state.pinned.erase(found);
    std::free(host);
    return SUCCESS;
}

API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
    CALL;
    CHECK(call.check());
    return spoil(stream, copy(call, reinterpret_cast<void*>(to), from, bytes, from, to, stream));
}

API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
    CALL;
    CHECK(call.check());
    return spoil(stream, copy(call, to, reinterpret_cast<const void*>(from), bytes, to, from, stream));
}

API cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    CALL;
    CHECK(call.check_unsafe());
    CHECK(check_range(call, to, bytes));
    run_all(current);
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return current->broken;
}

API cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    CALL;
    CHECK(call.check_unsafe());
    CHECK(check_range(call, from, bytes));
    run_all(current);
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return current->broken;
}

API cuMemsetD8Async(uint64_t address, unsigned char byte, size_t bytes, Stream* stream) {
    CALL;
    CHECK(call.check());
    CHECK(spoil(stream, check_range(call, address, bytes)));
    return put(call, stream, Work{[=] { return std::memset(reinterpret_cast<void*>(address), byte, bytes), SUCCESS; }});
}

API cuMemsetD8_v2(uint64_t address, unsigned char byte, size_t bytes) {
    CALL;
    CHECK(call.check_unsafe());
    CHECK(check_range(call, address, bytes));
    run_all(current);
    std::memset(reinterpret_cast<void*>(address), byte, bytes);
    return current->broken;
}

// === memory of other processes ===

struct Handle {
    char bytes[64];
};
struct Shared {
    int process, file;
    size_t page_bytes, offset;
};

API cuIpcGetMemHandle(Handle* handle, uint64_t address) {
    CALL;
    CHECK(call.check());
    Memory* memory = to_free(address);
    if (!memory || memory->file < 0) return call.refuse(INVALID_VALUE, "memory that cuMemAlloc did not give");
    const emulate::Buffer& buffer = *memory->buffer;
    Shared shared{getpid(), memory->file, buffer.page_bytes, size_t(buffer.data - buffer.pages)};
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &shared, sizeof shared);
    return SUCCESS;
}

API cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned) {
    CALL;
    CHECK(call.check_unsafe());
    Shared shared;
    std::memcpy(&shared, &handle, sizeof shared);
    if (shared.process == getpid()) return call.refuse(INVALID_CONTEXT, "a handle of this process");
    std::string path = "/proc/" + std::to_string(shared.process) + "/fd/" + std::to_string(shared.file);
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return call.refuse(INVALID_VALUE, "memory that is gone");
    void* pages = mmap(nullptr, shared.page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (pages == MAP_FAILED) return OUT_OF_MEMORY;
    *address = reinterpret_cast<uint64_t>(pages) + shared.offset;
    state.mapped[*address] = {pages, shared.page_bytes - shared.offset};
    return SUCCESS;
}

API cuIpcCloseMemHandle(uint64_t address) {
    CALL;
    CHECK(call.check_unsafe());
    run_all(current);
    auto found = state.mapped.find(address);
    if (found == state.mapped.end()) return call.refuse(INVALID_VALUE, "nothing that was mapped");
    munmap(found->second.first, found->second.second + (address - uint64_t(found->second.first)));
    state.mapped.erase(found);
    return SUCCESS;
}

}  // namespace driver
