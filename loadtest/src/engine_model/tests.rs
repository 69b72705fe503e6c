//! The engine against the tester's oracle, block for block, and against what must hold of any engine.

use keyway_wire::block_hash::{BlockHash, Chain, HashKey};
use proptest::prelude::*;

use super::*;
use crate::{oracle::Oracle, workload::scale::Block};

const BLOCK: u32 = 16;

fn profile(kv_blocks: u32, token_budget: u32) -> Profile {
    let cost = StepCost {
        step_ns: 1000.0,
        weights_ns: 5000.0,
        token_ns: 100.0,
        attention_ns: 1.0,
        kv_read_ns: 1.0,
        sequence_ns: 50.0,
    };
    Profile { name: "test", about: "", block_tokens: BLOCK, kv_blocks, token_budget, running_max: 8, cost }
}

fn chain(ids: &[u64]) -> Box<[BlockHash]> {
    let mut chain = Chain::new(HashKey::new(0), b"");
    ids.iter().map(|id| chain.push(&id.to_le_bytes())).collect()
}

/// Whole blocks of these ids and a tail of `tail` tokens.
fn prompt(ids: &[u64], tail: u32, output_tokens: u32) -> Submission {
    Submission {
        prompt_tokens: ids.len() as u32 * BLOCK + tail,
        output_tokens,
        chain: chain(ids),
        fetched_tokens: 0,
    }
}

#[derive(Default)]
struct Seen(Vec<Token>);

impl Listener for Seen {
    fn token(&mut self, token: Token) {
        self.0.push(token);
    }
}

/// Hears of first and last tokens, at least.
#[derive(Default)]
struct SeenEnds(Vec<Token>);

impl Listener for SeenEnds {
    fn token(&mut self, token: Token) {
        if token.number == 1 || token.last {
            self.0.push(token);
        }
    }

    fn hears_all(&self) -> bool {
        false
    }
}

impl Seen {
    fn of(&self, id: RequestId) -> Vec<Token> {
        self.0.iter().copied().filter(|token| token.request == id).collect()
    }
}

/// Runs until nothing is left to do; gives the time of the last step's end.
fn drain(engine: &mut Engine, seen: &mut Seen) -> Nanos {
    let mut now = 0;
    while let Some(at) = engine.next_event_at() {
        now = at;
        engine.advance(at, seen);
    }
    now
}

