//! `keyway-loadtest check`: whether a server can be measured, and what it tells: models, streams, token
//! counts, cached tokens, which worker answered. A few short requests; measures nothing.

use std::{
    fmt::Write as _,
    process::ExitCode,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{runtime::Builder, sync::watch};

use crate::{
    args::run::ServerArgs,
    client::{
        self, Server,
        calibrate::{Calibration, calibrate},
        exchange::{Clock, Session, exchange},
        record::{Exchange, Outcome},
    },
    error::{EXIT_FAILED, Error},
    stdout,
    workload::{
        Ask,
        body::{Bodies, Endpoint},
        scale::Block,
    },
};

/// Tokens of the prompt that is sent twice: several blocks of any engine.
const PROMPT_TOKENS: u32 = 512;
/// Tokens to generate: more than one, so that a stream can be told from a whole answer.
const OUTPUT_TOKENS: u64 = 8;
/// Seed of the prompt: one that no run has by default.
const SEED: u64 = 0xc4ec;

/// One thing that a server can do.
struct Finding {
    name: &'static str,
    /// None: it cannot, and nothing that is measured needs it.
    holds: Option<bool>,
    text: String,
}

/// Asks, prints, and gives 1 if the server cannot be measured.
pub fn run(args: &ServerArgs) -> Result<ExitCode, Error> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let findings = runtime.block_on(check(args))?;
    let mut text = String::new();
    for Finding { name, holds, text: found } in &findings {
        let word = match holds {
            Some(true) => "ok",
            Some(false) => "FAIL",
            None => "none",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{word:<5}{name:<16}{found}");
    }
    stdout::print(&text)?;
    let failed = findings.iter().any(|finding| finding.holds == Some(false));
    Ok(ExitCode::from(if failed { EXIT_FAILED } else { 0 }))
}

async fn check(args: &ServerArgs) -> Result<Vec<Finding>, Error> {
    let key = args.api_key_file.as_deref().map(client::read_api_key).transpose()?;
    let server = Server::new(&args.url(), key.as_deref())?.with_headers(&args.header)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => server.first_model(args.timeout).await?,
    };
    let calibration = calibrate(&server, args.endpoint(), &model, SEED, PROMPT_TOKENS, args.timeout).await?;
    let mut findings = vec![
        Finding { name: "model", holds: Some(true), text: model.clone() },
        Finding { name: "token counts", holds: Some(true), text: counts(&calibration) },
    ];
    let bodies = Bodies::new(args.endpoint(), &model, true, SEED, calibration.bytes_per_token);
    // The clock's second makes the prompt a new one, which no cache holds from an earlier check.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let block = Block { id: now, tokens: PROMPT_TOKENS };
    let ask = Ask { blocks: vec![block], output_tokens: OUTPUT_TOKENS, said: None, begins_history: false };
    let body = Bytes::from(bodies.make(&ask, None));
    let first = send(args, &server, body.clone()).await;
    findings.push(answer(&first, args.endpoint()));
    if first.outcome != Outcome::Ok {
        return Ok(findings);
    }
    findings.push(usage(&first, args.endpoint()));
    let second = send(args, &server, body).await;
    findings.push(cached(&second));
    findings.push(worker(&second));
    Ok(findings)
}

async fn send(args: &ServerArgs, server: &Server, body: Bytes) -> Exchange {
    let (_keep, stop) = watch::channel(false);
    let clock = Clock { zero: Instant::now() };
    let (server, endpoint, timeout) = (server.clone(), args.endpoint(), args.timeout);
    let session = Session { server, endpoint, texts: 1, timeout, clock, keep_text: false, stop };
    exchange(&session, body.into()).await
}

fn counts(calibration: &Calibration) -> String {
    let Calibration { bytes_per_token, overhead_tokens, .. } = calibration;
    format!("{bytes_per_token:.3} bytes of our text for a token, {overhead_tokens} tokens of chat template")
}

fn answer(exchange: &Exchange, endpoint: Endpoint) -> Finding {
    let (holds, text) = match &exchange.outcome {
        Outcome::Ok if !endpoint.generates() => (true, "an embedding".into()),
        Outcome::Ok if exchange.text_events > 1 => {
            (true, format!("{} events with text, then [DONE]", exchange.text_events))
        }
        Outcome::Ok => (true, "one event with text: no time between tokens can be measured".into()),
        Outcome::Failed(failure) => (false, failure.to_string()),
        Outcome::Cancelled => (false, "cancelled".into()),
    };
    let took = Duration::from_nanos(exchange.end_ns.saturating_sub(exchange.sent_ns));
    Finding {
        name: if endpoint.generates() { "stream" } else { "answer" },
        holds: Some(holds),
        text: format!("{text}, in {:.1} ms", took.as_secs_f64() * 1e3),
    }
}

fn usage(exchange: &Exchange, endpoint: Endpoint) -> Finding {
    let (holds, text) = match &exchange.usage {
        Some(usage) if !endpoint.generates() => (true, format!("{} prompt tokens", usage.prompt_tokens)),
        Some(usage) if usage.completion_tokens == OUTPUT_TOKENS => {
            (true, format!("{} prompt tokens, {OUTPUT_TOKENS} generated as asked", usage.prompt_tokens))
        }
        Some(usage) => {
            let text = format!(
                "{} generated for {OUTPUT_TOKENS} asked: `ignore_eos` has no effect",
                usage.completion_tokens
            );
            (true, text)
        }
        None => (false, "no `usage` in the answer: nothing can be said of tokens".into()),
    };
    Finding { name: "usage", holds: Some(holds), text }
}

fn cached(exchange: &Exchange) -> Finding {
    let usage = exchange.usage.as_ref();
    let cached = usage.and_then(keyway_wire::openai::Usage::cached_tokens);
    let prompt = usage.map_or(0, |usage| usage.prompt_tokens);
    let text = match cached {
        Some(0) => "0 for a repeated prompt: no prefix cache, or another worker answered".into(),
        Some(cached) => format!("{cached} of {prompt} for a repeated prompt"),
        None => "not reported: `cache.achieved` will be null (vLLM: --enable-prompt-tokens-details)".into(),
    };
    Finding { name: "cached tokens", holds: cached.map(|_| true), text }
}

fn worker(exchange: &Exchange) -> Finding {
    let text = exchange
        .worker
        .clone()
        .unwrap_or_else(|| "no x-keyway-worker header: `workers` will be empty (keyway --expose)".into());
    Finding { name: "worker", holds: exchange.worker.as_ref().map(|_| true), text }
}
