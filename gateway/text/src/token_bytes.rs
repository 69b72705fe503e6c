//! The bytes that each token of a Hugging Face tokenizer stands for, one by one: what log probabilities and
//! grammars look at. Whole texts are decoded by the tokenizer itself, because bytes alone do not say where
//! blanks go.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::Tokenizer;

/// What one id stands for; no bytes where no token has this id.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenBytes {
    pub(crate) bytes: Vec<u8>,
    /// Has no text when decoded.
    pub(crate) special: bool,
}

/// How a vocabulary's entries are spelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// GPT-2's byte-level BPE: each character stands for a byte.
    ByteLevel,
    /// SentencePiece: `▁` is a blank, `<0xNN>` a byte.
    SentencePiece,
    /// An entry is the token's text itself, in UTF-8.
    Plain,
}

/// The bytes of every id; ids without a token have none.
pub(crate) fn table(tokenizer: &Tokenizer) -> Vec<TokenBytes> {
    let spelling = spelling(tokenizer);
    let stands_for = byte_characters();
    let mut table = vec![TokenBytes::default(); tokenizer.get_vocab_size(true)];
    for (token, id) in tokenizer.get_vocab(true) {
        let place = id as usize;
        if place >= table.len() {
            // Ids with gaps.
            table.resize(place + 1, TokenBytes::default());
        }
        table[place].bytes = match spelling {
            Spelling::ByteLevel => byte_level(&token, &stands_for),
            Spelling::SentencePiece => sentence_piece(&token),
            Spelling::Plain => token.into_bytes(),
        };
    }
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        // Added tokens are spelled as they are.
        if let Some(entry) = table.get_mut(id as usize) {
            *entry = TokenBytes { bytes: token.content.into_bytes(), special: token.special };
        }
    }
    table
}

/// Read off the decoder, which is what turns entries into text.
fn spelling(tokenizer: &Tokenizer) -> Spelling {
    let decoder = tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok());
    let mut kinds = Vec::new();
    collect_kinds(&decoder.unwrap_or_default(), &mut kinds);
    if kinds.iter().any(|kind| kind == "ByteLevel") {
        Spelling::ByteLevel
    } else if kinds.iter().any(|kind| kind == "ByteFallback" || kind == "Metaspace") {
        Spelling::SentencePiece
    } else {
        Spelling::Plain
    }
}

/// The decoder's own type, or those of a sequence's members.
fn collect_kinds(decoder: &Value, kinds: &mut Vec<String>) {
    if let Some(kind) = decoder["type"].as_str() {
        kinds.push(kind.to_owned());
    }
    for member in decoder["decoders"].as_array().into_iter().flatten() {
        collect_kinds(member, kinds);
    }
}

/// GPT-2's table (`bytes_to_unicode` in its encoder): printable bytes stand for themselves, the others are
/// U+0100 and on.
pub(crate) fn byte_characters() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    let character = |byte: u8| {
        if printable(byte) {
            return Some((char::from(byte), byte));
        }
        next += 1;
        char::from_u32(next - 1).map(|c| (c, byte))
    };
    (0..=u8::MAX).filter_map(character).collect()
}

fn byte_level(token: &str, stands_for: &HashMap<char, u8>) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(|c| stands_for.get(&c).copied()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

fn sentence_piece(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::Tokenizer;

    fn tokenizer(name: &str) -> Tokenizer {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers").join(name);
        Tokenizer::from_file(&dir.join("tokenizer.json")).unwrap()
    }

    /// The bytes joined are the text: of byte-level tokenizers exactly, of SentencePiece's behind its first
    /// blank.
    #[test]
    fn bytes_joined_are_the_text() {
        let text = "Hi, caf\u{e9} \u{1F600} x\u{301}  <b>\n 42";
        for name in ["qwen", "llama3", "gpt_oss", "deepseek", "mixtral"] {
            let tokenizer = tokenizer(name);
            let ids = tokenizer.encode(text, false).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id).to_vec()).collect();
            let joined = String::from_utf8(bytes).unwrap();
            assert_eq!(joined.trim_start(), tokenizer.decode(&ids).unwrap().trim_start(), "{name}");
        }
    }

    #[test]
    fn special_tokens_are_told_from_others() {
        let qwen = tokenizer("qwen");
        let id = |text| qwen.token_id(text).unwrap();
        assert!(qwen.is_special(id("<|im_end|>")));
        assert_eq!(qwen.token_bytes(id("<|im_end|>")), b"<|im_end|>");
        assert_eq!(qwen.decode_all(&[id("<|im_end|>")]).unwrap(), "<|im_end|>");
        assert_eq!(qwen.decode(&[id("<|im_end|>")]).unwrap(), "");
        let bytes = Tokenizer::builtin();
        assert_eq!((bytes.token_bytes(97), bytes.token_bytes(258)), (&b"a"[..], &b"<|im_end|>"[..]));
        assert_eq!(bytes.decode_all(&[97, 258, 0xC3, 0xA9]).unwrap(), "a<|im_end|>\u{e9}");
        assert!(bytes.is_special(256) && !bytes.is_special(255) && bytes.token_bytes(300).is_empty());
    }
}
