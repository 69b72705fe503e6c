//! A request to its prompt's token ids, as the engine will have them, for models whose tokenizer is known; so
//! that the index can name a prompt's blocks as engines' KV events do. Never waits for long: short prompts
//! are tokenised where they are, others on a few threads that give way to everything else (`threads.rs`), and
//! what finds no place there is routed by its text. Which tokens a prompt has is `keyway-text`'s business,
//! which text it has `prompt/text.rs`'.

mod job;
mod memory;
mod proof;

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroUsize,
    path::Path,
    sync::Arc,
    thread,
};

use bytes::Bytes;
use keyway_apis::SystemPlace;
use keyway_text::{IncrementalTokenizer, TextError, TextModel};
use parking_lot::Mutex;

use self::job::Job;
pub use self::{
    memory::PromptMemory,
    proof::{Proof, Proved},
};
use crate::{
    config::ConfigError,
    limits::{INLINE_TOKENIZE_BYTES, TOKEN_MEMORY_BYTES, TOKENIZE_QUEUE_PER_CORE},
    machine::threads::Threads,
    metrics::Metrics,
    prompt::text::{PromptApi, Unknown},
};

/// Stand for the worker's own models where a tokenizer's folder is expected.
const BUILTIN: &str = "builtin";
/// Stands there for a model of random weights, whose tokens are bytes.
const RANDOM: &str = "random";

/// The kind of a drift that an engine makes itself.
const MOVED_SYSTEM: &str = "moved_system";

/// The tokens of a request's prompt, as the engine will have them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenPrompt {
    /// Of the prompt, or the first of several.
    pub ids: Vec<u32>,
    /// Tokens of all prompts of the request.
    pub total: u64,
}

/// What is known of a prompt's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// All of them.
    Whole(TokenPrompt),
    /// Those that it begins with, up to its first message with an image.
    Beginning(Box<[u32]>),
}

/// What is known of a prompt's tokens, and what answers have said of those of its API.
#[derive(Debug, Clone)]
pub struct Tokenised {
    /// The tokens.
    pub known: Known,
    /// To be told what the answer says of them.
    pub proof: Arc<Proof>,
}

/// The models whose prompts can be tokenised.
#[derive(Debug)]
pub struct TokenKeyer {
    models: HashMap<String, Arc<Model>>,
    /// None where there is no tokenizer.
    threads: Option<Threads>,
    memory: PromptMemory,
    metrics: Arc<Metrics>,
    told: Mutex<HashSet<(String, &'static str)>>,
}

#[derive(Debug)]
struct Model {
    text: TextModel,
    tokenizer: IncrementalTokenizer,
    /// By API.
    proofs: [Arc<Proof>; PromptApi::COUNT],
}

/// Why a model's tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
enum TextModelError {
    #[error(transparent)]
    Text(#[from] TextError),
    #[cfg(not(feature = "embedded-worker"))]
    #[error("this build is without the embedded worker and its model")]
    NoWorker,
}

fn text_model(dir: &Path) -> Result<TextModel, TextModelError> {
    match dir.to_str() {
        Some(RANDOM) => Ok(TextModel::builtin()),
        #[cfg(feature = "embedded-worker")]
        Some(BUILTIN) => Ok(keyway_worker::builtin_text()?),
        #[cfg(not(feature = "embedded-worker"))]
        Some(BUILTIN) => Err(TextModelError::NoWorker),
        _ => Ok(TextModel::from_dir(dir)?),
    }
}

impl TokenKeyer {
    /// Loads the tokenizers; long prompts are tokenised in `memory`. The error names the model and the file.
    pub fn load<'a>(
        tokenizers: impl IntoIterator<Item = (&'a str, &'a Path)>,
        memory: PromptMemory,
        metrics: Arc<Metrics>,
    ) -> Result<Self, ConfigError> {
        let load = |(name, dir): (&str, &Path)| {
            let text =
                text_model(dir).map_err(|error| ConfigError(format!("tokenizer of {name}: {error}")))?;
            let seed = fastrand::u64(..);
            let tokenizer = IncrementalTokenizer::new(Arc::clone(&text.tokenizer), TOKEN_MEMORY_BYTES, seed);
            let proofs = Default::default();
            Ok((name.to_owned(), Arc::new(Model { text, tokenizer, proofs })))
        };
        let models: HashMap<_, _> = tokenizers.into_iter().map(load).collect::<Result<_, ConfigError>>()?;
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let start = || Threads::start("tokenize", cores, cores * TOKENIZE_QUEUE_PER_CORE);
        let threads = (!models.is_empty()).then(start).transpose();
        let failed = |error| ConfigError(format!("threads that tokenise cannot be started: {error}"));
        Ok(Self { models, threads: threads.map_err(failed)?, memory, metrics, told: Mutex::default() })
    }

    /// Whether no model's prompts can be tokenised.
    pub fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    /// Whether this model's prompts can be tokenised.
    pub fn knows(&self, model: &str) -> bool {
        self.models.contains_key(model)
    }

