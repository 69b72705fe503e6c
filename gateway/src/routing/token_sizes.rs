//! How many tokens a prompt has at its model, by its bytes and by what in it is no text: learned of each
//! model from what its answers report.

use dashmap::DashMap;
use foldhash::fast::RandomState;
use keyway_core::media::Media;
use smallvec::SmallVec;

use crate::{
    limits::{BYTES_PER_TOKEN, MAX_LEARNED_MODELS},
    prompt::{
        media::{Item, KINDS},
        request::RequestInfo,
    },
};

/// Weight of the newest answer in the running estimate: about the last twenty count.
const ESTIMATE_GAIN: f64 = 0.1;
/// Text may have so many times the tokens of what is no text for an answer to tell what that costs: an error
/// of some hundredths in the one is not to be taken for the other.
const TEXT_MOST: f64 = 4.0;

/// A prompt's size at its model; an estimate.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PromptSize {
    /// Tokens of all of it.
    pub(super) tokens: u64,
    /// Tokens of a block of its text.
    pub(super) block_tokens: f64,
    /// What is no text, among its blocks.
    pub(super) media: SmallVec<[Media; 1]>,
}

/// Bytes of a token and tokens of what is no text, by the model's name; requests without one have the empty
/// name. Bounded: names come from clients.
#[derive(Debug, Default)]
pub(super) struct TokenSizes(DashMap<String, Sizes, RandomState>);

#[derive(Debug, Clone, Copy)]
struct Sizes {
    bytes_per_token: f64,
    /// Whether an answer has told of that.
    is_told: bool,
    kinds: [Price; KINDS],
}

impl Default for Sizes {
    fn default() -> Self {
        Self { bytes_per_token: BYTES_PER_TOKEN as f64, is_told: false, kinds: [Price::default(); KINDS] }
    }
}

impl TokenSizes {
    /// Bytes of canonical text in a token.
    pub(super) fn bytes_per_token(&self, model: Option<&str>) -> f64 {
        self.0.get(model.unwrap_or_default()).map_or(BYTES_PER_TOKEN as f64, |known| known.bytes_per_token)
    }

    /// The size of a prompt.
    pub(super) fn prompt(&self, request: &RequestInfo) -> PromptSize {
        let (chain, items) = (&request.chain, request.media.all());
        let (model, block_bytes) = (request.model.as_deref(), chain.block_bytes.max(1) as f64);
        if items.is_empty() {
            let bytes_per_token = self.bytes_per_token(model);
            let tokens = (chain.total_bytes as f64 / bytes_per_token).ceil() as u64;
            return PromptSize {
                tokens,
                block_tokens: block_bytes / bytes_per_token,
                media: SmallVec::new(),
            };
        }
        let sizes = self.of(model);
        let block_tokens = block_bytes / sizes.bytes_per_token;
        let more = |item: &Item| sizes.tokens(item) - item.bytes as f64 / sizes.bytes_per_token;
        let media = |item: &Item| Media {
            at_blocks: item.at as f64 / block_bytes,
            blocks: item.bytes as f64 / block_bytes,
            more_tokens: more(item),
        };
        let tokens = chain.total_bytes as f64 / sizes.bytes_per_token + items.iter().map(more).sum::<f64>();
        PromptSize { tokens: tokens.ceil() as u64, block_tokens, media: items.iter().map(media).collect() }
    }

    /// Learns from an answer, which has reported `prompt_tokens` for a prompt of its model.
    pub(super) fn learn(&self, request: &RequestInfo, prompt_tokens: u64) {
        let (chain, items) = (&request.chain, request.media.all());
        // Short prompts tell more about the chat template than about the tokenizer.
        if prompt_tokens < 32 || chain.total_bytes == 0 {
            return;
        }
        let model = request.model.as_deref().unwrap_or_default();
        if items.is_empty() {
            let seen = chain.total_bytes as f64 / prompt_tokens as f64;
            self.with(model, |sizes| {
                let gain = if sizes.is_told { ESTIMATE_GAIN } else { 1.0 };
                sizes.bytes_per_token += gain * (seen - sizes.bytes_per_token);
                sizes.is_told = true;
            });
            return;
        }
        let kind = items[0].kind;
        if items.iter().any(|item| item.kind != kind) {
            return;
        }
        let (count, tokens) = (request.media.sum(|item| item.count), request.media.sum(|item| item.tokens));
        let text_bytes = chain.total_bytes.saturating_sub(request.media.sum(|item| item.bytes));
        self.with(model, |sizes| {
            let text = text_bytes as f64 / sizes.bytes_per_token;
            let rest = prompt_tokens as f64 - text;
            if rest > 0.0 && text <= TEXT_MOST * rest {
                sizes.kinds[kind as usize].learn(features(count, tokens), rest);
            }
        });
    }

