//! A worker's cache is as many tokens as it says, whatever its blocks have.

use std::{num::NonZeroUsize, sync::Arc};

use keyway_core::{index::WorkerId, pick::Policy};
use keyway_wire::block_hash::{BlockHash, HashKey};

use super::*;
use crate::{
    clock::Clock,
    fleet::{Fleet, ejection::Ejections},
    limits::BLOCK_TOKENS,
    metrics::Metrics,
    prompt::request::KeyerConfig,
};

/// Tokens of the cache: whole blocks of each size that is tried.
const CACHE_TOKENS: u64 = 528 * 256;

fn router() -> (Arc<Router>, Arc<Worker>) {
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() };
    let configs = ["http://127.0.0.1:1".parse().unwrap()];
    let fleet = Fleet::new(&configs, Duration::ZERO, &Ejections::new(Clock::start(), None));
    let (worker, metrics) = (Arc::clone(&fleet.all()[0]), Arc::new(Metrics::new().unwrap()));
    (Arc::new(Router::new(Arc::new(fleet), metrics, Clock::start(), Policy::Prefix, keyer, 64 << 20)), worker)
}

fn cache(block_size: u32) -> CacheConfig {
    CacheConfig { block_size: Some(block_size), blocks: Some(CACHE_TOKENS / u64::from(block_size)) }
}

/// Twice as many blocks are sent there, and accepted, as `blocks`.
fn overfill(router: &Router, id: WorkerId, blocks: u64, first: u64) {
    for start in (first..first + 2 * blocks).step_by(128) {
        let chain: Vec<_> = (start..start + 128).map(BlockHash).collect();
        router.index().with(|index| drop(index.place(id, &chain)));
    }
}

#[test]
fn a_cache_holds_as_many_tokens_by_text_and_by_its_own_blocks_whatever_these_have() {
    for block_size in [1, 16, 64, 528] {
        let (router, worker) = router();
        router.cache_is(&worker, cache(block_size));
        overfill(&router, worker.id, CACHE_TOKENS / u64::from(BLOCK_TOKENS), 1);
        assert_eq!(router.cached_tokens(&worker), CACHE_TOKENS, "by text, blocks of {block_size}");
        let own = worker.residency.token_id;
        overfill(&router, own, CACHE_TOKENS / u64::from(block_size), 1 << 32);
        let of = |id: WorkerId| router.index().with(|index| index.resident(id)) as u64;
        assert_eq!(of(own) * u64::from(block_size), CACHE_TOKENS, "by blocks of {block_size}");
        assert_eq!(of(worker.id) * u64::from(BLOCK_TOKENS), CACHE_TOKENS, "what is there by text stays");
        // An answer that shows that less is there makes both smaller.
        worker.residency.capacity.lock().observe(100_000, 0, 16, CACHE_TOKENS);
        router.index().with(|index| router.bound_cache(&worker, index));
        let tokens = worker.residency.capacity.lock().tokens().unwrap();
        let most = |block: u64| tokens / block;
        assert_eq!((of(own), of(worker.id)), (most(block_size.into()), most(BLOCK_TOKENS.into())));
    }
}

#[test]
fn a_cache_whose_events_are_trusted_says_its_size_and_is_not_held_to_it() {
    for trusted_first in [true, false] {
        let (router, worker) = router();
        let (residency, own) = (&worker.residency, worker.residency.token_id);
        let trust = || {
            residency.announce_block_size(64);
            residency.set_trusted(true);
            router.index().with(|index| {
                index.set_exact(own, true);
                router.bound_cache(&worker, index);
            });
        };
        if trusted_first {
            trust();
        }
        router.cache_is(&worker, cache(16));
        if !trusted_first {
            trust();
        }
        assert_eq!(residency.capacity.lock().tokens(), Some(CACHE_TOKENS), "{trusted_first}");
        assert_eq!(residency.block_size(), 64, "its events know better");
        let blocks = 2 * CACHE_TOKENS / 64;
        let stored = |block: u64| router.index().with(|index| index.store_block(own, None, BlockHash(block)));
        assert!((1..=blocks).all(stored));
        assert_eq!(router.cached_tokens(&worker), 2 * CACHE_TOKENS);
    }
}
