// Memory of the device, which is this machine's, and page-locked memory.
#pragma once

#include <fcntl.h>

#include "work.h"

namespace driver {

// The memory that holds these bytes, freed or not; null if none does.
inline Memory* memory_at(uintptr_t address, size_t bytes) {
    auto after = state.memories.upper_bound(address);
    if (after == state.memories.begin()) return nullptr;
    auto& [begin, memory] = *std::prev(after);
    return address + bytes <= begin + memory.buffer->bytes ? &memory : nullptr;
}

// Whether bytes of device memory can be read and written by work that is put on a stream now.
inline Result check_range(const Call& call, uintptr_t address, size_t bytes) {
    for (auto& [begin, pages] : state.mapped)
        if (begin <= address && address + bytes <= begin + pages.second) return SUCCESS;
    const Memory* memory = memory_at(address, bytes);
    if (!memory) return call.refuse(INVALID_VALUE, std::to_string(bytes) + " bytes that are no buffer's");
    if (memory->is_freed) return call.refuse(INVALID_VALUE, "memory that was freed");
    return SUCCESS;
}

// Takes memory away from kernels and keeps its addresses.
inline void retire(Memory& memory) {
    if (memory.is_gone) return;
    emulate::Buffer& buffer = *memory.buffer;
    buffer.check();
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap(buffer.pages, buffer.page_bytes, PROT_NONE, flags, -1, 0);
    if (memory.file >= 0) close(memory.file);
    memory.is_gone = true;
    memory.context->used -= buffer.bytes;
}

// `is_shared`: other processes may map it.
inline Result allocate(const Call& call, uint64_t* address, size_t bytes, bool is_shared) {
    if (!address || bytes == 0) return call.refuse(INVALID_VALUE, "a buffer of nothing");
    if (current->used + bytes > state.settings.memory) return OUT_OF_MEMORY;
    int file = -1;
    if (is_shared) {
        file = memfd_create("keyway-stand-in", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, emulate::Buffer::page_bytes_of(bytes)) != 0) return OUT_OF_MEMORY;
    }
    auto buffer =
        std::make_unique<emulate::Buffer>(bytes, state.random.coin(), emulate::GLOBAL_ALIGNMENT, file);
    auto begin = reinterpret_cast<uintptr_t>(buffer->data);
    state.memories[begin] = Memory{std::move(buffer), current, false, false, file};
    current->used += bytes;
    *address = begin;
    return SUCCESS;
}

inline Memory* to_free(uintptr_t address) {
    auto found = state.memories.find(address);
    return found == state.memories.end() || found->second.is_freed ? nullptr : &found->second;
}

inline bool overlaps(const Work& work, uintptr_t begin, uintptr_t end) {
    return work.host < end && begin < work.host_end;
}

// The page-locked memory that holds these bytes: what is not there is copied at once.
inline bool is_pinned(const void* host, size_t bytes) {
    auto address = reinterpret_cast<uintptr_t>(host);
    auto after = state.pinned.upper_bound(address);
    if (after == state.pinned.begin()) return false;
    auto& [begin, pinned] = *std::prev(after);
    return address + bytes <= begin + pinned.bytes;
}

// A copy on a stream between a device's memory and the host's.
inline Result copy(const Call& call, void* to, const void* from, size_t bytes, const void* host, uint64_t device,
                   Stream* stream) {
    if (Result code = check_range(call, device, bytes)) return code;
    auto begin = reinterpret_cast<uintptr_t>(host);
    Work work{nullptr, begin, begin + bytes};
    work.run = [=] {
        const Memory* memory = memory_at(device, bytes);
        if (memory && memory->is_gone) return ILLEGAL_ADDRESS;
        std::memcpy(to, from, bytes);
        return SUCCESS;
    };
    bool is_now = !is_pinned(host, bytes);
    if (Result code = put(call, stream, std::move(work))) return code;
    // The driver takes a copy of memory that is not page-locked, and waits until it has filled it.
    if (is_now && !stream->capture) run_until(*stream, stream->begun);
    return stream->context->broken;
}

}  // namespace driver
