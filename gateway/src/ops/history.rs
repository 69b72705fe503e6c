//! The last hour of what people look at first, in memory. For each model: requests, those that did not end
//! well, times to the first token, cache hits. For each tenant: requests, refusals, prompt tokens. For each
//! worker: the requests that went there. For all of them: requests in flight and waiting.

mod gains;
mod traffic;

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use serde::Serialize;

use self::{
    gains::{LastSums, Row, Sums, rows},
    traffic::{Choices, Traffic, TrafficRow},
};
use crate::{
    access::tenants::TenantTotals,
    clock,
    edge::live::Live,
    limits::{HISTORY_STEP, MAX_HISTORY_MODELS, MAX_HISTORY_STEPS, MAX_HISTORY_TENANTS},
    metrics::{ModelTotals, TTFT_BUCKETS},
    routing::Router,
};

/// Samples of an hour.
#[derive(Debug, Default)]
pub struct History(Mutex<Past>);

#[derive(Debug, Default)]
struct Past {
    models: LastSums<ModelTotals>,
    tenants: LastSums<TenantTotals>,
    /// Whether there were tenants at the last sample.
    has_tenants: bool,
    traffic: Traffic,
    steps: VecDeque<Step>,
}

/// What was gained since the sample before.
#[derive(Debug)]
struct Step {
    at: f64,
    in_flight: i64,
    waiting: i64,
    models: Vec<ModelTotals>,
    tenants: Vec<TenantTotals>,
}

/// What a sample is taken of.
#[derive(Debug, Default)]
struct Now {
    at: f64,
    in_flight: i64,
    waiting: i64,
    models: Vec<ModelTotals>,
    /// Of each tenant; `None`: every client may come in.
    tenants: Option<Vec<TenantTotals>>,
    workers: Vec<Choices>,
}

/// What operators are shown.
#[derive(Debug, Serialize)]
pub struct Hour {
    step_seconds: u64,
    /// When each sample was taken, in seconds since 1970.
    at: Vec<f64>,
    in_flight: Vec<i64>,
    waiting: Vec<i64>,
    /// All models together first, then each one.
    models: Vec<ModelHour>,
    /// All tenants together first, then each one; empty where there are none.
    tenants: Vec<TenantHour>,
    /// Requests by worker.
    traffic: Vec<TrafficRow>,
}

/// One model's hour, a value for each sample; `None` where there was nothing to tell it from.
#[derive(Debug, Default, Serialize)]
struct ModelHour {
    model: String,
    requests: Vec<u64>,
    failed: Vec<u64>,
    ttft_p50_s: Vec<Option<f64>>,
    ttft_p90_s: Vec<Option<f64>>,
    hit_rate: Vec<Option<f64>>,
}

/// One tenant's hour, a value for each sample.
#[derive(Debug, Default, Serialize)]
struct TenantHour {
    tenant: String,
    /// Requests that were let in.
    requests: Vec<u64>,
    /// Those over one of its limits.
    refused: Vec<u64>,
    prompt_tokens: Vec<u64>,
}

impl History {
    /// Takes samples for ever.
    pub async fn keep(self: Arc<Self>, router: Arc<Router>, live: Live) {
        loop {
            clock::sleep(HISTORY_STEP).await;
            self.sample(Now::of(&router, &live));
        }
    }

    fn sample(&self, now: Now) {
        let mut past = self.0.lock();
        past.has_tenants = now.tenants.is_some();
        let step = Step {
            at: now.at,
            in_flight: now.in_flight,
            waiting: now.waiting,
            models: past.models.gained(now.models, MAX_HISTORY_MODELS),
            tenants: past.tenants.gained(now.tenants.unwrap_or_default(), MAX_HISTORY_TENANTS),
        };
        past.traffic.sample(now.workers);
        if past.steps.len() >= MAX_HISTORY_STEPS {
            past.steps.pop_front();
        }
        past.steps.push_back(step);
    }

    /// What is kept.
    pub fn hour(&self) -> Hour {
        let past = self.0.lock();
        let steps = &past.steps;
        let models: Vec<&[ModelTotals]> = steps.iter().map(|step| &*step.models).collect();
        let tenants: Vec<&[TenantTotals]> = steps.iter().map(|step| &*step.tenants).collect();
        Hour {
            step_seconds: HISTORY_STEP.as_secs(),
            at: steps.iter().map(|step| step.at).collect(),
            in_flight: steps.iter().map(|step| step.in_flight).collect(),
            waiting: steps.iter().map(|step| step.waiting).collect(),
            models: rows(&models, MAX_HISTORY_MODELS),
            tenants: if past.has_tenants { rows(&tenants, MAX_HISTORY_TENANTS) } else { Vec::new() },
            traffic: past.traffic.rows(),
        }
    }
}

