//! How many bytes of request bodies the gateway holds at once: as they come, and until the answer to them has
//! ended, whatever they came as. Small bodies are bounded by their number; of larger ones each piece is asked
//! for before it is kept. As of places, one tenant, address or connection has its share (`party.rs`).

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use bytes::Bytes;
use prometheus::IntGauge;

use crate::{
    access::{admission::parties, tenants::Visit},
    client::Client,
    error::Error,
    limits::{BODY_FREE_BYTES, BODY_STEP_BYTES, GIVEN_BACK_INLINE_BYTES},
    machine::threads,
    party::Party,
    prompt::token_keyer::PromptMemory,
};

/// All that may be held.
#[derive(Debug, Clone)]
pub struct BodyMemory(Arc<All>);

#[derive(Debug)]
struct All {
    limit: AtomicUsize,
    taken: AtomicUsize,
    gauge: IntGauge,
    prompts: PromptMemory,
}

impl BodyMemory {
    /// At most `limit` bytes at once, counted in `gauge`.
    pub fn new(limit: usize, gauge: IntGauge) -> Self {
        let prompts = PromptMemory::beside(limit);
        Self(Arc::new(All { limit: limit.into(), taken: 0.into(), gauge, prompts }))
    }

    /// Another limit from now on; what is held stays.
    pub fn set_limit(&self, limit: usize) {
        self.0.limit.store(limit, Relaxed);
        self.0.prompts.set_beside(limit);
    }

    /// What its prompts may take while they are tokenised.
    pub fn prompts(&self) -> PromptMemory {
        self.0.prompts.clone()
    }

    /// Room for one request's body, of which there is none yet.
    pub fn room(&self, client: &Arc<Client>, visit: Option<Arc<Visit>>) -> Room {
        Room { all: Arc::clone(&self.0), client: Arc::clone(client), visit, bytes: 0 }
    }
}

/// What one request's body takes; given back on drop.
#[derive(Debug)]
pub struct Room {
    all: Arc<All>,
    client: Arc<Client>,
    visit: Option<Arc<Visit>>,
    bytes: usize,
}

impl Room {
    /// Makes it large enough for so many bytes in all, or says why they may not be kept.
    pub fn hold(&mut self, bytes: usize) -> Result<(), Error> {
        if bytes <= self.bytes.max(BODY_FREE_BYTES) {
            return Ok(());
        }
        let more = (bytes - self.bytes).next_multiple_of(BODY_STEP_BYTES);
        let limit = self.all.limit.load(Relaxed);
        let taken = self
            .all
            .taken
            .fetch_update(Relaxed, Relaxed, |taken| Some(taken + more).filter(|taken| *taken <= limit))
            .map_err(|_| Error::BodyMemory { of: None })?;
        let refused = self.parties().into_iter().find(|(party, _, share)| {
            let may_have = (limit - taken).saturating_mul(*share);
            party.bytes() + more > may_have
        });
        if let Some((_, of, _)) = refused {
            self.all.taken.fetch_sub(more, Relaxed);
            return Err(Error::BodyMemory { of: Some(of) });
        }
        self.all.gauge.add(more as i64);
        self.parties().iter().for_each(|(party, ..)| party.hold(more));
        self.bytes += more;
        Ok(())
    }

    /// Ties it to the bytes that it is for; to small ones there is nothing to tie.
    pub fn tied_to(self, bytes: Bytes) -> Bytes {
        if self.bytes == 0 { bytes } else { Bytes::from_owner(Held(Some((bytes, self)))) }
    }

    fn parties(&self) -> [(&Party, &'static str, usize); 2] {
        parties(&self.client, self.visit.as_deref())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.parties().iter().for_each(|(party, ..)| party.let_go(self.bytes));
            self.all.taken.fetch_sub(self.bytes, Relaxed);
            self.all.gauge.sub(self.bytes as i64);
        }
    }
}

/// Bytes with their room, which is given back after them.
struct Held(Option<(Bytes, Room)>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |(bytes, _)| bytes)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The system takes some milliseconds to take back tens of megabytes.
        if let Some((bytes, room)) = self.0.take_if(|(bytes, _)| bytes.len() > GIVEN_BACK_INLINE_BYTES)
            && let Some(threads) = threads::large_bodies()
        {
            threads.later(move || {
                drop(bytes);
                drop(room);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn memory(limit: usize) -> (BodyMemory, IntGauge) {
        let gauge = IntGauge::new("g", "g").unwrap();
        (BodyMemory::new(limit, gauge.clone()), gauge)
    }

    #[test]
    fn what_is_held_is_counted_until_its_last_copy_is_gone() {
        let (memory, gauge) = memory(10 * MIB);
        let client = Client::alone();
        let mut small = memory.room(&client, None);
        assert_eq!((small.hold(BODY_FREE_BYTES), gauge.get()), (Ok(()), 0));
        let mut room = memory.room(&client, None);
        assert_eq!(room.hold(BODY_FREE_BYTES + 1), Ok(()));
        assert_eq!(gauge.get() as usize, BODY_STEP_BYTES, "it counts whole once it is large");
        assert_eq!((room.hold(2 * MIB), gauge.get() as usize), (Ok(()), 2 * MIB));
        assert_eq!((room.hold(MIB), gauge.get() as usize), (Ok(()), 2 * MIB));
        let bytes = room.tied_to(Bytes::from(vec![7; 2 * MIB]));
        let part = bytes.slice(5..9);
        drop(bytes);
        assert_eq!((&part[..], gauge.get() as usize), (&[7; 4][..], 2 * MIB));
        drop(part);
        // Another thread gives it back.
        while gauge.get() > 0 {
            std::thread::yield_now();
        }
        assert_eq!((client.address().bytes(), client.connection().bytes()), (0, 0));
    }

    #[test]
    fn one_party_leaves_some_and_nobody_has_more_than_there_is() {
        let (memory, gauge) = memory(90 * MIB);
        let fill = |client: &Arc<Client>| {
            let rooms = std::iter::from_fn(|| {
                let mut room = memory.room(client, None);
                room.hold(MIB).ok().map(|()| room)
            });
            rooms.take(100).collect::<Vec<_>>()
        };
        let (greedy, other) = (Client::alone(), Client::alone());
        let held = [fill(&greedy), fill(&other)];
        assert!(held[0].len() == 72 && held[1].len() > 9, "{:?}", held.each_ref().map(Vec::len));
        assert!(gauge.get() as usize <= 90 * MIB);
        let refused = memory.room(&greedy, None).hold(MIB);
        assert!(matches!(refused, Err(Error::BodyMemory { of: Some(_) })), "{refused:?}");
        assert_eq!(memory.room(&other, None).hold(91 * MIB), Err(Error::BodyMemory { of: None }));
        // What was refused leaves nothing behind.
        let before = gauge.get();
        drop(held);
        assert!(before > 0);
        assert_eq!((gauge.get(), greedy.address().bytes(), other.connection().bytes()), (0, 0, 0));
    }
}
