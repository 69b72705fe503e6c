// The exchange of a layer's tokens between ranks that reach each other's memory; `peer.cuh` says how,
// `moe/plan.rs` and `moe/parallel.rs` what for. Every launch serves `blockIdx.z` (of `peer_plan`:
// `blockIdx.x`) ranks of this device, from number `first` on; whatever belongs to one of them lies beside the
// others' in arrays that begin with their number.
//
// Shared memory: SHARED_WORDS, and what each kernel says. Widths are multiples of 8, `top` is at most 32.
#include "moe.cuh"
#include "peer.cuh"

#define PEER                                                                                       \
    const uint64_t *bases, peer::State *states, uint32_t first, uint32_t deadline_us, uint32_t ranks,      \
        uint32_t held, uint32_t tokens, uint32_t top, uint32_t width
#define PEER_HERE(number)                                                                                  \
    peer::Peer { {ranks, held, tokens, top, width}, bases, states + (number), first + (number), deadline_us }

// A rank that does not get a token.
constexpr uint32_t NOWHERE = 0xffffffffu;

// === peer_reset ===
//
// Before a group's first round, and after it has failed, when no rank's launches are under way: all steps
// begin with `round`. Grid: ranks here; block: 128 threads.
extern "C" __global__ void __launch_bounds__(peer::PART) peer_reset(PEER, uint32_t round) {
    wait_for_earlier_launches();
    const peer::Peer own = PEER_HERE(blockIdx.x);
    uint32_t* control = own.control(own.rank);
    for (uint32_t i = threadIdx.x; i < peer::CONTROL_BYTES / 4; i += blockDim.x) control[i] = 0;
    if (threadIdx.x == 0) *own.state = peer::State{{round, round, round, round}, {}, 0, 0, 0, 0, {}};
}

// === peer_plan ===
//
// What goes where: `moe/plan.rs` on the device, slot for slot the same. ids [tokens, top] of the first
// `counts[rank]` tokens. If each expert has one holder, homes [experts] has that rank and the expert's number
// among those of the rank, as rank << 16 | number. If `homes` is null: holders [experts], a bit for each
// rank, and locals [ranks, experts], those numbers. Writes each message but for its tokens, and to `places`
// [tokens, ranks] where a token lies in a rank's message; adds to `loads` [ranks, held] the rows that each
// expert of each rank is sent. Grid: ranks here; block: a warp for each rank of the group. Shared memory: a
// word for each of a rank's experts, by rank; for several holders two for each expert and one for each rank;
// one for each slot, unless `ways` has room for them.

// Slots of an expert with several holders that stay together.
constexpr uint32_t RUN = 16;

// Which rank serves each slot, and as which of its experts. An id that is none is noted.
struct Choice {
    const uint32_t *ids, *homes, *holders, *locals;
    uint32_t* ways;
    uint32_t slots, experts, ranks;

    // All threads.
    __device__ __forceinline__ void only_holders() const {
        for (uint32_t slot = threadIdx.x; slot < slots; slot += blockDim.x) {
            const uint32_t expert = ids[slot];
            if (expert < experts) ways[slot] = homes[expert];
            else peer::shared_words()[peer::NONSENSE] = 1;
        }
    }

    // Of several holders, run by run, the one with the fewest slots so far: one thread, since each choice
    // hangs on the last.
    __device__ __forceinline__ void least_loaded(uint32_t* seen, uint32_t* assigned) const {
        uint32_t* last = seen + experts;
        for (uint32_t slot = 0; slot < slots; ++slot) {
            const uint32_t expert = ids[slot];
            if (expert >= experts) {
                peer::shared_words()[peer::NONSENSE] = 1;
                return;
            }
            if (seen[expert]++ % RUN == 0) {
                uint32_t best = NOWHERE;
                for (uint32_t r = 0; r < ranks; ++r) {
                    if (!(holders[expert] >> r & 1)) continue;
                    if (best == NOWHERE || assigned[r] < assigned[best]) best = r;
                }
                last[expert] = best;
            }
            const uint32_t rank = last[expert];
            ways[slot] = rank << peer::RANK_BIT | locals[rank * experts + expert];
            ++assigned[rank];
        }
    }
};

