//! The feed against an engine that keeps copies of blocks, loses messages, forgets replays and restarts; and the index
//! against what that engine really holds.

use std::collections::{BTreeMap, VecDeque};

use keyway_wire::block_hash::BlockHash;
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, ExtraKey, KvEvent};
use proptest::prelude::*;

use super::*;
use crate::token_chain::TokenSpace;

const WORKER: WorkerId = WorkerId(3);
const BLOCK: u32 = 2;

fn key() -> HashKey {
    HashKey::new(99)
}

fn space(salt: &[u8]) -> TokenSpace<'_> {
    TokenSpace { salt, adapter: None, block_size: BLOCK }
}

fn feed(recovery: Recovery) -> (KvFeed, PrefixIndex) {
    (KvFeed::new(WORKER, key(), recovery, 10_000), PrefixIndex::new(1 << 20))
}

#[expect(clippy::unnecessary_wraps, reason = "as it comes from the decoder")]
fn batch(events: Vec<KvEvent>) -> Result<Decoded, DecodeError> {
    let batch = EventBatch { events, ..EventBatch::default() };
    Ok(Decoded { batch, ..Decoded::default() })
}

fn undecodable() -> Result<Decoded, DecodeError> {
    EventBatch::decode(&[])
}

fn int(hash: u64) -> EngineHash {
    EngineHash::Int(hash)
}

/// Blocks of one prompt: `tokens` behind `parent`, named by `hashes`.
fn stored(hashes: &[u64], parent: Option<u64>, token_ids: &[u32]) -> BlockStored {
    BlockStored {
        block_hashes: hashes.iter().map(|hash| int(*hash)).collect(),
        parent_block_hash: parent.map(int),
        token_ids: token_ids.to_vec(),
        block_size: BLOCK,
        ..BlockStored::default()
    }
}

fn removed(hash: u64) -> BlockRemoved {
    BlockRemoved { block_hashes: vec![int(hash)], ..BlockRemoved::default() }
}

fn store(hashes: &[u64], parent: Option<u64>, token_ids: &[u32]) -> KvEvent {
    KvEvent::BlockStored(stored(hashes, parent, token_ids))
}

fn remove(hash: u64) -> KvEvent {
    KvEvent::BlockRemoved(removed(hash))
}

/// A feed that was connected to an engine without recovery, and its index.
struct Simple {
    feed: KvFeed,
    index: PrefixIndex,
    seq: u64,
}

impl Simple {
    fn new() -> Self {
        let (mut feed, mut index) = feed(Recovery::Nothing);
        assert_eq!(feed.connected(&mut index), Action::Wait);
        Self { feed, index, seq: 0 }
    }

    fn events(&mut self, events: Vec<KvEvent>) -> &mut Self {
        assert_eq!(self.feed.live(&mut self.index, self.seq, batch(events)), Action::Wait);
        self.seq += 1;
        self
    }

    /// How many blocks of `tokens` the worker holds, as routing sees it.
    #[track_caller]
    fn holds(&mut self, tokens: &[u32], salt: &[u8], blocks: u32) -> &mut Self {
        let matched = self.index.matched(&space(salt).chain(key(), tokens));
        assert_eq!(matched.first().map_or(0, |(_, blocks)| *blocks), blocks);
        self
    }
}

const PROMPT: [u32; 6] = [1, 2, 3, 4, 5, 6];

#[test]
fn a_block_stored_twice_goes_with_its_second_removal() {
    Simple::new()
        .events(vec![store(&[10, 11], None, &PROMPT[..4]), store(&[10], None, &PROMPT[..2])])
        .holds(&PROMPT, b"", 2)
        .events(vec![remove(11), remove(10)])
        .holds(&PROMPT, b"", 1)
        .events(vec![remove(10)])
        .holds(&PROMPT, b"", 0);
}

#[test]
fn counts_of_copies_left_are_believed() {
    let left = |copies| {
        KvEvent::BlockRemoved(BlockRemoved { remaining_copy_counts: Some(vec![copies]), ..removed(10) })
    };
    Simple::new()
        .events(vec![store(&[10], None, &PROMPT[..2]), left(3), remove(10), remove(10)])
        .holds(&PROMPT, b"", 1)
        .events(vec![left(0)])
        .holds(&PROMPT, b"", 0);
}

