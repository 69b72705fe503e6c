//! What must hold of every run, as far as its log and the gateway's metrics say.

use std::{collections::HashMap, time::Duration};

use crate::{
    log::{Event, Id, Seen},
    schedule::{Act, Plan, Schedule},
    worker::{self, token},
    world::{STEP, worker_host},
};

/// How long after its client left a call may go on, besides the messages' latency.
const ABORT_TIME: Duration = Duration::from_millis(50);

type Lines = [(Duration, Event)];

/// Gauges that are 0 when nothing is in flight.
const IN_FLIGHT: [&str; 6] = [
    "keyway_in_flight",
    "keyway_requests_in_flight",
    "keyway_waiting_prefill_tokens",
    "keyway_requests_waiting",
    "keyway_resume_bytes",
    "keyway_scale_backlog_tokens",
];
/// One that has no series before a model was without a worker.
const IN_FLIGHT_IF_EVER: &str = "keyway_scale_waiting_requests";

/// Every in-flight gauge says 0, and there is each.
pub(crate) fn nothing_is_in_flight(metrics: &str) {
    for name in IN_FLIGHT.into_iter().chain([IN_FLIGHT_IF_EVER]) {
        let series = metrics.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        let values: Vec<_> = series.collect();
        assert!(!values.is_empty() || name == IN_FLIGHT_IF_EVER, "{name} is not in the metrics");
        for line in values {
            assert_eq!(line.rsplit(' ').next(), Some("0"), "{line}");
        }
    }
}

/// Each client has what it may have: the answer to its own request as a whole, or an error that it can tell
/// from one.
pub(crate) fn answers_are_whole_or_say_so(schedule: &Schedule, lines: &Lines) {
    for plan in &schedule.plans {
        for (at, event) in lines {
            if let Event::Answered { id, seen } = event
                && *id == plan.id
            {
                let fault = fault_of(plan, seen);
                assert!(fault.is_none(), "request {id} at {at:?}: {}: {seen:?}", fault.unwrap_or_default());
            }
        }
    }
}

fn fault_of(plan: &Plan, seen: &Seen) -> Option<&'static str> {
    let whole: String = (0..plan.tokens).map(|at| token(plan.id, at)).collect();
    let holds = |holds: bool, fault| (!holds).then_some(fault);
    if !seen.nonsense.is_empty() || seen.late > 0 || seen.dones + seen.errors > 1 {
        return Some("something that must not be there");
    }
    match (seen.status, plan.stream) {
        (0, _) => Some("no head"),
        (200, true) if seen.dones == 1 => {
            holds(seen.whole && seen.text == whole, "[DONE], and not the whole text")
        }
        (200, true) if seen.whole && seen.errors == 0 => Some("it ended as if it were whole"),
        (200, true) => holds(
            seen.errors == 1 && whole.starts_with(&seen.text),
            "broken off without one error behind a beginning",
        ),
        // An unstreamed body that breaks off is aborted.
        (200, false) if !seen.whole => None,
        (200, false) => holds(seen.text == whole, "not the text"),
        // A worker's own words, where no other one serves.
        (400 | 401 | 404 | 429 | 500.., _) => {
            holds(seen.whole && seen.errors == 1, "an error that says nothing")
        }
        _ => Some("a status that nobody gave a reason for"),
    }
}

/// Once a worker's answer has begun to pass, its request is begun nowhere else: the last one that began it is
/// the one whose answer it is.
pub(crate) fn nothing_is_begun_behind_an_answer(lines: &Lines) {
    let mut last = HashMap::new();
    for (_, event) in lines {
        if let Event::Begun { worker, id, .. } = event {
            last.insert(*id, *worker);
        }
    }
    for (at, event) in lines {
        if let Event::Answered { id, seen: Seen { status: 200, worker: Some(worker), .. } } = event {
            let begun = last.get(id).map(|worker| format!("{}:{}", worker_host(*worker), worker::PORT));
            assert_eq!(begun.as_deref(), Some(worker.as_str()), "request {id} at {at:?}");
        }
    }
}

