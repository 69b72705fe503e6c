//! The block manager against a model: KV is a map from block number to the tokens whose KV it holds, and a hit must
//! serve exactly the prompt's own prefix.

use proptest::prelude::*;

use super::*;

const BLOCK: usize = 4;

fn salt(text: &str) -> Arc<[u8]> {
    Arc::from(text.as_bytes())
}

/// A manager with a shadow of what a backend would have written into each block.
struct Shadow {
    manager: BlockManager,
    /// Per block: salt and all tokens up to the block's end.
    kv: Vec<(Arc<[u8]>, Vec<u32>)>,
    live: Vec<(BlockTable, Vec<u32>, Arc<[u8]>)>,
}

impl Shadow {
    fn new(num_blocks: usize, hash_bits: u32) -> Self {
        let mut manager = BlockManager::new(num_blocks, BLOCK, 1);
        manager.hasher = PrefixHasher::with_bits(1, hash_bits);
        Self { manager, kv: vec![(salt(""), Vec::new()); num_blocks], live: Vec::new() }
    }

    fn check(&self) {
        self.manager.check(self.live.iter().map(|(table, _, _)| table)).unwrap();
        for (table, tokens, salt) in &self.live {
            for (i, block) in table.blocks.iter().enumerate() {
                let (kv_salt, kv) = &self.kv[*block as usize];
                let end = tokens.len().min((i + 1) * BLOCK);
                assert_eq!((kv_salt, &kv[..]), (salt, &tokens[..end]), "block {block} at place {i}");
            }
        }
    }

    /// Admits and computes a prompt; returns the cached tokens.
    fn admit(&mut self, tokens: Vec<u32>, salt: Arc<[u8]>) -> Option<usize> {
        let mut table = BlockTable::default();
        let cached = self.manager.admit(&mut table, &tokens, &salt)?;
        assert!(cached < tokens.len() && cached.is_multiple_of(BLOCK));
        self.compute(&table, &tokens, &salt, cached);
        self.live.push((table, tokens, salt));
        Some(cached)
    }

    fn compute(&mut self, table: &BlockTable, tokens: &[u32], salt: &Arc<[u8]>, from: usize) {
        for i in from / BLOCK..tokens.len().div_ceil(BLOCK) {
            let end = tokens.len().min((i + 1) * BLOCK);
            self.kv[table.blocks[i] as usize] = (Arc::clone(salt), tokens[..end].to_vec());
        }
    }

    fn register(&mut self, which: usize) {
        let (table, tokens, salt) = &mut self.live[which];
        self.manager.register(table, tokens, salt);
    }

    fn append(&mut self, which: usize, token: u32) -> bool {
        let (mut table, mut tokens, salt) = self.live.swap_remove(which);
        let grown = self.manager.grow(&mut table, tokens.len() + 1);
        if grown {
            tokens.push(token);
            self.compute(&table, &tokens, &salt, tokens.len() - 1);
        }
        self.live.push((table, tokens, salt));
        grown
    }

    fn release(&mut self, which: usize) {
        let (mut table, _, _) = self.live.swap_remove(which);
        self.manager.release(&mut table);
    }
}

#[derive(Debug, Clone)]
enum Action {
    Admit(Vec<u32>, bool),
    Register(prop::sample::Index),
    Append(prop::sample::Index, u32),
    Release(prop::sample::Index),
}

/// Two token ids and two salts only, so that prefixes are shared often.
fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (prop::collection::vec(0u32..2, 1..30), any::<bool>()).prop_map(|(t, s)| Action::Admit(t, s)),
        3 => any::<prop::sample::Index>().prop_map(Action::Register),
        3 => (any::<prop::sample::Index>(), 0u32..2).prop_map(|(i, t)| Action::Append(i, t)),
        2 => any::<prop::sample::Index>().prop_map(Action::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// With 128 bits and with so few that most lookups collide.
    #[test]
    fn a_table_never_holds_foreign_kv(
        actions in prop::collection::vec(action(), 1..80),
        num_blocks in 1usize..40,
        hash_bits in prop_oneof![Just(127u32), Just(1), Just(3)],
    ) {
        let mut shadow = Shadow::new(num_blocks, hash_bits);
        for action in actions {
            let live = shadow.live.len();
            match action {
                Action::Admit(tokens, salted) => {
                    let (needed, used) = (tokens.len().div_ceil(BLOCK), shadow.manager.used_blocks());
                    let admitted = shadow.admit(tokens, salt(if salted { "t" } else { "" }));
                    if admitted.is_none() {
                        prop_assert!(used + needed > num_blocks, "refused {} of {} free", needed, num_blocks - used);
                    }
                }
                Action::Register(i) if live > 0 => shadow.register(i.index(live)),
                Action::Append(i, token) if live > 0 => { shadow.append(i.index(live), token); }
                Action::Release(i) if live > 0 => shadow.release(i.index(live)),
                _ => {}
            }
            shadow.check();
        }
        while !shadow.live.is_empty() {
            shadow.release(0);
        }
        shadow.check();
        prop_assert_eq!(shadow.manager.used_blocks(), 0);
    }
}

