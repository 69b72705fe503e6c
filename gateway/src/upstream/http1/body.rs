//! Where an answer's body ends, and its bytes on the way there (RFC 9112, section 6). Chunks are
//! `chunked.rs`.

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::SizeHint;

use super::{Http1Error, chunked::Chunked};

/// What is to come of a body.
#[derive(Debug)]
pub(super) enum Body {
    /// So many bytes, more than none.
    Left(u64),
    Chunked(Chunked),
    /// Whatever comes until the connection is closed.
    UntilClosed,
    Ended,
}

/// What was read of a body.
pub(super) enum Part {
    Data(Bytes),
    /// Behind its last chunk.
    Trailers(HeaderMap),
    End,
    /// More must be read.
    More,
}

impl Body {
    pub(super) fn of_length(length: u64) -> Self {
        if length == 0 { Self::Ended } else { Self::Left(length) }
    }

    /// Whether its length is known.
    pub(super) fn has_length(&self) -> bool {
        matches!(self, Self::Left(_) | Self::Ended)
    }

    /// The next piece of what was read.
    pub(super) fn take(&mut self, read: &mut BytesMut) -> Result<Part, Http1Error> {
        let part = match self {
            Self::Ended => Part::End,
            _ if read.is_empty() => Part::More,
            Self::UntilClosed => Part::Data(read.split().freeze()),
            Self::Left(left) => {
                let now = read.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                *self = Self::of_length(*left - now as u64);
                Part::Data(read.split_to(now).freeze())
            }
            Self::Chunked(chunked) => {
                let part = chunked.take(read)?;
                self.skip(read);
                part
            }
        };
        Ok(part)
    }

    /// Goes on to the next chunk, or past the end if that has come too: then the reader need not ask again to
    /// hear of it.
    pub(super) fn skip(&mut self, read: &mut BytesMut) {
        if let Self::Chunked(chunked) = self {
            chunked.skip(read);
            if chunked.has_ended() {
                *self = Self::Ended;
            }
        }
    }

    pub(super) fn ends_with_connection(&self) -> bool {
        matches!(self, Self::UntilClosed)
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        match self {
            Self::Left(left) => SizeHint::with_exact(*left),
            Self::Ended => SizeHint::with_exact(0),
            Self::Chunked(_) | Self::UntilClosed => SizeHint::default(),
        }
    }
}
