//! The body of every answer: what is sent, and the room of its request, which is given back when all was sent
//! or the client left.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use keyway_clients::stalls::{self, Said};

use super::stream::StreamFailed;
use crate::limits::ERROR_BYTES_MAX;
use crate::request_memory::Room;

/// An answer's body; it fails only where a stream must end without its end.
#[derive(Debug)]
pub(crate) struct AnswerBody {
    body: UnsyncBoxBody<Bytes, StreamFailed>,
    room: Option<Room>,
}

impl AnswerBody {
    pub(super) fn new(body: impl Body<Data = Bytes, Error = StreamFailed> + Send + 'static) -> Self {
        Self { body: body.boxed_unsync(), room: None }
    }

    /// Bytes of an answer that no room was taken for, if they are more than an error's.
    pub(super) fn without_room(&self) -> Option<usize> {
        let bytes = self.body.size_hint().lower() as usize;
        (self.room.is_none() && bytes > ERROR_BYTES_MAX).then_some(bytes)
    }

    /// Ties the request's room to it.
    pub(super) fn keep(&mut self, room: Room) {
        self.room = Some(room);
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = StreamFailed;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamFailed>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        // Whether the client is waited for, or the engine.
        stalls::say(if frame.is_ready() { Said::Piece } else { Said::Wait });
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
