// The emulator's process: keeps buffers, launches kernels of `kernels.h` on request, answers on standard
// output. Words of the protocol are little-endian u64: 'A' id bytes, 'W' id offset bytes data, 'R' id
// offset bytes -> data, 'P' id -> address, 'L' name grid block shared seed arguments -> 1. Every buffer ends (or
// begins) at a page that may not be touched, and what lies between holds a pattern that is checked after each
// launch: an access outside a buffer is an error.
#include <csignal>
#include <map>
#include <string>
#include <sys/mman.h>
#include <tuple>
#include <unistd.h>

#include "kernels.h"

namespace {

constexpr size_t PAGE = 4096;
// The most that a kernel may rely on: 16 bytes of a global buffer, and what a swizzled tile needs of shared
// memory.
constexpr size_t GLOBAL_ALIGNMENT = 16, SHARED_ALIGNMENT = 1024;
constexpr unsigned char PATTERN = 0xa5, POISON = 0xff;

struct Buffer {
    unsigned char *pages = nullptr, *data = nullptr;
    size_t page_bytes = 0, bytes = 0;

    Buffer(size_t size, bool at_end, size_t alignment) : bytes(size) {
        page_bytes = (size + PAGE - 1) / PAGE * PAGE + PAGE;
        void* all = mmap(nullptr, page_bytes + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) emulate::fail("out of memory");
        pages = static_cast<unsigned char*>(all) + PAGE;
        mprotect(pages, page_bytes, PROT_READ | PROT_WRITE);
        std::memset(pages, PATTERN, page_bytes);
        data = at_end ? pages + page_bytes - (size + alignment - 1) / alignment * alignment : pages;
        std::memset(data, POISON, bytes);
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { munmap(pages - PAGE, page_bytes + 2 * PAGE); }

    // Around what it holds, which may be much.
    void check() const {
        check(pages, data);
        check(data + bytes, pages + page_bytes);
    }
    static void check(const unsigned char* p, const unsigned char* end) {
        for (; p < end; ++p)
            if (*p != PATTERN) emulate::fail("a kernel wrote outside of a buffer");
    }
};

void on_fault(int) {
    const char message[] = "emulator: a kernel touched memory outside of its buffers\n";
    if (write(2, message, sizeof message - 1)) {
    }
    _exit(3);
}

void read_all(void* to, size_t bytes) {
    if (bytes > 0 && std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);
}

uint64_t word() {
    uint64_t value;
    read_all(&value, 8);
    return value;
}

std::map<uint64_t, std::unique_ptr<Buffer>> buffers;

// Arguments as the launch sends them, each in the bytes of a u64; a pointer was sent as buffer id and offset.
std::vector<uint64_t> read_arguments() {
    std::vector<uint64_t> arguments;
    for (uint64_t left = word(); left > 0; --left) {
        uint64_t is_pointer = word(), value = word(), offset = word();
        if (is_pointer && value != 0) {
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
    emulate::gridDim = read_dim();
    emulate::blockDim = read_dim();
    size_t shared_bytes = word();
    emulate::random.state = word();
    std::vector<uint64_t> arguments = read_arguments();
    auto kernel = kernels.find(name);
    if (kernel == kernels.end()) emulate::fail("no such kernel:", name.c_str());
    if (arguments.size() != kernel->second.arguments)
        emulate::fail("wrong number of arguments:", name.c_str());
    emulate::body = [&] { kernel->second.call(arguments.data()); };

    emulate::Dim grid = emulate::gridDim;
    std::vector<emulate::Dim> order;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) order.push_back({x, y, z});
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[emulate::random.below(i)]);
    static emulate::Block block;
    Buffer shared(shared_bytes, emulate::random.coin(), SHARED_ALIGNMENT);
    for (emulate::Dim index : order) {
        std::memset(shared.data, POISON, shared_bytes);
        emulate::run_block(block, index, shared.data);
        shared.check();
    }
    for (auto& buffer : buffers) buffer.second->check();
}

}  // namespace

int main() {
    static char fault_stack[1 << 16];
    stack_t stack{};
    stack.ss_sp = fault_stack, stack.ss_size = sizeof fault_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action{};
    action.sa_handler = on_fault, action.sa_flags = SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    emulate::Random sides{1};
    for (;;) {
        uint64_t command = word();
        if (command == 'L') {
            launch();
            uint64_t done = 1;
            std::fwrite(&done, 8, 1, stdout);
        } else {
            uint64_t id = word();
            if (command == 'A') {
                buffers[id] = std::make_unique<Buffer>(word(), sides.coin(), GLOBAL_ALIGNMENT);
            } else if (command == 'F') {
                buffers.erase(id);
            } else if (command == 'P') {
                uint64_t address = reinterpret_cast<uint64_t>(buffers.at(id)->data);
                std::fwrite(&address, 8, 1, stdout);
            } else {
                size_t offset = word(), bytes = word();
                Buffer& buffer = *buffers.at(id);
                if (offset + bytes > buffer.bytes) emulate::fail("a transfer beyond a buffer's end");
                if (command == 'W') read_all(buffer.data + offset, bytes);
                else std::fwrite(buffer.data + offset, 1, bytes, stdout);
            }
        }
        std::fflush(stdout);
    }
}
