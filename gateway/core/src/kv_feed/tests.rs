//! The feed against an engine that keeps copies of blocks, loses messages, forgets replays and restarts; and
//! the index against what that engine really holds.

mod hybrid;
mod recorded;
mod runs;

use std::cell::{Ref, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::ready;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};

use keyway_wire::block_hash::BlockHash;
use keyway_wire::kv_event::{
    BlockRemoved, BlockStored, EngineHash, EventBatch, ExtraKey, KvEvent, WireFormat,
};
use proptest::prelude::*;

use super::*;
use crate::index::PrefixIndex;
use crate::token_chain::TokenSpace;

const WORKER: WorkerId = WorkerId(3);
const BLOCK: u32 = 2;

fn key() -> HashKey {
    HashKey::new(99)
}

fn space(salt: &[u8]) -> TokenSpace<'_> {
    TokenSpace { salt, adapter: None, block_size: BLOCK }
}

/// An index that is had for so many steps at a time, and sees to it that they are kept.
struct Shared {
    index: RefCell<PrefixIndex>,
    steps: usize,
    /// Times that others had their turn.
    turns: AtomicUsize,
}

impl Shared {
    fn new(bytes: usize, steps: usize) -> Self {
        Self { index: RefCell::new(PrefixIndex::new(bytes)), steps, turns: AtomicUsize::new(0) }
    }

    fn index(&self) -> Ref<'_, PrefixIndex> {
        self.index.borrow()
    }
}

impl Moments for Shared {
    fn moment<T>(&self, f: impl FnOnce(&mut PrefixIndex) -> T) -> T {
        let mut index = self.index.borrow_mut();
        let before = index.len();
        let outcome = f(&mut index);
        // A block counts twice where other tiers do.
        let changed = index.len().abs_diff(before);
        assert!(changed <= 2 * self.steps, "{changed} blocks at once");
        outcome
    }

    fn steps(&self) -> usize {
        self.steps
    }

    fn between(&self) -> impl Future<Output = ()> + Send {
        self.turns.fetch_add(1, Relaxed);
        ready(())
    }
}

fn feed(recovery: Recovery, steps: usize) -> (KvFeed, Shared) {
    (KvFeed::new(WORKER, key(), recovery, 10_000), Shared::new(1 << 20, steps))
}

/// The bytes of a batch, in the form that can say what is in it.
fn batch(events: Vec<KvEvent>) -> Vec<u8> {
    let salted = |event: &KvEvent| matches!(event, KvEvent::BlockStored(event) if event.cache_salt.is_some());
    let format = if events.iter().any(salted) { WireFormat::SglangMap } else { WireFormat::VllmMap };
    EventBatch { events, ..EventBatch::default() }.encode(format)
}

/// What is the outcome of a future that waits for nothing.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => panic!("it waits"),
    }
}

/// The feed as a subscriber has it, whose index nobody else uses.
impl KvFeed {
    fn connected_now(&mut self, index: &Shared) -> Action {
        now(self.connected(index))
    }

    fn live_now(&mut self, index: &Shared, seq: u64, payload: &[u8]) -> Action {
        now(self.live(index, seq, Events::open(payload)))
    }

    fn reply_now(&mut self, index: &Shared, seq: u64, payload: &[u8]) {
        now(self.reply(index, seq, Events::open(payload)));
    }

    fn ended_now(&mut self, index: &Shared, complete: bool) -> Action {
        now(self.reply_ended(index, complete))
    }
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
    index: Shared,
    seq: u64,
}

impl Simple {
    fn new() -> Self {
        let (mut feed, index) = feed(Recovery::Nothing, 2);
        assert_eq!(feed.connected_now(&index), Action::Wait);
        Self { feed, index, seq: 0 }
    }

    fn events(&mut self, events: Vec<KvEvent>) -> &mut Self {
        assert_eq!(self.feed.live_now(&self.index, self.seq, &batch(events)), Action::Wait);
        self.seq += 1;
        self
    }

