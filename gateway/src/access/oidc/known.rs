//! Tokens that were found good, until they expire: verifying a signature takes some hundred times as long as
//! looking a token up.

use std::collections::HashMap;

use super::Holder;

/// Tokens of one generation; two are kept. A token has some 200 bytes here.
const GENERATION: usize = 8_192;

/// Good tokens by their hash, in two generations: what was not asked for while one filled is forgotten.
#[derive(Debug, Default)]
pub(super) struct KnownTokens {
    young: HashMap<[u8; 32], Holder>,
    old: HashMap<[u8; 32], Holder>,
}

impl KnownTokens {
    /// Whose it is, if it is known and has not expired at `now`, in seconds of Unix time.
    pub(super) fn get(&mut self, hash: &[u8; 32], now: u64) -> Option<Holder> {
        if !self.young.contains_key(hash) {
            let holder = self.old.remove(hash)?;
            self.add(*hash, holder);
        }
        let holder = self.young.get(hash).cloned()?;
        if holder.expires > now {
            return Some(holder);
        }
        self.young.remove(hash);
        None
    }

    /// One was found good.
    pub(super) fn add(&mut self, hash: [u8; 32], holder: Holder) {
        if self.young.len() >= GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(hash, holder);
    }

    /// Forgets all: keys have changed.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::KeyId;

    #[test]
    fn what_is_asked_for_stays_and_the_rest_is_bounded() {
        let hash = |number: usize| {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&number.to_le_bytes());
            hash
        };
        let holder = Holder { names: [].into(), key: KeyId::of(&[0; 32]), expires: 100 };
        let mut known = KnownTokens::default();
        for number in 0..5 * GENERATION {
            known.add(hash(number), holder.clone());
            assert!(known.get(&hash(0), 99).is_some(), "{number}");
        }
        assert!(known.young.len() + known.old.len() <= 2 * GENERATION + 1);
        assert!(known.get(&hash(1), 99).is_none());
        assert!(known.get(&hash(0), 100).is_none() && known.get(&hash(0), 99).is_none(), "it has expired");
    }
}
