//! Text to token ids and back, whole. Streams of ids are decoded in `decode.rs`.

use std::path::Path;
use std::sync::OnceLock;

use crate::token_bytes::{self, TokenBytes};
use crate::token_floor::TokenFloor;
use crate::{TextError, byte_tokenizer};

/// A model's tokenizer: the built-in byte tokenizer or a Hugging Face `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    kind: Kind,
    /// Made at the first use: a few megabytes with a large vocabulary.
    bytes: OnceLock<Vec<TokenBytes>>,
    /// Made at the first use, as large; none where a text may come to any number of tokens.
    floor: OnceLock<Option<Box<TokenFloor>>>,
}

#[derive(Debug, Clone)]
enum Kind {
    Bytes,
    HuggingFace(Box<tokenizers::Tokenizer>),
}

/// A token beside the model's own, as `tokenizer_config.json` describes it.
#[derive(Debug, Clone)]
pub(crate) struct AddedToken {
    pub(crate) content: String,
    /// Matches only between characters that are no part of a word.
    pub(crate) single_word: bool,
    /// Takes the blanks before it.
    pub(crate) lstrip: bool,
    /// Takes the blanks after it.
    pub(crate) rstrip: bool,
    /// Is looked for in the text after normalisation, not before.
    pub(crate) normalized: bool,
    /// Has no text when decoded.
    pub(crate) special: bool,
    /// Only needs to be there: if it is an added token already, its flags stay.
    pub(crate) must_exist: bool,
}

/// An added token that is looked for in the text as it is, before any normalisation.
#[derive(Debug, Clone)]
pub(crate) struct RawAddedToken {
    pub(crate) content: String,
    /// Whether it is matched wherever its text stands, and takes nothing else.
    pub(crate) alone: bool,
}

impl Tokenizer {
    /// This crate's own: ids 0..=255 are bytes, then `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`.
    pub const fn builtin() -> Self {
        Self { kind: Kind::Bytes, bytes: OnceLock::new(), floor: OnceLock::new() }
    }

    /// Reads a `tokenizer.json`, without the padding and cutting that it may set for training.
    pub fn from_file(path: &Path) -> Result<Self, TextError> {
        let bytes =
            std::fs::read(path).map_err(|source| TextError::Read { path: path.to_owned(), source })?;
        Self::from_json(path, &bytes)
    }

