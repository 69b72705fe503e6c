//! What a choice is made from: the workers that may be chosen, and the request's prefix in the names that
//! each of them goes by: blocks of text, or blocks of as many tokens as the worker's own.

use std::{sync::Arc, time::Duration};

use keyway_core::{
    CostModel,
    index::WorkerId,
    media::Media,
    others::Shares,
    pick::{Candidate, RequestView, Source, cost_on},
    rate::Rates,
    refusals::{Eligible, Stance},
    route::PromptViews,
    slow_start::ramps,
    token_chain::TokenSpace,
};
use keyway_wire::block_hash::BlockHash;
use keyway_wire::spans::Spans;
use smallvec::SmallVec;

use super::{Router, token_sizes::PromptSize};
use crate::{
    config::Role,
    error::Error,
    fleet::{Fleet, Worker},
    limits::READING_INLINE_BYTES,
    prompt::request::RequestInfo,
};

/// Which part of a request a worker is sought for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leg {
    /// Its answer, and its prompt unless another worker computes that for less.
    Answer,
    /// Its answer and its prompt.
    Whole,
    /// Its prompt alone, whose KV goes to another worker.
    Prefill,
}

impl Leg {
    /// Whether workers of a role are for it.
    fn is_for(self, role: Role) -> bool {
        (role == Role::Prefill) == (self == Self::Prefill)
    }
}

/// The request's prefix, cut in one way.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// Names of its prefixes, as [`keyway_core::RequestView`] has them.
    pub chain: Arc<Vec<BlockHash>>,
    /// Tokens of one block, as far as it is text.
    pub block_tokens: f64,
    /// What in it is no text; none where it is tokenised.
    pub media: SmallVec<[Media; 1]>,
    /// Of which workers it is the view.
    way: Way,
}

impl View {
    /// Full blocks of the prompt, as far as it has names.
    pub fn blocks(&self) -> usize {
        Spans::of(&self.chain).blocks(self.chain.len())
    }
}

/// How a worker cuts and names a prompt: tokens of a block, and whether the model is an adapter of its own.
/// Of text all do alike.
type Way = (u32, bool);

/// A prompt's first tokens, where it goes by its text because those that follow are not known.
#[derive(Debug, Default)]
struct Leads {
    /// In each way that a worker cuts them; none where no first tokens are known.
    views: Vec<View>,
    /// Of each worker which of these is its own, and its name for blocks of tokens.
    of: Vec<(usize, WorkerId)>,
}

/// A request as some of its workers see it, laid out for [`PromptViews`].
pub(super) struct SeenBy<'a> {
    /// Mostly one.
    views: SmallVec<[RequestView<'a>; 1]>,
    view_of: Few<usize>,
    leads: Vec<RequestView<'a>>,
    lead_of: Vec<(usize, WorkerId)>,
}

impl SeenBy<'_> {
    pub(super) fn seen(&self) -> PromptViews<'_> {
        PromptViews { views: &self.views, view_of: &self.view_of, leads: &self.leads, lead_of: &self.lead_of }
    }
}

/// A request before the workers that may serve it.
#[derive(Debug)]
pub struct Setting {
    /// Those that serve the model, were up at the last look at the fleet, and were not tried yet.
    pub workers: Arc<[Arc<Worker>]>,
    /// The prefix, in each way that a worker cuts it; at least one, and mostly no more.
    pub views: SmallVec<[View; 1]>,
    /// Each worker's view; the first where it says nothing.
    pub view_of: Vec<usize>,
    leads: Leads,
    /// Tokens of the whole prompt; an estimate, unless it was tokenised.
    pub prompt_tokens: u64,
    /// Whether the blocks are of tokens.
    pub by_tokens: bool,
    /// How long a worker that came up is taken to be slower than it is.
    pub slow_start: Option<Duration>,
    /// Prompt tokens that a worker fetches in a millisecond from its other tiers, if these count.
    pub fetch_tokens_per_ms: Option<f64>,
    /// Its session's name, if it has one that counts.
    pub session: Option<u64>,
    /// Its kind, as refusals are told apart.
    pub(super) kind: u64,
    /// The only worker that may have it, if it is for one.
    pub owner: Option<WorkerId>,
    /// Whether a worker may fetch what another one has cached of the prompt.
    pub(super) may_pull: bool,
    /// Prompt tokens that a worker computes in a second of which that is not known; `None`: a guess.
    unknown_rate: Option<f64>,
    leg: Leg,
}