#[test]
fn blocks_behind_a_removed_one_come_back_with_it() {
    let mut simple = Simple::new();
    simple
        .events(vec![store(&[10, 11, 12], None, &PROMPT), remove(11)])
        .holds(&PROMPT, b"", 1)
        .events(vec![store(&[11], Some(10), &PROMPT[2..4])])
        .holds(&PROMPT, b"", 3)
        // A block removed while it cannot be reached does not come back.
        .events(vec![remove(11), remove(12), store(&[11], Some(10), &PROMPT[2..4])])
        .holds(&PROMPT, b"", 2)
        .events(vec![remove(11), remove(10)]);
    assert_eq!((simple.index.len(), simple.feed.blocks.len()), (0, 0));
}

#[test]
fn orphans_and_nonsense_are_counted_and_left_out() {
    let mut simple = Simple::new();
    let short = BlockStored { token_ids: vec![1], ..stored(&[20], None, &[]) };
    let sizeless = BlockStored { block_size: 0, ..stored(&[21], None, &[]) };
    simple.events(vec![
        store(&[11, 12], Some(10), &PROMPT[..4]),
        KvEvent::BlockStored(short),
        KvEvent::BlockStored(sizeless),
        remove(77),
    ]);
    let stats = simple.feed.stats();
    assert_eq!((stats.orphans, stats.malformed, stats.unknown_removals), (2, 2, 1));
    assert!(simple.index.is_empty());
}

#[test]
fn other_tiers_groups_and_places_are_not_this_cache() {
    let tier = BlockStored { medium: Some("CPU".to_owned()), ..stored(&[10], None, &PROMPT[..2]) };
    let group = BlockStored { group_idx: Some(1), ..stored(&[10], None, &PROMPT[..2]) };
    let remote = BlockStored { locality: Some("REMOTE".to_owned()), ..stored(&[10], None, &PROMPT[..2]) };
    let tier_removal = BlockRemoved { medium: Some("CPU".to_owned()), ..removed(10) };
    let group_removal = BlockRemoved { group_idx: Some(1), ..removed(10) };
    Simple::new()
        .events([tier, group, remote].map(KvEvent::BlockStored).to_vec())
        .holds(&PROMPT, b"", 0)
        .events(vec![store(&[10], None, &PROMPT[..2])])
        .events([tier_removal, group_removal].map(KvEvent::BlockRemoved).to_vec())
        .holds(&PROMPT, b"", 1)
        .events(vec![KvEvent::AllBlocksCleared])
        .holds(&PROMPT, b"", 0);
}

/// An event of the host's memory.
fn elsewhere(event: KvEvent) -> KvEvent {
    let medium = Some("CPU".to_owned());
    match event {
        KvEvent::BlockStored(event) => KvEvent::BlockStored(BlockStored { medium, ..event }),
        KvEvent::BlockRemoved(event) => KvEvent::BlockRemoved(BlockRemoved { medium, ..event }),
        cleared @ KvEvent::AllBlocksCleared => cleared,
    }
}

const ANY_TIER: WorkerId = WorkerId(4);

impl Simple {
    fn with_tiers() -> Self {
        let simple = Self::new();
        Self { feed: simple.feed.with_tiers(Some(ANY_TIER)), ..simple }
    }

    /// How many blocks of the prompt its own cache holds, and any tier.
    #[track_caller]
    fn tiers(&mut self, own: u32, any: u32) -> &mut Self {
        let lengths = self.index.lengths(&space(b"").chain(key(), &PROMPT));
        assert_eq!((lengths.of(WORKER), lengths.of(ANY_TIER)), (own, any));
        self
    }
}

