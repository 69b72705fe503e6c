// How ranks that reach each other's memory exchange a layer's tokens: where what lies in a rank's mailbox,
// how flags say that it is there, and how a rank that stays away becomes an error. The mailboxes may be parts
// of one allocation, mappings of other processes' memory, or memory of other devices; all that is known of
// them is an array of base addresses.
//
// A round of a layer has four steps, each a launch or two: DISPATCH_SEND writes tokens to the mailboxes of
// the ranks that hold their experts, DISPATCH_RECEIVE waits for those of all ranks, COMBINE_SEND writes the
// experts' outputs to the mailboxes of the tokens' ranks, COMBINE_RECEIVE waits for them. Senders never wait,
// so that ranks which share a device need not run at once. A step counts its rounds itself: a graph of
// launches can be replayed, and a flag is the number of the round, so that none is ever cleared.
//
// Everything in a mailbox is there twice, for rounds in turn: a rank may send the tokens of round n + 1
// before the outputs of n are back, not those of n + 2 (`is_in_turn`). It writes tokens of n + 2 over those
// of n when its combination of n is done: for that it had outputs of n from every rank, which each sent after
// it had read the tokens of n. It writes outputs of n + 2 over those of n when it has tokens of n + 2 from
// every rank, which each sent after its own combination of n.
#pragma once

#include "numbers.cuh"
#include "system.cuh"

namespace peer {

constexpr uint32_t RANKS_MAX = 32, LANES = 32;
// Threads of a block that takes a part of a row, and of one that takes whole rows.
constexpr int PART = 128, WHOLE = 256;
// Bytes before a mailbox's messages: its fault first, flags from FLAGS_AT on.
constexpr uint32_t FLAGS_AT = 512, CONTROL_BYTES = 1024;
// Words of shared memory before what a kernel keeps there: whether the block stops, who sent nonsense, a sum
// for each warp.
constexpr uint32_t STOPS = 0, NONSENSE = 1, WARP_SUMS = 4, SHARED_WORDS = 16;

enum Phase : uint32_t { DISPATCH, COMBINE };
enum Step : uint32_t { DISPATCH_SEND, DISPATCH_RECEIVE, COMBINE_SEND, COMBINE_RECEIVE, STEPS };
// What is wrong with a rank: it stays away, it sent nonsense, or it was launched with nonsense itself.
enum Cause : uint32_t { DEADLINE = 1, PROTOCOL, MISUSE };
// Of a fault: the rank in the lowest bits, from these on the cause and the phase.
constexpr uint32_t CAUSE_BIT = 8, PHASE_BIT = 16;
// Of a slot's way: from here on the rank, before it the expert's number there.
constexpr uint32_t RANK_BIT = 16;

// A row of a message: its token's place in the message, and the slot where the output belongs.
struct alignas(8) Row {
    uint32_t token, slot;
};

// Where the output of a row that was gathered belongs.
struct alignas(8) Origin {
    uint32_t rank, slot;
};

// Where a round's time goes: from the plan until all rows are gathered, until outputs are sent, until they are
// summed. Waiting included.
enum Part : uint32_t { TO_EXPERTS, AT_EXPERTS, BACK, PARTS };

// What a rank keeps to itself: the round of each step that is next, how many blocks have done it, the fault
// that it found or was told of, how many rows it gathered; when the last part began, and nanoseconds of each
// in all rounds, which begin again with 0 after 4.29 s.
struct State {
    uint32_t rounds[STEPS], done[STEPS];
    uint32_t fault, fault_round, rows;
    uint32_t since, spent[PARTS];
};

// What all ranks agree on. `src/cuda/peer/layout.rs` computes the same.
struct Layout {
    uint32_t ranks, held, tokens, top, width;

