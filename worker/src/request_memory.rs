//! Memory for requests, from their first byte to their answer's end: one budget in two parts. Of one part
//! bodies take as much as has come, and then what is kept of them while they are answered; who finds none is
//! refused at once. Of the other takes who parses, renders and tokenises, a few at a time, as much as that
//! may need: who finds none waits. No request waits with a share of the part that others wait for, so that
//! waits end.
//!
//! What of it one client may have is as at the gateway (`party.rs` of `gateway/clients`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use keyway_clients::client::{Answered, Client};
use keyway_clients::party::{Party, SHARE, SHARE_OF_CONNECTION};
use keyway_text::memory::TOKENIZE_BYTES_EACH;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::limits::{
    PROMPT_BYTES_PER_TOKEN, REQUEST_BYTES, REQUEST_MEMORY_MIN, SHORT_WORK_BYTES_MAX, WORK_AT_ONCE,
    WORK_STEP_BYTES, WORK_WAIT_MAX,
};

/// Of the budget, one part in this many is for bodies.
const BODIES_PART: usize = 4;

/// All that there is.
#[derive(Debug)]
pub(crate) struct RequestMemory {
    bodies: Arc<Bodies>,
    /// In steps of [`WORK_STEP_BYTES`].
    work: Arc<Semaphore>,
    work_bytes: usize,
    turns: Arc<Semaphore>,
}

#[derive(Debug)]
struct Bodies {
    limit: usize,
    taken: AtomicUsize,
}

/// Why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoMemory {
    /// Other requests have it, or had it for as long as this one may wait.
    Busy,
    /// This client's others have its share.
    Share,
    /// There is never so much: bytes that are needed, and all that there are.
    Never(usize, usize),
}

/// What the default comes to with a context of so many tokens: prompts of some length a token can be
/// tokenised.
pub(crate) fn default_bytes(max_model_len: usize) -> usize {
    let work = max_model_len.saturating_mul(PROMPT_BYTES_PER_TOKEN).saturating_mul(TOKENIZE_BYTES_EACH);
    REQUEST_MEMORY_MIN.max(work / (BODIES_PART - 1) * BODIES_PART)
}

impl RequestMemory {
    /// A budget of so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let bodies = bytes / BODIES_PART;
        let steps =
            ((bytes - bodies) / WORK_STEP_BYTES).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self {
            bodies: Arc::new(Bodies { limit: bodies, taken: AtomicUsize::new(0) }),
            work: Arc::new(Semaphore::new(steps)),
            work_bytes: steps * WORK_STEP_BYTES,
            turns: Arc::new(Semaphore::new(WORK_AT_ONCE)),
        }
    }

    /// Room for a request of this client, of whose body nothing has come.
    pub(crate) fn room(&self, client: &Arc<Client>) -> Result<Room, NoMemory> {
        let mut room =
            Room { bodies: Arc::clone(&self.bodies), client: Arc::clone(client), bytes: 0, answered: None };
        room.hold(0)?;
        Ok(room)
    }

    /// Bytes of text that can be tokenised at most.
    pub(crate) fn text_bytes_max(&self) -> usize {
        self.work_bytes / TOKENIZE_BYTES_EACH
    }

    /// The turn of one that takes long, once it is there.
    pub(crate) async fn turn(self: &Arc<Self>) -> Result<Turn, NoMemory> {
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_| NoMemory::Busy)?;
        Ok(Turn { memory: Arc::clone(self), place: Some(turn), work: None, waits: Some(Handle::current()) })
    }

    /// The turn of one that is over soon: it waits for no other turn. `may_wait`: for memory it may.
    pub(crate) fn short_turn(self: &Arc<Self>, may_wait: bool) -> Turn {
        let waits = may_wait.then(Handle::try_current).and_then(Result::ok);
        Turn { memory: Arc::clone(self), place: None, work: None, waits }
    }
}

