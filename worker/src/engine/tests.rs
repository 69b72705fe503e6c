//! The engine over a backend that remembers: what it is fed, and with whom, must not change what it says.

mod broken_off;
mod drawing;
mod holds;
mod kv_events;
mod position;
mod remembering;
mod resume;
mod sharing;
mod soak;

use std::task::{Context, Poll};

use proptest::prelude::*;

use self::remembering::{Remembering, VOCAB};
use super::*;
use crate::engine::backend::{CacheGroup, Chunk, StepError};
use crate::engine::sampler::Sampling;
use crate::engine::sequence::{Event, FinishReason, TokenEvent};
use crate::metrics::StaticInfo;

const EOS: u32 = 3;
const SUPPRESSED: u32 = 4;

const FULL: &[CacheGroup] = &[CacheGroup::Full];
const HYBRID: &[CacheGroup] = &[CacheGroup::Full, CacheGroup::SlidingWindow { window: 10 }];

#[derive(Debug, Clone, Copy)]
struct Setup {
    groups: &'static [CacheGroup],
    block_size: usize,
    num_blocks: usize,
    limits: StepLimits,
}

const ROOMY: Setup = Setup {
    groups: FULL,
    block_size: 4,
    num_blocks: 400,
    limits: StepLimits { max_batched_tokens: 512, max_running: 16 },
};

fn engine(setup: Setup) -> Engine {
    let backend = Box::new(Remembering::new(setup.block_size, setup.num_blocks, setup.groups));
    engine_with(setup, backend)
}

fn engine_with(setup: Setup, backend: Box<dyn Backend>) -> Engine {
    let options = EngineOptions {
        limits: setup.limits,
        eos_token_ids: vec![EOS],
        suppress_token_ids: vec![SUPPRESSED],
        step_ahead: true,
    };
    let info = StaticInfo { model: "m", numerics_id: "n", block_size: 4, num_blocks: setup.num_blocks };
    Engine::new(backend, options, Arc::new(Metrics::new(&info).unwrap()), 7)
}

fn request(prompt: &[u32], max_tokens: usize, temperature: f32) -> GenerationRequest {
    let sampling = Sampling { temperature, top_p: 0.9, top_k: 20, seed: 11, ..Sampling::default() };
    GenerationRequest { prompt: prompt.to_vec(), max_tokens, sampling, ..GenerationRequest::default() }
}

fn add(engine: &mut Engine, request: GenerationRequest) -> Generation {
    let slots = Arc::new(Semaphore::new(1));
    let (sequence, generation) = Sequence::new(request, slots.try_acquire_owned().unwrap(), Instant::now());
    engine.scheduler.add(sequence);
    generation
}

fn step(engine: &mut Engine) {
    engine.step();
    engine.scheduler.check().unwrap();
    assert!(engine.scheduler.running().len() <= engine.options.limits.max_running);
    let planned: usize = engine.scheduler.plan().parts.iter().map(|p| p.tokens).sum();
    assert!(planned <= engine.options.limits.max_batched_tokens);
}

/// Runs everything to its end, with the integrity check after every step; returns each one's events.
fn finish_all(engine: &mut Engine, generations: Vec<Generation>) -> Vec<Vec<Event>> {
    while !engine.is_idle() {
        step(engine);
    }
    assert_eq!(engine.scheduler.blocks().used_blocks(), 0);
    let events = |mut generation: Generation| {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let next = || match generation.poll_next(&mut context) {
            Poll::Ready(event) => event,
            Poll::Pending => panic!("the generation ended without its last event"),
        };
        std::iter::from_fn(next).collect()
    };
    generations.into_iter().map(events).collect()
}

fn token(event: Event) -> Option<TokenEvent> {
    match event {
        Event::Token(event) => Some(event),
        Event::Prompt(_) | Event::Kept(_) | Event::Failed(_) | Event::BrokenOff(_) => None,
    }
}

/// The same, of tokens only.
fn finish(engine: &mut Engine, generations: Vec<Generation>) -> Vec<Vec<TokenEvent>> {
    let tokens = |events: Vec<Event>| events.into_iter().filter_map(token).collect();
    finish_all(engine, generations).into_iter().map(tokens).collect()
}

fn run(setup: Setup, requests: &[GenerationRequest]) -> Vec<Vec<u32>> {
    let mut engine = engine(setup);
    let generations = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
    tokens(&finish(&mut engine, generations))
}

fn tokens(events: &[Vec<TokenEvent>]) -> Vec<Vec<u32>> {
    events.iter().map(|events| events.iter().map(|e| e.token).collect()).collect()
}

