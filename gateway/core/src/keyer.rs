//! Turns a prompt's canonical bytes into the hash chain that names its prefixes: fixed blocks of text in
//! spans ([`keyway_wire::spans`]), no tokenizer. It does not decide which fields of a request are canonical,
//! nor in which order they come.

use std::num::NonZeroUsize;
use std::sync::Arc;

use keyway_wire::block_hash::{BlockHash, HashKey, TextChain};
use keyway_wire::spans::Spans;

/// Introduces what is not text. It occurs in no UTF-8 text, so escaping it costs a scan and no copy.
const ESCAPE: u8 = 0xFF;
/// After [`ESCAPE`]: the text itself had this byte.
const LITERAL: u8 = 0;
/// After [`ESCAPE`]: a field ends here, and its tag follows.
const FIELD_END: u8 = 1;
/// After [`ESCAPE`]: what is no text stands here. Its name and how many bytes it takes follow, then so many
/// that say nothing.
const ITEM: u8 = 2;
/// Bytes before those that say nothing.
const ITEM_HEAD_BYTES: u32 = 2 + 8 + 4;

/// Blocks of one prompt that its names cover; what comes behind them is only counted. Of 64 bytes each they
/// are 4 MiB of text or a million tokens.
pub const PROMPT_BLOCKS_MAX: usize = 64 << 10;

/// The chain of one prompt. Only full spans of blocks are named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixChain {
    /// `names[i]` is that of the canonical bytes of [`Spans::blocks`]`(i + 1)` blocks, of
    /// [`PROMPT_BLOCKS_MAX`] at most.
    pub names: Arc<Vec<BlockHash>>,
    /// Canonical bytes in a block.
    pub block_bytes: usize,
    /// Canonical bytes in all, the tail and the marks between fields included.
    pub total_bytes: u64,
}

/// Hashes a prompt as it is read, holding at most one block of it.
///
/// The canonical bytes are the text of the fields, each followed by an escape, a mark and its tag; an escape
/// byte inside the text is itself escaped, and so is what is no text ([`TextKeyer::push_item`]). So two
/// different sequences of fields never give the same bytes, nor does a prefix of one give a prefix of the
/// other beyond the place where they differ.
#[derive(Debug)]
pub struct TextKeyer {
    chain: TextChain,
    names: Vec<BlockHash>,
    partial: Vec<u8>,
    block_bytes: NonZeroUsize,
    total_bytes: u64,
}

impl TextKeyer {
    /// A keyer for one prompt of the tenant that `salt` stands for (empty: the shared space).
    pub fn new(key: HashKey, salt: &[u8], block_bytes: NonZeroUsize) -> Self {
        Self {
            chain: TextChain::new(key, salt),
            names: Vec::new(),
            partial: Vec::with_capacity(block_bytes.get()),
            block_bytes,
            total_bytes: 0,
        }
    }

    /// Makes room for the names of a prompt of so many bytes, all at once.
    #[must_use]
    pub fn with_capacity(mut self, bytes: usize) -> Self {
        self.names.reserve_exact(Spans::OfText.names((bytes / self.block_bytes).min(PROMPT_BLOCKS_MAX)));
        self
    }

    /// Appends text that belongs to the current field. How a field is cut into pushes does not matter.
    pub fn push(&mut self, bytes: &[u8]) {
        let mut pieces = bytes.split(|&byte| byte == ESCAPE);
        self.append(pieces.next().unwrap_or_default());
        for piece in pieces {
            self.append(&[ESCAPE, LITERAL]);
            self.append(piece);
        }
    }

    /// As [`TextKeyer::push`], without the scan: no UTF-8 text holds the escape.
    pub fn push_text(&mut self, text: &str) {
        self.append(text.as_bytes());
    }

