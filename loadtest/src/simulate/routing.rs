//! The router of a simulated fleet: the gateway's own core at the gateway's own places, with the simulation's
//! clock.

use std::time::Duration;

use keyway_core::{
    PromptViews, RoomRules, Splitting, Ways, WorkerId, consider, consider_peers,
    index::MatchLengths,
    legs::{LeftToCompute, evenness, pick_answering, with_stall},
    may_wait,
    pick::{Candidate, Pick, Policy, RequestView, Turn},
    quote, quote_one,
    shortlist::Shortlisted,
    waiting_room::{Ahead, CandidateSet, Quote, WorkerChooser},
    working_sets::{HeldTurn, Left, NextTurn},
};
use keyway_wire::block_hash::BlockHash;

use super::{
    fleet::{FleetSetup, Run, Workload},
    pauses::InSession,
    prompts,
    transit::Answering,
};
use crate::{args::contender::Contender, engine_model::Nanos, random::splitmix};

/// A request before it is sent.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) at: Nanos,
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u32,
    /// In the engine's blocks.
    pub(super) chain: Vec<BlockHash>,
    /// In the router's, where they differ.
    index_chain: Option<Vec<BlockHash>>,
    /// With the answer's blocks behind the prompt's, where the engine keeps those too.
    answered_chain: Option<Vec<BlockHash>>,
    pub(super) in_session: InSession,
    /// The worker that answers it, where another one is to compute its prompt.
    pub(super) answering: Option<Answering>,
    /// Which copy of which row it is.
    pub(super) source: (u64, u32),
}

/// Where a request goes, and how much of it is computed there.
pub(super) struct Plan {
    /// Its place among the candidates of its side.
    index: usize,
    /// Whether another worker is to compute the prompt.
    splits: bool,
    /// What its prompt asks of a worker for prefill; `None` where none may compute it.
    asks: Option<Asks>,
    /// The worker that it fetches a prefix from.
    pulls: Option<WorkerId>,
    pub(super) uncached_tokens: u64,
    /// How much of it the workers hold, where the gateway's own policies choose.
    lengths: MatchLengths,
}

/// What a prompt asks of the worker that computes it for another one, or would be the one to.
struct Asks {
    of: usize,
    left: LeftToCompute,
    /// How much it counted that answers stand still.
    evenness: f64,
}

/// The waiting room's desk.
pub(super) struct Clerk<'r, 'a> {
    pub(super) run: &'r mut Run<'a>,
    pub(super) gateway: usize,
    pub(super) at: Nanos,
    /// Whether requests waited before.
    pub(super) others_wait: bool,
    /// The workers at this moment. Where what happens at one worker says nothing of the others they are
    /// written down when they are asked for, which is mostly never: the gateway's shortlist knows the choice.
    sets: Option<Sets>,
    /// What they have left for sessions; not looked at yet, or not since a turn began.
    pub(super) left: Option<Left>,
}

/// The workers by what they do.
struct Sets {
    /// Workers that answer requests.
    answering: CandidateSet,
    /// Those that compute prompts alone.
    prefill: CandidateSet,
}

impl Sets {
    fn of(run: &mut Run<'_>, gateway: usize, at: Nanos) -> Self {
        let mut prefill = run.gateways[gateway].candidates(at);
        let mut answering = prefill.split_off(run.setup.legs.prefill);
        for one in &mut answering {
            one.exchanges = run.setup.legs.pulls;
        }
        let set = |candidates| CandidateSet::new(candidates, RoomRules::default().horizon_ms);
        Self { answering: set(answering), prefill: set(prefill) }
    }

    /// Those that the request, or its prompt, may go to.
    fn for_request(&mut self, arrival: &Arrival) -> &mut CandidateSet {
        if arrival.answering.is_some() { &mut self.prefill } else { &mut self.answering }
    }
}