// One warp's message: what this rank sends `to` in this round.
struct Outgoing {
    const Choice& choice;
    uint32_t to, top, lane;
    uint32_t* next;  // by expert of that rank: first how many rows, then the next row

    __device__ __forceinline__ bool takes(uint32_t slot) const { return choice.ways[slot] >> peer::RANK_BIT == to; }
    __device__ __forceinline__ uint32_t expert(uint32_t slot) const { return choice.ways[slot] & ((1u << peer::RANK_BIT) - 1); }

    __device__ __forceinline__ void count() const {
        for (uint32_t slot = lane; slot < choice.slots; slot += peer::LANES)
            if (takes(slot)) atomic_add(&next[expert(slot)], 1u);
        sync_warp();
    }

    // Adds what was counted to `loads` [held].
    __device__ __forceinline__ void add_to(uint32_t* loads, uint32_t held) const {
        for (uint32_t e = lane; e < held; e += peer::LANES) loads[e] += next[e];
        sync_warp();
    }

    // Where each expert's rows end, to the message; where they begin, to `next`.
    __device__ __forceinline__ void write_ends(uint32_t* ends, uint32_t held) const {
        uint32_t before = 0;
        for (uint32_t start = 0; start < held; start += peer::LANES) {
            const uint32_t e = start + lane, rows = e < held ? next[e] : 0;
            const uint32_t end = before + peer::sum_to_lane(rows);
            if (e < held) ends[e] = end, next[e] = end - rows;
            before = shuffle(end, peer::LANES - 1);
        }
        sync_warp();
    }

    // Rows in the order of their slots, by expert; tokens in their own order, each once. A lane has a slot,
    // the warp as many whole tokens as it has lanes for.
    __device__ __forceinline__ void write_rows(peer::Row* rows, uint32_t* places, uint32_t ranks) const {
        const uint32_t together = peer::LANES / top, own = lane / top, below = (1u << lane) - 1;
        const uint32_t count = choice.slots / top;
        uint32_t sent = 0;
        for (uint32_t start = 0; start < count; start += together) {
            const uint32_t token = start + own, slot = start * top + lane;
            const bool there = own < together && token < count, mine = there && takes(slot);
            const uint32_t all = lanes_where(mine);
            const uint32_t token_lanes = 0xffffffffu >> (peer::LANES - top) << own * top;
            const uint32_t of_token = own < together ? token_lanes & all : 0;
            const uint32_t firsts = lanes_where(mine && (of_token & below) == 0);
            const uint32_t place = sent + count_bits(firsts & ((1u << own * top) - 1));
            if (there && lane % top == 0) places[token * ranks + to] = of_token != 0 ? place : NOWHERE;
            // Lanes without a slot for this rank are like nobody.
            const uint32_t served = mine ? expert(slot) : NOWHERE - lane, same = lanes_like(served);
            if (mine) rows[next[served] + count_bits(same & below)] = peer::Row{place, slot};
            sync_warp();
            if (mine && (same & below) == 0) next[served] += count_bits(same);
            sync_warp();
            sent += count_bits(firsts);
        }
    }
};

