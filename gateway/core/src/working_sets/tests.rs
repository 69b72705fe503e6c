//! Single sessions, and a small fleet of caches whose sessions ask as agents do.

use std::collections::BinaryHeap;

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const RULES: SetRules = SetRules {
    share: 1.0,
    fill: 1.0,
    returns: 0.3,
    longest_pause: Duration::from_secs(60),
    longest_lease: Duration::from_secs(60),
    pays_from: 0.7,
    pays_from_behind: 0.4,
    turnover: 2.0,
};

/// One that has hardly any time to compute for who comes back.
fn home(worker: u32, capacity: f64) -> Home {
    Home { worker: WorkerId(worker), capacity: Some(capacity), tokens_per_s: 1.0 }
}

fn turn(session: u64, prompt_tokens: f64, arrived: Duration) -> NextTurn {
    NextTurn {
        session,
        known_by: KnownBy::Name,
        prompt_tokens,
        uncached_tokens: prompt_tokens,
        is_first: true,
        arrived,
    }
}

fn ended(sets: &mut WorkingSets, now: Duration, session: u64, conversation_tokens: f64) {
    sets.ended(now, &EndedTurn { session, conversation_tokens, first_token: None });
}

fn until(sets: &mut WorkingSets, now: Duration, turn: &NextTurn, worker: u32) -> Option<Duration> {
    let left = sets.left(now, std::iter::once(home(worker, 1_000.0)), false);
    sets.waits_until(now, turn, &left)
}

fn waits(sets: &mut WorkingSets, now: Duration, turn: &NextTurn) -> bool {
    until(sets, now, turn, 1).is_some()
}

/// Sessions that come back after a second, mostly; the lease is that and three deviations.
fn returning(sets: &mut WorkingSets) {
    for n in 0..20 {
        sets.habits[KnownBy::Name as usize].ended.add(1.0, SECOND);
        sets.habits[KnownBy::Name as usize].returned(SECOND, if n % 2 == 0 { 1.0 } else { 5.0 });
    }
}

/// Two sessions of 400 tokens at a worker that holds 1,000.
fn crowded() -> WorkingSets {
    let mut sets = WorkingSets::new(RULES);
    returning(&mut sets);
    for session in 1..=2 {
        assert!(!waits(&mut sets, SECOND, &turn(session, 400.0, SECOND)));
        sets.began(SECOND, &turn(session, 400.0, SECOND), home(1, 1_000.0));
        ended(&mut sets, SECOND, session, 400.0);
    }
    sets
}

#[test]
fn one_that_does_not_fit_waits_until_another_is_over() {
    let mut sets = crowded();
    let third = turn(3, 400.0, SECOND);
    let pause = until(&mut sets, SECOND, &third, 1);
    // They come after 5 s at the latest, which is in the class that ends after 5.8.
    let lease = Duration::from_secs_f64(0.001 * 2_f64.powf(12.5));
    assert!(pause.unwrap().abs_diff(SECOND + lease) < Duration::from_micros(1), "{pause:?}");
    let lease = lease + Duration::from_micros(1);
    // Those that are in go on; a small one would fit beside them, but the third was there before.
    assert!(!waits(&mut sets, 2 * SECOND, &turn(1, 500.0, 2 * SECOND)));
    assert!(waits(&mut sets, 2 * SECOND, &turn(4, 200.0, 2 * SECOND)));
    sets.began(2 * SECOND, &turn(1, 500.0, 2 * SECOND), home(1, 1_000.0));
    let over = SECOND + lease;
    assert!(!waits(&mut sets, over, &third), "the second has said nothing for as long as it is waited for");
    assert_eq!((sets.count_in(), sets.taken(WorkerId(1))), (1, 500.0));
}

#[test]
fn where_they_grow_the_last_that_came_has_to_go() {
    let mut sets = crowded();
    sets.began(2 * SECOND, &turn(1, 700.0, 2 * SECOND), home(1, 1_000.0));
    assert_eq!((sets.count_in(), sets.taken(WorkerId(1))), (1, 700.0));
    assert!(waits(&mut sets, 2 * SECOND, &turn(2, 450.0, 2 * SECOND)));
    // At another worker there is room, and its turn goes there.
    assert_eq!(until(&mut sets, 2 * SECOND, &turn(2, 450.0, 2 * SECOND), 2), None);
    sets.began(2 * SECOND, &turn(2, 450.0, 2 * SECOND), home(2, 1_000.0));
    assert_eq!((sets.taken(WorkerId(1)), sets.taken(WorkerId(2))), (700.0, 450.0));
    // One that is larger than any cache is let in where no other is.
    sets.began(3 * SECOND, &turn(9, 5_000.0, 3 * SECOND), home(3, 1_000.0));
    assert!(!waits(&mut sets, 3 * SECOND, &turn(9, 6_000.0, 3 * SECOND)));
}

