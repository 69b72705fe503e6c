//! Whether a request's prompt is computed where it is answered, by [`keyway_core::legs`] with the gateway's
//! workers; and what handovers of KV between them have taken.

use std::{sync::Arc, time::Duration};

use keyway_core::{
    Splitting, Transfers, Ways, consider,
    index::{PrefixIndex, WorkerId},
    legs::{LeftToCompute, asked_share, evenness, pick_answering, stall_ms, with_stall},
    pick::{Candidate, Pick, Policy, Turn},
    waiting_room::Ahead,
};
use prometheus::GaugeVec;
use serde::Serialize;

use super::{
    Router, Setting,
    setting::{Few, Leg, wait_ms},
};
use crate::{
    api::Api,
    config::{Role, RoutingConfig},
    fleet::{Fleet, Worker},
    prompt::request::RequestInfo,
};

/// Which prompts other workers compute than those that answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LegRules {
    /// By cost, all, or none.
    pub splitting: Splitting,
    /// Uncached prompt tokens below which none is.
    pub from_tokens: u64,
    /// Of which prompts a worker fetches what another one has cached: by cost, of all, or of none.
    pub pulling: Splitting,
}

/// What is chosen from on both sides: workers, and each candidate's place among them.
pub(super) struct Side<'a> {
    pub(super) setting: &'a Setting,
    pub(super) worker_of: &'a [usize],
    pub(super) candidates: &'a mut [Candidate],
}

/// How a request's prompt would be computed elsewhere.
pub(super) struct Split {
    pub(super) ways: Ways,
    /// The worker that would answer, among the answering side's candidates.
    pub(super) answering: Pick,
    /// The worker that would compute the prompt, among its side's.
    pub(super) prefill: Pick,
    /// How much the pace of answers counts.
    pub(super) evenness: f64,
}

/// The ways of a request, for people.
#[derive(Debug, Serialize)]
pub struct ExplainedWays {
    /// `here`, or `split` where another worker computes the prompt.
    chosen: &'static str,
    here: Way,
    split: SplitWay,
    /// Until the worker that computes the prompt is ready for it, which the request waits for in the gateway.
    wait_ms: f64,
    /// The share of their time that prompts ask of the workers for prefill: above 1, they cannot compute all.
    prefill_asked_share: f64,
    /// How much it counts, from 1 to 0, that answers under way stand still.
    evenness: f64,
}

#[derive(Debug, Serialize)]
struct Way {
    worker: String,
    predicted_ttft_ms: f64,
    /// What answers under way there lose.
    stall_ms: f64,
    cost_ms: f64,
}

#[derive(Debug, Serialize)]
struct SplitWay {
    prefill: String,
    worker: String,
    predicted_ttft_ms: f64,
    /// Of these, fetching the KV.
    transfer_ms: f64,
    stall_ms: f64,
    cost_ms: f64,
}

impl Default for LegRules {
    fn default() -> Self {
        let (splitting, pulling) = (Splitting::Auto, Splitting::Auto);
        Self { splitting, from_tokens: crate::limits::PREFILL_FROM_TOKENS, pulling }
    }
}

impl Side<'_> {
    pub(super) fn worker_at(&self, candidate: usize) -> &Arc<Worker> {
        &self.setting.workers[self.worker_of[candidate]]
    }
}

impl LegRules {
    /// What the configuration says.
    pub fn of(config: &RoutingConfig) -> Self {
        let (splitting, pulling) = (config.split, config.pull);
        Self { splitting, from_tokens: config.prefill_from_tokens, pulling }
    }
}

/// Workers that have computed a prompt for another one, and said nothing of its KV: they are passed over.
pub(super) fn keep_no_kv(fleet: &Fleet, api: Api, now: Duration) -> Vec<WorkerId> {
    let workers = fleet.all();
    workers.iter().filter(|worker| worker.keeps_no_kv(api, now)).map(|worker| worker.id).collect()
}

