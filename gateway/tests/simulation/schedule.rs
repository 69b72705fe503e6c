//! What a seed means: who asks for what and when it leaves, and what is done to workers and links in between.
//! Everything that is done is undone before the end. How it is done is `world.rs`' business.

use std::time::Duration;

use fastrand::Rng;

use crate::log::Id;

/// When clients begin: workers have been probed by then.
pub(crate) const BEGIN: Duration = Duration::from_secs(1);
/// How long clients come, and workers and links fail.
const SPAN_MS: u64 = 6_000;
/// Requests of a run, all told.
const REQUESTS: Id = 40;
/// Longest fault.
const FAULT_MAX_MS: u64 = 2_500;

/// When who left is there again: whoever waited for it has given up by then.
const GONE_MS: u64 = 40_000;

/// Workers of a run.
pub(crate) const WORKERS: usize = 3;
/// Hosts with clients.
pub(crate) const CLIENTS: usize = 2;

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Which.
    pub(crate) id: Id,
    /// The host that it comes from.
    pub(crate) host: usize,
    /// When it is sent, after the run's beginning.
    pub(crate) at: Duration,
    /// Whether its client speaks HTTP/2.
    pub(crate) http2: bool,
    /// Whether its answer is to be streamed.
    pub(crate) stream: bool,
    /// Tokens of its answer.
    pub(crate) tokens: u32,
    /// Time that each takes.
    pub(crate) pace: Duration,
    /// Its client leaves so long after it asked, if there is no answer by then.
    pub(crate) patience: Option<Duration>,
}

/// How a worker behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mood {
    /// Well.
    #[default]
    Well,
    /// It takes requests and says nothing, nor anything more.
    Hung,
    /// It answers 500.
    Failing,
    /// It breaks off each stream after so many tokens, and closes the connection.
    Cutting(u32),
    /// It was told to end: its port is closed, and what it has begun gets neither data nor end.
    Leaving,
    /// It ends each stream after so many tokens as if that were all, with these last words.
    Ending(u32, &'static str),
    /// It answers everything at once with this status, and with so many seconds in `Retry-After`.
    Refusing(u16, Option<u64>),
    /// It closes connections that have answered as it likes: while they are idle, as a request comes, or when
    /// it has read one.
    Fickle,
}

/// Last words of a stream that has not come to its end: none, half an event, an output that was aborted,
/// errors in several words.
const LAST_WORDS: [&str; 8] = [
    "",
    "data: {\"id\":\"c\",\"cho",
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n",
    "data: {\"error\":{\"message\":\"engine dead\",\"code\":500}}\n\ndata: [DONE]\n\n",
    "data:{\"error\":\"engine dead\"}\r\n\r\n",
    "data: {\"object\":\"error\",\"message\":\"engine dead\"}\n\n",
    "event: error\ndata: {\"message\":\"engine dead\"}\n\n",
    ": bye\n\n",
];

/// Something that is done to the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// A worker's process is killed.
    Crash(usize),
    /// It is started again.
    Restart(usize),
    /// A worker behaves so from now on.
    Mood(usize, Mood),
    /// A worker answers `/health` only after 30 s, or at once again.
    SlowHealth(usize, bool),
    /// What is sent between the gateway and a worker is lost, and what is under way.
    Partition(usize),
    /// No longer.
    Repair(usize),
    /// What is sent between the gateway and a worker waits.
    Hold(usize),
    /// It arrives.
    Release(usize),
    /// What is sent between the gateway and a host of clients waits. It is never lost: this network sends
    /// nothing again, so a lost end of a connection would be lost for ever, which TCP does not do.
    HoldClients(usize),
    /// It arrives.
    ReleaseClients(usize),
}

/// A run.
#[derive(Debug, Clone)]
pub(crate) struct Schedule {
    /// Longest latency of a message.
    pub(crate) latency: Duration,
    /// Requests.
    pub(crate) plans: Vec<Plan>,
    /// What is done, in order.
    pub(crate) acts: Vec<(Duration, Act)>,
}

impl Schedule {
    /// One in which one worker of each seed is well, and the others refuse everything at times; no client
    /// leaves. Which one it is.
    pub(crate) fn refusals(seed: u64) -> (Self, usize) {
        Self::one_is_well(seed, refusing)
    }

    /// The same with others that end their streams before their time.
    pub(crate) fn endings(seed: u64) -> (Self, usize) {
        Self::one_is_well(seed, ending)
    }

    /// One in which the others are told to end at some time, and are there again when all is over; no client
    /// leaves.
    pub(crate) fn leavings(seed: u64) -> Self {
        let (schedule, good) = Self::one_is_well(seed, |_| Mood::Well);
        let rng = &mut Rng::with_seed(seed);
        let others: Vec<_> = (0..WORKERS).filter(|worker| *worker != good).collect();
        let at = |worker, time, mood| (BEGIN + Duration::from_millis(time), Act::Mood(worker, mood));
        let mut acts: Vec<_> =
            others.iter().map(|worker| at(*worker, rng.u64(..SPAN_MS), Mood::Leaving)).collect();
        acts.sort_by_key(|(at, _)| *at);
        acts.extend(others.iter().map(|worker| at(*worker, GONE_MS, Mood::Well)));
        Self { acts, ..schedule }
    }

