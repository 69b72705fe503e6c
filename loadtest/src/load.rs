//! What the options of a measurement mean together: a workload and a pacer. Starts nothing.

pub mod embeddings;
mod live;

use std::{cmp::Reverse, path::Path};

use crate::{
    args::run::{ScheduleArgs, WorkloadArgs, WorkloadKind},
    error::Error,
    schedule::{
        self, Pace, Process, Timing,
        arrivals::{Arrival, ArrivalError},
        flow::Flow,
        pacer::{Extent, Pacer, Starts},
        rate::RateShape,
    },
    trace::Trace,
    workload::{
        Workload,
        body::Endpoint,
        conversation::{Conversations, Turns},
        dist::{Dist, Tokens},
        scale::Scale,
        synthetic::{PrefixTree, Synthetic},
        texts::Texts,
    },
};

/// Tokens of a shared prefix, if `--prefix-len` says nothing else.
pub const PREFIX_LEN: u32 = 2048;

/// What to send, and when.
#[derive(Debug)]
pub struct Load {
    /// Makes each request from its number: a row of a trace, text of a file, or a draw.
    pub workload: Workload,
    /// Says which request is due next, and when.
    pub pacer: Pacer,
    /// How many there will be, if that is known.
    pub requests: Option<u64>,
}

impl Load {
    /// What the options ask for.
    pub fn new(args: &WorkloadArgs, schedule: &ScheduleArgs, endpoint: Endpoint) -> Result<Self, Error> {
        let rows_of = |trace: &Trace| trace.slice(&args.slice.slice);
        let workload = workload(args)?;
        let own_pace = schedule.rate.is_some()
            || schedule.rate_shape.is_some()
            || schedule.concurrency.is_some()
            || schedule.users.is_some();
        if schedule.live {
            return live::sessions(args, schedule, endpoint, workload);
        }
        if schedule.time_scale.is_some() && own_pace {
            return Err(Error::Usage(
                "--time-scale is for a trace's own times: leave out --rate, --concurrency and --users, or add --live"
                    .into(),
            ));
        }
        if workload.is_conversational() {
            return sessions(args, schedule, endpoint, workload);
        }
        if args.conversations.is_some() || args.turns.is_some() {
            return Err(Error::Usage(
                "--turns and --conversations are for workloads of conversations".into(),
            ));
        }
        let rows = match &workload {
            Workload::Trace { trace, .. } => rows_of(trace),
            _ => 0..usize::MAX >> 25,
        };
        let count = schedule.requests.map_or(rows.len(), |n| rows.len().min(n as usize));
        let rows = rows.start..rows.start + count;
        let until_ns = schedule.duration.map_or(u64::MAX, |d| d.as_nanos() as u64);
        let extent = Extent { first: rows.start, rows: count, until_ns };
        let endless = schedule.duration.is_none() && schedule.requests.is_none();
        let is_trace = matches!(workload, Workload::Trace { .. });
        if endless && !is_trace && !schedule.rate_shape.as_ref().is_some_and(RateShape::ends) {
            return Err(Error::Usage("say how long: --requests N or --duration TIME".into()));
        }
        let known = schedule.duration.is_none().then_some(count as u64);
        if let Some(slots) = schedule.concurrency {
            return Ok(Self { workload, pacer: Pacer::closed(slots as usize, extent), requests: known });
        }
        if let (Some(users), Some(rate)) = (schedule.users, schedule.user_rate) {
            let gap_ns = (f64::from(users) / rate * 1e9) as u64;
            let pacer = Pacer::users(users as usize, gap_ns, args.seed, extent);
            return Ok(Self { workload, pacer, requests: known });
        }
        let dues = match &workload {
            Workload::Trace { trace, .. } if is_recorded(schedule) => {
                schedule::plan(trace, &timing(args, schedule))?
            }
            _ => schedule::draw(&process(schedule, args.seed)?, rows)?,
        };
        Ok(Self { workload, requests: Some(dues.len() as u64), pacer: Pacer::Open(dues.into()) })
    }
}

