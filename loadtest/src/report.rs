//! The result of a run in the shape of `run.json` (described in `docs/run-json.md`), and the verdict on the
//! measurement itself. Formats nothing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    client::calibrate::Calibration,
    config::Config,
    error, limits,
    scrape::Scraped,
    slo::Goodput,
    stats::{Summary, samples::Columns, series::SeriesReport},
    tally::{
        FailureRow, Tally, TokenSums, View, WorkerRow,
        sessions::{DEPTHS, SessionsReport},
    },
    workload::prompt::TextSeed,
};

/// Name and version of the report's shape.
pub const FORMAT: &str = "keyway-loadtest/run/1";

/// `run.json`. Times are milliseconds where the name says nothing else.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// Name and version of this shape, [`FORMAT`]; `compare` refuses any other.
    pub format: String,
    /// Version of the program that wrote the report.
    pub version: String,
    /// Whether to trust what follows.
    pub verdict: Verdict,
    /// Start, in seconds since 1970.
    pub started_unix_s: u64,
    /// The schedule's zero, in milliseconds since 1970; 0 where an older report lacks it.
    #[serde(default)]
    pub started_unix_ms: u64,
    /// Seconds from the schedule's zero to the end of the last answer.
    pub elapsed_s: f64,
    /// What was asked for.
    pub config: Config,
    /// What was to be sent.
    pub workload: SentWorkload,
    /// Bytes of prompt text for one token, and tokens of the chat template.
    pub calibration: Calibration,
    /// How many requests were scheduled and sent, and how they ended.
    pub requests: Requests,
    /// The failures by class, the most frequent first.
    pub errors: Vec<FailureRow>,
    /// Times from the intended time of sending: what a person would have waited.
    pub response: ViewReport,
    /// Times from the real one: what the server took.
    pub service: ViewReport,
    /// From the first to the second event with text.
    #[serde(default)]
    pub ttst: Option<Summary>,
    /// Between events with text.
    pub itl: Option<Summary>,
    /// Per request, mean time of a token after the first.
    pub tpot: Option<Summary>,
    /// Token sums of good answers.
    pub tokens: TokensReport,
    /// Requests and tokens a second.
    pub throughput: Throughput,
    /// Tokens that came from KV caches, and what could have.
    pub cache: CacheShares,
    /// The workers that answered and their shares; empty where no gateway names them.
    pub workers: Workers,
    /// How late requests were sent.
    pub schedule_lag: ScheduleLag,
    /// Who kept the objective, if one was given.
    #[serde(default)]
    pub goodput: Option<Goodput>,
    /// Whole sessions: conversations, or the agents of a trace that was replayed live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<SessionsReport>,
    /// The metrics that servers told of themselves, one for each `--scrape`.
    #[serde(default)]
    pub scraped: Vec<Scraped>,
    /// The run over time.
    #[serde(default)]
    pub series: SeriesReport,
    /// The runs that were merged into this one; empty for a run by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub merged: Vec<MergedRun>,
    /// All samples of each figure as an HdrHistogram of microseconds (V2, compressed, base64).
    #[serde(default)]
    pub histograms: BTreeMap<String, String>,
    /// Single requests, for comparisons.
    #[serde(default)]
    pub samples: Columns,
}

/// One of the runs that a report was merged from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MergedRun {
    /// Its folder or file, as it was named.
    pub run: String,
    /// When it began, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// How long it took, in seconds.
    pub elapsed_s: f64,
    /// Requests that it sent.
    pub requests: u64,
    /// Hash of its bodies.
    pub body_hash: String,
}

/// A status and its reason.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Verdict {
    /// Whether the figures can be trusted, or what kept them from it.
    pub status: Status,
    /// Why the status is what it is, in words for a person.
    pub reason: String,
}

/// What became of the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It can be trusted; single requests may have failed.
    Valid,
    /// The load tester was too late.
    Invalid,
    /// More of the prompts came from caches than this run can have left there.
    Warm,
    /// No request succeeded, warm-ups not counted.
    Failed,
    /// It was ended from outside; the figures cover what was done.
    Interrupted,
}

