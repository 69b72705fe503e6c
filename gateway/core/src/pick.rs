//! The choice of a worker: a pure function of the request, the candidates and the turn, with its reason. It
//! changes nothing; recording the choice in the index and the load is the caller's.

pub use crate::candidate::{Candidate, RequestView, Reuse, Source, Turn};
pub use crate::policy::{Policy, Reason};

use smallvec::{SmallVec, smallvec};

use crate::balance;
use crate::cost::{Cost, CostModel, Queue};
use crate::peers::COPY_DISPLACES;

/// The worker that was chosen, why, and what the request is expected to cost there.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Pick {
    /// Which of the candidates.
    pub index: usize,
    /// What decided, as headers, logs and metrics name it.
    pub reason: Reason,
    /// Prompt tokens expected to be cached there, in whichever tier: less than the whole prompt, as the last
    /// one is always computed.
    pub matched_tokens: u64,
    /// Prompt tokens left to compute.
    pub uncached_tokens: u64,
    /// The price of that worker, whatever the policy.
    pub cost: Cost,
}

/// Chooses one of the candidates with the default [`CostModel`]; `None` if there are none.
pub fn pick(
    policy: Policy,
    request: &RequestView<'_>,
    candidates: &[Candidate],
    turn: &Turn,
) -> Option<Pick> {
    pick_with(&CostModel::default(), policy, request, candidates, turn)
}

/// [`pick`] with a cost model of the caller's.
pub fn pick_with(
    model: &CostModel,
    policy: Policy,
    request: &RequestView<'_>,
    candidates: &[Candidate],
    turn: &Turn,
) -> Option<Pick> {
    pick_priced(model, policy, request, (candidates, |one| cost_on(model, request, one)), turn)
}

/// [`pick_with`] of candidates that have a price of the caller's.
pub(crate) fn pick_priced(
    model: &CostModel,
    policy: Policy,
    request: &RequestView<'_>,
    (candidates, price): (&[Candidate], impl Fn(&Candidate) -> Cost),
    turn: &Turn,
) -> Option<Pick> {
    let prices = Prices::wanted(policy, candidates.len())
        .then(|| Prices::of(candidates.iter(), |one| (price(one), one.held_blocks())));
    let (index, reason) = choose(model, policy, request, (candidates, prices), turn)?;
    Some(picked(request, candidates, (index, reason), price(&candidates[index])))
}

/// [`pick`] of candidates that `ready` makes ready first, each just before it is priced: a thousand of them
/// are larger than what the processor has at hand, and going through them is most of a choice.
pub(crate) fn pick_readied(
    policy: Policy,
    request: &RequestView<'_>,
    candidates: &mut [Candidate],
    turn: &Turn,
    ready: impl Fn(&mut Candidate),
) -> Option<Pick> {
    let model = CostModel::default();
    let prices = if Prices::wanted(policy, candidates.len()) {
        let price = |one: &mut Candidate| {
            ready(one);
            (cost_on(&model, request, one), one.held_blocks())
        };
        Some(Prices::of(candidates.iter_mut(), price))
    } else {
        candidates.iter_mut().for_each(ready);
        None
    };
    let (index, reason) = choose(&model, policy, request, (candidates, prices), turn)?;
    let cost = cost_on(&model, request, &candidates[index]);
    Some(picked(request, candidates, (index, reason), cost))
}

/// Chooses one of the candidates, by their prices if there are any.
fn choose(
    model: &CostModel,
    policy: Policy,
    request: &RequestView<'_>,
    (candidates, prices): (&[Candidate], Option<Prices>),
    turn: &Turn,
) -> Option<(usize, Reason)> {
    Some(match (policy, prices) {
        _ if candidates.is_empty() => return None,
        _ if candidates.len() == 1 => (0, Reason::Only),
        (_, Some(prices)) => by_cost(model, request, (candidates, prices), turn),
        (Policy::Prefix | Policy::LeastLoaded, _) => {
            (balance::least_loaded(candidates, turn), Reason::LeastLoaded)
        }
        (Policy::RoundRobin, _) => (balance::round_robin(candidates, turn), Reason::RoundRobin),
        (Policy::Random, _) => (balance::random(candidates, turn), Reason::Random),
        (Policy::PowerOfTwo, _) => (balance::power_of_two(candidates, turn), Reason::PowerOfTwo),
        (Policy::Chwbl, _) => (balance::chwbl(request, candidates, turn), Reason::Chwbl),
    })
}

/// The pick of this candidate for this reason, at this price.
fn picked(
    request: &RequestView<'_>,
    candidates: &[Candidate],
    (index, reason): (usize, Reason),
    cost: Cost,
) -> Pick {
    picked_one(request, &candidates[index], (index, reason), cost)
}

/// [`picked`], of the chosen one alone.
pub(crate) fn picked_one(
    request: &RequestView<'_>,
    chosen: &Candidate,
    (index, reason): (usize, Reason),
    cost: Cost,
) -> Pick {
    let matched_tokens = request.matched_tokens(chosen.held_blocks());
    let uncached_tokens = request.prompt_tokens - matched_tokens;
    Pick { index, reason, matched_tokens, uncached_tokens, cost }
}

/// What each candidate would cost.
struct Prices {
    ms: SmallVec<[f64; 16]>,
    /// The place of the cheapest, and what it costs.
    cheapest: usize,
    least_ms: f64,
    /// Blocks that the one who holds the most of the prompt holds.
    longest: u32,
}

impl Prices {
    /// Whether so many are chosen from by cost.
    fn wanted(policy: Policy, candidates: usize) -> bool {
        policy == Policy::Prefix && candidates > 1
    }

