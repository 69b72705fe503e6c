// The product of few rows by weights of 8 or 4 bits (`matmul.cu` says how these lie), bound by reading the
// weights: every warp has 16 outputs of its own, for all rows of the block, so that each code is decoded
// once. A lane copies those 16 bytes of codes to shared memory that it will decode itself and that nobody
// else reads; only rows are shared, and one barrier serves 128 inputs. Splits of K are summed side by side,
// by groups of warps, and added in ascending order: no cut changes a bit. Which rows these are, and what
// becomes of the sums, is for those who include it.
#pragma once

#include "codes.cuh"
#include "product.cuh"

namespace few_product {

using namespace warp_product;

constexpr int OUTPUTS = 16, GROUP = GROUP_TILES * TILE_K;
constexpr int ROW = GROUP * 2;  // bytes of a row of x in a stage
constexpr int SIDE = 64;        // bytes of a warp's scales in a stage, or of its exponents

template <Weight WEIGHT, int TILES, int STAGES>
struct Product {
    static constexpr int M_TILES = TILES, N_TILES = 2, ROWS = 16 * M_TILES, DEPTH = STAGES;
    // Threads of a block at most.
    static constexpr int THREADS_MAX = M_TILES == 1 ? 512 : 256;
    static constexpr int CODES = codes_of(WEIGHT), IMAGE = CODES + (WEIGHT == MXFP4 ? 2 * TILE_N : 0);
    static constexpr bool SCALED = is_scaled(WEIGHT);
    // A warp's share of an image, and packets that a lane has of it.
    static constexpr int SHARE = CODES * OUTPUTS / TILE_N, PACKETS = SHARE / 512;
    static constexpr int WARP_BYTES = GROUP_TILES * SHARE + SIDE;
    using Sums = float[M_TILES][N_TILES][4];

    const Operands& p;
    int lane, warp_n, warp_k, warps_n, warps_k;
    int tiles_k, groups, split_groups;  // of 128 inputs: all, and those of a split
    int rows, stage_bytes;
    uint32_t output;                   // the warp's first
    const unsigned char* codes;        // of this lane, in the weight
    const unsigned char* exponents;    // of this lane, in the weight
    const float* scales;               // of this lane; null where there are none
    const uint16_t* x;                 // of this thread's unit
    // Addresses in the first stage: this lane's codes, the scale it copies, those it needs, what it loads of
    // the rows for each of four steps, where it copies rows to; and the numbers of the rows of x, behind all
    // stages.
    uint32_t codes_at, side_at, scales_at, units[4], x_at, sources_at;

    // Shared memory: STAGES times the rows of each group of warps and each warp's codes; then the numbers of
    // the rows of x. A power of two of rows is kept, ROWS where a warp multiplies more than 16.
    __device__ __forceinline__ Product(const Operands& operands, int warps_beside, int rows_kept) : p(operands) {
        const int warp = threadIdx.x / 32, kept_rows = M_TILES == 1 ? rows_kept : ROWS;
        lane = threadIdx.x % 32;
        warps_n = warps_beside, warps_k = blockDim.x / 32 / warps_n;
        warp_n = warp % warps_n, warp_k = warp / warps_n;
        tiles_k = p.k / TILE_K, groups = (tiles_k + 1) / GROUP_TILES, split_groups = p.split_tiles / GROUP_TILES;
        rows = min_of(int(p.end - p.first), ROWS);
        stage_bytes = warps_k * (kept_rows * ROW + warps_n * WARP_BYTES);
        output = (p.tile * warps_n + warp_n) * OUTPUTS;
        const int share = output % TILE_N / OUTPUTS;
        const unsigned char* images = p.weights + uint64_t(output / TILE_N) * tiles_k * IMAGE;
        codes = in_register(images + share * SHARE + lane * 16);
        exponents = in_register(images + CODES + share * 2 * OUTPUTS + lane / 2 * IMAGE + lane % 2 * 16);
        scales = in_register(SCALED && lane < OUTPUTS && output + lane < p.n ? p.scales + output + lane : nullptr);
        x = in_register(p.x + lane % 16 * 8);

        const uint32_t base = shared_address(shared_memory());
        const uint32_t rows_at = base + warp_k * kept_rows * ROW;
        const uint32_t mine = base + warps_k * kept_rows * ROW + warp * WARP_BYTES;
        codes_at = in_register(mine + lane * 16);
        side_at = in_register(mine + GROUP_TILES * SHARE + lane * (SCALED ? 4 : 16));
        // Two f32 of a pair of outputs; or four exponents of a pair of groups' output.
        scales_at = in_register(mine + GROUP_TILES * SHARE + (SCALED ? lane % 4 * 8 : lane / 4 * 4));
        sources_at = in_register(base + STAGES * stage_bytes);
        x_at = in_register(rows_at);
        // Rows that are not kept are taken for some that are: nothing is stored of them.
        const int matrix = lane / 8, row = (matrix % 2 * 8 + lane % 8) & (kept_rows - 1);
#pragma unroll
        for (int step = 0; step < 4; ++step)
            units[step] = in_register(rows_at + swizzled<16>(row, 2 * step + matrix / 2) * 16);

        const auto sources = reinterpret_cast<uint32_t*>(shared_memory() + STAGES * stage_bytes);
        for (int r = threadIdx.x; r < rows; r += blockDim.x) {
            const uint32_t m = p.first + r;
            sources[r] = p.slots == nullptr ? m : p.slots[m] / p.top;
        }
        sync_block();
    }

