//! Tokens of a prompt of which most was seen before: each piece between two places to cut (`segments.rs`) is
//! looked up by its hash, and only new ones are tokenised. A conversation's next turn pays for what it adds,
//! and prompts share their system text. The result equals [`Tokenizer::encode`]'s, unless two pieces' hashes
//! collide.
//!
//! The pieces' tokens are kept in a bounded number of bytes, in two generations: what is used moves to the
//! younger one, and when that is full the older one is dropped. Their text is not kept.

use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::segments::Segmenter;
use crate::{TextError, Tokenizer};

/// Bytes that an entry takes besides its tokens: key, pointer, counts, the map's own.
const ENTRY_BYTES: usize = 64;

/// A prompt's tokens, and what they cost.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids of the whole prompt.
    pub ids: Vec<u32>,
    /// Bytes of it that had to be tokenised; the rest was known.
    pub new_bytes: usize,
}

/// A prompt on its way to its tokens, part by part.
#[derive(Debug)]
pub struct Encoding {
    text: String,
    add_special: bool,
    /// Where its pieces end; none, where it cannot be cut.
    ends: Vec<usize>,
    /// Pieces done, and bytes of them.
    pieces: usize,
    at: usize,
    encoded: Encoded,
}

/// A tokenizer that remembers.
#[derive(Debug)]
pub struct IncrementalTokenizer {
    tokenizer: Arc<Tokenizer>,
    segmenter: Segmenter,
    /// What stands around a plain prompt; `None` if that depends on the prompt.
    frame: Option<(Vec<u32>, Vec<u32>)>,
    /// Keeps those who know the texts from choosing which entries collide.
    seed: u64,
    known: Mutex<Known>,
}

impl IncrementalTokenizer {
    /// Remembers at most `max_bytes` of tokens. `seed` is a secret: with it known, pieces could be made to
    /// collide.
    pub fn new(tokenizer: Arc<Tokenizer>, max_bytes: usize, seed: u64) -> Self {
        Self {
            segmenter: Segmenter::new(&tokenizer),
            frame: tokenizer.frame(),
            tokenizer,
            seed,
            known: Mutex::new(Known { max_bytes: max_bytes / 2, ..Known::default() }),
        }
    }

    /// Bytes of `text` that [`IncrementalTokenizer::encode`] would have to tokenise: what it would cost.
    pub fn new_bytes(&self, text: &str) -> usize {
        let segments = self.segmenter.segments(text);
        let known = self.known();
        let new = segments.iter().filter(|segment| !known.has(self.name(segment)));
        new.map(|segment| segment.len()).sum()
    }

    /// Token ids of `text`, as [`Tokenizer::encode`] gives them.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Encoded, TextError> {
        let mut encoding = self.begin(text.to_owned(), add_special);
        loop {
            if let Some(encoded) = self.go_on(&mut encoding, usize::MAX, usize::MAX)? {
                return Ok(encoded);
            }
        }
    }

    /// Begins to encode `text` in parts: [`IncrementalTokenizer::go_on`].
    pub fn begin(&self, text: String, add_special: bool) -> Encoding {
        let frame = self.frame.as_ref().filter(|_| add_special);
        let whole = text.is_empty() || (add_special && frame.is_none());
        let mut at = 0;
        let ends = self.segmenter.segments(&text).into_iter().map(|segment| {
            at += segment.len();
            at
        });
        let ends: Vec<usize> = if whole { vec![] } else { ends.collect() };
        // Prose has some four bytes a token.
        let mut ids = Vec::with_capacity(if whole { 0 } else { text.len() / 4 });
        ids.extend(frame.iter().flat_map(|(before, _)| before));
        Encoding { ends, encoded: Encoded { ids, new_bytes: 0 }, text, add_special, at: 0, pieces: 0 }
    }

    /// Bytes of the longest piece of a text that would have to be tokenised in one go; 0 if all are known.
    pub fn longest_new_piece(&self, encoding: &Encoding) -> usize {
        let Encoding { text, ends, .. } = encoding;
        if ends.is_empty() {
            return text.len();
        }
        let known = self.known();
        let begins = std::iter::once(&0).chain(ends);
        let pieces = begins.zip(ends).map(|(begin, end)| &text[*begin..*end]);
        pieces.filter(|piece| !known.has(self.name(piece))).map(str::len).max().unwrap_or(0)
    }

    /// Encodes the next `max_pieces` pieces of a text, and fewer once `max_new_bytes` of them were new. When
    /// all are done, what [`IncrementalTokenizer::encode`] gives; that is not to be asked for again.
    pub fn go_on(
        &self,
        encoding: &mut Encoding,
        max_pieces: usize,
        max_new_bytes: usize,
    ) -> Result<Option<Encoded>, TextError> {
        let Encoding { text, add_special, ends, pieces, at, encoded } = encoding;
        if ends.is_empty() {
            let ids = self.tokenizer.encode(text, *add_special)?;
            return Ok(Some(Encoded { ids, new_bytes: text.len() }));
        }
        let new_before = encoded.new_bytes;
        for end in ends.iter().skip(*pieces).take(max_pieces.max(1)) {
            let piece = &text[*at..*end];
            let (tokens, was_known) = self.piece(piece)?;
            encoded.ids.extend_from_slice(&tokens);
            encoded.new_bytes += if was_known { 0 } else { piece.len() };
            (*at, *pieces) = (*end, *pieces + 1);
            if encoded.new_bytes - new_before >= max_new_bytes {
                break;
            }
        }
        if *pieces < ends.len() {
            return Ok(None);
        }
        let after = self.frame.iter().filter(|_| *add_special).flat_map(|(_, after)| after);
        encoded.ids.extend(after);
        Ok(Some(mem::take(encoded)))
    }

    /// A piece's tokens, and whether they were known. The lock is not held while they are computed.
    fn piece(&self, piece: &str) -> Result<(Arc<[u32]>, bool), TextError> {
        let name = self.name(piece);
        let (tokens, dropped) = {
            let mut known = self.known();
            (known.get(name), mem::take(&mut known.dropped))
        };
        drop(dropped);
        if let Some(tokens) = tokens {
            return Ok((tokens, true));
        }
        let tokens: Arc<[u32]> = self.tokenizer.encode(piece, false)?.into();
        let dropped = {
            let mut known = self.known();
            known.insert(name, Arc::clone(&tokens));
            mem::take(&mut known.dropped)
        };
        drop(dropped);
        Ok((tokens, false))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece by its text and length.
    fn name(&self, segment: &str) -> (u64, u32) {
        (xxh3_64_with_seed(segment.as_bytes(), self.seed), segment.len() as u32)
    }
}

