//! The figures of several runs as those of one. Means, numbers and largest values are exact; percentiles are
//! of all samples together, as the runs' histograms have them.

use std::collections::BTreeMap;

use super::Part;
use crate::{
    error::Error,
    limits,
    report::{Report, ScheduleLag, Throughput, ViewReport, Workers, ttft_of_turn},
    scrape::Scraped,
    slo::{Bound, BoundReport, Figure, Goodput, Metric},
    stats::{Samples, Summary},
    tally::{
        FailureRow, WorkerRow,
        sessions::{DEPTHS, SessionsReport, TurnsReport},
    },
};

/// Times of all runs.
pub(super) struct Figures {
    pub response: ViewReport,
    pub service: ViewReport,
    pub ttst: Option<Summary>,
    pub itl: Option<Summary>,
    pub tpot: Option<Summary>,
    pub schedule_lag: ScheduleLag,
    pub histograms: BTreeMap<String, String>,
}

impl Figures {
    /// # Errors
    /// A histogram that is missing, damaged, or of other samples than its figures.
    pub(super) fn of(parts: &[Part<'_>]) -> Result<Self, Error> {
        let mut histograms = BTreeMap::new();
        let mut figure = |name: &str, of: fn(&Report) -> Option<Summary>| {
            let all = together(parts, name, of)?;
            histograms.insert(name.to_owned(), all.hdr());
            let each: Vec<Summary> = parts.iter().filter_map(|part| of(part.report)).collect();
            Ok::<_, Error>(Summary::of_several(&each, &all))
        };
        let response = ViewReport {
            ttft: figure("response_ttft", |run| run.response.ttft)?,
            e2e: figure("response_e2e", |run| run.response.e2e)?,
        };
        let service = ViewReport {
            ttft: figure("service_ttft", |run| run.service.ttft)?,
            e2e: figure("service_e2e", |run| run.service.e2e)?,
        };
        let (ttst, itl) = (figure("ttst", |run| run.ttst)?, figure("itl", |run| run.itl)?);
        let tpot = figure("tpot", |run| run.tpot)?;
        let lag = figure("schedule_lag", |run| run.schedule_lag.lag)?;
        let schedule_lag = ScheduleLag::of(lag, response);
        Ok(Self { response, service, ttst, itl, tpot, schedule_lag, histograms })
    }
}

/// The sessions of all runs, whose histograms are added to `histograms`. None where a run has none.
pub(super) fn sessions(
    parts: &[Part<'_>],
    histograms: &mut BTreeMap<String, String>,
) -> Result<Option<SessionsReport>, Error> {
    let each: Option<Vec<&SessionsReport>> = parts.iter().map(|part| part.report.sessions.as_ref()).collect();
    let Some(each) = each else { return Ok(None) };
    let mut figure = |name: &str, of: &dyn Fn(&SessionsReport) -> Option<Summary>| {
        let all = together(parts, name, |run| of(run.sessions.as_ref()?))?;
        if !all.is_empty() {
            histograms.insert(name.to_owned(), all.hdr());
        }
        let each: Vec<Summary> = each.iter().filter_map(|sessions| of(sessions)).collect();
        Ok::<_, Error>(Summary::of_several(&each, &all))
    };
    let completion = figure("session_completion", &|sessions| sessions.completion)?;
    let tools = figure("session_tools", &|sessions| sessions.tools)?;
    let mut by_turn = Vec::new();
    for from in DEPTHS {
        let row =
            move |sessions: &SessionsReport| sessions.by_turn.iter().find(|row| row.from == from).cloned();
        let rows: Vec<TurnsReport> = each.iter().filter_map(|sessions| row(sessions)).collect();
        if rows.is_empty() {
            continue;
        }
        let sum = |of: fn(&TurnsReport) -> u64| rows.iter().map(of).sum();
        by_turn.push(TurnsReport {
            from,
            ttft: figure(&ttft_of_turn(from), &|sessions| row(sessions)?.ttft)?,
            prompt_tokens: sum(|row| row.prompt_tokens),
            cached_tokens: rows.iter().filter_map(|row| row.cached_tokens).reduce(|a, b| a + b),
            prompt_tokens_wanted: sum(|row| row.prompt_tokens_wanted),
            possible_tokens: sum(|row| row.possible_tokens),
        });
    }
    let sum = |of: fn(&SessionsReport) -> u64| each.iter().map(|sessions| of(sessions)).sum();
    Ok(Some(SessionsReport {
        begun: sum(|sessions| sessions.begun),
        ended: sum(|sessions| sessions.ended),
        failed: sum(|sessions| sessions.failed),
        unfinished: sum(|sessions| sessions.unfinished),
        turns: sum(|sessions| sessions.turns),
        turns_not_sent: sum(|sessions| sessions.turns_not_sent),
        completion,
        tools,
        by_turn,
    }))
}

/// All samples of a figure.
fn together(
    parts: &[Part<'_>],
    name: &str,
    of: impl Fn(&Report) -> Option<Summary>,
) -> Result<Samples, Error> {
    let mut all = Samples::default();
    for part in parts {
        let refuse = |reason| Error::Report { path: part.path.to_owned(), reason };
        let want = of(part.report).map_or(0, |summary| summary.n);
        let samples = match part.report.histograms.get(name) {
            Some(text) => {
                Samples::of_hdr(text).map_err(|error| refuse(format!("its histogram `{name}` is {error}")))?
            }
            None => Samples::default(),
        };
        if samples.len() != want {
            let found = samples.len();
            return Err(refuse(format!(
                "its histogram `{name}` has {found} samples, its figures are of {want}"
            )));
        }
        all.merge(&samples);
    }
    Ok(all)
}

/// The failures of all, each run's messages after those of the runs before it.
pub(super) fn errors(reports: &[Report]) -> Vec<FailureRow> {
    let mut rows: BTreeMap<&str, FailureRow> = BTreeMap::new();
    for row in reports.iter().flat_map(|report| &report.errors) {
        let new = || FailureRow { class: row.class.clone(), count: 0, samples: Vec::new() };
        let all = rows.entry(&row.class).or_insert_with(new);
        all.count += row.count;
        for sample in &row.samples {
            if all.samples.len() < limits::ERROR_SAMPLES_MAX && !all.samples.contains(sample) {
                all.samples.push(sample.clone());
            }
        }
    }
    let mut rows: Vec<_> = rows.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.count));
    rows
}

/// Rates add up, as the runs went on at the same time.
pub(super) fn throughput(reports: &[Report]) -> Throughput {
    let sum = |of: fn(&Throughput) -> f64| reports.iter().map(|report| of(&report.throughput)).sum();
    Throughput {
        requests_per_s: sum(|rates| rates.requests_per_s),
        prompt_tokens_per_s: sum(|rates| rates.prompt_tokens_per_s),
        output_tokens_per_s: sum(|rates| rates.output_tokens_per_s),
    }
}

pub(super) fn workers(reports: &[Report]) -> Workers {
    let mut rows: BTreeMap<&str, WorkerRow> = BTreeMap::new();
    for row in reports.iter().flat_map(|report| &report.workers.list) {
        let new = || WorkerRow { worker: row.worker.clone(), ..WorkerRow::default() };
        let all = rows.entry(&row.worker).or_insert_with(new);
        all.requests += row.requests;
        all.prompt_tokens += row.prompt_tokens;
        all.cached_tokens += row.cached_tokens;
    }
    Workers::new(rows.into_values().collect())
}

/// What servers told of themselves, of each the first run's: those of the others are of the same time.
pub(super) fn scraped(reports: &[Report]) -> Vec<Scraped> {
    let mut all: Vec<Scraped> = Vec::new();
    for scraped in reports.iter().flat_map(|report| &report.scraped) {
        if all.iter().all(|known| known.url != scraped.url) {
            all.push(scraped.clone());
        }
    }
    all
}

/// Times that an objective may bound.
#[derive(Debug, Clone, Copy)]
pub(super) struct BoundTimes {
    pub response: ViewReport,
    pub ttst: Option<Summary>,
    pub tpot: Option<Summary>,
}

/// Who kept the objective, where all had the same.
pub(super) fn goodput(reports: &[Report], failed: u64, times: &BoundTimes) -> Option<Goodput> {
    let each: Vec<&Goodput> = reports.iter().map(|report| report.goodput.as_ref()).collect::<Option<_>>()?;
    let first = each.first()?;
    if each.iter().any(|goodput| goodput.slo != first.slo) {
        return None;
    }
    let (met, of) =
        (each.iter().map(|goodput| goodput.met).sum(), each.iter().map(|goodput| goodput.of).sum());
    let share = |kept: f64| kept / (of as f64).max(1.0);
    let bound = |(i, bound): (usize, &BoundReport)| {
        let kept =
            each.iter().filter_map(|goodput| Some(goodput.bounds.get(i)?.share * goodput.of as f64)).sum();
        let parsed: Option<Bound> = bound.bound.parse().ok();
        let holds = parsed.and_then(|bound| holds(bound, share(kept), failed, times));
        BoundReport { bound: bound.bound.clone(), share: share(kept), holds }
    };
    Some(Goodput {
        slo: first.slo.clone(),
        met,
        of,
        share: share(met as f64),
        requests_per_s: each.iter().map(|goodput| goodput.requests_per_s).sum(),
        output_tokens_per_s: each.iter().map(|goodput| goodput.output_tokens_per_s).sum(),
        bounds: first.bounds.iter().enumerate().map(bound).collect(),
    })
}

/// Whether the runs together keep a bound that is set on a run.
fn holds(bound: Bound, share: f64, failed: u64, times: &BoundTimes) -> Option<bool> {
    if bound.figure != Figure::Mean {
        // A share that was added up may miss a whole by the last digit.
        return bound.share().map(|least| share >= least - 1e-12);
    }
    let summary = match bound.metric {
        Metric::Ttft => times.response.ttft,
        Metric::Ttst => times.ttst,
        Metric::Tpot => times.tpot,
        Metric::E2e => times.response.e2e,
    };
    Some(failed == 0 && summary.is_none_or(|summary| summary.mean < bound.below.as_secs_f64() * 1e3))
}
