//! Experts spread over ranks: the bits of the same model on one rank, in every family, over every transport,
//! with ranks that fail in any exchange, and while experts move.

use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use keyway_kernels::compute::Compute;
#[cfg(target_os = "linux")]
use keyway_kernels::fabric::Shm;
use keyway_kernels::fabric::{Cause, Fabric, FabricError, Local, Phase, Tcp};

use super::invariance::{side_by_side, tokens};
use super::*;
use crate::engine::backend::StepError;
use crate::metrics::ExpertMetrics;
use crate::model::experts::{ExpertGroup, ExpertRank, GroupOptions, NoRanks, Supervisor};

/// Of every rank.
pub(super) const LAYOUT: KvLayout = KvLayout { block_size: 16, num_blocks: NUM_BLOCKS };
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Transport {
    Local,
    Tcp,
    #[cfg(target_os = "linux")]
    Shm,
}

pub(super) const TRANSPORTS: &[Transport] = &[
    Transport::Local,
    Transport::Tcp,
    #[cfg(target_os = "linux")]
    Transport::Shm,
];

/// Ranks as threads of this process.
#[derive(Debug)]
pub(super) struct Threads {
    source: ModelSource,
    transport: Transport,
    ranks: usize,
    capacity: usize,
    /// The last rank leaves in its exchange of this number, counted over all groups; 0: never.
    pub(super) leaves_at: u64,
    pub(super) exchanges: Arc<AtomicU64>,
    pub(super) starts: Arc<AtomicU64>,
}

/// A rank that leaves in one exchange.
#[derive(Debug)]
struct Leaving {
    inner: Box<dyn Fabric>,
    at: u64,
    exchanges: Arc<AtomicU64>,
}

impl Fabric for Leaving {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn capacity(&self) -> usize {
        self.inner.capacity()
    }
    fn outbox(&mut self, to: usize, words: usize) -> Result<&mut [u32], FabricError> {
        self.inner.outbox(to, words)
    }
    fn exchange(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        if self.exchanges.fetch_add(1, Ordering::SeqCst) + 1 == self.at {
            return Err(self.inner.fail(self.inner.rank(), phase, Cause::Gone));
        }
        self.inner.exchange(phase, deadline)
    }
    fn inbox(&self, from: usize) -> &[u32] {
        self.inner.inbox(from)
    }
    fn fail(&mut self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        self.inner.fail(rank, phase, cause)
    }
}

impl Threads {
    pub(super) fn new(source: &ModelSource, transport: Transport, ranks: usize, capacity: usize) -> Self {
        let source = source.clone();
        let (exchanges, starts) = (Arc::default(), Arc::default());
        Self { source, transport, ranks, capacity, leaves_at: 0, exchanges, starts }
    }

    fn group(&self) -> Vec<Box<dyn Fabric>> {
        fn boxed<F: Fabric + 'static>(fabric: F) -> Box<dyn Fabric> {
            Box::new(fabric)
        }
        match self.transport {
            Transport::Local => Local::group(self.ranks, self.capacity).into_iter().map(boxed).collect(),
            #[cfg(target_os = "linux")]
            Transport::Shm => {
                let memory = Shm::create(self.ranks, self.capacity).unwrap();
                (0..self.ranks).map(|rank| boxed(Shm::attach(&memory, rank).unwrap())).collect()
            }
            Transport::Tcp => {
                let listeners: Vec<_> =
                    (0..self.ranks).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
                let addrs: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
                let (addrs, capacity) = (&addrs, self.capacity);
                thread::scope(|scope| {
                    let join = |(rank, listener)| {
                        scope.spawn(move || Tcp::join(rank, addrs, listener, capacity, PATIENCE).unwrap())
                    };
                    let joining: Vec<_> = listeners.iter().enumerate().map(join).collect();
                    joining.into_iter().map(|rank| boxed(rank.join().unwrap())).collect()
                })
            }
        }
    }
}

