//! The ZMQ frames around KV events: live messages, replay requests and their replies, old and new. Slices in,
//! slices out; sockets are their owners' business.
//!
//! - Live (PUB): `[topic, seq, payload]`, `seq` 8 bytes big-endian, from 0 at each start of the engine, one
//!   up a batch.
//! - Request (DEALER to ROUTER): `["", seq]` for all batches from `seq` on that are kept, or `["",
//!   "snapshot"]` (proposed in vLLM's PR 50134) for the whole state.
//! - Reply: `["", topic, seq, payload]` (vLLM from v0.26 on) or `["", seq, payload]` (older, SGLang) for each
//!   batch, then an end: no payload, and a `seq` of all ones (missing in the earliest releases).
//! - A snapshot is replied to as batches too: `AllBlocksCleared` first, then every block after its parent.
//!   The `seq` of each is that of the first live batch that the snapshot does not cover.

/// Stands for a sequence number in the reply that ends a replay.
pub const END_SEQ: [u8; 8] = [0xff; 8];

/// The last frame of a request for the whole state.
const SNAPSHOT: &[u8] = b"snapshot";
// A sequence number is told from it by value, not by length.
const _: () = assert!(SNAPSHOT.len() == END_SEQ.len());

/// A sequence number as a frame.
pub const fn seq_frame(seq: u64) -> [u8; 8] {
    seq.to_be_bytes()
}

fn parse_seq(frame: &[u8]) -> Option<u64> {
    frame.try_into().ok().map(u64::from_be_bytes)
}

/// A batch as the engine publishes it, once and to all subscribers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Live<'a> {
    /// What subscribers filter by.
    pub topic: &'a [u8],
    /// The batch's number: 0 for the first since the engine's start, one more for each batch.
    pub seq: u64,
    /// An encoded [`super::EventBatch`], which is not looked at yet.
    pub payload: &'a [u8],
}

impl<'a> Live<'a> {
    /// `None` if these are not the frames of a live message.
    pub fn parse<F: AsRef<[u8]>>(frames: &'a [F]) -> Option<Self> {
        let [topic, seq, payload] = frames else { return None };
        Some(Self { topic: topic.as_ref(), seq: parse_seq(seq.as_ref())?, payload: payload.as_ref() })
    }
}

/// What a client of the replay socket asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayRequest {
    /// All batches that are kept, from this number on.
    From(u64),
    /// All that is cached now, whichever batches said so. Not every engine knows this request.
    Snapshot,
}

impl ReplayRequest {
    /// The frames a DEALER sends: an empty delimiter and the request.
    pub fn frames(self) -> [Vec<u8>; 2] {
        let request = match self {
            Self::From(seq) => seq_frame(seq).to_vec(),
            Self::Snapshot => SNAPSHOT.to_vec(),
        };
        [Vec::new(), request]
    }

    /// From the frames behind the client's identity; `None` if they are no request.
    pub fn parse<F: AsRef<[u8]>>(frames: &[F]) -> Option<Self> {
        match frames.last()?.as_ref() {
            SNAPSHOT => Some(Self::Snapshot),
            request => parse_seq(request).map(Self::From),
        }
    }
}

/// One reply on the replay socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayReply<'a> {
    /// One batch that the engine has kept, or a part of a snapshot.
    Batch {
        /// Its number; in a snapshot the number to go on from.
        seq: u64,
        /// An encoded [`super::EventBatch`], never empty: an empty one is the end.
        payload: &'a [u8],
    },
    /// Nothing more will come.
    End,
}

impl<'a> ReplayReply<'a> {
    /// From all frames a DEALER receives; `None` if they are no reply. Reads from the end, where old and new
    /// agree.
    pub fn parse<F: AsRef<[u8]>>(frames: &'a [F]) -> Option<Self> {
        let payload = frames.last()?.as_ref();
        let Some(seq) = frames.len().checked_sub(2).map(|at| frames[at].as_ref()) else {
            return payload.is_empty().then_some(Self::End);
        };
        if payload.is_empty() || seq == END_SEQ {
            return Some(Self::End);
        }
        Some(Self::Batch { seq: parse_seq(seq)?, payload })
    }
}
