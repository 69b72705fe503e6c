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

    /// What hashes the blocks of this chain by themselves. To be asked for before the first block.
    pub fn digests(self) -> Digests {
        Digests::new(self.0)
    }

    /// As [`Chain::push`], for a block whose digest is known. Gives other names than that.
    pub const fn push_digest(&mut self, digest: u64) -> BlockHash {
        // Each step is a bijection of the digest and of the state, so no two prefixes meet but by their digests; the rest is xxh3's
        // own last step, by which each bit of either reaches all bits of the name.
        let mut state = self.0.rotate_left(29).wrapping_mul(STATE_FACTOR) ^ digest;
        state ^= state >> 37;
        state = state.wrapping_mul(AVALANCHE_FACTOR);
        self.0 = state ^ (state >> 32);
        BlockHash(self.0)
    }
}

/// Keeps state and digest from meeting as equals: 2^64 divided by the golden ratio, odd.
const STATE_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
/// xxh3's factor in its last step (`XXH3_avalanche` of github `Cyan4973/xxHash`).
const AVALANCHE_FACTOR: u64 = 0x1656_6791_9E37_79F9;

/// The length of blocks that is hashed fastest: the default one.
const USUAL_BLOCK_BYTES: usize = 64;
const USUAL_BLOCK_WORDS: usize = USUAL_BLOCK_BYTES / size_of::<u64>();

/// Hashes blocks by themselves, under the secret of their chain: no block's hash waits for that of the block before it, so a
/// processor works on several at a time, and the chain takes one short step for each.
///
/// Of the usual length it is the sum of 128-bit products, folded, of words that each are hidden by a word of the secret, as xxh3 takes
/// blocks up to 128 bytes (`XXH3_mix16B` of github `Cyan4973/xxHash`); of others xxh3.
#[derive(Clone, Copy)]
pub struct Digests([u64; USUAL_BLOCK_WORDS]);

impl Digests {
    fn new(seed: u64) -> Self {
        // SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
        let word = |i: usize| {
            let mut word = seed.wrapping_add(STATE_FACTOR.wrapping_mul(i as u64 + 1));
            word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            word ^ (word >> 31)
        };
        Self(std::array::from_fn(word))
    }

    /// A block's.
    #[inline]
    pub fn of(&self, block: &[u8]) -> u64 {
        let (words, []) = block.as_chunks::<{ size_of::<u64>() }>() else { return self.of_other(block) };
        let Ok(words) = <&[_; USUAL_BLOCK_WORDS]>::try_from(words) else { return self.of_other(block) };
        let hidden = |i: usize| u64::from_le_bytes(words[i]) ^ self.0[i];
        let folded = |i: usize| {
            let product = u128::from(hidden(i)) * u128::from(hidden(i + 1));
            product as u64 ^ (product >> 64) as u64
        };
        folded(0).wrapping_add(folded(2)).wrapping_add(folded(4)).wrapping_add(folded(6))
    }

    #[inline(never)]
    fn of_other(&self, block: &[u8]) -> u64 {
        xxh3_64_with_seed(block, self.0[0])
    }
}

impl std::fmt::Debug for Digests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Digests(secret)")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The names of a chain, pushed whole, and by digests.
    fn chains(key: u64, salt: &[u8], blocks: &[Vec<u8>]) -> [Vec<BlockHash>; 2] {
        let (mut chain, mut by_digest) =
            (Chain::new(HashKey::new(key), salt), Chain::new(HashKey::new(key), salt));
        let digests = by_digest.digests();
        [
            blocks.iter().map(|block| chain.push(block)).collect(),
            blocks.iter().map(|block| by_digest.push_digest(digests.of(block))).collect(),
        ]
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
            for (ha, hb) in chains(7, b"", &a).into_iter().zip(chains(7, b"", &b)) {
                prop_assert_eq!(&ha[..cut], &hb[..cut]);
                for i in cut..a.len() {
                    prop_assert_ne!(ha[i], hb[i]);
                }
            }
        }

        #[test]
        fn another_key_or_salt_shares_nothing(blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 16), 1..8)) {
            let base = chains(1, b"a", &blocks);
            for other in [chains(2, b"a", &blocks), chains(1, b"b", &blocks)] {
                for (base, other) in base.iter().flatten().zip(other.iter().flatten()) {
                    prop_assert_ne!(base, other);
                }
            }
        }

        /// What a chain of single steps could lose: the order of blocks, and how many there are.
        #[test]
        fn order_and_number_of_blocks_count(blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 64), 2..6)) {
            let same = vec![blocks[0].clone(); 64];
            for names in chains(3, b"", &same) {
                let distinct: std::collections::HashSet<_> = names.iter().collect();
                prop_assert_eq!(distinct.len(), names.len());
            }
            let mut turned = blocks.clone();
            turned.swap(0, 1);
            if blocks[0] != blocks[1] {
                for (a, b) in chains(3, b"", &blocks).into_iter().zip(chains(3, b"", &turned)) {
                    prop_assert!(a.iter().zip(&b).all(|(a, b)| a != b));
                }
            }
        }
    }

    #[test]
    fn a_block_s_digest_is_secret_too() {
        let digest = |key: u64, salt: &[u8]| Chain::new(HashKey::new(key), salt).digests().of(&[b'a'; 64]);
        assert_ne!(digest(1, b""), digest(2, b""));
        assert_ne!(digest(1, b"a"), digest(1, b"b"));
        let digests = Chain::new(HashKey::new(1), b"").digests();
        assert_eq!(format!("{digests:?}"), "Digests(secret)");
    }

    /// Half of a name's bits change with any bit of the block or of the state before it, within what chance allows.
    #[test]
    fn each_bit_reaches_all_of_the_name() {
        let digests = Chain::new(HashKey::new(9), b"").digests();
        let name = |state: u64, block: &[u8]| Chain(state).push_digest(digests.of(block)).0;
        let (block, states) = ([b'a'; 64], [0, 1, u64::MAX, 0x0123_4567_89ab_cdef]);
        let mut changed = [0_u32; 64];
        let mut tries = 0;
        for state in states {
            let base = name(state, &block);
            let by_block = (0..64 * 8).map(|bit| {
                let mut other = block;
                other[bit / 8] ^= 1 << (bit % 8);
                name(state, &other)
            });
            for other in by_block.chain((0..64).map(|bit| name(state ^ 1 << bit, &block))) {
                tries += 1;
                (0..64).for_each(|bit| changed[bit] += ((base ^ other) >> bit & 1) as u32);
            }
        }
        let share = changed.map(|changed| f64::from(changed) / f64::from(tries));
        assert!(share.iter().all(|share| (0.44..0.56).contains(share)), "{share:?} of {tries}");
    }

    #[test]
    fn the_key_is_not_printable() {
        assert_eq!(format!("{:?}", HashKey::new(12345)), "HashKey(secret)");
    }
}
