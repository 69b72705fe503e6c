//! What a worker is asked, and what its answers mean: whether it may be used, and what is wrong with it.
//! Engines differ: many have `/health`, some only `/v1/models`; some protect the latter with a key and some
//! have none.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header, uri::PathAndQuery};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use keyway_core::health::State;

use super::{faults, models::read_models, parts};
use crate::{
    clock,
    fleet::{Cause, Fault, Worker},
    limits::{MAX_MODELS_BYTES, PROBE_TIMEOUT},
    metrics::Metrics,
    shortage::Shortage,
    upstream::{Outgoing, SendError, Upstream},
};

const HEALTH: &str = "/health";
const MODELS: &str = "/v1/models";

/// What a probe found.
#[derive(Debug)]
pub(super) enum Found {
    /// It may be used, perhaps with a fault.
    Up(Option<Fault>),
    /// The probe failed, by this fault; how many may fail is for the worker's health to say.
    Down(Fault),
    /// The gateway could not ask.
    NotAsked(Fault),
}

impl From<Fault> for Found {
    fn from(fault: Fault) -> Self {
        if fault.cause == Cause::Own { Self::NotAsked(fault) } else { Self::Down(fault) }
    }
}

/// Asks whether it is up and which models it serves, and notes these.
pub(super) async fn probe(worker: &Worker, upstream: &Upstream, metrics: &Metrics, now: Duration) -> Found {
    let healthy = match question(worker, upstream, HEALTH).await {
        Ok(_) => Ok(()),
        Err(fault) if fault.cause == Cause::TooLarge => Ok(()),
        // It is there, and so is its list of models, or it is no engine.
        Err(fault) if answers_for_another(&fault) => Err(fault),
        Err(fault) => return fault.into(),
    };
    let models = match question(worker, upstream, MODELS).await {
        Ok((kind, body)) => read_models(&body).ok_or_else(|| faults::no_list(worker, kind.as_ref(), &body)),
        Err(fault) => Err(fault),
    };
    match (models, healthy) {
        (Ok(models), _) => {
            for model in &models {
                metrics.admit_model(&model.id);
            }
            // Before it is up: sent as to another kind of worker, a request would hang there.
            if parts::is_sglang(worker, &models) && worker.parts_are_due(worker.state() != State::Ready, now)
            {
                parts::learn(worker, upstream).await;
            }
            worker.set_models(models);
            Found::Up(faults::nothing_served(worker))
        }
        (Err(fault), _) if fault.cause == Cause::Own => Found::NotAsked(fault),
        (Err(fault), Ok(())) if worker.models_known() || may_be_an_engine(&fault) => Found::Up(Some(fault)),
        // What it serves is configured, and its clients bring the keys that it wants.
        (Err(fault), Err(_)) if fault.cause == Cause::Unauthorized && worker.models_known() => {
            Found::Up(Some(fault))
        }
        (Err(fault), Err(health)) if fault.cause == Cause::NotFound => {
            Found::Down(faults::nowhere(fault, health))
        }
        (Err(fault), _) => Found::Down(fault),
    }
}

/// Whether an answer to `/health` says nothing of the engine's health: it has no such path, or not for the
/// gateway.
fn answers_for_another(fault: &Fault) -> bool {
    let says_nothing = [Cause::NotFound, Cause::Unauthorized, Cause::Redirect, Cause::Status];
    says_nothing.contains(&fault.cause)
}

/// Whether a worker that says it is well may be sent any request, although it does not say which models it
/// has.
fn may_be_an_engine(fault: &Fault) -> bool {
    [Cause::NotFound, Cause::Unauthorized, Cause::NoList, Cause::TooLarge].contains(&fault.cause)
}

/// The body of a successful answer, if one comes in time.
pub(crate) async fn get(
    worker: &Worker,
    upstream: &Upstream,
    path: &'static str,
    max_bytes: usize,
) -> Option<Bytes> {
    let asked = clock::timeout(PROBE_TIMEOUT, ask(worker, upstream, path, max_bytes)).await;
    asked.ok()?.ok().map(|(_, body)| body)
}

/// The body of a successful answer and its type, or what is wrong.
async fn question(worker: &Worker, upstream: &Upstream, path: &'static str) -> Result<Answered, Fault> {
    let asked = clock::timeout(PROBE_TIMEOUT, ask(worker, upstream, path, MAX_MODELS_BYTES)).await;
    let failed = match asked {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(failed)) => failed,
        Err(_) => return Err(faults::late(worker, path)),
    };
    Err(match failed {
        Failed::Status(status, headers) => faults::of_status(worker, path, status, &headers).await,
        Failed::TooLarge => faults::too_large(worker, path, MAX_MODELS_BYTES),
        Failed::Local(lacks) => faults::own(worker, path, lacks),
        Failed::NoAnswer => faults::no_answer(worker, upstream, path).await,
        Failed::BrokenOff => faults::broken_off(worker, path),
    })
}

/// What a body is said to be, and the body.
type Answered = (Option<HeaderValue>, Bytes);

/// Why there is no body.
enum Failed {
    /// The gateway could not ask.
    Local(Shortage),
    Status(StatusCode, HeaderMap),
    NoAnswer,
    BrokenOff,
    TooLarge,
}

async fn ask(
    worker: &Worker,
    upstream: &Upstream,
    path: &'static str,
    max_bytes: usize,
) -> Result<Answered, Failed> {
    let mut request = Outgoing::get(worker.target(&PathAndQuery::from_static(path)));
    if let Some(key) = worker.api_key() {
        request.set(header::AUTHORIZATION, key.clone());
    }
    let answer = upstream.send(worker.origin(), request).await.map_err(|error| match error {
        SendError::Local(lacks) if lacks.passes() => Failed::Local(lacks),
        _ => Failed::NoAnswer,
    })?;
    let (head, body) = answer.into_parts();
    if !head.status.is_success() {
        return Err(Failed::Status(head.status, head.headers));
    }
    let body = Limited::new(body, max_bytes).collect().await;
    let body = body
        .map_err(|error| if error.is::<LengthLimitError>() { Failed::TooLarge } else { Failed::BrokenOff })?;
    Ok((head.headers.get(header::CONTENT_TYPE).cloned(), body.to_bytes()))
}
