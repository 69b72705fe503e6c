//! The command `keyway-loadtest`: arguments in, exit code out. Every command's work is in its own module.

use std::process::ExitCode;

use clap::Parser as _;
use keyway_loadtest::{args::Args, commands};

fn main() -> ExitCode {
    match commands::dispatch(Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("keyway-loadtest: {error}");
            error.exit_code()
        }
    }
}