extern "C" __global__ void __launch_bounds__(1024)
    peer_plan(PEER, const uint32_t* counts, const uint32_t* ids, const uint32_t* homes,
              const uint32_t* holders, const uint32_t* locals, uint32_t experts, uint32_t* ways,
              uint32_t* places, uint32_t* loads) {
    wait_for_earlier_launches();
    const peer::Peer own = PEER_HERE(blockIdx.x);
    const uint32_t round = own.state->rounds[peer::DISPATCH_SEND], count = counts[blockIdx.x];
    const uint64_t before = blockIdx.x * own.layout.slots();
    const auto misused = [&] {
        if (threadIdx.x == 0) own.accuse(own.rank, peer::DISPATCH, round, peer::MISUSE);
    };
    if (!own.may_begin()) return;
    if (!own.is_in_turn() || count > tokens) return misused();
    uint32_t* next = peer::shared_words() + peer::SHARED_WORDS;
    uint32_t* seen = next + ranks * held;
    const uint32_t zeroed = ranks * held + (homes == nullptr ? 2 * experts + ranks : 0);
    for (uint32_t i = threadIdx.x; i < zeroed; i += blockDim.x) next[i] = 0;
    if (threadIdx.x == 0) {
        peer::shared_words()[peer::NONSENSE] = 0;
        own.state->since = uint32_t(nanoseconds());
    }
    sync_block();
    const Choice choice{ids + before, homes, holders, locals, ways == nullptr ? next + zeroed : ways + before,
                        count * top, experts, ranks};
    if (homes != nullptr) choice.only_holders();
    else if (threadIdx.x == 0) choice.least_loaded(seen, seen + 2 * experts);
    sync_block();
    if (peer::shared_words()[peer::NONSENSE] != 0) return misused();
    const uint32_t to = threadIdx.x / peer::LANES;
    const Outgoing message{choice, to, top, threadIdx.x % peer::LANES, next + to * held};
    unsigned char* target = own.message(to, round, own.rank);
    message.count();
    message.add_to(loads + (uint64_t(blockIdx.x) * ranks + to) * held, held);
    message.write_ends(reinterpret_cast<uint32_t*>(target), held);
    message.write_rows(reinterpret_cast<peer::Row*>(target + own.layout.rows_at()),
                       places + uint64_t(blockIdx.x) * tokens * ranks, ranks);
}

// === peer_dispatch_send ===
//
// x [tokens, width] bf16 to the messages, each row read once; then the flags. Grid: (packets of 8 columns /
// 128, tokens, ranks here); block: 128 threads.
extern "C" __global__ void __launch_bounds__(peer::PART)
    peer_dispatch_send(PEER, const uint32_t* counts, const uint16_t* x, const uint32_t* places) {
    wait_for_earlier_launches();
    const peer::Peer own = PEER_HERE(blockIdx.z);
    const uint32_t round = own.state->rounds[peer::DISPATCH_SEND];
    const uint32_t column = (blockIdx.x * peer::PART + threadIdx.x) * 8;
    if (!own.may_begin()) return;
    if (blockIdx.y < min_of(counts[blockIdx.z], tokens) && column < width) {
        const uint64_t token = uint64_t(blockIdx.z) * tokens + blockIdx.y;
        const Packet packet = load_packet(x + token * width + column);
        const uint64_t at = own.layout.tokens_at() + uint64_t(column) * 2;
#pragma unroll 4
        for (uint32_t to = 0; to < ranks; ++to) {
            const uint32_t place = places[token * ranks + to];
            if (place < tokens) {
                store_packet(own.message(to, round, own.rank) + at + place * own.layout.row_bytes(), packet);
            }
        }
    }
    own.end<true>(peer::DISPATCH_SEND, peer::DISPATCH, gridDim.x * gridDim.y);
}

// === peer_dispatch_receive ===
//
// The rows that came for this rank's experts, to `gathered` [ranks * tokens * top, width]: by expert, then by
// the rank they are of, then by slot. With `origins` of each, and the items of `moe.cuh` for the grouped
// products. Grid: (any number, 1, ranks here); block: 256 threads. Shared memory: two words for each expert
// and rank, one for each expert, two more.

// How many rows of which expert and rank there are, and where they are to lie.
struct Arrivals {
    const peer::Peer own;
    uint32_t round;
    uint32_t *ends, *starts, *items;  // [ranks, held], [held, ranks] and the sum of all, [held] and the sum

    // What the messages say; false if one says nonsense.
    __device__ __forceinline__ bool read() const {
        const uint32_t ranks = own.layout.ranks, held = own.layout.held;
        uint32_t* nonsense = peer::shared_words() + peer::NONSENSE;
        if (threadIdx.x == 0) *nonsense = 0;
        for (uint32_t i = threadIdx.x; i < ranks * held; i += blockDim.x) {
            ends[i] = reinterpret_cast<const uint32_t*>(own.message(own.rank, round, i / held))[i % held];
        }
        sync_block();
        for (uint32_t i = threadIdx.x; i < ranks * held; i += blockDim.x) {
            const uint32_t from = i / held, expert = i % held, begin = first_row(from, expert);
            if (ends[i] < begin || ends[i] > own.layout.slots()) *nonsense = from + 1;
            starts[expert * ranks + from] = ends[i] - begin;
        }
        sync_block();
        if (*nonsense != 0) {
            if (threadIdx.x == 0) own.accuse(*nonsense - 1, peer::DISPATCH, round, peer::PROTOCOL);
            return false;
        }
        peer::sum_before_each(starts, ranks * held);
        return true;
    }

