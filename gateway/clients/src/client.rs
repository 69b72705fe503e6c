//! One client's connection, as those see it who share the gateway among clients: what it has, since when it
//! asks for nothing, and whether it is to end. How it ends is `server/`'s business.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::AtomicWaker;

use tokio::time::Instant;

use crate::party::{Party, Stage};

/// One connection that a client has open: what is served on it, and whether and how it is to end.
#[derive(Debug)]
pub struct Client {
    opened: Instant,
    address: Arc<Party>,
    own: Party,
    /// When it last asked for something, or was served for the last time; milliseconds since it was opened.
    asked_ms: AtomicU64,
    leave: AtomicU8,
    told: AtomicWaker,
}

/// How a connection is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Leave {
    /// When all that it asked for is answered.
    Drained = 1,
    /// The same; it asks for nothing.
    Idle,
    /// The same, and for what has not come whole it is not waited: others have no place.
    Replaced,
    /// At once: what it sends costs too much.
    Flooding,
    /// At once, as the process ends: it had its time.
    Cut,
}

impl Client {
    /// One that has just been opened from such an address.
    pub fn new(address: Arc<Party>) -> Arc<Self> {
        let (own, asked_ms, leave, told) = Default::default();
        Arc::new(Self { opened: Instant::now(), address, own, asked_ms, leave, told })
    }

    /// One with an address that no other has.
    pub fn alone() -> Arc<Self> {
        Self::new(Arc::default())
    }

    /// All of its address.
    pub fn address(&self) -> &Party {
        &self.address
    }

    /// Whether this is its address.
    pub fn is_from(&self, address: &Arc<Party>) -> bool {
        Arc::ptr_eq(&self.address, address)
    }

    /// What this connection alone has; [`Client::address`] has that of all connections from its address.
    pub fn connection(&self) -> &Party {
        &self.own
    }

    /// A request's head has come by `now`.
    pub fn asks(&self, now: Instant) {
        self.asked_ms.store((now - self.opened).as_millis() as u64, Relaxed);
    }

    /// A request of it is over.
    pub fn rests(&self) {
        if !self.is_served() {
            self.asks(Instant::now());
        }
    }

    /// Whether anything that it has asked is being answered. A request whose body has not come whole is not.
    pub fn is_served(&self) -> bool {
        self.own.has(Stage::Serving) > 0
    }

    /// How long it has asked for nothing; `None` while it is served.
    pub fn idle(&self, now: Instant) -> Option<Duration> {
        let asked = self.opened + Duration::from_millis(self.asked_ms.load(Relaxed));
        (!self.is_served()).then(|| now.saturating_duration_since(asked))
    }

    /// Whether it has been told to end.
    #[inline]
    pub fn leaves(&self) -> bool {
        self.leave.load(Relaxed) > 0
    }

    /// Tells it to end.
    pub fn leave(&self, how: Leave) {
        self.leave.fetch_max(how as u8, Relaxed);
        self.told.wake();
    }

    /// Whether it may be closed whatever it says, once it has had a moment to say its last.
    pub fn may_be_closed(&self, how: Leave) -> bool {
        match how {
            Leave::Drained => false,
            Leave::Idle => !self.is_served() && self.own.has(Stage::Arriving) == 0,
            Leave::Replaced => !self.is_served(),
            Leave::Flooding | Leave::Cut => true,
        }
    }

    /// Whether and how it is to end; wakes the task when that changes.
    pub fn poll_leave(&self, cx: &mut Context<'_>) -> Poll<Leave> {
        self.told.register(cx.waker());
        match self.leave.load(Relaxed) {
            0 => Poll::Pending,
            1 => Poll::Ready(Leave::Drained),
            2 => Poll::Ready(Leave::Idle),
            3 => Poll::Ready(Leave::Replaced),
            4 => Poll::Ready(Leave::Flooding),
            _ => Poll::Ready(Leave::Cut),
        }
    }
}

/// Something of a connection that is answered and takes no place: while it lives the connection is not idle.
#[derive(Debug)]
pub struct Answered(Arc<Client>);

impl Answered {
    /// Counts one more such answer on this connection until it is dropped; no bound refuses it.
    pub fn to(client: &Arc<Client>) -> Self {
        client.own.take(Stage::Serving, usize::MAX, 1);
        Self(Arc::clone(client))
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.own.give(Stage::Serving);
        self.0.rests();
    }
}

/// A request of a connection whose body is on its way.
#[derive(Debug)]
pub struct Arriving(Arc<Client>);

impl Arriving {
    /// Counts one more body on its way over this connection until it is dropped; no bound refuses it.
    pub fn from(client: &Arc<Client>) -> Self {
        client.own.take(Stage::Arriving, usize::MAX, 1);
        Self(Arc::clone(client))
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.0.own.give(Stage::Arriving);
    }
}

/// Addresses that count as one: of IPv6 what one subscriber gets.
pub fn subscriber(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_subscriber_are_one() {
        let is = |address: &str, one: &str| {
            assert_eq!(subscriber(address.parse().unwrap()), one.parse::<IpAddr>().unwrap());
        };
        is("10.0.0.7", "10.0.0.7");
        is("::ffff:10.0.0.7", "10.0.0.7");
        is("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_is_idle_from_its_last_word_or_answer_on() {
        let client = Client::alone();
        let seconds = || client.idle(Instant::now()).map(|idle| idle.as_secs());
        let wait = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
        wait(3).await;
        assert_eq!(seconds(), Some(3));
        client.asks(Instant::now());
        assert!(client.connection().take(Stage::Arriving, 9, 1));
        wait(2).await;
        assert_eq!(seconds(), Some(2), "its body has not come whole");
        assert!(client.connection().take(Stage::Serving, 9, 1));
        wait(100).await;
        assert_eq!(seconds(), None);
        client.connection().give(Stage::Serving);
        client.rests();
        wait(1).await;
        assert_eq!(seconds(), Some(1));
        let answered = Answered::to(&client);
        wait(100).await;
        assert_eq!(seconds(), None, "what takes no place is answered too");
        drop(answered);
        assert_eq!(seconds(), Some(0));
    }
}
