//! Runs that are merged, beside the one run that they are parts of.

use std::time::Duration;

use super::*;
use crate::{
    client::{
        calibrate::Calibration,
        record::{Failure, FailureClass, Outcome, Record, tests::good},
    },
    report::Facts,
    schedule::flow::TurnPlace,
    stats::Summary,
    tally::Tally,
};

const BEGAN_MS: u64 = 1_700_000_000_000;

/// Requests `rows` of a run, each a little slower than the one before, and one in 50 fails.
fn records(rows: std::ops::Range<u64>) -> Vec<Record> {
    let record = |row: u64| {
        let mut record = good(row * 10, row * 10 + 1, row * 10 + 20 + row * row % 97, row * 10 + 180);
        record.row = row as usize;
        // Sessions of four turns, each in one of two halves.
        record.place = Some(TurnPlace {
            session: (row / 8 * 2 + row % 2) as usize,
            agent: 0,
            parent: None,
            turn: (row % 8 / 2) as u32,
            turns: 4,
            wait: Duration::from_millis(row),
        });
        record.exchange.worker = Some(format!("10.0.0.{}:8000", row % 3));
        if row % 50 == 7 {
            let failure = Failure { class: FailureClass::Status(503), message: format!("busy {}", row % 2) };
            record.exchange.outcome = Outcome::Failed(failure);
        }
        record
    };
    rows.map(record).collect()
}

fn report(records: &[Record], started_unix_ms: u64, elapsed_s: f64) -> Report {
    let mut tally = Tally::new(Some("ttft<60ms,e2e.p99<1s,ttft.mean<50ms".parse().unwrap()));
    for record in records {
        tally.add(record);
    }
    let sent = records.len() as u64;
    let workload = SentWorkload {
        fingerprint: "f".into(),
        requests: sent,
        body_hash: format!("{:016x}", sent + records[0].intended_ns),
        ..SentWorkload::default()
    };
    let facts = Facts {
        config: Config { rate: Some(100.0), requests: Some(records.len()), ..Config::default() },
        text: TextSeed::drawn(),
        workload,
        calibration: Calibration { bytes_per_token: 4.0, overhead_tokens: 3, measured: true },
        started_unix_ms,
        elapsed_s,
        scheduled: sent,
        sent,
        interrupted: false,
        scraped: Vec::new(),
    };
    Report::new(facts, &tally)
}

fn paths(n: usize) -> Vec<PathBuf> {
    (0..n).map(|i| format!("run{i}").into()).collect()
}