    /// Appends what is no text to the current field: `name` is what tells it from others. It takes so many
    /// bytes of the chain, though not fewer than its name does, so that it has as many blocks as text of as
    /// many tokens. Returns how many.
    pub fn push_item(&mut self, name: u64, bytes: u32) -> u32 {
        const NOTHING: [u8; 1 << 10] = [0; 1 << 10];
        let bytes = bytes.max(ITEM_HEAD_BYTES);
        self.append(&[ESCAPE, ITEM]);
        self.append(&name.to_le_bytes());
        self.append(&bytes.to_le_bytes());
        let mut left = (bytes - ITEM_HEAD_BYTES) as usize;
        while left > 0 {
            let some = left.min(NOTHING.len());
            self.append(&NOTHING[..some]);
            left -= some;
        }
        bytes
    }

    /// Ends the current field. `tag` says which kind of field it was (its meaning is the caller's), so that
    /// `("ab", "c")`, `("a", "bc")` and the same text in another field all differ.
    pub fn end_field(&mut self, tag: u8) {
        self.append(&[ESCAPE, FIELD_END, tag]);
    }

    /// Canonical bytes so far.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The chain of everything pushed.
    pub fn finish(self) -> PrefixChain {
        let (block_bytes, mut names) = (self.block_bytes.get(), self.names);
        // A picture has few names for its bytes.
        if names.capacity() > 2 * names.len() {
            names.shrink_to_fit();
        }
        PrefixChain { names: names.into(), block_bytes, total_bytes: self.total_bytes }
    }

