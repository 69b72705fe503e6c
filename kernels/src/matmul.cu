// y[m][n] = sum over k of x[m][k] w[n][k] (+ bias[n]), for a few rows and for many: bf16 rows, bf16, int8
// or int4 weights, f32 sums.
//
// Weights are packed once into tiles of 64 outputs by 64 inputs, [n / 64][k / 64], each an image of what
// lies in shared memory, so that loading one is a plain copy (`matmul.rs`, CUDA, packs them):
//   bf16  [64 outputs][8 units of 16 bytes], unit u of output n at u ^ (n % 8)
//   int8  [8 groups of 8 outputs][32 lanes][16]: lane 4 g + t holds, of output g, for each of four steps of 16
//         inputs, those at 2t, 2t + 1, 2t + 8, 2t + 9, plus 128
//   int4  the same in nibbles, lower first, plus 8
// int8 and int4 have one f32 scale per output and 128 inputs, `scales` [K / 128][N]; their integers are
// exact in bf16, so that a group is summed exactly like bf16 weights and scaled as a whole.
//
// The order of every sum follows from the weight's shape alone: K is cut into `splits` ranges of
// `split_tiles` tiles, each summed on its own and added in ascending order. Splits go to blocks of their
// own (`partials`, then `matmul_reduce`) or are taken one after another by one block: **the same bits**.
// The rows per block follow M; they cannot change a sum. Grid: (n tiles, m tiles, splits or 1). x, bias, y
// row-major; K a multiple of 64 (128 for int8, int4).
#include "numbers.cuh"
#include "tile.cuh"

constexpr int TILE_K = 64, TILE_N = 64, GROUP_TILES = 2;

enum Weight { BF16, INT8, INT4 };

struct Problem {
    const uint16_t* x;
    const unsigned char* weights;
    const float* scales;
    const uint16_t* bias;
    void* y;
    float* partials;
    uint32_t m, n, k, split_tiles, wide_y;
};

template <Weight WEIGHT, int BLOCK_M, int BLOCK_N, int WARPS_M, int WARPS_N, int STAGES>
struct Matmul {
    static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
    static constexpr int M_TILES = BLOCK_M / WARPS_M / 16, N_TILES = BLOCK_N / WARPS_N / 8;
    static constexpr int ROWS_BYTES = BLOCK_M * TILE_K * 2;
    static constexpr int IMAGE = WEIGHT == BF16 ? 8192 : WEIGHT == INT8 ? 4096 : 2048;
    static constexpr int IMAGES = BLOCK_N / TILE_N, STAGE = ROWS_BYTES + IMAGES * IMAGE;
    using Sums = float[M_TILES][N_TILES][4];

    const Problem& p;
    int warp_m, warp_n, lane, tiles_k;

    __device__ __forceinline__ explicit Matmul(const Problem& problem) : p(problem) {
        const int warp = threadIdx.x / 32;
        warp_m = warp / WARPS_N, warp_n = warp % WARPS_N, lane = threadIdx.x % 32;
        tiles_k = p.k / TILE_K;
    }

    __device__ __forceinline__ static unsigned char* stage(int i) {
        return shared_memory() + i % STAGES * STAGE;
    }

    __device__ __forceinline__ void load(int tile, unsigned char* to) const {
#pragma unroll
        for (int i = threadIdx.x; i < ROWS_BYTES / 16; i += THREADS) {
            const int row = i / 8, unit = i % 8;
            const uint32_t m = blockIdx.y * BLOCK_M + row;
            const uint64_t at = uint64_t(m < p.m ? m : 0) * p.k + tile * TILE_K + unit * 8;
            async_copy_16(unit_of<8>(to, row, unit), p.x + at, m < p.m);
        }
#pragma unroll
        for (int i = threadIdx.x; i < IMAGES * IMAGE / 16; i += THREADS) {
            const int image = i / (IMAGE / 16), unit = i % (IMAGE / 16);
            const uint32_t tile_n = blockIdx.x * IMAGES + image;
            const bool valid = tile_n * TILE_N < p.n;
            const uint64_t at = (uint64_t(valid ? tile_n : 0) * tiles_k + tile) * IMAGE + unit * 16;
            async_copy_16(to + ROWS_BYTES + i * 16, p.weights + at, valid);
        }
    }

