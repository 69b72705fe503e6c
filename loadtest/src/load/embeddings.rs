//! What the options of a measurement mean where requests ask for embeddings: which of them have no sense
//! there.

use crate::{
    args::run::{RunArgs, WorkloadKind},
    error::Error,
    load::kind,
    slo::Metric,
};

/// Refuses what embeddings do not have, and several texts where they cannot be made.
pub fn check(args: &RunArgs) -> Result<(), Error> {
    let usage = |text: &str| Err(Error::Usage(text.into()));
    let texts = args.workload.texts;
    if args.server.endpoint().generates() {
        return if texts > 1 { usage("--texts is for --endpoint embeddings") } else { Ok(()) };
    }
    let kind = kind(&args.workload);
    if texts > 1 && !matches!(kind, WorkloadKind::Random | WorkloadKind::SharedPrefix) {
        return usage("--texts is for --workload random and shared-prefix: others have one text a request");
    }
    if args.schedule.live || kind == WorkloadKind::MultiTurn {
        return usage("embeddings follow from no answer: leave out --live, and write another --workload");
    }
    let bounds = args.output.slo.iter().flat_map(|slo| &slo.bounds);
    match bounds.map(|bound| bound.metric).find(|metric| *metric != Metric::E2e) {
        Some(_) => {
            usage("embeddings have one time, to the answer's end: write bounds on e2e, such as e2e.p99<50ms")
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};

    fn checked(line: &str) -> Result<(), String> {
        let line = format!("keyway-loadtest run --url http://h {line}");
        let Command::Run(args) = Args::try_parse_from(line.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        check(&args).map_err(|error| error.to_string())
    }

    #[test]
    fn what_embeddings_do_not_have_is_refused() {
        for (line, want) in [
            ("--texts 2", "is for --endpoint embeddings"),
            ("--endpoint embeddings --slo ttft<5ms", "bounds on e2e"),
            ("--endpoint embeddings --slo e2e<5ms,tpot.p90<5ms", "bounds on e2e"),
            ("--endpoint embeddings --workload multi-turn", "write another --workload"),
            ("--endpoint embeddings --trace t --live", "leave out --live"),
            ("--endpoint embeddings --texts 2 --workload custom --file f", "one text a request"),
            ("--endpoint embeddings --texts 2 --trace t", "one text a request"),
        ] {
            let error = checked(line).unwrap_err();
            assert!(error.contains(want), "{line}: {error}");
        }
        for line in [
            "--endpoint embeddings",
            "--endpoint /v1/embeddings --texts 32 --slo e2e.p99<5ms,e2e<9ms",
            "--backend openai-embeddings --random-batch-size 8 --workload shared-prefix",
            "--endpoint-type embeddings --trace t --prompt-batch-size 1",
        ] {
            assert_eq!(checked(line), Ok(()), "{line}");
        }
    }
}