impl Arrival {
    pub(super) fn new(workload: &Workload, setup: &FleetSetup, at: Nanos, copy: u64, index: usize) -> Self {
        let (row, scale) = (&workload.trace.rows[index], workload.scale);
        let own = setup.profile.block_tokens;
        // There are fewer copies than 2^32.
        let key = copy | u64::from(setup.hash_seed) << 32;
        let cut = |tokens| prompts::chain(scale, index, row, key, tokens);
        let chain = cut(own);
        let next = workload.graph.as_ref().zip(workload.trace.links.as_ref());
        let next = next.filter(|_| workload.caches_answers);
        let answered_chain = next.and_then(|(graph, links)| graph.next_turn(links, index)).map(|next| {
            let mut chain = prompts::chain(scale, next, &workload.trace.rows[next], key, own);
            // The last token of an answer is never computed.
            let computed = scale.prompt_tokens(row) + scale.output_tokens(row) - 1;
            chain.truncate((computed / u64::from(own)) as usize);
            chain
        });
        Self {
            at,
            prompt_tokens: scale.prompt_tokens(row),
            output_tokens: scale.output_tokens(row) as u32,
            // A turn that forgets what was said goes on from nothing.
            answered_chain: answered_chain.filter(|answered| answered.starts_with(&chain)),
            chain,
            index_chain: match setup.index_block_tokens {
                tokens if setup.index_by_text => Some(prompts::spans(scale, index, row, key, tokens)),
                tokens => (tokens != own).then(|| cut(tokens)),
            },
            in_session: InSession::of(workload, setup, copy, index),
            answering: None,
            source: (copy, index as u32),
        }
    }

    /// The session that its gateway knows it to be of.
    pub(super) fn session(&self) -> Option<u64> {
        self.in_session.turn.as_ref().map(HeldTurn::session)
    }

    /// The turn of its session that it is, if it is one.
    pub(super) fn next_turn(&self) -> Option<NextTurn> {
        Some(self.in_session.turn.as_ref()?.next(self.prompt_tokens, Duration::from_nanos(self.at)))
    }

    /// Names of the blocks that its engine keeps of it.
    pub(super) fn cached_chain(&self) -> &[BlockHash] {
        self.answered_chain.as_deref().unwrap_or(&self.chain)
    }

    fn view(&self, setup: &FleetSetup) -> RequestView<'_> {
        RequestView {
            chain: self.index_chain(),
            prompt_tokens: self.prompt_tokens,
            block_tokens: f64::from(setup.index_block_tokens),
            media: &[],
            session: self.in_session.name,
        }
    }

    pub(super) fn index_chain(&self) -> &[BlockHash] {
        self.index_chain.as_deref().unwrap_or(&self.chain)
    }
}

impl<'r, 'a> Clerk<'r, 'a> {
    /// Of a gateway; `others_wait`: whether requests waited there before.
    pub(super) fn new(run: &'r mut Run<'a>, gateway: usize, at: Nanos, others_wait: bool) -> Self {
        run.gateways[gateway].index.settle();
        run.gateways[gateway].look_at_speeds();
        let sets = (!run.setup.knows_own_requests_alone()).then(|| Sets::of(run, gateway, at));
        Self { run, gateway, at, others_wait, sets, left: None }
    }

    /// Its own prefill where it is least, in milliseconds.
    pub(super) fn own_ms(&mut self, arrival: &Arrival) -> Option<f64> {
        self.quote(arrival, &Ahead::default()).map(|(quote, _)| quote.own_ms)
    }

    fn all_workers(&mut self) -> &mut Sets {
        self.sets.get_or_insert_with(|| Sets::of(self.run, self.gateway, self.at))
    }

    /// The quote where the shortlist knows the choice.
    fn shortlisted(&mut self, arrival: &Arrival, ahead: &Ahead, turn: &Turn) -> Option<(Quote, Plan)> {
        let FleetSetup { policy: Contender::Ours(policy @ Policy::Prefix), hold, workers, .. } =
            *self.run.setup
        else {
            return None;
        };
        let (view, gateway) = (arrival.view(self.run.setup), &mut self.run.gateways[self.gateway]);
        let Shortlisted { pick, chosen, lengths } = gateway.shortlisted(self.at, &view, ahead, turn)?;
        let quote = quote_one(policy, hold, arrival.prompt_tokens, (&chosen, workers), &pick);
        let Pick { index, uncached_tokens, .. } = pick;
        Some((quote, Plan { index, splits: false, pulls: None, uncached_tokens, lengths, asks: None }))
    }

