//! What the engine tells the followers of its prefix cache: all of it, and no block before its KV is there.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use super::*;
use crate::kv_events::{Follower, channel};

/// Remembers, and keeps account of which prefixes' KV it has written.
struct Witness {
    inner: Remembering,
    computed: Arc<Mutex<HashSet<Vec<u32>>>>,
    announced: Arc<Announced>,
}

/// What a follower has come to: the whole prefix of each block.
struct Announced {
    follower: Follower,
    prefixes: Mutex<HashMap<u128, Vec<u32>>>,
}

impl Announced {
    /// Takes what was announced since the last call.
    fn update(&self, computed: &HashSet<Vec<u32>>) {
        let mut prefixes = self.prefixes.lock().unwrap();
        for change in self.follower.take().into_iter().flat_map(|step| step.changes) {
            match change {
                CacheChange::Stored { hash, parent, tokens, .. } => {
                    let before = parent.map_or(&[][..], |parent| &prefixes[&parent]);
                    let prefix = [before, &tokens].concat();
                    assert!(computed.contains(&prefix), "announced before it is computed: {prefix:?}");
                    assert!(prefixes.insert(hash, prefix).is_none(), "announced twice");
                }
                CacheChange::Removed { hash, .. } => {
                    assert!(prefixes.remove(&hash).is_some(), "removed, and never announced");
                }
            }
        }
    }
}

impl Backend for Witness {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn block_size(&self) -> usize {
        self.inner.block_size
    }

    fn num_blocks(&self) -> usize {
        self.inner.num_blocks()
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        self.inner.cache_groups()
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        // Whatever is announced by now was computed in an earlier step.
        self.announced.update(&self.computed.lock().unwrap());
        self.inner.step(chunks, logits);
        let mut computed = self.computed.lock().unwrap();
        for chunk in chunks {
            let len = chunk.start + chunk.tokens.len();
            let size = self.inner.block_size;
            let at = |i: usize| self.inner.kv[chunk.tables[0][i / size] as usize][i % size];
            let history: Vec<u32> = (0..len).map(|i| at(i).expect("written")).collect();
            for end in (size..=len).step_by(size) {
                computed.insert(history[..end].to_vec());
            }
        }
    }
}

fn prompt() -> impl Strategy<Value = Vec<u32>> {
    // Few distinct beginnings, so that prefixes are shared.
    (0_u32..3, 1_usize..30).prop_map(|(kind, len)| (0..len as u32).map(|i| 10 + kind + i / 9).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn followers_know_what_is_resident_and_nothing_that_is_not_computed(
        prompts in prop::collection::vec((prompt(), 1_usize..12), 1..14),
        num_blocks in 12_usize..40,
        max_batched_tokens in 4_usize..40,
    ) {
        let merged = prometheus::IntCounter::new("m", "m").unwrap();
        let (recorder, follower) = channel(num_blocks, merged);
        let announced = Arc::new(Announced { follower, prefixes: Mutex::default() });
        let computed = Arc::new(Mutex::default());
        let limits = StepLimits { max_batched_tokens, max_running: 4 };
        let setup = Setup { block_size: 4, num_blocks, limits };
        let mut engine = engine(setup);
        let inner = Remembering { block_size: 4, kv: vec![vec![None; 4]; num_blocks] };
        engine.backend = Box::new(Witness {
            inner,
            computed: Arc::clone(&computed),
            announced: Arc::clone(&announced),
        });
        engine.follow(recorder);
        for round in prompts.chunks(5) {
            let generations = round
                .iter()
                .map(|(prompt, tokens)| add(&mut engine, request(prompt, *tokens, 0.0)))
                .collect();
            finish(&mut engine, generations);
            announced.update(&computed.lock().unwrap());
            let resident: HashSet<u128> =
                engine.scheduler.blocks().resident().iter().map(|change| change.block().1).collect();
            let known: HashSet<u128> = announced.prefixes.lock().unwrap().keys().copied().collect();
            prop_assert_eq!(known, resident);
        }
    }
}
