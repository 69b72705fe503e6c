//! How a model's experts are spread over processes, as the operator says it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

/// How a model's experts are spread over processes.
#[derive(Debug, Clone)]
pub struct ExpertParallelOptions {
    /// How many processes there are, this one included; 1: no others.
    pub size: usize,
    /// How long a process may take for its part of an exchange.
    pub deadline: Duration,
    /// How often a step that failed is run again, by a group that was started again, before its requests
    /// fail.
    pub retries: usize,
    /// Experts that each process holds beyond its share: further copies of those that serve the most tokens.
    pub redundant_experts: usize,
    /// Instead of processes of this machine: where each rank listens, this process first. The others are
    /// started by the operator, not by this process; `size` counts all of them.
    pub hosts: Vec<SocketAddr>,
    /// Whether each of them runs attention too, for requests of its own: as many engines as processes.
    pub data_parallel_attention: bool,
    /// The program that is a rank, and its first arguments: this program itself, and its subcommand.
    pub rank_command: Vec<OsString>,
}

impl Default for ExpertParallelOptions {
    fn default() -> Self {
        Self {
            size: 1,
            deadline: Duration::from_secs(10),
            retries: 2,
            redundant_experts: 0,
            hosts: Vec::new(),
            data_parallel_attention: false,
            // Not its path: a file that was replaced meanwhile would be another version.
            rank_command: vec!["/proc/self/exe".into(), "expert-rank".into()],
        }
    }
}
