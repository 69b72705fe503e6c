//! The two generating paths: read, check, tokenise, submit, and answer whole or as a stream.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};

use super::answer::AnswerHead;
use super::error::ApiError;
use super::logprobs::Told;
use super::prompt::PromptSource;
use super::request::{Call, Endpoint};
use super::running::{Running, Untold, outcome, usage_of};
use super::stream::EventStream;
use super::{App, Response, data_parallel, off_the_runtime};
use crate::limits::BODY_BYTES_MAX;
use crate::metrics::RequestGuard;
use crate::output::TextOutput;
use crate::reader::Shown;
use crate::sampler::Sampling;
use crate::sequence::{Generation, GenerationRequest};

/// Answers a generation request. Dropping the future, or the answer's body, aborts what was submitted.
pub(crate) async fn generate<B>(
    app: Arc<App>,
    endpoint: Endpoint,
    request: http::Request<B>,
) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: std::fmt::Display,
{
    let mut guard = app.metrics.guard();
    match try_generate(&app, endpoint, request, &mut guard).await {
        Ok(Begun::Whole(response)) => Ok(response),
        Ok(Begun::Stream(call, running)) => Ok(EventStream::new(&app, &call, running, guard).into_response()),
        Err(error) => {
            guard.set(error.outcome);
            Err(error)
        }
    }
}

enum Begun {
    Whole(Response),
    Stream(Box<Call>, Vec<Running>),
}

async fn try_generate<B>(
    app: &Arc<App>,
    endpoint: Endpoint,
    request: http::Request<B>,
    guard: &mut RequestGuard,
) -> Result<Begun, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: std::fmt::Display,
{
    let rank = data_parallel::rank(request.headers(), app.engines.count())?;
    let body = read(request.into_body()).await?;
    let preparer = Arc::clone(app);
    let (call, prepared) = off_the_runtime(body, move |body| prepare(&preparer, endpoint, body)).await?;
    let running = submit(app, &call, rank, prepared, guard)?;
    if call.stream {
        return Ok(Begun::Stream(Box::new(call), running));
    }
    whole(app, &call, running, guard).await.map(Begun::Whole)
}

/// Reads a body, up to the limit.
pub(super) async fn read<B>(body: B) -> Result<Bytes, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: std::fmt::Display,
{
    if body.size_hint().lower() > BODY_BYTES_MAX as u64 {
        return Err(ApiError::too_large());
    }
    let body = body.map_err(|e| e.to_string());
    match Limited::new(body, BODY_BYTES_MAX).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::too_large()),
        Err(_) => Err(ApiError::body_broken()),
    }
}

/// One choice's request to the engine, and the text side of its answer.
type Prepared = (GenerationRequest, TextOutput);

/// The part that costs time with long prompts, or with long outputs that are resumed.
fn prepare(app: &App, endpoint: Endpoint, body: &[u8]) -> Result<(Call, Vec<Prepared>), ApiError> {
    let mut call = Call::parse(app, endpoint, body)?;
    let nothing = PromptSource::Prompts { prompts: Vec::new(), add_special: false, param: "prompt" };
    let prompts = std::mem::replace(&mut call.source, nothing).tokenize(&app.text)?;
    let options = call.read_options(app);
    let mut prepared = Vec::with_capacity(prompts.len() * call.shape.n);
    for prompt in prompts {
        let echo = if call.shape.echo { Some(app.text.tokenizer.decode(&prompt)) } else { None };
        let echo = echo.transpose().map_err(ApiError::internal)?;
        let request = call.request(app, prompt)?;
        for choice in 0..call.shape.n {
            let output = TextOutput::with(&app.text, &request.prompt, call.stops.clone(), &options);
            let mut output = output.map_err(ApiError::internal)?;
            let resumed = output.resume(&request.output_ids, call.emitted_bytes());
            resumed.map_err(|error| ApiError::resume(&error))?;
            if let Some(echo) = &echo {
                output.echo(echo);
            }
            // Each choice has draws of its own; the first those of a request for one.
            let seed = request.sampling.seed.wrapping_add(choice as u64);
            let sampling = Sampling { seed, ..request.sampling };
            prepared.push((GenerationRequest { sampling, ..request.clone() }, output));
        }
    }
    Ok((call, prepared))
}

fn submit(
    app: &App,
    call: &Call,
    rank: Option<usize>,
    prepared: Vec<Prepared>,
    guard: &mut RequestGuard,
) -> Result<Vec<Running>, ApiError> {
    let (requests, outputs): (Vec<GenerationRequest>, Vec<TextOutput>) = prepared.into_iter().unzip();
    let prompts: Vec<Vec<u32>> = requests.iter().map(|request| request.prompt.clone()).collect();
    // A client has the text of a resumed output: offsets are counted from its beginning.
    let chars = |id: &u32| Told { id: *id, score: None }.chars(&app.text.tokenizer);
    let offset = requests.first().map_or(0, |request| request.output_ids.iter().map(chars).sum());
    let taken = app.engines.submit(rank, requests).map_err(ApiError::not_taken)?;
    app.metrics.taken_by(taken.rank, guard);
    let running =
        |(i, ((generation, output), prompt)): (usize, ((Generation, TextOutput), Vec<u32>))| Running {
            generation: Some(generation),
            has_calls: output.has_calls,
            output,
            prompt,
            counts_prompt: i % call.shape.n == 0,
            untold: Untold {
                echo: call.shape.echo && call.shape.logprobs.is_some(),
                offset,
                ..Untold::default()
            },
            prompt_scores: Vec::new(),
            cached_tokens: 0,
        };
    Ok(taken.generations.into_iter().zip(outputs).zip(prompts).enumerate().map(running).collect())
}

async fn whole(
    app: &Arc<App>,
    call: &Call,
    mut running: Vec<Running>,
    guard: &mut RequestGuard,
) -> Result<Response, ApiError> {
    let mut texts = vec![Shown::default(); running.len()];
    poll_fn(|context| poll_all(&mut running, &mut texts, context)).await?;
    guard.set(outcome(running.iter().filter_map(|r| r.output.finish)));
    let usage = usage_of(&running);
    let ids = call.wants_ids().then(|| running.first_mut().map(|choice| choice.untold.take_ids()));
    Ok(AnswerHead::new(app, call).whole(&mut running, &texts, usage, ids.flatten()))
}

/// Ready once every choice is complete.
fn poll_all(
    running: &mut [Running],
    texts: &mut [Shown],
    context: &mut Context<'_>,
) -> Poll<Result<(), ApiError>> {
    let mut open = false;
    for (choice, text) in running.iter_mut().zip(texts) {
        loop {
            match choice.poll_text(context)? {
                Poll::Ready(Some(more)) => text.append(more),
                Poll::Ready(None) => break,
                Poll::Pending => {
                    open = true;
                    break;
                }
            }
        }
    }
    if open { Poll::Pending } else { Poll::Ready(Ok(())) }
}