impl Now {
    fn of(router: &Router, live: &Live) -> Self {
        let metrics = router.metrics();
        Self {
            at: clock::unix_seconds(),
            in_flight: metrics.in_flight.get(),
            waiting: metrics.holding.get(),
            models: metrics.model_totals(),
            tenants: live.now().tenants.as_ref().map(|tenants| tenants.totals()),
            workers: router.fleet().all().iter().map(|worker| Choices::of(worker)).collect(),
        }
    }
}

impl Row for ModelHour {
    type Of = ModelTotals;

    fn of(name: &str) -> Self {
        Self { model: name.to_owned(), ..Self::default() }
    }

    fn len(&self) -> usize {
        self.requests.len()
    }

    fn push(&mut self, gained: &ModelTotals) {
        let rate = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        self.requests.push(gained.ended);
        self.failed.push(gained.failed);
        self.ttft_p50_s.push(quantile(&gained.ttft, 0.5).map(rounded));
        self.ttft_p90_s.push(quantile(&gained.ttft, 0.9).map(rounded));
        self.hit_rate.push(rate(gained.cached_tokens, gained.prompt_tokens).map(rounded));
    }
}

impl Row for TenantHour {
    type Of = TenantTotals;

    fn of(name: &str) -> Self {
        Self { tenant: name.to_owned(), ..Self::default() }
    }

    fn len(&self) -> usize {
        self.requests.len()
    }

    fn push(&mut self, gained: &TenantTotals) {
        self.requests.push(gained.admitted);
        self.refused.push(gained.refused);
        self.prompt_tokens.push(gained.prompt_tokens);
    }
}

impl Sums for ModelTotals {
    fn name(&self) -> &str {
        &self.model
    }

    fn named(self, name: &str) -> Self {
        Self { model: name.to_owned(), ..self }
    }

    fn moved(&self) -> (u64, u64) {
        (self.ended, self.prompt_tokens + self.ttft.iter().sum::<u64>())
    }

    fn plus(self, more: &Self) -> Self {
        Self {
            ended: self.ended + more.ended,
            failed: self.failed + more.failed,
            ttft: std::array::from_fn(|at| self.ttft[at] + more.ttft[at]),
            prompt_tokens: self.prompt_tokens + more.prompt_tokens,
            cached_tokens: self.cached_tokens + more.cached_tokens,
            ..self
        }
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            model: self.model.clone(),
            ended: self.ended.saturating_sub(before.ended),
            failed: self.failed.saturating_sub(before.failed),
            ttft: std::array::from_fn(|at| self.ttft[at].saturating_sub(before.ttft[at])),
            prompt_tokens: self.prompt_tokens.saturating_sub(before.prompt_tokens),
            cached_tokens: self.cached_tokens.saturating_sub(before.cached_tokens),
        }
    }
}

impl Sums for TenantTotals {
    fn name(&self) -> &str {
        &self.tenant
    }

    fn named(self, name: &str) -> Self {
        Self { tenant: name.to_owned(), ..self }
    }

    fn moved(&self) -> (u64, u64) {
        (self.admitted + self.refused, self.prompt_tokens)
    }

    fn plus(self, more: &Self) -> Self {
        Self {
            admitted: self.admitted + more.admitted,
            refused: self.refused + more.refused,
            prompt_tokens: self.prompt_tokens + more.prompt_tokens,
            ..self
        }
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            tenant: self.tenant.clone(),
            admitted: self.admitted.saturating_sub(before.admitted),
            refused: self.refused.saturating_sub(before.refused),
            // A tenant with other limits counts its tokens anew.
            prompt_tokens: self.prompt_tokens.checked_sub(before.prompt_tokens).unwrap_or(self.prompt_tokens),
        }
    }
}

/// To the tenth of a millisecond, or of a per mille: more digits tell people nothing.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// By linear interpolation within a bucket, as PromQL's `histogram_quantile` does it; above the last edge
/// that edge.
fn quantile(counts: &[u64], share: f64) -> Option<f64> {
    let all: u64 = counts.iter().sum();
    let (mut below, mut low) = (0, 0.0);
    for (&count, edge) in counts.iter().zip(TTFT_BUCKETS) {
        if count > 0 && (below + count) as f64 >= share * all as f64 {
            return Some(low + (edge - low) * (share * all as f64 - below as f64) / count as f64);
        }
        (below, low) = (below + count, edge);
    }
    (all > 0).then_some(low)
}

#[cfg(test)]
mod tests;