    __device__ __forceinline__ static uint64_t whole(uint64_t bytes) { return (bytes + 15) / 16 * 16; }
    __device__ __forceinline__ uint64_t slots() const { return uint64_t(tokens) * top; }
    __device__ __forceinline__ uint64_t row_bytes() const { return uint64_t(width) * 2; }
    // A message: where each expert's rows end, the rows by expert, the tokens.
    __device__ __forceinline__ uint64_t rows_at() const { return whole(uint64_t(held) * 4); }
    __device__ __forceinline__ uint64_t tokens_at() const { return rows_at() + whole(slots() * 8); }
    __device__ __forceinline__ uint64_t message_bytes() const { return tokens_at() + tokens * row_bytes(); }
    __device__ __forceinline__ uint64_t message_at(uint32_t round, uint32_t from) const {
        return CONTROL_BYTES + (uint64_t(round % 2) * ranks + from) * message_bytes();
    }
    // Outputs by slot.
    __device__ __forceinline__ uint64_t outputs_at(uint32_t round) const {
        return CONTROL_BYTES + 2 * ranks * message_bytes() + round % 2 * slots() * row_bytes();
    }
};

// The round after `round`. 0 is no round, since flags are 0 at first; odd and even ones take turns for ever.
__device__ __forceinline__ uint32_t following(uint32_t round) { return round == 0xffffffffu ? 2 : round + 1; }

__device__ __forceinline__ uint32_t* shared_words() { return reinterpret_cast<uint32_t*>(shared_memory()); }

// One rank, as its own launches see the group.
struct Peer {
    Layout layout;
    const uint64_t* bases;  // by rank, its mailbox
    State* state;
    uint32_t rank, deadline_us;

    __device__ __forceinline__ unsigned char* mailbox(uint32_t of) const {
        return reinterpret_cast<unsigned char*>(bases[of]);
    }
    // Whose fault it is, if the group has failed, and in which round.
    __device__ __forceinline__ uint32_t* control(uint32_t of) const {
        return reinterpret_cast<uint32_t*>(mailbox(of));
    }
    // Says, in the mailbox of `at`, which round's message of `from` is there.
    __device__ __forceinline__ uint32_t* flag(uint32_t at, Phase phase, uint32_t round, uint32_t from) const {
        uint32_t* flags = reinterpret_cast<uint32_t*>(mailbox(at) + FLAGS_AT);
        return flags + (phase * 2 + round % 2) * RANKS_MAX + from;
    }
    __device__ __forceinline__ unsigned char* message(uint32_t at, uint32_t round, uint32_t from) const {
        return mailbox(at) + layout.message_at(round, from);
    }

    __device__ __forceinline__ bool is_in_turn() const {
        const uint32_t next = state->rounds[DISPATCH_SEND], unfinished = state->rounds[COMBINE_RECEIVE];
        return next == unfinished || next == following(unfinished);
    }

    // Whether the group has failed. The first fault found is the one that stays.
    __device__ __forceinline__ bool has_failed() const {
        const uint32_t* told = control(rank);
        const uint32_t fault = load_acquire(told);
        if (fault == 0) return false;
        state->fault_round = told[1];
        state->fault = fault;
        return true;
    }

    // Ends the group, unless it has failed already, and tells every rank whose fault it is: one that leaves
    // because of it must not be blamed.
    __device__ __forceinline__ void accuse(uint32_t whom, Phase phase, uint32_t round, Cause cause) const {
        if (has_failed()) return;
#pragma unroll 1
        for (uint32_t to = 0; to < layout.ranks; ++to) store_relaxed(control(to) + 1, round);
        fence_system();
        const uint32_t fault = cause << CAUSE_BIT | phase << PHASE_BIT | whom;
#pragma unroll 1
        for (uint32_t to = 0; to < layout.ranks; ++to) store_relaxed(control(to), fault);
        state->fault_round = round;
        state->fault = fault;
    }

    // Whether a block may begin. Asked by one thread, so that all threads agree.
    __device__ __forceinline__ bool may_begin() const {
        if (threadIdx.x == 0) shared_words()[STOPS] = has_failed();
        sync_block();
        return shared_words()[STOPS] == 0;
    }

    // Who is at fault where `whom` is missed: a rank that stays away may wait itself, for a message of the
    // phase before, and its mailbox has the flags of those that it has. Two phases back is far enough: of
    // that round this rank has had every output, so every rank had sent its own.
    __device__ __forceinline__ uint32_t at_fault(uint32_t whom, Phase phase, uint32_t round) const {
#pragma unroll 1
        for (uint32_t before = 0; before < 2; ++before) {
            if (phase == DISPATCH) --round;
            phase = phase == DISPATCH ? COMBINE : DISPATCH;
            // There was no such round.
            if (round == 0 || load_acquire(flag(rank, phase, round, rank)) != round) break;
            uint32_t from = 0;
            while (from < layout.ranks && load_acquire(flag(whom, phase, round, from)) == round) ++from;
            if (from == layout.ranks) break;
            whom = from;
        }
        return whom;
    }

