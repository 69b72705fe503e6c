//! What a worker could fetch of a prompt from another that holds it, where engines offer that: a further
//! tier, as its own host's memory is one, whose speed is that of the network between the two.
//!
//! With it a prefix that is held anywhere is held everywhere, for the price of its transfer, and a request
//! need not queue at the only worker that has its prefix. What is fetched displaces other blocks, as what is
//! computed does; some of those have copies elsewhere, so it is priced at a part of that, [`COPY_DISPLACES`].
//!
//! In `keyway-loadtest simulate --pull`, eight workers of 6,000 prefill tokens/s with caches for 25 % of 30
//! minutes of the Mooncake conversations, of which one pooled cache finds 30.0 % (`--slice 0s..30m
//! --spread-bursts --profile fcfs-6k --kv-blocks 23461 --block-size 64 --index-block-tokens 64
//! --index-knows-capacity`): share of prompt tokens found, and mean time to first token in s. Without a queue
//! anywhere it would be 1.50.
//!
//! | `COPY_DISPLACES` | 10 Gbit/s | 100 Gbit/s |
//! |---|---|---|
//! | no fetching | 28.0 %, 1.83 | 28.0 %, 1.83 |
//! | 0 | 29.4 %, 1.81 | 29.0 %, 1.67 |
//! | 0.3 | 29.7 %, 1.81 | 29.5 %, 1.66 |
//! | 0.6 | 29.5 %, 1.80 | 29.6 %, 1.68 |
//! | 1 | 29.6 %, 1.81 | 29.7 %, 1.69 |
//! | 2 | 29.6 %, 1.81 | 29.8 %, 1.73 |

use crate::cost::CostModel;
use crate::pick::{Candidate, RequestView, Source};
use crate::transfers::Transfer;

/// What fetched blocks displace, as a share of what computed ones do. In the table those had a price of 1 and
/// not of 1.5, so this is what a half is there.
pub const COPY_DISPLACES: f64 = 1.0 / 3.0;

/// Says of each candidate that exchanges blocks, and whose matches are known, what it could fetch from
/// the one of them that holds most of the prompt, where that takes less than to compute it. `transfer`:
/// from the first to the second; `None` where the second is not to fetch from the first.
pub fn fill_peers(
    request: &RequestView<'_>,
    candidates: &mut [Candidate],
    transfer: impl Fn(&Candidate, &Candidate) -> Option<Transfer>,
) {
    let most = |a: &&Candidate, b: &&Candidate| a.matched_blocks.cmp(&b.matched_blocks);
    let holder = candidates.iter().filter(|one| one.exchanges).max_by(most).copied();
    let Some(holder) = holder.filter(|holder| holder.matched_blocks > 0) else { return };
    let (model, held) = (CostModel::default(), request.cached_tokens(holder.matched_blocks));
    for one in candidates.iter_mut().filter(|one| one.exchanges) {
        let tokens = held - request.cached_tokens(one.held_blocks());
        if tokens <= 0.0 {
            continue;
        }
        let Some(transfer) = transfer(&holder, one) else { continue };
        if transfer.ms(tokens) < tokens * model.queue(one).ms_per_token {
            // One of both is enough: what its other tiers hold is a part of this.
            one.fetched_blocks = holder.matched_blocks - one.matched_blocks;
            one.source = Some(Source { worker: holder.worker, is_peer: true, transfer });
        }
    }
}

#[cfg(test)]
mod tests {
    use keyway_wire::block_hash::BlockHash;
    use proptest::prelude::*;

    use super::*;
    use crate::index::WorkerId;
    use crate::load::LoadSnapshot;
    use crate::pace::PaceSnapshot;
    use crate::pick::{Policy, Turn, pick};

    const QUICK: Transfer = Transfer { handover_ms: 5.0, ms_per_token: 0.01 };

