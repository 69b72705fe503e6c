//! What SGLang says of its load over ZMQ, beside its KV events and in the same frames
//! ([`super::frames::Live`]): at each change, and once a second at least. The payload is a msgpack array, its
//! type's name first.
//!
//! The format as read in SGLang 0.5.23 (`--load-publish-endpoint`). Later fields may follow, earlier releases
//! leave out the last ones.

use super::msgpack::{Reader, Value};

/// The load of one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadStat {
    /// Requests in the batch.
    pub running: u64,
    /// Requests that wait for a place in it.
    pub waiting: u64,
    /// Which of several data-parallel engines, where it says so.
    pub rank: Option<u64>,
    /// Prompt tokens of those that wait, cached ones left out, where it says so.
    pub waiting_uncached_tokens: Option<u64>,
}

impl LoadStat {
    /// Reads a message's payload; `None` if it is none.
    pub fn decode(payload: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(payload);
        let Ok(Value::Array(fields)) = reader.next() else { return None };
        if !matches!(reader.next(), Ok(Value::Text(b"LoadStat"))) {
            return None;
        }
        // Running, waiting, tokens, the most of those, rank, waiting and not cached.
        let mut counts = [None; 6];
        for count in counts.iter_mut().take((fields as usize).saturating_sub(1)) {
            *count = match reader.next().ok()? {
                Value::Uint(count) => Some(count),
                Value::Float(count) if count >= 0.0 => Some(count as u64),
                Value::Nil | Value::Negative(_) => None,
                _ => return None,
            };
        }
        let [running, waiting, _, _, rank, waiting_uncached_tokens] = counts;
        Some(Self { running: running?, waiting: waiting?, rank, waiting_uncached_tokens })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A message as msgspec writes it: small numbers in one byte, larger ones in five.
    fn written(name: &str, counts: &[Option<u32>]) -> Vec<u8> {
        let mut bytes = vec![0x90 | (counts.len() as u8 + 1), 0xa0 | name.len() as u8];
        bytes.extend(name.as_bytes());
        for count in counts {
            match count {
                None => bytes.push(0xc0),
                Some(small @ 0..0x80) => bytes.push(*small as u8),
                Some(large) => {
                    bytes.push(0xce);
                    bytes.extend(large.to_be_bytes());
                }
            }
        }
        bytes
    }

    fn of(counts: &[Option<u32>]) -> Option<LoadStat> {
        LoadStat::decode(&written("LoadStat", counts))
    }

    #[test]
    fn a_message_of_today_a_shorter_and_a_longer_one() {
        let today = [3, 2, 900, 100_000, 1, 64_000, 901, 256, 7, 8].map(Some);
        let stat = LoadStat { running: 3, waiting: 2, rank: Some(1), waiting_uncached_tokens: Some(64_000) };
        assert_eq!(of(&today), Some(stat));
        assert_eq!(of(&[&today[..], &[Some(9), None]].concat()), Some(stat));
        assert_eq!(of(&today[..6]), Some(stat));
        let short = LoadStat { rank: None, waiting_uncached_tokens: None, ..stat };
        assert_eq!((of(&today[..2]), of(&today[..4])), (Some(short), Some(short)));
        assert_eq!(of(&[Some(3), Some(2), Some(9), Some(9), None, None]), Some(short));
    }

    #[test]
    fn what_is_none_is_none() {
        assert_eq!(of(&[Some(3)]), None);
        assert_eq!(of(&[]), None);
        assert_eq!(LoadStat::decode(&written("BlockStored", &[Some(3), Some(2)])), None);
        assert_eq!(LoadStat::decode(&[0x90]), None);
        assert_eq!(LoadStat::decode(b"\x90\xa8LoadStat"), None);
        assert_eq!(LoadStat::decode(b""), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..80), cut in 0_usize..40) {
            let _ = LoadStat::decode(&bytes);
            let whole = written("LoadStat", &[3, 2, 900, 100_000, 1, 64_000].map(Some));
            let _ = LoadStat::decode(&whole[..cut.min(whole.len())]);
        }
    }
}
