//! Runs layers of experts over every transport and writes down, for each rank, what it sent and what it
//! received in every exchange: for an oracle that moves the same messages by other means
//! (`tests/external/experts_mpi`). Checks nothing itself.
//!
//!     cargo run -p keyway-kernels --example record_exchanges -- DIR RANKS
//!
//! `DIR/TRANSPORT-RANK.bin` is, for each exchange in turn, in little-endian 32-bit words: the lengths of the
//! messages to each rank, the lengths of those from each rank, the words sent by rank, the words received by
//! rank.

#![allow(clippy::expect_used, reason = "a tool of the tests ends at whatever fails")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use keyway_kernels::compute::Compute;
#[cfg(target_os = "linux")]
use keyway_kernels::fabric::Shm;
use keyway_kernels::fabric::{Cause, Fabric, FabricError, Local, Phase, Tcp};
use keyway_kernels::moe::Placement;
use keyway_kernels::moe::parallel::{Experts, LayerTokens, Parallel, capacity_for};

const EXPERTS: usize = 16;
const WIDTH: usize = 64;
const TOKENS: usize = 48;
const PATIENCE: Duration = Duration::from_secs(30);

/// What routers may do: a name, experts per token, and rank `rank`'s tokens and slots.
type Routing = (&'static str, usize, fn(usize) -> usize, fn(usize, usize) -> usize);

const ROUTINGS: [Routing; 7] = [
    ("uniform", 4, |_| TOKENS, |rank, slot| (slot * 5 + slot / 4 * 3 + rank) % EXPERTS),
    ("skewed", 2, |rank| TOKENS >> rank, |_, slot| (slot % 2) * (1 + slot / 2 % 7)),
    ("all to one", 1, |_| TOKENS, |_, _| 3),
    ("empty rank", 4, |rank| if rank == 0 { 0 } else { TOKENS }, |rank, slot| (slot + rank) % EXPERTS),
    ("idle but one", 4, |rank| if rank == 0 { TOKENS } else { 0 }, |_, slot| slot * 7 % EXPERTS),
    ("no tokens", 4, |_| 0, |_, _| 0),
    ("all experts", EXPERTS, |rank| 1 + 3 * rank, |_, slot| slot % EXPERTS),
];

/// A fabric that writes down what goes through it.
#[derive(Debug)]
struct Recording {
    inner: Box<dyn Fabric>,
    outboxes: Vec<Vec<u32>>,
    words: Vec<u32>,
}

impl Fabric for Recording {
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
        self.outboxes[to].resize(words, 0);
        Ok(&mut self.outboxes[to])
    }
    fn exchange(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError> {
        for (to, message) in self.outboxes.iter().enumerate().filter(|(_, message)| !message.is_empty()) {
            self.inner.outbox(to, message.len())?.copy_from_slice(message);
        }
        self.inner.exchange(phase, deadline)?;
        let received = |from: usize| self.inner.inbox(from);
        self.words.extend(self.outboxes.iter().map(|message| message.len() as u32));
        self.words.extend((0..self.inner.size()).map(|from| received(from).len() as u32));
        self.words.extend(self.outboxes.iter().flatten());
        self.words.extend((0..self.inner.size()).flat_map(received));
        self.outboxes.iter_mut().for_each(Vec::clear);
        Ok(())
    }
    fn inbox(&self, from: usize) -> &[u32] {
        self.inner.inbox(from)
    }
    fn fail(&mut self, rank: usize, phase: Phase, cause: Cause) -> FabricError {
        self.inner.fail(rank, phase, cause)
    }
}

/// Experts that tell whom they served: any function of a row does, as bytes are looked at.
struct Affine<'a>(&'a Placement, usize);

impl Experts for Affine<'_> {
    fn shape(&self, _: u32) -> Option<(usize, usize)> {
        Some((WIDTH, EXPERTS))
    }
    fn holds(&self, _: u32, expert: usize) -> bool {
        self.0.holds(self.1, expert)
    }
    fn run(&mut self, _: u32, expert: usize, x: &[f32], out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * (expert + 1) as f32 + 0.5;
        }
    }
}

/// Numbers that hardly repeat.
fn values(seed: usize, len: usize) -> Vec<f32> {
    let mut random = seed as u64 * 2 + 1;
    let next = || {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (random >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn run_rank(inner: Box<dyn Fabric>, file: &Path) {
    let (rank, size) = (inner.rank(), inner.size());
    let mut fabric = Recording { inner, outboxes: vec![Vec::new(); size], words: Vec::new() };
    let placement = Placement::even(EXPERTS, size);
    let mut parallel = Parallel::default();
    for (layer, (_, top, tokens, expert)) in ROUTINGS.into_iter().enumerate() {
        let tokens = tokens(rank);
        let ids: Vec<u32> = (0..tokens * top).map(|slot| expert(rank, slot) as u32).collect();
        let (x, weights) = (values(rank * 31 + layer, tokens * WIDTH), values(layer, tokens * top));
        let tokens = LayerTokens { layer: layer as u32, top, x: &x, ids: &ids, weights: &weights };
        let mut out = vec![0.0; x.len()];
        let compute = Compute::single();
        let mut experts = Affine(&placement, rank);
        parallel
            .run(&compute, &mut fabric, &placement, tokens, &mut experts, &mut out, PATIENCE)
            .expect("a layer");
    }
    let bytes: Vec<u8> = fabric.words.iter().flat_map(|word| word.to_le_bytes()).collect();
    std::fs::write(file, bytes).expect("the record");
}

fn run(name: &str, group: Vec<Box<dyn Fabric>>, dir: &Path) {
    thread::scope(|scope| {
        for fabric in group {
            let file = dir.join(format!("{name}-{}.bin", fabric.rank()));
            scope.spawn(move || run_rank(fabric, &file));
        }
    });
}

fn tcp(size: usize, capacity: usize) -> Vec<Box<dyn Fabric>> {
    let listeners: Vec<_> =
        (0..size).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let addrs: Vec<_> = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
    let addrs = &addrs;
    thread::scope(|scope| {
        let join = |(rank, listener)| {
            scope.spawn(move || Tcp::join(rank, addrs, listener, capacity, PATIENCE).expect("a group"))
        };
        let joining: Vec<_> = listeners.iter().enumerate().map(join).collect();
        joining.into_iter().map(|rank| Box::new(rank.join().expect("a rank")) as _).collect()
    })
}

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().expect("a directory"));
    let size: usize = args.next().and_then(|size| size.parse().ok()).expect("a number of ranks");
    let capacity = capacity_for(TOKENS, EXPERTS, EXPERTS, WIDTH);
    let boxed = |fabric: Local| Box::new(fabric) as Box<dyn Fabric>;
    run("local", Local::group(size, capacity).into_iter().map(boxed).collect(), &dir);
    run("tcp", tcp(size, capacity), &dir);
    #[cfg(target_os = "linux")]
    {
        let memory = Shm::create(size, capacity).expect("shared memory");
        let rank = |rank| Box::new(Shm::attach(&memory, rank).expect("a rank")) as Box<dyn Fabric>;
        run("shm", (0..size).map(rank).collect(), &dir);
    }
    let names: Vec<&str> = ROUTINGS.iter().map(|(name, ..)| *name).collect();
    println!("{} ranks, two exchanges each: {}", size, names.join(", "));
}
