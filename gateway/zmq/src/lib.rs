//! The server's side of ZeroMQ over TCP: a PUB socket ([`PubSocket`]) and a ROUTER socket ([`RouterSocket`]),
//! for the KV events of the worker and of the load tester's mock. Frames are `keyway_wire::zmtp`'s (ZeroMQ
//! RFC 23, and of RFC 37 what newer peers say); what is in messages is the owner's business.
//!
//! **No peer is trusted.** Each connection is a task of its own, and may make this process keep no more than
//!
//! - what it has sent of one small thing: a subscription or a request of some hundred bytes, a command of 4
//!   KiB;
//! - what it subscribes to: [`SUBSCRIPTIONS_MAX`] topics of [`TOPIC_BYTES_MAX`];
//! - what is being sent to it: 64 KiB, or one message where that is longer.
//!
//! Published messages are kept once for all subscribers, and each subscriber has a place in them: one that is
//! too slow misses the oldest (ZeroMQ's high-water mark, which drops the newest, would keep them for each).
//! No peer is waited for: [`PubSocket::send`] returns at once, and every asker is answered beside the others.
//!
//! Only the mechanism NULL is spoken: no keys, no encryption.

mod accept;
mod limits;
mod link;
mod publisher;
mod ring;
mod router;
mod topics;

pub use self::{
    limits::{HANDSHAKE_MAX, PubLimits, RouterLimits, SUBSCRIPTIONS_MAX, TOPIC_BYTES_MAX},
    publisher::PubSocket,
    router::{Replies, RouterSocket},
};
