//! The last hour of what people look at first, in memory: for each model requests, those that did not end
//! well, times to the first token and cache hits, and for all of them requests in flight and waiting.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use parking_lot::Mutex;
use serde::Serialize;

use crate::{
    clock,
    limits::{HISTORY_STEP, MAX_HISTORY_MODELS, MAX_HISTORY_STEPS},
    metrics::{Metrics, ModelTotals, TTFT_BUCKETS},
};

/// Models that are not among the busiest; no model is called so.
const OTHERS: &str = "(others)";

/// Samples of an hour.
#[derive(Debug, Default)]
pub struct History(Mutex<Past>);

#[derive(Debug, Default)]
struct Past {
    totals: BTreeMap<String, ModelTotals>,
    steps: VecDeque<Step>,
}

/// What was gained since the sample before.
#[derive(Debug)]
struct Step {
    at: f64,
    in_flight: i64,
    waiting: i64,
    models: Vec<ModelTotals>,
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

impl History {
    /// Takes samples for ever.
    pub async fn keep(self: Arc<Self>, metrics: Arc<Metrics>) {
        loop {
            clock::sleep(HISTORY_STEP).await;
            let (in_flight, waiting) = (metrics.in_flight.get(), metrics.holding.get());
            self.sample(metrics.model_totals(), (in_flight, waiting), clock::unix_seconds());
        }
    }

    fn sample(&self, totals: Vec<ModelTotals>, (in_flight, waiting): (i64, i64), at: f64) {
        let mut past = self.0.lock();
        let mut models = Vec::new();
        for total in totals {
            let before = past.totals.insert(total.model.clone(), total.clone()).unwrap_or_default();
            let gained = minus(&total, &before);
            if gained.ended > 0 {
                models.push(gained);
            }
        }
        models.sort_by_key(|gained| std::cmp::Reverse(gained.ended));
        if models.len() > MAX_HISTORY_MODELS {
            let rest = models.split_off(MAX_HISTORY_MODELS - 1);
            models
                .push(rest.iter().fold(ModelTotals { model: OTHERS.to_owned(), ..Default::default() }, plus));
        }
        if past.steps.len() >= MAX_HISTORY_STEPS {
            past.steps.pop_front();
        }
        past.steps.push_back(Step { at, in_flight, waiting, models });
    }

    /// What is kept.
    pub fn hour(&self) -> Hour {
        let past = self.0.lock();
        let steps = &past.steps;
        let mut named: BTreeMap<&str, ModelHour> = BTreeMap::new();
        let mut all = ModelHour { model: "all".to_owned(), ..ModelHour::default() };
        for (at, step) in steps.iter().enumerate() {
            all.push(&step.models.iter().fold(ModelTotals::default(), plus));
            for gained in &step.models {
                let model = named.entry(&gained.model).or_default();
                model.model.clone_from(&gained.model);
                model.fill(at);
                model.push(gained);
            }
        }
        for model in named.values_mut() {
            model.fill(steps.len());
        }
        Hour {
            step_seconds: HISTORY_STEP.as_secs(),
            at: steps.iter().map(|step| step.at).collect(),
            in_flight: steps.iter().map(|step| step.in_flight).collect(),
            waiting: steps.iter().map(|step| step.waiting).collect(),
            models: std::iter::once(all).chain(named.into_values()).collect(),
        }
    }
}

impl ModelHour {
    /// Nothing happened until this sample.
    fn fill(&mut self, until: usize) {
        while self.requests.len() < until {
            self.push(&ModelTotals::default());
        }
    }

