//! Fairness as such, and a room of several owners under four times what its workers can do, in virtual time.

use proptest::prelude::*;

use super::*;
use crate::index::WorkerId;
use crate::waiting_room::{Ahead, Desk, Quote, RoomRules, WaitingRoom};

fn of(owner: u32, tokens: f64) -> Share {
    Share { owner, tokens, ..Share::default() }
}

#[test]
fn owners_take_turns_by_tokens_and_weight() {
    let fair = Fair::default();
    let mut waiting = vec![of(1, 100.0); 6];
    waiting.extend([Share { weight: 2.0, ..of(2, 100.0) }; 6]);
    fair.arrange(&mut waiting, |share| *share);
    let twos = |n: usize| waiting[..n].iter().filter(|share| share.owner == 2).count();
    assert_eq!((twos(3), twos(6), twos(9)), (2, 4, 6), "{waiting:?}");
}

#[test]
fn a_higher_priority_goes_first_whatever_it_had() {
    let mut fair = Fair::default();
    let high = Share { priority: 1, ..of(1, 10.0) };
    fair.charge(&high, 1e9);
    let mut waiting = vec![of(2, 10.0), high, of(2, 10.0), high];
    fair.arrange(&mut waiting, |share| *share);
    assert_eq!(waiting.iter().map(|share| share.owner).collect::<Vec<_>>(), [1, 1, 2, 2]);
}

#[test]
fn nobody_saves_up_while_away() {
    let mut fair = Fair::default();
    fair.charge(&of(1, 0.0), 5_000.0);
    fair.enter(&of(2, 10.0), [of(1, 10.0)].into_iter());
    assert_eq!(fair.of(2), 5_000.0);
    // Who waits already keeps what it has.
    fair.enter(&of(2, 10.0), [of(1, 10.0), of(2, 10.0)].into_iter());
    fair.enter(&Share { owed: 30.0, ..of(2, 10.0) }, [of(2, 10.0)].into_iter());
    assert_eq!(fair.of(2), 5_030.0);
}

proptest! {
    #[test]
    fn arranging_loses_nobody_and_keeps_each_owner_s_order(
        owners in prop::collection::vec((0_u32..5, -1_i32..2, 1_u32..500), 0..80),
    ) {
        let mut waiting: Vec<(usize, Share)> = owners
            .iter()
            .enumerate()
            // An owner has one priority.
            .map(|(i, &(owner, _, tokens))| (i, Share { priority: owners[owner as usize % owners.len()].1, ..of(owner, f64::from(tokens)) }))
            .collect();
        let before = waiting.clone();
        Fair::default().arrange(&mut waiting, |(_, share)| *share);
        prop_assert!(waiting.windows(2).all(|two| two[0].1.priority >= two[1].1.priority));
        for owner in 0..5 {
            let of_owner = |list: &[(usize, Share)]| list.iter().filter(|(_, s)| s.owner == owner).map(|(i, _)| *i).collect::<Vec<_>>();
            prop_assert_eq!(of_owner(&before), of_owner(&waiting));
        }
    }
}

/// Prefills of 200 ms, so that eight workers do forty a second.
const OWN_MS: f64 = 200.0;
const WORKERS: usize = 8;
const TOKENS: f64 = 1_000.0;
/// What a worker is sent beforehand is what a modest owner's request finds in front of it.
const HORIZON_MS: f64 = 150.0;

/// Workers that compute one prefill after the other.
struct Floor {
    now: Duration,
    free_at: [Duration; WORKERS],
    /// Owner, arrival and beginning at a worker's compute.
    begun: Vec<(u32, Duration, Duration)>,
    refused: Vec<u32>,
}

impl Floor {
    fn least(&self, ahead: &Ahead) -> (usize, f64) {
        let backlog = |i: usize| {
            self.free_at[i].saturating_sub(self.now).as_secs_f64() * 1e3 + ahead.of(WorkerId(i as u32))
        };
        (0..WORKERS).map(|i| (i, backlog(i))).min_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
    }
}

type Asked = (Share, Duration);

impl Desk<Asked> for Floor {
    type Plan = usize;

    fn least_excess_ms(&mut self, _: &Asked, ahead: &Ahead) -> f64 {
        self.least(ahead).1 - HORIZON_MS
    }

    fn is_open(&mut self, _: &Asked, worker: WorkerId, _: &Ahead) -> bool {
        self.free_at[worker.0 as usize].saturating_sub(self.now).as_secs_f64() * 1e3 <= HORIZON_MS
    }

    fn quote(&mut self, _: &Asked, ahead: &Ahead) -> Option<(Quote, usize)> {
        let (i, _) = self.least(ahead);
        let worker = WorkerId(i as u32);
        let backlog_ms = self.free_at[i].saturating_sub(self.now).as_secs_f64() * 1e3;
        Some((Quote { worker, backlog_ms, own_ms: OWN_MS, weighed: WORKERS }, i))
    }

    fn begin(&mut self, (share, came): Asked, plan: Option<usize>) {
        let free = &mut self.free_at[plan.expect("somebody serves everything")];
        *free = (*free).max(self.now) + Duration::from_secs_f64(OWN_MS / 1e3);
        self.begun.push((share.owner, came, *free));
    }

