//! Text for block ids: equal ids give equal text, different ids differ within the first bytes, and nothing
//! but (seed, id) decides it, in any process. Lowercase words and spaces only, so JSON needs no escapes and a
//! BPE tokenizer gives a steady ratio of bytes to tokens. Knows nothing of tokens.
//!
//! A block's text is a space, a word that spells the id, and words drawn from a generator seeded by both.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use crate::random::splitmix;

/// 128 common words, so that seven random bits choose one.
#[rustfmt::skip]
const WORDS: [&str; 128] = [
    "about", "above", "after", "again", "air", "all", "also", "always", "and", "answer", "any", "around", "ask",
    "away", "back", "because", "before", "begin", "below", "between", "big", "book", "both", "bring", "build",
    "but", "by", "call", "can", "care", "change", "city", "close", "come", "could", "country", "cut", "day", "did",
    "different", "do", "door", "down", "each", "early", "earth", "end", "enough", "even", "every", "example",
    "eye", "face", "family", "far", "father", "few", "find", "first", "follow", "food", "for", "form", "found",
    "from", "get", "give", "go", "good", "great", "group", "grow", "had", "hand", "hard", "has", "have", "he",
    "head", "hear", "help", "her", "here", "high", "him", "his", "home", "house", "how", "idea", "if", "in",
    "into", "is", "it", "just", "keep", "kind", "know", "land", "large", "last", "later", "learn", "leave", "left",
    "letter", "life", "light", "like", "line", "list", "little", "live", "long", "look", "made", "make", "many",
    "may", "mean", "might", "mile", "more", "most", "mother", "move", "much",
];

/// Letters that spell 32 bits: 26^7 > 2^32.
const HEAD_LETTERS: usize = 7;

/// What decides the words of a run's prompts, beside the blocks they stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextSeed {
    /// The seed itself; 0 leaves a file's prompts as they are.
    pub seed: u64,
    /// `true`: the user's own, so that other runs may have sent the same words before.
    pub chosen: bool,
}

/// The text of all blocks for one seed.
#[derive(Debug, Clone, Copy)]
pub struct PromptText {
    seed: u64,
}

impl TextSeed {
    /// The user's own.
    pub fn chosen(seed: u64) -> Self {
        Self { seed, chosen: true }
    }

    /// One that no other run has: 1 to 2^32, drawn from what the system gives each process's hash tables.
    pub fn drawn() -> Self {
        let bits = RandomState::new().build_hasher().finish();
        Self { seed: 1 + (bits >> 32), chosen: false }
    }

    /// What a file's prompts begin with, so that no cache holds them from a run with another seed: a word of
    /// seven letters and a space. Empty for 0.
    pub fn mark(self) -> String {
        if self.seed == 0 {
            return String::new();
        }
        let mut word = Vec::new();
        PromptText::new(self.seed).append(0, 1 + HEAD_LETTERS, &mut word);
        // Letters and spaces are ASCII.
        word.iter().skip(1).map(|&letter| char::from(letter)).chain([' ']).collect()
    }
}

impl PromptText {
    /// The text for `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed: splitmix(seed) }
    }

    /// Appends the first `bytes` bytes of block `id`'s text, which has no end, to `out`. Ids below 2^32
    /// differ within 8 bytes, all ids within 15.
    pub fn append(self, id: u64, bytes: usize, out: &mut Vec<u8>) {
        let end = out.len() + bytes;
        out.reserve(bytes + 16);
        out.push(b' ');
        spell(self.permute(id as u32), out);
        if id >> 32 != 0 {
            spell(self.permute((id >> 32) as u32), out);
        }
        let mut random = splitmix(self.seed ^ splitmix(id));
        while out.len() < end {
            random = splitmix(random);
            for pick in random.to_le_bytes() {
                out.push(b' ');
                out.extend_from_slice(WORDS[usize::from(pick & 127)].as_bytes());
            }
        }
        out.truncate(end);
    }

    /// A bijection on 32 bits that the seed chooses: xor, odd products and xor-shifts each lose nothing.
    fn permute(self, id: u32) -> u32 {
        let mut x = id ^ self.seed as u32;
        x = x.wrapping_mul(0x9E37_79B1);
        x ^= x >> 15;
        x = x.wrapping_mul(0x85EB_CA77);
        x ^= x >> 13;
        x ^ (self.seed >> 32) as u32
    }
}

/// Seven letters for 32 bits, the lowest digit first.
fn spell(mut value: u32, out: &mut Vec<u8>) {
    for _ in 0..HEAD_LETTERS {
        out.push(b'a' + (value % 26) as u8);
        value /= 26;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn text(seed: u64, id: u64, bytes: usize) -> String {
        let mut out = b"x".to_vec();
        PromptText::new(seed).append(id, bytes, &mut out);
        String::from_utf8(out.split_off(1)).unwrap()
    }

    #[test]
    fn each_run_draws_words_of_its_own_and_a_chosen_seed_gives_its_own_again() {
        let drawn: HashSet<u64> = (0..100).map(|_| TextSeed::drawn().seed).collect();
        assert_eq!((drawn.len(), drawn.contains(&0)), (100, false));
        let mark = |seed| TextSeed::chosen(seed).mark();
        assert_eq!((mark(0), mark(7) == mark(7), mark(7) == mark(8)), (String::new(), true, false));
        assert!(mark(7).len() == 8 && mark(7).ends_with(' '), "{}", mark(7));
    }

    #[test]
    fn the_text_never_changes_between_versions() {
        assert_eq!(text(42, 0, 40), " gfjnevm mother first again more after e");
        assert_eq!(text(42, 1, 40), " lwjpqpf made any care might did back by");
        assert_eq!(text(42, 1 << 40 | 1, 40), " lwjpqpfapsdldh few made answer between ");
    }

    #[test]
    fn a_hundred_thousand_ids_differ_within_eight_bytes() {
        let heads: HashSet<_> = (0..100_000).map(|id| text(7, id, 8)).collect();
        assert_eq!(heads.len(), 100_000);
    }

    proptest! {
        #[test]
        fn length_letters_and_prefixes(seed: u64, id: u64, bytes in 0usize..400, shorter in 0usize..400) {
            let full = text(seed, id, bytes);
            prop_assert_eq!(full.len(), bytes);
            prop_assert!(full.bytes().all(|b| b == b' ' || b.is_ascii_lowercase()));
            let shorter = shorter.min(bytes);
            prop_assert_eq!(&full[..shorter], text(seed, id, shorter));
        }

        #[test]
        fn different_ids_differ_within_the_first_bytes(seed: u64, a: u64, b: u64) {
            prop_assume!(a != b);
            prop_assert_ne!(text(seed, a, 15), text(seed, b, 15));
            let (low_a, low_b) = (a & 0xffff_ffff, b & 0xffff_ffff);
            prop_assert!(low_a == low_b || text(seed, low_a, 8) != text(seed, low_b, 8));
        }

        #[test]
        fn another_seed_gives_other_text(seed: u64, id: u64) {
            prop_assert_ne!(text(seed, id, 200), text(seed ^ 1, id, 200));
        }
    }
}
