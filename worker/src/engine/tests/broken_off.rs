//! Steps that a backend does not carry out: everybody in flight is told, nothing half done stays cached, and
//! the next request is served.

use super::*;
use crate::engine::block_manager::CacheChange;
use crate::engine::kv_events;

/// [`Remembering`], but for the steps whose numbers `broken` has: these write nothing.
struct Breaking {
    inner: Remembering,
    step: usize,
    broken: Vec<usize>,
}

impl Backend for Breaking {
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn block_size(&self) -> usize {
        self.inner.block_size()
    }

    fn num_blocks(&self) -> usize {
        self.inner.num_blocks()
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        self.inner.cache_groups()
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        self.step += 1;
        if self.broken.contains(&self.step) {
            return Err(StepError("rank 2 is gone".to_owned()));
        }
        self.inner.step(chunks, logits)
    }
}

fn breaking(setup: Setup, broken: Vec<usize>) -> Engine {
    let inner = Remembering::new(setup.block_size, setup.num_blocks, setup.groups);
    engine_with(setup, Box::new(Breaking { inner, step: 0, broken }))
}

fn prompts() -> Vec<GenerationRequest> {
    let begun: Vec<u32> = (0..23).map(|i| 10 + i % 5).collect();
    let prompt = |end: u32| [&begun[..], &[20 + end, 21]].concat();
    (0..6).map(|i| GenerationRequest { ignore_eos: true, ..request(&prompt(i % 4), 12, 0.8) }).collect()
}

#[test]
fn whoever_is_in_flight_is_told_and_the_next_ones_get_what_they_always_get() {
    for groups in [FULL, HYBRID] {
        // Some of them still wait when the step breaks.
        let limits = StepLimits { max_batched_tokens: 32, max_running: 3 };
        let setup = Setup { groups, block_size: 4, num_blocks: 60, limits };
        let mut whole = engine(setup);
        let waiting = prompts().into_iter().map(|request| add(&mut whole, request)).collect();
        let expected = tokens(&finish(&mut whole, waiting));
        for broken in 1..25 {
            let mut engine = breaking(setup, vec![broken, broken + 3]);
            let (recorder, follower) = kv_events::channel(60, engine.metrics.kv_event_batches_merged.clone());
            engine.follow(recorder);
            let mut state = std::collections::BTreeSet::new();
            let mut told = 0;
            for _ in 0..3 {
                let waiting: Vec<_> =
                    prompts().into_iter().map(|request| add(&mut engine, request)).collect();
                let events = finish_all(&mut engine, waiting);
                for (events, expected) in events.iter().zip(&expected) {
                    let ids: Vec<u32> =
                        events.iter().cloned().filter_map(token).map(|event| event.token).collect();
                    match events.last() {
                        Some(Event::BrokenOff(reason)) => {
                            assert_eq!(reason, "rank 2 is gone");
                            assert!(expected.starts_with(&ids));
                            told += 1;
                        }
                        _ => assert_eq!(&ids, expected),
                    }
                }
                assert_eq!(engine.scheduler.check(), Ok(()));
                assert_eq!(engine.scheduler.blocks().used_blocks(), 0);
                assert_eq!(engine.metrics.requests_running.get(), 0);
                for change in follower.take().into_iter().flat_map(|step| step.changes) {
                    let block = change.block();
                    match change {
                        CacheChange::Stored { .. } => assert!(state.insert(block), "stored twice"),
                        CacheChange::Removed { .. } => {
                            assert!(state.remove(&block), "removed and not stored");
                        }
                    }
                }
                let resident = engine.scheduler.blocks().resident();
                assert_eq!(state, resident.iter().map(CacheChange::block).collect());
            }
            assert!(told > 0, "step {broken} did not break");
        }
    }
}