    /// The turn of one more choice.
    fn next_turn(&mut self) -> Turn {
        self.run.random = splitmix(self.run.random);
        let gateway = &mut self.run.gateways[self.gateway];
        let turn = Turn { counter: gateway.counter, random: self.run.random };
        gateway.counter += 1;
        turn
    }

    /// Whether another worker than the one that answers may compute the prompt.
    fn may_split(&self, arrival: &Arrival) -> bool {
        let legs = self.run.setup.legs;
        legs.prefill > 0 && legs.splitting != Splitting::Never && arrival.answering.is_none()
    }

    /// The pick that answers if another worker computes the prompt, where that is to be, and what the prompt
    /// asks; `None` if none may.
    fn split(
        &self,
        view: &RequestView<'_>,
        (here, candidates): (&Pick, &[Candidate]),
        mut prefill: Vec<Candidate>,
        (ahead, turn): (&Ahead, &Turn),
        policy: Policy,
    ) -> Option<(Option<Pick>, Asks)> {
        let (gateway, legs) = (&self.run.gateways[self.gateway], self.run.setup.legs);
        let (now, index) = (Duration::from_nanos(self.at), &gateway.index);
        let (view, seen) = ([*view], (now, turn));
        let first = consider(policy, &PromptViews::of(&view, &[]), &mut prefill, ahead, seen, index)?;
        let from = prefill[first.index];
        let evenness = evenness(&prefill);
        let transfer = |one: &Candidate| gateway.transfers.between(now, from.worker, one.worker);
        let second = pick_answering(policy, &view[0], candidates, turn, transfer)?;
        if here.uncached_tokens.min(second.uncached_tokens) < legs.from_tokens {
            return None;
        }
        let ways = Ways {
            here_ms: with_stall(here, &candidates[here.index], evenness),
            prefill_ms: with_stall(&first, &from, evenness),
            answer_ms: second.cost.total_ms(),
            left: LeftToCompute { here: here.uncached_tokens, there: first.uncached_tokens },
        };
        Some((
            ways.is_split(legs.splitting).then_some(second),
            Asks { of: first.index, left: ways.left, evenness },
        ))
    }
}

impl WorkerChooser<Arrival> for Clerk<'_, '_> {
    type Plan = Plan;

    fn least_excess_ms(&mut self, arrival: &Arrival, ahead: &Ahead) -> f64 {
        match *self.run.setup {
            FleetSetup { policy: Contender::Ours(policy), hold, .. }
                if may_wait(policy, hold, arrival.prompt_tokens) && !self.may_split(arrival) =>
            {
                // Who may begin need not know by how much.
                let horizon_ms = RoomRules::default().horizon_ms - ahead.reserve_ms();
                let gateway = &mut self.run.gateways[self.gateway];
                if self.sets.is_none() && gateway.is_open(self.at, horizon_ms, ahead) {
                    return 0.0;
                }
                self.all_workers().for_request(arrival).least_excess_ms(ahead)
            }
            _ => f64::NEG_INFINITY,
        }
    }

    fn is_open(&mut self, arrival: &Arrival, worker: WorkerId, ahead: &Ahead) -> bool {
        if self.sets.is_some() {
            return self.all_workers().for_request(arrival).is_open(worker, ahead);
        }
        let horizon_ms = RoomRules::default().horizon_ms;
        let load = self.run.gateways[self.gateway].load(worker.0 as usize, self.at);
        let backlog_ms = load.pace.backlog_ms;
        backlog_ms <= horizon_ms && backlog_ms + ahead.of(worker) <= horizon_ms - ahead.reserve_ms()
    }