    __device__ __forceinline__ uint32_t total() const { return starts[own.layout.ranks * own.layout.held]; }
    // Among the rows of a message.
    __device__ __forceinline__ uint32_t first_row(uint32_t from, uint32_t expert) const {
        return expert == 0 ? 0 : ends[from * own.layout.held + expert - 1];
    }

    // The expert and rank whose rows lie at `place`: the last that begin there or before.
    __device__ __forceinline__ uint32_t group_at(uint32_t place) const {
        uint32_t low = 0, high = own.layout.ranks * own.layout.held;
        while (high - low > 1) {
            const uint32_t middle = (low + high) / 2;
            if (starts[middle] <= place) low = middle;
            else high = middle;
        }
        return low;
    }

    // As `moe_group` lists them. One block.
    __device__ __forceinline__ void list(ExpertRows* out, uint32_t* count, uint32_t block_rows) const {
        const uint32_t ranks = own.layout.ranks, held = own.layout.held;
        for (uint32_t e = threadIdx.x; e < held; e += blockDim.x) {
            items[e] = (starts[(e + 1) * ranks] - starts[e * ranks] + block_rows - 1) / block_rows;
        }
        sync_block();
        peer::sum_before_each(items, held);
        for (uint32_t e = threadIdx.x; e < held; e += blockDim.x) {
            const uint32_t end = starts[(e + 1) * ranks];
            for (uint32_t from = starts[e * ranks], item = items[e]; from < end; from += block_rows, ++item) {
                out[item] = ExpertRows{e, from, min_of(from + block_rows, end), 0};
            }
        }
        if (threadIdx.x == 0) *count = items[held];
    }
};

extern "C" __global__ void __launch_bounds__(peer::WHOLE)
    peer_dispatch_receive(PEER, uint16_t* gathered, peer::Origin* origins, ExpertRows* items,
                          uint32_t* item_counts, uint32_t items_max, uint32_t block_rows) {
    wait_for_earlier_launches();
    const peer::Peer own = PEER_HERE(blockIdx.z);
    const uint32_t round = own.state->rounds[peer::DISPATCH_RECEIVE];
    // The products that follow must find no work, not whatever was there.
    const auto no_items = [&] {
        if (blockIdx.x == 0 && threadIdx.x == 0) item_counts[blockIdx.z] = 0;
    };
    if (!own.are_all_here(peer::DISPATCH, round)) return no_items();
    uint32_t* ends = peer::shared_words() + peer::SHARED_WORDS;
    uint32_t* starts = ends + ranks * held;
    const Arrivals arrivals{own, round, ends, starts, starts + ranks * held + 1};
    if (!arrivals.read()) return no_items();
    if (blockIdx.x == 0) {
        arrivals.list(items + uint64_t(blockIdx.z) * items_max, item_counts + blockIdx.z, block_rows);
        if (threadIdx.x == 0) own.state->rows = arrivals.total();
    }
    const uint64_t before = blockIdx.z * ranks * own.layout.slots();
    for (uint32_t place = blockIdx.x; place < arrivals.total(); place += gridDim.x) {
        const uint32_t group = arrivals.group_at(place), from = group % ranks;
        const uint32_t number = arrivals.first_row(from, group / ranks) + place - starts[group];
        const unsigned char* message = own.message(own.rank, round, from);
        const peer::Row row = reinterpret_cast<const peer::Row*>(message + own.layout.rows_at())[number];
        if (row.token >= tokens || row.slot >= own.layout.slots()) {
            if (threadIdx.x == 0) own.accuse(from, peer::DISPATCH, round, peer::PROTOCOL);
            return;
        }
        if (threadIdx.x == 0) origins[before + place] = peer::Origin{from, row.slot};
        peer::copy_row(gathered + (before + place) * width,
                       message + own.layout.tokens_at() + row.token * own.layout.row_bytes(), width / 8);
    }
    own.end<false>(peer::DISPATCH_RECEIVE, peer::DISPATCH, gridDim.x);
}