    // Of MXFP4 the last 128 inputs may be 64.
    __device__ __forceinline__ bool is_whole(int group) const { return SCALED || GROUP_TILES * group + 1 < tiles_k; }

    __device__ __forceinline__ void load_weights(uint32_t stage, int group) const {
        const bool whole = is_whole(group);
        if (output < p.n) {
            const int64_t image = int64_t(group) * (GROUP_TILES * IMAGE);
#pragma unroll
            for (int i = 0; i < GROUP_TILES * PACKETS; ++i) {
                if (i < PACKETS || whole)
                    async_copy_16(codes_at + stage + i * 512,
                                  codes + image + (i / PACKETS * IMAGE + i % PACKETS * 512), true);
            }
            if (WEIGHT == MXFP4 && (lane < 2 || (lane < 4 && whole)))
                async_copy_16(side_at + stage, exponents + image, true);
        }
        if (SCALED && lane < OUTPUTS) {
            const bool exists = scales != nullptr;
            async_copy_4(side_at + stage, exists ? scales + uint64_t(group) * p.n : p.scales, exists);
        }
    }

    __device__ __forceinline__ void load_rows(uint32_t stage, int group) const {
        const int unit = lane % 16;
        if (!is_whole(group) && unit >= 8) return;
        for (int row = warp_n * 2 + lane / 16; row < rows; row += 2 * warps_n) {
            uint32_t source[1];
            load_shared(source, sources_at + row * 4);
            async_copy_16(x_at + stage + swizzled<16>(row, unit) * 16,
                          x + (uint64_t(source[0]) * p.k + group * GROUP), true);
        }
    }

    __device__ __forceinline__ void load(uint32_t stage, int group) const {
        load_weights(stage, group);
        load_rows(stage, group);
    }

