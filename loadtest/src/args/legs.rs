//! The options of `simulate` for KV that moves between workers: workers for a part of requests, and what
//! transfers take.

use std::time::Duration;

use clap::{Args, ValueEnum};
use keyway_core::{Splitting, Transfer};

use crate::units;

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

/// What moving KV takes; shared with `mock`.
#[derive(Debug, Clone, Copy, Args)]
pub struct KvArgs {
    /// Gbit/s at which a worker sends KV, and receives it; several transfers share that
    #[arg(long, value_name = "GBIT", default_value = "100", value_parser = units::positive)]
    kv_gbit: f64,
    /// KiB of KV for each token (128: eight billion parameters, grouped queries, 16 bits)
    #[arg(long, value_name = "KIB", default_value = "128", value_parser = units::positive)]
    kv_kib: f64,
    /// Time of each transfer before its first byte
    #[arg(long, value_name = "TIME", default_value = "36ms", value_parser = units::duration)]
    kv_handover: Duration,
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

impl KvArgs {
    /// What a transfer takes that has the network for itself.
    pub fn transfer(&self) -> Transfer {
        let ms_per_token = self.kv_kib * 1024.0 * 8.0 / (self.kv_gbit * 1e6);
        Transfer { handover_ms: self.kv_handover.as_secs_f64() * 1e3, ms_per_token }
    }
}
