//! A request to its prompt's token ids, as the engine will have them, for models whose tokenizer is known; so that the
//! index can name a prompt's blocks as engines' KV events do. Never waits for long: short prompts are tokenised where
//! they are, others on a bounded number of threads, and what finds no place there is routed by its text. Which tokens a
//! prompt has is `keyway-text`'s business, which text it has `prompt.rs`'.

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroUsize,
    path::Path,
    sync::Arc,
    thread,
};

use bytes::Bytes;
use keyway_text::{IncrementalTokenizer, TextError, TextModel};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::{
    config::ConfigError,
    limits::{INLINE_TOKENIZE_BYTES, TOKEN_MEMORY_BYTES, TOKENIZE_QUEUE_PER_CORE},
    metrics::Metrics,
    prompt::{self, Prompt, Unknown},
};

/// Stand for the worker's own models where a tokenizer's folder is expected.
const BUILTIN: &str = "builtin";
/// See above.
const RANDOM: &str = "random";

/// A prompt's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenPrompt {
    /// Of the prompt, or the first of several.
    pub ids: Vec<u32>,
    /// Tokens of all prompts of the request.
    pub total: u64,
}

/// The models whose prompts can be tokenised.
#[derive(Debug)]
pub struct TokenKeyer {
    models: HashMap<String, Arc<Model>>,
    places: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    told: Mutex<HashSet<(String, &'static str)>>,
}

#[derive(Debug)]
struct Model {
    text: TextModel,
    tokenizer: IncrementalTokenizer,
}

fn text_model(dir: &Path) -> Result<TextModel, String> {
    match dir.to_str() {
        Some(RANDOM) => Ok(TextModel::builtin()),
        #[cfg(feature = "embedded-worker")]
        Some(BUILTIN) => keyway_worker::builtin_text().map_err(|error| error.to_string()),
        #[cfg(not(feature = "embedded-worker"))]
        Some(BUILTIN) => Err("this build is without the embedded worker and its model".to_owned()),
        _ => TextModel::from_dir(dir).map_err(|error| error.to_string()),
    }
}

impl TokenKeyer {
    /// Loads the tokenizers. The error names the model and the file.
    pub fn load<'a>(
        tokenizers: impl IntoIterator<Item = (&'a str, &'a Path)>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, ConfigError> {
        let load = |(name, dir): (&str, &Path)| {
            let text =
                text_model(dir).map_err(|error| ConfigError(format!("tokenizer of {name}: {error}")))?;
            let seed = fastrand::u64(..);
            let tokenizer = IncrementalTokenizer::new(Arc::clone(&text.tokenizer), TOKEN_MEMORY_BYTES, seed);
            Ok((name.to_owned(), Arc::new(Model { text, tokenizer })))
        };
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Ok(Self {
            models: tokenizers.into_iter().map(load).collect::<Result<_, ConfigError>>()?,
            places: Arc::new(Semaphore::new(cores * TOKENIZE_QUEUE_PER_CORE)),
            metrics,
            told: Mutex::default(),
        })
    }

    /// Whether no model's prompts can be tokenised.
    pub fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    /// Whether this model's prompts can be tokenised.
    pub fn knows(&self, model: &str) -> bool {
        self.models.contains_key(model)
    }

