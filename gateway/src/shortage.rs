//! What a socket could not be opened for because this host or this process lacks it: descriptors, ports,
//! memory, or the permission of its own firewall. No worker has anything to do with that.

use std::{fmt, io, os::fd::AsFd};

use rustix::io::Errno;

/// What the gateway lacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shortage {
    /// File descriptors of this process (EMFILE).
    Descriptors,
    /// File descriptors of the whole host (ENFILE).
    HostDescriptors,
    /// A local port or address for a connection to that worker (EADDRNOTAVAIL).
    Ports,
    /// Memory for sockets (ENOBUFS, ENOMEM; ENOSPC: watches of epoll).
    Memory,
    /// Permission of this host's firewall or security module, or a route (EACCES, EPERM, ENETDOWN,
    /// ENETUNREACH).
    Permission,
}

/// Descriptors that a name lookup needs: for the files and the socket by which it asks.
const LOOKUP_DESCRIPTORS: usize = 4;

impl Shortage {
    /// Every kind, in the order of the variants: tables have a place for each.
    pub const ALL: [Self; 5] =
        [Self::Descriptors, Self::HostDescriptors, Self::Ports, Self::Memory, Self::Permission];

    /// What was lacking, where an error of opening a socket means that.
    pub fn of(error: &io::Error) -> Option<Self> {
        Some(match Errno::from_io_error(error)? {
            Errno::MFILE => Self::Descriptors,
            Errno::NFILE => Self::HostDescriptors,
            Errno::ADDRNOTAVAIL => Self::Ports,
            Errno::NOBUFS | Errno::NOMEM | Errno::NOSPC => Self::Memory,
            Errno::ACCESS | Errno::PERM | Errno::NETDOWN | Errno::NETUNREACH => Self::Permission,
            _ => return None,
        })
    }

    /// The same of an error that may have one of the system's among its causes.
    pub fn behind(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        let mut error = Some(error);
        while let Some(cause) = error {
            if let Some(shortage) = cause.downcast_ref::<io::Error>().and_then(Self::of) {
                return Some(shortage);
            }
            // An `io::Error` around another error is not its own source.
            let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
            error = inner.map(|inner| inner as &(dyn std::error::Error + 'static)).or_else(|| cause.source());
        }
        None
    }

    /// The error that means it.
    pub fn into_error(self) -> io::Error {
        io::Error::from(match self {
            Self::Descriptors => Errno::MFILE,
            Self::HostDescriptors => Errno::NFILE,
            Self::Ports => Errno::ADDRNOTAVAIL,
            Self::Memory => Errno::NOBUFS,
            Self::Permission => Errno::PERM,
        })
    }

    /// Its name in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Descriptors => "descriptors",
            Self::HostDescriptors => "host_descriptors",
            Self::Ports => "ports",
            Self::Memory => "memory",
            Self::Permission => "permission",
        }
    }

    /// Whether closing any connection gives some of it back; ports are each worker's own.
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Descriptors | Self::HostDescriptors | Self::Memory)
    }

    /// Whether it passes as requests end. Then it also says nothing of whether the worker could be reached.
    pub fn passes(self) -> bool {
        self != Self::Permission
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Descriptors => "file descriptors",
            Self::HostDescriptors => "file descriptors of its host",
            Self::Ports => "local ports",
            Self::Memory => "memory for sockets",
            Self::Permission => "permission or a route to connect",
        })
    }
}

/// What a failed name lookup lacked: the resolver says "no such name" too where it could open neither its
/// files nor a socket.
pub(super) fn of_lookup(error: &io::Error) -> Option<Shortage> {
    let mut tried = Vec::with_capacity(LOOKUP_DESCRIPTORS);
    Shortage::of(error).or_else(|| {
        (0..LOOKUP_DESCRIPTORS).find_map(|_| match io::stderr().as_fd().try_clone_to_owned() {
            Ok(descriptor) => {
                tried.push(descriptor);
                None
            }
            Err(error) => Shortage::of(&error),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateway_s_own_troubles_are_told_from_a_worker_s() {
        let of = |errno: Errno| Shortage::of(&errno.into());
        for (errno, kind) in [
            (Errno::MFILE, Shortage::Descriptors),
            (Errno::NFILE, Shortage::HostDescriptors),
            (Errno::ADDRNOTAVAIL, Shortage::Ports),
            (Errno::NOBUFS, Shortage::Memory),
            (Errno::NOMEM, Shortage::Memory),
            (Errno::NOSPC, Shortage::Memory),
            (Errno::PERM, Shortage::Permission),
            (Errno::ACCESS, Shortage::Permission),
            (Errno::NETUNREACH, Shortage::Permission),
        ] {
            assert_eq!(of(errno), Some(kind), "{errno}");
        }
        for errno in [Errno::CONNREFUSED, Errno::CONNRESET, Errno::TIMEDOUT, Errno::HOSTUNREACH, Errno::PIPE]
        {
            assert_eq!(of(errno), None, "{errno}");
        }
        assert_eq!(Shortage::of(&io::ErrorKind::TimedOut.into()), None);
    }

    #[test]
    fn what_lies_behind_an_error_is_found_however_it_is_wrapped() {
        let bare = || io::Error::from(Errno::MFILE);
        let wrapped = io::Error::other(bare());
        let twice = io::Error::other(io::Error::other(bare()));
        for error in [bare(), wrapped, twice] {
            assert_eq!(Shortage::behind(&error), Some(Shortage::Descriptors), "{error:?}");
        }
        assert_eq!(Shortage::behind(&io::Error::other("too many open files")), None);
    }
}
