//! The options of `report`. Decides nothing.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueHint};

use crate::export::Format;

/// Options of `report`.
#[derive(Debug, ClapArgs)]
pub struct ReportArgs {
    /// run.json, or its folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub run: PathBuf,
    /// Shape of the report
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// File to write [default: stdout]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
}