    /// How many blocks of `tokens` the worker holds, as routing sees it.
    #[track_caller]
    fn holds(&mut self, tokens: &[u32], salt: &[u8], blocks: u32) -> &mut Self {
        let matched = self.index.index().matched(&space(salt).chain(key(), tokens));
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
    assert_eq!((simple.index.index().len(), simple.feed.blocks.len()), (0, 0));
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
    assert!(simple.index.index().is_empty());
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
        let chain = space(b"").chain(key(), &PROMPT);
        let found = self.index.moment(|index| {
            let lengths = index.lengths(&chain);
            (lengths.of(WORKER), lengths.of(ANY_TIER))
        });
        assert_eq!(found, (own, any));
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
    assert_eq!((worker.feed.blocks.len(), worker.index.index().len()), (0, 0));
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
    assert_eq!(worker.index.index().len(), 3);
    // Where other tiers do not count, their events are left out.
    let mut off = Simple::new();
    off.events(vec![store(&[10], None, &PROMPT[..2]), elsewhere(store(&[10], None, &[]))]).tiers(1, 0);
    assert_eq!((off.feed.stats().ignored, off.index.index().len()), (1, 1));
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
    assert_eq!(simple.index.index().matched(&space.chain(key(), &PROMPT)), [(WORKER, 2)]);
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
    let (_, index) = feed(Recovery::Nothing, 2);
    let mut feed = KvFeed::new(WORKER, key(), Recovery::Nothing, 2);
    let _ = feed.connected_now(&index);
    let _ = feed.live_now(&index, 0, &batch(vec![store(&[10, 11, 12], None, &PROMPT)]));
    assert_eq!((feed.stats().over_capacity, index.index().len()), (1, 2));
    let _ = feed.live_now(&index, 1, &batch(vec![remove(11), store(&[12], Some(10), &PROMPT[4..])]));
    assert_eq!((feed.stats().over_capacity, index.index().len()), (1, 2));
}

/// What a single event, or a few bytes, can set off.
#[test]
fn the_index_is_had_for_few_blocks_at_a_time_whatever_is_said() {
    const BLOCKS: u64 = 2_000;
    let ids: Vec<u32> = (0..2 * BLOCKS as u32).collect();
    let names: Vec<u64> = (1..=BLOCKS).collect();
    let all = || store(&names, None, &ids);
    let gone = |names: &[u64]| {
        let block_hashes = names.iter().map(|name| int(*name)).collect();
        KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..BlockRemoved::default() })
    };
    let named = elsewhere(store(&names, None, &[]));
    // In steps of a worker of which all is known: what becomes of its blocks then.
    let cases: [(&str, Vec<KvEvent>, u32, u32); 7] = [
        ("nothing", vec![], 2_000, 0),
        ("the first goes, and with it all", vec![gone(&[1])], 0, 0),
        ("it comes back, and with it all", vec![gone(&[1]), store(&[1], None, &ids[..2])], 2_000, 0),
        ("all go from the first on", vec![gone(&names)], 0, 0),
        ("cleared", vec![KvEvent::AllBlocksCleared], 0, 0),
        ("another tier counts from now on", vec![elsewhere(remove(BLOCKS))], 2_000, 2_000),
        ("all are in another tier, and there alone", vec![named, gone(&[1])], 0, 2_000),
    ];
    for (what, events, own, any) in cases {
        let mut worker = Simple::with_tiers();
        worker.index = Shared::new(1 << 20, 100);
        worker.events(vec![all()]).events(events);
        let chain = space(b"").chain(key(), &ids);
        let found = worker.index.moment(|index| {
            let lengths = index.lengths(&chain);
            (lengths.of(WORKER), lengths.of(ANY_TIER))
        });
        assert_eq!(found, (own, any), "{what}");
        assert!(worker.index.turns.load(Relaxed) >= 2 * BLOCKS as usize / 200, "{what}");
        assert!(worker.feed.blocks.is_settled(), "{what}");
    }
}

#[test]
fn one_name_stands_for_so_many_blocks_and_no_more() {
    let mut worker = Simple::new();
    let salted = |i: u32| {
        let cache_salt = Some(i.to_string());
        KvEvent::BlockStored(BlockStored { cache_salt, ..stored(&[10], None, &PROMPT[..2]) })
    };
    worker.events((0..1_100).map(salted).collect());
    assert_eq!((worker.feed.blocks.len(), worker.feed.stats().over_capacity), (1_024, 76));
    worker.events(vec![remove(10)]);
    assert_eq!((worker.feed.blocks.len(), worker.index.index().len()), (0, 0));
}

