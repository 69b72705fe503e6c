//! What `simulate` puts out, as JSON. Format `keyway-loadtest/simulate/1`; fields may be added.

use serde::Serialize;

use super::outcome::Figures;

/// All that `simulate` finds, in the shape that `--json` prints.
#[derive(Debug, Serialize)]
pub struct SimulationReport {
    /// Name and version of this shape: `keyway-loadtest/simulate/1`.
    pub format: &'static str,
    /// Version of this program.
    pub version: &'static str,
    /// Path of the trace, as given on the command line.
    pub trace: String,
    /// Requests of the schedule.
    pub requests: u64,
    /// Requests a second of the schedule; 0 where all have one time, as sessions that are drawn.
    pub rate_per_s: f64,
    /// Prompt tokens, all copies.
    pub prompt_tokens: u64,
    /// Tokens to generate, all copies.
    pub output_tokens: u64,
    /// Share of prompt tokens that one unbounded cache would hold.
    pub possible: f64,
    /// Name of the engines' profile, such as `h100-8b`.
    pub profile: String,
    /// KV blocks of each.
    pub kv_blocks: u32,
    /// Tokens of each block.
    pub block_tokens: u32,
    /// Seed of the times within bursts, of which gateway a request comes to, and of random choices.
    pub seed: u64,
    /// What had to hold.
    pub slo: String,
    /// The figures of every fleet simulated, in the order of simulation.
    pub runs: Vec<Figures>,
    /// The answers of `--find-workers`.
    pub found: Vec<WorkersNeeded>,
}

/// How many workers a policy needs.
#[derive(Debug, Serialize)]
pub struct WorkersNeeded {
    /// Name of the policy, as on the command line.
    pub policy: String,
    /// The fewest that meet the SLO; null if not even the most do.
    pub workers: Option<usize>,
    /// The most that were allowed.
    pub workers_max: usize,
}