    fn refuse(&mut self, (share, _): Asked, _: Duration) {
        self.refused.push(share.owner);
    }
}

/// Five minutes of Poisson arrivals, `(owner, requests a second)`; the times to first token of each owner within its
/// patience, and how many were refused.
fn run(
    rates: &[(u32, f64)],
    shed_after: Option<Duration>,
    priority_of_1: i32,
) -> (Vec<(u32, f64)>, Vec<u32>) {
    let rules = RoomRules { shed_after, horizon_ms: HORIZON_MS, ..RoomRules::default() };
    let mut room = WaitingRoom::new(rules);
    let mut floor = Floor {
        now: Duration::ZERO,
        free_at: [Duration::ZERO; WORKERS],
        begun: Vec::new(),
        refused: Vec::new(),
    };
    let mut random = uniform(7);
    let mut next: Vec<f64> = rates.iter().map(|(_, rate)| random() / rate).collect();
    let mut tick = 0.0;
    while tick < 300.0 {
        let (i, at) = next.iter().copied().enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        let now_s = at.min(tick);
        floor.now = Duration::from_secs_f64(now_s);
        if at <= tick {
            let (owner, rate) = rates[i];
            next[i] = at - (1.0 - random()).max(1e-12).ln() / rate;
            let priority = if owner == 1 { priority_of_1 } else { 0 };
            let share = Share { priority, ..of(owner, TOKENS) };
            match room.admit(&share) {
                Ok(()) => drop(room.enter_as(floor.now, Some(OWN_MS), share, (share, floor.now))),
                Err(_) => floor.refused.push(owner),
            }
        } else {
            tick += 0.005;
        }
        room.release(floor.now, &mut floor);
    }
    let ttft =
        floor.begun.iter().map(|(owner, came, done)| (*owner, done.saturating_sub(*came).as_secs_f64()));
    (ttft.collect(), floor.refused)
}

fn uniform(seed: u64) -> impl FnMut() -> f64 {
    // xorshift64*: uniform in [0, 1), the same on every machine.
    let mut x = seed;
    move || {
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        (x.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn p99(ttfts: &[(u32, f64)], owner: u32) -> f64 {
    let mut of_owner: Vec<f64> = ttfts.iter().filter(|(o, _)| *o == owner).map(|(_, s)| *s).collect();
    of_owner.sort_by(f64::total_cmp);
    of_owner[of_owner.len() * 99 / 100]
}

/// Requests a second whose first token came within 2.5 s.
fn goodput(ttfts: &[(u32, f64)]) -> f64 {
    ttfts.iter().filter(|(_, s)| *s <= 2.5).count() as f64 / 300.0
}

#[test]
fn four_times_the_load_keeps_the_goodput_and_the_modest_owner_s_ttft() {
    let shed = Some(Duration::from_millis(1_500));
    let peak = WORKERS as f64 * 1e3 / OWN_MS;
    // Two owners; the second takes its half, or seven times as much.
    let (fair, _) = run(&[(1, peak * 0.4), (2, peak * 0.55)], shed, 0);
    let (greedy, refused) = run(&[(1, peak * 0.4), (2, peak * 3.6)], shed, 0);
    let good = goodput(&greedy);
    assert!(good >= 0.9 * peak, "goodput {good:.1} of {peak}");
    let of_1 = refused.iter().filter(|owner| **owner == 1).count() as f64 / (300.0 * peak * 0.4);
    assert!(of_1 < 0.01, "{of_1:.3} of the modest owner's requests were refused");
    let (calm, pressed) = (p99(&fair, 1), p99(&greedy, 1));
    println!("goodput {good:.1} of {peak}; modest p99 {calm:.3} s, beside the greedy {pressed:.3} s");
    assert!(
        pressed <= 1.2 * calm,
        "TTFT p99 {pressed:.3} s beside a greedy one, {calm:.3} s beside a fair one"
    );
}

#[test]
fn without_owners_the_greedy_one_takes_the_room() {
    let shed = Some(Duration::from_millis(1_500));
    let peak = WORKERS as f64 * 1e3 / OWN_MS;
    // All requests are one owner's: what the modest one sends is refused as often as anybody's.
    let (_, refused) = run(&[(0, peak * 0.4), (0, peak * 3.6)], shed, 0);
    assert!(refused.len() as f64 > 0.7 * 300.0 * peak * 4.0);
    // And without shedding nobody is served in time.
    let (all, _) = run(&[(1, peak * 0.4), (2, peak * 3.6)], None, 0);
    assert!(goodput(&all) < 0.5 * peak, "{}", goodput(&all));
}

#[test]
fn a_priority_waits_for_nobody_but_what_has_begun() {
    let peak = WORKERS as f64 * 1e3 / OWN_MS;
    let (all, refused) = run(&[(1, peak * 0.4), (2, peak * 3.6)], Some(Duration::from_millis(1_500)), 1);
    assert!(refused.iter().all(|owner| *owner == 2));
    // The horizon, its own prefill, and one that was let in before it.
    assert!(p99(&all, 1) < (HORIZON_MS + 2.0 * OWN_MS) / 1e3, "{}", p99(&all, 1));
}