    fn append(&mut self, mut bytes: &[u8]) {
        self.total_bytes += bytes.len() as u64;
        // What is left of a piece that passes the bound is cut off with the whole blocks before it.
        let room = (PROMPT_BLOCKS_MAX - self.chain.blocks()) * self.block_bytes.get() - self.partial.len();
        bytes = &bytes[..bytes.len().min(room)];
        if bytes.is_empty() {
            return;
        }
        if !self.partial.is_empty() {
            let missing = self.block_bytes.get() - self.partial.len();
            let (fill, rest) = bytes.split_at(bytes.len().min(missing));
            self.partial.extend_from_slice(fill);
            bytes = rest;
            if fill.len() < missing {
                return;
            }
            self.names.extend(self.chain.push(&self.partial));
            self.partial.clear();
        }
        let rest = self.chain.push_all(bytes, self.block_bytes, &mut self.names);
        self.partial.extend_from_slice(rest);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Fields as (tag, text).
    type Fields = Vec<(u8, Vec<u8>)>;

    fn keyer(block: usize) -> TextKeyer {
        TextKeyer::new(HashKey::new(11), b"tenant", NonZeroUsize::new(block).unwrap())
    }

    fn chain(block: usize, fields: &Fields) -> PrefixChain {
        let mut keyer = keyer(block);
        for (tag, text) in fields {
            keyer.push(text);
            keyer.end_field(*tag);
        }
        keyer.finish()
    }

    /// Few byte values, the marks among them: collisions of structure would show at once.
    fn fields() -> impl Strategy<Value = Fields> {
        let byte = prop::sample::select(vec![ESCAPE, LITERAL, FIELD_END, b'a']);
        prop::collection::vec((0_u8..2, prop::collection::vec(byte, 0..12)), 0..6)
    }

    #[test]
    fn an_item_is_told_by_its_name_and_place_and_takes_its_bytes() {
        let chain = |text: &[u8], name: u64, bytes: u32, behind: &[u8]| {
            let mut keyer = keyer(4);
            keyer.push(text);
            let taken = keyer.push_item(name, bytes);
            keyer.push(behind);
            keyer.end_field(1);
            (keyer.finish(), taken)
        };
        let (one, taken) = chain(b"text", 7, 40, b"more");
        assert_eq!((taken, one.total_bytes, one.names.len()), (40, 4 + 40 + 4 + 3, 12));
        assert_eq!(chain(b"text", 7, 40, b"more").0, one);
        let shared =
            |other: &PrefixChain| one.names.iter().zip(&*other.names).take_while(|(a, b)| a == b).count();
        assert_eq!(shared(&chain(b"text", 8, 40, b"more").0), 1, "another picture");
        assert_eq!(shared(&chain(b"text", 7, 48, b"more").0), 3, "another size");
        assert_eq!(shared(&chain(b"text", 7, 40, b"less").0), 11, "another text behind it");
        assert_eq!(chain(b"", 7, 1, b"").1, ITEM_HEAD_BYTES);
        // Text that looks like one is another prompt.
        let mut written = keyer(4);
        written.push(b"text");
        written.push(&[&[ESCAPE, ITEM][..], &7_u64.to_le_bytes(), &40_u32.to_le_bytes(), &[0; 26]].concat());
        assert_eq!(shared(&written.finish()), 1);
    }

    #[test]
    fn a_prompt_has_so_many_blocks_and_no_more_however_it_comes() {
        let text = vec![b'x'; 4 * (PROMPT_BLOCKS_MAX + 10)];
        let whole = |pieces: usize| {
            let mut keyer = keyer(4).with_capacity(text.len());
            text.chunks(pieces).for_each(|piece| keyer.push(piece));
            keyer.end_field(1);
            keyer.finish()
        };
        let chain = whole(text.len());
        let names = Spans::OfText.names(PROMPT_BLOCKS_MAX);
        assert_eq!((chain.names.len(), chain.total_bytes), (names, text.len() as u64 + 3));
        assert_eq!(Spans::OfText.blocks(names), PROMPT_BLOCKS_MAX);
        for pieces in [1, 3, 4, 1_000] {
            assert_eq!(whole(pieces), chain, "in pieces of {pieces}");
        }
    }

    proptest! {
        #[test]
        fn any_split_of_the_pushes_gives_the_same_chain(
            text in prop::collection::vec(any::<u8>(), 0..400),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
            block in 1_usize..70,
        ) {
            let whole = chain(block, &vec![(3, text.clone())]);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut keyer = keyer(block);
            for pair in cuts.windows(2) {
                keyer.push(&text[pair[0]..pair[1]]);
            }
            keyer.end_field(3);
            prop_assert_eq!(keyer.finish(), whole);
        }

        #[test]
        fn different_fields_never_share_all_their_bytes(a in fields(), b in fields()) {
            // One-byte blocks name every prefix of so short a text: equal chains mean equal canonical bytes.
            prop_assert_eq!(a == b, chain(1, &a) == chain(1, &b));
        }

        #[test]
        fn a_longer_prompt_extends_the_chain(a in fields(), more in fields(), block in 1_usize..40) {
            let short = chain(block, &a);
            let long = chain(block, &a.into_iter().chain(more).collect());
            prop_assert_eq!(&long.names[..short.names.len()], &short.names[..]);
        }

        #[test]
        fn every_full_span_is_named_and_the_tail_is_not(text in "[a-z]{0,300}", block in 1_usize..70) {
            let mut keyer = keyer(block);
            keyer.push(text.as_bytes());
            let pushed = keyer.finish();
            let mut keyer = self::keyer(block);
            keyer.push_text(&text);
            let chain = keyer.finish();
            prop_assert_eq!(&pushed, &chain);
            prop_assert_eq!(chain.names.len(), Spans::OfText.names(text.len() / block));
            prop_assert_eq!(chain.total_bytes, text.len() as u64);
        }
    }

    #[test]
    fn fields_are_kept_apart() {
        let of = |parts: &[(u8, &str)]| {
            chain(1, &parts.iter().map(|(t, s)| (*t, s.as_bytes().to_vec())).collect())
        };
        assert_ne!(of(&[(0, "ab"), (0, "c")]), of(&[(0, "a"), (0, "bc")]));
        assert_ne!(of(&[(0, "ab")]), of(&[(1, "ab")]));
        assert_ne!(of(&[(0, "ab"), (0, "")]), of(&[(0, "ab")]));
        // Text that looks like the end of a field is not one.
        let fields = chain(1, &vec![(7, b"a".to_vec()), (7, b"b".to_vec())]);
        assert_ne!(chain(1, &vec![(7, vec![b'a', ESCAPE, FIELD_END, 7, b'b'])]), fields);
    }

    #[test]
    fn tenants_share_no_block() {
        let of = |salt: &[u8]| {
            let mut keyer = TextKeyer::new(HashKey::new(11), salt, NonZeroUsize::new(4).unwrap());
            keyer.push(b"the same text for both");
            keyer.finish().names
        };
        assert!(of(b"one").iter().all(|block| !of(b"two").contains(block)));
    }
}
