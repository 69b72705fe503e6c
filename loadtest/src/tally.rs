//! Adds up the records of a run as they come in: counts, failures, times, tokens, each worker's share. Keeps
//! no record; judges nothing.

pub mod sessions;

use std::collections::BTreeMap;

use keyway_wire::openai::Usage;
use serde::{Deserialize, Serialize};

use crate::{
    client::record::{Failure, FailureClass, Outcome, Record},
    limits,
    slo::{Keeper, Slo},
    stats::{Samples, samples, series::Series},
    tally::sessions::SessionTally,
};

/// One class of failure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FailureRow {
    /// How to count it.
    pub class: String,
    /// Requests that ended so.
    pub count: u64,
    /// The first messages, each once.
    pub samples: Vec<String>,
}

/// What one worker did, by the gateway's `x-keyway-worker`. Tokens of good answers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct WorkerRow {
    /// Its address, as the gateway writes it in `x-keyway-worker`.
    pub worker: String,
    /// Answers, failed ones too.
    pub requests: u64,
    /// Prompt tokens by `usage`, cached ones included.
    pub prompt_tokens: u64,
    /// Prompt tokens from its cache.
    pub cached_tokens: u64,
}

/// Times from one point of view: from when a request was due, or from when it was sent.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// To the first token.
    pub ttft: Samples,
    /// To the end of the answer, of good answers only.
    pub e2e: Samples,
}

/// Token sums over good answers.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenSums {
    /// Good answers without `usage`: they are in none of these sums.
    pub without_usage: u64,
    /// Answers that say how many tokens were cached, 0 included.
    pub with_cached: u64,
    /// Prompt tokens by `usage`.
    pub prompt: u64,
    /// Of those, from caches.
    pub cached: u64,
    /// Generated tokens by `usage`.
    pub completion: u64,
    /// Events with generated content, however many tokens each carries.
    pub text_events: u64,
    /// Prompt tokens that the same prompts were made to have.
    pub wanted_prompt: u64,
    /// Of those, what an unbounded cache could have held.
    pub possible: u64,
    /// Of those, what the pooled LRU cache would have held.
    pub pooled: u64,
}

/// All that the records of a run add up to.
#[derive(Debug, Default)]
pub struct Tally {
    /// Streams that ended well.
    pub ok: u64,
    /// Requests that failed, dropped ones included, without warm-ups.
    pub failed: u64,
    /// Requests we ended ourselves.
    pub cancelled: u64,
    /// Requests that warmed up: in nothing else but the lag and the count of those done.
    pub warmup: u64,
    /// When the first request was due that did not warm up.
    pub first_due_ns: Option<u64>,
    /// From the intended time of sending.
    pub response: View,
    /// From the real one.
    pub service: View,
    /// Between events with text.
    pub itl: Samples,
    /// Per request: (last text - first text) / (generated tokens - 1).
    pub tpot: Samples,
    /// From the first to the second event with text.
    pub ttst: Samples,
    /// Real minus intended time of sending, of all requests, without the wait for `--max-concurrency`.
    pub lag: Samples,
    /// Who kept the objective, if there is one.
    pub slo: Option<Keeper>,
    /// The run over time.
    pub series: Series,
    /// Single good answers, kept so that runs can be compared request by request.
    pub samples: samples::Reservoir,
    /// Token sums of good answers: what the server counted, and what caches could have held.
    pub tokens: TokenSums,
    /// Whole sessions, where requests are turns of some.
    pub sessions: SessionTally,
    failures: BTreeMap<FailureClass, FailureRow>,
    workers: BTreeMap<String, WorkerRow>,
}

// === impl TokenSums ===