type Generation = HashMap<(u64, u32), Arc<[u32]>>;

/// Pieces' tokens, in two generations of at most `max_bytes` each.
#[derive(Debug, Default)]
struct Known {
    young: Generation,
    old: Generation,
    /// What was forgotten: to be dropped without the lock, because thousands of pieces take their time.
    dropped: Generation,
    young_bytes: usize,
    max_bytes: usize,
}

impl Known {
    fn has(&self, name: (u64, u32)) -> bool {
        self.young.contains_key(&name) || self.old.contains_key(&name)
    }

    fn get(&mut self, name: (u64, u32)) -> Option<Arc<[u32]>> {
        if let Some(tokens) = self.young.get(&name) {
            return Some(Arc::clone(tokens));
        }
        let tokens = self.old.remove(&name)?;
        self.insert(name, Arc::clone(&tokens));
        Some(tokens)
    }

    fn insert(&mut self, name: (u64, u32), tokens: Arc<[u32]>) {
        let bytes = ENTRY_BYTES + 4 * tokens.len();
        if bytes > self.max_bytes {
            return;
        }
        if self.young_bytes + bytes > self.max_bytes {
            self.dropped = mem::replace(&mut self.old, mem::take(&mut self.young));
            self.young_bytes = 0;
        }
        if self.young.insert(name, tokens).is_none() {
            self.young_bytes += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incremental(max_bytes: usize) -> IncrementalTokenizer {
        IncrementalTokenizer::new(Arc::new(Tokenizer::builtin()), max_bytes, 7)
    }

    fn conversation(turns: usize) -> String {
        let turn = |i: usize| format!("<|im_start|>user\n{i}: {}<|im_end|>\n", "tell me more. ".repeat(40));
        (0..turns).map(turn).collect()
    }

    #[test]
    fn the_next_turn_pays_for_what_it_adds() {
        let tokenizer = incremental(1 << 20);
        let (first, second) = (conversation(50), conversation(51));
        assert_eq!(tokenizer.new_bytes(&first), first.len());
        assert_eq!(tokenizer.encode(&first, false).unwrap().new_bytes, first.len());
        let added = second.len() - first.len();
        // The piece at the first one's end is whole only now.
        assert!(tokenizer.new_bytes(&second) <= 2 * added, "{} of {added}", tokenizer.new_bytes(&second));
        let encoded = tokenizer.encode(&second, false).unwrap();
        assert!(encoded.new_bytes <= 2 * added);
        assert_eq!(encoded.ids, Tokenizer::builtin().encode(&second, false).unwrap());
        assert_eq!(tokenizer.encode(&second, false).unwrap().new_bytes, 0);
    }

    #[test]
    fn a_text_in_parts_has_the_tokens_of_the_whole_and_new_pieces_take_more_of_them() {
        let cases = [
            (conversation(30), false, (15, 3)),
            (conversation(1), true, (0, 0)),
            (String::new(), true, (0, 0)),
        ];
        for (text, add_special, want) in cases {
            let tokenizer = incremental(1 << 20);
            // 31 pieces of 590 bytes, but for the last: two of them are 1,000, and ten are a part where they
            // are known.
            let parts = || {
                let (mut encoding, mut unfinished) = (tokenizer.begin(text.clone(), add_special), 0);
                loop {
                    match tokenizer.go_on(&mut encoding, 10, 1000).unwrap() {
                        Some(encoded) => return (encoded, unfinished),
                        None => unfinished += 1,
                    }
                }
            };
            let ((new, new_parts), (known, known_parts)) = (parts(), parts());
            assert_eq!((new_parts, known_parts), want);
            assert_eq!(new.ids, Tokenizer::builtin().encode(&text, add_special).unwrap());
            assert_eq!((new.new_bytes, known.new_bytes), (text.len(), 0));
            assert_eq!(known.ids, new.ids);
        }
    }

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let tokenizer = incremental(40_000);
        let system = format!("<|im_start|>system\n{}<|im_end|>\n", "Be kind. ".repeat(30));
        for i in 0..200 {
            let prompt = format!("{system}<|im_start|>user\n{i} {}<|im_end|>\n", "x".repeat(200));
            tokenizer.encode(&prompt, false).unwrap();
            let known = tokenizer.known.lock().unwrap();
            let bytes: usize =
                known.young.values().chain(known.old.values()).map(|ids| ENTRY_BYTES + 4 * ids.len()).sum();
            assert!(bytes <= 40_000, "{bytes}");
        }
        assert_eq!(tokenizer.new_bytes(&system[..system.len() - 11]), 0, "it was in every prompt");
    }
}
