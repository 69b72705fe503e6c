//! ZMQ addresses as the command line has them. TCP only, and always bound: unlike vLLM, which connects unless
//! it sees a wildcard, so that an address means the same whatever its host.

use std::fmt;
use std::str::FromStr;

/// `tcp://HOST:PORT`; the host `*` is every interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZmqAddr {
    host: String,
    port: u16,
}

/// Not such an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not tcp://HOST:PORT, such as tcp://127.0.0.1:5557 or tcp://*:5557")]
pub struct BadZmqAddr(String);

impl ZmqAddr {
    /// The host and port to listen at: `*` becomes 0.0.0.0, and the brackets of an IPv6 address go.
    pub(super) fn host_and_port(&self) -> (&str, u16) {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        (if host == "*" { "0.0.0.0" } else { host }, self.port)
    }

    /// Of one of several data-parallel engines, as vLLM counts: that many ports further, unless any port will
    /// do. `None` if there is no such port.
    pub(super) fn of_rank(&self, rank: usize) -> Option<Self> {
        let rank = if self.port == 0 { 0 } else { u16::try_from(rank).ok()? };
        Some(Self { host: self.host.clone(), port: self.port.checked_add(rank)? })
    }
}

impl FromStr for ZmqAddr {
    type Err = BadZmqAddr;

    fn from_str(text: &str) -> Result<Self, BadZmqAddr> {
        let parsed = || {
            let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
            let bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
            let plain = !host.is_empty() && !host.contains(['[', ']', '/', ':']);
            (bracketed || plain).then_some(())?;
            Some(Self { host: host.to_owned(), port: port.parse().ok()? })
        };
        parsed().ok_or_else(|| BadZmqAddr(text.to_owned()))
    }
}

impl fmt::Display for ZmqAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_names_wildcards_and_ipv6() {
        let bound = |text: &str| {
            let addr: ZmqAddr = text.parse().unwrap();
            assert_eq!(addr.to_string(), text);
            let (host, port) = addr.host_and_port();
            format!("{host} {port}")
        };
        assert_eq!(bound("tcp://127.0.0.1:0"), "127.0.0.1 0");
        assert_eq!(bound("tcp://*:5557"), "0.0.0.0 5557");
        assert_eq!(bound("tcp://[::]:5557"), ":: 5557");
        assert_eq!(bound("tcp://worker-0.workers:5557"), "worker-0.workers 5557");
        for wrong in [
            "",
            "5557",
            "127.0.0.1:5557",
            "ipc:///tmp/x",
            "tcp://:1",
            "tcp://a:b",
            "tcp://::1:5",
            "tcp://a/b:1",
        ] {
            let error = wrong.parse::<ZmqAddr>().unwrap_err().to_string();
            assert!(error.contains("tcp://HOST:PORT"), "{error}");
        }
    }
}
