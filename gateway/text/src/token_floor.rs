//! How many tokens a text comes to at least, found without tokenising it: in no memory to speak of, and until
//! there are more than the caller can use. Never too many, so that a caller that refuses a text for it
//! refuses none that fits.
//!
//! Why that is a floor. A tokenizer that knows every byte cuts a text (after normalisation) into pieces that
//! are entries of its vocabulary. So from wherever one piece ends the next reaches no further than the
//! longest beginning of an entry that stands there, and the fewest such reaches that cover the text are no
//! more than its tokens. Which tokenizers keep to that is looked up in their own description
//! ([`TokenFloor::new`]); for others there is no floor.

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{Model as _, Tokenizer};
use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

use crate::token_bytes::byte_characters;

/// The pairs of first bytes, by which entries are found.
const PAIRS: usize = 1 << 16;

/// A tokenizer's entries, in order.
#[derive(Debug, Clone)]
pub(crate) struct TokenFloor {
    entries: Vec<Box<[u8]>>,
    /// Where the entries begin that begin with a pair of bytes, and behind the last pair their number.
    begins: Vec<u32>,
    longest: usize,
    /// Whether text is normalised to NFC first.
    composes: bool,
    /// Whether `▁` stands for a blank.
    marks_blanks: bool,
}

impl TokenFloor {
    /// The floor of a tokenizer whose entries stand for these bytes; `None` where a token may stand for bytes
    /// that are not its own, or a byte for no token.
    pub(crate) fn new<'a>(tokenizer: &Tokenizer, entries: impl Iterator<Item = &'a [u8]>) -> Option<Self> {
        let described =
            |part: Option<serde_json::Result<Value>>| part.transpose().ok().map(Option::unwrap_or_default);
        let normalizer = described(tokenizer.get_normalizer().map(serde_json::to_value))?;
        let pre_tokenizer = described(tokenizer.get_pre_tokenizer().map(serde_json::to_value))?;
        let composes = composes(&normalizer)?;
        let added = tokenizer.get_added_tokens_decoder();
        // One that takes the blanks around it may take any number.
        let takes_blanks = added.values().any(|token| token.lstrip || token.rstrip);
        let keeps =
            keeps_every_byte(&pre_tokenizer) && knows_every_byte(tokenizer, is_byte_level(&pre_tokenizer));
        let marks_blanks = !is_byte_level(&pre_tokenizer);
        (keeps && !takes_blanks).then(|| Self::of(entries, composes, marks_blanks))
    }

    /// The floor of a tokenizer that keeps to the rule.
    fn of<'a>(entries: impl Iterator<Item = &'a [u8]>, composes: bool, marks_blanks: bool) -> Self {
        let mut all: Vec<Box<[u8]>> = Vec::new();
        for entry in entries.filter(|entry| !entry.is_empty()) {
            let entry = match std::str::from_utf8(entry) {
                Ok(text) if marks_blanks => text.replace('\u{2581}', " ").into_bytes(),
                _ => entry.to_vec(),
            };
            // A blank that the tokenizer itself puts before a text is none of the text's bytes.
            if let [b' ', rest @ ..] = &entry[..]
                && !rest.is_empty()
            {
                all.push(rest.into());
            }
            all.push(entry.into());
        }
        all.sort_unstable();
        all.dedup();
        let pair =
            |entry: &[u8]| usize::from(entry[0]) << 8 | usize::from(entry.get(1).copied().unwrap_or(0));
        let mut begins = vec![0; PAIRS + 1];
        for entry in &all {
            begins[pair(entry) + 1] += 1;
        }
        (0..PAIRS).for_each(|i| begins[i + 1] += begins[i]);
        let longest = all.iter().map(|entry| entry.len()).max().unwrap_or(0);
        Self { entries: all, begins, longest, composes, marks_blanks }
    }

    /// The floor of this crate's own tokenizer, whose entries are bytes and a few texts.
    pub(crate) fn of_bytes<'a>(entries: impl Iterator<Item = &'a [u8]>) -> Self {
        Self::of(entries, false, false)
    }

    /// Bytes of the longest entry.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Whether `text` comes to `tokens` tokens at least.
    pub(crate) fn reaches(&self, text: &str, tokens: usize) -> bool {
        if text.len() < tokens || self.longest == 0 {
            return false;
        }
        if self.marks_blanks && text.contains('\u{2581}') {
            return self.count(text.replace('\u{2581}', " ").as_bytes(), false, tokens) >= tokens;
        }
        if !self.composes || text.is_ascii() {
            return self.count(text.as_bytes(), false, tokens) >= tokens;
        }
        // What normalisation may change counts nothing, and neither does a token that reaches over it.
        let (mut found, mut begin, mut is_behind) = (0, 0, false);
        for changed in Changed::in_text(text) {
            let (from, to) = changed;
            found += self.count(&text.as_bytes()[begin..from], is_behind, tokens);
            (begin, is_behind) = (to, true);
            if found >= tokens {
                return true;
            }
        }
        found + self.count(&text.as_bytes()[begin..], is_behind, tokens) >= tokens
    }

    /// The fewest reaches that cover the text, up to `enough`. With `behind`, a token from before may reach
    /// into it.
    fn count(&self, text: &[u8], behind: bool, enough: usize) -> usize {
        let mut end = if behind { self.longest.min(text.len()) } else { 0 };
        let (mut at, mut farthest, mut tokens) = (0, end, 0);
        while end < text.len() {
            // All that ends where the tokens so far may end: from each of these places goes one more.
            while at <= end {
                farthest = farthest.max(at + self.reach(&text[at..]).max(1));
                at += 1;
            }
            end = farthest.min(text.len());
            tokens += 1;
            if tokens >= enough {
                break;
            }
        }
        tokens
    }

    /// Bytes that the beginning of any entry has in common with the text.
    fn reach(&self, text: &[u8]) -> usize {
        let [first, second, ..] = text else { return text.len() };
        let pair = usize::from(*first) << 8 | usize::from(*second);
        let (from, to) = (self.begins[pair] as usize, self.begins[pair + 1] as usize);
        let entries = &self.entries[from..to];
        // In order, those that have most in common with the text are beside it.
        let place = entries.partition_point(|entry| entry[..] < text[..text.len().min(self.longest)]);
        let common = |entry: &[u8]| entry.iter().zip(text).take_while(|(a, b)| a == b).count();
        let beside = [place.checked_sub(1), Some(place)];
        beside.into_iter().flatten().filter_map(|i| entries.get(i)).map(|e| common(e)).max().unwrap_or(0)
    }
}

