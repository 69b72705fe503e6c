//! What `keyway-loadtest trace …` does: each command's file does the work, this one reads, prints and writes.

pub mod convert;
pub mod info;
mod multiply;
pub mod oracle;
pub mod synth;
pub mod validate;

use std::process::ExitCode;

use serde::Serialize;

use self::{info::Info, oracle::Reuse};
use crate::{
    args::{
        SliceArgs,
        trace::{ConvertArgs, InfoArgs, OracleArgs, Target, TraceCommand, ValidateArgs},
    },
    error::{EXIT_USAGE, Error},
    stdout::print,
    trace::Trace,
    workload::{scale::Scale, trace_ask},
};

/// Does what the command line says.
pub fn run(command: &TraceCommand) -> Result<ExitCode, Error> {
    match command {
        TraceCommand::Info(args) => info(args),
        TraceCommand::Validate(args) => validate(args),
        TraceCommand::Convert(args) | TraceCommand::Slice(args) => convert(args),
        TraceCommand::Synth(args) => written(synth::synth(args)?, &args.output),
        TraceCommand::Oracle(args) => oracle(args),
    }
}

fn info(args: &InfoArgs) -> Result<ExitCode, Error> {
    let trace = Trace::load(&args.file)?;
    let info = Info::new(&trace, &args.slice.slice, scale(&args.slice, &trace));
    let info = info.ok_or_else(|| empty(&args.slice, &trace))?;
    if args.json { json(&info) } else { print(&info.render()) }
}

fn validate(args: &ValidateArgs) -> Result<ExitCode, Error> {
    let findings = validate::validate(&args.file)?;
    if args.json {
        json(&findings)?
    } else {
        print(&findings.render())?
    };
    Ok(if findings.is_valid() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_USAGE) })
}

fn convert(args: &ConvertArgs) -> Result<ExitCode, Error> {
    let trace = Trace::load(&args.file)?;
    let rows = trace.slice(&args.slice.slice);
    if rows.is_empty() {
        return Err(empty(&args.slice, &trace));
    }
    let count = args.requests.map_or(rows.len(), |n| rows.len().min(n as usize));
    let schedule = convert::own_times(&trace, rows.start..rows.start + count);
    let scale = scale(&args.slice, &trace);
    let target = args.to.unwrap_or_else(|| Target::of(trace.block_tokens));
    let rows = convert::write(&args.output, target, &schedule, |row| trace_ask(&trace, scale, row))?;
    written(rows, &args.output)
}

fn oracle(args: &OracleArgs) -> Result<ExitCode, Error> {
    let trace = Trace::load(&args.file)?;
    if args.blocks.contains(&0) {
        return Err(Error::Usage("--blocks: a cache has at least one block".into()));
    }
    let reuse = Reuse::new(&trace, &args.slice.slice, scale(&args.slice, &trace), &args.blocks);
    let reuse = reuse.ok_or_else(|| empty(&args.slice, &trace))?;
    if args.json { json(&reuse) } else { print(&reuse.render()) }
}

fn scale(slice: &SliceArgs, trace: &Trace) -> Scale {
    Scale::of(slice.scale_len, trace.block_tokens)
}

fn empty(slice: &SliceArgs, trace: &Trace) -> Error {
    let end_s = trace.end_ms() as f64 / 1e3;
    Error::Usage(format!("--slice {} holds no requests: the trace lasts from 0s to {end_s}s", slice.slice))
}

fn written(rows: usize, path: &std::path::Path) -> Result<ExitCode, Error> {
    print(&format!("{rows} rows written to {}\n", path.display()))
}

fn json(value: &impl Serialize) -> Result<ExitCode, Error> {
    // Numbers and names always serialise.
    print(&format!("{}\n", serde_json::to_string_pretty(value).unwrap_or_default()))
}