#[test]
fn none_waits_for_longer_than_may_be_and_then_the_one_that_was_in_for_longest_goes() {
    let mut sets = crowded();
    let mut now = SECOND;
    let third = turn(3, 400.0, now);
    while waits(&mut sets, now, &third) {
        for session in 1..=2 {
            sets.began(now, &turn(session, 400.0, now), home(1, 1_000.0));
            ended(&mut sets, now, session, 400.0);
        }
        now += SECOND;
    }
    assert_eq!(now, SECOND + RULES.longest_pause);
    sets.began(now, &third, home(1, 1_000.0));
    assert!(waits(&mut sets, now, &turn(1, 400.0, now)));
    assert!(!waits(&mut sets, now, &turn(2, 400.0, now)));
}

#[test]
fn what_others_had_before_is_no_part_of_what_a_session_needs() {
    let mut sets = WorkingSets::new(RULES);
    returning(&mut sets);
    let first = NextTurn { uncached_tokens: 100.0, ..turn(1, 800.0, SECOND) };
    sets.began(SECOND, &first, home(1, 1_000.0));
    ended(&mut sets, SECOND, 1, 850.0);
    assert_eq!(sets.taken(WorkerId(1)), 150.0);
    // The next turn finds its own past, which is its own nevertheless.
    let next = NextTurn { uncached_tokens: 50.0, ..turn(1, 900.0, 2 * SECOND) };
    sets.began(2 * SECOND, &next, home(1, 1_000.0));
    assert_eq!(sets.taken(WorkerId(1)), 200.0);
    assert_eq!(sets.displaced(WorkerId(1), &turn(2, 1_000.0, SECOND)), 200.0);
    assert_eq!(sets.displaced(WorkerId(1), &next), 0.0);
    assert_eq!(sets.displaced(WorkerId(2), &next), 200.0, "what it has at the first");
}

#[test]
fn what_a_session_found_when_it_became_one_is_its_own_past() {
    let mut sets = WorkingSets::new(RULES);
    // It was known by nothing when it began, and had 300 tokens of 700 from others.
    sets.opens(7, 300.0);
    let later = NextTurn { uncached_tokens: 100.0, is_first: false, ..turn(7, 800.0, SECOND) };
    sets.began(SECOND, &later, home(1, 10_000.0));
    assert_eq!(sets.taken(WorkerId(1)), 500.0);
    // Of one whose beginning was not seen as much is others' as of most.
    let unseen = NextTurn { session: 8, ..later };
    sets.began(SECOND, &unseen, home(1, 10_000.0));
    assert_eq!(sets.taken(WorkerId(1)), 1_000.0);
}

#[test]
fn pauses_pay_where_all_anew_is_too_much_and_caches_serve_more() {
    let mut sets = WorkingSets::new(RULES);
    let mut now = SECOND;
    // Ten turns of 1,000 tokens a second, each of a session that comes back after two and is served in one.
    for nth in 0..1_000 {
        let session = nth % 30;
        sets.began(now, &turn(session, 1_000.0, now), home(1, 1e9));
        ended(&mut sets, now + SECOND, session, 1_000.0);
        now += Duration::from_millis(100);
    }
    let mut pays_of = |now, worker, (tokens_per_s, cache_tokens), is_behind| {
        let home = Home { tokens_per_s, ..home(worker, cache_tokens) };
        let left = sets.left(now, std::iter::once(home), is_behind);
        sets.pays(KnownBy::Name, &left)
    };
    assert!(!pays_of(now, 1, (20_000.0, 200_000.0), false), "all of it could be computed anew");
    assert!(pays_of(now, 1, (20_000.0, 200_000.0), true));
    assert!(
        !pays_of(now, 2, (10_000.0, 80_000.0), true),
        "what is asked of other workers, by another model's sessions"
    );
    let mut pays = |now, tokens_per_s, cache_tokens| pays_of(now, 1, (tokens_per_s, cache_tokens), false);
    assert!(pays(now, 10_000.0, 80_000.0));
    assert!(
        !pays(now, 10_000.0, 50_000.0),
        "caches would serve 17,000 tokens a second, and 10,000 are computed"
    );
    assert!(!pays(now, 10_000.0, f64::INFINITY));
    assert!(!pays(now + 600 * SECOND, 100.0, 80_000.0));
}

