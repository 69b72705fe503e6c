//! Ports that the system does not choose: a row of neighbours, as the data-parallel engines of one worker
//! publish at.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicU16, Ordering};

/// Below those that Linux gives to whoever connects (`net.ipv4.ip_local_port_range`): there, after a test of
/// many connections, the neighbour of a free port may be held by closed connections for a minute.
const PORTS: Range<u16> = 15_000..32_000;
/// Tried next, so that two tests at the same time do not look at the same ports.
static NEXT: AtomicU16 = AtomicU16::new(0);

/// The first of `count` ports in a row at which nobody listens now. Somebody else may take them before the
/// test does.
///
/// # Panics
/// When there is no such row.
pub fn neighbours(count: u16) -> u16 {
    let all = PORTS.end - PORTS.start;
    // Other processes of tests begin elsewhere.
    let offset = std::process::id().wrapping_mul(7_919) % u32::from(all);
    for _ in 0..all / count {
        let tried = (u32::from(NEXT.fetch_add(count, Ordering::Relaxed)) + offset) % u32::from(all - count);
        let first = PORTS.start + u16::try_from(tried).expect("below a count of ports");
        if (first..first + count).all(is_free) {
            return first;
        }
    }
    panic!("no {count} free ports in a row among {PORTS:?}")
}

/// An address for a process that can be told one and takes none by itself. Unlike a port that was bound and
/// given back, it is none of those that the system gives to other tests' connections meanwhile.
pub fn free_addr() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], neighbours(1)))
}

/// Asked by connecting. A listener that is bound to try it would live on for a moment in a process that
/// another test starts just then.
fn is_free(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_row_is_free_and_no_other_test_is_given_it() {
        let first = neighbours(3);
        let held: Vec<_> =
            (first..first + 3).map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap()).collect();
        assert!((first..first + 3).all(|port| !is_free(port)));
        let second = neighbours(3);
        assert!(second + 3 <= first || second >= first + 3, "{first} {second}");
        drop(held);
    }
}
