//! `keyway-loadtest merge`: runs that went on at the same time, from several processes or hosts, as one
//! report. Measures nothing.

mod figures;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use xxhash_rust::xxh3::xxh3_64;

use self::figures::{BoundTimes, Figures};
use crate::{
    args::merge::MergeArgs,
    compare,
    config::Config,
    error::Error,
    export::{html, table},
    output,
    report::{CacheShares, FORMAT, MergedRun, Report, Requests, SentWorkload, Status, TokensReport, Verdict},
    stats::{samples::Reservoir, series::SeriesReport},
    stdout,
    tally::TokenSums,
    workload::prompt::TextSeed,
};

/// Share of the whole time for which every run has to go on: else rates are no sum.
const TOGETHER_MIN: f64 = 0.9;

/// Reads, merges, prints the table, writes the files; gives the verdict's exit code.
pub fn run(args: &MergeArgs) -> Result<ExitCode, Error> {
    let reports = args.runs.iter().map(|path| compare::load(path)).collect::<Result<Vec<_>, _>>()?;
    let report = merged(&args.runs, &reports)?;
    stdout::print(&table::render(&report))?;
    if let Some(dir) = &args.dir {
        output::make_dir(dir)?;
        output::write_json(dir, "run.json", &report)?;
        output::write_text(&dir.join("report.html"), &html::render(&report))?;
    }
    Ok(ExitCode::from(report.exit_code(TextSeed { seed: 0, chosen: false })))
}

/// One of the runs.
#[derive(Debug, Clone, Copy)]
struct Part<'a> {
    path: &'a Path,
    report: &'a Report,
    /// Milliseconds from the first run's beginning to its own.
    after_ms: u64,
}

impl Part<'_> {
    fn end_ms(&self) -> u64 {
        self.after_ms + (self.report.elapsed_s * 1e3) as u64
    }
}

/// The runs as one report; `paths` says where each was read.
///
/// # Errors
/// Runs of different workloads, one run twice, and figures that cannot be read.
fn merged(paths: &[PathBuf], reports: &[Report]) -> Result<Report, Error> {
    let began_ms = reports.iter().map(started_ms).min().unwrap_or_default();
    let part = |(path, report)| Part { path, report, after_ms: started_ms(report) - began_ms };
    let parts: Vec<Part<'_>> = paths.iter().map(PathBuf::as_path).zip(reports).map(part).collect();
    are_different_runs_of_one_workload(&parts)?;
    let end_ms = parts.iter().map(Part::end_ms).max().unwrap_or_default();
    let first = parts[0].report;
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    let requests = Requests {
        scheduled: sum(|run| run.requests.scheduled),
        sent: sum(|run| run.requests.sent),
        ok: sum(|run| run.requests.ok),
        failed: sum(|run| run.requests.failed),
        cancelled: sum(|run| run.requests.cancelled),
        warmup: sum(|run| run.requests.warmup),
    };
    let (samples, series) = (samples(&parts)?, parts.iter().map(|part| (part.after_ms, &part.report.series)));
    let series = SeriesReport::of_several(&series.collect::<Vec<_>>(), samples.kept());
    let Figures { response, service, ttst, itl, tpot, schedule_lag, mut histograms } = Figures::of(&parts)?;
    let mut report = Report {
        format: FORMAT.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        verdict: verdict(&parts, end_ms),
        started_unix_s: began_ms / 1000,
        started_unix_ms: began_ms,
        elapsed_s: end_ms as f64 / 1e3,
        config: config(reports),
        workload: workload(&parts),
        calibration: first.calibration,
        requests,
        errors: figures::errors(reports),
        goodput: figures::goodput(reports, requests.failed, &BoundTimes { response, ttst, tpot }),
        response,
        service,
        ttst,
        itl,
        tpot,
        tokens: tokens(reports),
        throughput: figures::throughput(reports),
        cache: cache(reports),
        workers: figures::workers(reports),
        sessions: figures::sessions(&parts, &mut histograms)?,
        schedule_lag,
        scraped: figures::scraped(reports),
        series,
        merged: parts.iter().map(named).collect(),
        histograms,
        samples: samples.columns(),
    };
    report.verdict.heed(report.found_in_caches(), TextSeed { seed: 0, chosen: false });
    Ok(report)
}

fn started_ms(report: &Report) -> u64 {
    if report.started_unix_ms > 0 { report.started_unix_ms } else { report.started_unix_s * 1000 }
}

fn named(part: &Part<'_>) -> MergedRun {
    MergedRun {
        run: part.path.display().to_string(),
        started_unix_ms: started_ms(part.report),
        elapsed_s: part.report.elapsed_s,
        requests: part.report.requests.sent,
        body_hash: part.report.workload.body_hash.clone(),
    }
}

fn are_different_runs_of_one_workload(parts: &[Part<'_>]) -> Result<(), Error> {
    let refuse = |part: &Part<'_>, reason: String| Err(Error::Report { path: part.path.to_owned(), reason });
    for (i, part) in parts.iter().enumerate() {
        let (first, this) = (&parts[0].report.workload.fingerprint, &part.report.workload.fingerprint);
        if first.is_empty() || first != this {
            let first = parts[0].path.display();
            let reason = format!(
                "its workload or pace is not that of {first}: give every process the same options (compare names \
                 the differences)"
            );
            return refuse(part, reason);
        }
        let is_same = |other: &&Part<'_>| {
            (started_ms(other.report), &other.report.workload.body_hash)
                == (started_ms(part.report), &part.report.workload.body_hash)
        };
        if let Some(twin) = parts[..i].iter().find(is_same) {
            return refuse(part, format!("it is the same run as {}", twin.path.display()));
        }
    }
    Ok(())
}