#[test]
fn a_lease_is_as_long_as_turns_take_to_come_or_as_short_as_pays() {
    let lease = |gaps_ms: &[u64], tokens_per_s: f64, longest_lease: Duration| {
        let mut sets = WorkingSets::new(SetRules { longest_lease, ..RULES });
        let mut now = SECOND;
        let home = Home { tokens_per_s, ..home(1, 10_000.0) };
        for n in 0..400 {
            sets.began(now, &turn(1, 400.0, now), home);
            now += Duration::from_millis(100);
            ended(&mut sets, now, 1, 400.0);
            now += Duration::from_millis(gaps_ms[n % gaps_ms.len()]);
        }
        let left = sets.sessions[&1].lease.saturating_sub(sets.sessions[&1].ended);
        left.as_secs_f64()
    };
    let even = [500, 1_500];
    // As long as the last of them takes, to the end of its class.
    let long = lease(&even, 100.0, 60 * SECOND);
    assert!((1.5..2.2).contains(&long), "{long}");
    assert!((lease(&even, 100.0, Duration::from_millis(1_600)) - 1.6).abs() < 1e-6);
    // One in ten takes long. If they are not waited for, 10,000 tokens are asked for in some 0.2 s, and a
    // tenth of them computed anew: 5,000 a second, of the 0.3 that may go to that.
    let mixed = [100, 100, 100, 100, 100, 100, 100, 100, 100, 20_000];
    let (long, short) = (lease(&mixed, 1_000.0, 60 * SECOND), lease(&mixed, 20_000.0, 60 * SECOND));
    assert!(long > 15.0 && short < 0.3, "{long} {short}");
}

#[test]
fn who_began_first_comes_in_first() {
    let mut sets = crowded();
    // Both began before the third and fourth, and have grown.
    sets.began(SECOND, &turn(1, 900.0, SECOND), home(1, 1_000.0));
    assert!(sets.is_in(1) && !sets.is_in(2), "the one that began last goes");
    let (second, third) = (turn(2, 500.0, 2 * SECOND), turn(3, 90.0, 3 * SECOND));
    assert!(waits(&mut sets, 3 * SECOND, &second));
    assert!(waits(&mut sets, 3 * SECOND, &third), "there is room for it, which is kept for the second");
    sets.leaves(2);
    assert!(!waits(&mut sets, 3 * SECOND, &third));
    // One that has been silent is waited for no longer than it may be believed to be there.
    assert!(waits(&mut sets, 3 * SECOND, &second));
    assert!(waits(&mut sets, 5 * SECOND, &third));
    assert!(!waits(&mut sets, 20 * SECOND, &third));
}

#[test]
fn room_is_kept_where_most_is_left_and_no_more_than_there_is() {
    let mut queues = Queues::default();
    for (session, need) in [(1, 500.0), (2, 700.0), (3, 100.0)] {
        queues.wait(7, (session * SECOND, session.into()), need, SECOND);
    }
    let mut kept = |free: &[f64], now| {
        let kept = queues.keep(7, now, free.iter().copied());
        (kept.last.map(|(_, session)| session), kept.spare)
    };
    assert_eq!(kept(&[], SECOND), (None, 0.0));
    assert_eq!(kept(&[600.0], SECOND), (Some(2), 0.0), "what is left after the first is kept for the second");
    assert_eq!(kept(&[600.0, 550.0], SECOND), (Some(3), 0.0));
    assert_eq!(kept(&[600.0, 750.0, 900.0], SECOND), (Some(3), 500.0));
    assert_eq!(kept(&[-5.0, 90.0], 60 * SECOND), (None, 90.0), "they have not been asked about for long");
}

#[test]
fn who_asks_once_is_not_waited_for_and_does_not_wait() {
    let mut sets = WorkingSets::new(RULES);
    let mut now = SECOND;
    for session in 0..1_000 {
        let asked = turn(session, 400.0, now);
        assert!(!waits(&mut sets, now, &asked), "{session}");
        sets.began(now, &asked, home(1, 1_000.0));
        now += Duration::from_millis(10);
        ended(&mut sets, now, session, 400.0);
    }
    assert_eq!(sets.taken(WorkerId(1)), 0.0);
}

