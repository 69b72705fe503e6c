//! Hybrid models: the index against what vLLM's own search would find, in the shapes of models that people
//! serve.

use std::collections::BTreeMap;

use super::*;

/// What a group's layers keep.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Full,
    /// So many tokens.
    Window(u32),
    Mamba,
}

/// Groups in the order in which an engine numbers them.
type Shape = &'static [Kind];

const GPT_OSS: Shape = &[Kind::Window(4), Kind::Full];
const GEMMA: Shape =
    &[Kind::Window(7), Kind::Window(7), Kind::Window(7), Kind::Window(7), Kind::Window(7), Kind::Full];
const KIMI: Shape = &[Kind::Mamba, Kind::Mamba, Kind::Mamba, Kind::Full];
const QWEN: Shape = &[Kind::Full, Kind::Mamba, Kind::Mamba, Kind::Mamba];
/// Every kind at once, and a draft model's layers, which keep all.
const ALL: Shape = &[Kind::Mamba, Kind::Window(3), Kind::Full, Kind::Window(1), Kind::Full];

/// An engine of which only the cache is there: copies of blocks, by group and prefix.
struct Hybrid {
    shape: Shape,
    copies: BTreeMap<(usize, Vec<u32>), u32>,
}

impl Hybrid {
    fn has(&self, group: usize, prefix: &[u32]) -> bool {
        self.copies.contains_key(&(group, prefix.to_vec()))
    }

    /// Blocks of a prompt with which it would go on.
    fn hit(&self, prompt: &[u32]) -> usize {
        let block = BLOCK as usize;
        let has = |group: usize, nth: usize| self.has(group, &prompt[..(nth + 1) * block]);
        let goes_on = |group: usize, blocks: usize| match self.shape[group] {
            Kind::Full => (0..blocks).all(|nth| has(group, nth)),
            Kind::Window(tokens) => {
                let reach = (tokens as usize - 1).div_ceil(block);
                (blocks.saturating_sub(reach)..blocks).all(|nth| has(group, nth))
            }
            Kind::Mamba => blocks == 0 || has(group, blocks - 1),
        };
        let all = |blocks: &usize| (0..self.shape.len()).all(|group| goes_on(group, *blocks));
        (0..=prompt.len() / block).rev().find(all).unwrap_or(0)
    }

    fn name(prefix: &[u32]) -> u64 {
        let after = |name: u64, token: &u32| {
            let spread = (name ^ (u64::from(*token) + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            spread ^ (spread >> 29)
        };
        prefix.iter().fold(u64::from(u32::MAX), after)
    }

    /// Computes a prompt; `kept` says how many of a window's blocks it stores, and how the events are mixed.
    fn compute(&mut self, prompt: &[u32], kept: usize) -> Vec<KvEvent> {
        let block = BLOCK as usize;
        let (from, to) = (self.hit(prompt), prompt.len() / block);
        if from == to {
            return Vec::new();
        }
        let shape = self.shape;
        let event = |(group, kind): (usize, &Kind)| {
            let stored: Vec<usize> = match kind {
                Kind::Full => (from..to).collect(),
                Kind::Window(_) => (from..to).rev().take(kept).rev().collect(),
                Kind::Mamba => vec![to - 1],
            };
            let prefix = |nth: usize| &prompt[..(nth + 1) * block];
            for nth in &stored {
                *self.copies.entry((group, prefix(*nth).to_vec())).or_default() += 1;
            }
            let (kind, window) = match kind {
                Kind::Full => ("full_attention", None),
                Kind::Window(tokens) => ("sliding_window", Some(*tokens)),
                Kind::Mamba => ("mamba", None),
            };
            // Of what is left out the tokens are there, and the names are not.
            KvEvent::BlockStored(BlockStored {
                group_idx: Some(group as u32),
                kv_cache_spec_kind: Some(kind.to_owned()),
                kv_cache_spec_sliding_window: window,
                block_hashes: stored.iter().map(|nth| int(Self::name(prefix(*nth)))).collect(),
                parent_block_hash: from.checked_sub(1).map(|nth| int(Self::name(prefix(nth)))),
                token_ids: prompt[from * block..to * block].to_vec(),
                block_size: BLOCK,
                ..BlockStored::default()
            })
        };
        // It speaks of a group that has kept nothing, too.
        shape.iter().enumerate().map(event).collect()
    }

    /// One copy of some block goes, and is told of.
    fn evict(&mut self, pick: usize) -> Option<KvEvent> {
        let nth = pick.checked_rem(self.copies.len())?;
        let (key, _) = self.copies.iter().nth(nth)?;
        let key = key.clone();
        let copies = self.copies.get_mut(&key)?;
        *copies -= 1;
        if *copies == 0 {
            self.copies.remove(&key);
        }
        let group_idx = Some(key.0 as u32);
        Some(KvEvent::BlockRemoved(BlockRemoved { group_idx, ..removed(Self::name(&key.1)) }))
    }
}

#[derive(Debug, Clone)]
enum Op {
    Compute(Vec<u32>, usize),
    Evict(Vec<usize>),
    Clear,
    /// The index has a model's placement there, and the feed is counted on anew.
    Distrust(Vec<u32>),
}

fn prompts() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0_u32..2, 0..24)
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        8 => (prompts(), 0_usize..6).prop_map(|(prompt, kept)| Op::Compute(prompt, kept)),
        5 => prop::collection::vec(any::<usize>(), 1..8).prop_map(Op::Evict),
        1 => Just(Op::Clear),
        1 => prompts().prop_map(Op::Distrust),
    ];
    prop::collection::vec(op, 1..30)
}