#[test]
fn what_other_tiers_keep_is_found_there_and_joined_with_the_worker_s_own() {
    let mut worker = Simple::with_tiers();
    // By name alone, as vLLM's offloading says it; it was on the GPU first.
    let named = |hashes: &[u64]| elsewhere(store(hashes, None, &[]));
    worker.events(vec![store(&[10, 11, 12], None, &PROMPT)]).tiers(3, 0);
    worker.events(vec![named(&[11, 12])]).tiers(3, 3);
    worker.events(vec![remove(12), remove(11)]).tiers(1, 3);
    // The first block is on the GPU alone: with it goes the way to the others, and comes back.
    worker.events(vec![remove(10)]).tiers(0, 0);
    worker.events(vec![store(&[10], None, &PROMPT[..2])]).tiers(1, 3);
    worker.events(vec![elsewhere(remove(12))]).tiers(1, 2);
    // With its tokens it need not have been known.
    worker.events(vec![elsewhere(store(&[12], Some(11), &PROMPT[4..]))]).tiers(1, 3);
    worker.events(vec![elsewhere(remove(12)), elsewhere(remove(11)), remove(10)]).tiers(0, 0);
    assert_eq!((worker.feed.blocks.len(), worker.index.len()), (0, 0));
    assert_eq!(worker.feed.stats().ignored, 0);
    worker.events(vec![named(&[77]), elsewhere(remove(77))]);
    assert_eq!(worker.feed.stats().ignored, 2);
    worker.events(vec![store(&[10], None, &PROMPT[..2]), named(&[10])]).tiers(1, 1);
    worker.events(vec![KvEvent::AllBlocksCleared]).tiers(0, 0);
}

proptest! {
    /// Against counts of copies: a block is in reach while it and all before it have one.
    #[test]
    fn tiers_are_what_their_copies_say(ops in prop::collection::vec((0_u8..9, 0_usize..3), 0..60)) {
        let mut worker = Simple::with_tiers();
        let (mut own, mut other, mut told) = ([0_u32; 3], [0_u32; 3], false);
        let names = [10, 11, 12];
        for (op, i) in ops {
            let event = match op {
                0..=2 => {
                    own[..=i].iter_mut().for_each(|copies| *copies += 1);
                    store(&names[..=i], None, &PROMPT[..2 * (i + 1)])
                }
                3 | 4 => {
                    own[i] = own[i].saturating_sub(1);
                    remove(names[i])
                }
                5 | 6 => {
                    // By its name, which stands for something while the block or one behind it has a copy.
                    told = true;
                    other[i] += u32::from((i..3).any(|k| own[k] + other[k] > 0));
                    elsewhere(store(&[names[i]], None, &[]))
                }
                7 => {
                    told = true;
                    other[i] = other[i].saturating_sub(1);
                    elsewhere(remove(names[i]))
                }
                _ => {
                    (own, other, told) = ([0; 3], [0; 3], false);
                    KvEvent::AllBlocksCleared
                }
            };
            worker.events(vec![event]);
            let reach = |held: &dyn Fn(usize) -> bool| (0..3).take_while(|&k| held(k)).count() as u32;
            let any = if told { reach(&|k| own[k] + other[k] > 0) } else { 0 };
            worker.tiers(reach(&|k| own[k] > 0), any);
        }
    }
}

#[test]
fn a_worker_without_other_tiers_takes_no_more_room() {
    let mut worker = Simple::with_tiers();
    worker.events(vec![store(&[10, 11, 12], None, &PROMPT)]);
    assert_eq!(worker.index.len(), 3);
    // Where other tiers do not count, their events are left out.
    let mut off = Simple::new();
    off.events(vec![store(&[10], None, &PROMPT[..2]), elsewhere(store(&[10], None, &[]))]).tiers(1, 0);
    assert_eq!((off.feed.stats().ignored, off.index.len()), (1, 1));
}

#[test]
fn salts_keep_prefixes_apart_also_where_hashes_do_not() {
    let salted = |salt: &str, hashes: &[u64], parent, ids: &[u32]| {
        KvEvent::BlockStored(BlockStored { cache_salt: Some(salt.to_owned()), ..stored(hashes, parent, ids) })
    };
    // SGLang: the same hash under two salts.
    let mut sglang = Simple::new();
    sglang
        .events(vec![
            salted("a", &[10], None, &PROMPT[..2]),
            salted("b", &[10], None, &PROMPT[..2]),
            salted("b", &[11], Some(10), &PROMPT[2..4]),
        ])
        .holds(&PROMPT, b"a", 1)
        .holds(&PROMPT, b"b", 2)
        .holds(&PROMPT, b"", 0)
        .events(vec![remove(11), remove(10)])
        .holds(&PROMPT, b"a", 0)
        .holds(&PROMPT, b"b", 0);
    assert_eq!(sglang.feed.blocks.len(), 0);
    // vLLM: the salt is the last key of the first block.
    let image = || ExtraKey::Raw([0xc0].into());
    let of_vllm = BlockStored {
        extra_keys: vec![vec![ExtraKey::Text("a".to_owned())], vec![image()]],
        ..stored(&[20, 21], None, &PROMPT[..4])
    };
    Simple::new()
        .events(vec![KvEvent::BlockStored(of_vllm)])
        .holds(&PROMPT, b"a", 1) // the second one is of an image
        .holds(&PROMPT, b"", 0);
}

