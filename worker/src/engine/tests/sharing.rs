//! Equal prompts at the same time, priorities, salts: who computes what, and in which order.

use std::sync::atomic::Ordering;

use super::*;

/// An engine and the count of tokens its backend computed.
fn counting(setup: Setup) -> (Engine, Arc<std::sync::atomic::AtomicUsize>) {
    let backend = Remembering::new(setup.block_size, setup.num_blocks, setup.groups);
    let computed = Arc::clone(&backend.computed);
    (engine_with(setup, Box::new(backend)), computed)
}

/// Prompts of 90 tokens that share the first 80.
fn siblings(count: u32) -> Vec<GenerationRequest> {
    let prompt = |own: u32| (0..80).map(|i| i % 50).chain([own; 10]).collect::<Vec<u32>>();
    (0..count).map(|i| GenerationRequest { ignore_eos: true, ..request(&prompt(i), 5, 0.0) }).collect()
}

/// Tokens computed for eight siblings that arrive together, each with four more for its answer.
fn computed_for_siblings(setup: Setup, without_promises: bool) -> usize {
    let (mut engine, computed) = counting(setup);
    engine.scheduler.blocks_mut().without_promises = without_promises;
    let requests = siblings(8);
    let generations = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
    assert_eq!(tokens(&finish(&mut engine, generations)), alone(&requests, setup.groups));
    computed.load(Ordering::Relaxed)
}

#[test]
fn a_prefix_that_arrives_eight_times_is_computed_once() {
    for groups in [FULL, HYBRID] {
        for max_batched_tokens in [16, 37, 100, 1000] {
            let limits = StepLimits { max_batched_tokens, max_running: 16 };
            let setup = Setup { groups, limits, ..ROOMY };
            assert_eq!(computed_for_siblings(setup, false), 80 + 8 * (10 + 4), "{max_batched_tokens}");
        }
        // Everything fits one step: without promises each computes the prefix for itself.
        let setup =
            Setup { groups, limits: StepLimits { max_batched_tokens: 1000, max_running: 16 }, ..ROOMY };
        assert_eq!(computed_for_siblings(setup, true), 8 * (80 + 10 + 4));
    }
}

#[test]
fn siblings_get_their_first_token_in_the_same_step() {
    let (mut engine, _) = counting(ROOMY);
    let mut generations: Vec<_> = siblings(8).into_iter().map(|r| add(&mut engine, r)).collect();
    step(&mut engine);
    let mut context = Context::from_waker(std::task::Waker::noop());
    for (i, generation) in generations.iter_mut().enumerate() {
        let Poll::Ready(Some(Event::Token(event))) = generation.poll_next(&mut context) else {
            panic!("no token for {i}")
        };
        assert_eq!(event.cached_tokens, if i == 0 { 0 } else { 80 });
    }
}

/// Whoever computes the shared prefix leaves after any number of steps: the others take over, and nothing is
/// lost.
#[test]
fn the_first_of_several_may_leave_at_any_time() {
    for groups in [FULL, HYBRID] {
        let limits = StepLimits { max_batched_tokens: 9, max_running: 8 };
        let requests = siblings(4);
        let expected = alone(&requests, groups);
        for steps in 0..30 {
            let (mut engine, computed) = counting(Setup { groups, limits, ..ROOMY });
            let mut generations: Vec<_> = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
            for _ in 0..steps {
                step(&mut engine);
            }
            drop(generations.remove(0));
            assert_eq!(tokens(&finish(&mut engine, generations)), expected[1..], "after {steps} steps");
            let computed = computed.load(Ordering::Relaxed);
            assert!(computed <= 80 + 4 * (10 + 4), "{computed} after {steps} steps");
        }
    }
}