// === peer_combine_send ===
//
// outputs [ranks * tokens * top, width], where their inputs were in `gathered`, each to its slot in the
// mailbox of the token's rank; then the flags. Grid: (any number, 1, ranks here); block: 256 threads.
extern "C" __global__ void __launch_bounds__(peer::WHOLE)
    peer_combine_send(PEER, const uint16_t* outputs, const peer::Origin* origins) {
    wait_for_earlier_launches();
    const peer::Peer own = PEER_HERE(blockIdx.z);
    const uint32_t round = own.state->rounds[peer::COMBINE_SEND], rows = own.state->rows;
    if (!own.may_begin()) return;
    // The first block's first thread: the others have as good as begun.
    if (blockIdx.x == 0 && threadIdx.x == 0) own.ends(peer::AT_EXPERTS);
    const uint64_t before = blockIdx.z * ranks * own.layout.slots();
    for (uint32_t place = blockIdx.x; place < rows; place += gridDim.x) {
        const peer::Origin origin = origins[before + place];
        unsigned char* slots = own.mailbox(origin.rank) + own.layout.outputs_at(round);
        const uint16_t* row = outputs + (before + place) * width;
        peer::copy_row(slots + origin.slot * own.layout.row_bytes(), row, width / 8);
    }
    own.end<true>(peer::COMBINE_SEND, peer::COMBINE, gridDim.x);
}

// === peer_combine_receive ===
//
// out[t] = sum over the slots s of t, in order, of weights[s] times the output that came for s, and last
// shared[t] (null: none), what an expert gave that serves every token: in f32, rounded once, as `moe_combine`
// does. weights [tokens, top], shared and out [tokens, width]. Grid: (packets of 8
// columns / 128, tokens, ranks here); block: 128 threads.
extern "C" __global__ void __launch_bounds__(peer::PART)
    peer_combine_receive(PEER, const uint32_t* counts, const float* weights, const uint16_t* shared,
                         uint16_t* out) {
    wait_for_earlier_launches();
    const peer::Peer own = PEER_HERE(blockIdx.z);
    const uint32_t round = own.state->rounds[peer::COMBINE_RECEIVE];
    if (!own.are_all_here(peer::COMBINE, round)) return;
    const uint32_t column = (blockIdx.x * peer::PART + threadIdx.x) * 8;
    if (blockIdx.y < counts[blockIdx.z] && column < width) {
        const uint64_t token = uint64_t(blockIdx.z) * tokens + blockIdx.y;
        const uint16_t* outputs =
            reinterpret_cast<const uint16_t*>(own.mailbox(own.rank) + own.layout.outputs_at(round)) +
            uint64_t(blockIdx.y) * top * width + column;
        float sums[8] = {};
        for (uint32_t choice = 0; choice < top; ++choice) {
            const float weight = weights[token * top + choice];
            const Packet row = load_packet(outputs + uint64_t(choice) * width);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[2 * i] = fmaf(weight, bf16_low(row.words[i]), sums[2 * i]);
                sums[2 * i + 1] = fmaf(weight, bf16_high(row.words[i]), sums[2 * i + 1]);
            }
        }
        const uint64_t at = token * width + column;
        if (shared != nullptr) {
            const Packet row = load_packet(shared + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[2 * i] += bf16_low(row.words[i]);
                sums[2 * i + 1] += bf16_high(row.words[i]);
            }
        }
        Packet result;
#pragma unroll
        for (int i = 0; i < 4; ++i) result.words[i] = bf16_pair(sums[2 * i], sums[2 * i + 1]);
        store_packet(out + at, result);
    }
    own.end<false>(peer::COMBINE_RECEIVE, peer::COMBINE, gridDim.x * gridDim.y);
}
