//! The options of `report`. Decides nothing.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum, ValueHint};

/// Shapes of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// The table that `run` prints.
    Text,
    /// One page with plots, without anything from elsewhere.
    Html,
    /// Tables for a pull request or a wiki.
    Md,
    /// One line a figure: metric,statistic,unit,value.
    Csv,
    /// The JSON of `vllm bench serve`; times from the real sending, as there.
    Vllm,
    /// The JSON of AIPerf's profile export; times from the real sending, as there.
    Aiperf,
}

/// Options of `report`.
#[derive(Debug, ClapArgs)]
pub struct ReportArgs {
    /// run.json, or its folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub run: PathBuf,
    /// Shape of the report
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    pub format: ReportFormat,
    /// File to write [default: stdout]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
}