#[test]
fn salts_never_share() {
    for groups in [FULL, HYBRID] {
        let (mut engine, computed) = counting(Setup { groups, ..ROOMY });
        let salted =
            |salt: &str| GenerationRequest { salt: Arc::from(salt.as_bytes()), ..siblings(1).remove(0) };
        for warm in 0..2 {
            let generations = ["", "a", "b", "ab"].map(|s| add(&mut engine, salted(s))).into_iter().collect();
            finish(&mut engine, generations);
            // Cold: nothing is shared. Warm: each finds its own, up to the block before the last token's.
            let all = 4 * 94 + warm * 4 * (90 - 88 + 4);
            assert_eq!(computed.load(Ordering::Relaxed), all, "{warm}");
        }
    }
}

/// The order in which requests get their first token, when only one runs at a time.
#[test]
fn the_lower_priority_number_comes_first_then_the_earlier_arrival() {
    let mut engine = engine(Setup { limits: StepLimits { max_batched_tokens: 64, max_running: 1 }, ..ROOMY });
    let with = |priority| GenerationRequest { priority, ..request(&[9], 2, 0.0) };
    let mut generations = [5, 0, -3, 0].map(|priority| Some(add(&mut engine, with(priority))));
    let mut context = Context::from_waker(std::task::Waker::noop());
    let mut order = Vec::new();
    while order.len() < 4 {
        step(&mut engine);
        for (i, generation) in generations.iter_mut().enumerate() {
            if generation.as_mut().is_some_and(|g| g.poll_next(&mut context).is_ready()) {
                order.push(i);
                *generation = None; // leaves
            }
        }
    }
    assert_eq!(order, [2, 1, 3, 0]);
}

#[test]
fn the_worst_priority_is_preempted_and_the_best_never() {
    // Three sequences of 40 tokens in the end, and room for two.
    let mut engine = engine(Setup { num_blocks: 20, ..ROOMY });
    let with =
        |priority, first| GenerationRequest { priority, ignore_eos: true, ..request(&[first; 8], 32, 0.0) };
    let requests = [with(1, 5), with(0, 6), with(2, 7)];
    let generations: Vec<_> = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
    let mut preempted = Vec::new();
    while !engine.scheduler.is_idle() {
        let before: Vec<i64> = engine.scheduler.running().iter().map(|s| s.rank.priority).collect();
        step(&mut engine);
        if engine.scheduler.plan().preempted > 0 {
            let after: Vec<i64> = engine.scheduler.running().iter().map(|s| s.rank.priority).collect();
            preempted.extend(before.into_iter().filter(|p| !after.contains(p)));
        }
    }
    assert!(!preempted.is_empty() && preempted.iter().all(|p| *p == 2), "{preempted:?}");
    assert_eq!(tokens(&finish(&mut engine, generations)), alone(&requests, FULL));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// However tight the memory: the best-ranked of those who run gets a token in every step, so no step is
    /// in vain.
    #[test]
    fn the_best_ranked_always_progresses(
        requests in requests(), spare_blocks in 0usize..4, max_running in 1usize..9, spare_budget in 0usize..6,
        groups in groups(),
    ) {
        let limits = StepLimits { max_batched_tokens: max_running + spare_budget, max_running };
        let rules = GroupRules::new(groups, 4);
        let needed = |r: &GenerationRequest| {
            rules.blocks_needed(r.prompt.len() + r.max_tokens, limits.max_batched_tokens)
        };
        let num_blocks = requests.iter().map(needed).max().unwrap() + spare_blocks;
        let mut engine = engine(Setup { groups, block_size: 4, num_blocks, limits });
        let generations: Vec<_> = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
        let best = |engine: &Engine| {
            let best = engine.scheduler.running().iter().min_by_key(|s| s.rank);
            best.map(|s| (s.rank, s.computed))
        };
        while !engine.scheduler.is_idle() {
            let before = best(&engine);
            step(&mut engine);
            if let Some((rank, computed)) = before {
                let after = engine.scheduler.running().iter().find(|s| s.rank == rank);
                // Gone means finished: the best is never the victim while others run, and alone it fits.
                prop_assert!(after.is_none_or(|s| s.computed > computed));
                prop_assert!(engine.scheduler.waiting().all(|s| s.rank != rank), "the best was preempted");
            }
        }
        drop(generations);
    }
}
