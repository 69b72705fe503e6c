// Whatever launches must know of the kernels, as the Rust source `src/cuda/constants.rs`: it stands in a
// kernel's source alone, whose values the compiler finds here. `kernels/build` writes the file, and the test
// program `cuda` compares.
#pragma once

#include <cstddef>
#include <string>

#include "kernels.h"

namespace constants {

constexpr const char* HEAD =
    R"(//! What launches must know of the kernels: threads, tiles, limits, sizes of what both read. Written by
//! `kernels/build`, as `emulate/constants.h` says, from the sources that each module names: change it there.

/// A product's block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) rows: usize,
    pub(crate) outputs: usize,
    pub(crate) threads: usize,
    pub(crate) shared_bytes: usize,
}

/// How packed weights lie, and what a product of few rows keeps of them in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packing {
    /// Bytes of a tile: codes, and what belongs to them alone.
    pub(crate) image: usize,
    /// Bytes of its codes.
    pub(crate) codes: usize,
    /// Bytes of a warp in a stage.
    pub(crate) warp_bytes: usize,
    /// Stages of blocks of up to 16 rows, and of up to 64.
    pub(crate) stages: [usize; 2],
}
)";

class Source {
    std::string text = HEAD;

    // Whole numbers from five digits on are written in threes.
    static std::string number(uint64_t value) {
        std::string digits = std::to_string(value);
        if (digits.size() < 5) return digits;
        for (int at = int(digits.size()) - 3; at > 0; at -= 3) digits.insert(at, "_");
        return digits;
    }
    // In one line or two, as rustfmt has it.
    void constant(const char* name, const std::string& type, const std::string& value) {
        const std::string start = std::string("    pub(crate) const ") + name + ": " + type + " =";
        text += start + (start.size() + value.size() + 2 > 110 ? "\n        " : " ") + value + ";\n";
    }

public:
    // A module of the constants that `list` adds, which stand in the files `of`.
    template <class List>
    void module(const char* name, const char* of, const List& list) {
        text += std::string("\n/// What launches share with `") + of + "`.\npub(crate) mod " + name + " {\n";
        list();
        text += "}\n";
    }
    void uses(const char* type) { text += std::string("    use super::") + type + ";\n\n"; }

    void size(const char* name, uint64_t value) { constant(name, "usize", number(value)); }
    void word(const char* name, uint32_t value) { constant(name, "u32", number(value)); }
    void block(const char* name, int rows, int outputs, int threads, int shared_bytes) {
        constant(name, "Block",
                 "Block { rows: " + number(rows) + ", outputs: " + number(outputs) + ", threads: " +
                     number(threads) + ", shared_bytes: " + number(shared_bytes) + " }");
    }
    template <warp_product::Weight WEIGHT>
    void packing(const char* name) {
        using Few = few_product::Few<WEIGHT>;
        using Many = few_product::Many<WEIGHT>;
        constant(name, "Packing",
                 "Packing { image: " + number(Few::IMAGE) + ", codes: " + number(Few::CODES) +
                     ", warp_bytes: " + number(Few::WARP_BYTES) + ", stages: [" + number(Few::DEPTH) + ", " +
                     number(Many::DEPTH) + "] }");
    }
    const std::string& all() const { return text; }
};

inline void attention(Source& to) {
    to.module("attention", "attention.cu` and `attention_sm90.cu", [&] {
        to.size("CHUNK", CHUNK);
        to.size("ITEM_WORDS", sizeof(Item) / 4);
        to.size("FEW_ROWS", attention_128_bf16_16_form::BLOCK_ROWS);
        to.size("FEW_THREADS", attention_128_bf16_16_form::THREADS);
        to.size("MANY_ROWS", attention_128_bf16_128_form::BLOCK_ROWS);
        to.size("MANY_THREADS", attention_128_bf16_128_form::THREADS);
        to.size("LATENT_ROWS", Latents::BLOCK_ROWS);
        to.size("PIPELINED_THREADS", Pipelined<128>::THREADS);
        static_assert(Latents::THREADS == Pipelined<128>::THREADS && Pipelined<64>::BLOCK_ROWS == 128, "");
        to.size("MERGE_THREADS", MERGE_THREADS);
        to.size("FEW_64_BF16_BYTES", attention_64_bf16_16_form::SHARED);
        to.size("FEW_64_FP8_BYTES", attention_64_fp8_16_form::SHARED);
        to.size("FEW_128_BF16_BYTES", attention_128_bf16_16_form::SHARED);
        to.size("FEW_128_FP8_BYTES", attention_128_fp8_16_form::SHARED);
        to.size("FEW_LATENT_BF16_BYTES", attention_latent_bf16_16_form::SHARED);
        to.size("FEW_LATENT_FP8_BYTES", attention_latent_fp8_16_form::SHARED);
        to.size("MANY_64_BF16_BYTES", attention_64_bf16_128_form::SHARED);
        to.size("MANY_64_FP8_BYTES", attention_64_fp8_128_form::SHARED);
        to.size("MANY_128_BF16_BYTES", attention_128_bf16_128_form::SHARED);
        to.size("MANY_128_FP8_BYTES", attention_128_fp8_128_form::SHARED);
        to.size("PIPELINED_64_BYTES", Pipelined<64>::SHARED);
        to.size("PIPELINED_64_APART_BYTES", Pipelined<64>::SHARED_APART);
        to.size("PIPELINED_128_BYTES", Pipelined<128>::SHARED);
        to.size("PIPELINED_128_APART_BYTES", Pipelined<128>::SHARED_APART);
        to.size("PIPELINED_LATENT_BYTES", Latents::SHARED);
    });
}