/// The parts of a text that NFC may change, with what stands before each, as ranges of bytes.
struct Changed<'a> {
    chars: std::iter::Peekable<std::str::CharIndices<'a>>,
    before: usize,
}

impl<'a> Changed<'a> {
    fn in_text(text: &'a str) -> Self {
        Self { chars: text.char_indices().peekable(), before: 0 }
    }
}

impl Iterator for Changed<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (at, c) = self.chars.next()?;
            if stays(c) {
                self.before = at;
                continue;
            }
            let from = self.before;
            let mut to = at + c.len_utf8();
            while let Some((at, c)) = self.chars.next_if(|(_, c)| !stays(*c)) {
                to = at + c.len_utf8();
            }
            self.before = to;
            return Some((from, to));
        }
    }
}

/// Whether NFC leaves a character as it is, unless one comes behind that does not stay.
fn stays(c: char) -> bool {
    c.is_ascii() || canonical_combining_class(c) == 0 && is_nfc_quick(std::iter::once(c)) == IsNormalized::Yes
}

/// Whether every byte is a token where nothing longer is.
fn knows_every_byte(tokenizer: &Tokenizer, is_byte_level: bool) -> bool {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return false };
    let is_empty = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
    let is_known = |token: String| model.token_to_id(&token).is_some();
    is_empty(&model.continuing_subword_prefix)
        && is_empty(&model.end_of_word_suffix)
        && if is_byte_level {
            byte_characters().into_keys().all(|c| is_known(c.to_string()))
        } else {
            model.byte_fallback && (0..=u8::MAX).all(|byte| is_known(format!("<0x{byte:02X}>")))
        }
}

fn is_byte_level(pre_tokenizer: &Value) -> bool {
    let members = pre_tokenizer["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice);
    pre_tokenizer["type"] == "ByteLevel" || members.iter().any(is_byte_level)
}

/// Whether text is composed before it is cut; `None` where a normaliser may leave out bytes, or is not known.
fn composes(normalizer: &Value) -> Option<bool> {
    match normalizer["type"].as_str() {
        None if normalizer.is_null() => Some(false),
        Some("NFC") => Some(true),
        Some("Prepend") => (normalizer["prepend"] == "\u{2581}").then_some(false),
        Some("Replace") => {
            let marks = normalizer["pattern"]["String"] == " " && normalizer["content"] == "\u{2581}";
            marks.then_some(false)
        }
        Some("Sequence") => {
            let members = normalizer["normalizers"].as_array()?;
            members.iter().map(composes).try_fold(false, |any, one| Some(any | one?))
        }
        _ => None,
    }
}

/// Whether no part of a text is dropped where it is cut into words.
fn keeps_every_byte(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("ByteLevel" | "Digits") => true,
        Some("Metaspace") => pre_tokenizer["replacement"] == "\u{2581}",
        Some("Split" | "Punctuation") => pre_tokenizer["behavior"] != "Removed",
        Some("Sequence") => pre_tokenizer["pretokenizers"]
            .as_array()
            .is_some_and(|members| members.iter().all(keeps_every_byte)),
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests;
