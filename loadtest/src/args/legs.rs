//! The options of `simulate` for KV that moves between workers: workers for a part of requests, and what
//! transfers take.

use clap::{Args, ValueEnum};
use keyway_core::Splitting;

use crate::mock::args::KvArgs;

/// Workers for a part of requests, and KV that moves between workers.
#[derive(Debug, Args)]
pub struct LegArgs {
    /// Of the workers, so many compute prompts alone, and the others answer (the gateway's roles prefill and
    /// decode)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prefill: u16,
    /// Which prompts the former compute for the latter (the gateway's routing.split)
    #[arg(long, value_name = "WHEN", default_value = "auto", requires = "prefill")]
    split: When,
    /// Uncached prompt tokens below which none is (the gateway's prefill_from_tokens)
    #[arg(long, value_name = "TOKENS", default_value_t = 256, requires = "prefill")]
    pub split_from: u64,
    /// Let workers fetch a prefix from another one that holds it, where that is quicker
    #[arg(long, conflicts_with = "prefill")]
    pub pull: bool,
    #[command(flatten)]
    #[expect(missing_docs, reason = "clap shows a flattened field's own docs")]
    pub kv: KvArgs,
    /// Say as well how long clients wait between two tokens
    #[arg(long)]
    pub itl: bool,
}

/// When a prompt is computed by another worker than the one that answers.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum When {
    /// Where that costs less
    Auto,
    /// Wherever it can be
    Always,
    /// Nowhere, whatever it costs
    Never,
}

impl LegArgs {
    /// Which prompts workers for prefill compute for others.
    pub fn splitting(&self) -> Splitting {
        match self.split {
            When::Auto => Splitting::Auto,
            When::Always => Splitting::Always,
            When::Never => Splitting::Never,
        }
    }
}
