//! Ranks that run attention too, each for requests of its own: the bits and tokens of one rank, with any
//! number of ranks, over every transport, in every family, with ranks that rest and ranks that leave in any
//! exchange.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use super::experts::{
    LAYOUT, TRANSPORTS, Threads, Transport, capacity, metrics, options, spread, with_experts,
};
use super::invariance::{side_by_side, tokens};
use super::*;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::StepLimits;
use crate::engine::sequence::{Event, Generation, GenerationRequest};
use crate::engine::{EngineHandle, EngineOptions, spawn};
use crate::metrics::{Metrics, StaticInfo};
use crate::model::experts::GroupOptions;
use crate::parallel::data_parallel::{RankBackend, backends};

/// Every rank's backend.
fn joined(source: &ModelSource, threads: Threads, options: GroupOptions) -> Vec<RankBackend> {
    let attention = Some(LoadedModel::load(source).unwrap().attention(LAYOUT));
    let backend = spread(source, threads, GroupOptions { attention, ..options });
    backends(backend, options.ranks, metrics(options.ranks)).unwrap()
}

/// Words that hold everything beside many tokens.
fn roomy(source: &ModelSource, tokens: usize) -> usize {
    let step = StepWords::most(200, 8, 3, 16) + 16;
    capacity(source, tokens).max(LoadedModel::load(source).unwrap().output_words()).max(step)
}

/// A rank's prompts, side by side in pieces; ranks have fewer of them the higher they are.
fn generate(rank: usize, backend: &mut dyn Backend) -> Vec<Vec<u32>> {
    let step = rank as u32;
    let prompts: Vec<Vec<u32>> = [7, 11, 13][..3 - rank].iter().map(|by| tokens(90, by + step)).collect();
    let cuts = [vec![85, 1, 1, 1], vec![33 + rank], vec![1, 80, 1, 1]];
    let mut pool = Pool::ascending(backend);
    side_by_side(backend, &mut pool, &prompts, &cuts)
}

#[test]
fn every_rank_has_the_bits_of_one_rank_whatever_the_others_do() {
    let mut families = 0;
    for source in with_experts() {
        let mut alone = backend(&source);
        let expected: Vec<_> = (0..3).map(|rank| generate(rank, &mut alone)).collect();
        for ranks in [2, 4] {
            for transport in TRANSPORTS {
                // Some steps have more tokens than a message takes, and the logits go in several.
                let threads = Threads::new(&source, *transport, ranks, roomy(&source, 70));
                let ranks = joined(&source, threads, options(ranks));
                thread::scope(|scope| {
                    // The last of four rests all the time.
                    for (rank, mut backend) in ranks.into_iter().enumerate().filter(|(rank, _)| *rank < 3) {
                        let (expected, source) = (&expected[rank], &source);
                        scope.spawn(move || {
                            let name = format!("{source}, rank {rank}, {transport:?}");
                            assert_eq!(&generate(rank, &mut backend), expected, "{name}");
                        });
                    }
                });
            }
        }
        families += 1;
    }
    assert_eq!(families, 8);
}

const LIMITS: StepLimits = StepLimits { max_batched_tokens: 64, max_running: 4 };

fn engine(backend: impl Backend + 'static) -> (EngineHandle, thread::JoinHandle<()>) {
    let options = EngineOptions {
        limits: LIMITS,
        eos_token_ids: vec![3],
        suppress_token_ids: vec![4],
        step_ahead: true,
    };
    let info = StaticInfo { model: "m", numerics_id: "n", block_size: 16, num_blocks: NUM_BLOCKS };
    let spawned = spawn(Box::new(backend), options, Arc::new(Metrics::new(&info).unwrap())).unwrap();
    (spawned.handle, spawned.thread)
}

/// Greedy and seeded requests in turn, with prefixes in common.
fn requests(count: usize) -> Vec<GenerationRequest> {
    let request = |i: usize| GenerationRequest {
        prompt: [tokens(40, 7), tokens(9 + 8 * i as u32, 3 + i as u32)].concat(),
        max_tokens: 10 + i,
        ignore_eos: true,
        sampling: Sampling {
            temperature: if i.is_multiple_of(2) { 0.0 } else { 0.9 },
            seed: i as u64,
            ..Sampling::default()
        },
        ..GenerationRequest::default()
    };
    (0..count).map(request).collect()
}

/// A generation's tokens, and why it broke off if it did.
fn finish(mut generation: Generation) -> (Vec<u32>, Option<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut tokens = Vec::new();
    loop {
        match runtime.block_on(poll_fn(|context| generation.poll_next(context))) {
            Some(Event::Token(event)) => tokens.push(event.token),
            Some(Event::BrokenOff(reason)) => return (tokens, Some(reason)),
            Some(other) => panic!("{other:?}"),
            None => return (tokens, None),
        }
    }
}

/// Every request's outcome, where request `i` goes to the engine that `place` says.
fn run(
    handles: &[EngineHandle],
    count: usize,
    place: impl Fn(usize) -> usize,
) -> Vec<(Vec<u32>, Option<String>)> {
    let submit =
        |(i, request): (usize, GenerationRequest)| handles[place(i)].submit(vec![request]).unwrap().remove(0);
    let generations: Vec<_> = requests(count).into_iter().enumerate().map(submit).collect();
    generations.into_iter().map(finish).collect()
}