/// Every client has a whole answer.
pub(crate) fn all_are_served(lines: &Lines) {
    let mut served = 0;
    for (at, event) in lines {
        if let Event::Answered { id, seen } = event {
            assert_eq!(seen.status, 200, "request {id} at {at:?}: {seen:?}");
            assert!(seen.whole && seen.errors == 0, "request {id} at {at:?}: {seen:?}");
            served += 1;
        }
    }
    let asked = lines.iter().filter(|(_, event)| matches!(event, Event::Asked { .. })).count();
    assert_eq!(served, asked);
}

/// Refusals of each request: how many a client's wait was made longer by.
pub(crate) fn refusals(lines: &Lines) -> usize {
    lines.iter().filter(|(_, event)| matches!(event, Event::Refused { .. })).count()
}

/// Nothing is held against this worker, which does all that it is asked.
pub(crate) fn is_in_good_standing(worker: usize, metrics: &str) {
    let name = format!("worker=\"{}:{}\"", worker_host(worker), worker::PORT);
    for family in
        ["keyway_worker_refusals_total", "keyway_worker_ejections_total", "keyway_worker_misconfigured"]
    {
        for line in metrics.lines().filter(|line| line.starts_with(family) && line.contains(&name)) {
            assert!(line.ends_with(" 0"), "{line}");
        }
    }
}

/// No worker begins a request twice at once, and none more often than there are attempts.
pub(crate) fn begun_at_most(times: usize, lines: &Lines) {
    let mut begun: HashMap<Id, usize> = HashMap::new();
    for (at, event) in lines {
        if let Event::Begun { id, .. } = event {
            let count = begun.entry(*id).or_default();
            *count += 1;
            assert!(*count <= times, "request {id} is begun for the {count}th time at {at:?}");
        }
    }
}

/// Soon after a client has left no worker works for it, and none begins to. Where a link was held or cut
/// meanwhile nobody can know so soon; that it ends at all is asserted elsewhere. Returns how many calls were
/// aborted so.
pub(crate) fn who_left_is_worked_for_no_longer(schedule: &Schedule, lines: &Lines) -> usize {
    let mut aborted = 0;
    for (at, event) in lines {
        let Event::Left { id } = event else { continue };
        let Some(plan) = schedule.plans.iter().find(|plan| plan.id == *id) else { continue };
        let deadline = *at + ABORT_TIME + 2 * schedule.latency + 4 * STEP;
        let calls: Vec<_> = calls(*id, lines).into_iter().filter(|call| call.until >= *at).collect();
        for call in calls {
            if may_be_late(lines, plan.host, call.worker, *at, deadline) {
                continue;
            }
            assert!(
                call.until <= deadline,
                "request {id} of {at:?} is worked on until {:?}: {call:?}",
                call.until
            );
            aborted += usize::from(call.aborted);
        }
    }
    aborted
}

#[derive(Debug)]
struct Call {
    worker: usize,
    aborted: bool,
    /// Its end; for ever if it has none.
    until: Duration,
}

fn calls(id: Id, lines: &Lines) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    for (at, event) in lines {
        let (worker, aborted) = match event {
            Event::Begun { worker, id: begun, .. } if *begun == id => {
                calls.push(Call { worker: *worker, aborted: false, until: Duration::MAX });
                continue;
            }
            Event::Finished { worker, id: ended } if *ended == id => (*worker, false),
            Event::Aborted { worker, id: ended } if *ended == id => (*worker, true),
            _ => continue,
        };
        let open = calls.iter_mut().find(|call| call.worker == worker && call.until == Duration::MAX);
        if let Some(call) = open {
            (call.aborted, call.until) = (aborted, *at);
        }
    }
    calls
}

/// Whether a link between this client and that worker fails at some time of these.
fn may_be_late(lines: &Lines, host: usize, worker: usize, from: Duration, to: Duration) -> bool {
    let (mut failing, mut late) = ([false; 2], false);
    for (at, event) in lines {
        let Event::Did(act) = event else { continue };
        if *at > to {
            break;
        }
        late |= *at >= from && failing != [false; 2];
        match act {
            Act::Partition(of) | Act::Hold(of) if *of == worker => failing[0] = true,
            Act::Repair(of) | Act::Release(of) if *of == worker => failing[0] = false,
            Act::HoldClients(of) if *of == host => failing[1] = true,
            Act::ReleaseClients(of) if *of == host => failing[1] = false,
            _ => {}
        }
        late |= *at >= from && failing != [false; 2];
    }
    late || failing != [false; 2]
}