/// The tokens of each request when it has a roomy engine to itself.
fn alone(requests: &[GenerationRequest], groups: &'static [CacheGroup]) -> Vec<Vec<u32>> {
    requests.iter().flat_map(|r| run(Setup { groups, ..ROOMY }, std::slice::from_ref(r))).collect()
}

fn groups() -> impl Strategy<Value = &'static [CacheGroup]> {
    const WINDOW: CacheGroup = CacheGroup::SlidingWindow { window: 5 };
    const ALL: &[&[CacheGroup]] =
        &[FULL, HYBRID, &[WINDOW], &[CacheGroup::MlaLatent, CacheGroup::Full, WINDOW]];
    prop::sample::select(ALL)
}

/// Prompts over two ids, so that they share prefixes.
fn requests() -> impl Strategy<Value = Vec<GenerationRequest>> {
    let prompt = prop::collection::vec(0u32..2, 1..40);
    let one = (prompt, 1usize..12, prop_oneof![Just(0.0f32), Just(0.8)], -1i64..2);
    let one =
        one.prop_map(|(prompt, max, t, priority)| GenerationRequest { priority, ..request(&prompt, max, t) });
    prop::collection::vec(one, 1..9)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn tokens_do_not_depend_on_batch_budget_cache_or_preemption(
        requests in requests(),
        block_size in 1usize..9,
        spare_blocks in 0usize..12,
        max_running in 1usize..9,
        spare_budget in 0usize..20,
        groups in groups(),
    ) {
        let expected = alone(&requests, groups);
        // Just enough for the largest request: preemption is the rule.
        let limits = StepLimits { max_batched_tokens: max_running + spare_budget, max_running };
        let rules = GroupRules::new(groups, block_size);
        let needed = |r: &GenerationRequest| {
            rules.blocks_needed(r.prompt.len() + r.max_tokens, limits.max_batched_tokens)
        };
        let largest = requests.iter().map(needed).max().unwrap();
        let tight = Setup { groups, block_size, num_blocks: largest + spare_blocks, limits };
        let mut engine = engine(tight);
        for _warmth in 0..2 {
            let generations = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
            prop_assert_eq!(tokens(&finish(&mut engine, generations)), expected.clone());
        }
    }
}

#[test]
fn a_batch_of_eight_and_a_warm_cache_give_the_same_tokens() {
    let prompts: Vec<Vec<u32>> =
        (0..8).map(|i| (0..30 + i).map(|j| (j * j + i / 4) % 50).collect()).collect();
    let requests: Vec<_> = prompts.iter().map(|p| request(p, 20, 0.0)).collect();
    let expected = alone(&requests, FULL);
    let mut engine = engine(ROOMY);
    for warm in [false, true] {
        let generations = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
        let events = finish(&mut engine, generations);
        assert_eq!(tokens(&events), expected);
        if warm {
            assert!(events.iter().zip(&prompts).all(|(e, p)| e[0].cached_tokens == (p.len() - 1) / 4 * 4));
        }
    }
}

#[test]
fn preemption_happens_and_is_counted() {
    let requests: Vec<_> = (0..4).map(|i| request(&[i, 9, 9], 13, 0.0)).collect();
    let setup = Setup { num_blocks: 6, ..ROOMY };
    let mut engine = engine(setup);
    let generations: Vec<_> = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
    assert_eq!(tokens(&finish(&mut engine, generations)), alone(&requests, FULL));
    assert!(engine.metrics.preemptions.get() > 0);
    // A preempted sequence's prompt is counted once.
    assert_eq!(engine.metrics.prompt_tokens.get(), 12);
}

#[test]
fn an_ending_is_named_and_a_suppressed_id_never_comes() {
    let mut stopped = false;
    for first in 0..40 {
        let events = {
            let mut engine = engine(ROOMY);
            let generation = add(&mut engine, request(&[first], 30, 1.0));
            finish(&mut engine, vec![generation]).remove(0)
        };
        let (last, before) = events.split_last().unwrap();
        assert!(before.iter().all(|e| e.finish.is_none() && e.token != EOS));
        assert!(events.iter().all(|e| e.token != SUPPRESSED));
        match last.finish {
            Some(FinishReason::Stop) => assert_eq!(last.token, EOS),
            Some(FinishReason::Length) => assert_eq!(events.len(), 30),
            other => panic!("{other:?}"),
        }
        stopped |= last.finish == Some(FinishReason::Stop);
    }
    assert!(stopped, "no prompt reached EOS: the test tests nothing");
}