/// What was made to be sent, in scaled tokens. Of a run that was interrupted some of it was not.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SentWorkload {
    /// Hash of the workload and its pace, without the seed: runs with equal ones can be compared.
    #[serde(default)]
    pub fingerprint: String,
    /// Requests sent, those that warm up among them.
    pub requests: u64,
    /// When the last is due, in seconds.
    pub last_due_s: f64,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Bytes of its text.
    pub block_bytes: usize,
    /// Different blocks among the schedule's prompts.
    pub distinct_blocks: u64,
    /// Prompt tokens wanted, templates not counted.
    pub prompt_tokens: u64,
    /// Tokens that all requests together asked to generate.
    pub output_tokens: u64,
    /// Sum of the xxh3 of all bodies sent: equal hashes mean equal bytes.
    pub body_hash: String,
}

/// How many requests there were, by how they ended.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Requests {
    pub scheduled: u64,
    pub sent: u64,
    pub ok: u64,
    pub failed: u64,
    pub cancelled: u64,
    /// Sent to warm up: in no figure.
    #[serde(default)]
    pub warmup: u64,
}

/// Times from one point of view, of good answers.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ViewReport {
    /// To the first token.
    pub ttft: Option<Summary>,
    /// To the end of the answer; `None` without a good answer.
    pub e2e: Option<Summary>,
}

/// Token sums of good answers, by the server's `usage`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct TokensReport {
    /// Prompt tokens as the server counts them, its chat template included.
    pub prompt: u64,
    /// Prompt tokens the same prompts were made to have: how well calibration holds.
    pub prompt_wanted: u64,
    /// Generated tokens as the server counts them.
    pub completion: u64,
    /// Generated tokens for one event with text.
    pub per_event: Option<f64>,
    /// Good answers without `usage`.
    pub answers_without_usage: u64,
}

/// Means over the time from the first due request that was no warm-up to the run's end.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Throughput {
    pub requests_per_s: f64,
    pub prompt_tokens_per_s: f64,
    pub output_tokens_per_s: f64,
}

/// Shares of all prompt tokens that came, or could have come, from a cache.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct CacheShares {
    /// Cached tokens by `usage`; none if the server reports none.
    pub cached_tokens: Option<u64>,
    /// `cached_tokens` over prompt tokens, 0 to 1; `None` if the server reports none.
    pub achieved: Option<f64>,
    /// The share with one unbounded cache.
    pub possible: Option<f64>,
    /// The share with one LRU cache of `pooled_lru_blocks`.
    pub pooled_lru: Option<f64>,
    /// Its size in scaled blocks.
    pub pooled_lru_blocks: Option<usize>,
    /// `achieved` over `possible`; `None` if one is unknown or `possible` is 0.
    pub of_possible: Option<f64>,
    /// `achieved` over `pooled_lru`; `None` if one is unknown or `pooled_lru` is 0.
    pub of_pooled_lru: Option<f64>,
}

/// The workers that answered, where a gateway names them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Workers {
    /// One row for each worker, in order of their addresses.
    pub list: Vec<WorkerRow>,
    /// Prompt tokens of the busiest over the mean of those that answered.
    pub max_over_mean: Option<f64>,
}

/// How late requests were sent, and how late is too late.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ScheduleLag {
    /// Real minus intended time of sending.
    pub lag: Option<Summary>,
    /// The most that p99 may be.
    pub p99_bound: f64,
}

/// What the report takes from the run besides the tally.
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields of the report they become")]
pub struct Facts {
    pub config: Config,
    pub text: TextSeed,
    pub workload: SentWorkload,
    pub calibration: Calibration,
    pub started_unix_ms: u64,
    pub elapsed_s: f64,
    /// Requests in the schedule.
    pub scheduled: u64,
    pub sent: u64,
    pub interrupted: bool,
    pub scraped: Vec<Scraped>,
}

// === impl Report ===