/// Milliseconds of prefill that wait for a worker. Without the price that the cost has for each running
/// request: that is for a choice, and no time.
pub(super) fn wait_ms(candidate: &Candidate) -> f64 {
    candidate.load.pace.backlog_ms + candidate.ahead_ms
}

impl Setting {
    /// The request in the first view, in which matches are counted.
    pub fn request_view(&self) -> RequestView<'_> {
        self.request_in(&self.views[0])
    }

    /// Milliseconds to the request's first token at a worker: as that one's answers foretell, or by its speed
    /// and what waits there alone while too few have told.
    pub fn predicted_ttft_ms(&self, now: Duration, worker: &Worker, candidate: &Candidate) -> f64 {
        let view = self.request_view();
        let uncached = self.prompt_tokens - view.matched_tokens(candidate.held_blocks());
        let speed = worker.rate.lock().tokens_per_second();
        let before = worker.load.before(now, speed, uncached);
        let cost = cost_on(&CostModel::default(), &view, candidate);
        match worker.ttft.lock().predicted_ms(before) {
            Some(ms) => candidate.ahead_ms + cost.fetch_ms + ms,
            None => wait_ms(candidate) + cost.fetch_ms + cost.own_ms,
        }
    }

    /// The view of the worker at this place.
    pub(super) fn view_at(&self, worker: usize) -> &View {
        &self.views[self.view_of.get(worker).copied().unwrap_or(0)]
    }

    /// The request as the workers at these places see it.
    pub(super) fn seen_by(&self, places: impl Iterator<Item = usize> + Clone) -> SeenBy<'_> {
        let Leads { views: leads, of } = &self.leads;
        // Mostly all have the first view, and then none is said.
        let view_of: Few<usize> = if self.view_of.is_empty() {
            Few::new()
        } else {
            places.clone().map(|place| self.view_of[place]).collect()
        };
        let lead_of = if of.is_empty() { Vec::new() } else { places.map(|place| of[place]).collect() };
        let views = self.views.iter().map(|view| self.request_in(view)).collect();
        let leads = leads.iter().map(|view| self.request_in(view)).collect();
        SeenBy { views, view_of, leads, lead_of }
    }

    fn request_in<'a>(&self, view: &'a View) -> RequestView<'a> {
        let (prompt_tokens, block_tokens) = (self.prompt_tokens, view.block_tokens);
        RequestView {
            chain: &view.chain,
            prompt_tokens,
            block_tokens,
            media: &view.media,
            session: self.session,
        }
    }

    /// Looks at the fleet again, for a request that waits: who has come up since it came may have it too. A
    /// worker that cuts prompts like none that was there may not, as the prompt is not kept.
    pub(super) fn look_again(&mut self, fleet: &Fleet, model: Option<&str>, tried: &[WorkerId]) {
        let (views, by_tokens) = (&self.views, self.by_tokens);
        let view_of = |worker: &Worker| {
            let way = if by_tokens { way_of(worker, model) } else { OF_TEXT };
            views.iter().position(|view| view.way == way)
        };
        let may_have = |worker: &Arc<Worker>| {
            is_for(worker, self.owner, model, self.leg) && worker.routable() && !tried.contains(&worker.id)
        };
        let all = fleet.all();
        let found = all.iter().filter(|worker| may_have(worker));
        let (workers, views): (Vec<_>, _) =
            found.filter_map(|worker| view_of(worker).map(|view| (Arc::clone(worker), view))).unzip();
        (self.workers, self.view_of) = (workers.into(), views);
        self.leads.are_of(&self.workers, model);
    }

    /// Which of the workers may be asked now: those that can be, and of these, where some refuse the like,
    /// the others. `None`: all.
    pub(super) fn askable(&self, now: Duration) -> Option<Few<usize>> {
        let routable = |worker: &Arc<Worker>| worker.routable();
        let refuses = |worker: &Arc<Worker>| worker.standing.refuses_something();
        if self.workers.iter().all(|worker| routable(worker) && !refuses(worker)) {
            return None;
        }
        let stance = |worker: &Arc<Worker>| worker.standing.stance(self.kind, now);
        let stances: Few<(usize, Stance)> = (self.workers.iter().enumerate())
            .filter(|(_, worker)| routable(worker))
            .map(|(i, worker)| (i, stance(worker)))
            .collect();
        let eligible = Eligible::among(stances.iter().map(|(_, stance)| *stance));
        Some(stances.into_iter().filter(|(_, stance)| eligible.has(*stance)).map(|(i, _)| i).collect())
    }

    /// The workers as candidates whose matches are yet to be filled in. While requests wait, a cold worker is
    /// better than none.
    pub(super) fn candidates(&self, now: Duration, others_wait: bool) -> Vec<Candidate> {
        // An operator's own weight says more than a fit; where there is none, the fit among those without.
        let fitted = |worker: &Arc<Worker>| worker.rate.lock().tokens_per_second().or(self.unknown_rate);
        let fits: Few<Option<f64>> = self.workers.iter().map(fitted).collect();
        let workers = || self.workers.iter().zip(&fits);
        let unweighted = workers().filter(|(worker, _)| worker.weight == 1.0);
        let rates = Rates::of(fits.iter().copied(), unweighted.map(|(_, fit)| *fit));
        let mut ramped = Few::new();
        if let Some(over) = self.slow_start.filter(|_| !others_wait) {
            let up_for = |worker: &Arc<Worker>| worker.with_health(|health| health.up_for(now));
            let up_for: Few<Duration> = self.workers.iter().map(up_for).collect();
            ramped.extend(ramps(&up_for, over));
        }
        let candidate = |(i, (worker, fit)): (usize, (&Arc<Worker>, &Option<f64>))| {
            let speed = if worker.weight == 1.0 { rates.relative_speed(*fit) } else { worker.weight };
            let tokens_per_ms = rates.tokens_per_ms(speed) * ramped.get(i).unwrap_or(&1.0);
            let load = worker.load.snapshot(now, tokens_per_ms);
            let fetch = self.fetch_tokens_per_ms.filter(|_| self.by_tokens && worker.residency.trusted());
            Candidate {
                drawn_as: worker.id,
                source: fetch.map(|fetch| Source::tiers(worker.residency.any_tier_id, fetch)),
                exchanges: self.may_pull && worker.exchanges(now),
                ..Candidate::new(index_id(worker, self.by_tokens), load, tokens_per_ms, speed)
            }
        };
        let mut candidates: Vec<_> = workers().enumerate().map(candidate).collect();
        let shares = Shares::of(candidates.iter().map(|candidate| candidate.load.counted));
        for candidate in &mut candidates {
            candidate.load = candidate.load.among(shares);
        }
        candidates
    }
}