    /// The tokens of a request's prompt; `None` where it is to be routed by its text.
    pub async fn tokens(&self, path: &str, body: &Bytes, model: Option<&str>) -> Option<TokenPrompt> {
        let name = model?;
        let model = self.models.get(name)?;
        let result = if body.len() <= INLINE_TOKENIZE_BYTES {
            model.tokens(path, body)
        } else {
            match Arc::clone(&self.places).try_acquire_owned() {
                Err(_) => Err(Unknown::Overflow),
                Ok(place) => {
                    let (model, path, body) = (Arc::clone(model), path.to_owned(), body.clone());
                    let task = move || {
                        let tokens = model.tokens(&path, &body);
                        drop(place);
                        tokens
                    };
                    tokio::task::spawn_blocking(task).await.unwrap_or(Err(Unknown::Failed))
                }
            }
        };
        let outcome = result.as_ref().err().map_or("tokens", |unknown| unknown.as_str());
        self.metrics.caches.token_keyer.with_label_values(&[name, outcome]).inc();
        if result.is_err() && self.told.lock().insert((name.to_owned(), outcome)) {
            tracing::warn!(
                model = name,
                path,
                why = outcome,
                "a prompt is routed by its text, not by its tokens"
            );
        }
        result.ok()
    }
}

impl Model {
    fn tokens(&self, path: &str, body: &[u8]) -> Result<TokenPrompt, Unknown> {
        let prompts = prompt::read(path, body, &self.text.template)?;
        let mut all = prompts.into_iter().map(|prompt| match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text { text, add_special } => {
                self.tokenizer.encode(&text, add_special).map(|encoded| encoded.ids)
            }
        });
        let failed = |_: TextError| Unknown::Failed;
        let ids = all.next().ok_or(Unknown::Unsupported)?.map_err(failed)?;
        let mut total = ids.len() as u64;
        for more in all {
            total += more.map_err(failed)?.len() as u64;
        }
        Ok(TokenPrompt { ids, total })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn keyer() -> TokenKeyer {
        let metrics = Arc::new(Metrics::new().unwrap());
        TokenKeyer::load([("m", Path::new(RANDOM))], metrics).unwrap()
    }

    fn chat(content: &str) -> Bytes {
        json!({ "model": "m", "messages": [{ "role": "user", "content": content }] }).to_string().into()
    }

    #[tokio::test]
    async fn prompts_are_tokenised_as_the_worker_does() {
        let keyer = keyer();
        let tokens = keyer.tokens("/v1/chat/completions", &chat("hi"), Some("m")).await.unwrap();
        let want = TextModel::builtin();
        let text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(tokens.ids, want.tokenizer.encode(text, false).unwrap());
        assert_eq!(tokens.total, tokens.ids.len() as u64);
        let batch = json!({ "prompt": [[1, 2, 3], [4, 5]] }).to_string().into();
        let tokens = keyer.tokens("/v1/completions", &batch, Some("m")).await.unwrap();
        assert_eq!(tokens, TokenPrompt { ids: vec![1, 2, 3], total: 5 });
    }

    #[tokio::test]
    async fn what_finds_no_place_is_routed_by_its_text_and_counted() {
        let keyer = keyer();
        let long = chat(&"long ".repeat(10_000));
        assert!(keyer.tokens("/v1/chat/completions", &long, Some("m")).await.is_some());
        let all = keyer.places.available_permits() as u32;
        let taken = keyer.places.acquire_many(all).await.unwrap();
        assert_eq!(keyer.tokens("/v1/chat/completions", &long, Some("m")).await, None);
        assert!(keyer.tokens("/v1/chat/completions", &chat("short"), Some("m")).await.is_some());
        drop(taken);
        assert!(keyer.tokens("/v1/chat/completions", &long, Some("m")).await.is_some());
        let count = |outcome| keyer.metrics.caches.token_keyer.with_label_values(&["m", outcome]).get();
        assert_eq!((count("tokens"), count("overflow")), (3, 1));
    }

    #[tokio::test]
    async fn a_model_without_a_tokenizer_is_nobody_s_fault() {
        let keyer = keyer();
        assert_eq!(keyer.tokens("/v1/chat/completions", &chat("hi"), Some("other")).await, None);
        assert_eq!(keyer.tokens("/v1/chat/completions", &chat("hi"), None).await, None);
        assert!(keyer.told.lock().is_empty());
    }

    #[test]
    fn a_missing_tokenizer_is_named() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let error = TokenKeyer::load([("m", Path::new("/nowhere"))], metrics).unwrap_err().to_string();
        assert!(error.contains("tokenizer of m") && error.contains("/nowhere"), "{error}");
    }
}
