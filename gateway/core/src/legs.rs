//! Whether a worker that answers a request computes its prompt too, or another one does and hands its KV
//! over: in milliseconds, by the cost that chooses among workers ([`crate::cost`]).
//!
//! ```text
//! here  = cost(answering) + stall(answering)
//! split = cost(prefill) + stall(prefill) + cost(answering, its own prefill replaced by the transfer)
//! stall = evenness * STALL * answering * own + handed * (queue * own + own^2 / 2)
//! ```
//!
//! `stall` is what the answers under way lose: while a prompt is computed, each of the worker's `answering`
//! requests gets its next tokens later, in sum by the prompt's own time. (Engines that compute prompts in
//! pieces, between which answers go on, spread that over more tokens; the sum stays.) Of requests that bring
//! their KV, `handed` come in a millisecond and wait behind it. It is no part of the cost that chooses among
//! workers that compute their own prompts, where each has answers under way.
//!
//! `STALL` in `keyway-loadtest simulate`: 30 minutes of the Mooncake conversations (`--slice 0s..30m
//! --spread-bursts --profile fcfs-6k --kv-blocks 23461 --block-size 64 --index-block-tokens 64
//! --index-knows-capacity`), eight workers at 0.75 of what they can compute; and 64 agents at once, as
//! `tests/external/prefill_decode/simulated.py` has them. So many workers are for prefill. TTFT p99 in s, ITL
//! p99 in ms, mean time to the last token in s; means of five seeds:
//!
//! | `STALL` | 6 of 8 | 4 of 8 | agents, 2 of 8 |
//! |---|---|---|---|
//! | 1 | 21.2, 85, 10.4 | 21.1, 85, 13.4 | 0.56, 85, 4.4 |
//! | 2 | 21.1, 69, 10.3 | 25.9, 85, 13.7 | 0.77, 51, 4.4 |
//! | 2.5 | 20.2, 20, 10.2 | 27.5, 85, 13.8 | 0.89, 38, 4.4 |
//! | 3 | 20.4, 20, 10.2 | 29.0, 85, 13.9 | 1.00, 20, 4.4 |
//! | 6 | 20.3, 20, 10.2 | 46.6, 85, 15.0 | 1.35, 20, 4.4 |
//! | 16 | 20.8, 20, 10.2 | 320, 85, 66.8 | 5.6, 20, 4.6 |
//!
//! Where workers for prefill can do all there is (six), the answers' even pace should stay; where they
//! cannot (four), it is lost in any case, and the weight makes queues that help no answer. So there it does
//! not count: `evenness` is 1 or 0, and something between at the brink ([`evenness`]). In the table it is 1.
//!
//! Who waits for the worker for prefill is no answer under way: when it counted as one, a longer queue there
//! made it look better, and at 4 of 8 and 0.9 the mean was 121 s.
//!
//! On both sides of a split the prompt's blocks displace others, so both pay for that; and its answer waits
//! behind what the answering worker has to compute, as engines take requests in their order.

mod demand;

pub(crate) use self::demand::PrefillDemand;
pub use self::demand::{LeftToCompute, asked_share, evenness};
use crate::cost::{Cost, CostModel};
use crate::pick::{Candidate, Pick, Policy, RequestView, Turn, pick_priced};
use crate::transfers::Transfer;

/// How many milliseconds of a wait for a first token one is worth by which an answer under way stands still.
pub const STALL: f64 = 2.5;

/// Which requests have their prompts computed by another worker than the one that answers, where workers are
/// for one or the other.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Splitting {
    /// Those for which it costs less.
    #[default]
    Auto,
    /// All that may, whatever it costs.
    Always,
    /// None, whatever it costs.
    Never,
}

/// What a request costs if the worker that answers computes its prompt, and if another one does, in
/// milliseconds.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Ways {
    /// Where it is cheapest, with what answers under way there lose.
    pub here_ms: f64,
    /// At the worker that would compute its prompt, likewise.
    pub prefill_ms: f64,
    /// At the worker that would answer, from then on.
    pub answer_ms: f64,
    /// What there is to compute on either way.
    pub left: LeftToCompute,
}

impl Ways {
    /// What the request costs if another worker computes its prompt.
    pub fn split_ms(&self) -> f64 {
        self.prefill_ms + self.answer_ms
    }

