//! The chained hash that names a prefix: block `i`'s hash covers blocks `0..=i`, so equal hashes mean equal
//! prefixes (a collision costs time, never correctness). What the bytes of a block are is the keyer's
//! business.
//!
//! Keyed: who does not know the key cannot make two prompts collide or guess another tenant's hashes. The
//! salt of the tenant seeds the chain, so tenants never share a hash.

use std::{hint::black_box, num::NonZeroUsize};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::spans::{SINGLE, width_before, width_behind};

/// Names one prefix: all blocks up to and including the one it was made for. Its upper bits say how many
/// blocks it counts for ([`BlockHash::blocks`]).
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

/// State of one chain: the hash of everything appended so far.
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
        let name = BlockHash::spanning(self.hash(block), 1, false);
        self.0 = name.0;
        name
    }

    /// Appends what is no block of a prompt and returns the hash of everything so far, all of whose bits are
    /// as good.
    pub fn hash(&mut self, bytes: &[u8]) -> u64 {
        self.0 = xxh3_64_with_seed(bytes, self.0);
        self.0
    }
}

/// The length of blocks that is hashed fastest: the default one.
const USUAL_BLOCK_BYTES: usize = 64;
const USUAL_BLOCK_WORDS: usize = USUAL_BLOCK_BYTES / size_of::<u64>();

/// Keeps state and digest from meeting as equals: 2^64 divided by the golden ratio, odd.
const STATE_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
/// xxh3's factor in its last step (`XXH3_avalanche` of github `Cyan4973/xxHash`).
const AVALANCHE_FACTOR: u64 = 0x1656_6791_9E37_79F9;

/// A chain over the blocks of one long text. It hashes each block by itself, under a secret of the chain, and
/// takes one short step for it: nothing but that step waits for the block before, so a processor works on
/// several blocks at a time. Gives other names than [`Chain`], and only at the ends of spans
/// ([`crate::spans`]).
///
/// A block of the usual length is hashed to the sum of 128-bit products, folded, of words that each are
/// hidden by a word of the secret, as xxh3 takes blocks up to 128 bytes (`XXH3_mix16B` of github
/// `Cyan4973/xxHash`); others by xxh3.
#[derive(Clone)]
pub struct TextChain {
    state: u64,
    secret: Secret,
    /// Blocks that were appended so far.
    blocks: usize,
    /// Where the span ends that is under way: further on.
    end: usize,
}

type Secret = [u64; USUAL_BLOCK_WORDS];

impl TextChain {
    /// Starts a chain for one tenant's `salt` (empty: the shared space).
    pub fn new(key: HashKey, salt: &[u8]) -> Self {
        let Chain(seed) = Chain::new(key, salt);
        // SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
        let word = |i: usize| {
            let mut word = seed.wrapping_add(STATE_FACTOR.wrapping_mul(i as u64 + 1));
            word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            word ^ (word >> 31)
        };
        Self { state: seed, secret: std::array::from_fn(word), blocks: 0, end: width_behind(0) }
    }

    /// How many blocks were appended so far.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Appends one block. If a span ends with it, returns the name of the prefix up to there.
    pub fn push(&mut self, block: &[u8]) -> Option<BlockHash> {
        let usual = block.try_into();
        let digest =
            usual.map_or_else(|_| digest_of_any(&self.secret, block), |block| digest(&self.secret, block));
        self.state = step(self.state, digest);
        self.passed(1)
    }

    /// Appends all whole blocks of `bytes`, of so many bytes each, and returns what is left of it.
    pub fn push_all<'a>(
        &mut self,
        bytes: &'a [u8],
        block_bytes: NonZeroUsize,
        names: &mut Vec<BlockHash>,
    ) -> &'a [u8] {
        if block_bytes.get() == USUAL_BLOCK_BYTES {
            let (blocks, rest) = bytes.as_chunks();
            self.push_usual(blocks, names);
            return rest;
        }
        let blocks = bytes.chunks_exact(block_bytes.get());
        let rest = blocks.remainder();
        names.extend(blocks.filter_map(|block| self.push(block)));
        rest
    }

    /// State and secret are its own while it is at it, so they stay in registers: words of the secret read
    /// beside each other are otherwise taken as vectors where there is AVX2, whose halves then have to be
    /// taken apart (a fifth more time).
    #[inline(never)]
    fn push_usual(&mut self, mut blocks: &[[u8; USUAL_BLOCK_BYTES]], names: &mut Vec<BlockHash>) {
        let (mut state, secret) = (self.state, self.secret.map(black_box));
        // Blocks that have a name each, all at once.
        let single;
        (single, blocks) = blocks.split_at(blocks.len().min(SINGLE.saturating_sub(self.blocks)));
        names.extend(single.iter().map(|block| {
            state = step(state, digest(&secret, block));
            name(state, 1, 1)
        }));
        if !single.is_empty() {
            self.blocks += single.len();
            self.end = self.blocks + width_behind(self.blocks);
        }
        while !blocks.is_empty() {
            let (span, behind) = blocks.split_at(blocks.len().min(self.end - self.blocks));
            for block in span {
                state = step(state, digest(&secret, block));
            }
            self.state = state;
            names.extend(self.passed(span.len()));
            blocks = behind;
        }
        self.state = state;
    }

    /// Counts blocks, of which no more are given than the span has left.
    #[inline]
    fn passed(&mut self, blocks: usize) -> Option<BlockHash> {
        self.blocks += blocks;
        if self.blocks < self.end {
            return None;
        }
        let (width, next) = (width_before(self.end), width_behind(self.end));
        self.end += next;
        Some(name(self.state, width, next))
    }
}

