//! A trace replayed live: when its sessions begin. Each turn behind the first waits for the answers that it
//! goes on from. Starts nothing.

use std::cmp::Reverse;

use super::{Load, is_recorded, process};
use crate::{
    args::run::{ScheduleArgs, WorkloadArgs},
    error::Error,
    schedule::{
        self, ScheduleError,
        flow::{Flow, TurnGraph},
        pacer::{Pacer, Starts},
    },
    workload::{Workload, body::Endpoint, live::Answers},
};

/// The load of a trace whose turns follow each other's answers.
pub(super) fn sessions(
    args: &WorkloadArgs,
    schedule: &ScheduleArgs,
    endpoint: Endpoint,
    workload: Workload,
) -> Result<Load, Error> {
    let usage = |text: &str| Err(Error::Usage(text.into()));
    let Workload::Trace { trace, answers, .. } = &workload else {
        return usage("--live needs --trace FILE: other conversations follow their answers anyway");
    };
    let Some(links) = &trace.links else {
        return usage(
            "this trace does not say which request follows which: leave out --live, or see docs/traces.md \
             for traces that do",
        );
    };
    if *answers == Answers::Live && endpoint == Endpoint::Completions {
        return usage("--answers live needs --endpoint chat, responses or messages");
    }
    if schedule.users.is_some() || schedule.spread_bursts {
        return usage(
            "with --live leave out --users and --spread-bursts: a turn is due once answers have ended",
        );
    }
    if schedule.requests.is_some() {
        return usage("with --live sessions are counted by --conversations, not --requests");
    }
    let speed = schedule.time_scale.unwrap_or(1.0);
    let graph = TurnGraph::new(links, trace.slice(&args.slice.slice), speed);
    let all = graph.firsts().len();
    let count = args.conversations.map_or(all, |count| all.min(count as usize));
    if count == 0 {
        return usage("no session begins in the slice: begin --slice earlier");
    }
    let (starts, count) = if let Some(slots) = schedule.concurrency {
        (Starts::Free((0..slots).map(|_| Reverse(0)).collect()), count)
    } else if is_recorded(schedule) && schedule.rate.is_none() {
        let begin_ms = args.slice.slice.start.as_secs_f64() * 1e3;
        let begin = |&row: &usize| (trace.rows[row].timestamp_ms as f64 - begin_ms) / speed * 1e6;
        (Starts::At(graph.firsts().iter().map(|row| begin(row).round() as u64).collect()), count)
    } else {
        let dues = schedule::draw(&process(schedule, args.seed)?, 0..count)?;
        (Starts::At(dues.iter().map(|due| due.intended_ns).collect()), dues.len())
    };
    let until_ns = schedule.duration.map_or(u64::MAX, |duration| duration.as_nanos() as u64);
    let flow = Flow::Trace(graph);
    let requests = schedule.duration.is_none().then(|| flow.turns_of(count));
    let pacer = Pacer::sessions(flow, starts, count, until_ns);
    if pacer.peek().is_none() {
        return Err(ScheduleError::TooShort.into());
    }
    Ok(Load { workload, pacer, requests })
}
