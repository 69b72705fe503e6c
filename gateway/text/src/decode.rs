//! Token ids to text, one id at a time: what a stream may show now. Never half a UTF-8 character; the pieces
//! joined are the text of all ids decoded at once.

use std::sync::Arc;

use crate::{TextError, Tokenizer};

/// Ids of the prompt kept before the first generated one: some decoders drop a space at the very beginning.
const CONTEXT_IDS: usize = 5;
/// A character is at most four bytes, so an unfinished one at most three, each of which may be an id.
const UNFINISHED_MAX: usize = 3;
/// Ids decoded again with each new one, at most: keeps endless invalid bytes from costing quadratic time.
const WINDOW_IDS_MAX: usize = 32;

/// Turns the ids of one answer into text as they come. What a further id could change is held back.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Arc<Tokenizer>,
    /// Whether special tokens have text.
    special: bool,
    /// The last ids: `context` of them only there for the decoder's sake, then those not yet settled.
    window: Vec<u32>,
    context: usize,
    /// The window's text that is shown.
    shown: String,
}

impl Decoder {
    /// A decoder for what follows `prompt`.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32]) -> Result<Self, TextError> {
        Self::with_special(tokenizer, prompt, false)
    }

    /// The same, where special tokens may be shown too.
    pub fn with_special(tokenizer: Arc<Tokenizer>, prompt: &[u32], special: bool) -> Result<Self, TextError> {
        // The context must not begin inside a character: a tokenizer whose bytes are tokens takes all bytes
        // beside each other for invalid if one of them is.
        for ids in CONTEXT_IDS..=CONTEXT_IDS + UNFINISHED_MAX {
            let window = prompt[prompt.len().saturating_sub(ids)..].to_vec();
            let shown = decode(&tokenizer, &window, special)?;
            if !shown.ends_with(char::REPLACEMENT_CHARACTER) {
                return Ok(Self { tokenizer, special, context: window.len(), window, shown });
            }
        }
        // Raw ids may end inside a character; what follows is then read on its own.
        Ok(Self { tokenizer, special, context: 0, window: Vec::new(), shown: String::new() })
    }

    /// Takes the next id; returns the text that is now certain, often empty.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        if !self.tokenizer.is_decoded(id, self.special) {
            // Between the bytes of a character it would look like the character's end.
            return Ok(String::new());
        }
        self.window.push(id);
        let text = self.decode(&self.window)?;
        let full = self.window.len() > WINDOW_IDS_MAX;
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return if full { self.shorten(&text) } else { Ok(String::new()) };
        }
        let new = self.unshown(&text)?;
        if !new.is_empty() {
            self.window.drain(..self.context);
            self.context = self.window.len();
            self.shown = self.decode(&self.window)?;
        } else if full {
            self.window.truncate(self.context); // what came has no text
        }
        Ok(new)
    }

    /// The text still withheld, when no id will follow: an unfinished character reads as U+FFFD.
    pub fn finish(&mut self) -> Result<String, TextError> {
        let text = self.decode(&self.window)?;
        let new = self.unshown(&text)?;
        self.shown = text;
        self.context = self.window.len();
        Ok(new)
    }

    /// The part of the window's text that is not shown. Invalid bytes may change how those before them read,
    /// which cannot be taken back: then the unsettled ids are read on their own.
    fn unshown(&self, text: &str) -> Result<String, TextError> {
        match text.strip_prefix(&self.shown) {
            Some(new) => Ok(new.to_owned()),
            None => self.decode(&self.window[self.context..]),
        }
    }

    /// Cuts the window where its text falls into two independent halves, and shows the first one's rest.
    fn shorten(&mut self, text: &str) -> Result<String, TextError> {
        let last = self.window.len();
        // Not at the very end, which may be the beginning of a character.
        for cut in (last - UNFINISHED_MAX..last).rev() {
            let (head, tail) = self.window.split_at(cut);
            let head = self.decode(head)?;
            let tail = self.decode(tail)?;
            // A half without text says nothing about the other one's end.
            if !tail.is_empty()
                && text.strip_prefix(&head) == Some(&tail)
                && let Some(new) = head.strip_prefix(&self.shown)
            {
                let new = new.to_owned();
                self.window.drain(..cut);
                (self.context, self.shown) = (0, String::new());
                return Ok(new);
            }
        }
        let new = self.unshown(text)?;
        self.window.clear();
        (self.context, self.shown) = (0, String::new());
        Ok(new)
    }

    fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        decode(&self.tokenizer, ids, self.special)
    }
}

fn decode(tokenizer: &Tokenizer, ids: &[u32], special: bool) -> Result<String, TextError> {
    if special { tokenizer.decode_all(ids) } else { tokenizer.decode(ids) }
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

    #[test]
    fn a_special_token_inside_a_character_does_not_end_it_where_the_window_is_cut() {
        // As many invalid bytes as the window holds, so that it is cut at the special token.
        let ids: Vec<u32> = [vec![0x82; WINDOW_IDS_MAX - 3], vec![0xE2, 257, 0x82, 0xAC]].concat();
        assert!(pieces(&ids).concat().ends_with("\u{FFFD}€"));
        assert_eq!(pieces(&ids).concat(), Tokenizer::builtin().decode(&ids).unwrap());
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
