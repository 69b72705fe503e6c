//! The tokenizer of a model without files (the worker's random one): a byte is a token, and three special
//! tokens follow. Not for checkpoints, which bring their own `tokenizer.json`.

use crate::token_bytes::TokenBytes;

/// `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`: ids 256, 257 and 258.
pub(crate) const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const FIRST_SPECIAL_ID: u32 = 256;

/// Ids that have a meaning: 256 bytes and the special tokens.
pub(crate) const VOCAB_SIZE: usize = 256 + SPECIAL.len();

/// The id of a special token's text.
pub(crate) fn special_id(text: &str) -> Option<u32> {
    SPECIAL.iter().position(|s| *s == text).map(|i| FIRST_SPECIAL_ID + i as u32)
}

/// One id per byte, except that a special token's text becomes its id.
pub(crate) fn encode(text: &str) -> Vec<u32> {
    let mut ids = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("<|") {
        let special = SPECIAL.iter().enumerate().find(|(_, s)| rest[at..].starts_with(**s));
        // An unknown "<|" is two plain bytes.
        let (plain, id, next) = match special {
            Some((i, s)) => (at, Some(FIRST_SPECIAL_ID + i as u32), at + s.len()),
            None => (at + 2, None, at + 2),
        };
        ids.extend(rest.as_bytes()[..plain].iter().map(|b| u32::from(*b)));
        ids.extend(id);
        rest = &rest[next..];
    }
    ids.extend(rest.bytes().map(u32::from));
    ids
}

/// The byte an id stands for; special tokens and padding have none.
pub(crate) fn byte(id: u32) -> Option<u8> {
    u8::try_from(id).ok()
}

/// The bytes of each id from 0 on: every single byte, then the special tokens' texts.
pub(crate) fn table() -> Vec<TokenBytes> {
    let bytes = (0..=u8::MAX).map(|byte| TokenBytes { bytes: vec![byte], special: false });
    let special = SPECIAL.iter().map(|text| TokenBytes { bytes: text.as_bytes().to_vec(), special: true });
    bytes.chain(special).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn special_tokens_are_one_id_and_lookalikes_are_bytes() {
        assert_eq!(encode("a<|im_start|>b<|im_end|>"), [97, 257, 98, 258]);
        assert_eq!(encode("<|<|endoftext|>"), [60, 124, 256]);
        assert_eq!(encode("<|im_start"), "<|im_start".bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(encode(""), [0u32; 0]);
        assert_eq!(special_id("<|im_end|>"), Some(258));
        assert_eq!(special_id("<|pad|>"), None);
    }

    proptest! {
        #[test]
        fn bytes_come_back(text in "[a-z<|>é€😀]{0,60}") {
            let ids = encode(&text);
            prop_assume!(ids.iter().all(|id| *id < 256));
            let bytes: Vec<u8> = ids.iter().filter_map(|id| byte(*id)).collect();
            prop_assert_eq!(bytes, text.into_bytes());
        }
    }
}
