//! The options of `merge`. Decides nothing.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueHint};

/// Shown under `merge --help`.
pub const EXAMPLES: &str = "\
Examples:
  # Two processes at the same time, and their sum
  keyway-loadtest run --url http://10.0.0.1:8080 --rate 500 --requests 30000 -o a &
  keyway-loadtest run --url http://10.0.0.1:8080 --rate 500 --requests 30000 -o b && wait
  keyway-loadtest merge a b -o both

  # From two hosts
  ssh h1 keyway-loadtest run … -o /tmp/out & ssh h2 keyway-loadtest run … -o /tmp/out; wait
  scp -r h1:/tmp/out h1; scp -r h2:/tmp/out h2
  keyway-loadtest merge h1 h2 -o both

Every process is given the same options, and its words are its own unless --text-seed says otherwise. Numbers and rates
add up, means and largest values are exact, percentiles are of all samples together within 0.05 %. The runs must
have gone on at the same time for nine tenths of it, by the clocks of their hosts; else the result is invalid.";

/// Options of `merge`.
#[derive(Debug, ClapArgs)]
pub struct MergeArgs {
    /// run.json of each run, or its folder; two or more
    #[arg(required = true, num_args = 2.., value_name = "RUN", value_hint = ValueHint::AnyPath)]
    pub runs: Vec<PathBuf>,
    /// Folder for the run.json and report.html of all; made if absent
    #[arg(short = 'o', long = "output", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}
