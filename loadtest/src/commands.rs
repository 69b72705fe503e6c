//! The table of commands. Each line hands over to the module that does the work.

use std::process::ExitCode;

use clap::CommandFactory as _;

use crate::{
    args::{Args, Command},
    calibrate, check, compare,
    error::Error,
    export, merge, mock, progress, run, search,
    settled::settled,
    simulate,
    stdout::print,
    sweep, trace_commands,
};

/// Does what the command line says; gives the exit code.
pub fn dispatch(args: Args) -> Result<ExitCode, Error> {
    match args.command {
        Command::Run(args) => {
            let (args, remarks) = settled(*args)?;
            for remark in &remarks {
                progress::remark(args.output.ui, remark);
            }
            run::run(&args)
        }
        Command::Sweep(args) => sweep::run(&args),
        Command::Search(args) => search::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::Report(args) => export::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Mock(args) => mock::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Trace { command } => trace_commands::run(&command),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "keyway-loadtest", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
    }
}