fn alone(source: &ModelSource, count: usize) -> Vec<(Vec<u32>, Option<String>)> {
    let (handle, thread) = engine(backend(source));
    let outcomes = run(&[handle], count, |_| 0);
    thread.join().unwrap();
    outcomes
}

fn engines(ranks: Vec<RankBackend>) -> (Vec<EngineHandle>, Vec<thread::JoinHandle<()>>) {
    ranks.into_iter().map(engine).unzip()
}

/// Waits for their ends, which come without anybody to ask them.
fn join(threads: Vec<thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn requests_spread_over_engines_have_the_tokens_of_one_engine() {
    for source in with_experts() {
        let expected = alone(&source, 7);
        assert!(expected.iter().all(|(tokens, broken)| tokens.len() >= 10 && broken.is_none()));
        let threads = Threads::new(&source, Transport::Local, 3, roomy(&source, 200));
        let (handles, threads) = engines(joined(&source, threads, options(3)));
        // Over all; two ranks without any; again over all, with prefixes that are cached.
        for place in [|i| i % 3, |_| 1, |i| 2 - i % 3] {
            assert_eq!(run(&handles, 7, place), expected, "{source}");
        }
        drop(handles);
        join(threads);
    }
}

/// What the rank kept is lost with it, and computed again.
#[test]
fn a_rank_that_leaves_in_any_exchange_changes_no_token() {
    let source = ModelSource::Random;
    let expected = alone(&source, 5);
    let run = |leaves_at| {
        let mut threads = Threads::new(&source, Transport::Local, 3, roomy(&source, 200));
        threads.leaves_at = leaves_at;
        let (exchanges, starts) = (Arc::clone(&threads.exchanges), Arc::clone(&threads.starts));
        let (handles, threads) = engines(joined(&source, threads, options(3)));
        // The second time with what engines kept, some of whom rested when the rank left.
        for time in 1..3 {
            let outcomes = run(&handles, 5, |i| 2 * i % 3);
            assert_eq!(outcomes, expected, "leaving in exchange {leaves_at}, time {time}");
        }
        drop(handles);
        join(threads);
        (exchanges.load(Ordering::SeqCst), starts.load(Ordering::SeqCst))
    };
    let (last, starts) = run(0);
    assert!(last > 200 && starts == 1, "{last} exchanges are few");
    // How many there are depends on when requests arrive, which on a busy machine is in fewer steps.
    let (mut left, runs) = (0, last * 3 / 4);
    for leaves_at in 1..runs {
        let (exchanges, starts) = run(leaves_at);
        let leaves = exchanges > leaves_at;
        // Behind the last exchange of a run nothing is begun again.
        let is_last = exchanges == leaves_at;
        assert!(is_last || starts == 1 + u64::from(leaves), "leaving in exchange {leaves_at} of {exchanges}");
        left += u64::from(leaves);
    }
    assert!(2 * left > runs, "it left in {left} of {runs} runs");
}

#[test]
fn without_retries_all_in_flight_fail_with_the_ranks_name_and_the_next_are_served() {
    let source = ModelSource::Random;
    let expected = alone(&source, 4);
    let mut threads = Threads::new(&source, Transport::Local, 3, roomy(&source, 200));
    threads.leaves_at = 30;
    let (handles, threads) = engines(joined(&source, threads, GroupOptions { retries: 0, ..options(3) }));
    let outcomes = run(&handles, 4, |i| i % 2);
    let broken: Vec<_> = outcomes.iter().filter_map(|(_, reason)| reason.clone()).collect();
    assert!(!broken.is_empty() && broken.iter().all(|reason| reason.contains("rank 2 failed")), "{broken:?}");
    for ((tokens, _), (whole, _)) in outcomes.iter().zip(&expected) {
        assert!(whole.starts_with(tokens));
    }
    for place in [|i| i % 2, |i| i % 3] {
        assert_eq!(run(&handles, 4, place), expected);
    }
    drop(handles);
    join(threads);
}

/// The load of all ranks makes experts move, on all of them.
#[test]
fn experts_that_move_change_no_bit() {
    let source = ModelSource::Random;
    let prompt = vec![7; 150];
    let expected = bits(&run_whole(&mut backend(&source), &prompt));
    let threads = Threads::new(&source, Transport::Local, 2, roomy(&source, 200));
    let attention = Some(LoadedModel::load(&source).unwrap().attention(LAYOUT));
    let mut lead = spread(&source, threads, GroupOptions { redundant: 1, attention, ..options(2) });
    let mut outputs = Vec::new();
    for _ in 0..3 {
        lead.rebalance_soon();
        let mut sequence = Sequence::new(&lead);
        sequence.grow(&mut Pool::ascending(&lead), prompt.len());
        let tables = sequence.tables();
        let chunk = Chunk { tokens: &prompt, start: 0, tables: &tables, wants_logits: true };
        // Only rank 1 has tokens, so only it knows what they ask for.
        let parts = [StepWords::default(), StepWords::write(&[chunk])];
        lead.joint_step(&parts, &mut outputs).unwrap();
        assert!(outputs[0].logits.is_empty());
        assert_eq!(bits(&outputs[1].logits), expected);
    }
    assert!(lead.placements_changed() > 0);
}