#[test]
fn an_adapter_is_part_of_the_name() {
    let adapter = || ExtraKey::Text("lora".to_owned());
    let event = BlockStored {
        lora_name: Some("lora".to_owned()),
        extra_keys: vec![vec![adapter(), ExtraKey::Text("salt".to_owned())], vec![adapter()]],
        ..stored(&[20, 21], None, &PROMPT[..4])
    };
    let mut simple = Simple::new();
    simple.events(vec![KvEvent::BlockStored(event)]).holds(&PROMPT, b"salt", 0);
    let space = TokenSpace { adapter: Some("lora"), ..space(b"salt") };
    assert_eq!(simple.index.matched(&space.chain(key(), &PROMPT)), [(WORKER, 2)]);
}

#[test]
fn an_adapter_without_a_name_is_not_the_base_model() {
    let of = |lora_id, hash| BlockStored { lora_id, ..stored(&[hash], None, &PROMPT[..2]) };
    Simple::new()
        .events(vec![KvEvent::BlockStored(of(Some(3), 10))])
        .holds(&PROMPT, b"", 0)
        .events(vec![KvEvent::BlockStored(of(Some(0), 11))])
        .holds(&PROMPT, b"", 1);
}

#[test]
fn signed_and_whole_hashes_are_names_like_others() {
    let names = [EngineHash::Int((-7_i64).cast_unsigned()), EngineHash::Bytes([9; 32].into())];
    for name in names {
        let event = BlockStored { block_hashes: vec![name.clone()], ..stored(&[1], None, &PROMPT[..2]) };
        let gone = BlockRemoved { block_hashes: vec![name], ..BlockRemoved::default() };
        Simple::new()
            .events(vec![KvEvent::BlockStored(event)])
            .holds(&PROMPT, b"", 1)
            .events(vec![KvEvent::BlockRemoved(gone)])
            .holds(&PROMPT, b"", 0);
    }
}

#[test]
fn a_feed_is_bounded() {
    let (_, mut index) = feed(Recovery::Nothing);
    let mut feed = KvFeed::new(WORKER, key(), Recovery::Nothing, 2);
    let _ = feed.connected(&mut index);
    let _ = feed.live(&mut index, 0, batch(vec![store(&[10, 11, 12], None, &PROMPT)]));
    assert_eq!((feed.stats().over_capacity, index.len()), (1, 2));
    let _ = feed.live(&mut index, 1, batch(vec![remove(11), store(&[12], Some(10), &PROMPT[4..])]));
    assert_eq!((feed.stats().over_capacity, index.len()), (1, 2));
}

#[test]
fn a_gap_asks_for_a_replay_and_live_batches_wait_for_it() {
    let (mut feed, mut index) = feed(Recovery::Replay);
    assert_eq!(feed.connected(&mut index), Action::Replay { from: 0 });
    assert_eq!(feed.reply_ended(&mut index, true), Action::Wait);
    assert_eq!(feed.live(&mut index, 0, batch(vec![store(&[10], None, &PROMPT[..2])])), Action::Wait);
    assert_eq!(feed.live(&mut index, 2, batch(vec![remove(11)])), Action::Replay { from: 1 });
    assert_eq!(feed.live(&mut index, 3, batch(vec![store(&[12], Some(10), &[7, 8])])), Action::Wait);
    assert!(!feed.is_synced());
    // A reply that was given up is asked for again.
    assert_eq!(feed.reply_ended(&mut index, false), Action::Replay { from: 1 });
    feed.reply(&mut index, 1, batch(vec![store(&[11], Some(10), &PROMPT[2..4])]));
    feed.reply(&mut index, 2, batch(vec![remove(11)]));
    assert_eq!(feed.reply_ended(&mut index, true), Action::Wait);
    assert!(feed.is_synced());
    assert_eq!(index.matched(&space(b"").chain(key(), &[1, 2, 7, 8])), [(WORKER, 2)]);
    assert_eq!((index.len(), feed.stats().gaps, feed.stats().batches), (2, 1, 4));
}

