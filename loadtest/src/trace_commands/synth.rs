//! `keyway-loadtest trace synth`: a synthetic workload and its schedule, or another trace with its lengths
//! multiplied, as a trace for other tools or for `simulate`. The lengths and what is shared are those that
//! `run` would send with the same options. Sends nothing.

use crate::{
    args::trace::{Multipliers, SynthArgs},
    error::Error,
    load::Load,
    schedule::{Due, pacer::Pacer},
    trace_commands::{convert, multiply::Multiplier},
    workload::{Workload, body::Endpoint},
};

/// Writes the trace; gives the number of rows.
pub fn synth(args: &SynthArgs) -> Result<usize, Error> {
    let Load { workload, pacer, .. } = Load::new(&args.workload, &args.schedule, Endpoint::Chat)?;
    let usage = |text: &str| Err(Error::Usage(text.into()));
    if !matches!(workload, Workload::Synthetic(_) | Workload::Trace { .. }) {
        return usage(
            "trace synth is for --workload random and shared-prefix and for --trace: others depend on answers or files",
        );
    }
    if matches!(workload, Workload::Synthetic(_)) && args.multipliers != Multipliers::default() {
        return usage("multipliers are for --trace: write other --isl, --prefix-len and --prefix-groups");
    }
    let Pacer::Open(schedule) = pacer else {
        return usage("a trace has times of its own: write --rate or --rate-shape");
    };
    let schedule: Vec<Due> = schedule.into();
    if args.multipliers == Multipliers::default() {
        return convert::write(&args.output, args.to, &schedule, |row| workload.ask(row));
    }
    let prompts = schedule.iter().map(|due| workload.ask(due.row));
    let multiplier = Multiplier::new(args.multipliers, args.workload.seed, prompts);
    convert::write(&args.output, args.to, &schedule, |row| multiplier.grow(row, workload.ask(row)))
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
    fn a_trace_grows_where_it_is_shared_and_where_it_is_not() {
        let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/mooncake_slice.jsonl");
        let totals = |options: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let line = format!("--trace {trace} --spread-bursts --to mooncake {options}");
            assert_eq!(synth(&args(&line, file.path())).unwrap(), 798);
            let trace = Trace::load(file.path()).unwrap();
            let (scale, mut oracle) = (Scale::of(1.0, 512), Oracle::new(512, None));
            let rows = trace.rows.iter().enumerate();
            let reused: u64 = rows.map(|(i, row)| oracle.ask(scale.blocks(i, row)).unbounded).sum();
            let asked: u64 = trace.rows.iter().map(|row| u64::from(row.input_tokens)).sum();
            (asked as f64, reused as f64, trace.rows.last().unwrap().timestamp_ms as f64)
        };
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 0.03, "{got} {want}");
        let (asked, reused, end) = totals("");
        // Twice the shared part is twice the reuse, at half the rate.
        let (asked_2, reused_2, end_2) = totals("--prefix-len-multiplier 2 --time-scale 0.5");
        near(reused_2, 2.0 * reused);
        near(end_2, 2.0 * end);
        // What is left of growth is the shared part itself, so that twice the rest makes up the whole.
        let (asked_own, reused_own, _) = totals("--prompt-len-multiplier 2");
        near(reused_own, reused);
        near((asked_2 - asked) + (asked_own - asked), asked);
        // In many trees less is found again, and nothing is longer.
        let (asked_trees, reused_trees, _) = totals("--prefix-copies 20");
        near(asked_trees, asked);
        assert!(reused_trees < 0.7 * reused, "{reused_trees} {reused}");
    }

    #[test]
    fn what_has_no_times_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for line in [
            "--concurrency 4 --requests 5",
            "--workload multi-turn --rate 5 --conversations 3",
            "--rate 5 --requests 5 --prefix-copies 2",
        ] {
            assert!(synth(&args(line, file.path())).is_err(), "{line}");
        }
    }
}
