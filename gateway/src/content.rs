//! What a client's body says, whatever it came as: compressed, in another encoding than UTF-8, or as a form. Routing, a
//! tenant's salt and everything else that is put into a body needs its text; a worker is sent the client's own bytes where
//! nothing is put in. No engine undoes a `Content-Encoding`, so a compressed body goes on plain.

mod charset;
mod coding;
mod form;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use memchr::memmem;

pub use self::{
    charset::utf8,
    coding::{Coding, decoded},
    form::{Form, Multipart},
};
use crate::error::Error;

/// A body as it is read, and as it is sent.
#[derive(Debug)]
pub struct Content {
    /// Its text in UTF-8, where it has one; else what came. Whatever is put into a body is put into this.
    pub text: Bytes,
    /// What a worker is sent where nothing was put in, if that is not the text.
    pub came: Option<Bytes>,
    /// Why it cannot be read, if it cannot.
    pub unread: Option<Unread>,
}

/// Why nothing is known of what a body says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unread {
    /// It came in a `Content-Encoding` that is not undone here.
    Coding,
    /// It is not what its `Content-Encoding` says.
    Damaged,
    /// It is no JSON object.
    NoObject,
}

impl Content {
    /// Undoes what can be undone of a body. The headers then are those of what is left.
    pub async fn of(headers: &mut HeaderMap, body: Bytes, limit_bytes: usize) -> Result<Self, Error> {
        let came = match plain(headers, body.clone(), limit_bytes).await? {
            Ok(came) => came,
            Err(unread) => return Ok(Self { text: body, came: None, unread: Some(unread) }),
        };
        if is_multipart(headers) {
            return Ok(Self { text: came, came: None, unread: None });
        }
        Ok(match utf8(&came, limit_bytes)? {
            Some(text) if text.as_ptr() == came.as_ptr() => Self { text, came: None, unread: None },
            Some(text) => Self { text, came: Some(came), unread: None },
            None => Self { text: came, came: None, unread: Some(Unread::NoObject) },
        })
    }

    /// Something was put into the body: that is sent in place of what came, and is UTF-8.
    pub fn replace(&mut self, headers: &mut HeaderMap, text: Bytes) {
        if self.came.take().is_some()
            && let Some(kind) = in_utf8(headers)
        {
            headers.insert(header::CONTENT_TYPE, kind);
        }
        (self.text, self.unread) = (text, None);
    }
}

/// The body without its `Content-Encoding`, which leaves the headers.
async fn plain(
    headers: &mut HeaderMap,
    body: Bytes,
    limit_bytes: usize,
) -> Result<Result<Bytes, Unread>, Error> {
    // Mostly there is none.
    if !headers.contains_key(header::CONTENT_ENCODING) || body.is_empty() {
        return Ok(Ok(body));
    }
    let Some(codings) = Coding::of(headers) else { return Ok(Err(Unread::Coding)) };
    // In a box: few requests need the room that it takes.
    match Box::pin(decoded(body, &codings, limit_bytes)).await? {
        Some(plain) => {
            headers.remove(header::CONTENT_ENCODING);
            Ok(Ok(plain))
        }
        None => Ok(Err(Unread::Damaged)),
    }
}

/// The `Content-Type` of a body that came in another charset and is UTF-8 now, where it says so.
pub fn in_utf8(headers: &HeaderMap) -> Option<HeaderValue> {
    let kind = content_type(headers)?.to_ascii_lowercase();
    let parameters = memchr::memchr(b';', &kind)?;
    memmem::find(&kind[parameters..], b"charset")?;
    HeaderValue::from_bytes(kind[..parameters].trim_ascii_end()).ok()
}

fn content_type(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes)
}

fn is_multipart(headers: &HeaderMap) -> bool {
    const KIND: &[u8] = b"multipart/";
    content_type(headers)
        .and_then(|kind| kind.trim_ascii_start().first_chunk::<{ KIND.len() }>())
        .is_some_and(|kind| kind.eq_ignore_ascii_case(KIND))
}

#[cfg(test)]
mod tests;
