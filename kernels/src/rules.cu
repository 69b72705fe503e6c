// What changes a row of logits before a token is drawn from it, in the bits of `worker/src/token_rules.rs`: a grammar's mask,
// tokens that may not come, biases, penalties on what was there before. Not the draw: `sample.cu`.
//
// A row's list has every id that its rules speak of, once: a header, then `Rule`s. It stays on the device from step to step,
// and takes the row's last token itself, which the host may not know yet, so that nobody need wait for it.
// Grid: (rows). Block: 256 threads. Shared: `Scratch`.
#include "numbers.cuh"

constexpr int THREADS = 256;
constexpr uint32_t NONE = 0xffffffffu;
// Of an id: it stood in the prompt; it has a bias; it may not come while the row holds some back; it never may.
constexpr uint32_t IN_PROMPT = 1, BIASED = 2, HELD = 4, NEVER = 8;

// As a list's header: how many rules follow, and how many may.
struct alignas(16) Rule {
    uint32_t id, generated, flags;
    float bias;
};

// NONE where a row has no list, no token to take, no mask.
struct RowRules {
    uint32_t list, token, mask, holds;
    float repetition, frequency, presence;
    uint32_t unused;
};

struct Scratch {
    float sums[THREADS / 32];
    uint32_t found;
};

// Adds the token to the list: counts it once more, or gives it a rule of its own. How many rules there are then.
__device__ __forceinline__ uint32_t take(Rule* list, uint32_t token, Scratch& scratch) {
    const uint32_t count = list->id, most = list->generated;
    Rule* rules = list + 1;
    if (threadIdx.x == 0) scratch.found = 0;
    sync_block();
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
        if (rules[i].id == token) ++rules[i].generated, scratch.found = 1;
    }
    sync_block();
    if (scratch.found || count >= most) return count;
    if (threadIdx.x == 0) rules[count] = Rule{token, 1, 0, 0.0f}, list->id = count + 1;
    sync_block();
    return count + 1;
}

// Whether anything could come if nothing of the list did. Counts are exact in f32.
__device__ __forceinline__ bool leaves_some(const float* row, uint32_t vocabulary, const Rule* rules, uint32_t count,
                                            uint32_t forbidden, Scratch& scratch) {
    int left = 0;
    for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) left += !(row[id] == NEGATIVE_INFINITY);
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
        const Rule rule = rules[i];
        if (rule.id < vocabulary && (rule.flags & forbidden)) left -= !(row[rule.id] == NEGATIVE_INFINITY);
    }
    return sum_over_block(float(left), scratch.sums) > 0.0f;
}

// Every operation is rounded once, in the order of `token_rules.rs`.
__device__ __forceinline__ float changed(float logit, const Rule& rule, const RowRules& by, uint32_t forbidden) {
    if (rule.flags & forbidden) logit = NEGATIVE_INFINITY;
    if (rule.flags & BIASED) logit += rule.bias;
    if ((rule.flags & IN_PROMPT) || rule.generated > 0)
        logit = logit > 0.0f ? logit / by.repetition : multiply_rounded(logit, by.repetition);
    if (rule.generated == 0) return logit;
    return logit - multiply_rounded(by.frequency, float(rule.generated)) - by.presence;
}

// `logits` [rows, vocabulary]; `rows` one for each; `lists` as above; `masks`: from a row's first word on, a bit for each id,
// set if it may come; `tokens`: what lists take. Where a mask and what may not come leave nothing, the mask alone holds: an
// answer's form comes before everything else.
extern "C" __global__ void __launch_bounds__(THREADS)
    apply_rules(float* logits, const RowRules* rows, Rule* lists, const uint32_t* masks, const uint32_t* tokens,
                uint32_t vocabulary) {
    follow();
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared_memory());
    const RowRules by = rows[blockIdx.x];
    float* row = logits + uint64_t(blockIdx.x) * vocabulary;
    if (by.mask != NONE) {
        const uint32_t* mask = masks + by.mask;
        for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) {
            if (!(mask[id / 32] >> id % 32 & 1)) row[id] = NEGATIVE_INFINITY;
        }
    }
    if (by.list == NONE) return;
    Rule* list = lists + by.list;
    const uint32_t count = by.token == NONE ? list->id : take(list, tokens[by.token], scratch);
    const uint32_t forbidden = by.holds ? HELD | NEVER : NEVER;
    // The mask and the list are written.
    sync_block();
    if (by.mask != NONE && !leaves_some(row, vocabulary, list + 1, count, forbidden, scratch)) return;
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
        const Rule rule = list[1 + i];
        if (rule.id < vocabulary) row[rule.id] = changed(row[rule.id], rule, by, forbidden);
    }
}