proptest! {
    /// One request after another: what the engine finds cached is what the oracle's LRU cache holds. The
    /// engine has one block more, for the tail that is never cached.
    #[test]
    fn the_cache_agrees_with_the_oracle_block_for_block(
        prompts in prop::collection::vec((prop::collection::vec(0u64..3, 0..7), 1u32..BLOCK), 1..80),
        blocks in 7u32..24,
        budget in prop_oneof![Just(8u32), Just(40), Just(4096)],
    ) {
        let mut engine = Engine::new(profile(blocks + 1, budget));
        let mut oracle = Oracle::new(BLOCK, Some(blocks as usize));
        let mut now = 0;
        for (ids, tail) in prompts {
            let whole = ids.iter().map(|&id| Block { id, tokens: BLOCK });
            let want = oracle.ask(whole.chain([Block { id: 99, tokens: tail }])).pooled.unwrap();
            let mut seen = Seen::default();
            engine.submit(now, prompt(&ids, tail, 1)).unwrap();
            now = drain(&mut engine, &mut seen);
            prop_assert_eq!(u64::from(seen.0[0].cached_tokens), want);
        }
    }

    /// Whatever is submitted and cancelled, in whatever memory: every request that stays gets its tokens in
    /// order, and in the end all blocks are free.
    #[test]
    fn every_request_gets_its_tokens_and_nothing_is_kept(
        requests in prop::collection::vec(
            (prop::collection::vec(0u64..4, 0..5), 1u32..20, 1u32..40, 0u64..40_000, prop::bool::weighted(0.2)), 1..40),
        blocks in 8u32..30,
        budget in 8u32..200,
    ) {
        let mut engine = Engine::new(profile(blocks, budget)).recording();
        let (mut seen, mut now, mut kept) = (Seen::default(), 0, Vec::new());
        for (ids, tail, output, gap, leaves) in requests {
            now += gap;
            engine.advance(now, &mut seen);
            let Ok(id) = engine.submit(now, prompt(&ids, tail, output)) else { continue };
            if leaves {
                now += gap;
                engine.advance(now, &mut seen);
                engine.cancel(id);
            } else {
                kept.push((id, output));
            }
        }
        drain(&mut engine, &mut seen);
        for (id, output) in kept {
            let tokens = seen.of(id);
            prop_assert_eq!(tokens.iter().map(|t| t.number).collect::<Vec<_>>(), (1..=output).collect::<Vec<_>>());
            prop_assert!(tokens.is_sorted_by_key(|t| t.at));
            prop_assert!(tokens.iter().all(|t| t.last == (t.number == output)));
        }
        prop_assert_eq!((engine.running(), engine.waiting()), (0, 0));
        prop_assert_eq!(engine.pool().available(), blocks);
    }

    /// Who hears of first and last tokens alone hears of them as one does who hears of all, whenever it
    /// looks.
    #[test]
    fn steps_that_are_skipped_change_nothing(
        requests in prop::collection::vec(
            (prop::collection::vec(0u64..4, 0..5), 1u32..20, (1u32..90, 0u64..5), 0u64..300_000, prop::bool::weighted(0.1)),
            1..30,
        ),
        blocks in 8u32..60,
        budget in prop_oneof![Just(3u32), Just(64)],
    ) {
        let (mut all, mut ends) = (Seen::default(), SeenEnds::default());
        let mut engines = [(); 2].map(|()| Engine::new(profile(blocks, budget)).recording());
        let mut now = 0;
        for (ids, tail, (output, named), gap, leaves) in requests {
            // Blocks of answers have names, too, where those are cached.
            let blocks: Vec<u64> = ids.iter().copied().chain(7..7 + named).collect();
            let request = || Submission { chain: chain(&blocks), ..prompt(&ids, tail, output) };
            now += gap;
            engines[0].advance(now, &mut all);
            engines[1].advance(now, &mut ends);
            let taken = engines.each_mut().map(|engine| engine.submit(now, request()).ok());
            prop_assert_eq!(taken[0], taken[1]);
            now += gap / 2;
            engines[0].advance(now, &mut all);
            engines[1].advance(now, &mut ends);
            if let (true, Some(id)) = (leaves, taken[0]) {
                prop_assert_eq!(engines[0].cancel(id), engines[1].cancel(id));
            }
            prop_assert_eq!(engines[0].next_event_at(), engines[1].next_event_at());
        }
        engines[0].advance(Nanos::MAX, &mut all);
        engines[1].advance(Nanos::MAX, &mut ends);
        all.0.retain(|token| token.number == 1 || token.last);
        prop_assert_eq!(all.0, ends.0);
        prop_assert_eq!(engines[0].totals(), engines[1].totals());
        prop_assert_eq!(engines[0].take_changes(), engines[1].take_changes());
    }

    /// Looking only when the engine says that it may matter shows every first and last token in time.
    #[test]
    fn nothing_that_matters_comes_out_while_it_is_quiet(
        requests in prop::collection::vec(
            (prop::collection::vec(0u64..4, 0..5), 1u32..20, 1u32..60, 0u64..200_000), 1..30),
        blocks in 8u32..30,
    ) {
        let run = |lazy: bool| {
            let mut engine = Engine::new(profile(blocks, 64));
            let mut seen = Seen::default();
            let mut quiet = true;
            let mut look = |engine: &mut Engine, until: Nanos, seen: &mut Seen| {
                let next = |engine: &Engine| if lazy { engine.quiet_until() } else { engine.next_event_at() };
                while let Some(at) = next(engine).filter(|&at| at <= until) {
                    let before = seen.0.len();
                    engine.advance(at, seen);
                    quiet &= seen.0[before..].iter().all(|t| t.at == at || (t.number > 1 && !t.last));
                }
            };
            let mut now = 0;
            for (ids, tail, output, gap) in requests.clone() {
                now += gap;
                look(&mut engine, now, &mut seen);
                engine.advance(now, &mut seen);
                let _ = engine.submit(now, prompt(&ids, tail, output));
            }
            look(&mut engine, Nanos::MAX, &mut seen);
            (seen.0, quiet)
        };
        let (eager, lazy) = (run(false), run(true));
        prop_assert_eq!(&lazy.0, &eager.0);
        prop_assert!(lazy.1);
    }

    /// What stays after all stores and removals are applied is what the cache holds.
    #[test]
    fn changes_tell_what_the_cache_holds(
        requests in prop::collection::vec((prop::collection::vec(0u64..4, 0..6), 0u32..20, 1u32..50), 1..40),
        blocks in 8u32..20,
    ) {
        let mut engine = Engine::new(profile(blocks, 64)).recording();
        let mut held = std::collections::HashMap::new();
        let mut chains = std::collections::HashMap::new();
        for (ids, tail, output) in requests {
            let tail = if ids.is_empty() { tail.max(1) } else { tail };
            let submission = prompt(&ids, tail, output);
            let names = submission.chain.clone();
            let Ok(id) = engine.submit(0, submission) else { continue };
            chains.insert(id, names);
        }
        drain(&mut engine, &mut Seen::default());
        for change in engine.take_changes() {
            match change {
                Change::Stored { request, first, count } => {
                    for hash in &chains[&request][first as usize..(first + count) as usize] {
                        *held.entry(*hash).or_insert(0) += 1;
                    }
                }
                Change::Removed(hash) => {
                    *held.get_mut(&hash).unwrap() -= 1;
                    if held[&hash] == 0 {
                        held.remove(&hash);
                    }
                }
            }
        }
        let mut want: Vec<_> = engine.pool().names().collect();
        let mut got: Vec<_> = held.into_keys().collect();
        want.sort_unstable();
        got.sort_unstable();
        prop_assert_eq!(got, want);
    }
}

