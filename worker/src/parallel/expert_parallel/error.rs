//! Why a process is no rank of a group, or no longer one: each is a line for the operator who started it, or
//! for the log of the worker that did.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use keyway_kernels::cuda::DeviceError;

use crate::model::RankError;

/// Why a process that is to be a rank ends.
#[derive(Debug, thiserror::Error)]
pub enum RankExit {
    /// Its model cannot be loaded, or another rank failed.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// There is no such GPU, or the driver refuses it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It has no runtime, on which it would wait for signals.
    #[error("cannot start the runtime: {0}")]
    Runtime(#[source] io::Error),
    /// It would end before rank 0 does, at the first SIGTERM.
    #[error("cannot wait for signals: {0}")]
    Signals(#[source] io::Error),
    /// It would not end with rank 0.
    #[error("cannot watch rank 0: {0}")]
    Parent(#[source] io::Error),
    /// The group's memory cannot be opened, or is not that of such a group.
    #[error("cannot join the group in {}: {source}", memory.display())]
    Join {
        /// The file that is the group's memory.
        memory: PathBuf,
        /// The system's own error, with which the message ends.
        source: io::Error,
    },
    /// It is not the number of one of the hosts, or it is the worker's own.
    #[error("{hosts} hosts have ranks 1 to {}, not {rank}", hosts.saturating_sub(1))]
    Number {
        /// How many hosts there are, the worker's among them.
        hosts: usize,
        /// The rank's number, as its operator gave it.
        rank: usize,
    },
    /// Other ranks could not reach it.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Ranks on several machines have no GPU.
    #[error("ranks on several machines compute on the CPU: run with --device cpu")]
    HostsOnGpu,
    /// The program was built without the feature `cuda`.
    #[error("this build has no CUDA backend")]
    NoCuda,
    /// A rank of a synthetic model was started without a GPU, or for a group of several machines.
    #[error("a rank of GPUs is told of memory and a GPU")]
    NoGpu,
    /// A rank of this machine's group ends; one with a GPU, also before it has joined.
    #[error("expert-parallel rank {rank} ends: {source}")]
    Ended {
        /// The rank's number, from 1 on.
        rank: usize,
        /// Why, with which the message ends.
        source: Box<RankExit>,
    },
}

/// An address of this machine at which ranks are to be listened for, and cannot be.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr}: {source}")]
pub struct ListenError {
    /// The address, as the options have it.
    pub addr: SocketAddr,
    /// Why the system refuses it, such as a port that is in use.
    pub source: io::Error,
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn a_rank_ends_with_one_line_and_its_cause_is_kept() {
        let source = io::Error::other("it is no group's");
        let join = RankExit::Join { memory: "/proc/1/fd/3".into(), source };
        let ended = RankExit::Ended { rank: 2, source: Box::new(join) };
        let line = "expert-parallel rank 2 ends: cannot join the group in /proc/1/fd/3: it is no group's";
        assert_eq!(ended.to_string(), line);
        let cause = ended.source().and_then(std::error::Error::source).unwrap();
        assert_eq!(cause.to_string(), "it is no group's");
        let number = RankExit::Number { hosts: 3, rank: 7 };
        assert_eq!(number.to_string(), "3 hosts have ranks 1 to 2, not 7");
    }
}
