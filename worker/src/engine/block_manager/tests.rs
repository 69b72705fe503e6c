//! The block manager against a witness that knows what each block's KV would be: a table must serve exactly
//! the prompt's own prefix, in every group.

use proptest::prelude::*;

use super::witness::{Part, Witness};
use super::*;
use crate::engine::backend::CacheGroup::{self, Full, MlaLatent, SlidingWindow};

const BLOCK: usize = 4;

fn salt(text: &str) -> Arc<[u8]> {
    Arc::from(text.as_bytes())
}

/// A sequence as the scheduler would keep it.
struct Live {
    table: BlockTable,
    tokens: Vec<u32>,
    salt: Arc<[u8]>,
    computed: usize,
    /// Tokens of the current step.
    planned: usize,
}

/// A manager, its sequences, and what their KV would be.
struct Shadow {
    manager: BlockManager,
    witness: Witness,
    live: Vec<Live>,
    /// Places in `live`, in the order of planning.
    plan: Vec<usize>,
}

impl Shadow {
    fn new(num_blocks: usize, groups: &[CacheGroup], hash_bits: u32) -> Self {
        let rules = GroupRules::new(groups, BLOCK);
        let mut manager = BlockManager::new(num_blocks, BLOCK, rules, 1);
        manager.hasher = PrefixHasher::with_bits(1, hash_bits);
        manager.record_changes();
        let witness = Witness::new(num_blocks, BLOCK, groups);
        Self { manager, witness, live: Vec::new(), plan: Vec::new() }
    }

    /// Admits a prompt and plans up to `chunk` of its tokens; returns the cached ones.
    fn admit(&mut self, tokens: Vec<u32>, salt: Arc<[u8]>, chunk: usize) -> Option<usize> {
        let mut table = BlockTable::default();
        let cached = self.manager.admit(&mut table, &tokens, &salt, chunk, usize::MAX)?;
        assert!(cached < tokens.len() && cached.is_multiple_of(BLOCK));
        let planned = chunk.min(tokens.len() - cached);
        self.manager.promise(&mut table, &tokens[..cached + planned], cached, &salt);
        self.plan.push(self.live.len());
        self.live.push(Live { table, tokens, salt, computed: cached, planned });
        Some(cached)
    }

    /// Plans up to `chunk` further tokens of a sequence that is not in this step yet; without any left,
    /// `token` follows.
    fn advance(&mut self, which: usize, chunk: usize, token: u32) {
        let live = &mut self.live[which];
        if live.planned > 0 {
            return;
        }
        let decode = live.computed == live.tokens.len();
        if decode {
            live.tokens.push(token);
        }
        let planned = chunk.min(live.tokens.len() - live.computed);
        let end = live.computed + planned;
        if self.manager.cover(&mut live.table, end) {
            self.manager.promise(&mut live.table, &live.tokens[..end], live.computed, &live.salt);
            live.planned = planned;
            self.plan.push(which);
        } else if decode {
            live.tokens.pop();
        }
    }

    /// Carries out the step.
    fn commit(&mut self) {
        let part = |live: &'_ Live| live.computed + live.planned;
        let parts: Vec<Part<'_>> = self
            .plan
            .iter()
            .map(|i| &self.live[*i])
            .map(|live| Part {
                table: &live.table,
                tokens: &live.tokens[..part(live)],
                start: live.computed,
                salt: &live.salt,
            })
            .collect();
        self.witness.step(&parts);
        for i in self.plan.drain(..) {
            let live = &mut self.live[i];
            let start = live.computed;
            live.computed += std::mem::take(&mut live.planned);
            self.manager.commit(&mut live.table, &live.tokens[..live.computed], start, &live.salt);
        }
        self.check().unwrap();
    }

    /// Admits and computes a prompt at once.
    fn run(&mut self, tokens: Vec<u32>, salt: Arc<[u8]>) -> Option<usize> {
        let cached = self.admit(tokens, salt, usize::MAX)?;
        self.commit();
        Some(cached)
    }

    fn check(&self) -> Result<(), Damage> {
        self.manager.check(self.live.iter().map(|live| (&live.table, live.computed)))
    }

    fn release(&mut self, which: usize) {
        let mut live = self.live.remove(which);
        self.manager.release(&mut live.table);
    }

    /// Cached tokens of a prompt, if it came now.
    fn hit(&self, tokens: &[u32], salt: &Arc<[u8]>) -> usize {
        self.manager.found(tokens, salt, usize::MAX)
    }
}

#[derive(Debug, Clone)]
enum Action {
    Admit(Vec<u32>, bool, usize),
    Advance(prop::sample::Index, usize, u32),
    Commit,
    Release(prop::sample::Index),
}