/// What there is one of for each worker, without an allocation where they are few.
pub(super) type Few<T> = SmallVec<[T; 8]>;

const OF_TEXT: Way = (0, false);

/// How many times too large an estimate of a prompt's tokens may be.
const ESTIMATE_OFF_BY: u64 = 2;

fn way_of(worker: &Worker, model: Option<&str>) -> Way {
    // What is an adapter at one worker may be a model of its own at another.
    (worker.residency.block_size(), model.is_some_and(|model| worker.is_adapter(model)))
}

/// Whether a part of a request may go to a worker: who stores what it names, else who serves its model.
fn is_for(worker: &Worker, owner: Option<WorkerId>, model: Option<&str>, leg: Leg) -> bool {
    owner.map_or_else(|| leg.is_for(worker.role()) && worker.may_serve(model), |owner| owner == worker.id)
}

/// What the index calls a worker.
pub(super) fn index_id(worker: &Worker, by_tokens: bool) -> WorkerId {
    if by_tokens { worker.residency.token_id } else { worker.id }
}

impl Leads {
    /// Says of each worker which view is its own. Who cuts prompts like none of them has none.
    fn are_of(&mut self, workers: &[Arc<Worker>], model: Option<&str>) {
        if self.views.is_empty() {
            return;
        }
        let view_of = |worker: &Worker| {
            let way = way_of(worker, model);
            self.views.iter().position(|view| view.way == way).unwrap_or(usize::MAX)
        };
        self.of = workers.iter().map(|worker| (view_of(worker), index_id(worker, true))).collect();
    }
}

