//! The interface over an engine that fails: what clients see when it is not their fault.

pub(super) mod scripted;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http_body_util::{BodyExt as _, Full};
use serde_json::json;

use super::*;
use crate::engine::backend::{Backend, CacheGroup, Chunk, StepError};
use crate::engine::scheduler::StepLimits;
use crate::engine::{EngineOptions, spawn};
use crate::metrics::{Metrics, StaticInfo};

/// Says "a" a number of times, then breaks; fails while it is told to.
struct Failing {
    steps_left: usize,
    is_failing: Arc<AtomicBool>,
}

impl Backend for Failing {
    fn vocab_size(&self) -> usize {
        320
    }

    fn block_size(&self) -> usize {
        16
    }

    fn num_blocks(&self) -> usize {
        8
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        &[CacheGroup::Full]
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        if self.is_failing.load(Ordering::Relaxed) {
            return Err(StepError("the device is gone".to_owned()));
        }
        assert!(self.steps_left > 0, "broken on purpose");
        self.steps_left -= 1;
        logits.clear();
        for _ in chunks {
            logits.extend((0..320).map(|id| if id == u32::from(b'a') { 1.0 } else { 0.0 }));
        }
        Ok(())
    }
}

/// The interface over an engine that makes `steps` steps.
fn app(steps: usize) -> Arc<App> {
    app_that_fails(steps, &Arc::default())
}

/// The same, whose steps fail while they are told to.
fn app_that_fails(steps: usize, is_failing: &Arc<AtomicBool>) -> Arc<App> {
    let backend = Failing { steps_left: steps, is_failing: Arc::clone(is_failing) };
    app_over(Box::new(backend), TextModel::builtin())
}

/// The interface over a backend, with its vocabulary of 320 ids.
fn app_over(backend: Box<dyn Backend>, text: TextModel) -> Arc<App> {
    let info = StaticInfo { model: "m", numerics_id: "n", block_size: 16, num_blocks: 8 };
    let metrics = Arc::new(Metrics::new(&info).unwrap());
    let limits = StepLimits { max_batched_tokens: 4096, max_running: 4 };
    let options =
        EngineOptions { limits, eos_token_ids: vec![256], suppress_token_ids: Vec::new(), step_ahead: true };
    let max_model_len = backend.num_blocks() * backend.block_size();
    let spawned = spawn(backend, options, Arc::clone(&metrics)).unwrap();
    let names = vec!["m".to_owned()];
    let model = ServedModel {
        names,
        max_model_len,
        vocab_size: 320,
        eos_token_ids: vec![256],
        numerics_id: "n".to_owned(),
        kv_source_port: None,
        created: 0,
    };
    let formats = Formats::of(&text, None, None);
    let grammars = GrammarCompiler::new(Arc::clone(&text.tokenizer), 320, vec![256]);
    Arc::new(App {
        engines: Engines::new(vec![spawned.handle]),
        text,
        formats,
        grammars,
        defaults: GenerationConfig::default(),
        metrics: MetricsPage::new(vec![metrics], None),
        model,
        memory: Arc::new(RequestMemory::new(64 << 20)),
        clients: ClientBounds::default(),
        responses: ResponseStore::default(),
        kv_events: Vec::new(),
        kv_transfers: None,
    })
}

async fn complete(app: &Arc<App>, stream: bool) -> Response {
    let body =
        json!({"model": "m", "prompt": "x", "temperature": 0, "max_tokens": 9, "stream": stream}).to_string();
    let request = http::Request::post("/v1/completions").body(Full::<Bytes>::from(body)).unwrap();
    handle(Arc::clone(app), Client::alone(), request).await.unwrap()
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_an_error_event_and_a_broken_body() {
    let app = app(3);
    let mut body = complete(&app, true).await.into_body();
    let mut text = String::new();
    let broken = loop {
        match body.frame().await {
            Some(Ok(frame)) => text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap()),
            Some(Err(_)) => break true,
            None => break false,
        }
    };
    assert!(broken, "the body must not end well");
    assert!(!text.contains("[DONE]"), "{text}");
    let events: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(events.iter().filter(|e| e.contains("\"text\":\"a\"")).count(), 3);
    assert!(events.last().unwrap().starts_with("data: {\"error\":{"), "{text}");
    drop(body);
    assert!(app.metrics.render().contains("keyway_worker_requests_total{outcome=\"error\"} 1\n"));
}

/// One step that fails may be a request's fault.
#[tokio::test]
async fn health_says_why_steps_fail_one_after_the_other_and_until_when() {
    let is_failing = Arc::new(AtomicBool::new(false));
    let app = app_that_fails(100, &is_failing);
    let health = async || {
        let request = http::Request::get("/health").body(Full::<Bytes>::default()).unwrap();
        let answer = match handle(Arc::clone(&app), Client::alone(), request).await {
            Ok(answer) => answer,
            Err(error) => match error {},
        };
        let status = answer.status();
        (status, String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().into()).unwrap())
    };
    for _ in 0..2 {
        assert_eq!(health().await.0, StatusCode::OK);
        is_failing.store(true, Ordering::Relaxed);
        for failed in 1..=4 {
            assert_eq!(complete(&app, false).await.status(), StatusCode::SERVICE_UNAVAILABLE);
            let (status, text) = health().await;
            assert_eq!(status == StatusCode::OK, failed < 3, "{failed}: {status}");
            assert_eq!(text.contains("the device is gone"), failed >= 3, "{failed}: {text}");
        }
        is_failing.store(false, Ordering::Relaxed);
        assert_eq!(complete(&app, false).await.status(), StatusCode::OK);
    }
    assert_eq!(health().await.0, StatusCode::OK);
}

#[tokio::test]
async fn after_the_engine_failed_health_and_requests_say_so() {
    let app = app(0);
    for _ in 0..2 {
        let answer = complete(&app, false).await;
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.headers().contains_key(header::RETRY_AFTER));
    }
    while app.engines.are_alive() {
        tokio::task::yield_now().await; // its thread is unwinding
    }
    let request = http::Request::get("/health").body(Full::<Bytes>::default()).unwrap();
    assert_eq!(
        handle(app, Client::alone(), request).await.unwrap().status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
}
