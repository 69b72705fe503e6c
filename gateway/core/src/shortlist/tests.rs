//! A shortlist's choice is the choice among all.

use keyway_wire::block_hash::{BlockHash, HashKey, TextChain};
use proptest::prelude::*;

use super::*;
use crate::pace::Waiting;
use crate::route::{PromptViews, consider};
use crate::{EngineLoad, Policy};

/// Something that happens at a worker.
#[derive(Clone, Copy, Debug)]
enum Event {
    Starts(u64),
    Answers,
    Ends,
    Leaves,
    /// It holds the beginning of one of the prompts.
    Holds(u64, usize),
}

/// What is sent to a fleet whose loads are kept both ways.
struct Fleet {
    loads: Vec<Load>,
    waiting: Vec<Vec<Waiting>>,
    speeds: Vec<f64>,
    index: PrefixIndex,
    shortlist: Shortlist,
    /// Whether prompts are long texts, named in spans.
    of_text: bool,
}

/// Blocks of a long text for each of a short prompt: the kinds part at 72 blocks and at 144.
const TEXT_BLOCKS: u64 = 12;

/// A worker's name in the index: not its place.
fn name(place: usize) -> WorkerId {
    WorkerId(place as u32 * 7 + 3)
}

/// Prompts of four kinds: all share their first six blocks, two and two the next six.
fn chain(kind: u64, blocks: u64) -> Vec<BlockHash> {
    let part = |i: u64| kind >> 2_u64.saturating_sub(i / 6);
    (0..blocks).map(|i| BlockHash((part(i) * 1000 + i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))).collect()
}

/// The same as long texts.
fn text(kind: u64, blocks: u64) -> Vec<BlockHash> {
    let mut text = TextChain::new(HashKey::new(2), b"");
    let blocks =
        chain(kind, blocks).into_iter().flat_map(|block| (0..TEXT_BLOCKS).map(move |i| [block.0, i]));
    blocks.filter_map(|block| text.push(block.map(u64::to_le_bytes).as_flattened())).collect()
}

impl Fleet {
    fn new(workers: usize, speeds: &[f64]) -> Self {
        Self {
            loads: (0..workers).map(|_| Load::default()).collect(),
            waiting: (0..workers).map(|_| Vec::new()).collect(),
            speeds: (0..workers).map(|i| speeds[i % speeds.len()]).collect(),
            index: PrefixIndex::new(1 << 20),
            shortlist: Shortlist::new((0..workers).map(name)),
            of_text: false,
        }
    }

    fn prompt(&self, kind: u64, blocks: u64) -> Vec<BlockHash> {
        if self.of_text { text(kind, blocks) } else { chain(kind, blocks) }
    }

    /// With a shortlist that knows of each worker.
    fn noted(mut self) -> Self {
        for (place, load) in self.loads.iter().enumerate() {
            self.shortlist.note(place, load, self.speeds[place]);
        }
        self
    }

    fn happens(&mut self, now: Duration, place: usize, event: Event) {
        if let Event::Holds(kind, blocks) = event {
            drop(self.index.place(name(place), &self.prompt(kind, blocks as u64)));
        }
        let (load, waiting) = (&self.loads[place], &mut self.waiting[place]);
        match event {
            Event::Starts(tokens) => waiting.push(load.start(now, tokens, tokens % 5 != 0)),
            Event::Answers if !waiting.is_empty() => load.first_token(now, &waiting.remove(0)),
            Event::Leaves if !waiting.is_empty() => {
                if let Some(last) = waiting.pop() {
                    load.cancelled(now, &last);
                    load.end();
                }
            }
            Event::Ends if load.requests() > waiting.len() as u64 => load.end(),
            _ => {}
        }
        self.shortlist.note(place, load, self.speeds[place]);
    }

    fn candidate(&self, now: Duration, place: usize) -> Candidate {
        let speed = self.speeds[place];
        Candidate::new(name(place), self.loads[place].snapshot(now, speed), speed, 1.0)
    }

    /// Compares both choices, and lets the prompt count as used.
    fn choose(&mut self, now: Duration, view: &RequestView<'_>, ahead: &Ahead, turn: &Turn) -> Option<Pick> {
        self.index.settle();
        let mut all: Vec<_> = (0..self.loads.len()).map(|place| self.candidate(now, place)).collect();
        let views = [*view];
        let seen = PromptViews::of(&views, &[]);
        let want = consider(Policy::Prefix, &seen, &mut all, ahead, (now, turn), &self.index).unwrap();
        let (loads, speeds) = (&self.loads, &self.speeds);
        let one = |i: usize| Candidate::new(name(i), loads[i].snapshot(now, speeds[i]), speeds[i], 1.0);
        let found = self.shortlist.consider(view, ahead, (now, turn), &self.index, one)?;
        assert_eq!(found.pick, want);
        assert_eq!(found.chosen, all[want.index]);
        assert_eq!(format!("{:?}", found.lengths), format!("{:?}", MatchLengths::of(&all)));
        self.index.used_among(now, view, &found.lengths, want.uncached_tokens);
        Some(want)
    }
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1_u64..20_000).prop_map(Event::Starts),
        3 => Just(Event::Answers),
        2 => Just(Event::Ends),
        1 => Just(Event::Leaves),
        2 => (0_u64..4, 1_usize..=20).prop_map(|(kind, blocks)| Event::Holds(kind, blocks)),
    ]
}

