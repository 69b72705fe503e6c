//! The options of `calibrate`. Decides nothing.

use clap::Args as ClapArgs;

use super::run::ServerArgs;

/// Options of `calibrate`.
#[derive(Debug, ClapArgs)]
pub struct CalibrateArgs {
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub server: ServerArgs,
    /// Prompt lengths to measure
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "256,1024,4096",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(crate::limits::LENGTH_TOKENS_MAX)))]
    pub lengths: Vec<u32>,
    /// Tokens to generate
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub osl: u32,
    /// New prompts of each length; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub samples: u16,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