impl Setting {
    /// Becomes that of a prompt that is refused at once: a worker that has it is no busier, and nothing of it
    /// stays there.
    fn compute_nothing(&mut self) {
        self.prompt_tokens = 0;
        self.leads = Leads::default();
        for view in &mut self.views {
            view.chain = Arc::default();
            view.media.clear();
        }
    }
}

impl Router {
    /// The workers that may serve a request and were not `tried` yet, and what it looks like to them.
    pub fn setting(&self, request: &RequestInfo, tried: &[WorkerId]) -> Result<Setting, Error> {
        self.setting_for(request, tried, Leg::Answer)
    }

    /// [`Router::setting`], of a part of the request.
    pub(super) fn setting_for(
        &self,
        request: &RequestInfo,
        tried: &[WorkerId],
        leg: Leg,
    ) -> Result<Setting, Error> {
        let all = self.fleet.all();
        let serves = |worker: &&Arc<Worker>| is_for(worker, request.owner, request.model.as_deref(), leg);
        let free = |worker: &&Arc<Worker>| worker.routable() && !tried.contains(&worker.id);
        let may_have = |worker: &&Arc<Worker>| serves(worker) && free(worker);
        // Mostly that is every worker, and then their list is at hand.
        let workers: Arc<[Arc<Worker>]> = if all.iter().all(|worker| may_have(&worker)) {
            Arc::clone(&all)
        } else {
            all.iter().filter(may_have).cloned().collect()
        };
        if let (true, Some(model)) = (workers.is_empty(), &request.model)
            && self.fleet.lacks(model)
        {
            let known = self.fleet.model_ids().join(", ");
            return Err(Error::ModelNotFound { model: model.clone(), known });
        }
        let mut setting = match &request.tokens {
            None => self.by_text(request, workers, leg),
            Some(prompt) => {
                let views = self.token_views(&prompt.ids, request, &workers);
                let way_of = |worker: &Arc<Worker>| way_of(worker, request.model.as_deref());
                let view_of = |way: Way| views.partition_point(|view| view.way < way);
                Setting {
                    view_of: workers.iter().map(|worker| view_of(way_of(worker))).collect(),
                    leads: Leads::default(),
                    views: views.into(),
                    workers,
                    prompt_tokens: prompt.total,
                    by_tokens: true,
                    slow_start: self.options.slow_start,
                    fetch_tokens_per_ms: self.options.fetch_tokens_per_ms,
                    session: request.session.map(|session| session.name),
                    kind: request.kind,
                    owner: request.owner,
                    may_pull: self.may_pull(request, leg),
                    unknown_rate: self.unknown_rate(request, leg),
                    leg,
                }
            }
        };
        if self.is_too_long(request, setting.prompt_tokens) {
            setting.compute_nothing();
        }
        Ok(setting)
    }

    /// These tokens in each way that one of the workers cuts them, in order; at least one.
    fn token_views(&self, ids: &[u32], request: &RequestInfo, workers: &[Arc<Worker>]) -> Vec<View> {
        let model = request.model.as_deref();
        let mut ways: Vec<Way> = workers.iter().map(|worker| way_of(worker, model)).collect();
        ways.sort_unstable();
        ways.dedup();
        if ways.is_empty() {
            ways.push((crate::limits::BLOCK_TOKENS, false));
        }
        let view = |way: Way| {
            let (block_size, adapts) = way;
            let adapter = model.filter(|_| adapts);
            let space = TokenSpace { salt: request.salt.as_bytes(), adapter, block_size };
            View {
                chain: space.chain(self.hash_key, ids).into(),
                block_tokens: f64::from(block_size),
                media: SmallVec::new(),
                way,
            }
        };
        ways.into_iter().map(view).collect()
    }