impl Router {
    /// Has prompts computed elsewhere by these rules from now on.
    pub fn set_leg_rules(&self, legs: LegRules) {
        self.rules.write().legs = legs;
    }

    /// The workers that may compute a request's prompt for another one, if it may be computed elsewhere.
    pub(super) fn prefill_setting(&self, request: &RequestInfo) -> Option<Box<Setting>> {
        let api = request.moves_kv?;
        if request.owner.is_some()
            || self.rules.read().legs.splitting == Splitting::Never
            || !self.fleet.has_prefill()
        {
            return None;
        }
        let passed = keep_no_kv(&self.fleet, api, self.now());
        let setting = self.setting_for(request, &passed, Leg::Prefill).ok()?;
        (!setting.workers.is_empty()).then(|| Box::new(setting))
    }

    /// How the prompt would be computed elsewhere: by the cheapest worker for prompts, for the one that then
    /// answers for least. `None` where no worker is for answers alone, or too little is left to compute.
    pub(super) fn split(
        &self,
        here: &Pick,
        (answering, prefill): (&Side<'_>, &mut Side<'_>),
        (ahead, step): (&Ahead, (Duration, &Turn)),
        index: &PrefixIndex,
    ) -> Option<Split> {
        let (now, turn) = step;
        let (policy, legs) = {
            let rules = self.rules.read();
            (rules.policy, rules.legs)
        };
        let by = prefill.setting.seen_by(prefill.worker_of.iter().copied());
        let first = consider(policy, &by.seen(), prefill.candidates, ahead, step, index)?;
        let from = prefill.candidates[first.index];
        let contract = prefill.worker_at(first.index).kv_transfer();
        let may_answer = |&at: &usize| {
            let worker = answering.worker_at(at);
            worker.role() == Role::Decode && worker.kv_transfer() == contract
        };
        let mut places: Few<usize> = (0..answering.candidates.len()).filter(may_answer).collect();
        if policy != Policy::Prefix {
            // Others choose without a look at costs, and so it stays with their choice.
            places.retain(|at| *at == here.index);
        }
        if places.is_empty() {
            return None;
        }
        // It can compute no prompt.
        let must = answering.worker_at(here.index).needs_partner();
        // All that it lacks comes from the worker that computes the prompt.
        let asked: Few<Candidate> =
            places.iter().map(|&at| answering.candidates[at].without_peer()).collect();
        let transfers = self.transfers.lock();
        let transfer = |one: &Candidate| transfers.between(now, from.drawn_as, one.drawn_as);
        let second = pick_answering(policy, &answering.setting.request_view(), &asked, turn, transfer)?;
        drop(transfers);
        if !must && here.uncached_tokens.min(second.uncached_tokens) < legs.from_tokens {
            return None;
        }
        let evenness = evenness(prefill.candidates);
        let here_ms = with_stall(here, &answering.candidates[here.index], evenness);
        let ways = Ways {
            here_ms: if must { f64::INFINITY } else { here_ms },
            prefill_ms: with_stall(&first, &from, evenness),
            answer_ms: second.cost.total_ms(),
            left: LeftToCompute { here: here.uncached_tokens, there: first.uncached_tokens },
        };
        let answering = Pick { index: places[second.index], ..second };
        Some(Split { ways, answering, prefill: first, evenness })
    }