    fn push(&mut self, gained: &ModelTotals) {
        let rate = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        self.requests.push(gained.ended);
        self.failed.push(gained.failed);
        self.ttft_p50_s.push(quantile(&gained.ttft, 0.5));
        self.ttft_p90_s.push(quantile(&gained.ttft, 0.9));
        self.hit_rate.push(rate(gained.cached_tokens, gained.prompt_tokens));
    }
}

fn plus(a: ModelTotals, b: &ModelTotals) -> ModelTotals {
    ModelTotals {
        ended: a.ended + b.ended,
        failed: a.failed + b.failed,
        ttft: std::array::from_fn(|at| a.ttft[at] + b.ttft[at]),
        prompt_tokens: a.prompt_tokens + b.prompt_tokens,
        cached_tokens: a.cached_tokens + b.cached_tokens,
        ..a
    }
}

fn minus(a: &ModelTotals, b: &ModelTotals) -> ModelTotals {
    ModelTotals {
        model: a.model.clone(),
        ended: a.ended.saturating_sub(b.ended),
        failed: a.failed.saturating_sub(b.failed),
        ttft: std::array::from_fn(|at| a.ttft[at].saturating_sub(b.ttft[at])),
        prompt_tokens: a.prompt_tokens.saturating_sub(b.prompt_tokens),
        cached_tokens: a.cached_tokens.saturating_sub(b.cached_tokens),
    }
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
mod tests {
    use super::*;

    fn totals(model: &str, ended: u64) -> ModelTotals {
        let mut ttft = [0; TTFT_BUCKETS.len() + 1];
        ttft[3] = ended;
        let (failed, prompt_tokens, cached_tokens) = (ended / 10, 100 * ended, 25 * ended);
        ModelTotals { model: model.to_owned(), ended, failed, ttft, prompt_tokens, cached_tokens }
    }

    #[test]
    fn each_sample_has_what_was_gained_and_models_come_late() {
        let history = History::default();
        history.sample(vec![totals("a", 10)], (1, 0), 100.0);
        history.sample(vec![totals("a", 10), totals("b", 20)], (2, 1), 110.0);
        history.sample(vec![totals("a", 30), totals("b", 20)], (0, 0), 120.0);
        let hour = history.hour();
        assert_eq!(
            (hour.at, hour.in_flight, hour.waiting),
            (vec![100.0, 110.0, 120.0], vec![1, 2, 0], vec![0, 1, 0])
        );
        let requests: Vec<_> = hour.models.iter().map(|model| (&*model.model, &*model.requests)).collect();
        let want: [(&str, &[u64]); 3] = [("all", &[10, 20, 20]), ("a", &[10, 0, 20]), ("b", &[0, 20, 0])];
        assert_eq!(requests, want);
        assert_eq!(
            (&*hour.models[0].failed, &*hour.models[1].hit_rate),
            (&[1, 2, 2][..], &[Some(0.25), None, Some(0.25)][..])
        );
        // Between 25 and 50 ms.
        assert!((hour.models[0].ttft_p50_s[0].unwrap() - 0.0375).abs() < 1e-9);
    }

    #[test]
    fn an_hour_is_kept_and_of_very_many_models_the_busiest() {
        let history = History::default();
        for step in 0..MAX_HISTORY_STEPS as u64 + 5 {
            let models = (0..40).map(|model| totals(&format!("m{model:02}"), (step + 1) * (model + 1)));
            history.sample(models.collect(), (0, 0), step as f64);
        }
        let hour = history.hour();
        assert_eq!((hour.at.len(), hour.at[0]), (MAX_HISTORY_STEPS, 5.0));
        assert_eq!(hour.models.len(), 1 + MAX_HISTORY_MODELS);
        let others = hour.models.iter().find(|model| model.model == OTHERS).unwrap();
        // Nine models of 1 to 9 requests a step.
        assert_eq!((others.requests[7], hour.models[0].requests[7]), (45, (1..=40).sum()));
    }

    #[test]
    fn a_quantile_above_the_last_edge_is_that_edge_and_of_nothing_none() {
        let mut counts = [0; TTFT_BUCKETS.len() + 1];
        assert_eq!(quantile(&counts, 0.5), None);
        counts[TTFT_BUCKETS.len()] = 3;
        assert_eq!(quantile(&counts, 0.5), Some(300.0));
    }
}
