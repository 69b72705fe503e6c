//! What the engine tells the followers of its prefix cache: all of it, and no block before its KV is there.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use super::drawing::Drawing;
use super::*;
use crate::engine::block_manager::BlockKey;
use crate::engine::kv_events::{Follower, channel};

/// Keeps account of which prefixes' KV was written.
struct Witness {
    inner: Remembering,
    /// Token by block of the first group and place in it.
    written: HashMap<(u32, usize), u32>,
    computed: Arc<Mutex<HashSet<Vec<u32>>>>,
    announced: Arc<Announced>,
}

/// What a follower has come to.
struct Announced {
    follower: Follower,
    state: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    blocks: HashSet<BlockKey>,
    /// The tokens that each hash stands for, also of blocks that are gone: a window's first block outlives
    /// its parent.
    prefixes: HashMap<u128, Vec<u32>>,
}

impl Announced {
    /// Takes what was announced since the last call.
    fn update(&self, computed: &HashSet<Vec<u32>>) {
        let mut state = self.state.lock().unwrap();
        for change in self.follower.take().into_iter().flat_map(|step| step.changes) {
            let block = change.block();
            let CacheChange::Stored { group, hash, parent, tokens, .. } = change else {
                assert!(state.blocks.remove(&block), "removed, and not there: {block:?}");
                continue;
            };
            let whole = parent.is_none_or(|parent| state.blocks.contains(&(0, parent)));
            assert!(whole || group > 0, "announced before its parent: {block:?}");
            let before = parent.map_or(&[][..], |parent| &state.prefixes[&parent]);
            let prefix = [before, &tokens].concat();
            assert!(computed.contains(&prefix), "announced before it is computed: {prefix:?}");
            state.prefixes.insert(hash, prefix);
            assert!(state.blocks.insert(block), "announced twice: {block:?}");
        }
    }
}

impl Backend for Witness {
    fn vocab_size(&self) -> usize {
        VOCAB
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
        // Whatever is announced by now was computed in an earlier step.
        self.announced.update(&self.computed.lock().unwrap());
        self.inner.step(chunks, logits)?;
        let size = self.inner.block_size();
        for chunk in chunks {
            for (position, token) in (chunk.start..).zip(chunk.tokens) {
                self.written.insert((chunk.tables[0][position / size], position % size), *token);
            }
        }
        let mut computed = self.computed.lock().unwrap();
        for chunk in chunks {
            let len = chunk.start + chunk.tokens.len();
            let at = |position: usize| self.written[&(chunk.tables[0][position / size], position % size)];
            let history: Vec<u32> = (0..len).map(at).collect();
            for end in (size..=len).step_by(size) {
                computed.insert(history[..end].to_vec());
            }
        }
        Ok(())
    }
}

fn prompt() -> impl Strategy<Value = Vec<u32>> {
    // Few distinct beginnings, so that prefixes are shared.
    (0_u32..3, 1_usize..30).prop_map(|(kind, len)| (0..len as u32).map(|i| 10 + kind + i / 9).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn followers_know_what_is_resident_and_nothing_that_is_not_computed(
        prompts in prop::collection::vec((prompt(), 1_usize..12), 1..14),
        num_blocks in 24_usize..60,
        groups in prop::sample::select(vec![FULL, HYBRID]),
        max_batched_tokens in 4_usize..40,
        draws in any::<bool>(),
    ) {
        let merged = prometheus::IntCounter::new("m", "m").unwrap();
        let (recorder, follower) = channel(num_blocks, merged);
        let announced = Arc::new(Announced { follower, state: Mutex::default() });
        let computed = Arc::new(Mutex::default());
        let limits = StepLimits { max_batched_tokens, max_running: 4 };
        let setup = Setup { groups, block_size: 4, num_blocks, limits };
        let inner = Remembering::new(4, num_blocks, groups);
        let (computed_by, announced_to) = (Arc::clone(&computed), Arc::clone(&announced));
        let written = HashMap::new();
        let witness = Witness { inner, written, computed: computed_by, announced: announced_to };
        let backend: Box<dyn Backend> =
            if draws { Box::new(Drawing::new(witness)) } else { Box::new(witness) };
        let mut engine = engine_with(setup, backend);
        engine.options.suppress_token_ids.clear();
        engine.follow(recorder);
        for round in prompts.chunks(5) {
            let generations = round
                .iter()
                .map(|(prompt, tokens)| add(&mut engine, request(prompt, *tokens, 0.0)))
                .collect();
            finish(&mut engine, generations);
            announced.update(&computed.lock().unwrap());
            let resident = engine.scheduler.blocks().resident();
            let resident: HashSet<BlockKey> = resident.iter().map(CacheChange::block).collect();
            let known = announced.state.lock().unwrap().blocks.clone();
            prop_assert_eq!(known, resident);
        }
    }
}