impl Report {
    /// Puts the report together.
    pub fn new(facts: Facts, tally: &Tally) -> Self {
        let Facts { config, workload, calibration, started_unix_ms, elapsed_s, .. } = facts;
        let Facts { text, scheduled, sent, interrupted, scraped, .. } = facts;
        let Tally { ok, failed, cancelled, warmup, tokens, .. } = *tally;
        let response = ViewReport::new(&tally.response);
        let schedule_lag = ScheduleLag::of(tally.lag.summary(), response);
        // A warm-up is not part of the time that figures are taken over.
        let counted_s = elapsed_s - tally.first_due_ns.unwrap_or(0) as f64 / 1e9;
        let per_second = |count: u64| if counted_s > 0.0 { count as f64 / counted_s } else { 0.0 };
        let mut report = Self {
            format: FORMAT.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            verdict: Verdict::new(interrupted, tally, &schedule_lag),
            started_unix_s: started_unix_ms / 1000,
            started_unix_ms,
            elapsed_s,
            cache: CacheShares::new(&tokens, config.oracle_blocks),
            requests: Requests { scheduled, sent, ok, failed, cancelled, warmup },
            config,
            workload,
            calibration,
            errors: tally.failures(),
            response,
            service: ViewReport::new(&tally.service),
            ttst: tally.ttst.summary(),
            itl: tally.itl.summary(),
            tpot: tally.tpot.summary(),
            tokens: TokensReport {
                prompt: tokens.prompt,
                prompt_wanted: tokens.wanted_prompt,
                completion: tokens.completion,
                per_event: ratio(tokens.completion, tokens.text_events),
                answers_without_usage: tokens.without_usage,
            },
            throughput: Throughput {
                requests_per_s: per_second(ok),
                prompt_tokens_per_s: per_second(tokens.prompt),
                output_tokens_per_s: per_second(tokens.completion),
            },
            workers: Workers::new(tally.workers()),
            schedule_lag,
            goodput: tally.slo.as_ref().map(|slo| slo.report(counted_s)),
            sessions: tally.sessions.report(),
            scraped,
            series: tally.series.report(),
            merged: Vec::new(),
            histograms: histograms(tally),
            samples: tally.samples.columns(),
        };
        report.verdict.heed(report.found_in_caches(), text);
        report
    }
}

fn histograms(tally: &Tally) -> BTreeMap<String, String> {
    let figures = [
        ("response_ttft", &tally.response.ttft),
        ("response_e2e", &tally.response.e2e),
        ("service_ttft", &tally.service.ttft),
        ("service_e2e", &tally.service.e2e),
        ("ttst", &tally.ttst),
        ("itl", &tally.itl),
        ("tpot", &tally.tpot),
        ("schedule_lag", &tally.lag),
    ];
    let sessions = &tally.sessions;
    let whole = [("session_completion", &sessions.completion), ("session_tools", &sessions.tools)];
    let by_turn =
        DEPTHS.iter().zip(&sessions.by_turn).map(|(&from, turns)| (ttft_of_turn(from), &turns.ttft));
    let of_sessions = whole.map(|(name, samples)| (name.to_owned(), samples)).into_iter().chain(by_turn);
    let figures = figures.map(|(name, samples)| (name.to_owned(), samples.hdr())).into_iter();
    figures
        .chain(
            of_sessions
                .filter(|(_, samples)| !samples.is_empty())
                .map(|(name, samples)| (name, samples.hdr())),
        )
        .collect()
}

/// The name of a histogram: the times to the first token of the turns that begin with number `from`.
pub(crate) fn ttft_of_turn(from: u32) -> String {
    format!("ttft_of_turn_{from}")
}

impl Report {
    /// How much of the prompts, 0 to 1, came from caches beyond what this run alone can have left there:
    /// `None` if not more than the shares are exact, or if the server does not say.
    pub fn found_in_caches(&self) -> Option<f64> {
        let prompt = self.tokens.prompt as f64;
        // A chat template is every prompt's first part, and in caches from the first request on.
        let template = if self.calibration.measured {
            self.calibration.overhead_tokens as f64 * self.requests.ok as f64
        } else {
            prompt - self.tokens.prompt_wanted as f64
        };
        let beyond = self.cache.achieved? - self.cache.possible? - (template / prompt).max(0.0);
        (beyond > limits::CACHE_BEYOND_POSSIBLE_MAX).then_some(beyond)
    }

    /// The exit code of a run with this report and these words: caches that are warm are no surprise to a
    /// user who chose the words.
    pub fn exit_code(&self, text: TextSeed) -> u8 {
        let bounds = self.goodput.iter().flat_map(|goodput| &goodput.bounds);
        match self.verdict.exit_code(text) {
            0 if bounds.filter_map(|bound| bound.holds).any(|holds| !holds) => error::EXIT_GATE,
            code => code,
        }
    }
}