    /// Where a model's template shows system messages.
    pub fn system_place(&self, model: Option<&str>) -> SystemPlace {
        match model.and_then(|model| self.models.get(model)).map(|model| model.text.template.shows_late()) {
            Some((true, true)) => SystemPlace::Anywhere,
            Some((true, false)) => SystemPlace::NoDevelopers,
            Some((false, _)) | None => SystemPlace::InFront,
        }
    }

    /// A request to Anthropic's API has words of the system's among its messages. Where the model's template
    /// takes them in front alone, its engine moves them there, and finds nothing of the conversation's past:
    /// that is counted as a drift, and said once.
    pub fn heard_later_system(&self, name: &str) {
        if !self.models.get(name).is_some_and(|model| model.text.template.moves_later_systems()) {
            return;
        }
        self.metrics.caches.drift.prompts.with_label_values(&[name, MOVED_SYSTEM]).inc();
        if self.told.lock().insert((name.to_owned(), MOVED_SYSTEM)) {
            tracing::warn!(
                model = name,
                "clients put system messages among the others, as Claude Code does, and this model's template takes them in front \
                 alone: each new one makes the whole prompt another, and nothing of it is found cached. Give the engine a \
                 --chat-template that takes them anywhere, and the gateway's tokenizer folder the same"
            );
        }
    }

