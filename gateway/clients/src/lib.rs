//! Clients that are not to be trusted, and what bounds each of their connections over HTTP/1.1 and HTTP/2:
//! how many there are and who makes room, the time for heads and bodies, frames that ask for nothing, answers
//! that the client does not read, and how a connection ends. One implementation for the gateway and its
//! worker. What a request means is theirs.
//!
//! Read in this order: `client.rs` (one connection, and when it is idle), `clients.rs` (all of them),
//! `incoming.rs`, `frames.rs` and `heads.rs` (what comes), `impatient.rs` (bodies), `stalls.rs` and `turn.rs`
//! (answers), `ending.rs` and `lingering.rs` (the end).

pub mod client;
pub mod clients;
pub mod ending;
mod frames;
mod heads;
pub mod impatient;
pub mod incoming;
pub mod limits;
pub mod lingering;
pub mod party;
pub mod stalls;
pub mod turn;

use std::time::Duration;

use hyper_util::{rt::TokioTimer, server::conn::auto};

use self::limits::{
    HEAD_BUFFER_BYTES, MAX_H2_FAULTY_STREAMS, MAX_H2_HEADER_LIST_BYTES, MAX_H2_STREAMS, MAX_H2_UNSEEN_RESETS,
};

/// Sets what hyper itself bounds: heads, which get so much time over HTTP/1.1, and the streams of HTTP/2.
pub fn bound<E>(builder: &mut auto::Builder<E>, header_read: Duration) {
    builder.http1().timer(TokioTimer::new()).header_read_timeout(header_read).max_buf_size(HEAD_BUFFER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_H2_STREAMS)
        .max_pending_accept_reset_streams(MAX_H2_UNSEEN_RESETS)
        .max_local_error_reset_streams(MAX_H2_FAULTY_STREAMS)
        .max_header_list_size(MAX_H2_HEADER_LIST_BYTES);
}
