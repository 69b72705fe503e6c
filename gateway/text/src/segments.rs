//! Where a prompt can be cut so that its pieces' tokens, one after the other, are the whole's: before certain
//! added tokens, such as `<|im_start|>`. Cuts only; the pieces' tokens are `incremental.rs`'.
//!
//! Why that is exact. Tokenizers first cut out the added tokens that are looked for in the raw text
//! (leftmost, the longest first), and treat what lies between two of them without a look across. So a cut in
//! front of one changes nothing, if the token is found there in the whole as well as in the piece. It may not
//! be, and such tokens are no places to cut, if
//! - the end of another added token could reach over its beginning (or its own end could), which would be
//!   found first;
//! - it, or a longer added token that begins with it, takes the blanks before it, or depends on its
//!   neighbours;
//! - it begins like a word or a blank, so that tokens before it could depend on it.

use aho_corasick::{AhoCorasick, MatchKind};

use crate::Tokenizer;
use crate::tokenizer::RawAddedToken;

/// Bytes that a piece has at least, but for the last: below, looking it up costs more than its tokens.
const SEGMENT_BYTES_MIN: usize = 64;

/// The places where one tokenizer's prompts can be cut.
#[derive(Debug)]
pub(crate) struct Segmenter {
    /// Finds the added tokens before which a text can be cut. `None`: there are none, and it stays whole.
    cuts: Option<AhoCorasick>,
}

impl Segmenter {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Self {
        let tokens = tokenizer.raw_added_tokens();
        let safe: Vec<&str> = tokens
            .iter()
            .filter(|token| is_safe(token, &tokens))
            .map(|token| token.content.as_str())
            .collect();
        let built = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&safe);
        Self { cuts: built.ok().filter(|_| !safe.is_empty()) }
    }

    /// The pieces of `text`. Those of a longer text begin with the same ones, except for the last.
    pub(crate) fn segments<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let (mut segments, mut start) = (Vec::new(), 0);
        for found in self.cuts.iter().flat_map(|cuts| cuts.find_iter(text)) {
            if found.start() - start >= SEGMENT_BYTES_MIN {
                segments.push(&text[start..found.start()]);
                start = found.start();
            }
        }
        segments.push(&text[start..]);
        segments
    }
}

fn is_safe(token: &RawAddedToken, all: &[RawAddedToken]) -> bool {
    let text = token.content.as_str();
    let begins_apart = text
        .chars()
        .next()
        .is_some_and(|first| !first.is_alphanumeric() && first != '_' && !first.is_whitespace());
    let reached_over = |other: &RawAddedToken| {
        let mut inner = other.content.char_indices().skip(1).map(|(at, _)| &other.content[at..]);
        inner.any(|end| end.starts_with(text) || text.starts_with(end))
    };
    let taken_along = |other: &RawAddedToken| other.content.starts_with(text) && !other.alone;
    begins_apart && !all.iter().any(|other| reached_over(other) || taken_along(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(content: &str, alone: bool) -> RawAddedToken {
        RawAddedToken { content: content.to_owned(), alone }
    }

    #[test]
    fn only_tokens_that_are_found_whatever_is_around_them_are_places_to_cut() {
        let safe =
            |tokens: &[RawAddedToken]| -> Vec<bool> { tokens.iter().map(|t| is_safe(t, tokens)).collect() };
        assert_eq!(safe(&[token("<|a|>", true), token("<|b|>", true)]), [true, true]);
        // An end of "#<|" could be the beginning of "<|a|>".
        assert_eq!(safe(&[token("<|a|>", true), token("#<|", true)]), [false, true]);
        // "<<" could be found one character early.
        assert_eq!(safe(&[token("<<", true)]), [false]);
        assert_eq!(safe(&[token("<s>", false), token("</s>", true)]), [false, true]);
        // Where the longer one stands, the blanks before it are its own.
        assert_eq!(safe(&[token("<a", true), token("<a>", false)]), [false, false]);
        assert_eq!(safe(&[token("word", true), token(" x", true), token("\n", true)]), [false; 3]);
    }

    #[test]
    fn a_longer_text_begins_with_the_same_pieces() {
        let segmenter = Segmenter::new(&Tokenizer::builtin());
        let turn = |i: usize| format!("<|im_start|>user\nquestion {i}: {}<|im_end|>\n", "why? ".repeat(20));
        let text: String = (0..5).map(turn).collect();
        let pieces = segmenter.segments(&text);
        assert!(pieces.len() > 5 && pieces.concat() == text);
        let longer = format!("{text}{}", turn(5));
        let more = segmenter.segments(&longer);
        assert_eq!(more[..pieces.len() - 1], pieces[..pieces.len() - 1]);
    }
}
