//! A request's body as it arrives: in the room that it may have, and where it is large in turns with the
//! others that arrive at the same core.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http::Version;
use http_body::{Body, Frame};
use http_body_util::{LengthLimitError, Limited};

use crate::{
    access::body_memory::Room,
    config::Timeouts,
    error::Error,
    impatient::{Impatient, Pace, TooSlow},
    limits::{BODY_FREE_BYTES, GIVEN_BACK_INLINE_BYTES, READING_INLINE_BYTES},
    machine::{heap, threads, turns::Turns},
    proxy::body::BoxError,
    upstream::trailers,
};

/// Room that is made at first for what a client says is to come of its body.
const BODY_ROOM_BYTES: u64 = 1 << 20;

/// How a body may come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Its bytes at most.
    pub max_bytes: usize,
    pace: Pace,
}

impl Bounds {
    /// So many bytes at most, as fast as a request's timeouts say.
    pub(crate) fn of(max_bytes: usize, timeouts: &Timeouts) -> Self {
        Self { max_bytes, pace: Pace { idle: timeouts.body_idle, whole: timeouts.body } }
    }
}

/// All of a body within its bounds. What is not there at once has to `arrive`, which may be refused.
///
/// # Errors
/// A body that is too large (unread, where its head says so), too slow or unreadable, what finds no room, and
/// what may not arrive.
pub(crate) async fn bounded<B, P>(
    (body, version): (B, Version),
    bounds: Bounds,
    room: impl FnOnce() -> Option<Room>,
    arrive: impl FnOnce() -> Result<P, Error>,
) -> Result<Bytes, Error>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    let too_large = Error::BodyTooLarge { limit_bytes: bounds.max_bytes };
    if body.size_hint().lower() > bounds.max_bytes as u64 {
        return Err(too_large);
    }
    let body = Limited::new(Impatient::new(body, bounds.pace), bounds.max_bytes);
    let mut whole = pin!(whole((body, version == Version::HTTP_2), room));
    let whole = match poll_fn(|cx| Poll::Ready(whole.as_mut().poll(cx))).await {
        Poll::Ready(whole) => whole,
        Poll::Pending => {
            let _arriving = arrive()?;
            whole.await
        }
    };
    whole.map_err(|error| match (error.downcast_ref::<TooSlow>(), error.downcast_ref::<Error>()) {
        (Some(why), _) => Error::BodyTooSlow(*why),
        (_, Some(refused)) => refused.clone(),
        _ if error.is::<LengthLimitError>() => too_large,
        _ => Error::BodyUnreadable(error.to_string()),
    })
}

/// All of a body, in the room that it may have: as it came, if it came at once; else joined as it comes, so
/// that it is never held twice.
async fn whole<B>((body, is_h2): (B, bool), room: impl FnOnce() -> Option<Room>) -> Result<Bytes, BoxError>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    let (mut body, mut make_room) = (InTurns::new(body), Some(room));
    let mut first = Bytes::new();
    let mut joined = Joined::default();
    while let Some(frame) = poll_fn(|cx| body.poll_frame(cx)).await.transpose().map_err(Into::into)? {
        let piece = match frame.into_data() {
            Ok(piece) => piece,
            // Trailers are read and dropped: no worker gets them.
            Err(frame) if is_h2 && frame.trailers_ref().is_some_and(trailers::are_malformed) => {
                return Err(Error::BodyUnreadable("its trailers are malformed".to_owned()).into());
            }
            Err(_) => continue,
        };
        let bytes = first.len() + joined.bytes.len() + piece.len();
        if bytes > BODY_FREE_BYTES {
            joined.room = joined.room.take().or_else(|| make_room.take().and_then(|make| make()));
            joined.room.as_mut().map_or(Ok(()), |room| room.hold(bytes))?;
        }
        if first.is_empty() && joined.bytes.is_empty() {
            first = piece;
            if body.body.is_end_stream() {
                break;
            }
            continue;
        }
        if joined.bytes.is_empty() {
            // A client may say more than it sends.
            let announced = body.body.size_hint().lower().min(BODY_ROOM_BYTES) as usize;
            joined.bytes.reserve(first.len() + piece.len() + announced);
            joined.bytes.extend_from_slice(&first);
            first = Bytes::new();
        }
        if bytes > joined.bytes.capacity() {
            let more = heap::room_for(bytes) - joined.bytes.len();
            joined.bytes.reserve(more);
        }
        joined.bytes.extend_from_slice(&piece);
    }
    let whole = mem::take(&mut joined.bytes);
    let whole = if whole.is_empty() { first } else { whole.freeze() };
    Ok(match joined.room.take() {
        Some(room) => room.tied_to(whole),
        None => whole,
    })
}

