//! `keyway-loadtest trace synth`: a synthetic workload and its schedule as a trace, for other tools or for `simulate`.
//! The lengths and what is shared are those that `run` would send with the same options. Sends nothing.

use crate::{
    args::trace::SynthArgs,
    error::Error,
    load::Load,
    schedule::{Due, pacer::Pacer},
    trace::convert,
    workload::{Workload, body::Endpoint},
};

/// Writes the trace; gives the number of rows.
pub fn synth(args: &SynthArgs) -> Result<usize, Error> {
    let Load { workload, pacer, .. } = Load::new(&args.workload, &args.schedule, Endpoint::Chat)?;
    let usage = |text: &str| Err(Error::Usage(text.into()));
    if !matches!(workload, Workload::Synthetic(_)) {
        return usage(
            "trace synth is for --workload random and shared-prefix: others depend on answers or files",
        );
    }
    let Pacer::Open(schedule) = pacer else {
        return usage("a trace has times of its own: write --rate or --rate-shape");
    };
    let schedule: Vec<Due> = schedule.into();
    convert::write(&args.output, args.to, &schedule, |row| workload.ask(row))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{oracle::Oracle, trace::Trace, workload::scale::Scale};

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: SynthArgs,
    }

    fn args(line: &str, output: &std::path::Path) -> SynthArgs {
        let line = format!("synth {line} -o {}", output.display());
        Command::try_parse_from(line.split_whitespace()).unwrap().args
    }

    #[test]
    fn the_trace_shares_what_the_workload_shares() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = "--workload shared-prefix --prefix-groups 2 --prefix-len 640 --isl 64 --osl 8 --rate 50 --requests 40";
        assert_eq!(synth(&args(line, file.path())).unwrap(), 40);
        let trace = Trace::load(file.path()).unwrap();
        assert_eq!((trace.block_tokens, trace.rows.len()), (16, 40));
        assert!(trace.rows.iter().all(|row| (row.input_tokens, row.output_tokens) == (704, 8)));
        let scale = Scale::of(1.0, 16);
        let mut oracle = Oracle::new(16, None);
        let reused: u64 =
            trace.rows.iter().enumerate().map(|(i, row)| oracle.ask(scale.blocks(i, row)).unbounded).sum();
        // All but the first request of each group share their prefix.
        assert_eq!(reused, 38 * 640);
    }

    #[test]
    fn what_has_no_times_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for line in ["--concurrency 4 --requests 5", "--workload multi-turn --rate 5 --conversations 3"] {
            assert!(synth(&args(line, file.path())).is_err(), "{line}");
        }
    }
}
