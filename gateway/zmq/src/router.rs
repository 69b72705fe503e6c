//! ROUTER, as far as questions with any number of answers need it (ZeroMQ RFC 28): each asker is answered on
//! its own connection, one question after the other, and no asker waits for another.

use std::{fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use keyway_wire::zmtp::{self, Frames, Incoming, SocketType};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};

use crate::{
    accept::{Accepting, Place},
    limits::{ASKER, RouterLimits},
    link::{Inbound, Unsent, in_time},
};

/// The replies to one question, each a message's frames without the asker's identity. Each is asked for once
/// the one before it was sent, so what is not made yet takes no memory.
pub type Replies = Box<dyn Iterator<Item = Vec<Bytes>> + Send>;

/// A ROUTER socket. It and its connections close when it is dropped.
pub struct RouterSocket {
    accepting: Accepting,
}

impl RouterSocket {
    /// Answers those who connect to `listener`: `answer` is given a question's frames as they came, an empty
    /// delimiter among them. Neither it nor its replies may wait. To be called within a runtime.
    ///
    /// # Errors
    /// Where the listener has no address.
    pub fn new(
        listener: TcpListener,
        limits: RouterLimits,
        answer: impl Fn(Frames) -> Replies + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let answer = Arc::new(answer);
        let accepting = Accepting::start(listener, limits.connections, move |stream, place| {
            let answer = Arc::clone(&answer);
            async move {
                stream.set_nodelay(true)?;
                serve(stream, &*answer, limits.stall, &place).await
            }
        })?;
        Ok(Self { accepting })
    }

    /// The address that askers connect to, with the port that the system chose if the owner asked for port 0.
    pub fn local_addr(&self) -> SocketAddr {
        self.accepting.addr()
    }

    /// Closes the socket and its connections; once it returns, nothing listens any more.
    pub async fn close(self) {
        self.accepting.close().await;
    }
}

impl fmt::Debug for RouterSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouterSocket").field("addr", &self.local_addr()).finish_non_exhaustive()
    }
}

/// Serves one asker until it is gone, which it always is with an error. Nothing is read while it is answered,
/// so questions that come faster than it reads stay with the network.
async fn serve<S>(
    stream: S,
    answer: &(impl Fn(Frames) -> Replies + Sync),
    stall: Duration,
    place: &Place,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite,
{
    let (from, mut to) = tokio::io::split(stream);
    let mut from = Inbound::open(from, &mut to, SocketType::Router, ASKER).await?;
    let mut unsent = Unsent::default();
    loop {
        match from.next().await? {
            Incoming::Message(question) => {
                place.engage(true);
                for reply in answer(question) {
                    unsent.extend(zmtp::shared_message(&reply));
                    in_time(stall, unsent.send(&mut to)).await?;
                }
                place.engage(false);
            }
            Incoming::Ping(context) => {
                unsent.push(zmtp::pong(&context).into());
                in_time(stall, unsent.send(&mut to)).await?;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