#[test]
fn many_small_events_let_others_have_their_turn() {
    let mut worker = Simple::new();
    worker.events((1..=500).map(remove).collect());
    assert!(worker.index.turns.load(Relaxed) >= 100);
}

#[test]
fn batches_held_back_are_bounded_in_bytes() {
    let (mut feed, index) = feed(Recovery::Replay, 2);
    assert_eq!(feed.connected_now(&index), Action::Replay { from: 0 });
    let large = batch(vec![store(&[10], None, &vec![70_000; 200_000])]);
    for seq in 0..100 {
        assert_eq!(feed.live_now(&index, seq, &large), Action::Wait);
    }
    assert!(feed.held_bytes <= 4 << 20 && feed.held.len() as u32 == (4 << 20) / large.len() as u32);
    // What was not kept is asked for.
    assert_eq!(feed.ended_now(&index, true), Action::Replay { from: feed.next.unwrap() });
    assert_eq!((feed.held_bytes, feed.held.len()), (0, 0));
}

#[test]
fn a_gap_asks_for_a_replay_and_live_batches_wait_for_it() {
    let (mut feed, index) = feed(Recovery::Replay, 2);
    assert_eq!(feed.connected_now(&index), Action::Replay { from: 0 });
    assert_eq!(feed.ended_now(&index, true), Action::Wait);
    assert_eq!(feed.live_now(&index, 0, &batch(vec![store(&[10], None, &PROMPT[..2])])), Action::Wait);
    assert_eq!(feed.live_now(&index, 2, &batch(vec![remove(11)])), Action::Replay { from: 1 });
    assert_eq!(feed.live_now(&index, 3, &batch(vec![store(&[12], Some(10), &[7, 8])])), Action::Wait);
    assert!(!feed.is_synced());
    // A reply that was given up is asked for again.
    assert_eq!(feed.ended_now(&index, false), Action::Replay { from: 1 });
    feed.reply_now(&index, 1, &batch(vec![store(&[11], Some(10), &PROMPT[2..4])]));
    feed.reply_now(&index, 2, &batch(vec![remove(11)]));
    assert_eq!(feed.ended_now(&index, true), Action::Wait);
    assert!(feed.is_synced());
    assert_eq!(index.index().matched(&space(b"").chain(key(), &[1, 2, 7, 8])), [(WORKER, 2)]);
    assert_eq!((index.index().len(), feed.stats().gaps, feed.stats().batches), (2, 1, 4));
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
    assert_eq!(simple.feed.live_now(&simple.index, 1, &[]), Action::Wait);
    simple.holds(&PROMPT, b"", 0);
    simple.seq = 2;
    simple.events(vec![store(&[10], None, &PROMPT[..2])]).holds(&PROMPT, b"", 1);
    let (mut feed, index) = feed(Recovery::Snapshot, 2);
    assert_eq!(feed.connected_now(&index), Action::Snapshot);
    feed.reply_now(&index, 0, &batch(vec![KvEvent::AllBlocksCleared]));
    assert_eq!(feed.ended_now(&index, true), Action::Wait);
    assert_eq!(feed.live_now(&index, 0, &[]), Action::Snapshot);
}

