//! The file descriptors of this process, and what else it lacks at times. Some descriptors are left to
//! probes, operators and files: clients are let in while there are more than that, and their requests open
//! connections while there is half of it. What is lacked is counted and said; what becomes of the request is
//! the caller's business.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
};

use parking_lot::Mutex;
use prometheus::IntCounterVec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    clock::Instant,
    limits::{DESCRIPTORS_WANTED, RESERVED_DESCRIPTORS, SHORTAGE_SAID_EVERY},
    shortage::Shortage,
};

/// Raises the soft limit to the hard one: the soft one is low for the sake of programs that use `select`.
pub fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.unwrap_or(DESCRIPTORS_WANTED);
    if current.is_none_or(|current| current >= wanted) {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }) {
        Ok(()) => tracing::info!(from = current, to = wanted, "the limit of open files is raised"),
        Err(error) => tracing::warn!(%error, limit = current, "the limit of open files cannot be raised"),
    }
}

/// How many this process may have now.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// How many are left to what is not clients'.
fn reserve(limit: u64) -> u64 {
    RESERVED_DESCRIPTORS.min(limit / 4)
}

/// Client connections for which there are descriptors, with those of as many of their requests as may be in
/// flight.
pub fn clients_that_fit(max_in_flight: usize) -> usize {
    let limit = limit();
    let room = limit.saturating_sub(reserve(limit)).saturating_sub(lowest_free().unwrap_or(0));
    let clients = room.saturating_sub(max_in_flight as u64).max(room / 2);
    usize::try_from(clients).unwrap_or(usize::MAX).max(1)
}

/// Whether no more clients are to be let in.
pub fn are_short_for_clients() -> bool {
    are_fewer_than(reserve(limit()))
}

/// Whether no more connections to workers are to be opened for clients' requests.
pub fn are_short_for_requests() -> bool {
    are_fewer_than(reserve(limit()) / 2)
}

/// Whether there is not one left: what could be read now says nothing.
pub fn have_run_out() -> bool {
    lowest_free().is_err_and(|error| Shortage::of(&error).is_some())
}

/// The kernel gives the lowest number that is free: if that is near the limit, all below it are taken.
fn are_fewer_than(count: u64) -> bool {
    match lowest_free() {
        Ok(lowest) => lowest.saturating_add(count) >= limit(),
        Err(error) => Shortage::of(&error).is_some(),
    }
}

fn lowest_free() -> io::Result<u64> {
    let descriptor = io::stderr().as_fd().try_clone_to_owned()?;
    Ok(u64::try_from(descriptor.as_raw_fd()).unwrap_or(0))
}

/// Where shortages are counted and said.
#[derive(Debug, Clone)]
pub struct Shortages {
    counted: IntCounterVec,
    /// When each kind was said last.
    said: Arc<Mutex<[Option<Instant>; Shortage::ALL.len()]>>,
    /// The host's limits, read while there are descriptors to read them by.
    limits: Arc<[String; Shortage::ALL.len()]>,
}

impl Shortages {
    /// Counts shortages in `counted`, by resource; reads the host's limits now.
    pub fn new(counted: IntCounterVec) -> Self {
        Self { counted, said: Arc::default(), limits: Arc::new(Shortage::ALL.map(host_limit)) }
    }

    /// The gateway lacks this. Said once in a while.
    pub fn note(&self, lacks: Shortage) {
        self.counted.with_label_values(&[lacks.as_str()]).inc();
        let now = Instant::now();
        let said = &mut self.said.lock()[lacks as usize];
        if said.is_some_and(|at| now < at + SHORTAGE_SAID_EVERY) {
            return;
        }
        *said = Some(now);
        let limit = match lacks {
            Shortage::Descriptors => limit().to_string(),
            _ => self.limits[lacks as usize].clone(),
        };
        tracing::warn!(
            lacks = lacks.as_str(),
            limit,
            "the gateway itself lacks {lacks}; no worker is blamed. {}",
            remedy(lacks)
        );
    }
}

fn host_limit(lacks: Shortage) -> String {
    let file = match lacks {
        Shortage::HostDescriptors => "/proc/sys/fs/file-max",
        Shortage::Ports => "/proc/sys/net/ipv4/ip_local_port_range",
        Shortage::Memory => "/proc/sys/net/ipv4/tcp_mem",
        Shortage::Descriptors | Shortage::Permission => return String::new(),
    };
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn remedy(lacks: Shortage) -> &'static str {
    match lacks {
        Shortage::Descriptors => {
            "Raise its limit (LimitNOFILE= of the unit, `ulimit -n`) or lower limits.max_connections."
        }
        Shortage::HostDescriptors => "Raise fs.file-max, or look for another process that leaks descriptors.",
        Shortage::Ports => {
            "Widen net.ipv4.ip_local_port_range, set net.ipv4.tcp_tw_reuse = 1, or speak HTTP/2 with that worker; an address of \
             a family that this host has not says the same."
        }
        Shortage::Memory => "Raise net.ipv4.tcp_mem or the memory limit of its container.",
        Shortage::Permission => "Look at this host's firewall, its security module and its routes.",
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use prometheus::Opts;

    use super::*;

    #[test]
    fn a_small_limit_is_shared_out() {
        assert_eq!((reserve(64), reserve(1_024), reserve(1 << 20)), (16, 64, 64));
    }

    #[test]
    fn the_lowest_free_number_is_what_the_next_file_gets() {
        // Other tests open files beside this one, so it is tried again.
        let agrees = || {
            let lowest = lowest_free().unwrap();
            let next = File::open("/dev/null").unwrap();
            lowest == u64::try_from(next.as_raw_fd()).unwrap()
        };
        assert!((0..1_000).any(|_| agrees()));
        assert!(!are_short_for_clients(), "{}", limit());
    }

    #[test]
    fn clients_leave_room_for_their_requests() {
        let room = limit() - reserve(limit()) - lowest_free().unwrap();
        let all = clients_that_fit(0) as u64;
        assert!(all.abs_diff(room) < 1_000, "{all} of {room}");
        assert!(clients_that_fit(usize::MAX / 2) as u64 <= room / 2 + 1_000);
    }

    #[tokio::test(start_paused = true)]
    async fn each_kind_is_counted_always_and_said_once_in_a_while() {
        let counted = IntCounterVec::new(Opts::new("x", "x"), &["resource"]).unwrap();
        let shortages = Shortages::new(counted.clone());
        for _ in 0..3 {
            shortages.note(Shortage::Ports);
        }
        let first = shortages.said.lock()[Shortage::Ports as usize].unwrap();
        assert_eq!(shortages.said.lock().iter().flatten().count(), 1);
        tokio::time::advance(SHORTAGE_SAID_EVERY).await;
        shortages.note(Shortage::Ports);
        assert!(shortages.said.lock()[Shortage::Ports as usize].unwrap() > first);
        assert_eq!(counted.with_label_values(&["ports"]).get(), 4);
    }
}
