//! `POST /explain` of the admin listener: what the gateway would do with a request, and why; nothing is sent
//! and nothing recorded. The answer holds counts and costs, never text or hashes.

use std::time::Duration;

use keyway_core::{
    CostModel,
    pick::{Candidate, cost_on},
};
use serde::Serialize;

use crate::{
    error::Error,
    fleet::Worker,
    prompt::{drift::Diagnosis, request::RequestInfo},
    routing::{Router, Setting, legs::ExplainedWays},
};

/// What would become of a request.
#[derive(Debug, Serialize)]
pub struct Explanation {
    model: Option<String>,
    policy: &'static str,
    /// `tokens` or `text`: what the prompt's blocks are cut from.
    keyed_by: &'static str,
    prompt_tokens: u64,
    prompt_blocks: usize,
    chosen: String,
    reason: &'static str,
    /// What names its session, if that counts: `header`, `prompt_cache_key` or `user`.
    session: Option<&'static str>,
    /// Where the prompt leaves what its session sent last, if it does.
    drift: Option<Diagnosis>,
    /// What it costs to compute the prompt where it is answered, and elsewhere, where both can be.
    ways: Option<ExplainedWays>,
    workers: Vec<Row>,
}

/// One worker's side of it.
#[derive(Debug, Serialize)]
struct Row {
    worker: String,
    /// Which part of requests it is for: `both` or `decode`.
    role: &'static str,
    chosen: bool,
    /// `events`, or `model` where its cache is modelled by what was sent to it.
    known_by: &'static str,
    block_size: u32,
    matched_blocks: u32,
    /// Of the prompt, in whichever tier.
    matched_tokens: u64,
    /// Of these, those in its host's memory or on a disk, or in another worker's cache.
    fetched_tokens: u64,
    /// Which other worker's, if they are there.
    fetched_from: Option<String>,
    uncached_tokens: u64,
    weight: f64,
    requests_in_flight: u64,
    waiting_prefill_tokens: u64,
    /// Prompt tokens computed in a second, fitted from answers; absent until they told.
    fitted_tokens_per_s: Option<f64>,
    /// Share of the last minutes in which prompts waited there for their first token.
    busy_share: f64,
    /// The request's own time to first token there.
    predicted_ttft_ms: f64,
    /// The terms of the cost, as `keyway_core::cost` states them.
    queue_ms: f64,
    fetch_ms: f64,
    own_ms: f64,
    later_ms: f64,
    displaced_ms: f64,
    /// What active sessions will compute again.
    crowded_ms: f64,
    /// Taken off: the part of a copy's price that its later uses bear.
    reuse_ms: f64,
    cost_ms: f64,
}

/// Explains what would be chosen at this moment.
pub fn explain(
    router: &Router,
    request: &RequestInfo,
    drift: Option<Diagnosis>,
) -> Result<Explanation, Error> {
    let setting = router.setting(request, &[])?;
    let (mut candidates, pick) = router.preview(&setting).ok_or(Error::NoWorker)?;
    let ways = router.preview_ways(request, &setting, &mut candidates, &pick);
    let by_tokens = request.tokens.is_some();
    let rows = setting.workers.iter().zip(&candidates).enumerate();
    Ok(Explanation {
        model: request.model.clone(),
        policy: router.policy().as_str(),
        keyed_by: if by_tokens { "tokens" } else { "text" },
        prompt_tokens: setting.prompt_tokens,
        prompt_blocks: setting.views[0].blocks(),
        chosen: setting.workers[pick.index].name.clone(),
        reason: pick.reason.as_str(),
        session: request.session.map(|session| session.said_by.as_str()),
        drift,
        ways,
        workers: rows
            .map(|(i, (worker, candidate))| Row {
                fetched_from: peer_of(candidate, (&setting, &candidates)),
                ..row((router.now(), &setting), worker, candidate, i == pick.index)
            })
            .collect(),
    })
}

/// The worker that a candidate would fetch from.
fn peer_of(candidate: &Candidate, (setting, all): (&Setting, &[Candidate])) -> Option<String> {
    let peer = candidate.peer()?;
    let holder = all.iter().position(|one| one.worker == peer)?;
    Some(setting.workers[holder].name.clone())
}

fn row((now, setting): (Duration, &Setting), worker: &Worker, candidate: &Candidate, chosen: bool) -> Row {
    let matched_tokens = setting.request_view().matched_tokens(candidate.held_blocks());
    let uncached_tokens = setting.prompt_tokens - matched_tokens;
    let cost = cost_on(&CostModel::default(), &setting.request_view(), candidate);
    let exact = setting.by_tokens && worker.residency.trusted();
    let fitted_tokens_per_s = worker.rate.lock().tokens_per_second();
    Row {
        worker: worker.name.clone(),
        role: worker.role().as_str(),
        chosen,
        known_by: if exact { "events" } else { "model" },
        block_size: worker.residency.block_size(),
        matched_blocks: candidate.matched_blocks,
        matched_tokens,
        fetched_tokens: setting.request_view().fetched_tokens(candidate),
        fetched_from: None,
        uncached_tokens,
        weight: candidate.weight,
        requests_in_flight: candidate.load.requests,
        waiting_prefill_tokens: candidate.load.waiting_prefill_tokens,
        fitted_tokens_per_s,
        busy_share: candidate.load.pace.busy_share,
        predicted_ttft_ms: setting.predicted_ttft_ms(now, worker, candidate),
        queue_ms: cost.queue_ms,
        fetch_ms: cost.fetch_ms,
        own_ms: cost.own_ms,
        later_ms: cost.later_ms,
        displaced_ms: cost.displaced_ms,
        crowded_ms: cost.crowded_ms,
        reuse_ms: cost.reuse_ms,
        cost_ms: cost.total_ms(),
    }
}
