//! A request to its prompt's token ids, as the engine will have them, for models whose tokenizer is known; so
//! that the index can name a prompt's blocks as engines' KV events do. Never waits for long: short prompts
//! are tokenised where they are, others on a few threads that give way to everything else (`threads.rs`), and
//! what finds no place there is routed by its text. Which tokens a prompt has is `keyway-text`'s business,
//! which text it has `prompt.rs`'.

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroUsize,
    path::Path,
    sync::Arc,
    thread, vec,
};

use bytes::Bytes;
use keyway_text::{Encoding, IncrementalTokenizer, TextError, TextModel};
use parking_lot::Mutex;

use crate::{
    config::ConfigError,
    limits::{
        INLINE_TOKENIZE_BYTES, TOKEN_MEMORY_BYTES, TOKENIZE_QUEUE_PER_CORE, TOKENIZE_SLICE_BYTES,
        TOKENIZE_SLICE_PIECES,
    },
    metrics::Metrics,
    prompt::{self, Prompt, Unknown},
    threads::Threads,
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
    /// None where there is no tokenizer.
    threads: Option<Threads>,
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
        let models: HashMap<_, _> = tokenizers.into_iter().map(load).collect::<Result<_, ConfigError>>()?;
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let start = || Threads::start("tokenize", cores, cores * TOKENIZE_QUEUE_PER_CORE);
        let threads = (!models.is_empty()).then(start).transpose();
        let failed = |error| ConfigError(format!("threads that tokenise cannot be started: {error}"));
        Ok(Self { models, threads: threads.map_err(failed)?, metrics, told: Mutex::default() })
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
            Job::new(Arc::clone(model), path.to_owned(), body.clone()).whole()
        } else {
            let mut job = Job::new(Arc::clone(model), path.to_owned(), body.clone());
            match self.threads.as_ref().and_then(|threads| threads.run(move || job.slice().transpose())) {
                None => Err(Unknown::Overflow),
                Some(result) => result.await.unwrap_or(Err(Unknown::Failed)),
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

/// A request on its way to its tokens, in slices of about a millisecond.
#[derive(Debug)]
struct Job {
    model: Arc<Model>,
    path: String,
    body: Bytes,
    /// Its prompts that are still to do; `None` before it was read.
    rest: Option<vec::IntoIter<Prompt>>,
    /// The one at hand.
    encoding: Option<Encoding>,
    done: Option<TokenPrompt>,
}

impl Job {
    fn new(model: Arc<Model>, path: String, body: Bytes) -> Self {
        Self { model, path, body, rest: None, encoding: None, done: None }
    }

    /// Does all of it.
    fn whole(mut self) -> Result<TokenPrompt, Unknown> {
        loop {
            if let Some(tokens) = self.slice()? {
                return Ok(tokens);
            }
        }
    }

    /// Does one slice; the tokens, after the last.
    fn slice(&mut self) -> Result<Option<TokenPrompt>, Unknown> {
        let Some(rest) = &mut self.rest else {
            self.rest = Some(prompt::read(&self.path, &self.body, &self.model.text.template)?.into_iter());
            return Ok(None);
        };
        let tokenizer = &self.model.tokenizer;
        let ids = match self.encoding.take() {
            Some(mut encoding) => {
                let slice = tokenizer.go_on(&mut encoding, TOKENIZE_SLICE_PIECES, TOKENIZE_SLICE_BYTES);
                let Some(encoded) = slice.map_err(|_: TextError| Unknown::Failed)? else {
                    self.encoding = Some(encoding);
                    return Ok(None);
                };
                encoded.ids
            }
            None => match rest.next() {
                Some(Prompt::Ids(ids)) => ids,
                Some(Prompt::Text { text, add_special }) => {
                    self.encoding = Some(tokenizer.begin(text, add_special));
                    return Ok(None);
                }
                None => return self.done.take().ok_or(Unknown::Unsupported).map(Some),
            },
        };
        let tokens = ids.len() as u64;
        let done = self.done.get_or_insert(TokenPrompt { ids, total: 0 });
        done.total += tokens;
        Ok(None)
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
        let threads = keyer.threads.as_ref().unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| threads.run(|| None::<()>)).collect();
        assert!(taken.len() >= TOKENIZE_QUEUE_PER_CORE);
        assert_eq!(keyer.tokens("/v1/chat/completions", &long, Some("m")).await, None);
        assert!(keyer.tokens("/v1/chat/completions", &chat("short"), Some("m")).await.is_some());
        drop(taken);
        while threads.jobs() > 0 {
            thread::yield_now();
        }
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