#[test]
fn a_prompt_of_whole_blocks_computes_its_last_block_again() {
    let mut engine = Engine::new(profile(20, 4096));
    let mut seen = Seen::default();
    for _ in 0..2 {
        engine.submit(0, prompt(&[1, 2, 3], 0, 1)).unwrap();
        drain(&mut engine, &mut seen);
    }
    assert_eq!(seen.0.iter().map(|t| t.cached_tokens).collect::<Vec<_>>(), [0, 2 * BLOCK]);
}

#[test]
fn the_first_token_waits_for_what_is_not_cached_and_no_more() {
    let mut engine = Engine::new(profile(100, 4096));
    let mut seen = Seen::default();
    let ids: Vec<u64> = (0..40).collect();
    engine.submit(0, prompt(&ids, 4, 1)).unwrap();
    let cold = drain(&mut engine, &mut seen);
    engine.submit(cold, prompt(&ids, 4, 1)).unwrap();
    let warm = drain(&mut engine, &mut seen) - cold;
    let work = StepWork {
        prefill_tokens: 4,
        prefill_pairs: 4.0 * 640.0 + 10.0,
        sequences: 1,
        ..StepWork::default()
    };
    assert_eq!(warm, engine.profile().cost.of(&work) as Nanos);
    assert!(warm * 10 < cold, "{warm} {cold}");
}

#[test]
fn a_long_prompt_does_not_stop_the_decoding_of_others() {
    let mut engine = Engine::new(profile(200, 64));
    let mut seen = Seen::default();
    let short = engine.submit(0, prompt(&[], 10, 30)).unwrap();
    let ids: Vec<u64> = (100..140).collect();
    let long = engine.submit(0, prompt(&ids, 1, 1)).unwrap();
    drain(&mut engine, &mut seen);
    let first_of_long = seen.of(long)[0].at;
    // 641 tokens in chunks of what the decoding one leaves of 64.
    let meanwhile = seen.of(short).iter().filter(|t| t.at <= first_of_long).count();
    assert_eq!(meanwhile, 12);
}

#[test]
fn decoding_slows_as_the_batch_and_its_contexts_grow() {
    let mean_gap = |profile: &Profile, streams: u64, prompt_blocks: u64| {
        let mut engine = Engine::new(Profile { running_max: 64, token_budget: 1 << 20, ..profile.clone() });
        let mut seen = Seen::default();
        let ids = |stream: u64| (0..prompt_blocks).map(|i| stream << 32 | i).collect::<Vec<_>>();
        let last = (0..streams).map(|s| engine.submit(0, prompt(&ids(s), 1, 64)).unwrap()).last().unwrap();
        drain(&mut engine, &mut seen);
        let tokens = seen.of(last);
        (tokens[63].at - tokens[0].at) as f64 / 63.0
    };
    // `instant` takes no time, and `fcfs-6k` none for decoding.
    for profile in PROFILES.into_iter().filter(|p| !["instant", "fcfs-6k", "smg-80k"].contains(&p.name)) {
        let one = mean_gap(&profile, 1, 4);
        assert!(mean_gap(&profile, 32, 4) > 1.005 * one, "{}", profile.name);
        assert!(mean_gap(&profile, 1, 400) > 1.0005 * one, "{}", profile.name);
    }
}