/// The load of a workload of conversations.
fn sessions(
    args: &WorkloadArgs,
    schedule: &ScheduleArgs,
    endpoint: Endpoint,
    workload: Workload,
) -> Result<Load, Error> {
    let seed = args.seed;
    let usage = |text: &str| Err(Error::Usage(text.into()));
    let is_plain = matches!(&workload, Workload::Texts { texts, .. } if texts.is_plain());
    if matches!(endpoint, Endpoint::Completions | Endpoint::Embeddings) && !is_plain {
        return usage("conversations and messages need --endpoint chat, responses or messages");
    }
    if schedule.users.is_some() && args.think_time.to_string() != "0s" {
        return usage("users have an even pace of their own: leave out --think-time, or write --concurrency");
    }
    if schedule.requests.is_some()
        && !matches!(&workload, Workload::Texts { texts, .. } if texts.is_single_turn())
    {
        return usage("conversations are counted by --conversations, not --requests");
    }
    let listed = match &workload {
        Workload::Texts { texts, .. } => Some(texts.turns(args.turns)),
        _ => None,
    };
    let all = listed.as_ref().map_or(usize::MAX >> 35, Vec::len);
    let asked = args.conversations.or(schedule.requests);
    if asked.is_none() && schedule.duration.is_none() && listed.is_none() {
        return usage("say how long: --conversations N or --duration TIME");
    }
    let count = asked.map_or(all, |n| all.min(n as usize));
    let default_turns = || args.turns.unwrap_or(Tokens(Dist::Fixed(5.0)));
    let turns = listed.map_or_else(|| Turns::Drawn(default_turns()), |list| Turns::Listed(list.into()));
    let conversations = Conversations { seed, turns, think: args.think_time };
    let until_ns = schedule.duration.map_or(u64::MAX, |d| d.as_nanos() as u64);
    let flow = Flow::Conversations(conversations.clone());
    let requests = |count: usize| schedule.duration.is_none().then(|| flow.turns_of(count));
    if let (Some(users), Some(rate)) = (schedule.users, schedule.user_rate) {
        let (requests, gap_ns) = (requests(count), (f64::from(users) / rate * 1e9) as u64);
        let pacer = Pacer::talkers(conversations, users as usize, gap_ns, count, until_ns);
        return Ok(Load { workload, pacer, requests });
    }
    let (starts, count) = if let Some(slots) = schedule.concurrency {
        (Starts::Free((0..slots).map(|_| Reverse(0)).collect()), count)
    } else {
        let dues = schedule::draw(&process(schedule, seed)?, 0..count)?;
        (Starts::At(dues.iter().map(|due| due.intended_ns).collect()), dues.len())
    };
    let requests = requests(count);
    Ok(Load { workload, pacer: Pacer::sessions(flow, starts, count, until_ns), requests })
}

fn workload(args: &WorkloadArgs) -> Result<Workload, Error> {
    let kind = kind(args);
    let is_file = matches!(kind, WorkloadKind::Sharegpt | WorkloadKind::Custom);
    let usage = |text: &str| Err(Error::Usage(text.into()));
    match (&args.trace, &args.file) {
        (None, _) if kind == WorkloadKind::Trace => return usage("--workload trace needs --trace FILE"),
        (Some(_), _) if kind != WorkloadKind::Trace => return usage("--trace is for --workload trace"),
        (_, None) if is_file => return usage("this workload needs --file FILE"),
        (_, Some(_)) if !is_file => return usage("--file is for --workload sharegpt or custom"),
        _ => {}
    }
    if let Some(path) = &args.trace {
        return replay(args, path);
    }
    if args.slice.scale_len != 1.0 || args.slice.slice != crate::units::Span::default() {
        return usage("--slice and --scale-len are for traces; write other --isl and --osl");
    }
    if let Some(path) = &args.file {
        let texts = if kind == WorkloadKind::Sharegpt { Texts::sharegpt(path)? } else { Texts::lines(path)? };
        return Ok(Workload::Texts { texts, output: args.osl(), seed: args.seed, bytes_per_token: 1.0 });
    }
    let prefix_len = match kind {
        WorkloadKind::SharedPrefix => Some(args.prefix_len.unwrap_or(PREFIX_LEN)),
        WorkloadKind::MultiTurn => args.prefix_len,
        _ => None,
    };
    let tree = |tokens| PrefixTree::new(args.prefix_groups, tokens, args.prefix_depth, args.zipf);
    let prefix = prefix_len.map(tree).transpose()?;
    let synthetic = Synthetic { seed: args.seed, input: args.isl(), output: args.osl(), prefix };
    Ok(match kind {
        WorkloadKind::MultiTurn => Workload::MultiTurn(synthetic),
        _ => Workload::Synthetic(synthetic),
    })
}