    // Four integers, as they lie in an image, to the two registers of a fragment.
    __device__ __forceinline__ static void decode(uint32_t (&b)[2], uint32_t codes) {
        // The integer in the low bits of 2^23, less 2^23 and the bias.
        constexpr float BASE = WEIGHT == INT8 ? 8388608.0f + 128.0f : 8388608.0f + 8.0f;
        constexpr int BITS = WEIGHT == INT8 ? 8 : 4;
        constexpr uint32_t MASK = (1u << BITS) - 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float low = from_bits(0x4b000000u | (codes >> (2 * i * BITS) & MASK)) - BASE;
            const float high = from_bits(0x4b000000u | (codes >> ((2 * i + 1) * BITS) & MASK)) - BASE;
            b[i] = bf16_pair(low, high);
        }
    }

    // The weights' fragments of one step of 16 inputs, for this warp's columns.
    __device__ __forceinline__ void load_weights(uint32_t (&b)[N_TILES][2], unsigned char* images,
                                                 int step) const {
        const int first = warp_n * N_TILES;  // group of 8 outputs in the block
        if (WEIGHT == BF16) {
            const int matrix = lane / 8, row = lane % 8;
#pragma unroll
            for (int i = 0; i < N_TILES; i += 2) {
                const int output = (first + i + matrix / 2) * 8 + row;
                unsigned char* image = images + output / TILE_N * IMAGE;
                uint32_t four[4];
                load_matrix(four, unit_of<8>(image, output % TILE_N, 2 * step + matrix % 2));
                b[i][0] = four[0], b[i][1] = four[1], b[i + 1][0] = four[2], b[i + 1][1] = four[3];
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < N_TILES; ++i) {
            const int group = first + i;
            const unsigned char* lanes = images + group / 8 * IMAGE + (group % 8 * 32 + lane) * (IMAGE / 256);
            const uint32_t codes = WEIGHT == INT8 ? reinterpret_cast<const uint32_t*>(lanes)[step]
                                                  : reinterpret_cast<const uint16_t*>(lanes)[step];
            decode(b[i], codes);
        }
    }

    __device__ __forceinline__ void multiply(Sums& sums, unsigned char* rows) const {
        const int matrix = lane / 8, row = lane % 8;
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            uint32_t a[M_TILES][4], b[N_TILES][2];
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
                load_matrix(a[i], unit_of<8>(rows, (warp_m * M_TILES + i) * 16 + matrix % 2 * 8 + row,
                                             2 * step + matrix / 2));
            }
            load_weights(b, rows + ROWS_BYTES, step);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
                for (int j = 0; j < N_TILES; ++j) mma(sums[i][j], a[i], b[j][0], b[j][1]);
            }
        }
    }

    __device__ __forceinline__ static void clear(Sums& sums) {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            for (int j = 0; j < N_TILES; ++j)
                for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
    }

    __device__ __forceinline__ uint32_t column(int j, int e) const {
        return blockIdx.x * BLOCK_N + (warp_n * N_TILES + j) * 8 + lane % 4 * 2 + e % 2;
    }
    __device__ __forceinline__ uint32_t row(int i, int e) const {
        return blockIdx.y * BLOCK_M + (warp_m * M_TILES + i) * 16 + lane / 4 + e / 2 * 8;
    }

    // part += scale * group, then forgets the group.
    __device__ __forceinline__ void scale_group(Sums& part, Sums& group, int group_index) const {
        const float* scales = p.scales + uint64_t(group_index) * p.n;
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
            const float by[2] = {column(j, 0) < p.n ? scales[column(j, 0)] : 0.0f,
                                 column(j, 1) < p.n ? scales[column(j, 1)] : 0.0f};
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
                for (int e = 0; e < 4; ++e) part[i][j][e] = fmaf(group[i][j][e], by[e % 2], part[i][j][e]);
            }
        }
        clear(group);
    }

    template <class F>
    __device__ __forceinline__ void each(const Sums& sums, F f) const {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            for (int j = 0; j < N_TILES; ++j)
                for (int e = 0; e < 4; ++e)
                    if (row(i, e) < p.m && column(j, e) < p.n) f(row(i, e), column(j, e), sums[i][j][e]);
    }

    // Goes through the tiles [first, end); `end_of_split` gets each split's sum.
    template <class End>
    __device__ __forceinline__ void run(int first, int end, End end_of_split) {
        for (int s = 0; s < STAGES - 1; ++s) {
            if (first + s < end) load(first + s, stage(s));
            async_copy_commit();
        }
        Sums part, group;
        clear(part);
        clear(group);
        for (int tile = first; tile < end; ++tile) {
            async_copy_wait<STAGES - 2>();
            sync_block();
            if (tile + STAGES - 1 < end) load(tile + STAGES - 1, stage(tile - first + STAGES - 1));
            async_copy_commit();
            multiply(WEIGHT == BF16 ? part : group, stage(tile - first));
            if (WEIGHT != BF16 && (tile + 1) % GROUP_TILES == 0) scale_group(part, group, tile / GROUP_TILES);
            if ((tile + 1) % int(p.split_tiles) == 0 || tile + 1 == end) {
                end_of_split(part);
                clear(part);
            }
        }
        async_copy_wait<0>();
    }
};