#[test]
fn a_whole_prompt_in_the_cache_still_runs_its_last_block() {
    let mut shadow = Shadow::new(8, 127);
    let prompt: Vec<u32> = (0..8).collect();
    assert_eq!(shadow.admit(prompt.clone(), salt("")), Some(0));
    shadow.register(0);
    shadow.release(0);
    assert_eq!(shadow.admit(prompt.clone(), salt("")), Some(4));
    assert_eq!(shadow.admit((0..9).collect(), salt("")), Some(8));
    assert_eq!(shadow.admit(prompt, salt("another tenant")), Some(0));
}

#[test]
fn the_deepest_block_is_evicted_first_and_uncached_ones_before_it() {
    let mut shadow = Shadow::new(4, 127);
    let prompt: Vec<u32> = (0..14).collect(); // three full blocks and a piece
    shadow.admit(prompt.clone(), salt(""));
    shadow.register(0);
    shadow.release(0);
    shadow.admit(vec![9; 3], salt("")); // takes the piece
    assert_eq!(shadow.manager.matched(&prompt, &salt("")).len(), 3);
    shadow.admit(vec![8; 3], salt("")); // takes the deepest
    assert_eq!(shadow.manager.matched(&prompt, &salt("")).len(), 2);
}

#[test]
fn the_least_recently_used_prefix_goes_first() {
    let mut shadow = Shadow::new(4, 127);
    let (a, b): (Vec<u32>, Vec<u32>) = ((0..5).collect(), (10..15).collect());
    for prompt in [&a, &b, &a] {
        shadow.admit(prompt.clone(), salt(""));
        shadow.register(0);
        shadow.release(0);
    }
    shadow.admit(vec![7; 9], salt("")); // three blocks: two uncached ones and the oldest cached one
    assert_eq!(shadow.manager.matched(&b, &salt("")).len(), 0);
    assert_eq!(shadow.manager.matched(&a, &salt("")).len(), 1);
}

#[test]
fn a_block_computed_twice_is_kept_once() {
    let mut shadow = Shadow::new(8, 127);
    let prompt: Vec<u32> = (0..6).collect();
    shadow.admit(prompt.clone(), salt(""));
    shadow.admit(prompt, salt(""));
    assert_eq!(shadow.manager.used_blocks(), 4);
    shadow.register(0);
    shadow.register(1);
    assert_eq!(shadow.manager.used_blocks(), 3);
    assert_eq!(shadow.live[0].0.blocks[0], shadow.live[1].0.blocks[0]);
    shadow.check();
}

/// The check must be able to fail: each line breaks one invariant.
#[test]
fn the_integrity_check_sees_damage() {
    let damaged = |damage: fn(&mut Shadow)| {
        let mut shadow = Shadow::new(8, 127);
        shadow.admit((0..10).collect(), salt(""));
        shadow.register(0);
        damage(&mut shadow);
        shadow.manager.check(shadow.live.iter().map(|(table, _, _)| table)).unwrap_err()
    };
    assert!(damaged(|s| s.manager.blocks[0].refs += 1).contains("holders"));
    assert!(damaged(|s| s.manager.free.push_back(0)).contains("free list"));
    assert!(damaged(|s| s.live.clear()).contains("holders"));
    assert!(damaged(|s| s.manager.index.clear()).contains("index"));
    assert!(damaged(|s| s.live[0].0.blocks.swap(0, 1)).contains("parent"));
    assert!(damaged(|s| s.live[0].0.registered = 1).contains("registered"));
}
