//! `POST /explain` of the admin listener: what the gateway would do with a request, and why; nothing is sent and nothing
//! recorded. The answer holds counts and costs, never text or hashes.

use keyway_core::pick::Candidate;
use serde::Serialize;

use crate::{
    error::Error,
    fleet::Worker,
    request::RequestInfo,
    routing::{Router, Setting},
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
    workers: Vec<Row>,
}

/// One worker's side of it. Costs are in prefill tokens of a worker of weight 1.
#[derive(Debug, Serialize)]
struct Row {
    worker: String,
    chosen: bool,
    /// `events`, or `model` where its cache is modelled by what was sent to it.
    known_by: &'static str,
    block_size: u32,
    matched_blocks: u32,
    matched_tokens: u64,
    uncached_tokens: u64,
    weight: f64,
    /// What waits there and the prompt's uncached part at the worker's fitted speed; absent until that is known.
    predicted_first_token_ms: Option<f64>,
    requests_in_flight: u64,
    waiting_prefill_tokens: u64,
    cost_waiting: f64,
    cost_running: f64,
    cost_own: f64,
    cost: f64,
}

/// Explains what would be chosen at this moment.
pub fn explain(router: &Router, request: &RequestInfo) -> Result<Explanation, Error> {
    let setting = router.setting(request, &[])?;
    let (candidates, pick) = router.preview(&setting).ok_or(Error::NoWorker)?;
    let by_tokens = request.tokens.is_some();
    let rows = setting.workers.iter().zip(&candidates).enumerate();
    Ok(Explanation {
        model: request.model.clone(),
        policy: router.policy().as_str(),
        keyed_by: if by_tokens { "tokens" } else { "text" },
        prompt_tokens: setting.prompt_tokens,
        prompt_blocks: setting.views[0].chain.len(),
        chosen: setting.workers[pick.index].name.clone(),
        reason: pick.reason.as_str(),
        workers: rows
            .map(|(i, (worker, candidate))| row(&setting, worker, candidate, i == pick.index))
            .collect(),
    })
}

fn row(setting: &Setting, worker: &Worker, candidate: &Candidate, chosen: bool) -> Row {
    let matched_tokens = setting.request_view().matched_tokens(candidate.matched_blocks);
    let uncached_tokens = setting.prompt_tokens - matched_tokens;
    let cost = keyway_core::CostModel::default().terms(candidate.load, uncached_tokens, candidate.weight);
    let exact = setting.by_tokens && worker.residency.trusted();
    Row {
        worker: worker.name.clone(),
        chosen,
        known_by: if exact { "events" } else { "model" },
        block_size: worker.residency.block_size(),
        matched_blocks: candidate.matched_blocks,
        matched_tokens,
        uncached_tokens,
        weight: candidate.weight,
        predicted_first_token_ms: worker
            .rate
            .lock()
            .tokens_per_second()
            .map(|rate| 1000.0 * (candidate.load.waiting_prefill_tokens + uncached_tokens) as f64 / rate),
        requests_in_flight: candidate.load.requests,
        waiting_prefill_tokens: candidate.load.waiting_prefill_tokens,
        cost_waiting: cost.waiting,
        cost_running: cost.running,
        cost_own: cost.own,
        cost: cost.total(),
    }
}