/// What has come so far, and its room.
#[derive(Default)]
struct Joined {
    bytes: BytesMut,
    room: Option<Room>,
}

impl Drop for Joined {
    fn drop(&mut self) {
        // The client has left, or was refused, and the system takes some milliseconds to take back tens of
        // megabytes.
        if self.bytes.len() > GIVEN_BACK_INLINE_BYTES
            && let Some(threads) = threads::large_bodies()
        {
            let (bytes, room) = (mem::take(&mut self.bytes), self.room.take());
            threads.later(move || {
                drop(bytes);
                drop(room);
            });
        }
    }
}

/// A body that is read in turns once it is large.
struct InTurns<B> {
    body: B,
    came_bytes: usize,
    /// Few are large.
    turns: Option<Box<Turns>>,
}

impl<B: Body<Data = Bytes> + Unpin> InTurns<B> {
    fn new(body: B) -> Self {
        Self { body, came_bytes: 0, turns: None }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.came_bytes > READING_INLINE_BYTES {
            return self.poll_in_turn(cx);
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.came_bytes += bytes_of(frame.as_ref());
        Poll::Ready(frame)
    }

    fn poll_in_turn(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let turns = self.turns.get_or_insert_default();
        ready!(turns.poll_turn(cx));
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        match &polled {
            Poll::Ready(frame) => turns.copied(bytes_of(frame.as_ref())),
            Poll::Pending => turns.nothing_yet(cx),
        }
        polled
    }
}

fn bytes_of<E>(frame: Option<&Result<Frame<Bytes>, E>>) -> usize {
    frame.and_then(|frame| frame.as_ref().ok()?.data_ref()).map_or(0, Bytes::len)
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::Future};

    use http_body_util::{Full, StreamBody};

    use super::*;
    use crate::{access::body_memory::BodyMemory, client::Client, limits::TURN_BYTES};

    fn body<P: Into<Bytes>>(pieces: Vec<P>) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames: Vec<_> =
            pieces.into_iter().map(|piece| Ok::<_, Infallible>(Frame::data(piece.into()))).collect();
        StreamBody::new(futures_util::stream::iter(frames))
    }

    #[tokio::test]
    async fn a_body_in_pieces_is_joined_and_a_whole_one_is_not_copied() {
        let memory = BodyMemory::new(1 << 20, prometheus::IntGauge::new("g", "g").unwrap());
        let room = || Some(memory.room(&Client::alone(), None));
        for all in [&[][..], &[""], &["a"], &["", "a"], &["a", "", "bc", "d"], &["", "", "abc"]] {
            assert_eq!(whole((body(all.to_vec()), false), room).await.unwrap(), all.concat());
        }
        let one = Bytes::from_static(b"whole");
        assert_eq!(whole((Full::new(one.clone()), true), room).await.unwrap().as_ptr(), one.as_ptr());
        let large = "x".repeat(2 << 20).leak();
        let refused = whole((body(vec!["x", large]), false), room).await.unwrap_err();
        assert_eq!(refused.downcast_ref(), Some(&Error::BodyMemory { of: None }));
    }

    #[tokio::test]
    async fn one_turn_of_the_loop_reads_a_part_of_one_large_body() {
        let memory = BodyMemory::new(1 << 30, prometheus::IntGauge::new("g", "g").unwrap());
        let mut all: Vec<_> = (0..4)
            .map(|_| {
                let pieces = vec![vec![7_u8; 16 << 10]; (READING_INLINE_BYTES + 3 * TURN_BYTES) / (16 << 10)];
                Box::pin(whole((body(pieces), false), || Some(memory.room(&Client::alone(), None))))
            })
            .collect();
        let mut turns = 0;
        while !all.is_empty() {
            let mut ended = 0;
            poll_fn(|cx| {
                all.retain_mut(|one| match one.as_mut().poll(cx) {
                    Poll::Ready(whole) => {
                        assert_eq!(whole.unwrap().len(), READING_INLINE_BYTES + 3 * TURN_BYTES);
                        ended += 1;
                        false
                    }
                    Poll::Pending => true,
                });
                Poll::Ready(())
            })
            .await;
            assert!(ended <= 1, "{ended} came to their ends in turn {turns}");
            turns += 1;
            tokio::task::yield_now().await;
        }
        assert!(turns >= 4 * 3, "{turns}");
    }
}
