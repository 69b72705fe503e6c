//! Who routes in a simulation: one of the gateway's own policies, or a formula of another router, written
//! from its description, to be compared with. The formulas see what the gateway's policies see; none of them
//! lets requests wait.

use keyway_core::{
    PrefixIndex, PromptViews, fill_matches,
    pick::{Candidate, RequestView, Turn},
};

use crate::{args::contender::Contender, random::splitmix};

/// In-flight requests by which the busiest worker must exceed the idlest, absolutely and as a factor, before
/// affinity is dropped, and the share of the prompt from which on a match counts: sglang-router's defaults as
/// of 2026.
const SWITCH_ABS: u64 = 64;
const SWITCH_REL: f64 = 1.5;
const SWITCH_MATCH: f64 = 0.3;

/// What a formula knows of a worker besides the candidate: tokens of the prompts under way there.
pub(super) type Contexts<'a> = &'a [u64];

impl Contender {
    /// The worker that a formula chooses, by its place among the candidates; `None` for the gateway's own
    /// policies, and without candidates.
    pub(super) fn choose(
        self,
        request: &RequestView<'_>,
        candidates: &mut [Candidate],
        contexts: Contexts<'_>,
        turn: &Turn,
        index: &PrefixIndex,
    ) -> Option<usize> {
        if let Self::Ours(_) = self {
            return None;
        }
        fill_matches(&PromptViews::of(&[*request], &[]), candidates, index);
        if self == Self::Threshold {
            return Some(threshold(request, candidates, turn));
        }
        let block = request.block_tokens.max(1.0);
        let cost = |i: usize| {
            let Candidate { load, matched_blocks, .. } = candidates[i];
            let uncached = request.prompt_tokens - request.matched_tokens(matched_blocks);
            let prefill = (load.waiting_prefill_tokens + uncached) as f64 / block;
            match self {
                Self::LMetric => prefill * (load.requests + 1) as f64,
                _ => prefill + (contexts[i] + request.prompt_tokens) as f64 / block,
            }
        };
        least(0..candidates.len(), cost, turn)
    }
}

/// Affinity, unless the fleet is out of balance.
fn threshold(request: &RequestView<'_>, candidates: &[Candidate], turn: &Turn) -> usize {
    let requests = |i: usize| candidates[i].load.requests;
    let all = || 0..candidates.len();
    let (most, fewest) = (all().map(requests).max().unwrap_or(0), all().map(requests).min().unwrap_or(0));
    let unbalanced = most - fewest > SWITCH_ABS && most as f64 > SWITCH_REL * fewest as f64;
    let longest = all().map(|i| candidates[i].matched_blocks).max().unwrap_or(0);
    let counts = request.matched_tokens(longest) as f64 > SWITCH_MATCH * request.prompt_tokens as f64;
    let among = all().filter(|&i| unbalanced || !counts || candidates[i].matched_blocks == longest);
    least(among, |i| requests(i) as f64, turn).unwrap_or(0)
}

/// Where the cost is least; any of equals.
fn least(among: impl Iterator<Item = usize>, cost: impl Fn(usize) -> f64, turn: &Turn) -> Option<usize> {
    let keyed = among.map(|i| (cost(i), splitmix(turn.random ^ i as u64), i));
    keyed.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map(|(.., i)| i)
}

#[cfg(test)]
mod tests {
    use keyway_core::{LoadSnapshot, PaceSnapshot, WorkerId};
    use keyway_wire::block_hash::BlockHash;

    use super::*;

    /// Three workers: the first holds half of the prompt.
    fn choose(contender: &str, requests: [u64; 3], waiting: [u64; 3], contexts: [u64; 3]) -> usize {
        let mut index = PrefixIndex::new(1 << 20);
        let chain: Vec<_> = (1..=10).map(BlockHash).collect();
        index.place(WorkerId(0), &chain[..5]);
        let view =
            RequestView { chain: &chain, prompt_tokens: 161, block_tokens: 16.0, media: &[], session: None };
        let candidate = |i: usize| {
            let pace = PaceSnapshot::default();
            let load = LoadSnapshot {
                requests: requests[i],
                waiting_prefill_tokens: waiting[i],
                pace,
                ..LoadSnapshot::default()
            };
            Candidate::new(WorkerId(i as u32), load, 8.0, 1.0)
        };
        let mut candidates = [0, 1, 2].map(candidate);
        let contender: Contender = contender.parse().unwrap();
        let turn = Turn { counter: 0, random: 5 };
        contender.choose(&view, &mut candidates, &contexts, &turn, &index).unwrap()
    }

    #[test]
    fn each_formula_by_hand() {
        // 81 uncached tokens there, 161 elsewhere: 81 * 2 against 161 * 1.
        assert_eq!(choose("lmetric", [0, 0, 0], [0; 3], [0; 3]), 0);
        assert_ne!(choose("lmetric", [1, 0, 0], [0; 3], [0; 3]), 0);
        // 81 + 161 + 60 against 161 + 161; 100 more are too many.
        assert_eq!(choose("dynamo", [5, 0, 0], [0; 3], [60, 0, 0]), 0);
        assert_ne!(choose("dynamo", [5, 0, 0], [0; 3], [100, 0, 0]), 0);
        // A difference of 64 is none yet, one more drops affinity.
        assert_eq!(choose("threshold", [64, 0, 0], [0; 3], [0; 3]), 0);
        assert_eq!(choose("threshold", [65, 1, 0], [0; 3], [0; 3]), 2);
    }
}