fn replay(args: &WorkloadArgs, path: &Path) -> Result<Workload, Error> {
    let trace = Trace::load(path)?;
    if trace.slice(&args.slice.slice).is_empty() {
        let end_s = trace.end_ms() as f64 / 1e3;
        let slice = args.slice.slice;
        let text = format!("--slice {slice} holds no requests: the trace lasts from 0s to {end_s}s");
        return Err(Error::Usage(text));
    }
    let scale = Scale::of(args.slice.scale_len, trace.block_tokens);
    Ok(Workload::Trace { trace, scale, answers: args.answers })
}

/// The workload that `args` name or imply.
pub fn kind(args: &WorkloadArgs) -> WorkloadKind {
    let implied = if args.trace.is_some() { WorkloadKind::Trace } else { WorkloadKind::Random };
    args.workload.unwrap_or(implied)
}

/// Whether a trace's own timestamps decide.
pub fn is_recorded(args: &ScheduleArgs) -> bool {
    args.arrival.is_none() && args.burstiness.is_none() && args.rate_shape.is_none()
}

fn timing(args: &WorkloadArgs, schedule: &ScheduleArgs) -> Timing {
    Timing {
        slice: args.slice.slice,
        pace: schedule.rate.map_or(Pace::TimeScale(schedule.time_scale.unwrap_or(1.0)), Pace::Rate),
        spread_bursts: schedule.spread_bursts,
        seed: args.seed,
        duration: schedule.duration,
        requests: schedule.requests.map(|n| n as usize),
    }
}

fn process(schedule: &ScheduleArgs, seed: u64) -> Result<Process, ArrivalError> {
    let shape = match (&schedule.rate_shape, schedule.rate) {
        (Some(shape), _) => shape.clone(),
        (None, Some(rate)) if rate.is_finite() => RateShape::constant(rate),
        (None, Some(_)) => return Err(ArrivalError::Unbounded),
        (None, None) => return Err(ArrivalError::NoRate),
    };
    let arrival = arrival(schedule)?;
    let burstiness = schedule.burstiness.unwrap_or(1.0);
    Ok(Process { shape, arrival, burstiness, seed, duration: schedule.duration })
}

