//! Requests without a server and an engine, for fuzz targets: what `api.rs` makes of any body, and what a
//! grammar lets come.

use std::sync::Arc;

use http_body_util::BodyExt as _;
use keyway_text::TextError;
use serde_json::Value;

use crate::answer::answer_format::Formats;
use crate::api::{App, Endpoint, ResponseStore, ServedModel, prepare};
use crate::engine::engines::Engines;
use crate::engine::generation_config::GenerationConfig;
use crate::engine::grammar::{Broken, Grammar, GrammarCompiler, Next};
use crate::limits::ClientBounds;
use crate::metrics::MetricsPage;
use crate::request_memory::RequestMemory;

/// Reads requests as a worker with the built-in model does.
#[derive(Debug)]
pub struct Requests {
    app: Arc<App>,
}

/// A request that a worker would begin to answer.
#[derive(Debug)]
pub struct Readable {
    grammars: Vec<Grammar>,
    eos: Vec<u32>,
    vocab_size: usize,
}

/// A request that it would refuse.
#[derive(Debug)]
pub struct Refusal {
    /// The HTTP status of the answer.
    pub status: u16,
    /// The body of the answer.
    pub error: Value,
}

impl Requests {
    /// The built-in model's tokenizer and template, with so many bytes of memory for a request.
    pub fn new(memory: usize) -> Result<Self, TextError> {
        let text = crate::worker::builtin_text()?;
        let (vocab_size, eos_token_ids) = (text.tokenizer.vocab_size(), Vec::from_iter(text.eos_token_id));
        let grammars = GrammarCompiler::new(Arc::clone(&text.tokenizer), vocab_size, eos_token_ids.clone());
        let model = ServedModel {
            names: vec!["keyway-builtin".to_owned()],
            max_model_len: 4096,
            vocab_size,
            eos_token_ids,
            numerics_id: String::new(),
            kv_source_port: None,
            created: 0,
        };
        let app = App {
            engines: Engines::new(Vec::new()),
            formats: Formats::of(&text, None, None),
            text,
            grammars,
            defaults: GenerationConfig::default(),
            metrics: MetricsPage::new(Vec::new(), None),
            model,
            memory: Arc::new(RequestMemory::new(memory)),
            clients: ClientBounds::default(),
            responses: ResponseStore::default(),
            kv_events: Vec::new(),
            kv_transfers: None,
        };
        Ok(Self { app: Arc::new(app) })
    }

    /// What becomes of the body of a chat request, or of a completion's.
    pub fn read(&self, is_chat: bool, body: &[u8]) -> Result<Readable, Refusal> {
        let endpoint = if is_chat { Endpoint::Chat } else { Endpoint::Completion };
        let mut turn = self.app.memory.short_turn(false);
        let (_, prepared) = match prepare(&self.app, endpoint, body, &mut turn) {
            Ok(prepared) => prepared,
            Err(error) => {
                let response = error.into_response();
                let status = response.status().as_u16();
                let body = futures_now(response.into_body().collect());
                let error = body.and_then(|body| serde_json::from_slice(&body.ok()?.to_bytes()).ok());
                return Err(Refusal { status, error: error.unwrap_or_default() });
            }
        };
        let grammars = prepared.into_iter().filter_map(|(request, _)| request.grammar).collect();
        let (eos, vocab_size) = (self.app.model.eos_token_ids.clone(), self.app.model.vocab_size);
        Ok(Readable { grammars, eos, vocab_size })
    }
}

impl Readable {
    /// Writes an answer in the request's form, each token chosen by one of these bytes from those that may
    /// come. How many tokens came; `None` where the request asks for no form.
    ///
    /// # Panics
    /// If a grammar refuses a token that it let come, or lets none come.
    pub fn follow(mut self, choices: &[u8]) -> Option<usize> {
        let grammar = self.grammars.first_mut()?;
        let mut came = 0;
        for choice in choices {
            let mut row = vec![0.0; self.vocab_size];
            match grammar.mask(&mut row, &self.eos) {
                Ok(()) => {}
                Err(Broken::Form(_) | Broken::Memory) => break,
            }
            let may_come: Vec<u32> = (0..).zip(&row).filter(|(_, l)| **l == 0.0).map(|(id, _)| id).collect();
            assert!(!may_come.is_empty(), "nothing may come, not even the end");
            let token = may_come[usize::from(*choice) * may_come.len() / 256];
            if self.eos.contains(&token) {
                break;
            }
            came += 1;
            match grammar.accept(token) {
                Ok(Next::More) => {}
                Ok(Next::Nothing) | Err(Broken::Memory) => break,
                Err(Broken::Form(reason)) => {
                    assert!(
                        reason.contains("too") || reason.contains("limit"),
                        "a token that might come: {reason}"
                    );
                    break;
                }
            }
        }
        Some(came)
    }
}

/// What a future comes to that has nothing to wait for.
fn futures_now<T>(future: impl Future<Output = T>) -> Option<T> {
    match std::pin::pin!(future).poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}
