// From logits to a token id, as `worker/src/sampler.rs` defines it, the same id for the same logits:
// temperature, min-p, top-k, top-p, then a draw that depends on (seed, position) alone; here also the chosen
// token's log-probability. And scores: what a log-probability is made of (`worker/src/logprobs.rs`). What
// changes logits before is `rules.cu`.
//
// Weights e^((logit - max) / temperature) are integers, in units of 2^-40: their sums are exact in any
// order, so neither the order in which threads add nor the batch can change a choice, and the CPU's is the
// same. All cuts are one question, "which element, in descending order, takes the running sum past a
// target?".
//
// Two launches, in which several blocks read a row, each its part of the ids. The first finds the largest
// logit of each chunk of the row: the k-th of these is a bound at or before which at least k elements lie,
// and seldom many more. The second sums weights and lists what comes no later than the bound; the row's last
// block sorts the list, in which nearly every answer lies. Where it does not, or the list is too long, the
// block goes by the sums of weights of bins of equal width below the largest logit, which are made where
// top-k is not what bounds the list, and reads the row again for the elements of the bin in question.
//
// Grid: (parts, rows). Block: 512 threads. Shared: a place a thread, then `Scan` and `Finder` in turn.
#include "sample_find.cuh"
#include "ticket.cuh"
#ifndef KEYWAY_EMULATE
#include <math.h>
#endif

static_assert(sizeof(Scan) <= sizeof(Finder), "one after the other");

// `logits` [rows, vocabulary] f32. Leaves the first place of each chunk in `work`, and sums that are 0. A
// part's packets are dealt to its `chunks` in turn, a power of two; a row has at most CHUNKS.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sample_peaks(const float* logits, uint32_t* work, uint32_t vocabulary, uint32_t chunks) {
    follow();
    Place* of_threads = reinterpret_cast<Place*>(shared_memory());
    Joint& joint = *Work(work, blockIdx.y, gridDim.x).joint;
    uint32_t* zeros = reinterpret_cast<uint32_t*>(&joint);
    const uint32_t end = uint32_t(reinterpret_cast<uint32_t*>(joint.firsts) - zeros);
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < end; i += gridDim.x * THREADS) zeros[i] = 0;

    const Ids ids = Ids{0, vocabulary}.piece(blockIdx.x, gridDim.x);
    uint32_t key = 0, id = 0xffffffffu;
    const float* own = logits + uint64_t(blockIdx.y) * vocabulary;
    each_logit<4>(own, ids, threadIdx.x, THREADS, [&](uint32_t of, float logit) {
        const uint32_t other = key_of(logit);
        if (other > key || (id == 0xffffffffu && ids.have(of))) key = other, id = of;
    });
    Place place = uint64_t(~key) << 32 | id;
    const uint32_t lanes = min_of(chunks, 32u), lane = threadIdx.x % 32;
    for (unsigned mask = 16; mask >= chunks; mask /= 2) place = min_of(place, shuffle_xor(place, mask));
    if (lane < lanes) of_threads[threadIdx.x / 32 * lanes + lane] = place;
    sync_block();
    if (threadIdx.x >= chunks) return;
    for (uint32_t i = threadIdx.x; i < WARPS * lanes; i += chunks) place = min_of(place, of_threads[i]);
    joint.firsts[blockIdx.x * chunks + threadIdx.x] = place;
}

// Draws one of all candidates in the order of their ids, by the weights of the pieces that warps had.
__device__ __forceinline__ uint32_t draw_of_all(const Work& work, uint64_t target, Finder& finder) {
    const uint32_t pieces = gridDim.x * WARPS;
    uint64_t* running = finder.sorted.running;
    for (uint32_t i = threadIdx.x; i < pieces; i += THREADS) running[i] = work.pieces[i];
    make_running(running, pieces, finder.sums);
    const uint32_t piece = first_above(running, pieces, target);
    target -= piece > 0 ? running[piece - 1] : 0;
    const Ids ids = Ids{0, finder.row.vocabulary}.piece(piece / WARPS, gridDim.x).piece(piece % WARPS, WARPS);
    return finder.by_ids(ids, target, [&](float logit) { return finder.row.weight(logit); });
}

// What a row's last block begins with: what all left.
struct Left {
    uint64_t at_1, total, candidates;
    uint32_t listed;
    // Of the list, if it is so long.
    Place own;

    // All loads are under way at once.
    __device__ __forceinline__ explicit Left(const Joint& joint)
        : at_1(joint.sums[0]), total(joint.sums[1]), candidates(joint.sums[2]), listed(joint.listed),
          own(joint.list[threadIdx.x]) {}
};

