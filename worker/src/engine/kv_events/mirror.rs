//! What a follower of all events has come to: the resident blocks in an order in which each could be stored.
//! Kept by the publisher, so that a snapshot costs the engine nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::engine::block_manager::{BlockKey, CacheChange};

/// The resident blocks. As large as the cache has blocks, each with its tokens.
#[derive(Debug, Default)]
pub(super) struct Mirror {
    /// In the order of storing, so parents first.
    stored: BTreeMap<u64, Arc<CacheChange>>,
    places: HashMap<BlockKey, u64>,
    next: u64,
}

impl Mirror {
    pub(super) fn apply(&mut self, change: &CacheChange) {
        if let Some(place) = self.places.remove(&change.block()) {
            self.stored.remove(&place);
        }
        if let CacheChange::Stored { .. } = change {
            self.places.insert(change.block(), self.next);
            self.stored.insert(self.next, Arc::new(change.clone()));
            self.next += 1;
        }
    }

    /// Every block as it was stored, parents first.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Arc<CacheChange>> {
        self.stored.values()
    }
}