    /// The tokens of a request's prompt; `None` where it is to be routed by its text alone. `context`: the
    /// most tokens that any worker has room for, asked for where the prompt is long.
    pub async fn tokens(
        &self,
        (path, api): (&str, Option<PromptApi>),
        body: &Bytes,
        model: Option<&str>,
        context: impl FnOnce() -> Option<u64>,
    ) -> Option<Tokenised> {
        let name = model?;
        let model = self.models.get(name)?;
        let result = match api {
            None => Err(Unknown::Unsupported),
            Some(api) => self.found(model, api, body, context).await,
        };
        let outcome = match &result {
            Ok(Tokenised { known: Known::Whole(_), .. }) => "tokens",
            Ok(Tokenised { known: Known::Beginning(_), .. }) => "beginning",
            Err(unknown) => unknown.as_str(),
        };
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

    async fn found(
        &self,
        model: &Arc<Model>,
        api: PromptApi,
        body: &Bytes,
        context: impl FnOnce() -> Option<u64>,
    ) -> Result<Tokenised, Unknown> {
        let proof = Arc::clone(&model.proofs[api as usize]);
        if !proof.may_be_used() {
            return Err(Unknown::Differs);
        }
        let job = Job::new(Arc::clone(model), api, body.clone());
        let known = if body.len() <= INLINE_TOKENIZE_BYTES {
            job.whole()?
        } else {
            let mut job = job.bounded(context(), &self.memory);
            match self.threads.as_ref().and_then(|threads| threads.run(move || job.slice().transpose())) {
                None => return Err(Unknown::Overflow),
                Some(result) => result.await.unwrap_or(Err(Unknown::Failed))?,
            }
        };
        Ok(Tokenised { known, proof })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn keyer() -> TokenKeyer {
        let metrics = Arc::new(Metrics::new().unwrap());
        TokenKeyer::load([("m", Path::new(RANDOM))], PromptMemory::beside(64 << 20), metrics).unwrap()
    }

    async fn found(keyer: &TokenKeyer, path: &str, body: &Bytes, context: Option<u64>) -> Option<Known> {
        keyer.tokens((path, PromptApi::of(path)), body, Some("m"), || context).await.map(|found| found.known)
    }

    fn chat(content: &str) -> Bytes {
        json!({ "model": "m", "messages": [{ "role": "user", "content": content }] }).to_string().into()
    }

    #[tokio::test]
    async fn prompts_are_tokenised_as_the_worker_does() {
        let keyer = keyer();
        let whole = async |path, body: Bytes| match found(&keyer, path, &body, None).await {
            Some(Known::Whole(tokens)) => tokens,
            other => panic!("{other:?}"),
        };
        let tokens = whole("/v1/chat/completions", chat("hi")).await;
        let want = TextModel::builtin();
        let text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(tokens.ids, want.tokenizer.encode(text, false).unwrap());
        assert_eq!(tokens.total, tokens.ids.len() as u64);
        let batch = json!({ "prompt": [[1, 2, 3], [4, 5]] }).to_string().into();
        let tokens = whole("/v1/completions", batch).await;
        assert_eq!(tokens, TokenPrompt { ids: vec![1, 2, 3], total: 5 });
        // Of a conversation whose last message has an image, what comes before its content.
        let image = json!([{ "type": "image_url", "image_url": { "url": "data:image/png;base64,AAAA" } }]);
        let said = ["user", "assistant"].map(|role| json!({ "role": role, "content": "hi" }));
        let messages = [&said[..], &[json!({ "role": "user", "content": image })]].concat();
        let body = json!({ "model": "m", "messages": messages }).to_string().into();
        let known = found(&keyer, "/v1/chat/completions", &body, None).await;
        let text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\n";
        let begins = want.tokenizer.encode(text, false).unwrap();
        assert_eq!(known, Some(Known::Beginning(begins.into())));
    }

    #[tokio::test]
    async fn what_finds_no_place_is_routed_by_its_text_and_counted() {
        let keyer = keyer();
        let long = chat(&"long ".repeat(10_000));
        assert!(found(&keyer, "/v1/chat/completions", &long, None).await.is_some());
        let threads = keyer.threads.as_ref().unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| threads.run(|| None::<()>)).collect();
        assert!(taken.len() >= TOKENIZE_QUEUE_PER_CORE);
        assert_eq!(found(&keyer, "/v1/chat/completions", &long, None).await, None);
        assert!(found(&keyer, "/v1/chat/completions", &chat("short"), None).await.is_some());
        drop(taken);
        while threads.jobs() > 0 {
            thread::yield_now();
        }
        assert!(found(&keyer, "/v1/chat/completions", &long, None).await.is_some());
        let count = |outcome| keyer.metrics.caches.token_keyer.with_label_values(&["m", outcome]).get();
        assert_eq!((count("tokens"), count("overflow")), (3, 1));
    }

    #[tokio::test]
    async fn what_no_worker_has_room_for_or_takes_too_much_memory_is_not_tokenised() {
        let keyer = keyer();
        let text = "long ".repeat(10_000);
        let tokens = async |body: &Bytes, path, context| found(&keyer, path, body, context).await;
        // Of the model's own tokenizer each byte is one.
        let (chat, ids) = (chat(&text), json!({ "prompt": vec![7; 20_000] }).to_string().into());
        let (chats, completions) = ("/v1/chat/completions", "/v1/completions");
        assert_eq!(tokens(&chat, chats, Some(50_000)).await, None);
        assert!(tokens(&chat, chats, Some(60_000)).await.is_some());
        assert_eq!(tokens(&ids, completions, Some(19_999)).await, None);
        assert!(tokens(&ids, completions, Some(20_000)).await.is_some());
        keyer.memory.set_beside(1 << 20);
        assert_eq!(tokens(&chat, chats, None).await, None);
        keyer.memory.set_beside(64 << 20);
        assert!(tokens(&chat, chats, None).await.is_some());
        while keyer.memory.taken() > 0 {
            thread::yield_now();
        }
        let count = |outcome| keyer.metrics.caches.token_keyer.with_label_values(&["m", outcome]).get();
        assert_eq!((count("tokens"), count("too_long"), count("too_large")), (3, 2, 1));
    }

    #[tokio::test]
    async fn an_api_whose_tokens_are_others_at_the_engine_goes_by_its_text() {
        let keyer = keyer();
        let ask =
            async |path| keyer.tokens((path, PromptApi::of(path)), &chat("hi"), Some("m"), || None).await;
        let first = ask("/v1/messages").await.unwrap();
        while !first.proof.came_out(Proved::OtherTokens) {}
        assert!(ask("/v1/messages").await.is_none() && ask("/v1/chat/completions").await.is_some());
        let count = |outcome| keyer.metrics.caches.token_keyer.with_label_values(&["m", outcome]).get();
        assert_eq!((count("tokens"), count("differs")), (2, 1));
    }

    #[test]
    fn a_system_that_is_moved_in_front_is_counted() {
        let keyer = keyer();
        let count = || keyer.metrics.caches.drift.prompts.with_label_values(&["m", MOVED_SYSTEM]).get();
        keyer.heard_later_system("m");
        keyer.heard_later_system("other");
        assert_eq!(count(), 0, "ChatML takes it anywhere");
        let dir = tempfile::tempdir().unwrap();
        let template = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% endfor %}";
        let tokenizer = include_str!("../../text/tests/data/tokenizers/qwen/tokenizer.json");
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
        std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        let metrics = Arc::clone(&keyer.metrics);
        let keyer = TokenKeyer::load([("m", dir.path())], PromptMemory::beside(64 << 20), metrics).unwrap();
        keyer.heard_later_system("m");
        keyer.heard_later_system("m");
        assert_eq!(count(), 2);
        assert_eq!(keyer.told.lock().len(), 1);
    }

    #[tokio::test]
    async fn a_model_without_a_tokenizer_is_nobody_s_fault() {
        let keyer = keyer();
        for model in [Some("other"), None] {
            assert!(
                keyer
                    .tokens(("/v1/chat/completions", Some(PromptApi::Chat)), &chat("hi"), model, || None)
                    .await
                    .is_none()
            );
        }
        assert!(keyer.told.lock().is_empty());
    }

    #[test]
    fn a_missing_tokenizer_is_named() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let error = TokenKeyer::load([("m", Path::new("/nowhere"))], PromptMemory::beside(0), metrics)
            .unwrap_err()
            .to_string();
        assert!(error.contains("tokenizer of m") && error.contains("/nowhere"), "{error}");
    }
}
