//! The hashes that name a prompt's prefixes to another worker: SHA-256 over the salt and all tokens up to a
//! block's end. Each end computes them from its own tokens, so KV of another prompt or salt is not taken.

use ring::digest::{Context, SHA256};

/// Names a prefix of whole blocks.
pub(super) type Link = [u8; 32];

/// Begins each chain, so that a hash is of nothing else.
const ROOT: &[u8] = b"keyway kv 1";

/// The name of each prefix of `tokens` that ends with a block, the empty one first.
pub(super) fn links(tokens: &[u32], block_size: usize, salt: &[u8]) -> Vec<Link> {
    let mut last = hash(&[ROOT, salt]);
    let mut links = vec![last];
    for block in tokens.chunks_exact(block_size.max(1)) {
        let ids: Vec<u8> = block.iter().flat_map(|id| id.to_le_bytes()).collect();
        last = hash(&[&last, &ids]);
        links.push(last);
    }
    links
}

fn hash(parts: &[&[u8]]) -> Link {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(part);
    }
    let mut link = [0; 32];
    link.copy_from_slice(context.finish().as_ref());
    link
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_name_is_of_its_tokens_salt_and_blocks_alone(
            tokens in prop::collection::vec(0u32..3, 0..20),
            at in any::<prop::sample::Index>(),
        ) {
            let own = links(&tokens, 4, b"s");
            prop_assert_eq!(own.len(), tokens.len() / 4 + 1);
            prop_assert_eq!(&links(&tokens[..tokens.len() / 4 * 4], 4, b"s"), &own);
            let others = links(&tokens, 4, b"t");
            prop_assert!(own.iter().zip(&others).all(|(own, other)| own != other));
            if !tokens.is_empty() {
                let at = at.index(tokens.len());
                let mut changed = tokens.clone();
                changed[at] += 1;
                for (i, (own, other)) in own.iter().zip(links(&changed, 4, b"s")).enumerate() {
                    prop_assert_eq!(*own == other, i * 4 <= at);
                }
            }
            if tokens.len() >= 4 {
                let smaller = links(&tokens, 2, b"s");
                prop_assert_ne!(own.last(), smaller.last());
            }
        }
    }
}