// Chooses from a row of which some weigh enough, more than `top_k` of them if `few`, into thread 0's
// `finder.chosen`; `total` is the weight of all, known if not few are.
__device__ __forceinline__ void choose(const Work& work, const Left& left, bool few, Finder& finder) {
    const Parameters& by = finder.by;
    auto take = [&](uint32_t id) {
        if (threadIdx.x == 0) finder.chosen = place_of(finder.row.logits[id], id);
    };
    if (!few && by.top_p >= 1.0f) {
        take(draw_of_all(work, multiply_high(by.number(), left.total), finder));
        return;
    }
    finder.take_list(*work.joint, left.listed, left.own);
    finder.sorted.weigh(finder.row, finder.listed, finder.sums);
    // The weight of what is kept.
    uint64_t total = finder.total;
    // The last one that top-k keeps, the last one that top-p keeps of those, and the one that is drawn.
    bool by_bins = false;
#pragma unroll 1
    for (uint32_t cut = few ? 0 : 1; cut < 3; ++cut) {
        if (cut == 1 && by.top_p >= 1.0f) continue;
        // The last one of top-p is the one that reaches what is wanted, that is, passes one less.
        const uint64_t wanted = uint64_t(double(by.top_p) * double(total));
        const uint64_t target = cut == 0   ? by.top_k - 1
                                : cut == 1 ? wanted - uint64_t(wanted > 0)
                                           : multiply_high(by.number(), total);
        const uint32_t n = finder.listed;
        if (n > 0 && target < (cut == 0 ? n : finder.sorted.running[n - 1])) {
            const uint32_t at = cut == 0 ? uint32_t(target) : first_above(finder.sorted.running, n, target);
            total = finder.sorted.running[at];
            if (threadIdx.x == 0) finder.chosen = finder.sorted.elements[at];
            continue;
        }
        if (!by_bins) finder.take_bins();
        by_bins = true;
        const Finder::Found found = finder.find(target, cut == 0);
        take(found.id), total = found.weights;
    }
}

// What a row's last block does: `first` is the row's first place, `few` as in `choose` if that is known.
__device__ __forceinline__ void draw(const Work& work, Place first, bool few, bool has_bins, uint32_t& token,
                                     float& logprob, Finder& finder) {
    const Left left(*work.joint);
    if (threadIdx.x == 0) {
        finder.at_1 = left.at_1, finder.total = left.total;
        finder.joint = work.joint, finder.has_bins = has_bins, finder.chosen = first;
    }
    const bool cut = few || (finder.by.top_k > 0 && finder.by.top_k < left.candidates);
    if (few || left.candidates > 0) choose(work, left, cut, finder);
    if (threadIdx.x > 0) return;
    token = id_of(finder.chosen);
    logprob = logit_of(finder.chosen) - finder.row.maximum - logf(float(double(finder.at_1) / double(UNIT)));
}

// `parameters` one per row; `tokens` and `logprobs` (of the logits given, at temperature 1) one per row;
// `work` as `sample_peaks` left it, of a row's `chunks`.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sample(const float* logits, const Parameters* parameters, uint32_t* work, uint32_t* tokens,
           float* logprobs, uint32_t vocabulary, uint32_t chunks) {
    follow();
    Scan& scan = *reinterpret_cast<Scan*>(shared_memory());
    const uint32_t parts = gridDim.x;
    const Work to(work, blockIdx.y, parts);
    const Place of_chunk = Ranking::own(to, chunks);
    const Parameters by = parameters[blockIdx.y];
    const float* own = logits + uint64_t(blockIdx.y) * vocabulary;
    const Ids ids = Ids{0, vocabulary}.piece(blockIdx.x, parts).piece(threadIdx.x / 32, WARPS);
    Reader<2> reader(own, ids, threadIdx.x % 32, 32);
    if (threadIdx.x == 0) scan.by = by;
    const bool cuts = by.cuts();
    // One more than top-k keeps says that there are more.
    const uint32_t most = most_of(chunks);
    const bool by_count = cuts && by.top_k > 0 && by.top_k < most;
    const Bound bound = scan.ranking.bound(of_chunk, !cuts ? 1 : by_count ? by.top_k + 1 : most);
    const Row row = row_of(own, vocabulary, logit_of(bound.first), by);
    // All at or before the bound are candidates if it weighs a little more than enough: less than the
    // exponential may be off by. Then nothing needs to be known of the others at this temperature.
    const uint64_t at_bound = row.weight(logit_of(bound.last));
    const bool few = by_count && at_bound - (at_bound >> 16) > row.least;
    scan.clear(cuts && !few);
    if (threadIdx.x == 0) scan.row = row;
    sync_block();
    const float last = logit_of(bound.last);
    uint64_t at_1 = 0, weights = 0, count = 0;
    if (few || by.is_greedy()) {
        const float weightless = row.weightless(1.0f), listed = few ? last : -NEGATIVE_INFINITY;
        reader.each([&](uint32_t id, float logit) {
            at_1 += weight_at_1(logit, row.maximum, weightless);
            if (logit >= listed) scan.note(ids, id, logit, bound.last);
        });
    } else {
        const float weightless = row.weightless(by.temperature), weightless_at_1 = row.weightless(1.0f);
        uint32_t candidates = 0;
        reader.each([&](uint32_t id, float logit) {
            const uint64_t own_at_1 = weight_at_1(logit, row.maximum, weightless_at_1);
            at_1 += own_at_1;
            if (!(logit >= weightless)) return;
            uint64_t weight = own_at_1;
            if (by.temperature != 1.0f) weight = weight_of(logit, row.maximum, by.temperature);
            if (weight < row.least) return;
            weights += weight, ++candidates;
            if (!cuts) return;
            scan.add(row.bin(logit), weight);
            if (!(logit < last)) scan.note(ids, id, logit, bound.last);
        });
        count = candidates;
    }
    at_1 = sum_over_warp(at_1), weights = sum_over_warp(weights), count = sum_over_warp(count);
    if (threadIdx.x % 32 == 0) to.pieces[blockIdx.x * WARPS + threadIdx.x / 32] = weights;
    scan.leave(*to.joint, {at_1, weights, count}, cuts && !few);
    if (!is_last_of(parts, &to.joint->done, scan.last)) return;

    Finder& finder = *reinterpret_cast<Finder*>(shared_memory());
    draw(to, bound.first, few, cuts && !few, tokens[blockIdx.y], logprobs[blockIdx.y], finder);
}