proptest! {
    /// Whatever comes and goes: what a worker's sessions take is the sum over those that are in, and more
    /// than it holds only where it is one alone.
    #[test]
    fn what_is_taken_is_what_those_have_that_are_in(
        steps in prop::collection::vec((0_u64..12, 1_u32..4, 10.0_f64..900.0, 0_u64..9_000, any::<bool>()), 1..300),
    ) {
        let (mut sets, mut now) = (WorkingSets::new(RULES), SECOND);
        let mut begun = Vec::new();
        for (session, worker, tokens, after, ends) in steps {
            now += Duration::from_millis(after);
            let asked = turn(session, tokens, now);
            if ends && let Some(session) = begun.pop() {
                ended(&mut sets, now, session, tokens);
            } else if until(&mut sets, now, &asked, worker).is_none() {
                sets.began(now, &asked, home(worker, 1_000.0));
                begun.push(session);
            }
            if after == 0 && worker == 3 {
                sets.lost(WorkerId(worker));
            }
            for worker in 1..4 {
                let here = |session: &&Session| session.is_in && session.home == WorkerId(worker);
                let inside: Vec<&Session> = sets.sessions.values().filter(here).collect();
                let sum: f64 = inside.iter().map(|session| session.tokens).sum();
                prop_assert!((sum - sets.taken(WorkerId(worker))).abs() < 1e-6);
                prop_assert!(sum <= 1_000.0 + 1e-6 || inside.len() == 1, "{sum} of {}", inside.len());
                let listed = sets.rooms.get(&WorkerId(worker)).map_or(0, |room| room.inside.len());
                prop_assert_eq!(listed, inside.len());
            }
        }
    }
}

#[test]
fn what_is_remembered_is_bounded() {
    let mut sets = WorkingSets::new(RULES);
    for session in 0..2 * SESSIONS_MAX as u64 {
        let now = Duration::from_millis(session);
        sets.began(now, &turn(session, 10.0, now), home(1, 1e12));
        ended(&mut sets, now, session, 10.0);
    }
    assert!(sets.sessions.len() <= SESSIONS_MAX);
    assert_eq!(sets.rooms[&WorkerId(1)].inside.len(), sets.count_in());
}

/// A fleet whose caches forget whole conversations, the one used least recently first.
struct Fleet {
    /// Each worker's conversations with their tokens, the one used last at the end, and until when it is
    /// busy.
    workers: Vec<(Vec<(u64, f64)>, Duration)>,
    sets: Option<WorkingSets>,
    waiting: Vec<NextTurn>,
    events: BinaryHeap<std::cmp::Reverse<(Duration, u64, bool)>>,
    /// Of each session: turns so far.
    turns: Vec<u64>,
    random: u64,
    asked: f64,
    found: f64,
    answered: u64,
    longest_pause: Duration,
    /// When those who wait are looked at again.
    alarm: Duration,
}

const WORKERS: u32 = 4;
const CAPACITY: f64 = 65_536.0;
const TOKENS_PER_S: f64 = 6_000.0;
const TURNS: u64 = 20;
const FIRST: f64 = 2_600.0;
const MORE: f64 = 660.0;
const ANSWER: Duration = Duration::from_millis(600);

/// One of the fleet's.
fn slow(worker: u32) -> Home {
    Home { tokens_per_s: TOKENS_PER_S, ..home(worker, CAPACITY) }
}

