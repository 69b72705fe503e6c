//! `keyway`: parses the command line, then serves or looks at the configuration. No logic of its own.

use std::process::ExitCode;

use clap::Parser;
use keyway::{
    machine::{
        cores::{self, Cores},
        descriptors, heap, log, panics,
    },
    process::{
        args::{Cli, ServeArgs},
        commands, run,
        signals::Signals,
    },
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(command) => commands::run(command),
        None => serve(&cli.serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("keyway: {}", error.to_string().trim_end());
            ExitCode::FAILURE
        }
    }
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn serve(args: &ServeArgs) -> Outcome {
    let config = args.clone().resolve()?;
    let again = args.clone();
    let reader = Box::new(move || again.clone().resolve());
    heap::keep_warm();
    // Until the end: the last lines are written then.
    let _log = log::to_stderr(config.log_format);
    panics::watch();
    descriptors::raise();
    // On one core there is nobody to hand a task to, and handing them over is what the other kind prepares
    // for.
    let (mut runtime, cores) = match cores::count().min(config.limits.max_cores) {
        1 => (tokio::runtime::Builder::new_current_thread(), None),
        count => (tokio::runtime::Builder::new_multi_thread(), Some(Cores::start(count)?)),
    };
    let runtime = runtime.enable_all().build()?;
    runtime.block_on(async { run::run(config, reader, Signals::listen()?, cores).await })?;
    // Streams that outlived the drain time are cut here.
    runtime.shutdown_background();
    Ok(())
}