/// Nanoseconds between two things: mostly little, at times so much that all is forgotten.
fn gap() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 0_u64..300_000_000, 2 => 0_u64..60_000_000_000, 1 => 0_u64..20_000_000_000_000]
}

proptest! {
    #[test]
    fn it_picks_what_all_candidates_give(
        workers in 2_usize..40,
        speeds in prop::collection::vec(prop_oneof![3 => Just(8.0), 1 => 2.0..40.0_f64], 1..5),
        steps in prop::collection::vec((gap(), any::<prop::sample::Index>(), event()), 1..120),
        asks in prop::collection::vec((0_u64..4, 1_u64..24, any::<u64>(), 0_usize..4), 1..8),
        of_text: bool,
    ) {
        let mut fleet = Fleet { of_text, ..Fleet::new(workers, &speeds).noted() };
        let each_blocks = if of_text { TEXT_BLOCKS } else { 1 };
        let mut now = Duration::from_secs(3);
        for (n, (gap, place, event)) in steps.into_iter().enumerate() {
            now += Duration::from_nanos(gap);
            fleet.happens(now, place.index(workers), event);
            let (kind, blocks, random, waits) = asks[n % asks.len()];
            let chain = fleet.prompt(kind, blocks);
            let view = RequestView {
                chain: &chain,
                prompt_tokens: blocks * each_blocks * 16 + random % 16 + 1,
                block_tokens: 16.0,
                media: &[],
                session: (random % 3 == 0).then_some(random),
            };
            let ahead = Ahead::with((0..waits).map(|i| (name((random >> i) as usize % workers), 40.0)));
            let turn = Turn { counter: n as u64, random };
            prop_assert!(fleet.choose(now, &view, &ahead, &turn).is_some());
        }
    }

    /// Whoever it says is open has no more backlog; and where one has surely less, it finds one.
    #[test]
    fn an_open_worker_is_found_where_there_is_one(
        steps in prop::collection::vec((gap(), 0_usize..5, event()), 1..60), horizon_ms in 0.0..3_000.0_f64,
        waits in 0_usize..5,
    ) {
        let mut fleet = Fleet::new(5, &[8.0, 3.0]).noted();
        let mut now = Duration::from_secs(3);
        for (gap, place, event) in steps {
            now += Duration::from_nanos(gap);
            fleet.happens(now, place, event);
            let ahead = Ahead::with([(name(waits), 700.0)].into_iter());
            let backlog = |place| fleet.candidate(now, place).load.pace.backlog_ms + ahead.of(name(place));
            let least = (0..5).map(backlog).fold(f64::INFINITY, f64::min);
            let open = fleet.shortlist.is_open(now, horizon_ms, &ahead);
            let is_so = if open { least <= horizon_ms } else { least > horizon_ms * 0.999 - 0.001 };
            prop_assert!(is_so, "{open}: {least} {horizon_ms}");
        }
    }
}

/// A fleet of a thousand, most of which have nothing to do: about as cheap are hundreds.
#[test]
fn a_thousand_mostly_idle_workers() {
    let mut fleet = Fleet::new(1_000, &[8.0]).noted();
    let (mut now, mut random) = (Duration::from_secs(1), 88172645463325252_u64);
    let mut reasons = std::collections::HashSet::new();
    for n in 0..2_000_u64 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        now += Duration::from_micros(random % 7_000);
        let chain = chain(random % 16, 10 + random % 11);
        let prompt_tokens = chain.len() as u64 * 16 + 5;
        let view =
            RequestView { chain: &chain, prompt_tokens, block_tokens: 16.0, media: &[], session: None };
        let turn = Turn { counter: n, random };
        let pick = fleet.choose(now, &view, &Ahead::default(), &turn).unwrap();
        reasons.insert(pick.reason);
        fleet.happens(now, pick.index, Event::Starts(pick.uncached_tokens * 40));
        drop(fleet.index.place(name(pick.index), &chain));
        let other = random as usize % 1_000;
        for event in [Event::Answers, Event::Ends] {
            fleet.happens(now, if random % 3 == 0 { other } else { pick.index }, event);
        }
    }
    assert!(reasons.len() > 1, "{reasons:?}");
}

#[test]
fn where_others_send_too_it_gives_no_answer() {
    let mut fleet = Fleet::new(3, &[8.0]);
    let chain = chain(0, 8);
    let view =
        RequestView { chain: &chain, prompt_tokens: 130, block_tokens: 16.0, media: &[], session: None };
    let now = Duration::from_secs(9);
    let turn = Turn { counter: 0, random: 3 };
    assert!(fleet.choose(now, &view, &Ahead::default(), &turn).is_none(), "nothing is known of any speed");
    for place in 0..3 {
        fleet.happens(now, place, Event::Ends);
    }
    assert!(fleet.choose(now, &view, &Ahead::default(), &turn).is_some());
    fleet.happens(now, 0, Event::Starts(100));
    let earlier = Duration::from_secs(8);
    assert!(fleet.choose(earlier, &view, &Ahead::default(), &turn).is_none());
    fleet.loads[1].engine_says(now, EngineLoad { running: 4, ..EngineLoad::default() }, fleet.loads[1].own());
    fleet.happens(now, 1, Event::Ends);
    assert!(fleet.choose(now, &view, &Ahead::default(), &turn).is_none());
    assert!(!fleet.shortlist.is_open(now, 1e9, &Ahead::default()));
}
