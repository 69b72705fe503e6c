//! The mock's tokenizer and chat template: four bytes are a token, and each part of the prompt starts a new
//! one. So every token is known without a vocabulary, an answer sent back in the next turn has the tokens it
//! was generated as, and equal beginnings of text are equal beginnings of tokens.

/// Bytes of text that make one token: about what English is in a large vocabulary.
pub(super) const TOKEN_BYTES: usize = 4;

/// Different tokens that answers are made of; a power of two.
const ANSWER_TOKENS: usize = 4096;

/// Tokens, each as its four bytes, so that a block's bytes can be hashed as they lie.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tokens(Vec<u8>);

/// What answers are made of: a space and three letters each.
#[derive(Debug)]
pub(super) struct Vocabulary(Box<[[u8; TOKEN_BYTES]]>);

// === impl Tokens ===

impl Tokens {
    /// Appends one part of a prompt; its last token is filled up with zeros.
    pub(super) fn push_text(&mut self, text: &[u8]) {
        self.0.extend_from_slice(text);
        self.0.resize(self.0.len().next_multiple_of(TOKEN_BYTES), 0);
    }

    /// Appends one token as the four bytes of its id, lowest first.
    pub(super) fn push_id(&mut self, id: u32) {
        self.0.extend_from_slice(&id.to_le_bytes());
    }

    /// Appends a message as the template renders it.
    pub(super) fn push_message(&mut self, role: &str, content: impl FnOnce(&mut Self)) {
        self.push_role(role);
        content(self);
        self.push_text(b"<|end|>");
    }

    /// Appends what a message of `role` begins with.
    pub(super) fn push_role(&mut self, role: &str) {
        self.push_text(format!("<|{role}|>").as_bytes());
    }

    /// Appends `count` tokens of the answer that begins with token `first`.
    pub(super) fn push_answer(&mut self, vocabulary: &Vocabulary, first: u32, count: u32) {
        self.0.reserve(count as usize * TOKEN_BYTES);
        (0..count).for_each(|i| self.0.extend_from_slice(vocabulary.token(first, i)));
    }

    /// How many tokens there are.
    pub(super) fn len(&self) -> usize {
        self.0.len() / TOKEN_BYTES
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their bytes, four each.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The ids of tokens `range`.
    pub(super) fn ids(&self, range: std::ops::Range<usize>) -> Vec<u32> {
        let bytes = &self.0[range.start * TOKEN_BYTES..range.end * TOKEN_BYTES];
        let id = |token: &[u8]| u32::from_le_bytes([token[0], token[1], token[2], token[3]]);
        bytes.chunks_exact(TOKEN_BYTES).map(id).collect()
    }
}

// === impl Vocabulary ===

impl Default for Vocabulary {
    fn default() -> Self {
        let letter = |n: usize| b'a' + (n % 26) as u8;
        Self((0..ANSWER_TOKENS).map(|n| [b' ', letter(n / 676), letter(n / 26), letter(n)]).collect())
    }
}

impl Vocabulary {
    /// Token `i` of the answer that begins with token `first`.
    pub(super) fn token(&self, first: u32, i: u32) -> &[u8; TOKEN_BYTES] {
        &self.0[first.wrapping_add(i) as usize % ANSWER_TOKENS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_sent_back_has_the_tokens_it_was_generated_as() {
        let vocabulary = Vocabulary::default();
        let mut first = Tokens::default();
        first.push_message("user", |tokens| tokens.push_text(b"why?!"));
        first.push_role("assistant");
        let mut generated = first.clone();
        generated.push_answer(&vocabulary, 77, 9);
        let answer: Vec<u8> = (0..9).flat_map(|i| *vocabulary.token(77, i)).collect();

        let mut second = Tokens::default();
        second.push_message("user", |tokens| tokens.push_text(b"why?!"));
        second.push_message("assistant", |tokens| tokens.push_text(&answer));
        assert!(second.bytes().starts_with(generated.bytes()));
        assert_eq!(first.len() + 9, generated.len());
    }

    #[test]
    fn ids_are_the_bytes() {
        let mut tokens = Tokens::default();
        tokens.push_text(b"abcde");
        tokens.push_id(70_000);
        assert_eq!(tokens.ids(0..3), [u32::from_le_bytes(*b"abcd"), u32::from(b'e'), 70_000]);
        assert_eq!(tokens.len(), 3);
    }
}
