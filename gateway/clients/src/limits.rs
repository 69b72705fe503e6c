//! What clients may send and how long they may take, each with its unit and how the number was derived. Where
//! operators may set one, it is the default.

use std::time::Duration;

/// Of each body, what is not counted among these: most bodies are smaller, and their number is bounded.
pub const BODY_FREE_BYTES: usize = 32 << 10;

/// Bytes by which a body's room grows.
pub const BODY_STEP_BYTES: usize = 256 << 10;

/// Streams one HTTP/2 client may have open at once (hyper's own default is 200).
pub const MAX_H2_STREAMS: u32 = 1_024;

/// Streams of one HTTP/2 client that were reset before the server came to look at them (Rapid Reset); beyond
/// it the connection is closed. A client that takes a batch of requests back at once stays below; who floods
/// is there with one read of 16 KiB.
pub const MAX_H2_UNSEEN_RESETS: usize = 64;

/// Streams of one HTTP/2 connection that the server had to reset for what the client did on them
/// (MadeYouReset); beyond it the connection is closed. Honest clients do so at most once, with as many
/// streams as there may be before they are told of that.
pub const MAX_H2_FAULTY_STREAMS: usize = MAX_H2_STREAMS as usize;

/// Frames of HTTP/2 that ask for nothing (PING, SETTINGS, WINDOW_UPDATE and others) that a client may send at
/// once, before it has earned any: four for each stream that it may have.
pub const H2_CONTROL_BURST: u64 = 4 * MAX_H2_STREAMS as u64;

/// And in a second, whatever else it does.
pub const H2_CONTROL_PER_SECOND: u64 = 128;

/// And for each request.
pub const H2_CONTROL_PER_REQUEST: u64 = 8;

/// And one for so many bytes that are written to it: clients that update two windows for each small event of
/// a stream send half as many.
pub const H2_CONTROL_BYTES_EACH: u64 = 16;

/// Time that a connection gets to say its last after it was told to end, before it is closed: a round trip
/// across the world.
pub const LEAVE_PATIENCE: Duration = Duration::from_secs(1);

/// How often a client that waits to be let in looks whether another has gone.
pub const ROOM_LOOK: Duration = Duration::from_millis(50);

/// One part in this many of the connections is asked to leave at a time, the longest idle first, where there
/// is no place for another.
pub const ROOM_SHARE: usize = 256;

/// Time for a client to send its request head, from its first byte or the end of the answer before, as a
/// defence against slow-header attacks.
pub const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Largest head of a request, as HTTP/1.1 writes it: twice a bearer token that names a thousand groups, and
/// what nginx takes.
pub const MAX_HEAD_BYTES: usize = 32 << 10;

/// Bytes of request head that HTTP/1.1 buffers: room for four times the largest head, so that who sends up to
/// that is told why; of a longer one hyper says 431 and no more.
pub const HEAD_BUFFER_BYTES: usize = 128 << 10;

/// The same over HTTP/2, by its own count (32 bytes more for each field). Four times this much closes the
/// connection.
pub const MAX_H2_HEADER_LIST_BYTES: u32 = 2 * MAX_HEAD_BYTES as u32;

/// Time between two pieces of a request's body, against slow bodies; a phone's longest gaps are shorter.
pub const BODY_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// What of a request's body must have come for each second after [`BODY_IDLE_TIMEOUT`], against bodies that
/// never end: a phone where there is hardly a network sends several times as much, and a prompt of a few
/// kilobytes needs none of it.
pub const BODY_BYTES_PER_SECOND_MIN: u64 = 1 << 10;

/// Time for a whole body to come: the largest one at 110 KB a second.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(600);

/// Time for which a client may take nothing of what is sent to it: a laptop that is opened again within it
/// goes on. Until then it holds what the sockets' buffers hold and its place, and its worker waits.
pub const CLIENT_STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a connection that was closed here waits for its client to close it too, while nothing comes.
pub const LINGER_IDLE: Duration = Duration::from_secs(1);

/// And in all, while the client still sends.
pub const LINGER_MAX: Duration = Duration::from_secs(5);