#[test]
fn numbers_that_begin_anew_are_another_process() {
    let mut simple = Simple::new();
    simple.events(vec![store(&[10], None, &PROMPT[..2])]).events(vec![]);
    simple.seq = 0;
    simple.events(vec![store(&[20], None, &[7, 8])]).holds(&PROMPT, b"", 0).holds(&[7, 8], b"", 1);
    assert_eq!(simple.feed.stats().restarts, 1);
}

#[test]
fn a_batch_that_cannot_be_read_is_no_reason_to_believe_the_rest() {
    let mut simple = Simple::new();
    simple.events(vec![store(&[10], None, &PROMPT[..2])]);
    assert_eq!(simple.feed.live(&mut simple.index, 1, undecodable()), Action::Wait);
    simple.holds(&PROMPT, b"", 0);
    simple.seq = 2;
    simple.events(vec![store(&[10], None, &PROMPT[..2])]).holds(&PROMPT, b"", 1);
    let (mut feed, mut index) = feed(Recovery::Snapshot);
    assert_eq!(feed.connected(&mut index), Action::Snapshot);
    feed.reply(&mut index, 0, batch(vec![KvEvent::AllBlocksCleared]));
    assert_eq!(feed.reply_ended(&mut index, true), Action::Wait);
    assert_eq!(feed.live(&mut index, 0, undecodable()), Action::Snapshot);
}

#[test]
fn an_engine_without_snapshots_is_asked_for_replays() {
    let (mut feed, mut index) = feed(Recovery::Snapshot);
    assert_eq!(feed.connected(&mut index), Action::Snapshot);
    assert_eq!(feed.reply_ended(&mut index, true), Action::Replay { from: 0 });
}

// === Against an engine ===

/// A block by all tokens up to its end; one token a block is enough to tell them apart.
type Prefix = Vec<u32>;

/// An engine's cache, without KV.
struct Engine {
    copies: BTreeMap<Prefix, u32>,
    next_seq: u64,
    replay: VecDeque<(u64, Vec<KvEvent>)>,
    replay_max: usize,
}

impl Engine {
    fn new(replay_max: usize) -> Self {
        Self { copies: BTreeMap::new(), next_seq: 0, replay: VecDeque::new(), replay_max }
    }