/// How arrivals vary, unless a trace's own timestamps decide.
pub fn arrival(args: &ScheduleArgs) -> Result<Arrival, ArrivalError> {
    match (args.arrival, args.burstiness) {
        (None, None) => Ok(Arrival::Poisson),
        (None | Some(Arrival::Gamma), Some(_)) => Ok(Arrival::Gamma),
        (Some(Arrival::Gamma), None) => Err(ArrivalError::NoBurstiness),
        (Some(arrival), None) => Ok(arrival),
        (Some(_), Some(_)) => Err(ArrivalError::NotGamma),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command, run::RunArgs};

    fn args(line: &str) -> RunArgs {
        let line = format!("keyway-loadtest run --url http://h {line}");
        let Command::Run(args) = Args::try_parse_from(line.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        *args
    }

    fn load(line: &str) -> Result<Load, Error> {
        let args = args(line);
        Load::new(&args.workload, &args.schedule, args.server.endpoint())
    }

    fn trace() -> String {
        concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/mooncake_slice.jsonl").into()
    }

    #[test]
    fn what_is_missing_is_said() {
        for (line, want) in [
            ("--rate 5", "--requests N or --duration"),
            ("--requests 5", "say how fast"),
            ("--workload trace --rate 5", "needs --trace"),
            ("--arrival gamma --rate 5 --requests 5", "needs --burstiness"),
            ("--arrival constant --burstiness 2 --rate 5 --requests 5", "is for --arrival gamma"),
            ("--scale-len 0.5 --rate 5 --requests 5", "are for traces"),
            (&format!("--workload random --trace {} --rate 5", trace()), "--trace is for"),
            (&format!("--trace {} --live --requests 5", trace()), "are counted by --conversations"),
            (&format!("--trace {} --live --users 2 --user-rate 1", trace()), "leave out --users"),
            (&format!("--trace {} --live --spread-bursts", trace()), "and --spread-bursts"),
            (&format!("--trace {} --live --duration 0s", trace()), "before the first request"),
            (
                &format!("--trace {} --live --answers live --endpoint completions", trace()),
                "--answers live needs --endpoint chat",
            ),
            ("--workload shared-prefix --prefix-groups 0 --rate 5 --requests 5", "--prefix-groups must be"),
            ("--rate 5 --duration 1ms", "before the first request"),
            ("--workload multi-turn --rate 5", "--conversations N or --duration"),
            ("--workload multi-turn --rate 5 --requests 5", "are counted by --conversations"),
            ("--workload multi-turn --rate 5 --conversations 5 --endpoint completions", "--endpoint chat"),
            (
                "--workload multi-turn --users 2 --user-rate 5 --conversations 5 --think-time 2s",
                "leave out --think-time",
            ),
            ("--concurrency 2 --time-scale 3 --requests 5", "or add --live"),
            ("--turns 3 --rate 5 --requests 5", "are for workloads of conversations"),
            ("--workload sharegpt --rate 5", "needs --file"),
            ("--file x --rate 5 --requests 5", "--file is for"),
            ("--workload custom --file /nonexistent --rate 5", "cannot read"),
        ] {
            let error = load(line).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(want), "{line}: {error}");
        }
    }

    #[test]
    fn how_many_requests_there_will_be() {
        let trace = trace();
        for (line, want) in [
            ("--rate 5 --requests 7".to_owned(), Some(7)),
            ("--rate 5 --arrival constant --duration 2s".to_owned(), Some(10)),
            ("--rate-shape 5@2s --arrival constant".to_owned(), Some(10)),
            ("--workload multi-turn --turns 3 --rate 5 --conversations 4".to_owned(), Some(12)),
            ("--workload multi-turn --concurrency 5 --duration 4s".to_owned(), None),
            (
                "--workload multi-turn --turns 3 --users 2 --user-rate 4 --conversations 4".to_owned(),
                Some(12),
            ),
            ("--concurrency 3 --requests 7".to_owned(), Some(7)),
            ("--concurrency 3 --duration 2s".to_owned(), None),
            ("--users 3 --user-rate 1 --requests 7".to_owned(), Some(7)),
            (format!("--trace {trace}"), Some(798)),
            (format!("--trace {trace} --concurrency 4"), Some(798)),
            (format!("--trace {trace} --live"), Some(798)),
            (format!("--trace {trace} --live --duration 9s"), None),
            (format!("--trace {trace} --live --concurrency 4 --time-scale 3"), Some(798)),
            (format!("--trace {trace} --live --rate 9 --arrival constant --conversations 683"), Some(798)),
            (format!("--trace {trace} --rate 2 --arrival poisson --requests 10"), Some(10)),
        ] {
            assert_eq!(load(&line).unwrap().requests, want, "{line}");
        }
    }

    #[test]
    fn a_trace_that_does_not_say_what_follows_what_is_not_replayed_live() {
        use std::io::Write as _;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10").unwrap();
        let error = load(&format!("--trace {} --live", file.path().display())).unwrap_err().to_string();
        assert!(error.contains("leave out --live"), "{error}");
    }

    #[test]
    fn a_slice_in_a_closed_loop_begins_at_its_own_first_row() {
        let load = load(&format!("--trace {} --slice 60s.. --concurrency 2", trace())).unwrap();
        let Workload::Trace { trace, .. } = &load.workload else { unreachable!() };
        let row = load.pacer.peek().unwrap().row;
        assert!(
            row > 0 && trace.rows[row].timestamp_ms >= 60_000 && trace.rows[row - 1].timestamp_ms < 60_000
        );
    }
}
