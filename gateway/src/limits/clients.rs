//! What clients may send, hold and wait for: connections, heads, bodies. What is bounded alike at the gateway
//! and at its worker is in `gateway/clients`.

use std::time::Duration;

pub use keyway_clients::limits::*;

/// Largest request body. An agent turn is 0.2–2 MB of JSON; a 1M-token prompt about 8 MB; images come as
/// base64.
pub const MAX_BODY_BYTES: usize = 64 << 20;

/// Bytes of request bodies at once, those of answers under way included: a thousand long conversations.
pub const MAX_BODY_MEMORY_BYTES: usize = 1 << 30;

/// Largest body that is read where its client is served, some tenths of a millisecond of it; others go to
/// threads of their own.
pub const READING_INLINE_BYTES: usize = 128 << 10;

/// How much of large bodies a thread that serves clients copies before it looks for what else is due: about a
/// tenth of a millisecond, twice that where the room for it is new.
pub const TURN_BYTES: usize = 256 << 10;

/// Largest body whose memory is given back where its client is served: 256 pages, some 50 µs.
pub const GIVEN_BACK_INLINE_BYTES: usize = 1 << 20;

/// Longest name of a model that is kept: of a longer one its beginning, which no worker serves.
pub const MAX_MODEL_BYTES: usize = 512;

/// Codings of one request's body, one in the other: more than one is a proxy's doing, more than two no
/// client's.
pub const MAX_CODINGS: usize = 2;

/// What of a body is decoded where its client is served, compressed and plain: some tenths of a millisecond.
pub const DECODING_INLINE_BYTES: usize = 128 << 10;

/// What may come out of a compressed body whatever went in: the text of a long prompt that says one thing
/// again and again.
pub const DECODING_RATIO_FREE_BYTES: usize = 4 << 20;

/// Of what is larger, bytes that come out for one that went in, of which twice as many may be held for a
/// moment, so that no client makes a hundred bytes of one: JSON of real conversations shrinks to a third or a
/// tenth, tables of zeros to a hundredth; deflate could make a thousand.
pub const DECODING_RATIO_MAX: usize = 40;

/// Large bodies that are decoded or read at once, each on a thread of its own and for at most 64 MiB; others
/// wait.
pub const LARGE_BODY_THREADS: usize = 2;

/// What a zstd frame may ask to be kept of its past: what the standard has every receiver take (RFC 9659).
pub const ZSTD_WINDOW_BYTES: u64 = 8 << 20;

/// Requests in flight at once. Each holds a connection pair and about 20 KB besides its body.
pub const MAX_IN_FLIGHT: usize = 16_384;

/// Client connections at once: twice the requests in flight, for idle keep-alive clients.
pub const MAX_CONNECTIONS: usize = 32_768;

/// Client connections below which a limit of open files is called low: what a few hundred agents with some
/// streams each take.
pub const FEW_CONNECTIONS: usize = 4_096;

/// Time for a client to finish the TLS handshake: some round trips across the world.
pub const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Header fields of a request: SDKs and proxies send 20 to 40. Below the 100 up to which hyper reads a head
/// at all without memory of its own, so that who sends a few too many is told why.
pub const MAX_HEAD_FIELDS: usize = 96;

/// Longest path and query: RFC 9110 wants 8,000 bytes at least, and no client of the API needs them.
pub const MAX_URI_BYTES: usize = 8 << 10;

/// Longest client-chosen request id that is kept; a longer one is replaced.
pub const MAX_REQUEST_ID_BYTES: usize = 128;

/// Ids of requests that lie together in memory: one that lasts, as a stream's, keeps the room of so many.
pub const IDS_TOGETHER: usize = 16;