/// Plays all of it, and sees after each step that the index has of every prompt what the engine would find.
fn play(shape: Shape, ops: &[Op], steps: usize) {
    let (mut feed, index) = feed(Recovery::Nothing, steps);
    let mut engine = Hybrid { shape, copies: BTreeMap::new() };
    assert_eq!(feed.connected_now(&index), Action::Wait);
    index.moment(|index| index.set_exact(WORKER, true));
    let chain = |prompt: &[u32]| space(b"").chain(key(), prompt);
    let mut seen: Vec<&[u32]> = Vec::new();
    for (seq, op) in ops.iter().enumerate() {
        let events = match op {
            Op::Compute(prompt, kept) => {
                seen.push(prompt);
                engine.compute(prompt, *kept)
            }
            Op::Evict(picks) => picks.iter().filter_map(|pick| engine.evict(*pick)).collect(),
            Op::Clear => {
                engine.copies.clear();
                vec![KvEvent::AllBlocksCleared]
            }
            Op::Distrust(prompt) => {
                // Only what is there: what a model adds stays until its worker says otherwise.
                let held = index.index().lengths(&chain(prompt)).of(WORKER) as usize;
                index.moment(|index| {
                    index.set_exact(WORKER, false);
                    drop(index.place(WORKER, &chain(prompt)[..held]));
                    index.set_exact(WORKER, true);
                });
                now(feed.counted_on(&index));
                Vec::new()
            }
        };
        assert_eq!(feed.live_now(&index, seq as u64, &batch(events)), Action::Wait);
        for prompt in &seen {
            let found = index.index().lengths(&chain(prompt)).of(WORKER) as usize;
            assert_eq!(found, engine.hit(prompt), "{prompt:?} after {op:?}");
        }
    }
    let stats = feed.stats();
    assert_eq!((stats.malformed, stats.ignored, stats.unknown_removals), (0, 0, 0));
}

proptest! {
    #[test]
    fn the_index_has_what_the_engine_would_find(
        shape in prop::sample::select(vec![GPT_OSS, GEMMA, KIMI, QWEN, ALL]),
        ops in ops(),
        steps in 1_usize..9,
    ) {
        play(shape, &ops, steps);
    }
}

/// The end of each prompt is where the next one goes on; what two have in common is not, unless one of them
/// ends there.
#[test]
fn a_conversation_goes_on_and_a_common_beginning_does_not() {
    let first: Vec<u32> = (0..20).collect();
    let other = [&first[..10], &[99; 10]].concat();
    for shape in [GPT_OSS, GEMMA, KIMI, QWEN] {
        let mut engine = Hybrid { shape, copies: BTreeMap::new() };
        let mut simple = Simple::new();
        simple.events(engine.compute(&first, 3));
        let next = [&first[..], &[7; 6]].concat();
        simple.holds(&next, b"", 10).holds(&other, b"", 0);
        simple.events(engine.compute(&first[..10], 3)).holds(&other, b"", 5).holds(&next, b"", 10);
    }
}

/// What an engine computes has no checkpoint yet but where its prompt ends.
#[test]
fn what_is_expected_of_a_hybrid_model_ends_with_the_prompt() {
    let prompt: Vec<u32> = (0..20).collect();
    let chain = space(b"").chain(key(), &prompt);
    let mut engine = Hybrid { shape: KIMI, copies: BTreeMap::new() };
    let mut simple = Simple::new();
    simple.events(engine.compute(&prompt[..4], 1));
    let index = &simple.index;
    index.moment(|index| index.set_exact(WORKER, true));
    now(simple.feed.counted_on(index));
    let length = |chain: &[BlockHash]| index.index().lengths(chain).of(WORKER);
    let longer: Vec<BlockHash> = chain.iter().copied().chain([BlockHash(9)]).collect();
    let placements = [&chain[..], &chain[..6]].map(|chain| index.moment(|index| index.place(WORKER, chain)));
    assert_eq!((length(&longer), length(&chain[..9]), length(&chain[..3])), (10, 6, 2));
    let [long, short] = placements;
    index.moment(|index| index.finish(long));
    assert_eq!((length(&longer), length(&chain[..9])), (6, 6));
    index.moment(|index| index.finish(short));
    assert_eq!((length(&longer), index.index().expected()), (2, 0));
}

#[test]
fn a_feed_of_which_nothing_can_be_indexed_is_barren_until_something_can() {
    let mut engine = Hybrid { shape: &[Kind::Window(4)], copies: BTreeMap::new() };
    let mut simple = Simple::new();
    for prompt in 0..BARREN_EVENTS {
        // Each is another one.
        assert!(!simple.feed.is_barren());
        simple.events(engine.compute(&[100 + prompt, 1, 2, 3], 2));
    }
    assert!(simple.feed.is_barren());
    let whole = Some("full_attention".to_owned());
    let prefix =
        BlockStored { group_idx: Some(1), kv_cache_spec_kind: whole, ..stored(&[10], None, &PROMPT[..2]) };
    simple.events(vec![KvEvent::BlockStored(prefix)]);
    assert!(!simple.feed.is_barren());
}

/// All of the engine's prompts are found again when it has begun anew, with other groups.
#[test]
fn an_engine_that_begins_anew_may_have_other_groups() {
    let prompt: Vec<u32> = (0..20).collect();
    let mut simple = Simple::new();
    for shape in [KIMI, &[Kind::Full], GPT_OSS, QWEN] {
        let mut engine = Hybrid { shape, copies: BTreeMap::new() };
        simple.events(vec![KvEvent::AllBlocksCleared]).events(engine.compute(&prompt, 2));
        simple.holds(&prompt, b"", 10);
        let half = u32::from(shape.len() == 1) * 5;
        simple.holds(&prompt[..10], b"", half);
    }
}