/// Two token ids and two salts only, so that prefixes are shared often.
fn action() -> impl Strategy<Value = Action> {
    let prompt = prop::collection::vec(0u32..2, 1..30);
    prop_oneof![
        3 => (prompt, any::<bool>(), 1usize..40).prop_map(|(t, s, chunk)| Action::Admit(t, s, chunk)),
        3 => (any::<prop::sample::Index>(), 1usize..12, 0u32..2).prop_map(|(i, n, t)| Action::Advance(i, n, t)),
        3 => Just(Action::Commit),
        2 => any::<prop::sample::Index>().prop_map(Action::Release),
    ]
}

fn groups() -> impl Strategy<Value = Vec<CacheGroup>> {
    let window = (1usize..14).prop_map(|window| SlidingWindow { window });
    let windows = prop::collection::vec(window, 0..3);
    let anchors = prop_oneof![Just(vec![]), Just(vec![Full]), Just(vec![MlaLatent, Full])];
    (anchors, windows).prop_map(|(anchors, windows)| {
        let groups = [anchors, windows].concat();
        if groups.is_empty() { vec![Full] } else { groups }
    })
}

/// Applies the changes to what a follower knows, and checks that they make sense.
fn follow(known: &mut Vec<(usize, PrefixHash)>, changes: Vec<CacheChange>) {
    for change in changes {
        match change {
            CacheChange::Stored { group, hash, parent, .. } => {
                assert!(!known.contains(&(group, hash)), "stored twice");
                assert!(group == 0 || known.contains(&(0, hash)), "attached to nothing");
                assert!(
                    group > 0 || parent.is_none_or(|p| known.contains(&(0, p))),
                    "stored before its parent"
                );
                known.push((group, hash));
            }
            CacheChange::Removed { group, hash } => {
                let at =
                    known.iter().position(|k| *k == (group, hash)).expect("removed what was never stored");
                known.swap_remove(at);
                assert!(
                    group > 0 || known.iter().all(|k| k.1 != hash),
                    "an anchor went before its attachments"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// With 128 bits and with so few that most lookups collide.
    #[test]
    fn a_table_never_holds_foreign_kv(
        actions in prop::collection::vec(action(), 1..100),
        groups in groups(),
        num_blocks in 1usize..80,
        hash_bits in prop_oneof![Just(127u32), Just(1), Just(3)],
    ) {
        let mut shadow = Shadow::new(num_blocks, &groups, hash_bits);
        let mut known = Vec::new();
        for action in actions {
            let live = shadow.live.len();
            match action {
                Action::Admit(tokens, salted, chunk) => {
                    let needed = shadow.manager.rules.blocks_needed(tokens.len(), chunk);
                    let used = shadow.manager.used_blocks();
                    if shadow.admit(tokens, salt(if salted { "t" } else { "" }), chunk).is_none() {
                        prop_assert!(used + needed > num_blocks, "refused {needed} of {} free", num_blocks - used);
                    }
                }
                Action::Advance(i, chunk, token) if live > 0 => shadow.advance(i.index(live), chunk, token),
                Action::Commit => shadow.commit(),
                Action::Release(i) if live > 0 => {
                    shadow.commit();
                    shadow.release(i.index(live));
                    shadow.check().unwrap();
                }
                _ => {}
            }
            if shadow.plan.is_empty() {
                follow(&mut known, shadow.manager.take_changes());
                let mut resident = Vec::new();
                follow(&mut resident, shadow.manager.resident());
                known.sort_unstable();
                resident.sort_unstable();
                prop_assert_eq!(&known, &resident);
            }
        }
        shadow.commit();
        while !shadow.live.is_empty() {
            shadow.release(0);
        }
        shadow.check().unwrap();
        prop_assert_eq!(shadow.manager.used_blocks(), 0);
    }
}

#[test]
fn a_whole_prompt_in_the_cache_still_runs_its_last_block() {
    let mut shadow = Shadow::new(8, &[Full], 127);
    let prompt: Vec<u32> = (0..8).collect();
    assert_eq!(shadow.run(prompt.clone(), salt("")), Some(0));
    shadow.release(0);
    assert_eq!(shadow.run(prompt.clone(), salt("")), Some(4));
    assert_eq!(shadow.run((0..9).collect(), salt("")), Some(8));
    assert_eq!(shadow.run(prompt, salt("another tenant")), Some(0));
}

#[test]
fn the_deepest_block_is_evicted_first_and_uncached_ones_before_it() {
    let mut shadow = Shadow::new(4, &[Full], 127);
    let prompt: Vec<u32> = (0..14).collect(); // three full blocks and a piece
    shadow.run(prompt.clone(), salt(""));
    shadow.release(0);
    shadow.run(vec![9; 3], salt("")); // takes the piece
    assert_eq!(shadow.hit(&prompt, &salt("")), 12);
    shadow.run(vec![8; 3], salt("")); // takes the deepest
    assert_eq!(shadow.hit(&prompt, &salt("")), 8);
}

#[test]
fn the_least_recently_used_prefix_goes_first() {
    let mut shadow = Shadow::new(4, &[Full], 127);
    let (a, b): (Vec<u32>, Vec<u32>) = ((0..5).collect(), (10..15).collect());
    for prompt in [&a, &b, &a] {
        shadow.run(prompt.clone(), salt(""));
        shadow.release(0);
    }
    shadow.run(vec![7; 9], salt("")); // three blocks: two uncached ones and the oldest cached one
    assert_eq!((shadow.hit(&b, &salt("")), shadow.hit(&a, &salt(""))), (0, 4));
}

#[test]
fn a_block_computed_twice_is_kept_once() {
    let mut shadow = Shadow::new(9, &[Full, SlidingWindow { window: 4 }], 127);
    let prompt: Vec<u32> = (0..8).collect();
    for _ in 0..2 {
        shadow.admit(prompt.clone(), salt(""), 99);
    }
    // Two of each group; the second sequence shares the first ones and has the last two to itself.
    assert_eq!(shadow.manager.used_blocks(), 6);
    shadow.commit();
    assert_eq!(shadow.live[0].table.anchors(), shadow.live[1].table.anchors());
    // The window's last block is shared too; those before the window are given back.
    assert_eq!(shadow.manager.used_blocks(), 3);
}

#[test]
fn a_promise_is_shared_within_the_step() {
    let mut shadow = Shadow::new(40, &[Full, SlidingWindow { window: 6 }], 127);
    let prompt = |own: u32| (0..20).chain([own; 3]).collect::<Vec<u32>>();
    let cached: Vec<_> = (50..54).map(|own| shadow.admit(prompt(own), salt(""), 99)).collect();
    assert_eq!(cached, [Some(0), Some(20), Some(20), Some(20)]);
    assert!(shadow.manager.take_changes().is_empty(), "announced before it is computed");
    shadow.commit();
    let stored = shadow.manager.take_changes();
    assert_eq!(stored.len(), 5 + 5, "each block of the shared prefix once");
}

#[test]
fn a_hit_needs_the_windows_blocks_and_only_those() {
    let groups = [Full, SlidingWindow { window: 5 }];
    let mut shadow = Shadow::new(20, &groups, 127);
    let prompt: Vec<u32> = (0..24).collect();
    shadow.run(prompt.clone(), salt(""));
    // Of the window's six blocks it keeps the last one.
    assert_eq!(shadow.manager.used_blocks(), 7);
    shadow.release(0);
    assert_eq!(shadow.hit(&prompt, &salt("")), 20);
    // Position 20 reads 16..=20 and no other block of the window.
    let last = shadow.manager.matched(&prompt, &salt(""))[4];
    let attached = shadow.manager.attached_to(last, 1).unwrap();
    shadow.manager.free.remove(attached);
    shadow.manager.forget(attached);
    shadow.manager.free.push_front(attached);
    // Position 16 reads 12..=16.
    assert_eq!(shadow.hit(&prompt, &salt("")), 16);
    assert_eq!(shadow.run(prompt.clone(), salt("")), Some(16));
    shadow.release(0);
    assert_eq!(shadow.hit(&prompt, &salt("")), 20, "what was missing is attached again");
}

#[test]
fn a_long_prompt_needs_few_blocks_of_a_window() {
    let groups = [Full, SlidingWindow { window: 8 }];
    let rules = GroupRules::new(&groups, BLOCK);
    let needed = rules.blocks_needed(400, 4);
    assert_eq!(needed, 100 + 4);
    let mut shadow = Shadow::new(needed, &groups, 127);
    assert_eq!(shadow.admit((0..400).collect(), salt(""), 4), Some(0));
    for _ in 0..110 {
        shadow.commit();
        shadow.advance(0, 4, 7);
        assert!(shadow.live[0].planned > 0 || shadow.live[0].computed >= 400);
    }
}

/// The check must be able to fail: each line breaks one invariant.
#[test]
fn the_integrity_check_sees_damage() {
    let damaged = |damage: fn(&mut Shadow)| {
        let mut shadow = Shadow::new(12, &[Full, SlidingWindow { window: 99 }], 127);
        shadow.run((0..10).collect(), salt(""));
        damage(&mut shadow);
        shadow.check().unwrap_err().to_string()
    };
    assert!(damaged(|s| s.manager.blocks[0].refs += 1).contains("holders"));
    assert!(damaged(|s| s.manager.free.push_back(0)).contains("free list"));
    assert!(damaged(|s| s.live.clear()).contains("holders"));
    assert!(damaged(|s| s.manager.index.clear()).contains("index"));
    assert!(damaged(|s| s.live[0].table.groups[0].blocks.swap(0, 1)).contains("parent"));
    assert!(damaged(|s| s.live[0].table.groups[1].blocks.swap(0, 1)).contains("not attached there"));
    assert!(damaged(|s| s.live[0].table.registered = 1).contains("registered"));
    assert!(damaged(|s| s.live[0].table.groups[1].first = 1).contains("keeps from"));
    assert!(damaged(|s| s.manager.blocks[0].computed = false).contains("not computed"));
    assert!(damaged(|s| s.manager.attached[0] = NO_BLOCK).contains("attached"));
}