/// What one request holds besides work; given back on drop.
#[derive(Debug)]
pub(crate) struct Room {
    bodies: Arc<Bodies>,
    client: Arc<Client>,
    bytes: usize,
    /// Once its body has come.
    answered: Option<Answered>,
}

impl Room {
    /// The body has come: from here on the client waits for the worker, not the worker for it.
    pub(crate) fn came(&mut self) {
        self.answered = Some(Answered::to(&self.client));
    }

    /// Makes it as large as so many bytes need, larger or smaller.
    pub(crate) fn hold(&mut self, bytes: usize) -> Result<(), NoMemory> {
        let bytes = (bytes + REQUEST_BYTES).next_multiple_of(REQUEST_BYTES);
        if bytes <= self.bytes {
            self.give_back(self.bytes - bytes);
            self.bytes = bytes;
            return Ok(());
        }
        let (more, limit) = (bytes - self.bytes, self.bodies.limit);
        if bytes > limit {
            return Err(NoMemory::Never(bytes, limit));
        }
        let taken = self
            .bodies
            .taken
            .fetch_update(Relaxed, Relaxed, |taken| Some(taken + more).filter(|taken| *taken <= limit))
            .map_err(|_| NoMemory::Busy)?;
        if self
            .parties()
            .iter()
            .any(|(party, share)| party.bytes() + more > (limit - taken).saturating_mul(*share))
        {
            self.bodies.taken.fetch_sub(more, Relaxed);
            return Err(NoMemory::Share);
        }
        self.parties().iter().for_each(|(party, _)| party.hold(more));
        self.bytes = bytes;
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.parties().iter().for_each(|(party, _)| party.let_go(bytes));
        self.bodies.taken.fetch_sub(bytes, Relaxed);
    }

