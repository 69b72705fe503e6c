//! What every transport must do, and what only one of them can.

use std::net::TcpListener;
use std::thread;

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);
/// For what must fail.
const SHORT: Duration = Duration::from_millis(50);

type Group = Vec<Box<dyn Fabric>>;

/// Groups over every transport.
pub(crate) fn groups(size: usize, capacity: usize) -> Vec<(&'static str, Group)> {
    let mut groups = vec![("local", local(size, capacity)), ("tcp", tcp(size, capacity))];
    groups.push(("grouped", grouped(size, capacity)));
    #[cfg(target_os = "linux")]
    groups.push(("shm", shm(size, capacity)));
    groups
}

fn local(size: usize, capacity: usize) -> Group {
    Local::group(size, capacity).into_iter().map(|rank| Box::new(rank) as Box<dyn Fabric>).collect()
}

fn grouped(size: usize, capacity: usize) -> Group {
    let ranks = super::grouped::tests::group(size, capacity, &[]).into_iter();
    ranks.map(|rank| Box::new(rank) as Box<dyn Fabric>).collect()
}

#[cfg(target_os = "linux")]
fn shm(size: usize, capacity: usize) -> Group {
    let file = Shm::create(size, capacity).unwrap();
    (0..size).map(|rank| Box::new(Shm::attach(&file, rank).unwrap()) as Box<dyn Fabric>).collect()
}

fn tcp(size: usize, capacity: usize) -> Group {
    let listeners: Vec<TcpListener> = (0..size).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addrs: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    thread::scope(|scope| {
        let join = |(rank, listener)| {
            let addrs = &addrs;
            scope.spawn(move || Tcp::join(rank, addrs, listener, capacity, PATIENCE).unwrap())
        };
        let joining: Vec<_> = listeners.iter().enumerate().map(join).collect();
        joining.into_iter().map(|rank| Box::new(rank.join().unwrap()) as Box<dyn Fabric>).collect()
    })
}

/// Runs every rank on a thread of its own; what they return, in their order.
pub(crate) fn each<T: Send>(group: Group, rank: impl Fn(Box<dyn Fabric>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let running: Vec<_> = group.into_iter().map(|fabric| scope.spawn(move || rank(fabric))).collect();
        running.into_iter().map(|running| running.join().unwrap()).collect()
    })
}

/// Length of the message `from` sends `to` in an exchange: none, short, and longer than a socket's buffers.
fn length(from: usize, to: usize, exchange: usize) -> usize {
    [0, 1, 7, 300_000][(from + 2 * to + exchange) % 4]
}

fn word(from: usize, to: usize, exchange: usize, i: usize) -> u32 {
    (from * 7919 + to * 104_729 + exchange * 31 + i * 17) as u32
}

#[test]
fn everybody_gets_every_message_in_every_exchange() {
    for size in [1, 2, 4] {
        for (name, group) in groups(size, 300_000) {
            each(group, |mut fabric| {
                let me = fabric.rank();
                assert_eq!((fabric.size(), fabric.capacity()), (size, 300_000));
                for exchange in 0..9 {
                    for to in (0..size).filter(|to| *to != me) {
                        let outbox = fabric.outbox(to, length(me, to, exchange)).unwrap();
                        for (i, out) in outbox.iter_mut().enumerate() {
                            *out = word(me, to, exchange, i);
                        }
                    }
                    fabric.exchange(Phase::Dispatch, PATIENCE).unwrap();
                    for from in (0..size).filter(|from| *from != me) {
                        let expected = (0..length(from, me, exchange)).map(|i| word(from, me, exchange, i));
                        assert!(fabric.inbox(from).iter().copied().eq(expected), "{name}, {size} ranks");
                    }
                    assert!(fabric.inbox(me).is_empty());
                }
            });
        }
    }
}

#[test]
fn without_an_outbox_the_message_is_empty_whatever_went_before() {
    for (name, group) in groups(2, 16) {
        each(group, |mut fabric| {
            let other = 1 - fabric.rank();
            fabric.outbox(other, 16).unwrap().fill(7);
            fabric.exchange(Phase::Dispatch, PATIENCE).unwrap();
            for _ in 0..3 {
                fabric.exchange(Phase::Combine, PATIENCE).unwrap();
                assert!(fabric.inbox(other).is_empty(), "{name}");
            }
        });
    }
}

#[test]
fn a_rank_that_stalls_is_named_at_the_deadline_and_the_fabric_stays_failed() {
    for (name, mut group) in groups(3, 16) {
        // Rank 1 is there and does nothing; were it dropped, it would be gone.
        let stalled = group.remove(1);
        let errors = each(group, |mut fabric| {
            let first = fabric.exchange(Phase::Combine, SHORT).unwrap_err();
            assert_eq!(fabric.exchange(Phase::Dispatch, PATIENCE).unwrap_err(), first, "{name}");
            // Whoever gives up first may be dropped while the other still waits, and is then gone for it.
            (first, fabric)
        });
        for (error, _) in errors {
            let expected = FabricError {
                rank: 1,
                exchange: 1,
                phase: Phase::Combine,
                layer: None,
                cause: Cause::Deadline(SHORT),
            };
            assert_eq!(error, expected, "{name}");
        }
        drop(stalled);
    }
}

