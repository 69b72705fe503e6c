//! The bounds: those that the protocol suggests, and the names of those that the sockets' owners choose. No
//! logic.

use std::time::Duration;

use keyway_wire::zmtp::Bounds;

/// How long a peer may take until it is ready: two exchanges over the network. libzmq allows 30 s.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Topics that one subscriber may want: routers want one, or all.
pub const SUBSCRIPTIONS_MAX: usize = 64;

/// Bytes of a topic that is subscribed to: `kv@HOST@MODEL`, say.
pub const TOPIC_BYTES_MAX: usize = 512;

/// What a subscriber may send: a topic behind the byte that says whether it is wanted.
pub(crate) const SUBSCRIBER: Bounds = Bounds { message_bytes: 1 + TOPIC_BYTES_MAX, frames: 1 };

/// What an asker may send: a delimiter and some words. A DEALER that imitates REQ's envelope may add a frame
/// or two.
pub(crate) const ASKER: Bounds = Bounds { message_bytes: 512, frames: 4 };

/// Bytes for which room is made before each read: all that a peer says at its beginning fits.
pub(crate) const READ_BYTES: usize = 2 << 10;

/// What is taken out of the published messages at a time, to be sent together: bytes, and pieces, of which
/// one call of the system takes no more (Linux: `IOV_MAX` is 1,024).
pub(crate) const TOGETHER_BYTES: usize = 64 << 10;
/// Pieces that are sent together at most; [`TOGETHER_BYTES`] says why there is a bound.
pub(crate) const TOGETHER_PIECES: usize = 64;

/// Published messages that are looked at in one go for one subscriber, while no message can be published:
/// some microseconds.
pub(crate) const LOOK_MAX: usize = 256;

/// Pause after a connection could not be accepted: this process has no descriptors left, and asking again at
/// once would only take time.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a PUB socket's owner chooses.
#[derive(Debug, Clone, Copy)]
pub struct PubLimits {
    /// Subscribers connected at once.
    pub connections: usize,
    /// Messages kept for subscribers that are slow, all subscribers together.
    pub kept_messages: usize,
    /// Bytes of these messages' frames. The last message is kept, however large.
    pub kept_bytes: usize,
    /// A subscriber that takes no byte for so long, though there is something for it, is disconnected.
    pub stall: Duration,
}

/// What a ROUTER socket's owner chooses.
#[derive(Debug, Clone, Copy)]
pub struct RouterLimits {
    /// Askers connected at once.
    pub connections: usize,
    /// An asker that does not take a whole reply in this time is disconnected.
    pub stall: Duration,
}