    fn hash(prefix: &[u32]) -> u64 {
        prefix.iter().fold(7, |hash: u64, id| (hash ^ u64::from(*id)).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn stored(prefix: &[u32]) -> KvEvent {
        let (last, before) = prefix.split_last().unwrap();
        store(&[Self::hash(prefix)], (!before.is_empty()).then(|| Self::hash(before)), &[*last, 0])
    }

    /// Stores or removes one copy of what `pick` leads to; says so.
    fn change(&mut self, pick: &[u32], removes: bool, anywhere: bool) -> Option<KvEvent> {
        if removes {
            let leaf = |prefix: &Prefix| {
                !self.copies.keys().any(|other| other.len() > prefix.len() && other.starts_with(prefix))
            };
            let all = self.copies.keys();
            let candidates: Vec<Prefix> = all.filter(|prefix| anywhere || leaf(prefix)).cloned().collect();
            let prefix = candidates.get(pick.iter().sum::<u32>() as usize % candidates.len().max(1))?.clone();
            let copies = self.copies.get_mut(&prefix)?;
            *copies -= 1;
            if *copies == 0 {
                self.copies.remove(&prefix);
            }
            return Some(remove(Self::hash(&prefix)));
        }
        // The first block of `pick` that is not there, or another copy of the last one.
        let len = (1..=pick.len()).find(|len| !self.copies.contains_key(&pick[..*len])).unwrap_or(pick.len());
        *self.copies.entry(pick[..len].to_vec()).or_default() += 1;
        Some(Self::stored(&pick[..len]))
    }

    fn publish(&mut self, events: Vec<KvEvent>) -> (u64, Vec<KvEvent>) {
        let message = (self.next_seq, events);
        self.next_seq += 1;
        self.replay.push_back(message.clone());
        if self.replay.len() > self.replay_max {
            self.replay.pop_front();
        }
        message
    }

    /// All copies, parents first; what is gone but led to something is stored and removed at the end.
    fn snapshot(&self) -> Vec<Vec<KvEvent>> {
        let mut prefixes: BTreeMap<(usize, Prefix), u32> = BTreeMap::new();
        for (prefix, copies) in &self.copies {
            for len in 1..prefix.len() {
                let absent = !self.copies.contains_key(&prefix[..len]);
                absent.then(|| prefixes.insert((len, prefix[..len].to_vec()), 0));
            }
            prefixes.insert((prefix.len(), prefix.clone()), *copies);
        }
        let mut batches = vec![vec![KvEvent::AllBlocksCleared]];
        for ((_, prefix), copies) in &prefixes {
            batches.push(vec![Self::stored(prefix); (*copies).max(1) as usize]);
        }
        let gone = prefixes.iter().filter(|(_, copies)| **copies == 0);
        batches.push(gone.rev().map(|((_, prefix), _)| remove(Self::hash(prefix))).collect());
        batches
    }

    /// The blocks a request can reach, by their names in the index.
    fn reachable(&self) -> Vec<BlockHash> {
        let whole = |prefix: &&Prefix| (1..prefix.len()).all(|len| self.copies.contains_key(&prefix[..len]));
        let name = |prefix: &Prefix| {
            let tokens: Vec<u32> = prefix.iter().flat_map(|id| [*id, 0]).collect();
            *space(b"").chain(key(), &tokens).last().unwrap()
        };
        self.copies.keys().filter(whole).map(name).collect()
    }

    /// Carries out what the feed asks for, `lost` of the replies going missing, until it asks for nothing.
    fn serve(&self, feed: &mut KvFeed, index: &mut PrefixIndex, mut action: Action, mut lost: u32) {
        for _ in 0..20 {
            let replies: Vec<(u64, Vec<KvEvent>)> = match action {
                Action::Wait => return,
                Action::Replay { from } => {
                    self.replay.iter().filter(|(seq, _)| *seq >= from).cloned().collect()
                }
                Action::Snapshot => {
                    self.snapshot().into_iter().map(|events| (self.next_seq, events)).collect()
                }
            };
            let complete = lost == 0;
            let received = if complete { replies.len() } else { replies.len() / 2 };
            for (seq, events) in replies.into_iter().take(received) {
                feed.reply(index, seq, batch(events));
            }
            lost = lost.saturating_sub(1);
            action = feed.reply_ended(index, complete);
        }
        panic!("the feed never has enough");
    }
}

/// What a network that keeps no promise does with a live message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Arrives,
    Lost,
    /// It arrives twice.
    Doubled,
    /// It arrives behind the one that follows it.
    Overtaken,
}

#[derive(Debug, Clone)]
enum Turn {
    /// A step of the engine, and what becomes of its message.
    Step { picks: Vec<(Vec<u32>, bool, bool)>, fate: Fate },
    /// The feed's request is served, after some replies were cut short.
    Serve { cut: u32 },
    /// Another process takes the engine's place; the connection breaks, or does not.
    Restart { seen: bool },
}

fn turn() -> impl Strategy<Value = Turn> {
    let pick = (prop::collection::vec(0_u32..2, 1..6), any::<bool>(), prop::bool::weighted(0.2));
    let fate = prop_oneof![
        7 => Just(Fate::Arrives),
        2 => Just(Fate::Lost),
        1 => Just(Fate::Doubled),
        1 => Just(Fate::Overtaken),
    ];
    prop_oneof![
        20 => (prop::collection::vec(pick, 1..5), fate).prop_map(|(picks, fate)| Turn::Step { picks, fate }),
        6 => (0_u32..3).prop_map(|cut| Turn::Serve { cut }),
        1 => any::<bool>().prop_map(|seen| Turn::Restart { seen }),
    ]
}

/// Plays the turns; at the end one message arrives and everything asked for is served.
fn play(turns: Vec<Turn>, recovery: Recovery, replay_max: usize) -> (Engine, KvFeed, PrefixIndex) {
    let (mut feed, mut index) = feed(recovery);
    let mut engine = Engine::new(replay_max);
    let mut action = feed.connected(&mut index);
    // Whether a live message came since the connection was made.
    let mut heard = false;
    let mut overtaken = None;
    for turn in turns {
        match turn {
            Turn::Step { picks, fate } => {
                let events: Vec<KvEvent> = picks
                    .iter()
                    .filter_map(|(pick, removes, anywhere)| engine.change(pick, *removes, *anywhere))
                    .collect();
                let message = engine.publish(events);
                let mut arrive = vec![message.clone()];
                match fate {
                    Fate::Arrives => arrive.extend(overtaken.take()),
                    Fate::Lost => arrive.clear(),
                    Fate::Doubled => arrive.push(message),
                    Fate::Overtaken => {
                        arrive.clear();
                        overtaken = Some(message);
                    }
                }
                for (seq, events) in arrive {
                    heard = true;
                    match feed.live(&mut index, seq, batch(events)) {
                        Action::Wait => {}
                        wanted => action = wanted,
                    }
                }
            }
            Turn::Serve { cut } => {
                engine.serve(&mut feed, &mut index, action, cut);
                action = Action::Wait;
            }
            Turn::Restart { seen } => {
                engine = Engine::new(replay_max);
                overtaken = None;
                if seen || !heard {
                    heard = false;
                    action = feed.connected(&mut index);
                } else {
                    // A restart that nothing shows is one whose first messages are seen.
                    let (seq, events) = engine.publish(Vec::new());
                    match feed.live(&mut index, seq, batch(events)) {
                        Action::Wait if feed.is_synced() => action = Action::Wait,
                        Action::Wait => {}
                        wanted => action = wanted,
                    }
                }
            }
        }
    }
    let (seq, events) = engine.publish(Vec::new());
    match feed.live(&mut index, seq, batch(events)) {
        Action::Wait => {}
        wanted => action = wanted,
    }
    engine.serve(&mut feed, &mut index, action, 0);
    assert!(feed.is_synced());
    (engine, feed, index)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn with_snapshots_the_index_is_what_the_engine_holds(
        turns in prop::collection::vec(turn(), 0..60),
        replay_max in 1_usize..20,
    ) {
        let (engine, _, index) = play(turns, Recovery::Snapshot, replay_max);
        let reachable = engine.reachable();
        for name in &reachable {
            prop_assert!(index.holds(WORKER, *name));
        }
        prop_assert_eq!(index.resident(WORKER), reachable.len());
    }

    #[test]
    fn with_a_long_replay_it_is_too(turns in prop::collection::vec(turn(), 0..60)) {
        let (engine, _, index) = play(turns, Recovery::Replay, 1000);
        let reachable = engine.reachable();
        for name in &reachable {
            prop_assert!(index.holds(WORKER, *name));
        }
        prop_assert_eq!(index.resident(WORKER), reachable.len());
    }

    #[test]
    fn without_either_nothing_is_in_the_index_that_the_engine_does_not_hold(
        turns in prop::collection::vec(turn(), 0..60),
        replay_max in 1_usize..6,
        recovery in prop::sample::select(vec![Recovery::Nothing, Recovery::Replay]),
    ) {
        let (engine, _, index) = play(turns, recovery, replay_max);
        let reachable = engine.reachable();
        let held = reachable.iter().filter(|name| index.holds(WORKER, **name)).count();
        prop_assert_eq!(index.resident(WORKER), held);
    }

    /// An index that is too small drops blocks by itself; what it has stays true and prefix-closed.
    #[test]
    fn an_index_under_pressure_stays_true(turns in prop::collection::vec(turn(), 0..60)) {
        let mut engine = Engine::new(10);
        let mut feed = KvFeed::new(WORKER, key(), Recovery::Nothing, 1000);
        let mut index = PrefixIndex::new(5000);
        prop_assume!(index.capacity() > 0);
        let _ = feed.connected(&mut index);
        for turn in turns {
            let Turn::Step { picks, .. } = turn else { continue };
            let changes = picks.iter().filter_map(|(pick, removes, anywhere)| engine.change(pick, *removes, *anywhere));
            let changes = changes.collect();
            let (seq, events) = engine.publish(changes);
            let _ = feed.live(&mut index, seq, batch(events));
            let held = engine.reachable().iter().filter(|name| index.holds(WORKER, **name)).count();
            prop_assert_eq!(index.resident(WORKER), held);
            for prefix in engine.copies.keys() {
                let tokens: Vec<u32> = prefix.iter().flat_map(|id| [*id, 0]).collect();
                let chain = space(b"").chain(key(), &tokens);
                let held = chain.iter().map(|name| index.holds(WORKER, *name)).collect::<Vec<_>>();
                prop_assert!(held.is_sorted_by(|a, b| a >= b), "{:?}", held);
            }
        }
    }
}