// What the host makes log-probabilities of: the token's logit, the largest, the sum of all weights beside it
// at temperature 1; how many logits are at least the token's; the likeliest ids and their logits, in the
// order in which tokens are kept.
constexpr uint32_t TOP = 20, NOT_WANTED = 0xffffffffu;
struct Score {
    float logit, maximum;
    uint32_t total[2], rank, unused;
    uint32_t ids[TOP];
    float logits[TOP];
};

// The `top` likeliest of a row, by its list, or one after the other where that was too long.
__device__ __forceinline__ void likeliest(const Row& row, const Joint& joint, uint32_t top, Score& to,
                                          Finder& finder) {
    const uint32_t n = joint.listed;
    if (n <= GATHERED) {
        finder.take_list(joint, n, joint.list[threadIdx.x]);
        if (threadIdx.x >= top) return;
        const uint32_t id = id_of(finder.sorted.elements[threadIdx.x]);
        to.ids[threadIdx.x] = id, to.logits[threadIdx.x] = row.logits[id];
        return;
    }
    Place last = 0;
    for (uint32_t i = 0; i < top; ++i) {
        Place best = NOWHERE;
        const Ids ids{0, row.vocabulary};
        each_logit<4>(row.logits, ids, threadIdx.x, THREADS, [&](uint32_t id, float logit) {
            const Place place = place_of(logit, id);
            if (place > last && place < best && ids.have(id)) best = place;
        });
        last = ~largest(~best, finder.sums);
        if (threadIdx.x == 0) to.ids[i] = id_of(last), to.logits[i] = row.logits[id_of(last)];
    }
}

// Of row r as many of the likeliest as `wanted[r]` says, at most TOP; nothing at all if that is NOT_WANTED.
// `work` as `sample_peaks` left it.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    score(const float* logits, const uint32_t* wanted, const uint32_t* tokens, uint32_t* work, Score* scores,
          uint32_t vocabulary, uint32_t chunks) {
    follow();
    if (wanted[blockIdx.y] == NOT_WANTED) return;
    Scan& scan = *reinterpret_cast<Scan*>(shared_memory());
    const uint32_t parts = gridDim.x, top = min_of(min_of(wanted[blockIdx.y], vocabulary), TOP);
    const Work to(work, blockIdx.y, parts);
    const Place of_chunk = Ranking::own(to, chunks);
    const float* own = logits + uint64_t(blockIdx.y) * vocabulary;
    const float token = own[tokens[blockIdx.y]];
    const Ids ids = Ids{0, vocabulary}.piece(blockIdx.x, parts);
    Reader<2> reader(own, ids, threadIdx.x, THREADS);
    const Bound bound = scan.ranking.bound(of_chunk, max_of(top, 1u));
    const Row row{own, vocabulary, logit_of(bound.first), 1.0f, 0.0f, 1};
    scan.clear(false);
    sync_block();
    const float last = logit_of(bound.last), weightless = row.weightless(1.0f);
    uint64_t weights = 0;
    uint32_t rank = 0;
    reader.each([&](uint32_t id, float logit) {
        weights += weight_at_1(logit, row.maximum, weightless);
        rank += logit >= token;
        if (top > 0 && !(logit < last)) scan.note(ids, id, logit, bound.last);
    });
    scan.leave(*to.joint, {sum_over_warp(weights), sum_over_warp(rank), 0}, false);
    if (!is_last_of(parts, &to.joint->done, scan.last)) return;

    Score& score = scores[blockIdx.y];
    if (threadIdx.x == 0) {
        const uint64_t total = to.joint->sums[0];
        score.logit = token, score.maximum = own[id_of(bound.first)];
        score.rank = uint32_t(to.joint->sums[1]);
        score.total[0] = uint32_t(total), score.total[1] = uint32_t(total >> 32);
    }
    Finder& finder = *reinterpret_cast<Finder*>(shared_memory());
    if (top > 0) likeliest(row, *to.joint, top, score, finder);
}