    fn of(&self, model: Option<&str>) -> Sizes {
        self.0.get(model.unwrap_or_default()).map_or_else(Sizes::default, |known| *known)
    }

    fn with(&self, model: &str, change: impl FnOnce(&mut Sizes)) {
        if let Some(mut known) = self.0.get_mut(model) {
            change(&mut known);
        } else if self.0.len() < MAX_LEARNED_MODELS {
            // Names come from clients where a worker does not list its models.
            let mut sizes = Sizes::default();
            change(&mut sizes);
            self.0.insert(model.to_owned(), sizes);
        }
    }
}

impl Sizes {
    fn tokens(&self, item: &Item) -> f64 {
        self.kinds[item.kind as usize].tokens(features(item.count, item.tokens))
    }
}

/// What a model's price of some items goes by: how many they are, in a measure in which both are alike, and
/// how large.
fn features(count: u64, tokens: u64) -> [f64; 2] {
    /// One that is as large as most.
    const USUAL: f64 = 1_000.0;
    [count as f64 * USUAL, tokens as f64]
}

/// Tokens of one kind of items at one model: so many each, as where every picture is made the same size, and
/// so many for their size. The least squares of what answers have told, of which the last twenty or so count.
#[derive(Debug, Clone, Copy)]
struct Price {
    /// Sums of the features' products, and of those with the tokens.
    products: [f64; 3],
    told: [f64; 2],
    /// Tokens for each feature.
    of: [f64; 2],
}

impl Default for Price {
    /// What is known of an item without a model holds until an answer tells.
    fn default() -> Self {
        Self { products: [0.0; 3], told: [0.0; 2], of: [0.0, 1.0] }
    }
}

impl Price {
    /// What an older answer still counts beside the next.
    const KEPT: f64 = 0.95;
    /// How much what was known without a model weighs: a hundredth of one answer of one usual item.
    const BEFORE: f64 = 10_000.0;

    fn tokens(&self, features: [f64; 2]) -> f64 {
        self.of[0] * features[0] + self.of[1] * features[1]
    }