impl Fleet {
    fn think(&mut self) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let uniform = ((self.random >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
        Duration::from_secs_f64(-2.0 * uniform.ln())
    }

    /// The next turn of one of the sessions that go on at once; each is another one after its last turn.
    fn next(&self, place: u64, now: Duration) -> NextTurn {
        let turns = self.turns[place as usize];
        let name = place + turns / TURNS * 1_000_000;
        turn(name, FIRST + (turns % TURNS) as f64 * MORE, now)
    }

    fn holds(&self, worker: usize, session: u64) -> f64 {
        self.workers[worker].0.iter().find(|(name, _)| *name == session).map_or(0.0, |(_, tokens)| *tokens)
    }

    fn begin(&mut self, now: Duration, asked: NextTurn) {
        let cost = |worker: usize| {
            let uncached = asked.prompt_tokens - self.holds(worker, asked.session);
            let name = WorkerId(worker as u32);
            let displaced = self.sets.as_ref().map_or(0.0, |sets| sets.displaced(name, &asked));
            self.workers[worker].1.saturating_sub(now).as_secs_f64() + (uncached + displaced) / TOKENS_PER_S
        };
        let worker = (0..WORKERS as usize).min_by(|a, b| cost(*a).total_cmp(&cost(*b))).unwrap();
        let found = self.holds(worker, asked.session);
        (self.asked, self.found) = (self.asked + asked.prompt_tokens, self.found + found);
        let turn = NextTurn { uncached_tokens: asked.prompt_tokens, ..asked };
        if let Some(sets) = &mut self.sets {
            sets.began(now, &turn, slow(worker as u32));
        }
        self.longest_pause = self.longest_pause.max(now.saturating_sub(asked.arrived));
        let (cache, busy) = &mut self.workers[worker];
        let tokens = asked.prompt_tokens + 60.0;
        cache.retain(|(name, _)| *name != asked.session);
        cache.push((asked.session, tokens));
        while cache.iter().map(|(_, tokens)| tokens).sum::<f64>() > CAPACITY {
            cache.remove(0);
        }
        *busy = (*busy).max(now) + Duration::from_secs_f64((asked.prompt_tokens - found) / TOKENS_PER_S);
        let end = *busy + ANSWER;
        self.events.push(std::cmp::Reverse((end, asked.session % 1_000_000, false)));
    }

    fn release(&mut self, now: Duration) {
        let (mut n, mut next) = (0, Duration::MAX);
        while let Some(asked) = self.waiting.get(n).copied() {
            let until = self.sets.as_mut().and_then(|sets| {
                let left = sets.left(now, (0..WORKERS).map(slow), false);
                sets.pays(KnownBy::Name, &left).then(|| sets.waits_until(now, &asked, &left)).flatten()
            });
            match until {
                None => {
                    self.waiting.remove(n);
                    self.begin(now, asked);
                }
                Some(until) => {
                    next = next.min(until);
                    n += 1;
                }
            }
        }
        if next < self.alarm || self.alarm <= now {
            self.alarm = next;
            self.events.push(std::cmp::Reverse((next, u64::MAX, false)));
        }
    }

    /// Turns answered in a second, the share of prompt tokens that was found, and the longest pause, of so
    /// many sessions at once.
    fn run(sessions: u64, with: Option<SetRules>) -> (f64, f64, Duration) {
        let mut fleet = Self {
            workers: vec![(Vec::new(), Duration::ZERO); WORKERS as usize],
            sets: with.map(WorkingSets::new),
            waiting: Vec::new(),
            events: BinaryHeap::new(),
            turns: (0..sessions).map(|place| place * 7 % TURNS).collect(),
            random: 88_172_645_463_325_252,
            asked: 0.0,
            found: 0.0,
            answered: 0,
            longest_pause: Duration::ZERO,
            alarm: Duration::MAX,
        };
        for place in 0..sessions {
            let at = fleet.think();
            fleet.events.push(std::cmp::Reverse((at, place, true)));
        }
        let end = 600 * SECOND;
        while let Some(std::cmp::Reverse((now, place, comes))) = fleet.events.pop() {
            if now > end {
                break;
            }
            if comes {
                let asked = fleet.next(place, now);
                fleet.waiting.push(asked);
            } else if place != u64::MAX {
                let asked = fleet.next(place, now);
                if let Some(sets) = &mut fleet.sets {
                    let first_token = Some(now.saturating_sub(ANSWER));
                    let conversation_tokens = asked.prompt_tokens + 60.0;
                    sets.ended(now, &EndedTurn { session: asked.session, conversation_tokens, first_token });
                }
                fleet.turns[place as usize] += 1;
                fleet.answered += 1;
                let next = now + fleet.think();
                fleet.events.push(std::cmp::Reverse((next, place, true)));
            }
            fleet.release(now);
        }
        let found = fleet.found / fleet.asked;
        (fleet.answered as f64 / end.as_secs_f64(), found, fleet.longest_pause)
    }
}

#[test]
fn with_pauses_there_is_no_cliff() {
    let mut best: f64 = 0.0;
    for sessions in [14, 29, 58, 116] {
        let (without, with) = (Fleet::run(sessions, None), Fleet::run(sessions, Some(SetRules::default())));
        let both = format!("{sessions}: {with:.2?}, without pauses {without:.2?}");
        best = best.max(with.0);
        assert!(with.0 >= 0.99 * without.0 && with.2 <= RULES.longest_pause + SECOND, "{both}");
        if sessions == 58 {
            assert!(with.0 > 0.85 * best && with.0 > 2.0 * without.0 && with.1 > 0.75, "{both}");
        }
    }
}