impl Supervisor for Threads {
    fn start(&mut self) -> Result<Box<dyn Fabric>, NoRanks> {
        self.starts.fetch_add(1, Ordering::SeqCst);
        let mut group = self.group();
        for (i, inner) in group.drain(1..).enumerate() {
            let (at, exchanges) = (self.leaves_at, Arc::clone(&self.exchanges));
            let source = self.source.clone();
            let fabric: Box<dyn Fabric> =
                if i + 2 == self.ranks { Box::new(Leaving { inner, at, exchanges }) } else { inner };
            thread::spawn(move || {
                // It ends with the group.
                let compute = Compute::single();
                let mut rank = ExpertRank::open(&source, Quantize::None).unwrap();
                drop(rank.serve(fabric, &compute, PATIENCE));
            });
        }
        Ok(group.pop().unwrap())
    }
}

pub(super) fn metrics(ranks: usize) -> Arc<ExpertMetrics> {
    ExpertMetrics::new(ranks, 8).unwrap()
}

pub(super) fn options(ranks: usize) -> GroupOptions {
    GroupOptions {
        ranks,
        deadline: PATIENCE,
        retries: 2,
        redundant: 0,
        threads: NonZeroUsize::MIN,
        attention: None,
    }
}

/// The model's share on rank 0, and a group behind it.
pub(super) fn spread(source: &ModelSource, threads: Threads, options: GroupOptions) -> CpuBackend {
    let model = LoadedModel::load_share(source, Quantize::None, options.ranks).unwrap();
    let metrics = metrics(options.ranks);
    let group = ExpertGroup::new(source, Quantize::None, options, Box::new(threads), metrics).unwrap();
    let layout = LAYOUT;
    model.into_backend(layout).unwrap().with_group(group).unwrap()
}

pub(super) fn with_experts() -> impl Iterator<Item = ModelSource> {
    sources().filter(|source| LoadedModel::load(source).unwrap().experts().iter().any(|count| *count > 0))
}

pub(super) fn capacity(source: &ModelSource, tokens: usize) -> usize {
    LoadedModel::load(source).unwrap().words_for(tokens)
}

/// Prompts side by side, in pieces and token by token.
fn generate(backend: &mut CpuBackend) -> Vec<Vec<u32>> {
    let prompts: Vec<Vec<u32>> = [7, 11, 13].map(|step| tokens(90, step)).into();
    let cuts = [vec![85, 1, 1, 1], vec![33], vec![1, 80, 1, 1]];
    let mut pool = Pool::ascending(backend);
    side_by_side(backend, &mut pool, &prompts, &cuts)
}

#[test]
fn every_family_has_the_same_bits_on_every_number_of_ranks_over_every_transport() {
    let mut families = 0;
    for source in with_experts() {
        let expected = generate(&mut backend(&source));
        for ranks in [1, 2, 4] {
            for transport in TRANSPORTS {
                // Some steps have more tokens than a message takes.
                let threads = Threads::new(&source, *transport, ranks, capacity(&source, 70));
                let mut backend = spread(&source, threads, options(ranks));
                assert_eq!(generate(&mut backend), expected, "{source}, {ranks} ranks, {transport:?}");
            }
        }
        families += 1;
    }
    assert_eq!(families, 8);
}

#[test]
fn the_numerics_id_is_the_same_and_each_rank_holds_its_share() {
    for source in with_experts() {
        let whole = LoadedModel::load(&source).unwrap();
        let half = LoadedModel::load_share(&source, Quantize::None, 2).unwrap();
        assert_eq!(half.info.numerics_id, whole.info.numerics_id, "{source}");
        assert!(half.info.weight_bytes < whole.info.weight_bytes, "{source}");
    }
}