    /// The bytes of a `tokenizer.json`; `path` is for messages.
    pub(crate) fn from_json(path: &Path, json: &[u8]) -> Result<Self, TextError> {
        let malformed = |reason: String| TextError::Malformed { path: path.to_owned(), reason };
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| malformed(e.to_string()))?;
        // A training setting that some files keep: it would cut or pad prompts without a word.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| malformed(e.to_string()))?;
        Ok(Self { kind: Kind::HuggingFace(Box::new(inner)), bytes: OnceLock::new(), floor: OnceLock::new() })
    }

    /// Adds tokens, or changes the flags of those already added, as transformers does with those of
    /// `tokenizer_config.json`.
    pub(crate) fn add_tokens(&mut self, tokens: &[AddedToken]) -> Result<(), TextError> {
        let Kind::HuggingFace(inner) = &mut self.kind else { return Ok(()) };
        let known = inner.get_added_tokens_decoder();
        let new = tokens.iter().filter(|token| {
            let known = known.values().find(|k| k.content == token.content);
            known.is_none_or(|k| {
                let flags = (k.single_word, k.lstrip, k.rstrip, k.normalized, k.special);
                !token.must_exist
                    && flags
                        != (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)
            })
        });
        let new: Vec<tokenizers::AddedToken> = new
            .map(|token| {
                tokenizers::AddedToken::from(token.content.as_str(), token.special)
                    .single_word(token.single_word)
                    .lstrip(token.lstrip)
                    .rstrip(token.rstrip)
                    .normalized(token.normalized)
            })
            .collect();
        inner.add_tokens(new).map(drop).map_err(|e| TextError::Tokenize(e.to_string()))
    }

    /// Token ids of `text`. The texts of special tokens become their ids. With `add_special`, what the
    /// tokenizer puts around a plain prompt (such as a BOS token) is added; a rendered chat template has it
    /// already.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        match &self.kind {
            Kind::Bytes => Ok(byte_tokenizer::encode(text)),
            Kind::HuggingFace(inner) => inner
                .encode_fast(text, add_special)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|e| TextError::Tokenize(e.to_string())),
        }
    }

    /// Whether `text` comes to `tokens` tokens at least, found without tokenising it. Where that is not
    /// certain, `false`.
    pub fn comes_to(&self, text: &str, tokens: usize) -> bool {
        self.floor().is_some_and(|floor| floor.reaches(text, tokens))
    }

    /// Bytes of text that one token stands for at most; `None` where a text of any length may come to few
    /// tokens.
    pub fn longest_token(&self) -> Option<usize> {
        self.floor().map(TokenFloor::longest)
    }

    fn floor(&self) -> Option<&TokenFloor> {
        let made = self.floor.get_or_init(|| {
            let entries = self.table().iter().map(|token| &token.bytes[..]);
            match &self.kind {
                Kind::Bytes => Some(TokenFloor::of_bytes(entries)),
                Kind::HuggingFace(inner) => TokenFloor::new(inner, entries),
            }
            .map(Box::new)
        });
        made.as_deref()
    }

    /// What the tokenizer puts before and after a plain prompt (`add_special` of [`Tokenizer::encode`]);
    /// `None` if that depends on the prompt.
    pub(crate) fn frame(&self) -> Option<(Vec<u32>, Vec<u32>)> {
        // Two texts, so that a frame is told from what one of them happens to look like.
        let of = |text: &str| {
            let (plain, framed) = (self.encode(text, false).ok()?, self.encode(text, true).ok()?);
            let at = framed.windows(plain.len().max(1)).position(|window| window == plain)?;
            Some((framed[..at].to_vec(), framed[at + plain.len()..].to_vec()))
        };
        of("a").filter(|frame| of("b 1").as_ref() == Some(frame))
    }

    /// The texts that are cut out of a prompt before anything else looks at it, with whether each takes
    /// blanks before it, or depends on its neighbours: added tokens that are looked for in the text as it is.
    pub(crate) fn raw_added_tokens(&self) -> Vec<RawAddedToken> {
        match &self.kind {
            Kind::Bytes => byte_tokenizer::SPECIAL
                .iter()
                .map(|content| RawAddedToken { content: (*content).to_owned(), alone: true })
                .collect(),
            Kind::HuggingFace(inner) => inner
                .get_added_tokens_decoder()
                .into_values()
                .filter(|token| !token.normalized)
                .map(|token| RawAddedToken {
                    alone: !token.lstrip && !token.single_word,
                    content: token.content,
                })
                .collect(),
        }
    }

    /// Text of `ids` without special tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|id| byte_tokenizer::byte(*id)).collect();
                Ok(String::from_utf8(bytes)
                    .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
            }
            Kind::HuggingFace(inner) => {
                inner.decode(ids, true).map_err(|e| TextError::Tokenize(e.to_string()))
            }
        }
    }

    /// Text of `ids` with the texts of special tokens.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String, TextError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes = ids.iter().flat_map(|id| self.token_bytes(*id)).copied().collect::<Vec<u8>>();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::HuggingFace(inner) => {
                inner.decode(ids, false).map_err(|e| TextError::Tokenize(e.to_string()))
            }
        }
    }

    /// Whether decoding looks at `id` at all: it passes over ids without a token and, unless `special`, over
    /// special tokens, as if they were not there.
    pub(crate) fn is_decoded(&self, id: u32, special: bool) -> bool {
        match &self.kind {
            Kind::Bytes if special => !self.token_bytes(id).is_empty(),
            Kind::Bytes => byte_tokenizer::byte(id).is_some(),
            Kind::HuggingFace(inner) => inner
                .id_to_token(id)
                .is_some_and(|token| special || !inner.get_added_vocabulary().is_special_token(&token)),
        }
    }

    /// The bytes that one token stands for, a special token's name included; none for an id without a token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.table().get(id as usize).map_or(&[], |token| &token.bytes)
    }

    /// Whether a token has no text of its own in an answer.
    pub fn is_special(&self, id: u32) -> bool {
        self.table().get(id as usize).is_some_and(|token| token.special)
    }

    fn table(&self) -> &[TokenBytes] {
        self.bytes.get_or_init(|| match &self.kind {
            Kind::Bytes => byte_tokenizer::table(),
            Kind::HuggingFace(inner) => token_bytes::table(inner),
        })
    }

    /// The id of one token's text, special tokens included.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => match token.as_bytes() {
                [byte] => Some(u32::from(*byte)),
                _ => byte_tokenizer::special_id(token),
            },
            Kind::HuggingFace(inner) => inner.token_to_id(token),
        }
    }

    /// Number of ids that have a meaning, special tokens included. A model's vocabulary may be padded beyond
    /// it.
    pub fn vocab_size(&self) -> usize {
        match &self.kind {
            Kind::Bytes => byte_tokenizer::VOCAB_SIZE,
            Kind::HuggingFace(inner) => inner.get_vocab_size(true),
        }
    }
}
