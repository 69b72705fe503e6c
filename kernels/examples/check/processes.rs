//! The exchange between ranks that are processes, each of which maps the others' mailboxes by CUDA IPC: on
//! one GPU, or on as many as there are. This program starts itself once for each rank; handles go over shared
//! memory.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use keyway_kernels::cuda::gpu::{Gpu, ipc};
use keyway_kernels::cuda::peer::Layout;
use keyway_kernels::fabric::{Fabric, Phase, Shm};
use keyway_kernels::moe::Placement;

use crate::cases::peer::{Group, Round};
use crate::cases::{Lab, Size};

pub(crate) const NAME: &str = "peer_processes";

const LAYOUT: Layout = Layout { ranks: 4, held: 4, tokens: 9, top: 3, width: 1032 };
const EXPERTS: usize = LAYOUT.ranks * LAYOUT.held;
/// Words of a note between ranks at most.
const NOTE_WORDS: usize = 64;
/// For what must come. Processes on one GPU take turns, and each loads its kernels first.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Before a rank is taken to stay away: longer than turns on one GPU.
const DEADLINE: Duration = Duration::from_secs(2);

/// Starts the ranks and waits for them.
pub(crate) fn run() -> Result<String, String> {
    let group = Shm::create(LAYOUT.ranks, NOTE_WORDS).map_err(|e| e.to_string())?;
    // A path by which another process opens the very memory.
    let path = format!("/proc/{}/fd/{}", std::process::id(), group.as_raw_fd());
    let compared = each("rank", LAYOUT.ranks, &path)?;
    Ok(format!("{{\"case\": \"{NAME}\", \"compared\": {compared}, \"worst\": 0.0}}"))
}

/// Starts this program as each rank, `WHAT NUMBER PATH`, and waits for all; the sum of what they say they
/// compared.
pub(crate) fn each(what: &str, ranks: usize, path: &str) -> Result<usize, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let start = |rank: usize| {
        let mut command = Command::new(&program);
        command.args([what, &rank.to_string(), path]).stdin(Stdio::null()).stdout(Stdio::piped());
        command.spawn().map_err(|e| e.to_string())
    };
    let started: Vec<_> = (0..ranks).map(start).collect();
    let mut compared = 0;
    let mut faults = Vec::new();
    for (rank, child) in started.into_iter().enumerate() {
        let done = child.and_then(|child| child.wait_with_output().map_err(|e| e.to_string()))?;
        let said = String::from_utf8(done.stdout).unwrap_or_default();
        match said.trim().parse::<usize>() {
            Ok(elements) if done.status.success() => compared += elements,
            _ => faults.push(format!("rank {rank}: {}, {}", done.status, said.trim())),
        }
    }
    faults.into_iter().next().map_or(Ok(compared), Err)
}

/// One of the ranks: how many elements it compared.
pub(crate) fn rank(rank: &str, path: &str) -> Result<String, String> {
    let rank: usize = rank.parse().map_err(|_| format!("{rank} is no rank"))?;
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(|e| format!("{path}: {e}"))?;
    let mut fabric = Shm::attach(&file, rank).map_err(|e| e.to_string())?;
    let meet = |fabric: &mut Shm| fabric.exchange(Phase::Placement, PATIENCE).map_err(|e| e.to_string());
    let mut gpu = Gpu::new(rank % Gpu::count().max(1)).map_err(|e| e.to_string())?;
    let mailboxes = ipc::mailboxes(&gpu, LAYOUT, &mut fabric, PATIENCE).map_err(|e| e.to_string())?;
    let mut lab = Lab::new(&mut gpu, Size::Large);
    let placement = Placement::even(EXPERTS, LAYOUT.ranks);
    let group = Group::joined(&mut lab, Arc::new(mailboxes), placement, rank..rank + 1, 1, DEADLINE)?;
    meet(&mut fabric)?;
    let round = |number: usize| {
        Round::new(&LAYOUT, number, &[9, 0, 1, 7], move |rank, slot| (slot * 5 + rank + number) % EXPERTS)
    };
    for number in 0..6 {
        group.round(&mut lab, &round(number))?;
    }
    // Rank 0 stays away. All others name it, and begin anew when all have.
    if rank > 0 {
        let member = &group.members[0];
        let tokens = round(6).upload(&mut lab, &LAYOUT, member)?;
        lab.launch(member.peers.dispatch_send(&tokens))?;
        lab.launch([member.peers.dispatch_receive(&member.arrivals)])?;
        let fault = group.fault(&mut lab, 0)?.ok_or("a rank stayed away and was not missed")?;
        if (fault.rank, fault.phase) != (0, Phase::Dispatch) {
            return Err(format!("rank 0 stayed away, and the fault is: {fault}"));
        }
    }
    meet(&mut fabric)?;
    lab.launch([group.members[0].peers.reset(9)])?;
    // Waits until it is done.
    if let Some(fault) = group.fault(&mut lab, 0)? {
        return Err(format!("after a reset: {fault}"));
    }
    meet(&mut fabric)?;
    group.round(&mut lab, &round(7))?;
    // No rank's mailbox may go while others write to it.
    meet(&mut fabric)?;
    group.free(&mut lab);
    Ok(lab.compared().to_string())
}
