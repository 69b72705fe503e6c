//! `keyway-loadtest report`: a run.json in other shapes. Each shape is a module; none measures or judges
//! anything.

use std::process::ExitCode;

use crate::{
    args::report::{ReportArgs, ReportFormat},
    compare,
    error::Error,
    output,
    report::Report,
    stdout,
};

pub mod aiperf;
pub mod csv;
pub mod html;
pub mod markdown;
pub mod plots;
pub mod table;
pub mod vllm;

/// Reads, converts, prints or writes.
pub fn run(args: &ReportArgs) -> Result<ExitCode, Error> {
    let report = compare::load(&args.run)?;
    let text = render(&report, args.format);
    match &args.output {
        None => stdout::print(&text),
        Some(path) => output::write_text(path, &text).map(|()| ExitCode::SUCCESS),
    }
}

/// `report` in the shape of `format`.
pub fn render(report: &Report, format: ReportFormat) -> String {
    let json = |value: serde_json::Value| serde_json::to_string_pretty(&value).unwrap_or_default() + "\n";
    match format {
        ReportFormat::Text => table::render(report),
        ReportFormat::Html => html::render(report),
        ReportFormat::Md => markdown::render(report),
        ReportFormat::Csv => csv::render(report),
        ReportFormat::Vllm => json(vllm::render(report)),
        ReportFormat::Aiperf => json(aiperf::render(report)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::ValueEnum as _;

    use super::*;
    use crate::{
        client::{
            calibrate::Calibration,
            record::{Outcome, tests::good},
        },
        config::Config,
        report::{Facts, SentWorkload},
        schedule::flow::TurnPlace,
        tally::Tally,
        workload::prompt::TextSeed,
    };

    /// Two hundred answers and one failure whose message is hostile.
    pub(crate) fn report() -> Report {
        let mut tally = Tally::new(Some("ttft<50ms,e2e.p99<1s".parse().unwrap()));
        for i in 0..200 {
            let mut record = good(i * 10, i * 10 + 1, i * 10 + 20 + i % 40, i * 10 + 90);
            record.row = i as usize;
            let (session, turn) = (i as usize / 4, i as u32 % 4);
            let wait = std::time::Duration::ZERO;
            record.place = Some(TurnPlace { session, agent: 0, parent: None, turn, turns: 4, wait });
            record.exchange.worker = Some(format!("10.0.0.{}:8000", i % 3));
            tally.add(&record);
        }
        let mut failed = good(2000, 2000, 2001, 2002);
        failed.exchange.outcome = Outcome::Failed(crate::client::record::Failure {
            class: crate::client::record::FailureClass::ErrorEvent,
            message: "<script>alert(1)</script>".into(),
        });
        tally.add(&failed);
        let config = Config {
            model: "m<1>".into(),
            workload: "random".into(),
            rate: Some(100.0),
            ..Config::default()
        };
        let calibration = Calibration { bytes_per_token: 4.0, overhead_tokens: 3, measured: true };
        let facts = Facts {
            config,
            text: TextSeed::chosen(1),
            workload: SentWorkload::default(),
            calibration,
            started_unix_ms: 1_700_000_000_000,
            elapsed_s: 2.1,
            scheduled: 201,
            sent: 201,
            interrupted: false,
            scraped: Vec::new(),
        };
        Report::new(facts, &tally)
    }

    #[test]
    fn every_shape_has_the_figures() {
        let report = report();
        let p50 = report.response.ttft.unwrap().p50;
        let service = report.service.ttft.unwrap().p50;
        for (format, want) in [
            (ReportFormat::Text, format!("{p50:.2}")),
            (ReportFormat::Html, format!("{p50:.1}")),
            (ReportFormat::Md, format!("{p50:.2}")),
            (ReportFormat::Csv, format!("response_ttft,p50,ms,{p50}\n")),
            (ReportFormat::Text, "50 begun, 50 ended, 0 failed".into()),
            (ReportFormat::Html, "50 begun, 50 ended, 0 failed".into()),
            (ReportFormat::Csv, "sessions_ended,sum,1,50\n".into()),
            (ReportFormat::Vllm, format!("\"median_ttft_ms\": {service:.1}")),
            (ReportFormat::Aiperf, "\"time_to_first_token\"".into()),
        ] {
            let text = render(&report, format);
            assert!(text.contains(&want), "{format:?} without {want}:\n{text}");
        }
    }

    #[test]
    fn a_run_without_a_good_answer_has_a_report_in_every_shape() {
        let mut report = report();
        (report.response, report.service) = (
            crate::report::ViewReport { ttft: None, e2e: None },
            crate::report::ViewReport { ttft: None, e2e: None },
        );
        (report.itl, report.tpot, report.ttst) = (None, None, None);
        report.samples = crate::stats::samples::Reservoir::default().columns();
        report.series = crate::stats::series::SeriesReport::default();
        for format in ReportFormat::value_variants() {
            assert!(render(&report, *format).len() > 100, "{format:?}");
        }
    }
}