// What `y` gets: bf16, or f32 for logits.
__device__ __forceinline__ void store(const Problem& p, uint32_t m, uint32_t n, float sum) {
    const uint64_t at = uint64_t(m) * p.n + n;
    const float value = p.bias != nullptr ? sum + bf16_to_f32(p.bias[n]) : sum;
    if (p.wide_y) static_cast<float*>(p.y)[at] = value;
    else static_cast<uint16_t*>(p.y)[at] = f32_to_bf16(value);
}

template <class K>
__device__ __forceinline__ void matmul(const Problem& p) {
    K kernel(p);
    if (p.partials != nullptr) {
        const int first = blockIdx.z * p.split_tiles;
        kernel.run(first, min_of(first + int(p.split_tiles), kernel.tiles_k), [&](typename K::Sums& part) {
            float* to = p.partials + uint64_t(blockIdx.z) * p.m * p.n;
            kernel.each(part, [&](uint32_t m, uint32_t n, float sum) { to[uint64_t(m) * p.n + n] = sum; });
        });
        return;
    }
    typename K::Sums total;
    K::clear(total);
    kernel.run(0, kernel.tiles_k, [&](typename K::Sums& part) {
#pragma unroll
        for (int i = 0; i < K::M_TILES; ++i)
            for (int j = 0; j < K::N_TILES; ++j)
                for (int e = 0; e < 4; ++e) total[i][j][e] += part[i][j][e];
    });
    kernel.each(total, [&](uint32_t m, uint32_t n, float sum) { store(p, m, n, sum); });
}

#define MATMUL(name, ...)                                                                                \
    extern "C" __global__ void __launch_bounds__(Matmul<__VA_ARGS__>::THREADS,                           \
                                                 256 / Matmul<__VA_ARGS__>::THREADS)                     \
        name(const uint16_t* x, const unsigned char* weights, const float* scales, const uint16_t* bias, \
             void* y, float* partials, uint32_t m, uint32_t n, uint32_t k, uint32_t split_tiles,         \
             uint32_t wide_y) {                                                                          \
        matmul<Matmul<__VA_ARGS__>>(                                                                     \
            Problem{x, weights, scales, bias, y, partials, m, n, k, split_tiles, wide_y});               \
    }

MATMUL(matmul_bf16_16, BF16, 16, 64, 1, 4, 5)
MATMUL(matmul_bf16_64, BF16, 64, 64, 2, 2, 4)
MATMUL(matmul_bf16_128, BF16, 128, 128, 2, 4, 3)
MATMUL(matmul_int8_16, INT8, 16, 64, 1, 4, 6)
MATMUL(matmul_int8_64, INT8, 64, 64, 2, 2, 4)
MATMUL(matmul_int4_16, INT4, 16, 64, 1, 4, 8)
MATMUL(matmul_int4_64, INT4, 64, 64, 2, 2, 4)

// Adds the splits in ascending order. Grid: (columns / 256, rows). Block: 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    matmul_reduce(const float* partials, const uint16_t* bias, void* y, uint32_t splits, uint32_t m,
                  uint32_t n, uint32_t wide_y) {
    const uint32_t column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (column >= n) return;
    float total = 0.0f;
    for (uint32_t split = 0; split < splits; ++split)
        total += partials[(uint64_t(split) * m + row) * n + column];
    const Problem p{nullptr, nullptr, nullptr, bias, y, nullptr, m, n, 0, 0, wide_y};
    store(p, row, column, total);
}