impl TokenSums {
    /// Adds a good answer.
    fn add(&mut self, record: &Record) {
        let Some(usage) = &record.exchange.usage else {
            self.without_usage += 1;
            return;
        };
        self.with_cached += u64::from(usage.cached_tokens().is_some());
        self.prompt += usage.prompt_tokens;
        self.cached += usage.cached_tokens().unwrap_or(0);
        self.completion += usage.completion_tokens;
        self.text_events += record.exchange.text_events;
        self.wanted_prompt += record.wanted_prompt_tokens;
        self.possible += record.reusable.unbounded;
        self.pooled += record.reusable.pooled.unwrap_or(0);
    }
}

// === impl Tally ===

impl Tally {
    /// Nothing yet; counts who keeps `slo`.
    pub fn new(slo: Option<Slo>) -> Self {
        Self { slo: slo.map(Keeper::new), ..Self::default() }
    }

    /// Adds one request that has ended; of a warm-up only its lag and its count.
    pub fn add(&mut self, record: &Record) {
        let late_ns = record.exchange.sent_ns.saturating_sub(record.intended_ns);
        self.lag.add_ns(late_ns.saturating_sub(record.queued_ns));
        if let Some(place) = &record.place {
            self.sessions.add(record, place);
        }
        if record.warmup {
            self.warmup += 1;
            return;
        }
        let first_ns = self.first_due_ns.get_or_insert(record.intended_ns);
        *first_ns = record.intended_ns.min(*first_ns);
        self.series.add(record);
        self.add_worker(record);
        if let (Some(slo), false) = (&mut self.slo, record.exchange.outcome == Outcome::Cancelled) {
            slo.add(record);
        }
        match &record.exchange.outcome {
            Outcome::Ok => {
                self.ok += 1;
                self.add_times(record);
                self.tokens.add(record);
                self.samples.add(record);
            }
            Outcome::Failed(failure) => self.add_failure(failure),
            Outcome::Cancelled => self.cancelled += 1,
        }
    }

    /// Requests that ended in any way.
    pub fn done(&self) -> u64 {
        self.ok + self.failed + self.cancelled + self.warmup
    }

