//! The chained hash that names a prefix: block `i`'s hash covers blocks `0..=i`, so equal hashes mean equal
//! prefixes (a collision costs time, never correctness). What the bytes of a block are is the keyer's business.
//!
//! Keyed: who does not know the key cannot make two prompts collide or guess another tenant's hashes. The salt
//! of the tenant seeds the chain, so tenants never share a hash.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Names one prefix: all blocks up to and including the one it was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// Secret of a gateway's hashes. Gateways that share a snapshot or a store share it.
#[derive(Clone, Copy)]
pub struct HashKey(u64);

impl HashKey {
    /// A key from 64 random bits.
    pub const fn new(bits: u64) -> Self {
        Self(bits)
    }

    /// Its bits, for a process that is to make the same hashes. Keep them as secret as the key.
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// The key whose bits these are.
    pub const fn of_bytes(bits: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(bits))
    }

    /// A key from the bytes of a key file.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(xxh3_64_with_seed(bytes, 0x6b65_7977_6179))
    }
}

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashKey(secret)")
    }
}

/// State of one chain: the hash of everything pushed so far.
#[derive(Debug, Clone, Copy)]
pub struct Chain(u64);

impl Chain {
    /// Starts a chain for one tenant's `salt` (empty: the shared space).
    pub fn new(key: HashKey, salt: &[u8]) -> Self {
        Self(xxh3_64_with_seed(salt, key.0))
    }

    /// Goes on from the prefix that `hash` names.
    pub const fn after(hash: BlockHash) -> Self {
        Self(hash.0)
    }

    /// Appends one block and returns the name of the prefix that ends with it.
    pub fn push(&mut self, block: &[u8]) -> BlockHash {
        self.0 = xxh3_64_with_seed(block, self.0);
        BlockHash(self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chain(key: u64, salt: &[u8], blocks: &[Vec<u8>]) -> Vec<BlockHash> {
        let mut chain = Chain::new(HashKey::new(key), salt);
        blocks.iter().map(|b| chain.push(b)).collect()
    }

    proptest! {
        #[test]
        fn equal_hash_exactly_where_the_prefix_is_equal(
            a in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..80), 1..20),
            cut in any::<prop::sample::Index>(),
        ) {
            let cut = cut.index(a.len());
            let mut b = a.clone();
            b[cut][0] ^= 1;
            let (ha, hb) = (chain(7, b"", &a), chain(7, b"", &b));
            prop_assert_eq!(&ha[..cut], &hb[..cut]);
            for i in cut..a.len() {
                prop_assert_ne!(ha[i], hb[i]);
            }
        }

        #[test]
        fn another_key_or_salt_shares_nothing(blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 16), 1..8)) {
            let base = chain(1, b"a", &blocks);
            for (i, h) in base.iter().enumerate() {
                prop_assert_ne!(*h, chain(2, b"a", &blocks)[i]);
                prop_assert_ne!(*h, chain(1, b"b", &blocks)[i]);
            }
        }
    }

    #[test]
    fn the_key_is_not_printable() {
        assert_eq!(format!("{:?}", HashKey::new(12345)), "HashKey(secret)");
    }
}