    // Waits until the messages of all ranks are here: false if one stays away for too long, or the group has
    // failed. All threads of a block; a lane of the first warp for each rank.
    __device__ __forceinline__ bool are_all_here(Phase phase, uint32_t round) const {
        if (threadIdx.x < LANES) {
            bool here = true, told = false;
            if (threadIdx.x < layout.ranks) {
                const uint32_t* own = flag(rank, phase, round, threadIdx.x);
                const uint32_t* fault = control(rank);
                here = load_acquire(own) == round;
                const uint64_t start = here ? 0 : nanoseconds();
                while (!here && !told && nanoseconds() - start < uint64_t(deadline_us) * 1000) {
                    here = load_acquire(own) == round;
                    told = load_acquire(fault) != 0;
                }
            }
            const uint32_t missing = lanes_where(!here);
            if (threadIdx.x == 0) {
                const uint32_t lowest = count_bits((missing & -missing) - 1);
                if (missing != 0) accuse(at_fault(lowest, phase, round), phase, round, DEADLINE);
                shared_words()[STOPS] = missing != 0;
            }
        }
        sync_block();
        return shared_words()[STOPS] == 0;
    }

    // The end of a part of the round, and the beginning of the next one. One thread of a rank at a time.
    __device__ __forceinline__ void ends(Part part) const {
        const uint32_t now = uint32_t(nanoseconds());
        state->spent[part] += now - state->since;
        state->since = now;
    }

    // Ends a step for a block: all its threads. The last of a rank's blocks moves on to the next round; of a
    // step that sends, it says before that everything is there. A group that has failed is told nothing.
    template <bool SENDS>
    __device__ __forceinline__ void end(Step step, Phase phase, uint32_t blocks) const {
        sync_block();
        if (threadIdx.x != 0) return;
        if (SENDS) fence_system();
        if (atomic_add(&state->done[step], 1u) + 1 < blocks) return;
        const uint32_t round = state->rounds[step];
        if (SENDS && !has_failed()) {
            fence_system();
            for (uint32_t to = 0; to < layout.ranks; ++to) store_relaxed(flag(to, phase, round, rank), round);
        }
        if (step == DISPATCH_RECEIVE) ends(TO_EXPERTS);
        if (step == COMBINE_RECEIVE) ends(BACK);
        state->done[step] = 0;
        state->rounds[step] = following(round);
    }
};

// The sum over this lane and those before it.
__device__ __forceinline__ uint32_t sum_to_lane(uint32_t value) {
    const uint32_t lane = threadIdx.x % LANES;
#pragma unroll
    for (uint32_t distance = 1; distance < LANES; distance *= 2) {
        const uint32_t other = shuffle(value, (lane - distance) % LANES);
        if (lane >= distance) value += other;
    }
    return value;
}

// Puts in the place of each of `n` numbers in shared memory the sum of those before it, and the sum of all
// behind them. All threads of a block.
__device__ __forceinline__ void sum_before_each(uint32_t* numbers, uint32_t n) {
    const uint32_t each = (n + blockDim.x - 1) / blockDim.x, warp = threadIdx.x / LANES;
    const uint32_t first = min_of(threadIdx.x * each, n), end = min_of(first + each, n);
    uint32_t own = 0;
    for (uint32_t i = first; i < end; ++i) own += numbers[i];
    const uint32_t to_here = sum_to_lane(own);
    uint32_t* sums = shared_words() + WARP_SUMS;
    if (threadIdx.x % LANES == LANES - 1) sums[warp] = to_here;
    sync_block();
    uint32_t before = to_here - own;
    for (uint32_t w = 0; w < warp; ++w) before += sums[w];
    for (uint32_t i = first; i < end; ++i) {
        const uint32_t number = numbers[i];
        numbers[i] = before;
        before += number;
    }
    if (threadIdx.x == blockDim.x - 1) numbers[n] = before;
    sync_block();
}

// Copies a row of packets of 16 bytes, four in flight per thread. All threads of a block.
__device__ __forceinline__ void copy_row(void* to, const void* from, uint32_t packets) {
    Packet* target = static_cast<Packet*>(to);
    const Packet* source = static_cast<const Packet*>(from);
    for (uint32_t i = threadIdx.x; i < packets; i += 4 * blockDim.x) {
        Packet four[4];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j)
            if (i + j * blockDim.x < packets) four[j] = source[i + j * blockDim.x];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j)
            if (i + j * blockDim.x < packets) target[i + j * blockDim.x] = four[j];
    }
}

}  // namespace peer