template <class Form>
void pieces(Source& to, const char* name) {
    to.block(name, Form::BLOCK_ROWS, pipelined_product::OUTPUTS * pipelined_product::WARPGROUPS,
             pipelined_product::THREADS, Form::SHARED);
}

inline void products(Source& to) {
    using namespace warp_product;
    static_assert(TILE_K == TILE_N && TILE_K == pipelined_product::TILE_K && TILE_K == warpgroup_product::TILE_K &&
                      pipelined_product::IMAGE == codes_of(BF16) && warpgroup_product::IMAGE == codes_of(BF16),
                  "all products read the same tiles");
    to.module("codes", "codes.cuh", [&] {
        to.size("TILE", TILE_K);
        to.size("GROUP", GROUP_TILES * TILE_K);
        to.size("BF16_IMAGE", codes_of(BF16));
    });
    to.module("product", "product.cuh` and `product_sm90.cuh", [&] {
        to.uses("Block");
        const auto warps = [&](auto* form, const char* name) {
            using Form = std::remove_pointer_t<decltype(form)>;
            to.block(name, Form::ROWS, Form::OUTPUTS, Form::THREADS, Form::SHARED);
        };
        warps(static_cast<Rows16<false>*>(nullptr), "ROWS_16");
        warps(static_cast<Rows64<false>*>(nullptr), "ROWS_64");
        warps(static_cast<Rows128<false>*>(nullptr), "ROWS_128");
        using Hopper = warpgroup_product::Rows16<false>;
        to.block("HOPPER_ROWS_16", Hopper::BLOCK_ROWS, warpgroup_product::OUTPUTS * warpgroup_product::WARPGROUPS,
                 warpgroup_product::THREADS, Hopper::SHARED);
    });
    to.module("product_few", "product_few.cuh", [&] {
        to.uses("Packing");
        to.size("OUTPUTS", few_product::OUTPUTS);
        to.size("ROW_BYTES", few_product::ROW);
        to.size("ROWS", few_product::Few<INT8>::ROWS);
        to.size("MANY_ROWS", few_product::Many<INT8>::ROWS);
        to.size("THREADS_MAX", few_product::Few<INT8>::THREADS_MAX);
        to.size("MANY_THREADS_MAX", few_product::Many<INT8>::THREADS_MAX);
        to.packing<INT8>("INT8");
        to.packing<INT4>("INT4");
        to.packing<FP8>("FP8");
        to.packing<MXFP4>("MXFP4");
    });
    to.module("pipeline_sm90", "pipeline_sm90.cuh", [&] {
        to.uses("Block");
        pieces<pipelined_product::Rows64<false>>(to, "ROWS_64");
        pieces<pipelined_product::Rows128<false>>(to, "ROWS_128");
        pieces<pipelined_product::Rows192<false>>(to, "ROWS_192");
        pieces<pipelined_product::Rows256<false>>(to, "ROWS_256");
        pieces<pipelined_product::Whole256<false>>(to, "WHOLE_256");
        to.size("CLUSTER", pipelined_product::CLUSTER);
        pieces<pipelined_product::Clustered128>(to, "CLUSTERED_128");
        pieces<pipelined_product::Clustered256>(to, "CLUSTERED_256");
        pieces<pipelined_product::ClusteredWhole256>(to, "CLUSTERED_WHOLE_256");
    });
    to.module("matmul", "matmul.cu", [&] { to.size("REDUCE_THREADS", REDUCE_THREADS); });
}