    /// Whether another worker is to compute the prompt.
    pub fn is_split(&self, splitting: Splitting) -> bool {
        match splitting {
            Splitting::Always => true,
            Splitting::Never => false,
            Splitting::Auto => self.split_ms() < self.here_ms,
        }
    }
}

/// The price of a pick whose worker computes the prompt, with what answers under way there lose; `evenness`:
/// how much these count ([`evenness`]).
pub fn with_stall(pick: &Pick, candidate: &Candidate, evenness: f64) -> f64 {
    pick.cost.total_ms() + stall_ms(pick, candidate, evenness)
}

/// What answers under way lose by a prompt that is computed beside them, and those to come that bring their
/// KV, in milliseconds.
pub fn stall_ms(pick: &Pick, candidate: &Candidate, evenness: f64) -> f64 {
    let (queue, own) = (pick.cost.queue_ms, pick.cost.own_ms);
    let later = candidate.load.handed_per_ms * (queue * own + own * own / 2.0);
    evenness * STALL * candidate.load.answering as f64 * own + later
}

/// Picks the worker that answers, of a request whose prompt another one computes; `None` if there are no
/// candidates, whose matches are known. `transfer`: what fetching takes there.
pub fn pick_answering(
    policy: Policy,
    request: &RequestView<'_>,
    candidates: &[Candidate],
    turn: &Turn,
    transfer: impl Fn(&Candidate) -> Transfer,
) -> Option<Pick> {
    let model = CostModel::default();
    let price = |one: &Candidate| cost_of_answering(&model, request, one, transfer(one));
    pick_priced(&model, policy, request, (candidates, price), turn)
}

/// What a request costs a worker that fetches the KV of its prompt, as far as it has none of it.
pub fn cost_of_answering(
    model: &CostModel,
    request: &RequestView<'_>,
    candidate: &Candidate,
    transfer: Transfer,
) -> Cost {
    let queue = model.queue(candidate);
    let tokens = request.prompt_tokens as f64 - request.cached_tokens(candidate.held_blocks());
    Cost {
        queue_ms: queue.wait_ms,
        fetch_ms: transfer.ms(tokens),
        displaced_ms: model.displaced * tokens * queue.ms_per_token,
        crowded_ms: candidate.crowded_tokens * queue.ms_per_token,
        ..Cost::default()
    }
}

#[cfg(test)]
mod tests {
    use keyway_wire::block_hash::BlockHash;
    use proptest::prelude::*;

    use super::*;
    use crate::cost::Cost;
    use crate::index::WorkerId;
    use crate::load::LoadSnapshot;
    use crate::pace::PaceSnapshot;
    use crate::pick::pick;

    const TURN: Turn = Turn { counter: 0, random: 3 };
    const QUICK: Transfer = Transfer { handover_ms: 30.0, ms_per_token: 0.01 };

    fn worker(id: u32, requests: u64, backlog_ms: f64) -> Candidate {
        let pace = PaceSnapshot { backlog_ms, ..PaceSnapshot::default() };
        Candidate::new(
            WorkerId(id),
            LoadSnapshot { requests, answering: requests, pace, ..LoadSnapshot::default() },
            8.0,
            1.0,
        )
    }