#[test]
fn an_engine_without_snapshots_is_asked_for_replays() {
    let (mut feed, index) = feed(Recovery::Snapshot, 2);
    assert_eq!(feed.connected_now(&index), Action::Snapshot);
    assert_eq!(feed.ended_now(&index, true), Action::Replay { from: 0 });
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
    fn serve(&self, feed: &mut KvFeed, index: &Shared, mut action: Action, mut lost: u32) {
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
                feed.reply_now(index, seq, &batch(events));
            }
            lost = lost.saturating_sub(1);
            action = feed.ended_now(index, complete);
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
fn play(turns: Vec<Turn>, recovery: Recovery, replay_max: usize, steps: usize) -> (Engine, KvFeed, Shared) {
    let (mut feed, index) = feed(recovery, steps);
    let mut engine = Engine::new(replay_max);
    let mut action = feed.connected_now(&index);
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
                    match feed.live_now(&index, seq, &batch(events)) {
                        Action::Wait => {}
                        wanted => action = wanted,
                    }
                }
            }
            Turn::Serve { cut } => {
                engine.serve(&mut feed, &index, action, cut);
                action = Action::Wait;
            }
            Turn::Restart { seen } => {
                engine = Engine::new(replay_max);
                overtaken = None;
                if seen || !heard {
                    heard = false;
                    action = feed.connected_now(&index);
                } else {
                    // A restart that nothing shows is one whose first messages are seen.
                    let (seq, events) = engine.publish(Vec::new());
                    match feed.live_now(&index, seq, &batch(events)) {
                        Action::Wait if feed.is_synced() => action = Action::Wait,
                        Action::Wait => {}
                        wanted => action = wanted,
                    }
                }
            }
        }
    }
    let (seq, events) = engine.publish(Vec::new());
    match feed.live_now(&index, seq, &batch(events)) {
        Action::Wait => {}
        wanted => action = wanted,
    }
    engine.serve(&mut feed, &index, action, 0);
    assert!(feed.is_synced());
    (engine, feed, index)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn with_snapshots_the_index_is_what_the_engine_holds(
        turns in prop::collection::vec(turn(), 0..60),
        steps in 1_usize..5,
        replay_max in 1_usize..20,
    ) {
        let (engine, _, index) = play(turns, Recovery::Snapshot, replay_max, steps);
        let reachable = engine.reachable();
        for name in &reachable {
            prop_assert!(index.index().holds(WORKER, *name));
        }
        prop_assert_eq!(index.index().resident(WORKER), reachable.len());
    }

    #[test]
    fn with_a_long_replay_it_is_too(turns in prop::collection::vec(turn(), 0..60), steps in 1_usize..5) {
        let (engine, _, index) = play(turns, Recovery::Replay, 1000, steps);
        let reachable = engine.reachable();
        for name in &reachable {
            prop_assert!(index.index().holds(WORKER, *name));
        }
        prop_assert_eq!(index.index().resident(WORKER), reachable.len());
    }

    #[test]
    fn without_either_nothing_is_in_the_index_that_the_engine_does_not_hold(
        turns in prop::collection::vec(turn(), 0..60),
        steps in 1_usize..5,
        replay_max in 1_usize..6,
        recovery in prop::sample::select(vec![Recovery::Nothing, Recovery::Replay]),
    ) {
        let (engine, _, index) = play(turns, recovery, replay_max, steps);
        let reachable = engine.reachable();
        let held = reachable.iter().filter(|name| index.index().holds(WORKER, **name)).count();
        prop_assert_eq!(index.index().resident(WORKER), held);
    }

    /// An index that is too small drops blocks by itself; what it has stays true and prefix-closed.
    #[test]
    fn an_index_under_pressure_stays_true(turns in prop::collection::vec(turn(), 0..60), steps in 1_usize..5) {
        let mut engine = Engine::new(10);
        let mut feed = KvFeed::new(WORKER, key(), Recovery::Nothing, 1000);
        let index = Shared::new(5000, steps);
        prop_assume!(index.index().capacity() > 0);
        let _ = feed.connected_now(&index);
        for turn in turns {
            let Turn::Step { picks, .. } = turn else { continue };
            let changes = picks.iter().filter_map(|(pick, removes, anywhere)| engine.change(pick, *removes, *anywhere));
            let changes = changes.collect();
            let (seq, events) = engine.publish(changes);
            let _ = feed.live_now(&index, seq, &batch(events));
            let held = engine.reachable().iter().filter(|name| index.index().holds(WORKER, **name)).count();
            prop_assert_eq!(index.index().resident(WORKER), held);
            for prefix in engine.copies.keys() {
                let tokens: Vec<u32> = prefix.iter().flat_map(|id| [*id, 0]).collect();
                let chain = space(b"").chain(key(), &tokens);
                let held = chain.iter().map(|name| index.index().holds(WORKER, *name)).collect::<Vec<_>>();
                prop_assert!(held.is_sorted_by(|a, b| a >= b), "{:?}", held);
            }
        }
    }
}
