//! What a command line means that leaves the load open, or says it as other tools do. What is assumed is
//! said.

use std::time::Duration;

use crate::{
    args::run::{Overload, RunArgs, WorkloadKind},
    error::Error,
    limits,
    load::{is_recorded, kind},
    schedule::rate::RateShape,
    workload::dist::{Dist, Tokens},
};

/// The options with nothing left open, and what there is to say about that, a line each.
///
/// # Errors
/// For `--rate inf` without a number of requests.
pub fn settled(mut args: RunArgs) -> Result<(RunArgs, Vec<String>), Error> {
    let mut remarks = Vec::new();
    remarks.extend(args.server.other.remark());
    remarks.extend(all_at_once(&mut args)?);
    remarks.extend(first_turns(&mut args));
    remarks.extend(default_load(&mut args));
    remarks.extend(default_length(&mut args));
    Ok((args, remarks))
}

/// `--rate inf`, as vLLM's client has it: every request at once, or as many as may be under way.
fn all_at_once(args: &mut RunArgs) -> Result<Option<String>, Error> {
    let schedule = &mut args.schedule;
    if schedule.rate != Some(f64::INFINITY) {
        return Ok(None);
    }
    let count = schedule.max_concurrency.or(schedule.requests).or(args.workload.conversations);
    let Some(count) = count.map(|count| count.min(limits::USERS_MAX as u32)) else {
        return Err(Error::Usage(
            "--rate inf sends all at once: say how many with --requests N, or how many at a time with \
             --max-concurrency N"
                .into(),
        ));
    };
    (schedule.rate, schedule.concurrency, schedule.max_concurrency) = (None, Some(count), None);
    (schedule.arrival, schedule.burstiness, schedule.overload) = (None, None, Overload::Queue);
    Ok(Some(format!("--rate inf: {count} requests at a time, as --concurrency {count}")))
}

/// `--requests` of ShareGPT's conversations, as vLLM's client counts them: first turns.
fn first_turns(args: &mut RunArgs) -> Option<String> {
    let workload = &mut args.workload;
    let is_counted = workload.workload == Some(WorkloadKind::Sharegpt)
        && args.schedule.requests.is_some()
        && workload.turns.is_none()
        && workload.conversations.is_none();
    is_counted.then(|| {
        workload.turns = Some(Tokens(Dist::Fixed(1.0)));
        "--requests of conversations: the first turn of each, as --turns 1 (whole ones: --conversations N)"
            .into()
    })
}

fn default_load(args: &mut RunArgs) -> Option<String> {
    let schedule = &mut args.schedule;
    let is_open = schedule.rate.is_none()
        && schedule.rate_shape.is_none()
        && schedule.concurrency.is_none()
        && schedule.users.is_none()
        && is_recorded(schedule)
        && kind(&args.workload) != WorkloadKind::Trace;
    is_open.then(|| {
        // As vLLM's client has it: as many as may be under way.
        let count = schedule.max_concurrency.take().unwrap_or(limits::DEFAULT_CONCURRENCY);
        (schedule.concurrency, schedule.overload) = (Some(count), Overload::Queue);
        format!("no load is given: {count} requests at a time, as --concurrency {count}")
    })
}

fn default_length(args: &mut RunArgs) -> Option<String> {
    let (schedule, workload) = (&mut args.schedule, &args.workload);
    let is_open = schedule.requests.is_none()
        && schedule.duration.is_none()
        && workload.conversations.is_none()
        && workload.file.is_none()
        && kind(workload) != WorkloadKind::Trace
        && !schedule.rate_shape.as_ref().is_some_and(RateShape::ends);
    is_open.then(|| {
        let seconds = limits::DEFAULT_DURATION_S;
        schedule.duration = Some(Duration::from_secs(seconds));
        format!("no length is given: {seconds} seconds, as --duration {seconds}s")
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};

    fn of(line: &str) -> Result<(RunArgs, Vec<String>), Error> {
        let line = format!("keyway-loadtest run --url http://h {line}");
        let Command::Run(args) = Args::try_parse_from(line.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        settled(*args)
    }

    /// Concurrency, rate and seconds of a line, and how many remarks it gets.
    fn load(line: &str) -> (Option<u32>, Option<f64>, Option<u64>, usize) {
        let (args, remarks) = of(line).unwrap();
        let schedule = args.schedule;
        (schedule.concurrency, schedule.rate, schedule.duration.map(|d| d.as_secs()), remarks.len())
    }

    #[test]
    fn what_is_left_open_is_chosen_and_said() {
        assert_eq!(load(""), (Some(8), None, Some(30), 2));
        assert_eq!(load("--rate 3"), (None, Some(3.0), Some(30), 1));
        assert_eq!(load("--requests 5"), (Some(8), None, None, 1));
        for count in [2, 64] {
            let (args, remarks) = of(&format!("--max-concurrency {count} --requests 500")).unwrap();
            assert_eq!((args.schedule.concurrency, args.schedule.max_concurrency), (Some(count), None));
            assert!(remarks[0].contains(&format!("--concurrency {count}")), "{remarks:?}");
        }
        assert_eq!(load("--workload custom --file f"), (Some(8), None, None, 1));
        for whole in
            ["--rate 3 --requests 5", "--trace t", "--rate-shape 1@5s", "--concurrency 2 --duration 1s"]
        {
            assert!(of(whole).unwrap().1.is_empty(), "{whole}");
        }
        assert!(of("--trace t --arrival poisson").unwrap().1.is_empty());
    }

    #[test]
    fn an_endless_rate_is_all_at_once_or_as_many_as_may_be_under_way() {
        assert_eq!(load("--request-rate inf --num-prompts 1000"), (Some(1000), None, None, 1));
        assert_eq!(load("--request-rate inf --num-prompts 9 --max-concurrency 4"), (Some(4), None, None, 1));
        assert_eq!(load("--rate inf --requests 100000 --burstiness 1").0, Some(limits::USERS_MAX as u32));
        assert!(of("--rate inf").unwrap_err().to_string().contains("--requests N"));
    }

    #[test]
    fn prompts_of_conversations_are_first_turns() {
        let line = "--dataset-name sharegpt --dataset-path f --num-prompts 20 --request-rate 2";
        let (args, remarks) = of(line).unwrap();
        assert_eq!(args.workload.turns.unwrap().to_string(), "1");
        assert!(remarks.concat().contains("--turns 1"), "{remarks:?}");
        let (args, remarks) = of(&format!("{line} --turns 3")).unwrap();
        assert_eq!((args.workload.turns.unwrap().to_string(), remarks.len()), ("3".into(), 0));
    }

    #[test]
    fn a_tokenizer_is_remarked_upon_and_not_needed() {
        let (_, remarks) = of("--tokenizer DIR --rate 2 --requests 4").unwrap();
        assert!(remarks[0].contains("--tokenizer is not needed"), "{remarks:?}");
    }
}