#[inline]
fn step(state: u64, digest: u64) -> u64 {
    // A bijection of the digest and of the state, so no two prefixes meet but by their digests. The next
    // block waits for this alone.
    state.rotate_left(29).wrapping_mul(STATE_FACTOR) ^ digest
}

/// By xxh3's own last step each bit of the state reaches all bits of the name. Its span is so wide, and the
/// next one.
#[inline]
fn name(state: u64, width: usize, next: usize) -> BlockHash {
    let name = (state ^ (state >> 37)).wrapping_mul(AVALANCHE_FACTOR);
    BlockHash::spanning(name ^ (name >> 32), width as u32, width > 1 && next > width)
}

#[inline]
fn digest(secret: &Secret, block: &[u8; USUAL_BLOCK_BYTES]) -> u64 {
    let (words, _) = block.as_chunks::<{ size_of::<u64>() }>();
    let hidden = |i: usize| u64::from_le_bytes(words[i]) ^ secret[i];
    let folded = |i: usize| {
        let product = u128::from(hidden(i)) * u128::from(hidden(i + 1));
        product as u64 ^ (product >> 64) as u64
    };
    folded(0).wrapping_add(folded(2)).wrapping_add(folded(4)).wrapping_add(folded(6))
}

#[inline(never)]
fn digest_of_any(secret: &Secret, block: &[u8]) -> u64 {
    xxh3_64_with_seed(block, secret[0])
}

impl std::fmt::Debug for TextChain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TextChain(secret)")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spans::{COUNT_BITS, Spans};

    /// The names that each kind of chain gives to few blocks.
    fn chains(key: u64, salt: &[u8], blocks: &[Vec<u8>]) -> [Vec<BlockHash>; 2] {
        let mut chain = Chain::new(HashKey::new(key), salt);
        let mut of_text = TextChain::new(HashKey::new(key), salt);
        [
            blocks.iter().map(|block| chain.push(block)).collect(),
            blocks.iter().map(|block| of_text.push(block).expect("a name each")).collect(),
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
        fn blocks_have_one_name_however_they_are_pushed(
            text in prop::collection::vec(any::<u8>(), 0..20_000),
            block in prop::sample::select(vec![1, 16, 63, 64, 65]),
            cut in any::<prop::sample::Index>(),
        ) {
            let (mut one, mut all) = (TextChain::new(HashKey::new(5), b""), TextChain::new(HashKey::new(5), b""));
            let bytes = NonZeroUsize::new(block).unwrap();
            let mut names = Vec::new();
            let whole = text.len() / block;
            let (front, back) = text.split_at(cut.index(whole + 1) * block);
            prop_assert!(all.push_all(front, bytes, &mut names).is_empty());
            let rest = all.push_all(back, bytes, &mut names);
            prop_assert_eq!(rest, text.chunks_exact(block).remainder());
            prop_assert_eq!(all.blocks(), whole);
            let singly: Vec<_> = text.chunks_exact(block).filter_map(|block| one.push(block)).collect();
            prop_assert_eq!(&names, &singly);
            // One for each span, and they count for its blocks and half of the span behind them.
            prop_assert_eq!(names.len(), Spans::OfText.names(whole));
            let (named, counted) =
                (Spans::OfText.blocks(names.len()), names.iter().map(|name| name.blocks() as usize).sum::<usize>());
            let unnamed = counted - named;
            prop_assert!(unnamed <= width_behind(named) / 2 && unnamed + 1 >= width_behind(named) / 2, "{}", unnamed);
            prop_assert_eq!(Spans::of(&names).blocks(names.len()), named);
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
        let digest =
            |key: u64, salt: &[u8]| digest(&TextChain::new(HashKey::new(key), salt).secret, &[b'a'; 64]);
        assert_ne!(digest(1, b""), digest(2, b""));
        assert_ne!(digest(1, b"a"), digest(1, b"b"));
        assert_eq!(format!("{:?}", TextChain::new(HashKey::new(1), b"")), "TextChain(secret)");
    }

    /// Half of a name's bits change with any bit of the block or of the state before it, within what chance
    /// allows.
    #[test]
    fn each_bit_reaches_all_of_the_name() {
        let chain = TextChain::new(HashKey::new(9), b"");
        // But for those that say how many blocks it counts for.
        let name = |state: u64, block: &[u8]| {
            TextChain { state, ..chain.clone() }.push(block).map_or(0, |name| name.0 << COUNT_BITS)
        };
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
                assert!((base ^ other).count_ones() >= 8, "each single bit reaches many");
                (COUNT_BITS as usize..64).for_each(|bit| changed[bit] += ((base ^ other) >> bit & 1) as u32);
            }
        }
        let share = changed.map(|changed| f64::from(changed) / f64::from(tries));
        assert!(
            share[COUNT_BITS as usize..].iter().all(|share| (0.44..0.56).contains(share)),
            "{share:?} of {tries}"
        );
    }

    #[test]
    fn the_key_is_not_printable() {
        assert_eq!(format!("{:?}", HashKey::new(12345)), "HashKey(secret)");
    }
}