    fn quote(&mut self, arrival: &Arrival, ahead: &Ahead) -> Option<(Quote, Plan)> {
        let crowds = if arrival.answering.is_some() { None } else { self.crowds(arrival) };
        let turn = self.next_turn();
        if let (None, Some(found)) = (crowds, self.shortlisted(arrival, ahead, &turn)) {
            return Some(found);
        }
        let mut candidates = self.all_workers().for_request(arrival).candidates().to_vec();
        let prefill = self.may_split(arrival).then(|| self.all_workers().prefill.candidates().to_vec());
        let run = &mut *self.run;
        let gateway = &mut run.gateways[self.gateway];
        let view = arrival.view(run.setup);
        let FleetSetup { policy: contender, hold, legs, .. } = *run.setup;
        let Contender::Ours(policy) = contender else {
            let index =
                contender.choose(&view, &mut candidates, &gateway.contexts(), &turn, &gateway.index)?;
            let Candidate { worker, matched_blocks, .. } = candidates[index];
            let quote =
                Quote { worker, backlog_ms: f64::NEG_INFINITY, own_ms: 0.0, weighed: candidates.len() };
            let uncached_tokens = view.prompt_tokens - view.matched_tokens(matched_blocks);
            let lengths = MatchLengths::default();
            let plan = Plan { index, uncached_tokens, lengths, splits: false, pulls: None, asks: None };
            return Some((quote, plan));
        };
        if let (Some(next), Some(sets)) = (crowds, &gateway.sets) {
            sets.displace(&next, &mut candidates);
        }
        let (views, step) = ([view], (Duration::from_nanos(self.at), &turn));
        let (seen, transfer) =
            (PromptViews::of(&views, &[]), |_: &_, _: &_| legs.pulls.then_some(legs.transfer));
        let pick = consider_peers(policy, &seen, &mut candidates, ahead, step, (&gateway.index, transfer))?;
        let split = prefill
            .and_then(|prefill| self.split(&views[0], (&pick, &candidates), prefill, (ahead, &turn), policy));
        let (split, asks) = split.map_or((None, None), |(pick, asks)| (pick, Some(asks)));
        let (splits, pick) = (split.is_some(), split.unwrap_or(pick));
        let quote = quote(policy, hold && !splits, arrival.prompt_tokens, &candidates, &pick);
        let chosen = &candidates[pick.index];
        let pulls = chosen.peer();
        let Pick { index, uncached_tokens, .. } = pick;
        let lengths = MatchLengths::of(&candidates);
        Some((quote, Plan { index, splits, asks, pulls, uncached_tokens, lengths }))
    }

    fn begin(&mut self, mut arrival: Arrival, plan: Option<Plan>) {
        // There is at least one worker, so there is a plan.
        let Some(Plan { index, splits, asks, pulls, uncached_tokens, lengths }) = plan else { return };
        let is_first_leg = arrival.answering.is_some();
        if let Some(Asks { of, left, evenness }) = asks {
            self.run.gateways[self.gateway].asked(of, self.at, left, evenness);
        }
        let worker = index + if is_first_leg { 0 } else { self.run.setup.legs.prefill };
        let view = arrival.view(self.run.setup);
        let gateway = &mut self.run.gateways[self.gateway];
        gateway.index.used_among(Duration::from_nanos(self.at), &view, &lengths, uncached_tokens);
        // What another worker computes is placed once its KV comes.
        let placement = gateway.place(self.at, worker, if splits { &[] } else { view.chain });
        if !is_first_leg {
            self.session_goes_on(&arrival, index, uncached_tokens);
        }
        if splits {
            self.run.gateways[self.gateway].sent_handed(worker, self.at, arrival.prompt_tokens);
            arrival.answering = Some(Answering { worker, uncached: uncached_tokens });
            self.run.first_legs.push((self.at, self.gateway, arrival));
        } else if let Some(from) = pulls {
            let pair = (from.0 as usize, worker);
            self.run.pull(self.at, self.gateway, pair, arrival, placement, uncached_tokens);
        } else {
            self.run.send(self.at, (self.gateway, worker), arrival, placement, uncached_tokens);
        }
        self.run.tell_at_once(self.gateway, worker, self.at);
        if let Some(sets) = &mut self.sets {
            let load = self.run.gateways[self.gateway].load(worker, self.at);
            let set = if is_first_leg { &mut sets.prefill } else { &mut sets.answering };
            set.update(index, load);
        }
    }

    fn paused_until(&mut self, arrival: &Arrival, _: Duration) -> Option<Duration> {
        if arrival.answering.is_some() { None } else { self.session_waits_until(arrival) }
    }

    fn tokens(&self, plan: &Plan) -> Option<f64> {
        plan.splits.then_some(0.0)
    }
}
