//! What a client's body says, whatever it came as: compressed, in another encoding than UTF-8, or as a form.
//! Routing, a tenant's salt and everything else that is put into a body needs its text; a worker is sent the
//! client's own bytes where nothing is put in. No engine undoes a `Content-Encoding`, so a compressed body
//! goes on plain.

mod charset;
mod coding;
mod form;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use memchr::memmem;

pub use self::{
    charset::{mended, utf8},
    coding::{Coding, decoded},
    form::{Form, Multipart},
};
use crate::error::Error;

/// A body as it is read, and as it is sent.
#[derive(Debug)]
pub struct Content {
    /// Its text, in what is meant to be UTF-8 ([`Content::mend`]), where it has one; else what came. Whatever
    /// is put into a body is put into this.
    pub text: Bytes,
    /// What a worker is sent where nothing was put in, if that is not the text.
    pub came: Option<Bytes>,
    /// Why it cannot be read, if it cannot.
    pub unread: Option<Unread>,
    /// What it says, where it is a form.
    pub form: Option<Form>,
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

/// A body without its `Content-Encoding`, where that could be undone.
#[derive(Debug)]
pub struct Plain {
    /// What is to be read.
    pub bytes: Bytes,
    /// Whether it came in a `Content-Encoding`.
    pub was_coded: bool,
    /// Why that could not be undone.
    unread: Option<Unread>,
}

impl Plain {
    /// A body as it came.
    pub fn as_it_came(body: Bytes) -> Self {
        Self { bytes: body, was_coded: false, unread: None }
    }

    /// Whether something was done to a body; mostly nothing was.
    pub fn is_coded(headers: &HeaderMap, body: &Bytes) -> bool {
        headers.contains_key(header::CONTENT_ENCODING) && !body.is_empty()
    }

    /// Undoes what was done to a body, which its headers then say no more.
    pub async fn of(headers: &mut HeaderMap, body: Bytes, limit_bytes: usize) -> Result<Self, Error> {
        if !Self::is_coded(headers, &body) {
            return Ok(Self::as_it_came(body));
        }
        let unread = |body, why| Self { bytes: body, was_coded: true, unread: Some(why) };
        let Some(codings) = Coding::of(headers) else { return Ok(unread(body, Unread::Coding)) };
        // In a box: few requests need the room that it takes.
        let plain = Box::pin(decoded(body.clone(), &codings, limit_bytes)).await?;
        Ok(match plain {
            Some(plain) => {
                headers.remove(header::CONTENT_ENCODING);
                Self { bytes: plain, was_coded: true, unread: None }
            }
            None => unread(body, Unread::Damaged),
        })
    }
}

impl Content {
    /// What a body with these headers says.
    pub fn of(headers: &HeaderMap, plain: Plain, limit_bytes: usize) -> Result<Self, Error> {
        let Plain { bytes: came, unread, .. } = plain;
        if unread.is_some() {
            return Ok(Self { text: came, came: None, unread, form: None });
        }
        let kind = kind(headers);
        if kind.is_some_and(is_multipart) {
            let form = Form::of(kind, &came);
            return Ok(Self { text: came, came: None, unread: None, form });
        }
        let (text, came, unread) = match utf8(&came, limit_bytes)? {
            Some(text) if text.as_ptr() == came.as_ptr() => (text, None, None),
            Some(text) => (text, Some(came), None),
            None => (came, None, Some(Unread::NoObject)),
        };
        let form = Form::of(kind, &text);
        Ok(Self { text, came, unread, form })
    }

    /// Makes UTF-8 of what is almost that: few texts are not, so it is done where one could not be read.
    /// Whether it was.
    pub fn mend(&mut self, limit_bytes: usize) -> Result<bool, Error> {
        if self.unread.is_some() {
            return Ok(false);
        }
        let Some(text) = mended(&self.text, limit_bytes)? else { return Ok(false) };
        let came = std::mem::replace(&mut self.text, text);
        self.came.get_or_insert(came);
        Ok(true)
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

/// The `Content-Type` of a body that came in another charset and is UTF-8 now, where it says so.
pub fn in_utf8(headers: &HeaderMap) -> Option<HeaderValue> {
    let kind = kind(headers)?.to_ascii_lowercase();
    let parameters = memchr::memchr(b';', &kind)?;
    memmem::find(&kind[parameters..], b"charset")?;
    HeaderValue::from_bytes(kind[..parameters].trim_ascii_end()).ok()
}

/// The `Content-Type` as it is written; of several the first.
pub fn kind(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes)
}

/// Whether a body is a form: in parts, or in pairs.
pub fn is_form(headers: &HeaderMap, body: &[u8]) -> bool {
    kind(headers).is_some_and(|kind| is_multipart(kind) || is_in_pairs(kind, body))
}

/// Whether a body is a form in pairs. That is what curl says of any body, unless told otherwise: an object in
/// JSON is none.
fn is_in_pairs(kind: &[u8], body: &[u8]) -> bool {
    begins_with(kind, b"application/x-www-form-urlencoded") && !body.trim_ascii_start().starts_with(b"{")
}

/// Whether a body is a form with files, and looks like one.
pub fn has_files(headers: &HeaderMap, body: &[u8]) -> bool {
    kind(headers).is_some_and(is_multipart) && body.trim_ascii_start().starts_with(b"--")
}

fn is_multipart(kind: &[u8]) -> bool {
    begins_with(kind, b"multipart/")
}

/// Whether a content type begins with this, in whatever case.
fn begins_with<const BYTES: usize>(kind: &[u8], with: &[u8; BYTES]) -> bool {
    kind.trim_ascii_start().first_chunk::<BYTES>().is_some_and(|first| first.eq_ignore_ascii_case(with))
}

#[cfg(test)]
mod tests;
