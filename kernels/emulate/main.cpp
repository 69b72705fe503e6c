// The emulator's process: keeps buffers, launches kernels of `kernels.h` on request, answers on standard
// output. Words of the protocol are little-endian u64: 'A' id bytes, 'W' id offset bytes data, 'R' id
// offset bytes -> data, 'P' id -> address, 'L' name grid cluster block shared seed arguments -> 1, 'U' and
// 'C' -> a text, 'S' -> a number.
#include <map>
#include <string>

#include "constants.h"
#include "launch.h"

namespace {

void read_all(void* to, size_t bytes) {
    if (bytes > 0 && std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);
}

uint64_t word() {
    uint64_t value;
    read_all(&value, 8);
    return value;
}

std::map<uint64_t, std::unique_ptr<emulate::Buffer>> buffers;

// Of each kernel that was launched, the fewest bytes of shared memory that a launch asked for in vain.
std::map<std::string, size_t> in_vain;

// Arguments as the launch sends them, each in the bytes of a u64; a pointer was sent as buffer id and offset.
std::vector<uint64_t> read_arguments(const std::string& name, const Kernel& kernel) {
    std::vector<uint64_t> arguments;
    if (word() != kernel.parameters.size()) emulate::fail("wrong number of arguments:", name.c_str());
    for (Parameter parameter : kernel.parameters) {
        uint64_t kind = word(), value = word(), offset = word();
        if (Parameter(kind) != parameter) {
            const char* const names[] = {"a whole number", "an address", "a float"};
            std::string at = name + ": argument " + std::to_string(arguments.size()) + " is " + names[kind] + ", not";
            emulate::fail(at.c_str(), names[uint64_t(parameter)]);
        }
        if (parameter == Parameter::POINTER && value != 0) {
            auto found = buffers.find(value);
            if (found == buffers.end()) emulate::fail("a launch names a buffer that does not exist");
            value = reinterpret_cast<uint64_t>(found->second->data) + offset;
        }
        arguments.push_back(value);
    }
    return arguments;
}

emulate::Dim read_dim() {
    emulate::Dim dim;
    dim.x = word(), dim.y = word(), dim.z = word();
    return dim;
}

void launch() {
    std::string name(word(), ' ');
    read_all(name.data(), name.size());
    emulate::Dim grid = read_dim();
    const unsigned cluster = word();
    emulate::Dim threads = read_dim();
    size_t shared_bytes = word();
    uint64_t seed = word();
    auto kernel = kernels.find(name);
    if (kernel == kernels.end()) emulate::fail("no such kernel:", name.c_str());
    std::vector<uint64_t> arguments = read_arguments(name, kernel->second);
    size_t unused = emulate::run_grid(kernel->second, grid, cluster, threads, shared_bytes, seed,
                                      arguments.data());
    auto known = in_vain.emplace(name, unused).first;
    known->second = std::min(known->second, unused);
    for (auto& buffer : buffers) buffer.second->check();
}

void answer(const std::string& text) {
    uint64_t length = text.size();
    std::fwrite(&length, 8, 1, stdout);
    std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace

int main() {
    emulate::catch_faults();
    emulate::Random sides{1};
    for (;;) {
        uint64_t command = word();
        if (command == 'U') {
            std::string text;
            for (auto& [name, bytes] : in_vain)
                text += name + " " + std::to_string(bytes) + "\n";
            answer(text);
        } else if (command == 'S') {
            std::fwrite(&emulate::waits, 8, 1, stdout);
        } else if (command == 'C') {
            answer(constants::source());
        } else if (command == 'L') {
            launch();
            uint64_t done = 1;
            std::fwrite(&done, 8, 1, stdout);
        } else {
            uint64_t id = word();
            if (command == 'A') {
                buffers[id] = std::make_unique<emulate::Buffer>(word(), sides.coin(), emulate::GLOBAL_ALIGNMENT);
            } else if (command == 'F') {
                buffers.erase(id);
            } else if (command == 'P') {
                uint64_t address = reinterpret_cast<uint64_t>(buffers.at(id)->data);
                std::fwrite(&address, 8, 1, stdout);
            } else {
                size_t offset = word(), bytes = word();
                emulate::Buffer& buffer = *buffers.at(id);
                if (offset + bytes > buffer.bytes) emulate::fail("a transfer beyond a buffer's end");
                if (command == 'W') read_all(buffer.data + offset, bytes);
                else std::fwrite(buffer.data + offset, 1, bytes, stdout);
            }
        }
        std::fflush(stdout);
    }
}