    fn request(chain: &[BlockHash], prompt_tokens: u64) -> RequestView<'_> {
        RequestView { chain, prompt_tokens, block_tokens: 16.0, media: &[], session: None }
    }

    /// The ways of a prompt of so many tokens with one worker of each kind.
    fn ways(tokens: u64, answering: Candidate, prefill: Candidate, transfer: Transfer) -> Ways {
        let view = request(&[], tokens);
        let here = pick(Policy::Prefix, &view, &[answering], &TURN).unwrap();
        let first = pick(Policy::Prefix, &view, &[prefill], &TURN).unwrap();
        let second = pick_answering(Policy::Prefix, &view, &[answering], &TURN, |_| transfer).unwrap();
        let evenness = evenness(&[prefill]);
        Ways {
            here_ms: with_stall(&here, &answering, evenness),
            prefill_ms: with_stall(&first, &prefill, evenness),
            answer_ms: second.cost.total_ms(),
            left: LeftToCompute { here: here.uncached_tokens, there: first.uncached_tokens },
        }
    }

    #[test]
    fn an_idle_worker_computes_what_it_answers() {
        for tokens in [300, 4_000, 60_000] {
            let ways = ways(tokens, worker(1, 0, 0.0), worker(2, 0, 0.0), QUICK);
            assert!(!ways.is_split(Splitting::Auto), "{ways:?}");
            assert!(ways.is_split(Splitting::Always) && !ways.is_split(Splitting::Never));
        }
    }

    #[test]
    fn where_answers_are_under_way_another_computes_what_is_long_and_not_what_is_short() {
        let split = |tokens, transfer| {
            ways(tokens, worker(1, 8, 0.0), worker(2, 0, 0.0), transfer).is_split(Splitting::Auto)
        };
        assert!(split(4_000, QUICK));
        // 8 tokens take 1 ms, and eight answers lose 8 by them: less than a handover.
        assert!(!split(8, QUICK));
        // A minute for each thousand tokens is no way to save a half.
        assert!(!split(4_000, Transfer { handover_ms: 30.0, ms_per_token: 60.0 }));
        // The worker for prefill has more to do than that.
        let queued = ways(4_000, worker(1, 8, 0.0), worker(2, 0, 20_000.0), QUICK);
        assert!(!queued.is_split(Splitting::Auto), "{queued:?}");
    }

    #[test]
    fn where_not_all_can_be_computed_elsewhere_answers_may_stand_still() {
        let split = |asked_share, backlog_ms| {
            let mut prefill = worker(2, 0, backlog_ms);
            prefill.load.asked_share = asked_share;
            ways(4_000, worker(1, 8, 0.0), prefill, QUICK).is_split(Splitting::Auto)
        };
        // A second there, and eight answers here that stand still for half a second each.
        assert!(split(0.8, 1_000.0) && !split(1.2, 1_000.0));
        // Who is free computes it in any case.
        let busy = ways(4_000, worker(1, 8, 900.0), worker(2, 0, 0.0), QUICK);
        assert!(busy.is_split(Splitting::Auto));
    }

    #[test]
    fn who_answers_has_what_it_need_not_fetch() {
        let chain: Vec<_> = (1..=200).map(BlockHash).collect();
        let view = request(&chain, 3_201);
        let mut candidates = [worker(1, 2, 0.0), worker(2, 2, 0.0), worker(3, 2, 0.0)];
        candidates[1].matched_blocks = 150;
        let slow = Transfer { handover_ms: 10.0, ms_per_token: 1.0 };
        let found = pick_answering(Policy::Prefix, &view, &candidates, &TURN, |_| slow).unwrap();
        assert_eq!((found.index, found.uncached_tokens), (1, 801));
        assert!((found.cost.fetch_ms - 811.0).abs() < 1e-9 && found.cost.own_ms == 0.0);
        // By its own line, which a pair may have.
        let far = |one: &Candidate| {
            if one.worker == WorkerId(2) { Transfer { handover_ms: 9e3, ..slow } } else { QUICK }
        };
        assert_ne!(pick_answering(Policy::Prefix, &view, &candidates, &TURN, far).unwrap().index, 1);
    }

    proptest! {
        /// More to transfer, a slower network and a longer queue there never speak for a split.
        #[test]
        fn what_is_dearer_is_chosen_no_more(
            tokens in 1_u64..100_000, requests in 0_u64..64, backlog_ms in 0.0..5_000.0_f64, more_ms in 0.0..5_000.0_f64,
            ms_per_token in 0.0..2.0_f64,
        ) {
            let of = |backlog_ms, ms_per_token| {
                let transfer = Transfer { handover_ms: 30.0, ms_per_token };
                ways(tokens, worker(1, requests, 100.0), worker(2, 0, backlog_ms), transfer)
            };
            let (less, more) = (of(backlog_ms, ms_per_token), of(backlog_ms + more_ms, ms_per_token * 1.5));
            prop_assert!(!more.is_split(Splitting::Auto) || less.is_split(Splitting::Auto));
            prop_assert!(less.here_ms.is_finite() && less.split_ms() <= more.split_ms());
        }
    }

    #[test]
    fn the_price_of_one_candidate_is_that_of_the_pick() {
        let view = request(&[], 1_000);
        let one = worker(1, 3, 40.0);
        let found = pick_answering(Policy::Prefix, &view, &[one], &TURN, |_| QUICK).unwrap();
        let cost = cost_of_answering(&CostModel::default(), &view, &one, QUICK);
        assert_eq!(found.cost, cost);
        let running_ms = 3.0 * 256.0 / 8.0;
        let want =
            Cost { queue_ms: 40.0 + running_ms, fetch_ms: 40.0, displaced_ms: 187.5, ..Cost::default() };
        assert_eq!(cost, want);
    }
}