    // What 32 inputs of eight outputs are worth, for two steps of sixteen.
    __device__ __forceinline__ static void decode(uint32_t (&b)[2][2], const uint32_t (&packets)[PACKETS][4], int j,
                                                  int half, uint32_t exponents) {
        if (PACKETS == 2) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const uint32_t word = packets[j * PACKETS / 2][2 * half + s];
                if (WEIGHT == FP8) decode_fp8(b[s], word);
                else decode_int8(b[s], word);
            }
            return;
        }
        const uint32_t word = packets[0][2 * j + half];
        if (WEIGHT == INT4) return decode_int4(b, word);
        decode_mxfp4(b, word, power_pair(exponents >> 8 * (2 * j + half)));
    }

    __device__ __forceinline__ void multiply(Sums& sums, uint32_t stage, int group) const {
#pragma unroll
        for (int tile = 0; tile < GROUP_TILES; ++tile) {
            if (tile > 0 && !is_whole(group)) return;
            uint32_t packets[PACKETS][4], exponents[1] = {0};
#pragma unroll
            for (int i = 0; i < PACKETS; ++i) load_shared(packets[i], codes_at + stage + (tile * PACKETS + i) * 512);
            if (WEIGHT == MXFP4) load_shared(exponents, scales_at + stage + tile * 2 * OUTPUTS);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t b[N_TILES][2][2];
#pragma unroll
                for (int j = 0; j < N_TILES; ++j) decode(b[j], packets, j, half, exponents[0]);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
#pragma unroll
                    for (int i = 0; i < M_TILES; ++i) {
                        uint32_t a[4];
                        load_matrix(a, units[half * 2 + s] + stage + (tile * TILE_K * 2 + i * 16 * ROW));
#pragma unroll
                        for (int j = 0; j < N_TILES; ++j) mma(sums[i][j], a, b[j][s][0], b[j][s][1]);
                    }
                }
            }
        }
    }

    // part += scale * group.
    __device__ __forceinline__ void scale_group(Sums& part, const Sums& group, uint32_t stage) const {
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
            uint32_t bits[2];
            load_shared(bits, scales_at + stage + j * 32);
            const float by[2] = {from_bits(bits[0]), from_bits(bits[1])};
#pragma unroll
            for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[i][j][e] = fmaf(group[i][j][e], by[e % 2], part[i][j][e]);
        }
    }

    template <class F>
    __device__ __forceinline__ static void each_sum(F f) {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int j = 0; j < N_TILES; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) f(i, j, e);
    }
    __device__ __forceinline__ static void clear(Sums& sums) {
        each_sum([&](int i, int j, int e) { sums[i][j][e] = 0.0f; });
    }

    __device__ __forceinline__ uint32_t column(int j, int e) const { return output + j * 8 + lane % 4 * 2 + e % 2; }
    __device__ __forceinline__ uint32_t row(int i, int e) const { return p.first + i * 16 + lane / 4 + e / 2 * 8; }

    // The sums that there are, and that this warp has.
    template <class F>
    __device__ __forceinline__ void each(const Sums& sums, F f) const {
        if (warp_k > 0) return;
        each_sum([&](int i, int j, int e) {
            if (row(i, e) < p.end && column(j, e) < p.n) f(row(i, e), column(j, e), sums[i][j][e]);
        });
    }

    // Goes through the groups from `first` on, a split after another of which `warps_k` are summed at once,
    // so many `steps` in all; those from `end` on do not exist. `end_of_split` gets this warp's sum, and a
    // stage that is free when a barrier has passed. `ready` returns when rows may be read.
    template <class End, class Ready = AtOnce>
    __device__ __forceinline__ void run(int first, int end, int steps, End end_of_split,
                                        const Ready& ready = {}) const {
        const int skip = (warps_k - 1) * split_groups, ring = STAGES * stage_bytes;
        int filled = first, filled_step = 0, filled_stage = 0, used = first, used_stage = 0;
        const auto advance = [&] {
            ++filled;
            if (++filled_step == split_groups) filled_step = 0, filled += skip;
            filled_stage = filled_stage + stage_bytes == ring ? 0 : filled_stage + stage_bytes;
        };
        const auto fill = [&] {
            if (filled < end) load(filled_stage, filled);
            async_copy_commit();
            advance();
        };
        if (Ready::WAITS) {
#pragma unroll 1
            for (int s = 0; s < STAGES - 1; ++s, advance())
                if (filled < end) load_weights(filled_stage, filled);
            ready();
            filled = first, filled_step = 0, filled_stage = 0;
        }
#pragma unroll 1
        for (int s = 0; s < STAGES - 1; ++s) {
            if (!Ready::WAITS) {
                fill();
                continue;
            }
            if (filled < end) load_rows(filled_stage, filled);
            async_copy_commit();
            advance();
        }
#pragma unroll 1
        for (int left = steps; left > 0; left -= split_groups, used += skip) {
            Sums part;
            clear(part);
            int stage = 0;
#pragma unroll 1
            for (int step = min_of(left, split_groups); step > 0; --step, ++used) {
                async_copy_wait<STAGES - 2>();
                sync_block();
                fill();
                stage = used_stage;
                used_stage = stage + stage_bytes == ring ? 0 : stage + stage_bytes;
                if (used >= end) continue;
                if (SCALED) {
                    Sums group;
                    clear(group);
                    multiply(group, stage, used);
                    scale_group(part, group, stage);
                } else {
                    multiply(part, stage, used);
                }
            }
            end_of_split(part, stage);
        }
        async_copy_wait<0>();
    }

    // One split alone.
    template <class End>
    __device__ __forceinline__ void run_split(int split, End end_of_split) const {
        const int first = split * split_groups, end = min_of(first + split_groups, groups);
        run(first, end, end - first, [&](Sums& part, int) { end_of_split(part); });
    }

    // All splits: the first warps get the total, what `each` goes through.
    template <class Ready = AtOnce>
    __device__ __forceinline__ void run_all(Sums& total, const Ready& ready = {}) const {
        clear(total);
        int split = 0;  // the first of those that are summed at once
        const int rounds = (groups + warps_k * split_groups - 1) / (warps_k * split_groups);
        const int last = groups - (rounds - 1) * warps_k * split_groups;
        const int steps = (rounds - 1) * split_groups + min_of(last, split_groups);
        const auto add = [&](Sums& part, int stage) {
            const auto sums = reinterpret_cast<float*>(shared_memory() + stage) + lane;
            const auto at = [&](int warp, int i, int j, int e) -> float& {
                return sums[(((warp * warps_n + warp_n) * M_TILES + i) * 8 + j * 4 + e) * 32];
            };
            if (warps_k > 1) {
                sync_block();
                if (warp_k > 0) each_sum([&](int i, int j, int e) { at(warp_k - 1, i, j, e) = part[i][j][e]; });
                sync_block();
            }
            if (warp_k == 0) {
                each_sum([&](int i, int j, int e) { total[i][j][e] += part[i][j][e]; });
                for (int k = 1; k < warps_k && (split + k) * split_groups < groups; ++k)
                    each_sum([&](int i, int j, int e) { total[i][j][e] += at(k - 1, i, j, e); });
            }
            split += warps_k;
        };
        run(warp_k * split_groups, groups, steps, add, ready);
    }
};

// The two forms: of up to 16 rows, and of up to 64. The smaller a tile is, the more of them are under way.
template <Weight WEIGHT>
using Few = Product<WEIGHT, 1, WEIGHT == INT4 || WEIGHT == MXFP4 ? 6 : 4>;
template <Weight WEIGHT>
using Many = Product<WEIGHT, 4, 4>;

}  // namespace few_product
