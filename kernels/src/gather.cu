// Rows of a matrix by their numbers: embeddings of tokens, the rows whose logits are wanted. Row r of `out`
// [rows, width] is row `rows[r]` of the matrix, bit for bit. `gather`: of a row-major matrix whose rows begin
// `stride` apart. `gather_packed`: of a bf16 weight packed as `matmul.cu` says, so that a head that is the
// embedding too lies in memory once; `width` is its K. Widths and strides are multiples of 8.
// Grid: (packets of 8 columns / 128, rows). Block: 128 threads.
// And `fill_in`, before embeddings are looked up: tokens that the host did not know yet when it planned the
// step. Grid: (tokens / 128).
#include "numbers.cuh"

constexpr int THREADS = 128;
// Of a token that is not known yet; the other bits are the number of the row that drew it.
constexpr uint32_t PENDING = 0x80000000u;

extern "C" __global__ void __launch_bounds__(THREADS)
    gather(const uint16_t* matrix, const uint32_t* rows, uint16_t* out, uint32_t width, uint32_t stride) {
    follow();
    const uint32_t column = (blockIdx.x * THREADS + threadIdx.x) * 8;
    if (column >= width) return;
    const Packet packet = load_packet(matrix + uint64_t(rows[blockIdx.y]) * stride + column);
    store_packet(out + uint64_t(blockIdx.y) * width + column, packet);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_packed(const unsigned char* images, const uint32_t* rows, uint16_t* out, uint32_t width) {
    follow();
    const uint32_t unit = blockIdx.x * THREADS + threadIdx.x;
    if (unit * 8 >= width) return;
    const uint32_t row = rows[blockIdx.y];
    const unsigned char* image = images + (uint64_t(row / 64) * (width / 64) + unit / 8) * (64 * 64 * 2);
    const Packet packet = load_packet(image + (row % 64 * 8 + ((unit ^ row) & 7)) * 16);
    store_packet(out + uint64_t(blockIdx.y) * width + unit * 8, packet);
}

// Of `tokens`, those that are PENDING are numbers of rows of the step before: what was drawn there takes
// their place.
extern "C" __global__ void __launch_bounds__(THREADS)
    fill_in(uint32_t* tokens, const uint32_t* drawn, uint32_t count) {
    follow();
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count && (tokens[i] & PENDING) != 0) tokens[i] = drawn[tokens[i] & ~PENDING];
}
