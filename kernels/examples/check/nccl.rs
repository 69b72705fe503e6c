//! Messages between ranks that are processes with a GPU each, by NCCL: every word of several exchanges, and a
//! rank that stays away is named. This program starts itself once for each GPU; lengths and the group's name
//! go over shared memory. NCCL takes no two ranks of a group on one GPU: with one, a group of one rank is
//! made, and nothing more can be seen.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::time::Duration;

use keyway_kernels::cuda::gpu::Gpu;
use keyway_kernels::cuda::gpu::nccl::Nccl;
use keyway_kernels::fabric::{Fabric, GroupedRank, Phase, Shm};

use crate::processes::{self, PATIENCE};

pub(crate) const NAME: &str = "nccl_processes";

const RANKS_MAX: usize = 8;
/// Words of the control's messages: the group's name.
const NOTE_WORDS: usize = 32;
/// Words of a message at most.
const CAPACITY: usize = 1 << 20;
/// Before a rank is taken to stay away.
const DEADLINE: Duration = Duration::from_secs(2);

/// Starts the ranks and waits for them.
pub(crate) fn run() -> Result<String, String> {
    if !Nccl::is_here() {
        return Ok(format!(
            "{{\"case\": \"{NAME}\", \"left_out\": \"no libnccl.so where the loader looks\"}}"
        ));
    }
    let ranks = Gpu::count().clamp(1, RANKS_MAX);
    let group = Shm::create(ranks, NOTE_WORDS).map_err(|e| e.to_string())?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), group.as_raw_fd());
    let compared = processes::each("nccl", ranks, &path)?;
    Ok(format!("{{\"case\": \"{NAME}\", \"compared\": {compared}, \"worst\": 0.0}}"))
}

/// One of the ranks: how many words it compared.
pub(crate) fn rank(rank: &str, path: &str) -> Result<String, String> {
    let rank: usize = rank.parse().map_err(|_| format!("{rank} is no rank"))?;
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(|e| format!("{path}: {e}"))?;
    let mut control = Shm::attach(&file, rank).map_err(|e| e.to_string())?;
    let gpu = Gpu::new(rank).map_err(|e| e.to_string())?;
    let nccl = Nccl::join(&gpu, &mut control, PATIENCE).map_err(|e| e.to_string())?;
    let mut fabric = GroupedRank::new(Box::new(control), nccl, CAPACITY);
    let mut compared = 0;
    for number in 0..9 {
        compared += round(&mut fabric, number)?;
    }
    // Rank 0 stays away until all others have missed it.
    if rank == 0 && fabric.size() > 1 {
        std::thread::park_timeout(2 * DEADLINE);
    } else if rank > 0 {
        let error = fabric
            .exchange(Phase::Dispatch, DEADLINE)
            .err()
            .ok_or("a rank stayed away and was not missed")?;
        if error.rank != 0 {
            return Err(format!("rank 0 stayed away, and the fault is: {error}"));
        }
    }
    Ok(compared.to_string())
}

/// An exchange of messages of many lengths, some of them of none; how many words were right.
fn round(fabric: &mut GroupedRank<Nccl>, number: usize) -> Result<usize, String> {
    let (me, size) = (fabric.rank(), fabric.size());
    for to in (0..size).filter(|to| *to != me) {
        let words = fabric.outbox(to, length(me, to, number)).map_err(|e| e.to_string())?;
        words.iter_mut().enumerate().for_each(|(i, out)| *out = word(me, to, number, i));
    }
    fabric.exchange(Phase::Dispatch, PATIENCE).map_err(|e| e.to_string())?;
    let mut compared = 0;
    for from in (0..size).filter(|from| *from != me) {
        let expected = (0..length(from, me, number)).map(|i| word(from, me, number, i));
        if !fabric.inbox(from).iter().copied().eq(expected) {
            return Err(format!("round {number}: what rank {from} sent is not what came"));
        }
        compared += fabric.inbox(from).len();
    }
    Ok(compared)
}

fn length(from: usize, to: usize, number: usize) -> usize {
    [0, 1, 70_000, CAPACITY][(from + 2 * to + number) % 4]
}

fn word(from: usize, to: usize, number: usize, i: usize) -> u32 {
    (from * 7919 + to * 104_729 + number * 31 + i * 17) as u32
}
