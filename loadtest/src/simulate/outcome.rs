//! What came of a simulated run, as figures. Prints nothing.

use serde::Serialize;

use super::sessions::{SessionCount, SessionFigures};
use crate::{
    engine_model::Nanos,
    slo::{Metric, Slo},
    stats::{Samples, Summary},
};

/// A run as it is counted.
#[derive(Debug)]
pub(super) struct Outcome {
    ttft: Samples,
    tpot: Samples,
    e2e: Samples,
    /// Between any two tokens, where that is counted.
    itl: Samples,
    /// Of times to first token that were predicted: the sum, and by how much each was off.
    predicted_ms: (f64, f64),
    requests: u64,
    good: u64,
    cached_tokens: u64,
    prompt_tokens: u64,
    output_tokens: u64,
    per_worker: Vec<u64>,
    end: Nanos,
    pub(super) refused: u64,
    /// See [`Figures`].
    pub(super) split: u64,
    pub(super) pulled: u64,
    pub(super) moved_tokens: u64,
    pub(super) preemptions: u64,
    pub(super) steps: u64,
    pub(super) evicted_blocks: u64,
    /// How many caches there are, and the blocks of each.
    pub(super) caches: (usize, usize),
    /// Of a trace that tells them.
    pub(super) sessions: Option<SessionCount>,
}

/// A run's figures, as they are printed. Times in milliseconds unless the name says `_s`.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// Name of the policy, as on the command line.
    pub policy: String,
    /// Workers of the fleet.
    pub workers: usize,
    /// Requests that were answered to their last token.
    pub requests: u64,
    /// Requests that no worker could ever hold.
    pub refused: u64,
    /// Seconds of virtual time from the schedule's zero to the last token.
    pub elapsed_s: f64,
    /// Share of prompt tokens found cached.
    pub cached: f64,
    /// Time to the first token, from arrival.
    pub ttft: Option<Summary>,
    /// Mean time per generated token after the first.
    pub tpot: Option<Summary>,
    /// By how much the gateway's predictions of a worker's time to first token were off, as a share of it.
    pub ttft_off: Option<f64>,
    /// Time to the last token.
    pub e2e: Option<Summary>,
    /// Time between any two tokens, with `--itl`.
    pub itl: Option<Summary>,
    /// Requests whose prompt another worker than the one that answered has computed.
    pub split: u64,
    /// Requests whose worker fetched a prefix from another one.
    pub pulled: u64,
    /// Prompt tokens whose KV went from one worker to another.
    pub moved_tokens: u64,
    /// Share of requests that met the SLO's bounds by themselves.
    pub good: f64,
    /// Those requests a second.
    pub goodput_per_s: f64,
    /// Generated tokens a second.
    pub output_tokens_per_s: f64,
    /// Prompt tokens of the busiest worker over the mean.
    pub max_over_mean: f64,
    /// Requests that lost their KV blocks to others and began anew.
    pub preemptions: u64,
    /// Blocks that were named in a cache and given to something else.
    pub evicted_blocks: u64,
    /// Steps of all workers' engines together.
    pub steps: u64,
    /// What came of sessions, where the trace tells them.
    pub sessions: Option<SessionFigures>,
    /// Whether the SLO holds for the run.
    pub slo_met: bool,
}

// === impl Outcome ===

impl Outcome {
    pub(super) fn new(workers: usize, sessions: Option<SessionCount>) -> Self {
        Self {
            ttft: Samples::default(),
            tpot: Samples::default(),
            e2e: Samples::default(),
            itl: Samples::default(),
            predicted_ms: (0.0, 0.0),
            requests: 0,
            good: 0,
            cached_tokens: 0,
            prompt_tokens: 0,
            output_tokens: 0,
            per_worker: vec![0; workers],
            end: 0,
            refused: 0,
            split: 0,
            pulled: 0,
            moved_tokens: 0,
            preemptions: 0,
            steps: 0,
            evicted_blocks: 0,
            caches: (0, 0),
            sessions,
        }
    }

    /// A request was taken by `worker`.
    pub(super) fn taken(&mut self, worker: usize, prompt_tokens: u64) {
        self.prompt_tokens += prompt_tokens;
        self.per_worker[worker] += prompt_tokens;
    }

    /// A request's first token came.
    pub(super) fn first_token(&mut self, ttft: Nanos, cached_tokens: u32) {
        self.ttft.add_ns(ttft);
        self.cached_tokens += u64::from(cached_tokens);
    }

    /// A first token came so long after its request was sent, of which so much had been predicted.
    pub(super) fn predicted(&mut self, predicted_ms: Option<f64>, took_ms: f64) {
        if let Some(predicted_ms) = predicted_ms {
            self.predicted_ms.0 += took_ms;
            self.predicted_ms.1 += (predicted_ms - took_ms).abs();
        }
    }

    /// A token came so long after the one before it.
    pub(super) fn between(&mut self, gap: Nanos) {
        self.itl.add_ns(gap);
    }

    /// A request's last token came.
    pub(super) fn done(&mut self, at: Nanos, e2e: Nanos, tpot: Option<Nanos>, tokens: u32, good: bool) {
        self.requests += 1;
        self.good += u64::from(good);
        self.output_tokens += u64::from(tokens);
        self.end = self.end.max(at);
        self.e2e.add_ns(e2e);
        if let Some(tpot) = tpot {
            self.tpot.add_ns(tpot);
        }
    }

    /// The figures of a run under `policy`, judged by `slo`.
    pub(super) fn figures(&self, policy: &str, slo: &Slo) -> Figures {
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let elapsed_s = self.end as f64 / 1e9;
        let rate = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
        let busiest = self.per_worker.iter().max().copied().unwrap_or(0);
        let (ttft, tpot, e2e) = (self.ttft.summary(), self.tpot.summary(), self.e2e.summary());
        Figures {
            policy: policy.to_owned(),
            workers: self.per_worker.len(),
            requests: self.requests,
            refused: self.refused,
            elapsed_s,
            cached: share(self.cached_tokens, self.prompt_tokens),
            ttft,
            tpot,
            ttft_off: (self.predicted_ms.0 > 0.0).then(|| self.predicted_ms.1 / self.predicted_ms.0),
            e2e,
            itl: self.itl.summary(),
            split: self.split,
            pulled: self.pulled,
            moved_tokens: self.moved_tokens,
            good: share(self.good, self.requests + self.refused),
            goodput_per_s: rate(self.good),
            output_tokens_per_s: rate(self.output_tokens),
            max_over_mean: share(busiest * self.per_worker.len() as u64, self.prompt_tokens),
            preemptions: self.preemptions,
            evicted_blocks: self.evicted_blocks,
            steps: self.steps,
            sessions: self.sessions.as_ref().map(|sessions| sessions.figures(self.end, self.caches)),
            slo_met: self.refused == 0
                && slo.bounds.iter().all(|bound| match bound.metric {
                    Metric::Ttft => bound.holds(&self.ttft),
                    Metric::Tpot => bound.holds(&self.tpot),
                    Metric::E2e => bound.holds(&self.e2e),
                    Metric::Ttst => true,
                }),
        }
    }
}