    /// The ways of a request that may be computed elsewhere, beside its [`Router::preview`].
    pub fn preview_ways(
        &self,
        request: &RequestInfo,
        setting: &Setting,
        candidates: &mut [Candidate],
        here: &Pick,
    ) -> Option<ExplainedWays> {
        let now = self.now();
        let prefill_setting = self.prefill_setting(request)?;
        let others_wait = self.holding.any_wait();
        let mut prefill_candidates = prefill_setting.candidates(now, others_wait);
        let worker_of: Few<usize> = (0..prefill_candidates.len()).collect();
        let answer_of: Few<usize> = (0..candidates.len()).collect();
        let answering = Side { setting, worker_of: &answer_of, candidates };
        let mut prefill =
            Side { setting: &prefill_setting, worker_of: &worker_of, candidates: &mut prefill_candidates };
        let turn = Turn { counter: 0, random: 0 };
        let index = self.index.settled();
        let step = (&Ahead::default(), (now, &turn));
        let split = self.split(here, (&answering, &mut prefill), step, &index)?;
        drop(index);
        let legs = self.rules.read().legs;
        let splits = split.ways.is_split(legs.splitting);
        let ttft_ms = |setting: &Setting, candidates: &[Candidate], pick: &Pick| {
            setting.predicted_ttft_ms(now, &setting.workers[pick.index], &candidates[pick.index])
        };
        let from = &prefill.candidates[split.prefill.index];
        let computes = if splits { from } else { &candidates[here.index] };
        Some(ExplainedWays {
            chosen: if splits { "split" } else { "here" },
            wait_ms: computes.load.pace.backlog_ms,
            prefill_asked_share: asked_share(prefill.candidates),
            evenness: split.evenness,
            here: Way {
                worker: setting.workers[here.index].name.clone(),
                predicted_ttft_ms: ttft_ms(setting, candidates, here),
                stall_ms: stall_ms(here, &candidates[here.index], split.evenness),
                cost_ms: split.ways.here_ms,
            },
            split: SplitWay {
                prefill: prefill_setting.workers[split.prefill.index].name.clone(),
                worker: setting.workers[split.answering.index].name.clone(),
                predicted_ttft_ms: ttft_ms(&prefill_setting, prefill.candidates, &split.prefill)
                    + wait_ms(&candidates[split.answering.index])
                    + split.answering.cost.fetch_ms,
                transfer_ms: split.answering.cost.fetch_ms,
                stall_ms: stall_ms(&split.prefill, from, split.evenness),
                cost_ms: split.ways.split_ms(),
            },
        })
    }

    /// `to` has answered a request whose prompt `from` computed: it took so long from when it was asked, of
    /// which it had other prompts to compute for so many milliseconds.
    pub(super) fn handed_over(
        &self,
        now: Duration,
        (from, to): (WorkerId, WorkerId),
        tokens: u64,
        (took, queue_ms): (Duration, f64),
    ) {
        self.metrics.prefill_legs.handover.observe(took.as_secs_f64());
        let ms = took.as_secs_f64() * 1e3;
        self.transfers.lock().observe(now, (from, to), tokens, (ms, queue_ms));
    }

    /// Sets the gauges of handovers and pulls, and of what is asked of workers for prefill, before a scrape.
    pub(super) fn show_transfers(&self) {
        let fleet = self.fleet.all();
        let asked = &self.metrics.prefill_legs.asked_share;
        asked.reset();
        for worker in fleet.iter().filter(|worker| worker.role() == Role::Prefill) {
            if let Some(speed) = worker.rate.lock().tokens_per_second() {
                asked
                    .with_label_values(&[&worker.name])
                    .set(worker.load.asked_share(self.now(), speed / 1e3));
            }
        }
        let name =
            |id: WorkerId| fleet.iter().find(|worker| worker.id == id).map(|worker| worker.name.clone());
        let shows = |transfers: &Transfers, [per_token, each]: [&GaugeVec; 2]| {
            per_token.reset();
            each.reset();
            for ((from, to), transfer) in transfers.known(self.now()) {
                if let (Some(from), Some(to)) = (name(from), name(to)) {
                    let labels = [from.as_str(), to.as_str()];
                    per_token.with_label_values(&labels).set(transfer.ms_per_token / 1e3);
                    each.with_label_values(&labels).set(transfer.handover_ms / 1e3);
                }
            }
        };
        let (handed, pulled) = (&self.metrics.prefill_legs, &self.metrics.pulls);
        let of_handovers = [&handed.transfer_seconds_per_token, &handed.transfer_handover_seconds];
        shows(&self.transfers.lock(), of_handovers);
        shows(&self.pulls.lock(), [&pulled.seconds_per_token, &pulled.each_seconds]);
    }
}