#[test]
fn two_halves_are_the_whole() {
    let (all, mut halves) = (records(0..400), [Vec::new(), Vec::new()]);
    for record in &all {
        // As request n · 2 + k of the whole is request n of half k.
        let mut of_half = record.clone();
        of_half.row = record.row / 2;
        halves[record.row % 2].push(of_half);
    }
    let whole = report(&all, BEGAN_MS, 4.2);
    let parts = [report(&halves[0], BEGAN_MS, 4.2), report(&halves[1], BEGAN_MS, 4.2)];
    let got = merged(&paths(2), &parts).unwrap();
    assert_eq!(
        (got.verdict.status, got.config.processes, got.config.rate),
        (Status::Valid, Some(2), Some(200.0))
    );
    assert_eq!((got.requests.ok, got.requests.failed), (whole.requests.ok, whole.requests.failed));
    let near = |got: Option<Summary>, want: Option<Summary>, what: &str| {
        let (got, want) = (got.unwrap(), want.unwrap());
        assert_eq!((got.n, got.max), (want.n, want.max), "{what}");
        for (got, want) in [
            (got.mean, want.mean),
            (got.std, want.std),
            (got.p50, want.p50),
            (got.p90, want.p90),
            (got.p95, want.p95),
            (got.p99, want.p99),
        ] {
            assert!((got - want).abs() <= want * 6e-4 + 1e-6, "{what}: {got} for {want}");
        }
    };
    near(got.response.ttft, whole.response.ttft, "response ttft");
    near(got.response.e2e, whole.response.e2e, "response e2e");
    near(got.service.ttft, whole.service.ttft, "service ttft");
    near(got.itl, whole.itl, "itl");
    near(got.tpot, whole.tpot, "tpot");
    near(got.schedule_lag.lag, whole.schedule_lag.lag, "lag");
    assert_eq!(got.tokens.completion, whole.tokens.completion);
    let (got_sessions, want) = (got.sessions.as_ref().unwrap(), whole.sessions.as_ref().unwrap());
    assert_eq!(
        (got_sessions.begun, got_sessions.ended, got_sessions.failed, got_sessions.turns),
        (100, want.ended, want.failed, 400)
    );
    assert!(want.failed > 0 && got.histograms.contains_key("ttft_of_turn_3"));
    near(got_sessions.completion, want.completion, "sessions");
    near(got_sessions.tools, want.tools, "tools");
    for (got, want) in got_sessions.by_turn.iter().zip(&want.by_turn) {
        near(got.ttft, want.ttft, &want.numbers());
        assert_eq!((got.from, got.prompt_tokens_wanted), (want.from, want.prompt_tokens_wanted));
    }
    let rows = |report: &Report| serde_json::to_value(&report.errors).unwrap();
    assert_eq!(rows(&got)[0]["count"], rows(&whole)[0]["count"]);
    let workers = |report: &Report| serde_json::to_value(&report.workers).unwrap();
    assert_eq!(workers(&got), workers(&whole));
    let (got_good, want_good) = (got.goodput.as_ref().unwrap(), whole.goodput.as_ref().unwrap());
    assert_eq!((got_good.met, got_good.of), (want_good.met, want_good.of));
    for (got, want) in got_good.bounds.iter().zip(&want_good.bounds) {
        assert!((got.share - want.share).abs() < 1e-9 && got.holds == want.holds, "{got:?} {want:?}");
    }
    assert_eq!((&got.series.due, &got.series.ok), (&whole.series.due, &whole.series.ok));
    assert_eq!(
        (&got.series.in_flight, &got.series.ttft_p99),
        (&whole.series.in_flight, &whole.series.ttft_p99)
    );
    assert_eq!(got.samples.read().unwrap(), whole.samples.read().unwrap());
    assert_eq!(got.merged.iter().map(|run| run.requests).collect::<Vec<_>>(), [200, 200]);
}

#[test]
fn runs_that_did_not_go_on_together_are_no_measurement() {
    let late = |after_ms: u64| {
        let parts =
            [report(&records(0..100), BEGAN_MS, 10.0), report(&records(0..101), BEGAN_MS + after_ms, 10.0)];
        merged(&paths(2), &parts).unwrap()
    };
    assert_eq!(late(400).verdict.status, Status::Valid);
    assert_eq!(late(400).elapsed_s, 10.4);
    let apart = late(2000).verdict;
    assert_eq!(apart.status, Status::Invalid);
    assert!(apart.reason.contains("together for 67 %"), "{}", apart.reason);
}

#[test]
fn a_run_that_is_not_valid_says_so_for_all() {
    let mut parts = [report(&records(0..100), BEGAN_MS, 10.0), report(&records(0..101), BEGAN_MS, 10.0)];
    parts[1].verdict = Verdict { status: Status::Invalid, reason: "too late".into() };
    let verdict = merged(&paths(2), &parts).unwrap().verdict;
    assert_eq!((verdict.status, verdict.reason.as_str()), (Status::Invalid, "run1: too late"));
}

#[test]
fn what_cannot_be_merged_is_named() {
    let one = || report(&records(0..100), BEGAN_MS, 10.0);
    let refused = |parts: &[Report]| merged(&paths(2), parts).unwrap_err().to_string();
    assert!(refused(&[one(), one()]).contains("run1: it is the same run as run0"));
    let mut other = report(&records(0..101), BEGAN_MS, 10.0);
    other.workload.fingerprint = "g".into();
    assert!(refused(&[one(), other]).contains("run1: its workload or pace is not that of run0"));
    let mut without = report(&records(0..101), BEGAN_MS, 10.0);
    without.histograms.clear();
    assert!(refused(&[one(), without]).contains("`response_ttft` has 0 samples"));
    let mut damaged = report(&records(0..101), BEGAN_MS, 10.0);
    damaged.histograms.insert("itl".into(), "?".into());
    assert!(refused(&[one(), damaged]).contains("`itl` is no base64"));
}