/// The first run that is not valid says it for all; then whether they went on together.
fn verdict(parts: &[Part<'_>], end_ms: u64) -> Verdict {
    let bad = |part: &&Part<'_>| !matches!(part.report.verdict.status, Status::Valid | Status::Warm);
    if let Some(part) = parts.iter().find(bad) {
        let Verdict { status, reason } = &part.report.verdict;
        return Verdict { status: *status, reason: format!("{}: {reason}", part.path.display()) };
    }
    let from_ms = parts.iter().map(|part| part.after_ms).max().unwrap_or_default();
    let until_ms = parts.iter().map(Part::end_ms).min().unwrap_or_default();
    let share = until_ms.saturating_sub(from_ms) as f64 / end_ms.max(1) as f64;
    let runs = parts.len();
    if share < TOGETHER_MIN {
        let reason = format!(
            "the {runs} runs went on together for {:.0} % of the time, less than {:.0} %: start them at once, on \
             hosts whose clocks agree",
            share * 100.0,
            TOGETHER_MIN * 100.0
        );
        return Verdict { status: Status::Invalid, reason };
    }
    Verdict { status: Status::Valid, reason: format!("{runs} runs, each valid, at the same time") }
}

/// The first run's options, those that say how much with the sum of all.
fn config(reports: &[Report]) -> Config {
    fn all<T: std::iter::Sum>(reports: &[Report], of: impl Fn(&Config) -> Option<T>) -> Option<T> {
        reports.iter().map(|report| of(&report.config)).sum()
    }
    Config {
        rate: all(reports, |config| config.rate),
        user_rate: all(reports, |config| config.user_rate),
        concurrency: all(reports, |config| config.concurrency),
        users: all(reports, |config| config.users),
        max_concurrency: all(reports, |config| config.max_concurrency),
        conversations: all(reports, |config| config.conversations),
        requests: all(reports, |config| config.requests),
        warmup_requests: reports.iter().map(|report| report.config.warmup_requests).sum(),
        processes: Some(reports.iter().map(|report| report.config.processes.unwrap_or(1)).sum()),
        ..reports[0].config.clone()
    }
}

fn workload(parts: &[Part<'_>]) -> SentWorkload {
    let of_each = || parts.iter().map(|part| &part.report.workload);
    let first = &parts[0].report.workload;
    let fingerprint = format!("{} of {}", parts.len(), first.fingerprint);
    let hash = |workload: &SentWorkload| u64::from_str_radix(&workload.body_hash, 16).unwrap_or_default();
    let last_due_s = |part: &Part<'_>| part.after_ms as f64 / 1e3 + part.report.workload.last_due_s;
    SentWorkload {
        fingerprint: format!("{:016x}", xxh3_64(fingerprint.as_bytes())),
        requests: of_each().map(|workload| workload.requests).sum(),
        last_due_s: parts.iter().map(last_due_s).fold(0.0, f64::max),
        block_tokens: first.block_tokens,
        block_bytes: first.block_bytes,
        distinct_blocks: of_each().map(|workload| workload.distinct_blocks).sum(),
        prompt_tokens: of_each().map(|workload| workload.prompt_tokens).sum(),
        output_tokens: of_each().map(|workload| workload.output_tokens).sum(),
        body_hash: format!("{:016x}", of_each().map(hash).fold(0, u64::wrapping_add)),
    }
}

fn tokens(reports: &[Report]) -> TokensReport {
    let sum = |of: fn(&TokensReport) -> u64| reports.iter().map(|report| of(&report.tokens)).sum::<u64>();
    let events = |tokens: &TokensReport| Some(tokens.completion as f64 / tokens.per_event?);
    let events: f64 = reports.iter().filter_map(|report| events(&report.tokens)).sum();
    let completion = sum(|tokens| tokens.completion);
    TokensReport {
        prompt: sum(|tokens| tokens.prompt),
        prompt_wanted: sum(|tokens| tokens.prompt_wanted),
        completion,
        per_event: (events > 0.0).then(|| completion as f64 / events),
        answers_without_usage: sum(|tokens| tokens.answers_without_usage),
    }
}

/// Each run had prompts of its own, so what caches could have held adds up. One pooled cache of all does not
/// follow from those of each.
fn cache(reports: &[Report]) -> CacheShares {
    let possible = |report: &Report| {
        (report.cache.possible.unwrap_or_default() * report.tokens.prompt_wanted as f64).round() as u64
    };
    let sums = TokenSums {
        with_cached: reports.iter().filter(|report| report.cache.cached_tokens.is_some()).count() as u64,
        prompt: reports.iter().map(|report| report.tokens.prompt).sum(),
        cached: reports.iter().filter_map(|report| report.cache.cached_tokens).sum(),
        wanted_prompt: reports.iter().map(|report| report.tokens.prompt_wanted).sum(),
        possible: reports.iter().map(possible).sum(),
        ..TokenSums::default()
    };
    CacheShares::new(&sums, None)
}

/// The single answers of all; request n of run k of m is request n · m + k.
fn samples(parts: &[Part<'_>]) -> Result<Reservoir, Error> {
    let mut all = Reservoir::default();
    for (k, part) in parts.iter().enumerate() {
        let columns = &part.report.samples;
        let read = columns.read();
        let mut samples = read.map_err(|source| Error::Samples { path: part.path.to_owned(), source })?;
        for sample in &mut samples {
            sample.row = sample.row.saturating_mul(parts.len()).saturating_add(k);
            sample.due_us += part.after_ms * 1000;
        }
        all.add_kept(columns.of, samples);
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
