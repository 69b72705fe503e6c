//! What a client has of a stream, by the worker's own account: the output's ids and how many bytes of text
//! they gave. From it follows how the rest is asked for, and what of the rest the client has seen already.

use bytes::Bytes;
use keyway_wire::extension::RequestExtension;

use super::{
    Obstacle,
    chunk::{Chunk, Identity},
    memory::Reservation,
};
use crate::sse::{Event, events};

/// Ids for which room is asked at once.
const IDS_STEP: usize = 1_024;

/// A stream so far.
#[derive(Debug)]
pub(super) struct TokenHistory {
    /// Of the first chunk; all later ones bear it.
    identity: Option<Identity>,
    ids: Vec<u32>,
    emitted_bytes: u64,
    /// Set with the chunk that ends the output.
    end: Option<End>,
    /// What of a resumed stream the client has already.
    skip: Skip,
    /// Set where the account cannot be kept any longer.
    lost: Option<Obstacle>,
    room: Reservation,
}

/// The end is no place to resume from: the last chunk before it is asked for again, and not passed on.
#[derive(Debug, Clone, Copy)]
struct End {
    ids_before: usize,
    emitted_before: u64,
    /// Chunks passed on behind the end: a count of tokens.
    chunks_behind: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Skip {
    Nothing,
    /// Up to the end, and so many chunks behind it.
    ThroughEnd(usize),
    /// So many more chunks, which the client has from behind the end.
    Chunks(usize),
}

impl TokenHistory {
    /// Of a stream that has not begun; `room` grows with the ids that are kept.
    pub(super) fn new(room: Reservation) -> Self {
        Self {
            identity: None,
            ids: Vec::new(),
            emitted_bytes: 0,
            end: None,
            skip: Skip::Nothing,
            lost: None,
            room,
        }
    }

    /// How to ask for the rest.
    pub(super) fn rest(&self, seed: Option<u64>) -> Result<RequestExtension, Obstacle> {
        if let Some(obstacle) = self.lost {
            return Err(obstacle);
        }
        if self.identity.is_none() {
            // The client has nothing: not even the chunk that names the role.
            return Ok(RequestExtension { seed, ..RequestExtension::default() });
        }
        let (ids, emitted_bytes) = match self.end {
            Some(end) => (&self.ids[..end.ids_before], end.emitted_before),
            None => (&self.ids[..], self.emitted_bytes),
        };
        Ok(RequestExtension { seed, output_ids: Some(ids.to_vec()), emitted_bytes })
    }

    /// Another worker's stream begins here.
    pub(super) fn goes_on(&mut self) {
        self.skip = self.end.map_or(Skip::Nothing, |end| Skip::ThroughEnd(end.chunks_behind));
    }

    /// Whether the client has seen something.
    pub(super) fn has_begun(&self) -> bool {
        self.identity.is_some()
    }

    /// Takes whole events; returns what the client is to see of them.
    pub(super) fn tell(&mut self, bytes: &Bytes) -> Bytes {
        let mut out = Vec::with_capacity(bytes.len());
        for event in events(bytes) {
            let json = event.text().filter(|data| data.trim_start().starts_with('{'));
            match (json.map(Chunk::read), &event.data) {
                (Some(Some(chunk)), _) => self.take(&chunk, &event, &mut out),
                // `[DONE]`, or a comment.
                (None, None) => out.extend_from_slice(event.raw),
                (None, Some(data)) if data.trim_ascii() == b"[DONE]" => out.extend_from_slice(event.raw),
                _ => {
                    self.lost = Some(Obstacle::Unreadable);
                    out.extend_from_slice(event.raw);
                }
            }
        }
        out.into()
    }

    fn take(&mut self, chunk: &Chunk<'_>, event: &Event<'_>, out: &mut Vec<u8>) {
        if self.passes(chunk) {
            self.note(chunk);
            let identity = self.identity.get_or_insert_with(|| chunk.identity());
            event.write_with(Some(&chunk.named(identity)), out);
        }
    }

    /// Whether the client does not have it yet.
    fn passes(&mut self, chunk: &Chunk<'_>) -> bool {
        match self.skip {
            Skip::Nothing => return true,
            Skip::ThroughEnd(behind) if chunk.ends => self.skip = Skip::Chunks(behind),
            Skip::ThroughEnd(_) => {}
            Skip::Chunks(0) => {
                self.skip = Skip::Nothing;
                return true;
            }
            Skip::Chunks(left) => self.skip = Skip::Chunks(left - 1),
        }
        false
    }

    fn note(&mut self, chunk: &Chunk<'_>) {
        let Some(ids) = &chunk.ids else {
            if !chunk.is_error {
                self.lost = Some(Obstacle::Unreadable);
            }
            return;
        };
        let full = self.ids.len() + ids.len() > self.ids.capacity();
        if full && self.lost.is_none() {
            let step = IDS_STEP.max(ids.len());
            if self.room.grow(step * size_of::<u32>()) {
                self.ids.reserve_exact(step);
            } else {
                self.lost = Some(Obstacle::Memory);
            }
        }
        if self.lost.is_some() {
            self.ids = Vec::new();
            return;
        }
        if let Some(end) = &mut self.end {
            end.chunks_behind += 1;
        } else if chunk.ends {
            let (ids_before, emitted_before) = (self.ids.len(), self.emitted_bytes);
            self.end = Some(End { ids_before, emitted_before, chunks_behind: 0 });
        }
        self.ids.extend_from_slice(ids);
        self.emitted_bytes += chunk.text_bytes;
    }
}

#[cfg(test)]
mod tests;
