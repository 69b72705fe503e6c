//! Pictures, sounds and films in a prompt. In its chain they are bytes like any text, but an engine makes
//! another number of tokens of them than of so much text.

/// One of them, or some that stand together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Media {
    /// Where it begins, in blocks of the chain.
    pub at_blocks: f64,
    /// Blocks that it takes there; more than none.
    pub blocks: f64,
    /// Tokens that it has beyond those of so much text; below 0 where it has fewer.
    pub more_tokens: f64,
}

/// Tokens that so many leading blocks have beyond those of so much text. Of what is cut the part counts.
pub(crate) fn more_tokens(media: &[Media], blocks: f64) -> f64 {
    let of_one = |one: &Media| one.more_tokens * ((blocks - one.at_blocks) / one.blocks).clamp(0.0, 1.0);
    media.iter().map(of_one).sum()
}

#[cfg(test)]
mod tests {
    use keyway_wire::block_hash::BlockHash;

    use super::*;
    use crate::candidate::RequestView;

    /// 10 blocks of text, a picture of 4 blocks that has 1,000 tokens, 6 blocks of text.
    fn view<'a>(chain: &'a [BlockHash], media: &'a [Media]) -> RequestView<'a> {
        RequestView { chain, prompt_tokens: 16 * 16 + 1_000 + 1, block_tokens: 16.0, media, session: None }
    }

    #[test]
    fn a_picture_s_tokens_count_where_it_stands() {
        let chain = [BlockHash(7); 20];
        let media = [Media { at_blocks: 10.0, blocks: 4.0, more_tokens: 1_000.0 - 4.0 * 16.0 }];
        let view = view(&chain, &media);
        for (blocks, tokens) in
            [(0, 0), (10, 160), (11, 410), (12, 660), (14, 1_160), (15, 1_176), (20, 1_256)]
        {
            assert_eq!(view.matched_tokens(blocks), tokens, "{blocks}");
            assert!((view.cached_tokens(blocks) - tokens as f64).abs() < 1.0, "{blocks}");
        }
        // Its last block holds the last token, which is computed whatever is held.
        assert_eq!(view.reusable().len(), 20);
        let exact = RequestView { prompt_tokens: view.prompt_tokens - 1, ..view };
        assert_eq!(exact.reusable().len(), 19);
    }

    #[test]
    fn one_that_is_cheaper_than_text_takes_away() {
        let chain = [BlockHash(7); 20];
        let media = [Media { at_blocks: 2.0, blocks: 10.0, more_tokens: -150.0 }];
        let view = RequestView { prompt_tokens: 171, media: &media, ..view(&chain, &media) };
        assert_eq!((view.matched_tokens(2), view.matched_tokens(12), view.matched_tokens(20)), (32, 42, 170));
    }
}