impl Verdict {
    fn new(interrupted: bool, tally: &Tally, lag: &ScheduleLag) -> Self {
        let late = lag.lag.map_or(0.0, |lag| lag.p99);
        let (status, reason) = if interrupted {
            (Status::Interrupted, "ended before the schedule; the figures cover what was done".into())
        } else if tally.ok == 0 {
            (Status::Failed, format!("none of {} requests succeeded", tally.done()))
        } else if late > lag.p99_bound {
            let bound = lag.p99_bound;
            let reason = format!(
                "schedule lag p99 is {late:.2} ms, more than {bound:.2} ms: the load tester sent too late; \
                 give it more CPU or lower the rate"
            );
            (Status::Invalid, reason)
        } else {
            (Status::Valid, format!("schedule lag p99 {late:.2} ms is within {:.2} ms", lag.p99_bound))
        };
        Self { status, reason }
    }

    /// Of a run that is valid otherwise: what it `found` in caches before it makes it a warm one.
    pub(crate) fn heed(&mut self, found: Option<f64>, text: TextSeed) {
        let (Status::Valid, Some(found)) = (self.status, found) else { return };
        self.status = Status::Warm;
        let advice = if text.chosen {
            "leave out --text-seed, or empty the caches"
        } else {
            "empty the caches, or let nothing else send these prompts"
        };
        self.reason = format!(
            "{:.1} % of the prompts' tokens came from caches, beyond what this run can have left there: an earlier \
             one sent the same; {advice}",
            found * 100.0
        );
    }

    /// The exit code this verdict ends the process with.
    fn exit_code(&self, text: TextSeed) -> u8 {
        match self.status {
            Status::Valid => 0,
            Status::Warm if text.chosen => 0,
            Status::Failed => error::EXIT_FAILED,
            Status::Warm | Status::Invalid => error::EXIT_INVALID,
            Status::Interrupted => error::EXIT_INTERRUPTED,
        }
    }
}

impl ViewReport {
    fn new(view: &View) -> Self {
        Self { ttft: view.ttft.summary(), e2e: view.e2e.summary() }
    }

    /// The time to the first thing that a client can use: the first token, of an embedding the whole.
    pub fn first(&self) -> Option<Summary> {
        self.ttft.or(self.e2e)
    }
}

impl ScheduleLag {
    /// The `lag` of a run with these `response` times.
    pub(crate) fn of(lag: Option<Summary>, response: ViewReport) -> Self {
        let share = response.first().map_or(0.0, |first| first.p50 * limits::LAG_TTFT_SHARE_MAX);
        Self { lag, p99_bound: share.max(limits::LAG_P99_MS_MAX) }
    }
}

impl CacheShares {
    /// What was possible is counted in the tokens the prompts were made to have, what was achieved in the
    /// server's: each is a share of its own sum, so a calibration that is a little off cancels out.
    pub(crate) fn new(tokens: &TokenSums, pooled_lru_blocks: Option<usize>) -> Self {
        let reported = tokens.with_cached > 0;
        let achieved = ratio(tokens.cached, tokens.prompt).filter(|_| reported);
        let possible = ratio(tokens.possible, tokens.wanted_prompt);
        let pooled_lru = ratio(tokens.pooled, tokens.wanted_prompt).filter(|_| pooled_lru_blocks.is_some());
        let over = |whole: Option<f64>| Some(achieved? / whole.filter(|&whole| whole > 0.0)?);
        Self {
            cached_tokens: reported.then_some(tokens.cached),
            achieved,
            possible,
            pooled_lru,
            pooled_lru_blocks,
            of_possible: over(possible),
            of_pooled_lru: over(pooled_lru),
        }
    }
}

impl Workers {
    pub(crate) fn new(list: Vec<WorkerRow>) -> Self {
        let sum: u64 = list.iter().map(|row| row.prompt_tokens).sum();
        let max = list.iter().map(|row| row.prompt_tokens).max().unwrap_or(0);
        let max_over_mean = ratio(max * list.len() as u64, sum);
        Self { list, max_over_mean }
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
