//! Prefixes that the engine holds for others, by number: how many there may be, and who holds them. Whoever
//! has a [`Hold`] has its blocks; when the last one is dropped, they are let go.
//!
//! Holds yield to sequences: a running one that needs a block takes the oldest hold's, and so does one that
//! waits while nothing runs. So no hold keeps a request from its end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use tokio::sync::oneshot;

use super::{Engine, EngineHandle, Message};
use crate::engine::block_manager::{Adoption, BlockManager, BlockTable, HeldPrefix};
use crate::limits::{HOLDS_MAX, HOLDS_SHARE};

/// One block's KV on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockKv {
    /// The cache group, a place in `Backend::cache_groups`.
    pub(crate) group: usize,
    /// Which of the prefix's blocks.
    pub(crate) place: usize,
    /// As the backend copies it.
    pub(crate) bytes: Vec<u8>,
}

/// Why the engine did not do what a hold was to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HoldError {
    /// A sequence needed its blocks, all KV was lost, or the engine ended.
    #[error("its blocks are gone")]
    Gone,
    /// The cache has no block for it.
    #[error("no KV block is free")]
    NoRoom,
    /// The backend does not copy KV.
    #[error("the backend does not copy KV")]
    NoCopies,
}

/// A prefix whose blocks the engine holds, until this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    id: u64,
    tokens: Arc<[u32]>,
    salt: Arc<[u8]>,
    inbox: Sender<Message>,
}

impl PartialEq for Hold {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // If the engine is gone, so are its holds.
        drop(self.inbox.send(Message::Hold(Asked::LetGo(self.id))));
    }
}

/// A prefix that is held for KV from elsewhere.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) hold: Hold,
    /// The first place at which a block is missing in a cache group.
    pub(crate) first: usize,
    /// Leading tokens that the prompt would find cached without anything from elsewhere.
    pub(crate) local_tokens: usize,
}

/// What a request has of KV that came from elsewhere.
#[derive(Debug, Clone)]
pub(crate) struct Imported {
    /// Leading tokens that were cached here before.
    pub(crate) local_tokens: usize,
    /// Whether what came was found in another worker's cache, rather than computed for this request.
    pub(crate) was_cached: bool,
    /// Keeps it until the request is admitted.
    _hold: Arc<Hold>,
}

impl Imported {
    /// What is held, of which so many leading tokens were cached here before. The rest was computed for it
    /// elsewhere.
    pub(crate) fn new(hold: Hold, local_tokens: usize) -> Self {
        Self { local_tokens, was_cached: false, _hold: Arc::new(hold) }
    }

    /// The rest was cached elsewhere.
    pub(crate) fn cached_there(self) -> Self {
        Self { was_cached: true, ..self }
    }
}

/// Makes holds in an engine.
#[derive(Debug, Clone)]
pub(crate) struct Holder(pub(super) Sender<Message>);

/// What the engine is asked to do with held prefixes.
#[derive(Debug)]
pub(super) enum Asked {
    Begin { tokens: Vec<u32>, salt: Arc<[u8]>, holder: Holder, reply: oneshot::Sender<Option<Begun>> },
    Find { tokens: Vec<u32>, salt: Arc<[u8]>, holder: Holder, reply: oneshot::Sender<Option<Hold>> },
    Copy { id: u64, places: Range<usize>, reply: oneshot::Sender<Result<Vec<BlockKv>, HoldError>> },
    Adopt { id: u64, blocks: Vec<BlockKv>, reply: oneshot::Sender<Result<(), HoldError>> },
    LetGo(u64),
}

impl Hold {
    #[cfg(test)]
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The prefix's tokens, of whole blocks.
    pub(crate) fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }

    /// What separates the prefix from equal ones of others.
    pub(crate) fn salt(&self) -> &[u8] {
        &self.salt
    }

    /// The KV at these places, by place and then by group.
    pub(crate) async fn copy(&self, places: Range<usize>) -> Result<Vec<BlockKv>, HoldError> {
        self.ask(|reply| Asked::Copy { id: self.id, places, reply }).await
    }

    /// Takes KV in, in that order; what is there already is left as it is.
    pub(crate) async fn adopt(&self, blocks: Vec<BlockKv>) -> Result<(), HoldError> {
        self.ask(|reply| Asked::Adopt { id: self.id, blocks, reply }).await
    }

    async fn ask<T>(
        &self,
        asked: impl FnOnce(oneshot::Sender<Result<T, HoldError>>) -> Asked,
    ) -> Result<T, HoldError> {
        let (reply, answer) = oneshot::channel();
        self.inbox.send(Message::Hold(asked(reply))).map_err(|_| HoldError::Gone)?;
        answer.await.unwrap_or(Err(HoldError::Gone))
    }
}

impl EngineHandle {
    /// Holds what is cached of a prefix of whole blocks, for KV that comes from elsewhere. `None` where too
    /// much is held, or the engine is gone.
    pub(crate) async fn begin_import(&self, tokens: Vec<u32>, salt: Arc<[u8]>) -> Option<Begun> {
        let (reply, begun) = oneshot::channel();
        let holder = Holder(self.inbox.clone());
        self.inbox.send(Message::Hold(Asked::Begin { tokens, salt, holder, reply })).ok()?;
        begun.await.ok()?
    }

    /// Holds the longest cached part of a prompt that can be gone on from. `None` where there is none, too
    /// much is held, or the engine is gone.
    pub(crate) async fn find_cached(&self, prompt: Vec<u32>, salt: Arc<[u8]>) -> Option<Hold> {
        let (reply, found) = oneshot::channel();
        let holder = Holder(self.inbox.clone());
        self.inbox.send(Message::Hold(Asked::Find { tokens: prompt, salt, holder, reply })).ok()?;
        found.await.ok()?
    }
}