    /// Whether every worker of its model refuses a prompt, which has more tokens than that takes. Of an
    /// estimate some times as many: it may be that wrong.
    fn is_too_long(&self, request: &RequestInfo, tokens: u64) -> bool {
        // Of few is it worth a look.
        if request.chain.total_bytes <= READING_INLINE_BYTES as u64 {
            return false;
        }
        let context = if let Some(model) = &request.model {
            self.fleet.longest_context(model)
        } else {
            let mut all = self.fleet.model_ids().into_iter().map(|model| self.fleet.longest_context(&model));
            all.try_fold(0, |most, one| Some(one?.max(most)))
        };
        let sure = if request.tokens.is_some() { 1 } else { ESTIMATE_OFF_BY };
        context.is_some_and(|context| context > 0 && tokens > sure * context)
    }

    /// What a worker is taken to compute of prompts, if it has hardly had any: as much as those for the other
    /// part of requests do on the mean. With a guess instead, one of both looked many times too slow.
    fn unknown_rate(&self, request: &RequestInfo, leg: Leg) -> Option<f64> {
        request.moves_kv?;
        let is_prefill = leg == Leg::Prefill;
        let (mut sum, mut count) = (0.0, 0_u32);
        for worker in self.fleet.all().iter().filter(|worker| (worker.role() == Role::Prefill) != is_prefill)
        {
            if worker.may_serve(request.model.as_deref())
                && let Some(rate) = worker.rate.lock().tokens_per_second()
            {
                sum += rate;
                count += 1;
            }
        }
        (count > 0).then(|| sum / f64::from(count))
    }

    /// Whether there is a worker for a request that was not `tried` yet.
    pub fn has_another(&self, request: &RequestInfo, tried: &[WorkerId]) -> bool {
        self.has_for(request, tried, Leg::Answer)
    }

    /// Whether there is a worker that computes a request's prompt for others and was not `tried` yet.
    pub fn has_prefill(&self, request: &RequestInfo, tried: &[WorkerId]) -> bool {
        self.has_for(request, tried, Leg::Prefill)
    }

    fn has_for(&self, request: &RequestInfo, tried: &[WorkerId], leg: Leg) -> bool {
        let may_have = |worker: &Arc<Worker>| {
            let may_have = is_for(worker, request.owner, request.model.as_deref(), leg);
            may_have && !tried.contains(&worker.id) && worker.routable()
        };
        self.fleet.all().iter().any(may_have)
    }

    /// Tokens of a request's prompt; an estimate, unless it was tokenised. 0 where every worker refuses it.
    pub fn prompt_tokens(&self, request: &RequestInfo) -> u64 {
        let by_text = || self.token_sizes.prompt(request).tokens;
        let tokens = request.tokens.as_ref().map_or_else(by_text, |prompt| prompt.total);
        if self.is_too_long(request, tokens) { 0 } else { tokens }
    }

    fn by_text(&self, request: &RequestInfo, workers: Arc<[Arc<Worker>]>, leg: Leg) -> Setting {
        let PromptSize { tokens, block_tokens, media } = self.token_sizes.prompt(request);
        let view = View { chain: Arc::clone(&request.chain.names), block_tokens, media, way: OF_TEXT };
        let mut leads = Leads::default();
        if !request.first_tokens.is_empty() {
            leads.views = self.token_views(&request.first_tokens, request, &workers);
            leads.are_of(&workers, request.model.as_deref());
        }
        Setting {
            view_of: Vec::new(),
            leads,
            workers,
            views: SmallVec::from_buf([view]),
            prompt_tokens: tokens,
            by_tokens: false,
            slow_start: self.options.slow_start,
            fetch_tokens_per_ms: None,
            session: request.session.map(|session| session.name),
            kind: request.kind,
            owner: request.owner,
            may_pull: self.may_pull(request, leg),
            unknown_rate: self.unknown_rate(request, leg),
            leg,
        }
    }
}