#[test]
fn eos_can_be_ignored() {
    let ignoring = |ignore_eos| GenerationRequest { ignore_eos, ..request(&[5], 200, 1.0) };
    let (with, without) = (run(ROOMY, &[ignoring(true)]), run(ROOMY, &[ignoring(false)]));
    assert_eq!(with[0].len(), 200);
    assert!(without[0].len() < 200 && with[0].starts_with(&without[0]));
}

#[test]
fn decodes_run_beside_a_long_prefill() {
    let mut engine = engine(Setup { limits: StepLimits { max_batched_tokens: 8, max_running: 4 }, ..ROOMY });
    let mut short = add(&mut engine, request(&[1, 2], 30, 0.0));
    step(&mut engine);
    let _long = add(&mut engine, request(&[7; 100], 1, 0.0));
    let mut context = Context::from_waker(std::task::Waker::noop());
    for _ in 0..10 {
        step(&mut engine);
        assert!(matches!(short.poll_next(&mut context), Poll::Ready(Some(_))), "a step without a token");
    }
}

#[test]
fn a_dropped_client_frees_its_blocks_at_the_next_step_wherever_it_stands() {
    let small = Setup { limits: StepLimits { max_batched_tokens: 8, max_running: 2 }, ..ROOMY };
    let mut engine = engine(small);
    let decoding = add(&mut engine, request(&[1, 2], 100, 0.0));
    let prefilling = add(&mut engine, request(&[7; 100], 100, 0.0));
    let waiting = add(&mut engine, request(&[8; 10], 100, 0.0));
    step(&mut engine);
    step(&mut engine);
    assert_eq!((engine.scheduler.running().len(), engine.scheduler.waiting_len()), (2, 1));
    drop(waiting);
    step(&mut engine);
    assert_eq!(engine.scheduler.waiting_len(), 0);
    drop(prefilling);
    step(&mut engine);
    assert_eq!((engine.scheduler.running().len(), engine.scheduler.blocks().used_blocks()), (1, 2));
    drop(decoding);
    step(&mut engine);
    assert!(engine.scheduler.is_idle());
    assert_eq!(engine.scheduler.blocks().used_blocks(), 0);
    assert_eq!(engine.metrics.kv_blocks_used.get(), 0);
}

#[test]
fn a_full_queue_refuses_all_prompts_of_a_request_or_none() {
    let info = StaticInfo { model: "m", numerics_id: "n", block_size: 4, num_blocks: 9 };
    let backend = Remembering::new(4, 9, FULL);
    let options = EngineOptions {
        limits: ROOMY.limits,
        eos_token_ids: vec![],
        suppress_token_ids: vec![],
        step_ahead: true,
    };
    let spawned = spawn(Box::new(backend), options, Arc::new(Metrics::new(&info).unwrap())).unwrap();
    let handle = spawned.handle;
    let many = |n| vec![request(&[1], 1, 0.0); n];
    assert_eq!(handle.submit(many(LIVE_SEQUENCES_MAX + 1)).unwrap_err(), SubmitError::Overloaded);
    let generations = handle.submit(many(LIVE_SEQUENCES_MAX)).unwrap();
    assert_eq!(generations.len(), LIVE_SEQUENCES_MAX);
    drop((generations, handle));
    spawned.thread.join().unwrap();
}

/// A backend that breaks must end its clients' waiting.
#[test]
fn an_engine_that_fails_closes_every_stream_and_says_so() {
    let info = StaticInfo { model: "m", numerics_id: "n", block_size: 4, num_blocks: 9 };
    // No KV blocks behind the promised ones: the first step panics.
    struct Broken;
    impl Backend for Broken {
        fn vocab_size(&self) -> usize {
            VOCAB
        }
        fn block_size(&self) -> usize {
            4
        }
        fn num_blocks(&self) -> usize {
            9
        }

        fn cache_groups(&self) -> &[CacheGroup] {
            &[CacheGroup::Full]
        }
        fn step(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> Result<(), StepError> {
            panic!("broken on purpose");
        }
    }
    let options = EngineOptions {
        limits: ROOMY.limits,
        eos_token_ids: vec![],
        suppress_token_ids: vec![],
        step_ahead: true,
    };
    let spawned = spawn(Box::new(Broken), options, Arc::new(Metrics::new(&info).unwrap())).unwrap();
    let mut generation = spawned.handle.submit(vec![request(&[1], 1, 0.0)]).unwrap().remove(0);
    assert!(spawned.thread.join().is_err());
    assert!(!spawned.handle.is_alive());
    let mut context = Context::from_waker(std::task::Waker::noop());
    assert_eq!(generation.poll_next(&mut context), Poll::Ready(None));
    assert_eq!(spawned.handle.submit(vec![request(&[1], 1, 0.0)]).unwrap_err(), SubmitError::Stopped);
}
