//! Token ids to text, one id at a time: what a stream may show now. Never half a UTF-8 character; the pieces joined
//! are the text of all ids decoded at once.

use std::sync::Arc;

use crate::{TextError, Tokenizer};

/// Ids of the prompt kept before the first generated one: some decoders drop a space at the very beginning.
const CONTEXT_IDS: usize = 5;
/// An unfinished character is at most three bytes, and reads as at most three U+FFFD.
const UNFINISHED_MAX: usize = 3;
/// Ids decoded again with each new one, at most: keeps endless invalid bytes from costing quadratic time.
const WINDOW_IDS_MAX: usize = 32;

/// Decodes one generation.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Arc<Tokenizer>,
    /// The last ids: `context` of them only there for the decoder's sake, then those not yet settled.
    window: Vec<u32>,
    context: usize,
    /// Bytes of the window's text that are shown.
    shown: usize,
}

impl Decoder {
    /// A decoder for what follows `prompt`.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32]) -> Result<Self, TextError> {
        let mut window = prompt[prompt.len().saturating_sub(CONTEXT_IDS)..].to_vec();
        let mut shown = tokenizer.decode(&window)?;
        if shown.ends_with(char::REPLACEMENT_CHARACTER) {
            // Raw ids may end inside a character; what follows is then read on its own.
            window.clear();
            shown.clear();
        }
        Ok(Self { tokenizer, context: window.len(), window, shown: shown.len() })
    }

    /// Takes the next id; returns the text that is now certain, often empty.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        let certain = text.len() - unfinished_len(&text);
        let mut new = text.get(self.shown..certain).unwrap_or_default().to_owned();
        self.shown = self.shown.max(certain);
        if certain == text.len() && !new.is_empty() {
            self.window.drain(..self.context);
            self.context = self.window.len();
            self.shown = self.tokenizer.decode(&self.window)?.len();
        } else if self.window.len() > WINDOW_IDS_MAX {
            new.push_str(&self.shorten(&text)?);
        }
        Ok(new)
    }

    /// The text still withheld, when no id will follow: an unfinished character reads as U+FFFD.
    pub fn finish(&mut self) -> Result<String, TextError> {
        let text = self.tokenizer.decode(&self.window)?;
        let new = text.get(self.shown..).unwrap_or_default().to_owned();
        self.shown = text.len();
        Ok(new)
    }

    /// Cuts the window where its text falls into two independent halves, and shows the first one's rest.
    fn shorten(&mut self, text: &str) -> Result<String, TextError> {
        let last = self.window.len();
        for cut in (last - UNFINISHED_MAX..=last).rev() {
            let (head, tail) = self.window.split_at(cut);
            let head = self.tokenizer.decode(head)?;
            if head.len() >= self.shown && text.strip_prefix(&*head) == Some(&*self.tokenizer.decode(tail)?) {
                if cut == last && unfinished_len(text) > 0 {
                    continue; // its end may be the beginning of a character
                }
                let new = head[self.shown..].to_owned();
                self.window.drain(..cut);
                (self.context, self.shown) = (0, 0);
                return Ok(new);
            }
        }
        let new = text[self.shown.min(text.len())..].to_owned();
        self.window.clear();
        (self.context, self.shown) = (0, 0);
        Ok(new)
    }
}

/// Bytes at the end of `text` that may be an unfinished character.
fn unfinished_len(text: &str) -> usize {
    let marks = text.chars().rev().take(UNFINISHED_MAX).take_while(|c| *c == char::REPLACEMENT_CHARACTER);
    marks.map(char::len_utf8).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(ids: &[u32]) -> Vec<String> {
        let mut decoder = Decoder::new(Arc::new(Tokenizer::builtin()), &[104, 105]).unwrap();
        let mut out: Vec<String> = ids.iter().map(|id| decoder.push(*id).unwrap()).collect();
        out.push(decoder.finish().unwrap());
        out
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        let ids: Vec<u32> = "a€😀".bytes().map(u32::from).collect();
        assert_eq!(pieces(&ids), ["a", "", "", "€", "", "", "", "😀", ""]);
    }

    #[test]
    fn an_unfinished_character_reads_as_a_replacement_at_the_end() {
        assert_eq!(pieces(&[97, 0xE2, 0x82]).concat(), "a\u{FFFD}");
    }

    #[test]
    fn special_tokens_have_no_text() {
        assert_eq!(pieces(&[97, 257, 98, 300, 258]).concat(), "ab");
    }

    #[test]
    fn a_prompt_that_ends_inside_a_character_does_not_spoil_the_answer() {
        let mut decoder = Decoder::new(Arc::new(Tokenizer::builtin()), &[97, 0xE2]).unwrap();
        assert_eq!(decoder.push(98).unwrap(), "b");
    }

    proptest! {
        #[test]
        fn pieces_joined_are_the_whole_text(
            ids in prop::collection::vec(prop_oneof![0u32..260, Just(0xE2), Just(0x82), Just(0xAC), Just(0x80)], 0..200),
        ) {
            let whole = Tokenizer::builtin().decode(&ids).unwrap();
            prop_assert_eq!(pieces(&ids).concat(), whole);
        }

        #[test]
        fn long_garbage_is_shown_too(ids in prop::collection::vec(prop_oneof![Just(0xE2u32), Just(0x82), Just(0x80)], 100..300)) {
            let whole = Tokenizer::builtin().decode(&ids).unwrap();
            let pieces = pieces(&ids);
            prop_assert!(pieces[..ids.len()].iter().any(|p| !p.is_empty()));
            prop_assert_eq!(pieces.concat(), whole);
        }
    }
}