    fn learn(&mut self, [a, b]: [f64; 2], tokens: f64) {
        for (sum, more) in self.products.iter_mut().zip([a * a, a * b, b * b]) {
            *sum = *sum * Self::KEPT + more;
        }
        for (sum, more) in self.told.iter_mut().zip([a * tokens, b * tokens]) {
            *sum = *sum * Self::KEPT + more;
        }
        let [aa, ab, bb] = self.products;
        let (aa, bb) = (aa + Self::BEFORE, bb + Self::BEFORE);
        let [at, bt] = [self.told[0], self.told[1] + Self::BEFORE];
        let determinant = aa * bb - ab * ab;
        let [each, size] = [(at * bb - bt * ab) / determinant, (aa * bt - ab * at) / determinant];
        // No item gives tokens back: without the one that would, the other explains most.
        self.of = match (each < 0.0, size < 0.0) {
            (true, _) => [0.0, bt / bb],
            (_, true) => [at / aa, 0.0],
            _ => [each, size],
        };
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use keyway_wire::block_hash::HashKey;
    use keyway_wire::spans::width_behind;
    use serde_json::json;

    use super::*;
    use crate::prompt::request::{self, KeyerConfig};

    fn request(text_bytes: usize, pictures: &[(u32, u32)]) -> RequestInfo {
        let picture = |(width, height): &(u32, u32)| {
            let mut head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
            head.extend(width.to_be_bytes().into_iter().chain(height.to_be_bytes()));
            head.extend([8, 6, 0, 0, 0, 0]);
            let base64 = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, head);
            json!({ "type": "image_url", "image_url": { "url": format!("data:image/png;base64,{base64}") } })
        };
        let mut parts: Vec<_> = pictures.iter().map(picture).collect();
        parts.push(json!({ "type": "text", "text": "x".repeat(text_bytes) }));
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": parts }] });
        let config = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() };
        request::read(body.to_string().as_bytes(), config)
    }

    fn estimate(sizes: &TokenSizes, request: &RequestInfo) -> f64 {
        sizes.prompt(request).tokens as f64
    }

    #[test]
    fn text_is_learned_from_text_alone() {
        let sizes = TokenSizes::default();
        let text = request(8_000, &[]);
        let before = estimate(&sizes, &text);
        assert!((before - 2_020.0).abs() < 20.0, "{before}");
        sizes.learn(&text, 4_040);
        assert!((estimate(&sizes, &text) - 4_040.0).abs() < 1.0);
        let known = sizes.bytes_per_token(Some("m"));
        sizes.learn(&request(80, &[(1_000, 1_000)]), 100_000);
        assert_eq!(sizes.bytes_per_token(Some("m")), known);
        assert_eq!(sizes.bytes_per_token(Some("another")), 4.0);
    }

    /// Models whose pictures all have as many tokens, models whose pictures' sizes count, and both.
    #[test]
    fn what_a_model_s_pictures_cost_is_learned_however_it_counts_them() {
        let shapes = [(640, 480), (1_920, 1_080), (300, 300), (1_000, 1_400)];
        for price in [
            |_: u64| 256.0,
            |pixels: u64| pixels as f64 / 1_024.0,
            |pixels: u64| 85.0 + pixels as f64 / 400.0,
        ] {
            let sizes = TokenSizes::default();
            let of = |(width, height): (u32, u32)| price(u64::from(width) * u64::from(height));
            for _ in 0..20 {
                for pictures in shapes.windows(2) {
                    let asked = request(400, pictures);
                    let text = estimate(&TokenSizes::default(), &request(400, &[]));
                    let tokens = text + pictures.iter().map(|picture| of(*picture)).sum::<f64>();
                    sizes.learn(&asked, tokens as u64);
                }
            }
            for picture in shapes {
                let (asked, text) = (request(400, &[picture]), request(400, &[]));
                let own = estimate(&sizes, &asked) - estimate(&sizes, &text);
                assert!((own / of(picture) - 1.0).abs() < 0.12, "{picture:?}: {own} for {}", of(picture));
            }
        }
    }

    #[test]
    fn the_first_answer_tells_most_of_it() {
        let sizes = TokenSizes::default();
        let asked = request(40, &[(1_024, 768)]);
        sizes.learn(&asked, 4_500);
        let learned = estimate(&sizes, &asked);
        assert!((learned / 4_500.0 - 1.0).abs() < 0.03, "{learned}");
    }

    #[test]
    fn a_little_picture_beside_much_text_teaches_nothing() {
        let sizes = TokenSizes::default();
        let asked = request(400_000, &[(280, 280)]);
        let before = estimate(&sizes, &asked);
        sizes.learn(&asked, before as u64 + 5_000);
        assert_eq!(estimate(&sizes, &asked), before);
    }

    /// The tokens of all blocks are those of the prompt, whatever the items cost.
    #[test]
    fn blocks_have_the_prompt_s_tokens() {
        let sizes = TokenSizes::default();
        let asked = request(4_000, &[(640, 480), (2_000, 2_000)]);
        sizes.learn(&request(40, &[(640, 480)]), 3_000);
        let size = sizes.prompt(&asked);
        let view = keyway_core::RequestView {
            chain: &asked.chain.names,
            prompt_tokens: size.tokens,
            block_tokens: size.block_tokens,
            media: &size.media,
            session: None,
        };
        let named = view.spans().blocks(asked.chain.names.len());
        let (all, span) = (view.matched_tokens(named as u32), width_behind(named) as f64);
        assert!(size.tokens - all <= (span * size.block_tokens).ceil() as u64, "{all} of {}", size.tokens);
        assert!(size.tokens > 10_000, "{}", size.tokens);
    }
}