    fn one_is_well(seed: u64, mood: fn(&mut Rng) -> Mood) -> (Self, usize) {
        let rng = &mut Rng::with_seed(seed);
        let (latency, good) = (Duration::from_millis(rng.u64(2..20)), rng.usize(..WORKERS));
        let plan =
            |id| Plan { patience: None, ..Plan::draw(id, &mut Rng::with_seed(seed ^ u64::from(id) << 32)) };
        let fault = |worker, rng: &mut Rng| (Act::Mood(worker, mood(rng)), Act::Mood(worker, Mood::Well));
        let others = (0..WORKERS).filter(|worker| *worker != good);
        let mut acts: Vec<_> = others.flat_map(|worker| faults(rng, |rng| fault(worker, rng))).collect();
        acts.sort_by_key(|(at, _)| *at);
        (Self { latency, plans: (0..REQUESTS).map(plan).collect(), acts }, good)
    }

    /// The one of this seed.
    pub(crate) fn draw(seed: u64) -> Self {
        let rng = &mut Rng::with_seed(seed);
        let latency = Duration::from_millis(rng.u64(2..20));
        let plans = (0..REQUESTS).map(|id| Plan::draw(id, rng)).collect();
        let mut acts: Vec<_> =
            (0..WORKERS).flat_map(|worker| faults(rng, |rng| of_worker(worker, rng))).collect();
        acts.extend(
            (0..CLIENTS)
                .flat_map(|host| faults(rng, |_| (Act::HoldClients(host), Act::ReleaseClients(host)))),
        );
        acts.sort_by_key(|(at, _)| *at);
        Self { latency, plans, acts }
    }
}

impl Schedule {
    /// Requests alone: nothing is done to workers or links, and no client leaves.
    pub(crate) fn of_requests(seed: u64) -> Self {
        let mut schedule = Self::draw(seed);
        schedule.acts.clear();
        schedule.plans.iter_mut().for_each(|plan| plan.patience = None);
        schedule
    }
}

impl Plan {
    fn draw(id: Id, rng: &mut Rng) -> Self {
        let (tokens, pace) = (rng.u32(1..40), rng.u64(2..30));
        let leaves = rng.u8(..10) < 4;
        // Anywhere from before the request is sent to after the answer's end.
        let patience = rng.u64(0..(u64::from(tokens) * pace * 5 / 4 + 100));
        Self {
            id,
            host: rng.usize(..CLIENTS),
            at: BEGIN + Duration::from_millis(rng.u64(..SPAN_MS)),
            http2: rng.u8(..4) == 0,
            stream: rng.u8(..5) > 0,
            tokens,
            pace: Duration::from_millis(pace),
            patience: leaves.then_some(Duration::from_millis(patience)),
        }
    }
}

/// Faults of one place, one after the other, each with its end.
fn faults(rng: &mut Rng, mut fault: impl FnMut(&mut Rng) -> (Act, Act)) -> Vec<(Duration, Act)> {
    let mut acts = Vec::new();
    let mut at = rng.u64(..SPAN_MS);
    while at < SPAN_MS {
        let (begin, end) = fault(rng);
        let over = at + rng.u64(20..FAULT_MAX_MS);
        let time = |ms| BEGIN + Duration::from_millis(ms);
        acts.extend([(time(at), begin), (time(over), end)]);
        at = over + rng.u64(1..SPAN_MS);
    }
    acts
}

/// Some way to refuse everything.
fn refusing(rng: &mut Rng) -> Mood {
    let statuses = [429, 503, 529, 400, 401, 404, 500];
    Mood::Refusing(statuses[rng.usize(..statuses.len())], rng.bool().then(|| rng.u64(..4)))
}

/// Some way to end streams before their time, often before their first token.
fn ending(rng: &mut Rng) -> Mood {
    let after = if rng.bool() { 0 } else { rng.u32(..20) };
    Mood::Ending(after, LAST_WORDS[rng.usize(..LAST_WORDS.len())])
}

fn of_worker(worker: usize, rng: &mut Rng) -> (Act, Act) {
    let mood = |mood| (Act::Mood(worker, mood), Act::Mood(worker, Mood::Well));
    match rng.u8(..13) {
        0 | 1 => (Act::Crash(worker), Act::Restart(worker)),
        2 => mood(Mood::Hung),
        3 => mood(Mood::Failing),
        4 | 5 => mood(Mood::Cutting(rng.u32(..20))),
        6 => (Act::SlowHealth(worker, true), Act::SlowHealth(worker, false)),
        7 => (Act::Partition(worker), Act::Repair(worker)),
        8 | 9 => mood(refusing(rng)),
        10 | 11 => mood(ending(rng)),
        _ => (Act::Hold(worker), Act::Release(worker)),
    }
}