#[test]
fn without_blocks_the_last_one_admitted_waits_again() {
    let mut engine = Engine::new(profile(8, 4096));
    let mut seen = Seen::default();
    let a = engine.submit(0, prompt(&[1, 2], 1, 60)).unwrap();
    let b = engine.submit(0, prompt(&[3, 4], 1, 60)).unwrap();
    drain(&mut engine, &mut seen);
    assert!(engine.totals().preemptions > 0);
    let end = |id| seen.of(id).last().unwrap().at;
    assert!(end(a) < end(b));
    assert_eq!(seen.of(b).len(), 60);
}

#[test]
fn what_can_never_fit_is_refused() {
    let mut engine = Engine::new(profile(4, 4096));
    let refused = engine.submit(0, prompt(&[1, 2, 3, 4], 0, 2)).unwrap_err();
    assert_eq!(refused, Refusal::TooLong { tokens: 65, kv_tokens: 64 });
    assert!(engine.submit(0, prompt(&[1, 2, 3, 4], 0, 1)).is_ok());
}

#[test]
fn a_stall_moves_what_is_left_and_a_slowdown_what_comes_after() {
    let end = |prepare: fn(&mut Engine)| {
        let mut engine = Engine::new(profile(20, 4096));
        let id = engine.submit(0, prompt(&[1], 1, 3)).unwrap();
        prepare(&mut engine);
        let mut seen = Seen::default();
        drain(&mut engine, &mut seen);
        seen.of(id)[2].at
    };
    let plain = end(|_| ());
    let stalled = end(|engine| engine.resume(1_000_000));
    assert!(stalled >= 1_000_000 && stalled < 1_000_000 + plain);
    assert!(end(|engine| engine.slow_down(3.0)) > 2 * plain);
}

#[test]
fn the_instant_engine_is_done_at_once() {
    let mut engine = Engine::new(named("instant").unwrap());
    let mut seen = Seen::default();
    let id = engine.submit(7, prompt(&[1, 2], 1, 50)).unwrap();
    engine.advance(7, &mut seen);
    assert_eq!(seen.of(id).len(), 50);
    assert_eq!(engine.next_event_at(), None);
}

/// KV that has come from another engine takes a place in the cache, and no time to compute.
#[test]
fn what_has_come_with_a_request_is_computed_no_more_and_is_cached_from_then_on() {
    let prefilled = |fetched_tokens: u32| {
        let (mut engine, mut seen) = (Engine::new(profile(16, 512)), Seen::default());
        let id = engine.submit(0, Submission { fetched_tokens, ..prompt(&[1, 2, 3], 5, 2) }).unwrap();
        drain(&mut engine, &mut seen);
        (seen.of(id)[0], engine)
    };
    let (computed, _) = prefilled(0);
    for (fetched, of_prompt) in [(52, 52), (1_000, 52), (40, 40)] {
        let (first, engine) = prefilled(fetched);
        assert!(first.at < computed.at, "{fetched}");
        assert_eq!(first.cached_tokens, of_prompt, "the last token is computed always");
        assert_eq!(engine.pool().cached(&chain(&[1, 2, 3])), 3);
    }
    // Given up and taken up again, it is computed like any other.
    let (mut engine, mut seen) = (Engine::new(profile(6, 512)), Seen::default());
    let first = engine.submit(0, prompt(&[1, 2], 3, 40)).unwrap();
    let second = engine.submit(0, Submission { fetched_tokens: 34, ..prompt(&[7, 8], 3, 40) }).unwrap();
    drain(&mut engine, &mut seen);
    assert!(engine.totals().preemptions > 0);
    assert_eq!((seen.of(first).len(), seen.of(second).len()), (40, 40));
}