inline void experts(Source& to) {
    to.module("choice", "choice.cuh", [&] {
        to.size("EXPERTS_MAX", EXPERTS_MAX);
        to.size("LANES", LANES);
        to.word("NO_SLOT", ::NO_SLOT);
        static_assert(::NO_SLOT == rope_cu::NO_SLOT, "one slot for all that is not kept");
        to.word("SOFTMAX_ALL", SOFTMAX_ALL);
        to.word("SOFTMAX_TOP", SOFTMAX_TOP);
        to.word("SIGMOID", SIGMOID);
    });
    to.module("moe", "moe.cu` and `moe.cuh", [&] {
        to.size("ROUTE_TOKENS", ROUTE_TOKENS);
        to.size("ROUTE_THREADS", ROUTE_THREADS);
        to.size("GROUP_THREADS_MAX", GROUP_THREADS_MAX);
        to.size("GROUPED_AT_ONCE", GROUPED_AT_ONCE);
        to.size("CHOOSE_TOKENS_MAX", CHOOSE_TOKENS_MAX);
        to.size("COMBINE_THREADS", COMBINE_THREADS);
        to.size("ITEM_WORDS", sizeof(ExpertRows) / 4);
        to.size("TOGETHER", TOGETHER);
        to.word("NO_GATE", NO_GATE);
        to.word("SILU", SILU);
        to.word("CLAMPED", CLAMPED);
    });
}

inline void ranks(Source& to) {
    using namespace peer;
    to.module("peer", "peer.cuh", [&] {
        to.size("RANKS_MAX", RANKS_MAX);
        to.size("LANES", peer::LANES);
        to.size("CONTROL_BYTES", CONTROL_BYTES);
        to.size("SHARED_WORDS", SHARED_WORDS);
        to.size("PART", PART);
        to.size("WHOLE", WHOLE);
        to.size("ROW_BYTES", sizeof(peer::Row));
        to.size("STATE_WORDS", sizeof(peer::State) / 4);
        to.size("FAULT_AT", offsetof(peer::State, fault) / 4);
        to.size("SPENT_AT", offsetof(peer::State, spent) / 4);
        to.word("CAUSE_BIT", CAUSE_BIT);
        to.word("PHASE_BIT", PHASE_BIT);
        to.word("RANK_BIT", RANK_BIT);
        to.word("DEADLINE", DEADLINE);
        to.word("PROTOCOL", PROTOCOL);
    });
}

inline void rows(Source& to) {
    to.module("elementwise", "elementwise.cu", [&] { to.size("THREADS", elementwise_cu::THREADS); });
    to.module("gather", "gather.cu", [&] {
        to.size("THREADS", gather_cu::THREADS);
        to.word("PENDING", PENDING);
    });
    to.module("numbers", "numbers.cuh", [&] {
        to.size("PACKET_BYTES", sizeof(Packet));
        to.size("PACKET", sizeof(Packet) / sizeof(uint16_t));
        to.size("PACKET_WORDS", sizeof(Packet) / 4);
    });
    to.module("probe", "probe.cu", [&] {
        to.size("THREADS", probe_cu::THREADS);
        to.size("SEED_WORDS", SEED_WORDS);
    });
    to.module("rms_norm", "rms_norm.cu", [&] { to.size("THREADS_MAX", THREADS_MAX); });
    to.module("rope", "rope.cu", [&] {
        to.size("THREADS", rope_cu::THREADS);
        to.size("HEAD_THREADS", HEAD_THREADS);
    });
}

inline void drawing(Source& to) {
    to.module("rules", "rules.cu", [&] {
        to.size("THREADS", rules_cu::THREADS);
        to.size("SCRATCH_BYTES", sizeof(Scratch));
        to.size("RULE_WORDS", sizeof(Rule) / 4);
        to.size("ROW_WORDS", sizeof(RowRules) / 4);
        to.word("NONE", NONE);
        to.word("IN_PROMPT", IN_PROMPT);
        to.word("BIASED", BIASED);
        to.word("HELD", HELD);
        to.word("NEVER", NEVER);
    });
    using namespace sample_cu;
    to.module("sample", "sample.cu`, `sample_row.cuh` and `sample_work.cuh", [&] {
        to.size("THREADS", sample_cu::THREADS);
        to.size("CHUNKS", CHUNKS);
        to.size("PEAKS_BYTES", sizeof(sample_cu::Place) * sample_cu::THREADS);
        to.size("FINDER_BYTES", sizeof(Finder));
        to.size("JOINT_WORDS", sizeof(Joint) / 4);
        to.size("PART_WORDS", sizeof(Sums) / 4);
        to.size("PARAMETER_WORDS", sizeof(Parameters) / 4);
        to.size("SCORE_WORDS", sizeof(Score) / 4);
        to.size("TOP", TOP);
        to.word("NOT_WANTED", NOT_WANTED);
    });
}

inline std::string source() {
    Source to;
    attention(to);
    products(to);
    experts(to);
    ranks(to);
    rows(to);
    drawing(to);
    return to.all();
}

}  // namespace constants
