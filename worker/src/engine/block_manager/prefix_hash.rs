//! The 128-bit keyed hash chain that names a prefix within this process. It only finds candidates: what is
//! served is decided by comparing token ids.

use std::hash::Hasher;

use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

/// Names a prefix: all tokens up to a block's end, and the salt.
pub(super) type PrefixHash = u128;

/// Blocks of up to this many ids are hashed in one piece.
const INLINE_IDS: usize = 64;

#[derive(Debug)]
pub(super) struct PrefixHasher {
    seed: u64,
    /// Bits kept; fewer in tests, to have collisions.
    mask: u128,
}

impl PrefixHasher {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, mask: u128::MAX }
    }

    #[cfg(test)]
    pub(super) fn with_bits(seed: u64, bits: u32) -> Self {
        Self { seed, mask: (1 << bits) - 1 }
    }

    /// The empty prefix under `salt`.
    pub(super) fn root(&self, salt: &[u8]) -> PrefixHash {
        xxh3_128_with_seed(salt, self.seed) & self.mask
    }

    /// The prefix `before` with one more block.
    pub(super) fn extend(&self, before: PrefixHash, ids: &[u32]) -> PrefixHash {
        // In one piece, because the streaming form costs several times as much for a block; and a long prompt
        // that waits at the head of the queue is hashed in every step.
        let mut bytes = [0; 16 + 4 * INLINE_IDS];
        let hash = if ids.len() <= INLINE_IDS {
            bytes[..16].copy_from_slice(&before.to_le_bytes());
            for (bytes, id) in bytes[16..].chunks_exact_mut(4).zip(ids) {
                bytes.copy_from_slice(&id.to_le_bytes());
            }
            xxh3_128_with_seed(&bytes[..16 + 4 * ids.len()], self.seed)
        } else {
            let mut hash = Xxh3::with_seed(self.seed);
            hash.update(&before.to_le_bytes());
            for id in ids {
                hash.update(&id.to_le_bytes());
            }
            hash.digest128()
        };
        hash & self.mask
    }
}

/// Hasher for keys that are hashes already: takes their low bits.
#[derive(Debug, Default)]
pub(super) struct HashIsKey(u64);

impl Hasher for HashIsKey {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, hash: u128) {
        self.0 = hash as u64;
    }
}