    /// Workers with these backlogs, in milliseconds, and matches, in blocks.
    fn fleet(of: &[(f64, u32)]) -> Vec<Candidate> {
        let worker = |(i, &(backlog_ms, matched_blocks)): (usize, &(f64, u32))| {
            let pace = PaceSnapshot { backlog_ms, ..PaceSnapshot::default() };
            let load = LoadSnapshot { pace, ..LoadSnapshot::default() };
            let new = Candidate::new(WorkerId(i as u32), load, 8.0, 1.0);
            Candidate { matched_blocks, exchanges: true, ..new }
        };
        of.iter().enumerate().map(worker).collect()
    }

    fn chain() -> Vec<BlockHash> {
        (1..=200).map(BlockHash).collect()
    }

    /// A prompt of 200 blocks and one token.
    fn prompt(chain: &[BlockHash]) -> RequestView<'_> {
        RequestView { chain, prompt_tokens: 3_201, block_tokens: 16.0, media: &[], session: None }
    }

    /// Who is chosen for a prompt of 200 blocks and one token, and how many of its tokens are fetched.
    fn chosen(of: &[(f64, u32)], transfer: Option<Transfer>) -> (usize, u64) {
        let chain = chain();
        let view = prompt(&chain);
        let mut candidates = fleet(of);
        fill_peers(&view, &mut candidates, |_, _| transfer);
        let turn = Turn { counter: 0, random: 1 };
        let found = pick(Policy::Prefix, &view, &candidates, &turn).unwrap();
        (found.index, view.fetched_tokens(&candidates[found.index]))
    }

    #[test]
    fn a_prefix_whose_holder_is_busy_is_fetched_and_one_whose_holder_is_not_stays() {
        let busy = [(3_000.0, 200), (0.0, 0)];
        assert_eq!(chosen(&busy, Some(QUICK)), (1, 3_200));
        assert_eq!(chosen(&busy, None), (1, 0));
        assert_eq!(chosen(&[(0.0, 200), (0.0, 0)], Some(QUICK)), (0, 0));
        // What it has itself it need not fetch.
        assert_eq!(chosen(&[(3_000.0, 200), (0.0, 150)], Some(QUICK)), (1, 800));
        // A network slower than the worker computes is none.
        let slow = Transfer { handover_ms: 5.0, ms_per_token: 0.2 };
        assert_eq!(chosen(&busy, Some(slow)), (1, 0));
    }

    #[test]
    fn nothing_is_fetched_by_or_from_one_that_does_not_exchange() {
        let chain = chain();
        let view = prompt(&chain);
        for (apart, want) in
            [(0, [None, None, Some(1)]), (1, [None, None, Some(0)]), (2, [None, Some(0), None])]
        {
            let mut candidates = fleet(&[(0.0, 200), (0.0, 150), (0.0, 0)]);
            candidates[apart].exchanges = false;
            fill_peers(&view, &mut candidates, |_, _| Some(QUICK));
            let peers: Vec<_> = candidates.iter().map(|one| one.peer().map(|peer| peer.0)).collect();
            assert_eq!(peers, want, "{apart}");
            assert!(candidates.iter().all(|one| one.without_peer().fetched_blocks == 0));
        }
    }

    proptest! {
        /// Nothing is fetched that is held, or that no worker holds.
        #[test]
        fn what_is_fetched_is_held_by_another(
            of in prop::collection::vec((0.0..9e3_f64, 0_u32..=200), 1..9), ms_per_token in 0.0..1.0_f64,
        ) {
            let chain = chain();
            let view = prompt(&chain);
            let mut candidates = fleet(&of);
            fill_peers(&view, &mut candidates, |_, _| Some(Transfer { handover_ms: 1.0, ms_per_token }));
            let most = of.iter().map(|(_, matched)| *matched).max().unwrap();
            for (candidate, (_, matched)) in candidates.iter().zip(&of) {
                prop_assert_eq!(candidate.matched_blocks, *matched);
                prop_assert!(candidate.held_blocks() == *matched || candidate.held_blocks() == most);
                prop_assert_eq!(candidate.source.is_some(), candidate.fetched_blocks > 0);
            }
        }
    }
}