#[test]
fn a_rank_that_leaves_is_gone_at_once() {
    // Shared memory learns it from whoever watches the process: see below.
    for (name, mut group) in [("local", local(2, 16)), ("tcp", tcp(2, 16)), ("grouped", grouped(2, 16))] {
        drop(group.pop());
        let error = group[0].exchange(Phase::Dispatch, PATIENCE).unwrap_err();
        assert_eq!((error.rank, error.cause), (1, Cause::Gone), "{name}");
    }
}

/// A rank that gives up early, and leaves, is not taken for the one at fault; nor does anybody wait any
/// longer.
#[test]
fn whoever_finds_a_rank_at_fault_tells_the_others() {
    for (name, mut group) in groups(3, 16) {
        let stalled = group.remove(1);
        let errors = each(group, |mut fabric| {
            fabric.outbox(1, 3).unwrap().fill(1);
            let deadline = if fabric.rank() == 0 { PATIENCE } else { SHORT };
            fabric.exchange(Phase::Dispatch, deadline).unwrap_err()
        });
        assert!(errors.iter().all(|error| error.rank == 1), "{name}: {errors:?}");
        drop(stalled);
    }
    for (name, mut group) in groups(3, 16) {
        let (mut two, one, mut zero) = (group.pop().unwrap(), group.pop().unwrap(), group.pop().unwrap());
        assert_eq!(two.fail(1, Phase::Dispatch, Cause::Protocol("nonsense")).rank, 1);
        drop(two);
        let error = zero.exchange(Phase::Dispatch, PATIENCE).unwrap_err();
        assert_eq!((error.rank, error.cause), (1, Cause::Reported), "{name}");
        drop(one);
    }
}

#[test]
fn what_is_too_long_is_refused() {
    for (name, mut group) in groups(2, 16) {
        let error = group[0].outbox(1, 17).unwrap_err();
        assert_eq!(error.cause, Cause::TooLong { words: 17, capacity: 16 }, "{name}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn an_alarm_ends_an_exchange_that_is_under_way() {
    let file = Shm::create(3, 16).unwrap();
    let mut rank = Shm::attach(&file, 0).unwrap();
    let alarm = rank.alarm();
    let waiting = thread::spawn(move || rank.exchange(Phase::Dispatch, PATIENCE).unwrap_err());
    alarm.rank_is_gone(2);
    alarm.rank_is_gone(1);
    let error = waiting.join().unwrap();
    assert_eq!((error.rank, error.cause), (2, Cause::Gone));
}

/// A process that gives up because of another one ends, which its own alarm tells: the other one is still at
/// fault.
#[test]
#[cfg(target_os = "linux")]
fn an_alarm_does_not_hide_who_is_at_fault() {
    let file = Shm::create(3, 16).unwrap();
    // Rank 0 stalls.
    let mut one = Shm::attach(&file, 1).unwrap();
    assert_eq!(one.exchange(Phase::Dispatch, SHORT).unwrap_err().rank, 0);
    one.alarm().rank_is_gone(1);
    let error = Shm::attach(&file, 2).unwrap().exchange(Phase::Dispatch, PATIENCE).unwrap_err();
    assert_eq!((error.rank, error.cause), (0, Cause::Deadline(PATIENCE)));
}

#[test]
#[cfg(target_os = "linux")]
fn what_is_no_groups_memory_is_refused() {
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(Shm::attach(&file, 0).is_err());
    let group = Shm::create(2, 16).unwrap();
    assert!(Shm::attach(&group, 2).unwrap_err().to_string().contains("there is no rank 2"));
    let mut attached = Shm::attach(&group, 1).unwrap();
    assert_eq!(attached.outbox(0, 0).unwrap().len(), 0);
}

#[test]
fn a_greeting_of_another_group_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let addrs = [addr, addr];
    let caller = thread::spawn(move || Tcp::join(1, &addrs, &listener_of_nobody(), 99, PATIENCE));
    let refused = Tcp::join(0, &addrs, &listener, 16, PATIENCE).unwrap_err();
    assert!(refused.to_string().contains("not of this group"), "{refused}");
    drop(caller.join().unwrap());
}

fn listener_of_nobody() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

#[test]
fn errors_name_rank_exchange_and_layer() {
    let cause = Cause::Deadline(Duration::from_secs(10));
    let error = FabricError { rank: 3, exchange: 17, phase: Phase::Combine, layer: None, cause };
    assert_eq!(
        error.in_layer(5).to_string(),
        "expert-parallel rank 3 failed in exchange 17 (combine of layer 5): no answer within 10s"
    );
}
