//! A group over TCP: ranks on several machines, each started by that machine's operator. After a failure all
//! of them join again; a rank keeps its experts meanwhile. Nothing is encrypted and no rank has to prove who
//! it is: for a network of the fleet's own.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use keyway_kernels::compute::Compute;
use keyway_kernels::fabric::{Fabric, Tcp};

use super::{ListenError, RankExit};
use crate::limits::{EXPERT_JOIN_MAX, EXPERT_MESSAGE_BYTES_MAX};
use crate::model::{ExpertRank, NoRanks, RankError, Supervisor};

/// Ranks must agree on it; memory is taken as messages need it.
const CAPACITY: usize = EXPERT_MESSAGE_BYTES_MAX / 4;

/// Rank 0's way to the others.
#[derive(Debug)]
pub(crate) struct Hosts {
    addrs: Vec<SocketAddr>,
    listener: TcpListener,
}

impl Hosts {
    /// Listens at the first of `addrs`.
    pub(crate) fn listen(addrs: Vec<SocketAddr>) -> Result<Self, ListenError> {
        let listener = listen(&addrs, 0)?;
        Ok(Self { addrs, listener })
    }
}

impl Supervisor for Hosts {
    fn start(&mut self) -> Result<Box<dyn Fabric>, NoRanks> {
        tracing::info!("waiting for the expert-parallel ranks at {:?}", &self.addrs[1..]);
        let joined = Tcp::join(0, &self.addrs, &self.listener, CAPACITY, EXPERT_JOIN_MAX);
        match joined {
            Ok(fabric) => Ok(Box::new(fabric)),
            Err(source) => Err(NoRanks::Join { addrs: self.addrs[1..].to_vec(), source }),
        }
    }
}

/// Is a rank of one group after the other. The error says why it cannot.
pub(super) fn serve(
    rank: usize,
    addrs: &[SocketAddr],
    experts: &mut ExpertRank,
    compute: &Compute,
    deadline: Duration,
) -> Result<(), RankExit> {
    if !(1..addrs.len()).contains(&rank) {
        return Err(RankExit::Number { hosts: addrs.len(), rank });
    }
    let listener = listen(addrs, rank)?;
    loop {
        tracing::info!("joining the expert-parallel group as rank {rank}");
        let fabric = match Tcp::join(rank, addrs, &listener, CAPACITY, EXPERT_JOIN_MAX) {
            Ok(fabric) => fabric,
            Err(error) => {
                tracing::warn!("the expert-parallel group is not complete: {error}");
                continue;
            }
        };
        tracing::info!("rank {rank} of {} serves", addrs.len());
        match experts.serve(Box::new(fabric), compute, deadline) {
            Err(error @ RankError::Model(_)) => return Err(error.into()),
            Err(RankError::Fabric(error)) => tracing::warn!("{error}"),
            Ok(()) => {}
        }
    }
}

fn listen(addrs: &[SocketAddr], rank: usize) -> Result<TcpListener, ListenError> {
    TcpListener::bind(addrs[rank]).map_err(|source| ListenError { addr: addrs[rank], source })
}