    /// The classes of failure, the most frequent first.
    pub fn failures(&self) -> Vec<FailureRow> {
        let mut rows: Vec<_> = self.failures.values().cloned().collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.count));
        rows
    }

    /// The workers in order of their addresses.
    pub fn workers(&self) -> Vec<WorkerRow> {
        self.workers.values().cloned().collect()
    }

    fn add_times(&mut self, record: &Record) {
        let exchange = &record.exchange;
        for (view, from_ns) in
            [(&mut self.response, record.intended_ns), (&mut self.service, exchange.sent_ns)]
        {
            view.e2e.add_ns(exchange.end_ns.saturating_sub(from_ns));
            if let Some(first_ns) = exchange.first_ns {
                view.ttft.add_ns(first_ns.saturating_sub(from_ns));
            }
        }
        // Of events that came at one time, as of a busy stream, there are many in a row.
        for gaps in exchange.gaps_us.chunk_by(|a, b| a == b) {
            self.itl.add_equal_us(gaps[0].into(), gaps.len() as u64);
        }
        if let Some(ns) = record.tpot_ns() {
            self.tpot.add_ns(ns);
        }
        if let Some(ns) = record.ttst_ns() {
            self.ttst.add_ns(ns);
        }
    }

    fn add_worker(&mut self, record: &Record) {
        let Some(worker) = &record.exchange.worker else { return };
        let row = self
            .workers
            .entry(worker.clone())
            .or_insert_with(|| WorkerRow { worker: worker.clone(), ..WorkerRow::default() });
        row.requests += 1;
        if let (true, Some(usage)) = (record.is_ok(), &record.exchange.usage) {
            row.prompt_tokens += usage.prompt_tokens;
            row.cached_tokens += Usage::cached_tokens(usage).unwrap_or(0);
        }
    }

    fn add_failure(&mut self, failure: &Failure) {
        self.failed += 1;
        let class = failure.class;
        let new = || FailureRow { class: class.to_string(), count: 0, samples: Vec::new() };
        let row = self.failures.entry(class).or_insert_with(new);
        row.count += 1;
        if row.samples.len() < limits::ERROR_SAMPLES_MAX && !row.samples.contains(&failure.message) {
            row.samples.push(failure.message.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use keyway_wire::openai::PromptTokensDetails;

    use super::*;
    use crate::{client::record::Exchange, oracle::Reusable};

    fn record(outcome: Outcome) -> Record {
        let details = PromptTokensDetails { cached_tokens: Some(16) };
        let usage = Usage {
            prompt_tokens: 40,
            completion_tokens: 3,
            total_tokens: 43,
            prompt_tokens_details: Some(details),
        };
        Record {
            row: 0,
            intended_ns: 1_000_000,
            queued_ns: 0,
            warmup: false,
            place: None,
            wanted_prompt_tokens: 38,
            reusable: Reusable { unbounded: 20, pooled: Some(16) },
            exchange: Exchange {
                sent_ns: 2_000_000,
                head_ns: Some(3_000_000),
                first_ns: Some(11_000_000),
                last_ns: Some(21_000_000),
                end_ns: 22_000_000,
                text_events: 3,
                gaps_us: vec![4000, 6000],
                usage: Some(usage),
                worker: Some("w:1".into()),
                text: String::new(),
                outcome,
            },
        }
    }

    #[test]
    fn both_views_and_the_token_times() {
        let mut tally = Tally::default();
        tally.add(&record(Outcome::Ok));
        let mean = |samples: &Samples| samples.summary().unwrap().mean;
        assert_eq!((mean(&tally.response.ttft), mean(&tally.service.ttft)), (10.0, 9.0));
        assert_eq!((mean(&tally.response.e2e), mean(&tally.service.e2e)), (21.0, 20.0));
        assert_eq!((mean(&tally.itl), mean(&tally.tpot), mean(&tally.lag)), (5.0, 5.0, 1.0));
        assert_eq!((tally.tokens.cached, tally.tokens.possible, tally.tokens.pooled), (16, 20, 16));
    }

    #[test]
    fn a_wait_for_a_place_is_the_person_s_and_not_the_schedule_s() {
        let mut tally = Tally::default();
        tally.add(&Record { queued_ns: 800_000, ..record(Outcome::Ok) });
        let mean = |samples: &Samples| samples.summary().unwrap().mean;
        assert_eq!((mean(&tally.response.ttft), mean(&tally.lag)), (10.0, 0.2));
    }

    #[test]
    fn a_warm_up_is_in_no_figure() {
        let mut tally = Tally::new(Some("ttft<1s".parse().unwrap()));
        tally.add(&Record { warmup: true, ..record(Outcome::Ok) });
        assert_eq!((tally.ok, tally.warmup, tally.done()), (0, 1, 1));
        assert!(tally.response.ttft.is_empty() && tally.workers().is_empty());
        assert_eq!(tally.slo.unwrap().of, 0);
    }

    #[test]
    fn failures_count_in_no_time_and_no_token_sum() {
        let mut tally = Tally::default();
        let failed =
            |message: &str| Outcome::Failed(Failure { class: FailureClass::Cut, message: message.into() });
        for message in ["a", "a", "b", "c", "d"] {
            tally.add(&record(failed(message)));
        }
        tally.add(&record(Outcome::Failed(Failure {
            class: FailureClass::Status(503),
            message: String::new(),
        })));
        tally.add(&record(Outcome::Cancelled));
        assert_eq!((tally.ok, tally.failed, tally.cancelled, tally.done()), (0, 6, 1, 7));
        let rows = tally.failures();
        assert_eq!((rows[0].class.as_str(), rows[0].count), ("cut", 5));
        assert_eq!(rows[0].samples, ["a", "b", "c"]);
        assert_eq!(rows[1].class, "status_503");
        assert_eq!((tally.tokens.prompt, tally.response.e2e.summary()), (0, None));
        let workers = tally.workers();
        assert_eq!((workers[0].requests, workers[0].prompt_tokens), (7, 0));
    }
}
