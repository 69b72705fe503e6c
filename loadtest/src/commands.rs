//! The table of commands. Each line hands over to the module that does the work.

use std::process::ExitCode;

use clap::CommandFactory as _;

use crate::{
    args::{Args, Command, InfoArgs, TraceCommand},
    error::Error,
    mock, run,
    scale::Scale,
    simulate,
    stdout::print,
    trace::Trace,
    trace_info::Info,
};

/// Does what the command line says; gives the exit code.
pub fn dispatch(args: Args) -> Result<ExitCode, Error> {
    match args.command {
        Command::Run(args) => run::run(&args),
        Command::Mock(args) => mock::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Trace { command: TraceCommand::Info(args) } => trace_info(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "keyway-loadtest", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
    }
}

fn trace_info(args: &InfoArgs) -> Result<ExitCode, Error> {
    let trace = Trace::load(&args.file)?;
    let Some(info) = Info::new(&trace, &args.slice.slice, Scale::new(args.slice.scale_len)) else {
        let end_s = trace.end_ms() as f64 / 1e3;
        return Err(Error::Usage(format!("--slice holds no requests: the trace lasts from 0s to {end_s}s")));
    };
    if args.json {
        // Numbers and names always serialise.
        print(&format!("{}\n", serde_json::to_string_pretty(&info).unwrap_or_default()))
    } else {
        print(&info.render())
    }
}