    fn parties(&self) -> [(&Party, usize); 2] {
        [(self.client.connection(), SHARE_OF_CONNECTION), (self.client.address(), SHARE)]
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

/// One that parses, renders or tokenises, with the memory that it takes meanwhile.
#[derive(Debug)]
pub(crate) struct Turn {
    memory: Arc<RequestMemory>,
    place: Option<OwnedSemaphorePermit>,
    work: Option<OwnedSemaphorePermit>,
    /// Where it waits, if it may: on no thread of the runtime.
    waits: Option<Handle>,
}

impl Turn {
    /// What comes next takes so many bytes; what came before, none any more.
    pub(crate) fn needs(&mut self, bytes: usize) -> Result<(), NoMemory> {
        let memory = &self.memory;
        if self.waits.is_none() && bytes <= SHORT_WORK_BYTES_MAX {
            // Of these there are no more at once than threads of the runtime.
            return Ok(());
        }
        if bytes > memory.work_bytes {
            return Err(NoMemory::Never(bytes, memory.work_bytes));
        }
        self.work = None;
        let steps = bytes.div_ceil(WORK_STEP_BYTES) as u32;
        let work = Arc::clone(&memory.work);
        self.work = Some(match &self.waits {
            None => work.try_acquire_many_owned(steps).map_err(|_| NoMemory::Busy)?,
            Some(runtime) => {
                // A clock is made where the runtime is.
                let acquired =
                    runtime.block_on(async { timeout(WORK_WAIT_MAX, work.acquire_many_owned(steps)).await });
                acquired.map_err(|_| NoMemory::Busy)?.map_err(|_| NoMemory::Busy)?
            }
        });
        Ok(())
    }

    /// Bytes of text that can be tokenised at most.
    pub(crate) fn text_bytes_max(&self) -> usize {
        self.memory.text_bytes_max()
    }

    /// Whether it may take long.
    pub(crate) fn is_long(&self) -> bool {
        self.place.is_some()
    }

    /// The long part is over: others may begin.
    pub(crate) fn over(&mut self) {
        (self.work, self.place) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    const MIB: usize = 1 << 20;

    fn taken(memory: &RequestMemory) -> usize {
        memory.bodies.taken.load(Relaxed)
    }

    #[test]
    fn what_is_held_is_counted_until_it_is_given_back() {
        let memory = RequestMemory::new(40 * MIB);
        let client = Client::alone();
        let mut room = memory.room(&client).unwrap();
        assert_eq!(taken(&memory), REQUEST_BYTES, "the smallest counts");
        assert_eq!(room.hold(2 * MIB), Ok(()));
        assert_eq!(
            (taken(&memory), client.address().bytes()),
            (2 * MIB + REQUEST_BYTES, 2 * MIB + REQUEST_BYTES)
        );
        assert_eq!(room.hold(MIB), Ok(()), "what is kept of it is less");
        assert_eq!(taken(&memory), MIB + REQUEST_BYTES);
        assert_eq!(room.hold(11 * MIB), Err(NoMemory::Never(11 * MIB + REQUEST_BYTES, 10 * MIB)));
        drop(room);
        assert_eq!((taken(&memory), client.connection().bytes()), (0, 0));
    }

    #[test]
    fn one_client_leaves_some_and_all_together_have_no_more_than_there_is() {
        let memory = RequestMemory::new(360 * MIB);
        let fill = |client: &Arc<Client>| {
            let mut rooms = Vec::new();
            loop {
                let mut room = match memory.room(client) {
                    Ok(room) => room,
                    Err(why) => return (rooms, why),
                };
                if let Err(why) = room.hold(MIB) {
                    return (rooms, why);
                }
                rooms.push(room);
            }
        };
        let (greedy, other) = (Client::alone(), Client::alone());
        let (first, why) = fill(&greedy);
        assert_eq!(why, NoMemory::Share);
        let (second, _) = fill(&other);
        assert!(first.len() > 60 && second.len() > 8, "{} and {}", first.len(), second.len());
        assert!(taken(&memory) <= 90 * MIB);
        drop((first, second));
        assert_eq!((taken(&memory), greedy.address().bytes(), other.address().bytes()), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn who_needs_more_than_there_is_waits_and_is_told_when_it_is_too_long() {
        let memory = Arc::new(RequestMemory::new(40 * MIB));
        let mut first = memory.short_turn(false);
        assert_eq!(first.needs(20 * MIB), Ok(()));
        assert_eq!(first.needs(25 * MIB), Ok(()), "what it had counts no more");
        assert_eq!(memory.short_turn(false).needs(SHORT_WORK_BYTES_MAX + 1), Err(NoMemory::Busy));
        assert_eq!(
            memory.short_turn(false).needs(SHORT_WORK_BYTES_MAX),
            Ok(()),
            "of short work little is needed"
        );
        assert_eq!(memory.short_turn(false).needs(31 * MIB), Err(NoMemory::Never(31 * MIB, 30 * MIB)));
        let second = memory.turn().await.unwrap();
        // On a thread that the runtime's paused clock does not wait for.
        let needs = |mut turn: Turn| {
            let (done, result) = oneshot::channel();
            std::thread::spawn(move || drop(done.send((turn.needs(6 * MIB), turn))));
            result
        };
        let (why, second) = needs(second).await.unwrap();
        assert_eq!(why, Err(NoMemory::Busy));
        let waiting = needs(second);
        first.over();
        assert_eq!(waiting.await.unwrap().0, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn only_so_many_take_long_at_once() {
        let memory = Arc::new(RequestMemory::new(40 * MIB));
        let mut turns = Vec::new();
        for _ in 0..WORK_AT_ONCE {
            turns.push(memory.turn().await.unwrap());
        }
        assert!(timeout(WORK_WAIT_MAX, memory.turn()).await.is_err());
        turns[0].over();
        assert!(timeout(WORK_WAIT_MAX, memory.turn()).await.is_ok());
    }

    #[test]
    fn the_default_grows_with_the_context() {
        assert_eq!(default_bytes(32_768), REQUEST_MEMORY_MIN);
        let memory = RequestMemory::new(default_bytes(1 << 20));
        assert!(memory.text_bytes_max() >= PROMPT_BYTES_PER_TOKEN << 20);
    }
}
