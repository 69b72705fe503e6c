//! The room with a fleet behind it in virtual time: who begins when, and what it does to those who wait.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;
use crate::candidate::{Candidate, RequestView, Turn};
use crate::cost::CostModel;
use crate::load::{Load, LoadSnapshot};
use crate::pace::{PaceSnapshot, Waiting};
use crate::pick::pick_with;
use crate::policy::Policy;

mod objectives;

const RATE_PER_S: f64 = 5_000.0;
const TOKENS_PER_MS: f64 = RATE_PER_S / 1e3;
const BLOCK: u64 = 512;

fn s(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// A prompt: `shared` blocks of a prefix (named by its number) and `own` blocks after it.
#[derive(Clone, Debug)]
struct Prompt {
    at: f64,
    prefix: u32,
    shared: u64,
    own: u64,
}

/// Workers that prefill one prompt after the other and never forget a prefix.
struct Fleet {
    model: CostModel,
    loads: Vec<Load>,
    holds: Vec<BTreeSet<u32>>,
    free_at: Vec<f64>,
    now: f64,
    random: u64,
    /// First tokens to come: time, worker, what waits.
    coming: Vec<(f64, usize, Waiting)>,
    /// Time to first token of each prompt, by its number.
    ttft: HashMap<usize, f64>,
    begun: Vec<usize>,
    /// The mutant: pretends that nobody waits ahead.
    blind: bool,
    /// Whether it lets everyone be quoted, also who cannot begin.
    quotes_all: bool,
    quotes: usize,
    /// Workers that a quote is said to weigh.
    weighed: usize,
}

impl Fleet {
    fn new(workers: usize) -> Self {
        Self {
            model: CostModel::default(),
            loads: (0..workers).map(|_| Load::default()).collect(),
            holds: vec![BTreeSet::new(); workers],
            free_at: vec![0.0; workers],
            now: 0.0,
            random: 1,
            coming: Vec::new(),
            ttft: HashMap::new(),
            begun: Vec::new(),
            blind: false,
            quotes_all: false,
            quotes: 0,
            weighed: workers,
        }
    }

    fn candidates(&self, prompt: &Prompt, ahead: &Ahead) -> Vec<Candidate> {
        let held = |worker: usize| self.holds[worker].contains(&prompt.prefix);
        let candidate = |worker: usize| Candidate {
            load: self.loads[worker].snapshot(s(self.now), TOKENS_PER_MS),
            ahead_ms: if self.blind { 0.0 } else { ahead.of(WorkerId(worker as u32)) },
            matched_blocks: if held(worker) { prompt.shared as u32 } else { 0 },
            ..Candidate::new(WorkerId(worker as u32), LoadSnapshot::default(), TOKENS_PER_MS, 1.0)
        };
        (0..self.loads.len()).map(candidate).collect()
    }

    fn first_tokens(&mut self) {
        self.coming.sort_by(|a, b| a.0.total_cmp(&b.0));
        while self.coming.first().is_some_and(|(at, ..)| *at <= self.now) {
            let (at, worker, waiting) = self.coming.remove(0);
            self.loads[worker].first_token(s(at), &waiting);
            self.loads[worker].end();
        }
    }
}

impl WorkerChooser<(usize, Prompt)> for Fleet {
    type Plan = usize;

    fn least_excess_ms(&mut self, request: &(usize, Prompt), ahead: &Ahead) -> f64 {
        if self.blind || self.quotes_all {
            return f64::NEG_INFINITY;
        }
        CandidateSet::new(self.candidates(&request.1, ahead), RoomRules::default().horizon_ms)
            .least_excess_ms(ahead)
    }

    fn is_open(&mut self, request: &(usize, Prompt), worker: WorkerId, ahead: &Ahead) -> bool {
        let set = CandidateSet::new(self.candidates(&request.1, ahead), RoomRules::default().horizon_ms);
        self.quotes_all || set.is_open(worker, ahead)
    }

    fn quote(&mut self, request: &(usize, Prompt), ahead: &Ahead) -> Option<(Quote, usize)> {
        let prompt = &request.1;
        self.quotes += 1;
        let candidates = self.candidates(prompt, ahead);
        let tokens = (prompt.shared + prompt.own) * BLOCK;
        let view = RequestView {
            chain: &[],
            prompt_tokens: tokens,
            block_tokens: BLOCK as f64,
            media: &[],
            session: None,
        };
        self.random = self.random.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
        let turn = Turn { counter: 0, random: self.random };
        let pick = pick_with(&self.model, Policy::Prefix, &view, &candidates, &turn)?;
        let chosen = &candidates[pick.index];
        let quote = Quote {
            worker: chosen.worker,
            backlog_ms: chosen.load.pace.backlog_ms,
            own_ms: pick.uncached_tokens as f64 / TOKENS_PER_MS,
            weighed: self.weighed,
        };
        Some((quote, pick.index))
    }

    fn begin(&mut self, (number, prompt): (usize, Prompt), plan: Option<usize>) {
        let worker = plan.unwrap();
        let held = self.holds[worker].contains(&prompt.prefix);
        let uncached = (prompt.own + if held { 0 } else { prompt.shared }) * BLOCK;
        self.holds[worker].insert(prompt.prefix);
        let waiting = self.loads[worker].start(s(self.now), uncached, true);
        self.free_at[worker] = self.free_at[worker].max(self.now) + uncached as f64 / RATE_PER_S;
        self.coming.push((self.free_at[worker], worker, waiting));
        self.ttft.insert(number, self.free_at[worker] - prompt.at);
        self.begun.push(number);
    }
}

/// Sends prompts through a room with these rules.
fn run(fleet: &mut Fleet, rules: RoomRules, prompts: &[Prompt]) {
    run_as(fleet, rules, prompts, |_| Share::default());
}

/// The same, each prompt as its owner sends it.
fn run_as(fleet: &mut Fleet, rules: RoomRules, prompts: &[Prompt], share: impl Fn(usize) -> Share) {
    let mut room = WaitingRoom::new(rules);
    let mut next = 0;
    while next < prompts.len() || !room.is_empty() {
        // As a gateway: at the next arrival or first token, or when the room asks for it.
        let arrival = prompts.get(next).map(|prompt| prompt.at);
        let first = fleet.coming.iter().map(|(at, ..)| *at).filter(|at| *at > fleet.now);
        let wake = room.wake().map(|at| at.as_secs_f64());
        let then =
            first.chain(wake).filter(|_| !room.is_empty()).chain(arrival).fold(f64::INFINITY, f64::min);
        fleet.now = fleet.now.max(then);
        fleet.first_tokens();
        while prompts.get(next).is_some_and(|prompt| prompt.at <= fleet.now) {
            let own_ms = prompts[next].own as f64 * BLOCK as f64 / RATE_PER_S * 1e3;
            room.enter_as(s(fleet.now), Some(own_ms), share(next), (next, prompts[next].clone()));
            next += 1;
        }
        room.release(s(fleet.now), fleet);
    }
}

fn mean(fleet: &Fleet) -> f64 {
    fleet.ttft.values().sum::<f64>() / fleet.ttft.len() as f64
}

fn worst(fleet: &Fleet) -> f64 {
    fleet.ttft.values().copied().fold(0.0, f64::max)
}

/// Bursts of different lengths, a little less than four workers can do.
fn bursts() -> Vec<Prompt> {
    let burst = |k: usize| {
        (0..10).map(move |i| Prompt {
            at: k as f64 * 10.0,
            prefix: (k * 100 + i) as u32,
            shared: 0,
            own: [2, 60, 5, 4, 90, 1, 8, 30, 3, 120][(i + 3 * k) % 10],
        })
    };
    (0..60).flat_map(burst).collect()
}

/// Half of all prompts share 40 blocks.
fn one_hot_prefix(every_s: f64) -> Vec<Prompt> {
    (0..1500_usize)
        .map(|i| Prompt {
            at: i as f64 * every_s,
            prefix: if i % 2 == 0 { 0 } else { i as u32 },
            shared: if i % 2 == 0 { 40 } else { 0 },
            own: 2 + (i as u64 * 7) % 5,
        })
        .collect()
}

#[test]
fn short_prefills_do_not_wait_for_long_ones_and_long_ones_come_too() {
    let of = |by_response_ratio| {
        let mut fleet = Fleet::new(4);
        run(&mut fleet, RoomRules { by_response_ratio, ..RoomRules::default() }, &bursts());
        let mut all: Vec<f64> = fleet.ttft.values().copied().collect();
        all.sort_by(f64::total_cmp);
        (all[all.len() / 2], mean(&fleet), worst(&fleet))
    };
    let (ours, by_arrival) = (of(true), of(false));
    assert!(ours.0 < 0.8 * by_arrival.0 && ours.1 < 0.9 * by_arrival.1, "{ours:?} {by_arrival:?}");
    assert!(ours.2 < 1.25 * by_arrival.2, "{ours:?} {by_arrival:?}");
}

#[test]
fn nobody_waits_longer_than_the_rules_say() {
    let rules = RoomRules { max_wait: s(20.0), ..RoomRules::default() };
    let mut room = WaitingRoom::new(rules);
    let mut fleet = Fleet::new(1);
    // One long prefill is in the way, and short ones keep coming.
    for (i, own) in [(0, 4_000), (1, 200)] {
        room.enter(s(0.0), Some(1.0), (i, Prompt { at: 0.0, prefix: i as u32, shared: 0, own }));
    }
    room.release(s(0.0), &mut fleet);
    assert_eq!((fleet.begun.clone(), room.len(), room.wake()), (vec![0], 1, Some(s(1.0))));
    fleet.now = 19.5;
    room.release(s(19.5), &mut fleet);
    assert_eq!((room.len(), room.wake()), (1, Some(s(20.0))));
    fleet.now = 20.0;
    room.release(s(20.0), &mut fleet);
    assert_eq!((fleet.begun, room.is_empty()), (vec![0, 1], true));
}

/// Seconds to the first token of those who come a minute after `backlog` prompts of a second each met two
/// workers, one each `every_s`; and of the slowest of the backlog.
fn behind_a_backlog(backlog: usize, every_s: f64, objective: Option<Duration>) -> (Vec<f64>, f64) {
    let prompt = |i: usize, at: f64| Prompt { at, prefix: i as u32, shared: 0, own: 10 };
    let mut prompts: Vec<Prompt> = (0..backlog).map(|i| prompt(i, 0.0)).collect();
    prompts.extend((0..200).map(|i| prompt(backlog + i, 1.0 + i as f64 * every_s)));
    let mut fleet = Fleet::new(2);
    run(&mut fleet, RoomRules { objective, ..RoomRules::default() }, &prompts);
    let newcomers = (backlog..prompts.len()).map(|i| fleet.ttft[&i]).collect();
    (newcomers, (0..backlog).map(|i| fleet.ttft[&i]).fold(0.0, f64::max))
}

#[test]
fn a_backlog_is_worked_off_beside_those_who_can_keep_the_objective() {
    let objective = s(4.0);
    let kept = |ttft: &[f64]| ttft.iter().filter(|ttft| **ttft <= 4.0).count();
    // Seven tenths of what two workers can do come, so that the backlog of 100 takes some three minutes.
    let (with, slowest) = behind_a_backlog(100, 0.73, Some(objective));
    let (without, by_ratio) = behind_a_backlog(100, 0.73, None);
    assert!(kept(&with) >= 190, "{} {with:?}", kept(&with));
    assert!(kept(&without) < 100, "{} {without:?}", kept(&without));
    assert!(slowest < 200.0 && slowest > by_ratio, "{slowest} {by_ratio}");
}

#[test]
fn who_misses_the_objective_has_a_place_now_and_then() {
    // More comes than two workers can do: without a share the backlog would wait to the end.
    let (with, slowest) = behind_a_backlog(3, 0.4, Some(s(4.0)));
    let last = 1.0 + 200.0 * 0.4;
    assert!(slowest < 0.9 * last, "{slowest}");
    let kept = with.iter().filter(|ttft| **ttft <= 4.0).count();
    assert!(kept > 100, "{kept}");
}

#[test]
fn a_crowd_is_not_looked_at_without_a_pause() {
    let mut room = WaitingRoom::new(RoomRules::default());
    let mut fleet = Fleet::new(1);
    for i in 0..4_000 {
        room.enter(s(0.0), Some(1_000.0), (i, Prompt { at: 0.0, prefix: i as u32, shared: 0, own: 10 }));
    }
    room.release(s(0.0), &mut fleet);
    // A little before the worker has room for the next one.
    fleet.now = room.wake().unwrap().as_secs_f64() - 0.001;
    room.release(s(fleet.now), &mut fleet);
    let (begun, alarm) = (fleet.begun.len(), room.wake().unwrap());
    room.release(alarm, &mut fleet);
    assert_eq!(fleet.begun.len(), begun, "it is not looked at yet");
    // An alarm before it is would ring in vain, again and again.
    assert!(room.wake() > Some(alarm));
    fleet.now = room.wake().unwrap().as_secs_f64();
    room.release(s(fleet.now), &mut fleet);
    assert!(fleet.begun.len() > begun);
}

/// A burst that came while all were busy, and a thousand workers that are idle by now.
#[test]
fn a_burst_is_gone_through_in_several_releases_and_in_order() {
    let mut fleet = Fleet { weighed: 1_000, ..Fleet::new(4) };
    let mut room = WaitingRoom::new(RoomRules::default());
    for i in 0..200 {
        let prompt = Prompt { at: 0.0, prefix: i as u32, shared: 0, own: 1 };
        room.enter(s(0.0), Some(f64::from(i + 1)), (i as usize, prompt));
    }
    let mut most = 0;
    while !room.is_empty() {
        let before = fleet.quotes;
        room.release(s(fleet.now), &mut fleet);
        most = most.max(fleet.quotes - before);
        let wake = room.wake().map_or(fleet.now, |wake| wake.as_secs_f64());
        assert!(wake - fleet.now <= 1.0, "{wake}");
        fleet.now = wake;
        fleet.first_tokens();
    }
    assert!((20..=21).contains(&most), "{most}");
    assert!(fleet.begun.len() == 200 && fleet.begun[..20].is_sorted(), "{:?}", fleet.begun);
}

/// Whoever comes first into an empty room is as long as any other.
#[test]
fn the_first_to_wait_is_asked_for_its_length() {
    let mut fleet = Fleet::new(1);
    let mut room = WaitingRoom::new(RoomRules::default());
    for (i, (at, own, own_ms)) in
        [(0.0, 400, None), (0.1, 300, None), (0.2, 1, Some(102.4))].into_iter().enumerate()
    {
        fleet.now = at;
        room.enter(s(at), own_ms, (i, Prompt { at, prefix: i as u32, shared: 0, own }));
        room.release(s(at), &mut fleet);
    }
    assert_eq!((fleet.begun.clone(), room.len()), (vec![0], 2));
    fleet.now = fleet.free_at[0];
    fleet.first_tokens();
    room.release(s(fleet.now), &mut fleet);
    assert_eq!(fleet.begun, [0, 2, 1]);
}

#[test]
fn a_hot_prefix_spreads_though_its_queue_is_in_the_room() {
    let of = |blind| {
        let mut fleet = Fleet { blind, ..Fleet::new(4) };
        run(&mut fleet, RoomRules { max_waiting: 10_000, ..RoomRules::default() }, &one_hot_prefix(0.16));
        (mean(&fleet), fleet.holds.iter().filter(|held| held.contains(&0)).count())
    };
    let (seen, holders) = of(false);
    assert!(holders >= 2 && seen < 2.0, "{seen} s, {holders} holders");
    let (unseen, _) = of(true);
    assert!(unseen > 2.0 * seen, "without it: {unseen} s");
}

/// The former cost, a fixed factor on the request's own work, leaves a hot prefix where it is while its queue
/// is long but not longer than computing it again by that factor.
#[test]
fn a_busy_holder_grows_dear_before_its_queue_is_long() {
    let of = |later| {
        let model = CostModel { later, ..CostModel::default() };
        let mut fleet = Fleet { model, ..Fleet::new(4) };
        run(&mut fleet, RoomRules::default(), &one_hot_prefix(0.2));
        mean(&fleet)
    };
    let (with, without) = (of(1.0), of(0.0));
    assert!(with < 0.6 * without, "{with} {without}");
}

#[test]
fn who_leaves_does_not_begin_and_who_has_begun_cannot_leave() {
    let mut fleet = Fleet::new(1);
    let mut room = WaitingRoom::new(RoomRules::default());
    let prompt = |prefix| Prompt { at: 0.0, prefix, shared: 0, own: 100 };
    let places: Vec<_> = (0..3).map(|i| room.enter(s(0.0), Some(1.0), (i, prompt(i as u32)))).collect();
    room.release(s(0.0), &mut fleet);
    assert_eq!((fleet.begun.clone(), room.len()), (vec![0], 2));
    assert!(room.leave(places[0]).is_none());
    assert_eq!(room.leave(places[1]).map(|request| request.0), Some(1));
    fleet.now = 100.0;
    fleet.first_tokens();
    room.release(s(100.0), &mut fleet);
    assert_eq!((fleet.begun, room.wake()), (vec![0, 2], None));
}

/// Where every worker is busy, and where a quote is dear.
#[test]
fn who_is_not_quoted_misses_little() {
    let of = |quotes_all, weighed, prompts: &[Prompt]| {
        let mut fleet = Fleet { quotes_all, weighed, ..Fleet::new(4) };
        run(&mut fleet, RoomRules::default(), prompts);
        (mean(&fleet), fleet.quotes)
    };
    for (weighed, prompts, share) in [(4, bursts(), 0.8), (100_000, one_hot_prefix(0.16), 0.6)] {
        let (skipping, all) = (of(false, weighed, &prompts), of(true, weighed, &prompts));
        assert!((skipping.1 as f64) < share * all.1 as f64, "{skipping:?} {all:?}");
        assert!(skipping.0 < 1.05 * all.0, "{skipping:?} {all:?}");
    }
}

#[test]
fn a_candidate_set_says_when_the_next_worker_opens() {
    let busy = |backlog_ms| LoadSnapshot {
        pace: PaceSnapshot { backlog_ms, ..PaceSnapshot::default() },
        ..LoadSnapshot::default()
    };
    let mut fleet =
        Fleet::new(3).candidates(&Prompt { at: 0.0, prefix: 0, shared: 0, own: 1 }, &Ahead::default());
    fleet.iter_mut().zip([900.0, 100.0, 700.0]).for_each(|(one, ms)| one.load = busy(ms));
    let mut set = CandidateSet::new(fleet, 500.0);
    let mut ahead = Ahead::default();
    assert_eq!(set.least_excess_ms(&ahead), -400.0);
    ahead.add(WorkerId(1), 450.0);
    assert_eq!(set.least_excess_ms(&ahead), 50.0);
    set.update(1, busy(1_000.0));
    assert_eq!(set.least_excess_ms(&ahead), 200.0);
    assert_eq!(CandidateSet::new(Vec::new(), 500.0).least_excess_ms(&ahead), f64::NEG_INFINITY);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whoever comes begins, once, and no more wait than may.
    #[test]
    fn everybody_begins_once(
        gaps in prop::collection::vec((0.0_f64..2.0, 0_u32..6, 0_u64..30, 1_u64..60), 1..80),
        workers in 1_usize..5,
        max_waiting in 0_usize..12,
        by_response_ratio in any::<bool>(),
    ) {
        let mut at = 0.0;
        let prompts: Vec<Prompt> = gaps
            .into_iter()
            .map(|(gap, prefix, shared, own)| { at += gap; Prompt { at, prefix, shared, own } })
            .collect();
        let mut fleet = Fleet::new(workers);
        let rules = RoomRules { max_waiting, by_response_ratio, ..RoomRules::default() };
        run(&mut fleet, rules, &prompts);
        fleet.begun.sort_unstable();
        prop_assert_eq!(fleet.begun, (0..prompts.len()).collect::<Vec<_>>());
    }
}