    #[inline(always)]
    fn of<T>(candidates: impl ExactSizeIterator<Item = T>, mut price: impl FnMut(T) -> (Cost, u32)) -> Self {
        let mut ms: SmallVec<_> = smallvec![0.0; candidates.len()];
        let (mut cheapest, mut least_ms, mut longest) = (0, f64::INFINITY, 0);
        for (i, (one, ms)) in candidates.zip(&mut ms).enumerate() {
            let (cost, held_blocks) = price(one);
            *ms = cost.total_ms();
            longest = held_blocks.max(longest);
            if *ms < least_ms {
                (cheapest, least_ms) = (i, *ms);
            }
        }
        Self { ms, cheapest, least_ms, longest }
    }
}

/// What this candidate would cost, term by term. Inlined: asked of each of a thousand workers, most of its
/// time was its result's way through memory.
#[inline(always)]
pub fn cost_on(model: &CostModel, request: &RequestView<'_>, candidate: &Candidate) -> Cost {
    let uncached = request.prompt_tokens as f64 - request.cached_tokens(candidate.held_blocks());
    let queue = model.queue(candidate);
    let mut cost = model.cost_with(&queue, uncached, &candidate.reuse);
    cost.crowded_ms = candidate.crowded_tokens * queue.ms_per_token;
    if candidate.fetched_blocks > 0 {
        cost.fetch_ms = fetch_ms(request, candidate);
        if candidate.source.is_some_and(|source| source.is_peer) {
            let fetched = request.fetched_tokens(candidate) as f64;
            cost.displaced_ms += COPY_DISPLACES * model.displaced * fetched * queue.ms_per_token;
        }
    }
    cost
}

/// Milliseconds in which it would fetch what other tiers or a peer hold.
#[inline(never)]
fn fetch_ms(request: &RequestView<'_>, candidate: &Candidate) -> f64 {
    let fetched = request.fetched_tokens(candidate) as f64;
    candidate.source.map_or(0.0, |source| source.transfer.ms(fetched))
}

/// The cheapest; among those about as cheap, the first in the rendezvous order of the first block that no
/// worker holds. So requests that start with the same new prefix go together, even before the first is
/// recorded, and different ones do not all follow the same order. A prefix that all prompts share decides
/// nothing: what it saves is either the same everywhere or too little to count.
///
/// A request that names its session goes by the session's order instead: what of its past the prompt's blocks
/// do not show (a part below a block, text that the engine never sees, a response stored there) is where its
/// last turn went. That says less than any block that is known, so it chooses among the same workers, and
/// never makes another one eligible.
fn by_cost(
    model: &CostModel,
    request: &RequestView<'_>,
    (candidates, prices): (&[Candidate], Prices),
    turn: &Turn,
) -> (usize, Reason) {
    let Prices { ms, cheapest, least_ms, longest } = prices;
    let queue = model.queue(&candidates[cheapest]);
    let rules = CostRules { model, request, queue, longest };
    let limit = rules.limit_ms(least_ms);
    // A copy is made where it is cheapest, and not because it is about as cheap as none.
    let equal = |i: usize| ms[i] <= limit && (i == cheapest || candidates[i].reuse.tokens <= 0.0);
    let equals = (0..candidates.len()).filter(|&i| equal(i));
    let index = balance::first_by_rendezvous(candidates, equals, rules.key(turn)).unwrap_or(cheapest);
    (index, rules.reason(candidates[index].held_blocks()))
}

/// What [`by_cost`] decides by, once it is known who is cheapest.
pub(crate) struct CostRules<'a> {
    pub(crate) model: &'a CostModel,
    pub(crate) request: &'a RequestView<'a>,
    /// The queue at the cheapest.
    pub(crate) queue: Queue,
    /// Blocks that the one who holds the most of the prompt holds.
    pub(crate) longest: u32,
}

impl CostRules<'_> {
    fn block_ms(&self) -> f64 {
        // Whole tokens, which is as much or a little more: two that are a block apart are equal, however
        // their costs were rounded.
        self.request.block_tokens.ceil() * self.queue.ms_per_token
    }

    /// The greatest cost that counts as equal to the least.
    pub(crate) fn limit_ms(&self, least_ms: f64) -> f64 {
        self.model.equal_to(least_ms, self.block_ms())
    }

    /// By what equals are drawn.
    pub(crate) fn key(&self, turn: &Turn) -> u64 {
        let chain = self.request.chain;
        let next = || self.request.spans().names(self.longest as usize);
        let of_blocks = || chain.get(next()).or(chain.last()).map(|hash| hash.0);
        self.request.session.or_else(of_blocks).unwrap_or(turn.random)
    }

    /// Why one was chosen that holds so many blocks.
    pub(crate) fn reason(&self, held_blocks: u32) -> Reason {
        let Self { model, request, queue, longest } = self;
        // Would the saving of the longest prefix count, were all else equal?
        let counts = |saved: u64, rest: u64| {
            let idle = Queue { wait_ms: 0.0, ..*queue };
            let cost = |uncached: u64| model.cost(&idle, uncached as f64).total_ms();
            cost(saved + rest) > model.equal_to(cost(rest), self.block_ms())
        };
        let best = request.matched_tokens(*longest);
        let own = request.matched_tokens(held_blocks);
        if !counts(best, request.prompt_tokens - best) {
            if request.session.is_some() { Reason::Session } else { Reason::New }
        } else if counts(best - own, request.prompt_tokens - best) {
            Reason::Spread
        } else {
            Reason::Prefix
        }
    }
}

#[cfg(test)]
mod tests;
