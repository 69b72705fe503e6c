//! What counts as held of requests under way, beside a plain model of it.

use std::collections::{BTreeMap, BTreeSet};

use keyway_wire::block_hash::BlockHash;
use proptest::prelude::*;

use super::super::{Placement, PrefixIndex, WorkerId};

const WORKER: WorkerId = WorkerId(1);

/// Three prompts: the second is the beginning of the first, the third parts from both.
fn prompt(nth: usize) -> Vec<BlockHash> {
    let blocks: &[u64] = [&[1, 2, 3, 4][..], &[1, 2, 3], &[1, 2, 5, 6]][nth];
    blocks.iter().copied().map(BlockHash).collect()
}

fn exact() -> PrefixIndex {
    let mut index = PrefixIndex::new(1 << 16);
    index.set_exact(WORKER, true);
    index
}

fn announce(index: &mut PrefixIndex, prompt: &[BlockHash]) {
    let mut before = None;
    for &block in prompt {
        assert!(index.store_block(WORKER, before, block));
        before = Some(block);
    }
}

#[test]
fn an_announced_block_is_gone_when_its_worker_says_so() {
    let (mut index, prompt) = (exact(), prompt(0));
    let under_way = index.place(WORKER, &prompt);
    announce(&mut index, &prompt);
    index.drop_block(WORKER, prompt[3]);
    index.drop_block(WORKER, prompt[2]);
    assert_eq!(index.matched(&prompt), [(WORKER, 2)], "whatever the request still waits for");
    index.finish(under_way);
    assert_eq!((index.matched(&prompt), index.expected()), (vec![(WORKER, 2)], 0));
}

#[test]
fn a_prompt_that_a_worker_has_dropped_is_no_checkpoint_of_its_own() {
    let (mut index, prompt) = (exact(), prompt(0));
    let under_way = index.place(WORKER, &prompt);
    announce(&mut index, &prompt);
    (0..4).for_each(|at| index.set_checkpoint(WORKER, prompt[at], at as u32 % 2));
    assert_eq!(index.matched(&prompt), [(WORKER, 3)]);
    index.drop_block(WORKER, prompt[3]);
    index.set_checkpoint(WORKER, prompt[2], 2);
    assert_eq!(index.matched(&prompt), [(WORKER, 1)]);
    index.finish(under_way);
}

#[test]
fn who_computes_a_dropped_block_again_is_not_robbed_of_it_by_who_had_it() {
    let (mut index, prompt) = (exact(), prompt(0));
    let before = index.place(WORKER, &prompt);
    announce(&mut index, &prompt);
    prompt.iter().rev().for_each(|block| index.drop_block(WORKER, *block));
    let again = index.place(WORKER, &prompt);
    assert_eq!(index.matched(&prompt), [(WORKER, 4)]);
    index.finish(before);
    assert_eq!(index.matched(&prompt), [(WORKER, 4)]);
    index.finish(again);
    assert_eq!((index.matched(&prompt), index.expected()), (vec![], 0));
}

#[derive(Debug, Clone)]
enum Step {
    Place(usize),
    Finish(prop::sample::Index),
    /// The worker announces the prompt's next block, or drops the last one of it that is there.
    Store(usize),
    Drop(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..3usize).prop_map(Step::Place),
        any::<prop::sample::Index>().prop_map(Step::Finish),
        (0..3usize).prop_map(Step::Store),
        (0..3usize).prop_map(Step::Drop),
    ];
    prop::collection::vec(step, 0..60)
}

/// Blocks there are, and of each that a request waits for: how many do, and whether it was announced since.
#[derive(Default)]
struct Model {
    held: BTreeSet<u64>,
    needed: BTreeMap<u64, (u32, bool)>,
}

impl Model {
    fn has(&self, block: u64) -> bool {
        self.held.contains(&block) || self.needed.get(&block).is_some_and(|(_, announced)| !announced)
    }

    fn matched(&self, prompt: &[BlockHash]) -> usize {
        let held = prompt.iter().take_while(|block| self.held.contains(&block.0)).count();
        held + prompt[held..].iter().take_while(|block| self.has(block.0)).count()
    }

    fn place(&mut self, prompt: &[BlockHash]) -> Vec<u64> {
        let needed: Vec<u64> =
            prompt.iter().map(|block| block.0).skip_while(|block| self.held.contains(block)).collect();
        for block in &needed {
            let (count, _) = self.needed.get(block).copied().unwrap_or_default();
            self.needed.insert(*block, (count + 1, false));
        }
        needed
    }

    fn finish(&mut self, needed: &[u64]) {
        for block in needed {
            let (count, announced) = self.needed[block];
            match count {
                1 => self.needed.remove(block),
                _ => self.needed.insert(*block, (count - 1, announced)),
            };
        }
    }
}

/// Whether a prompt has `block` somewhere behind `before`.
fn is_behind(block: u64, before: u64) -> bool {
    (0..3).any(|nth| {
        let prompt = prompt(nth);
        let at = |block: u64| prompt.iter().position(|of| of.0 == block);
        at(before).is_some_and(|before| at(block).is_some_and(|at| at > before))
    })
}

proptest! {
    #[test]
    fn it_is_as_the_plain_model_says(steps in steps()) {
        let (mut index, mut model) = (exact(), Model::default());
        let mut under_way: Vec<(Placement, Vec<u64>)> = Vec::new();
        for step in steps {
            match step {
                Step::Place(nth) => {
                    let needed = model.place(&prompt(nth));
                    under_way.push((index.place(WORKER, &prompt(nth)), needed));
                }
                Step::Finish(which) if !under_way.is_empty() => {
                    let (placement, needed) = under_way.swap_remove(which.index(under_way.len()));
                    index.finish(placement);
                    model.finish(&needed);
                }
                Step::Finish(_) => {}
                Step::Store(nth) => {
                    let prompt = prompt(nth);
                    let held = prompt.iter().take_while(|block| model.held.contains(&block.0)).count();
                    if let Some(next) = prompt.get(held) {
                        let before = held.checked_sub(1).map(|before| prompt[before]);
                        prop_assert!(index.store_block(WORKER, before, *next));
                        model.held.insert(next.0);
                        if let Some((_, announced)) = model.needed.get_mut(&next.0) {
                            *announced = true;
                        }
                    }
                }
                Step::Drop(nth) => {
                    let prompt = prompt(nth);
                    let held = prompt.iter().take_while(|block| model.held.contains(&block.0)).count();
                    // Blocks behind it go first.
                    let is_last = |block: &BlockHash| !model.held.iter().any(|held| is_behind(*held, block.0));
                    if let Some(last) = held.checked_sub(1).map(|last| prompt[last]).filter(is_last) {
                        index.drop_block(WORKER, last);
                        model.held.remove(&last.0);
                    }
                }
            }
            for nth in 0..3 {
                let prompt = prompt(nth);
                let matched = index.lengths(&prompt).of(WORKER) as usize;
                prop_assert_eq!(matched, model.matched(&prompt), "prompt {}", nth);
            }
            prop_assert_eq!(index.expected(), model.needed.len());
        }
        for (placement, _) in under_way {
            index.finish(placement);
        }
        prop_assert_eq!(index.expected(), 0);
    }
}
