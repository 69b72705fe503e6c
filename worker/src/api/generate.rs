//! The generating paths: read, check, tokenise, submit, and answer whole or as a stream.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderValue;
use keyway_clients::client::Client;
use keyway_wire::headers::IGNORED;
use serde_json::Value;

use super::answer::AnswerHead;
use super::chunks::Chunks;
use super::error::ApiError;
use super::logprobs::Told;
use super::prompt::PromptSource;
use super::request::{Call, Endpoint};
use super::running::{Running, Untold, outcome, usage_of};
use super::stream::{EventStream, Events};
use super::work::{memory_of, read, work};
use super::{App, BoxError, Response, data_parallel, json_response, kv_transfer, messages, responses};
use crate::answer::output::TextOutput;
use crate::answer::reader::Shown;
use crate::engine::sampler::Sampling;
use crate::engine::sequence::{Generation, GenerationRequest};
use crate::limits::LIVE_BYTES_PER_TOKEN;
use crate::metrics::RequestGuard;
use crate::request_memory::{Room, Turn};

/// Answers a generation request. Dropping the future, or the answer's body, aborts what was submitted.
pub(crate) async fn generate<B>(
    app: Arc<App>,
    client: &Arc<Client>,
    endpoint: Endpoint,
    request: http::Request<B>,
) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let mut guard = app.metrics.guard();
    let begun = try_generate(&app, client, endpoint, request, &mut guard).await;
    let (mut response, room) = match begun {
        Ok((Begun::Whole(response), room)) => (response, room),
        Ok((Begun::Stream(mut call, running), room)) => {
            let mut response =
                EventStream::new(events(&app, &mut call, running.len()), running, guard).into_response();
            name_ignored(&mut response, &call);
            (response, room)
        }
        Ok((Begun::Background(mut call, running), room)) => {
            let mut response = responses::background::begin(&app, &mut call, running, guard, room)?;
            name_ignored(&mut response, &call);
            return Ok(response);
        }
        Err(error) => {
            guard.set(error.outcome);
            return Err(error);
        }
    };
    response.body_mut().keep(room);
    Ok(response)
}

/// How the endpoint tells a stream's pieces.
fn events(app: &Arc<App>, call: &mut Call, choices: usize) -> Box<dyn Events> {
    match call.endpoint {
        Endpoint::Chat | Endpoint::Completion => Box::new(Chunks::new(app, call, choices)),
        Endpoint::Messages => Box::new(messages::stream::ChoiceEvents::new(call)),
        Endpoint::Responses => {
            Box::new(responses::stream::ResponseEvents::new(responses::answer::Making::new(app, call)))
        }
    }
}

/// Says which fields were not acted on.
fn name_ignored(response: &mut Response, call: &Call) {
    if let Some(names) = ignored_header(&call.ignored) {
        response.headers_mut().insert(IGNORED, names);
    }
}

/// Names of fields that were not acted on, as the header tells them.
pub(super) fn ignored_header(names: &[String]) -> Option<HeaderValue> {
    HeaderValue::from_str(&names.join(", ")).ok().filter(|names| !names.is_empty())
}

enum Begun {
    Whole(Response),
    Stream(Box<Call>, Vec<Running>),
    /// Its client asks for the answer later.
    Background(Box<Call>, Vec<Running>),
}

async fn try_generate<B>(
    app: &Arc<App>,
    client: &Arc<Client>,
    endpoint: Endpoint,
    request: http::Request<B>,
    guard: &mut RequestGuard,
) -> Result<(Begun, Room), ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let rank = data_parallel::rank(request.headers(), app.engines.count())?;
    let body = read(app, client, request.into_body()).await?;
    let (body, previous) = match endpoint {
        Endpoint::Responses => {
            let joined = responses::previous::joined(app, body).await?;
            (joined.body, joined.previous)
        }
        _ => (body, None),
    };
    let preparer = Arc::clone(app);
    let prepared = work(app, body, move |body, turn| prepare(&preparer, endpoint, body, turn)).await?;
    let ((mut call, mut prepared), mut room) = prepared;
    if let Some(previous) = previous {
        call.asked.follow(previous);
    }
    room.hold(memory_kept(&call, &prepared)).map_err(ApiError::no_memory)?;
    kv_transfer::fetch(app, call.kv.as_ref(), &mut prepared).await;
    let running = submit(app, &call, rank, prepared, guard)?;
    if call.stream {
        return Ok((Begun::Stream(Box::new(call), running), room));
    }
    if call.asked.in_background {
        return Ok((Begun::Background(Box::new(call), running), room));
    }
    let mut response = whole(app, &mut call, running, guard).await?;
    name_ignored(&mut response, &call);
    Ok((Begun::Whole(response), room))
}

/// One choice's request to the engine, and the text side of its answer.
pub(crate) type Prepared = (GenerationRequest, TextOutput);

/// The part that costs time with long prompts, or with long outputs that are resumed.
pub(crate) fn prepare(
    app: &App,
    endpoint: Endpoint,
    body: &[u8],
    turn: &mut Turn,
) -> Result<(Call, Vec<Prepared>), ApiError> {
    let mut call = Call::parse(app, endpoint, body, turn)?;
    let nothing = PromptSource::Prompts { prompts: Vec::new(), add_special: false, param: "prompt" };
    let prompts = std::mem::replace(&mut call.source, nothing).tokenize(
        &app.text,
        Some(app.model.max_model_len),
        turn,
    )?;
    // A grammar is waited for on threads of its own.
    turn.over();
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
    call.forget_what_is_done();
    Ok((call, prepared))
}

/// Bytes that are kept of a request while it is answered.
fn memory_kept(call: &Call, prepared: &[Prepared]) -> usize {
    let tokens: usize =
        prepared.iter().map(|(request, _)| request.prompt.len() + request.output_ids.len()).sum();
    let echoed: usize = prepared.iter().map(|(_, output)| output.echoed_bytes()).sum();
    let functions: usize = call.tools.callable.iter().map(|function| memory_of(&function.parameters)).sum();
    tokens * LIVE_BYTES_PER_TOKEN + echoed + functions + call.asked.bytes()
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
            keeps: call.keeps_kv(),
            kept: None,
        };
    Ok(taken.generations.into_iter().zip(outputs).zip(prompts).enumerate().map(running).collect())
}

async fn whole(
    app: &Arc<App>,
    call: &mut Call,
    mut running: Vec<Running>,
    guard: &mut RequestGuard,
) -> Result<Response, ApiError> {
    let mut texts = vec![Shown::default(); running.len()];
    poll_fn(|context| poll_all(&mut running, &mut texts, context)).await?;
    guard.set(outcome(running.iter().filter_map(|r| r.output.finish)));
    if let (true, [_], Some(text)) = (call.endpoint.is_of_agents(), &running[..], texts.first_mut()) {
        let place = kv_transfer::place(app, &mut running);
        let mut answer = agents_answer(app, call, &running[0], std::mem::take(text));
        if let Some(place) = place {
            answer[kv_transfer::PARAMS] = place;
        }
        return Ok(json_response(&answer));
    }
    let usage = usage_of(&running);
    let ids = call.wants_ids().then(|| running.first_mut().map(|choice| choice.untold.take_ids()));
    Ok(AnswerHead::new(app, call).whole(&mut running, &texts, usage, ids.flatten()))
}

/// The whole answer of an agents' API.
fn agents_answer(app: &Arc<App>, call: &mut Call, choice: &Running, text: Shown) -> Value {
    match call.endpoint {
        Endpoint::Responses => responses::answer::Making::new(app, call).whole(choice, text),
        _ => messages::whole(call, choice, text),
    }
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
