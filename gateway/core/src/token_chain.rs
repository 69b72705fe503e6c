//! Names of prefixes in tokens: what blocks of token ids are called in the index, whether they come from an
//! engine's events or from a request that was tokenised. Engines' own hashes are not reproduced.
//!
//! Salt, adapter and block size seed the chain, so that what engines keep apart is apart here too.

use keyway_wire::block_hash::{BlockHash, Chain, HashKey};
use keyway_wire::kv_event::ExtraKey;

/// Keeps these chains apart from those of [`crate::keyer`], which share the key.
const DOMAIN: &[u8] = b"token blocks";
/// Tokens in a block of the largest usual size.
const USUAL_BLOCK_TOKENS: usize = 64;

/// What must be equal, besides tokens, for KV to be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenSpace<'a> {
    /// The tenant's cache salt; empty if there is none.
    pub salt: &'a [u8],
    /// Name of the LoRA adapter that the KV is computed with; `None`: the base model.
    pub adapter: Option<&'a str>,
    /// Tokens in one block of the engine's cache. The names depend on it: other sizes never match.
    pub block_size: u32,
}

impl TokenSpace<'_> {
    /// The name of the empty prefix in this space, which the first block's name is chained to.
    pub fn root(&self, key: HashKey) -> BlockHash {
        let mut seed = DOMAIN.to_vec();
        seed.extend_from_slice(&self.block_size.to_le_bytes());
        seed.extend(self.adapter.map(str::as_bytes).into_iter().flatten());
        // Told from an adapter with an empty name.
        seed.push(u8::from(self.adapter.is_some()));
        Chain::new(key, self.salt).push(&seed)
    }

    /// The names of all full blocks of a prompt without images.
    pub fn chain(&self, key: HashKey, tokens: &[u32]) -> Vec<BlockHash> {
        let blocks = tokens.chunks_exact(self.block_size.max(1) as usize);
        let names = blocks.scan(self.root(key), |before, block| {
            *before = extend(*before, block, &[]);
            Some(*before)
        });
        names.collect()
    }
}

/// The prefix `before` with one more block. `extra` is what the block's content depends on besides its
/// tokens, such as an image.
pub fn extend(before: BlockHash, tokens: &[u32], extra: &[ExtraKey]) -> BlockHash {
    // A block of usual size needs no memory of its own.
    let mut bytes = [[0; 4]; USUAL_BLOCK_TOKENS];
    if let (true, Some(bytes)) = (extra.is_empty(), bytes.get_mut(..tokens.len())) {
        bytes.iter_mut().zip(tokens).for_each(|(bytes, id)| *bytes = id.to_le_bytes());
        return Chain::after(before).push(bytes.as_flattened());
    }
    let mut block = Vec::with_capacity(4 * tokens.len());
    for id in tokens {
        block.extend_from_slice(&id.to_le_bytes());
    }
    for key in extra {
        let (tag, bytes) = match key {
            ExtraKey::Text(text) => (0_u8, text.as_bytes()),
            ExtraKey::Raw(bytes) => (1, &bytes[..]),
        };
        // Behind the tokens, whose number is the chain's: each key with its length.
        block.push(tag);
        block.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        block.extend_from_slice(bytes);
    }
    Chain::after(before).push(&block)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Short and long blocks are hashed from the same bytes.
    #[test]
    fn a_block_is_named_by_its_bytes() {
        for tokens in [1, 16, 64, 65, 256] {
            let ids: Vec<u32> = (0..tokens).map(|i| i * 70_001).collect();
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let before = BlockHash(77);
            assert_eq!(extend(before, &ids, &[]), Chain::after(before).push(&bytes));
        }
    }

    #[test]
    fn what_is_kept_apart_shares_no_name() {
        let key = HashKey::new(5);
        let spaces = [
            TokenSpace { block_size: 2, ..TokenSpace::default() },
            TokenSpace { block_size: 2, salt: b"s", ..TokenSpace::default() },
            TokenSpace { block_size: 2, adapter: Some(""), ..TokenSpace::default() },
            TokenSpace { block_size: 2, adapter: Some("s"), ..TokenSpace::default() },
            TokenSpace { block_size: 1, ..TokenSpace::default() },
        ];
        let mut names: Vec<BlockHash> =
            spaces.iter().flat_map(|space| space.chain(key, &[1, 2, 3, 4, 5])).collect();
        assert_eq!(names.len(), 4 * 2 + 5);
        let before = spaces[0].root(key);
        let text = |text: &str| ExtraKey::Text(text.to_owned());
        names.push(extend(before, &[1, 2], &[text("ab")]));
        names.push(extend(before, &[1, 2], &[text("a"), text("b")]));
        names.push(extend(before, &[1, 2], &[ExtraKey::Raw(b"ab"[..].into())]));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_longer_prompt_extends_the_chain() {
        let space = TokenSpace { block_size: 3, ..TokenSpace::default() };
        let tokens: Vec<u32> = (0..20).collect();
        let long = space.chain(HashKey::new(1), &tokens);
        for len in 0..tokens.len() {
            assert_eq!(space.chain(HashKey::new(1), &tokens[..len]), long[..len / 3]);
        }
    }
}
