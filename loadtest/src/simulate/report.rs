//! What `simulate` puts out, as JSON. Format `keyway-loadtest/simulate/1`; fields may be added.

use serde::Serialize;

use super::outcome::Figures;

/// The whole output.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The format's name.
    pub format: &'static str,
    /// Version of this program.
    pub version: &'static str,
    /// The trace.
    pub trace: String,
    /// Requests of the schedule.
    pub requests: u64,
    /// Requests a second of the schedule.
    pub rate_per_s: f64,
    /// Prompt tokens, all copies.
    pub prompt_tokens: u64,
    /// Tokens to generate, all copies.
    pub output_tokens: u64,
    /// Share of prompt tokens that one unbounded cache would hold.
    pub possible: f64,
    /// The engines' profile.
    pub profile: String,
    /// KV blocks of each.
    pub kv_blocks: u32,
    /// Tokens of each block.
    pub block_tokens: u32,
    /// The seed.
    pub seed: u64,
    /// What had to hold.
    pub slo: String,
    /// Every fleet simulated.
    pub runs: Vec<Figures>,
    /// The answers of `--find-workers`.
    pub found: Vec<Found>,
}

/// How many workers a policy needs.
#[derive(Debug, Serialize)]
pub struct Found {
    /// The policy.
    pub policy: String,
    /// The fewest that meet the SLO; null if not even the most do.
    pub workers: Option<usize>,
    /// The most that were allowed.
    pub workers_max: usize,
}