/// The held prefixes of an engine.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    held: BTreeMap<u64, HeldPrefix>,
    /// Blocks that they may come to.
    blocks: usize,
    next: u64,
}

impl Holds {
    /// Blocks that are held, or are to be.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The tables of all holds, each with the number of positions that it is for.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (&BlockTable, usize)> {
        self.held.values().map(HeldPrefix::checked)
    }

    fn has_room(&self, blocks: &BlockManager, tokens: usize) -> bool {
        let wanted = self.blocks + blocks.held_blocks(tokens);
        self.held.len() < HOLDS_MAX && wanted <= blocks.num_blocks() / HOLDS_SHARE
    }

    fn add(&mut self, blocks: &BlockManager, held: HeldPrefix, salt: &Arc<[u8]>, holder: Holder) -> Hold {
        let (id, tokens) = (self.next, Arc::clone(held.tokens()));
        self.next += 1;
        self.blocks += blocks.held_blocks(tokens.len());
        self.held.insert(id, held);
        Hold { id, tokens, salt: Arc::clone(salt), inbox: holder.0 }
    }

    /// Holds what of a prompt can be gone on from; `None` where too much is held.
    pub(crate) fn keep(
        &mut self,
        blocks: &mut BlockManager,
        (prompt, salt): (&[u32], &Arc<[u8]>),
        holder: Holder,
    ) -> Option<Hold> {
        let tokens = blocks.usable_prefix(prompt, salt);
        if !self.has_room(blocks, tokens) {
            return None;
        }
        let held = blocks.hold_prefix(&prompt[..tokens], salt);
        Some(self.add(blocks, held, salt, holder))
    }

    /// Lets go of one; of one that is gone nothing is to be done.
    fn let_go(&mut self, blocks: &mut BlockManager, id: u64) {
        if let Some(held) = self.held.remove(&id) {
            self.blocks -= blocks.held_blocks(held.tokens().len());
            blocks.let_go_prefix(held);
        }
    }

    /// Lets go of the oldest one; false if there is none.
    pub(crate) fn drop_oldest(&mut self, blocks: &mut BlockManager) -> bool {
        let oldest = self.held.first_key_value().map(|(id, _)| *id);
        if let Some(id) = oldest {
            self.let_go(blocks, id);
        }
        oldest.is_some()
    }

    /// Forgets all, without a word to the block manager, which has forgotten its tables.
    pub(crate) fn forget(&mut self) {
        self.held.clear();
        self.blocks = 0;
    }
}

impl Engine {
    pub(super) fn hold(&mut self, asked: Asked) {
        // Who asked may be gone; then what was made for it is let go by its drop.
        match asked {
            Asked::Begin { tokens, salt, holder, reply } => {
                let _ = reply.send(self.begin(&tokens, &salt, holder));
            }
            Asked::Find { tokens, salt, holder, reply } => {
                let (holds, blocks) = self.scheduler.holds_mut();
                let found = holds.keep(blocks, (&tokens, &salt), holder);
                let _ = reply.send(found.filter(|hold| !hold.tokens().is_empty()));
            }
            Asked::Copy { id, places, reply } => {
                let _ = reply.send(self.copy_held(id, places));
            }
            Asked::Adopt { id, blocks, reply } => {
                let done = self.adopt(id, blocks);
                // Who goes on has its blocks announced.
                self.tell_changes();
                let _ = reply.send(done);
            }
            Asked::LetGo(id) => {
                let (holds, blocks) = self.scheduler.holds_mut();
                holds.let_go(blocks, id);
            }
        }
        self.record_state();
    }

    fn begin(&mut self, tokens: &[u32], salt: &Arc<[u8]>, holder: Holder) -> Option<Begun> {
        let (holds, blocks) = self.scheduler.holds_mut();
        if !holds.has_room(blocks, tokens.len()) {
            return None;
        }
        let held = blocks.hold_prefix(tokens, salt);
        let (first, local_tokens) = (held.first_missing(), blocks.usable_tokens(&held));
        Some(Begun { hold: holds.add(blocks, held, salt, holder), first, local_tokens })
    }

    fn copy_held(&mut self, id: u64, places: Range<usize>) -> Result<Vec<BlockKv>, HoldError> {
        let (holds, _) = self.scheduler.holds_mut();
        let held = holds.held.get(&id).ok_or(HoldError::Gone)?;
        let copy = |(group, place, block)| {
            let mut bytes = Vec::new();
            self.backend.copy_block(group, block, &mut bytes).map_err(|_| HoldError::NoCopies)?;
            Ok(BlockKv { group, place, bytes })
        };
        held.blocks(places).map(copy).collect()
    }

    fn adopt(&mut self, id: u64, kv: Vec<BlockKv>) -> Result<(), HoldError> {
        let (holds, blocks) = self.scheduler.holds_mut();
        let held = holds.held.get_mut(&id).ok_or(HoldError::Gone)?;
        for BlockKv { group, place, bytes } in kv {
            match blocks.adopt(held, group, place) {
                Adoption::There => {}
                Adoption::Refused => return Err(HoldError::NoRoom),
                Adoption::At(block) if self.backend.write_block(group, block, &bytes).is_ok() => {
                    blocks.adopted(held, group, block);
                }
                Adoption::At(block) => {
                    blocks.abandon(block);
                    return Err(HoldError::NoCopies);
                }
            }
        }
        Ok(())
    }
}