/// Leaving in each exchange in turn: the last rank's first ones are its start, then come two to a layer.
#[test]
fn a_rank_that_leaves_in_any_exchange_changes_no_bit() {
    let source = ModelSource::Random;
    let expected = generate(&mut backend(&source));
    let capacity = capacity(&source, 200);
    let whole = Threads::new(&source, Transport::Local, 3, capacity);
    let exchanges = Arc::clone(&whole.exchanges);
    generate(&mut spread(&source, whole, options(3)));
    let last = exchanges.load(Ordering::SeqCst);
    assert!(last > 16, "{last} exchanges are few");
    // The one after the last waits for what does not come any more.
    for leaves_at in 1..last {
        let mut threads = Threads::new(&source, Transport::Local, 3, capacity);
        threads.leaves_at = leaves_at;
        let starts = Arc::clone(&threads.starts);
        let mut backend = spread(&source, threads, options(3));
        assert_eq!(generate(&mut backend), expected, "leaving in exchange {leaves_at}");
        assert_eq!(starts.load(Ordering::SeqCst), 2, "leaving in exchange {leaves_at}");
    }
}

#[test]
fn without_retries_the_step_fails_with_the_ranks_name_and_the_next_one_works() {
    let source = ModelSource::Random;
    let prompt = tokens(40, 7);
    let expected = bits(&run_whole(&mut backend(&source), &prompt));
    // 1 and 2 are the start; the random model has two layers of two exchanges.
    for (leaves_at, phase) in
        [(3, "dispatch of layer 0"), (4, "combine of layer 0"), (5, "dispatch of layer 1")]
    {
        let mut threads = Threads::new(&source, Transport::Local, 2, capacity(&source, 40));
        threads.leaves_at = leaves_at;
        let mut backend = spread(&source, threads, GroupOptions { retries: 0, ..options(2) });
        let mut pool = Pool::ascending(&backend);
        let mut sequence = Sequence::new(&backend);
        sequence.grow(&mut pool, prompt.len());
        let tables = sequence.tables();
        let chunk = Chunk { tokens: &prompt, start: 0, tables: &tables, wants_logits: true };
        let mut logits = Vec::new();
        let StepError(reason) = backend.step(&[chunk], &mut logits).unwrap_err();
        assert!(reason.contains("rank 1 failed") && reason.contains(phase), "{reason}");
        assert!(reason.contains("is gone"), "{reason}");
        backend.step(&[chunk], &mut logits).unwrap();
        assert_eq!(bits(&logits), expected);
    }
}

#[test]
fn an_idle_group_is_kept_alive_and_restarted() {
    let source = ModelSource::Random;
    let prompt = tokens(20, 7);
    let expected = bits(&run_whole(&mut backend(&source), &prompt));
    let mut threads = Threads::new(&source, Transport::Local, 2, capacity(&source, 40));
    threads.leaves_at = 5;
    let starts = Arc::clone(&threads.starts);
    let mut backend = spread(&source, threads, options(2));
    assert!(backend.keep_alive_every().unwrap() * 3 < PATIENCE);
    for _ in 0..5 {
        backend.keep_alive();
    }
    assert_eq!(starts.load(Ordering::SeqCst), 2);
    assert_eq!(bits(&run_whole(&mut backend, &prompt)), expected);
}

/// A skewed load makes the hottest experts move, and a second copy of them; bits do not.
#[test]
fn experts_that_move_change_no_bit() {
    let mut moved = 0;
    for source in with_experts() {
        let mut alone = backend(&source);
        let threads = Threads::new(&source, Transport::Local, 2, capacity(&source, 200));
        let mut spread = spread(&source, threads, GroupOptions { redundant: 1, ..options(2) });
        for step in [7, 11, 13] {
            spread.rebalance_soon();
            // One token over and over: the same few experts.
            let prompt = vec![step; 150];
            assert_eq!(
                bits(&run_whole(&mut spread, &prompt)),
                bits(&run_whole(&mut alone, &prompt)),
                "{source}"
            );
        }
        moved += u64::from(spread.placements_changed() > 0);
    }
    // Where the load is even nothing is worth moving.
    assert!(moved >= 5, "in {moved} families experts moved");
}
