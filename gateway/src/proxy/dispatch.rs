//! One request: read it, choose a worker, and ask it, and others where it does not serve
//! ([`crate::proxy::attempts`]). Cancellation needs no code: when the client leaves, this future is dropped,
//! and with it the request to the worker.
//!
//! Next: [`crate::proxy::attempts`], then [`crate::proxy::relay`].

use std::{future::poll_fn, pin::Pin, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderValue, Version, request::Parts};
use keyway_apis::ErrorShape;
use keyway_core::{index::WorkerId, pick::Pick};

use crate::{
    access::{
        admission::{Admission, Permit},
        tenants::{self, Estimate, Used, Visit},
    },
    api::Api,
    client::Client,
    clock::{Instant, KeptTimer},
    config::{Config, Timeouts},
    error::Error,
    fleet::Worker,
    headers::{MATCHED_TOKENS, MODEL, REASON, WORKER},
    limits::READING_INLINE_BYTES,
    machine::threads,
    metrics::{COMPLETE, Metrics, ModelSeries},
    party::Stage,
    prompt::{
        content::{self, Content, Plain},
        drift::DriftDoctor,
        ignored::Ignored,
        request::RequestInfo,
        urgency::Urgency,
        work::Work,
    },
    proxy::{
        arriving, as_chat,
        asked::Asked,
        attempts::Attempts,
        body::{Request, Response, full},
        engine_error, kv_transfer,
        poison::Broken,
        prefill_leg::FromTwo,
        reading::{BodyReader, Sender},
        relay::Terms,
        request_reader::RequestReader,
        resume::Resumer,
        retry_limits::RetryLimits,
        silence,
    },
    routing::{Choice, Router},
    scale::autoscale::Autoscale,
    stored_state,
    telemetry::record::Record,
    translation::{WayBack, Wish},
    upstream::Upstream,
};

/// What dispatch needs besides the request.
#[derive(Debug, Clone)]
pub struct Dispatch {
    /// How many requests there may be.
    pub admission: Admission,
    /// Reads requests into what routing knows of them.
    pub requests: RequestReader,
    /// Chooses a worker for each attempt; knows the fleet and the index.
    pub router: Arc<Router>,
    /// Follows what requests ask of the fleet, and lets them wait for a first worker.
    pub scale: Arc<Autoscale>,
    /// Sends the requests to workers, over connections that it keeps.
    pub upstream: Upstream,
    /// All series; the time of reading and the retries are counted here.
    pub metrics: Arc<Metrics>,
    /// Says where sessions' prompts stop repeating their past.
    pub doctor: Arc<DriftDoctor>,
    /// What is asked of answers, and said in them.
    pub answers: AnswerOptions,
    /// How long a request waits for a room at a worker that answers with KV from elsewhere.
    pub room_wait: Duration,
    /// How long the parts of a request may take.
    pub timeouts: Timeouts,
    /// What bounds the attempts of all requests.
    pub retries: RetryLimits,
    /// Lets streams outlive their worker.
    pub resumer: Arc<Resumer>,
}

/// What the gateway asks of workers' answers, and says in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerOptions {
    /// Largest event of a stream.
    pub max_event_bytes: usize,
    /// Whether answers name the worker and the reason.
    pub expose_routing: bool,
    /// Whether workers are asked for the usage of streams whose clients do not ask.
    pub ask_usage: bool,
}

impl AnswerOptions {
    /// As the configuration says.
    pub fn of(config: &Config) -> Self {
        Self {
            max_event_bytes: config.limits.max_event_bytes,
            expose_routing: config.routing.expose,
            ask_usage: config.routing.ask_usage,
        }
    }
}

impl Dispatch {
    /// Serves one request under `/v1/`.
    pub async fn handle(
        &self,
        request: Request,
        (client, timer): (&Arc<Client>, &KeptTimer),
        record: &Arc<Record>,
    ) -> Result<Response, Error> {
        // Before anything that costs: a refused request must be cheap.
        self.admission.may_come()?;
        let late = Error::Deadline { limit: self.timeouts.request };
        let begun = record.started();
        // Over HTTP/2 a connection's requests have tasks of their own, which may run elsewhere.
        let kept = (request.version() < Version::HTTP_2).then_some(timer);
        // In a box, so that what it needs is given back once the answer has begun: the connection keeps the
        // rest. The box comes first: made before it, all of the future would be copied into it, of which
        // little is written yet.
        let mut serving = Box::into_pin(Box::<Option<_>>::default());
        serving.set(Some(self.serve(request, client, record)));
        let work = serving.as_mut().as_pin_mut().ok_or(Error::Internal)?;
        let served = silence::looking_until((begun, begun + self.timeouts.request), kept, work).await;
        drop(serving);
        if let Some(Err(_)) = &served {
            // Its client has nothing of it; what took too long may have been computed.
            record.settle(Used::Nothing);
        }
        served.unwrap_or(Err(late))
    }

    async fn serve(
        &self,
        request: Request,
        client: &Arc<Client>,
        record: &Arc<Record>,
    ) -> Result<Response, Error> {
        let visit = record.visit();
        let admit = |stage| self.admission.admit(stage, client, visit.clone());
        let room = || self.requests.bodies.memory.room(client, visit.clone());
        let (mut parts, body) = request.into_parts();
        let bounds = arriving::Bounds::of(self.requests.bodies.max_bytes, &self.timeouts);
        let body = (body, parts.version);
        let body = arriving::bounded(body, bounds, || Some(room()), || admit(Stage::Arriving)).await?;
        // It has come whole.
        let permit = admit(Stage::Serving)?;
        // The server's own marks would outlive their use.
        parts.extensions.clear();
        // What few requests need is in boxes here, so that the others have no room for it.
        let plain = if Plain::is_coded(&parts.headers, &body) {
            Box::pin(Plain::of(&mut parts.headers, body, self.requests.bodies.max_bytes)).await?
        } else {
            Plain::as_it_came(body)
        };
        let (reading, sender) = (Instant::now(), Sender { client, visit: visit.as_ref() });
        let requests = &self.requests;
        let (mut content, mut shared) = if BodyReader::is_large(&plain) {
            Box::pin(requests.bodies.read(&mut parts, plain, sender)).await?
        } else {
            requests.bodies.read_here(&mut parts, plain, sender)?
        };
        let wish = requests.wish(&parts, &shared, &content);
        let way = match wish {
            None => None,
            Some(wish) => {
                Box::pin(requests.as_chat(wish, &mut parts, (&mut content, &mut shared), sender)).await?
            }
        };
        let (info, visit) = (Arc::make_mut(&mut shared), visit.as_deref());
        requests.complete(info, Work::of(&parts.method, parts.uri.path()), parts.uri.path(), &parts.headers);
        if requests.looks_for_tokens(info) {
            Box::pin(requests.add_tokens(info, parts.uri.path(), &content.text)).await;
        }
        requests.add_target(info, &parts, &content);
        info.moves_kv = self.moves_kv(parts.uri.path(), &content.text);
        let read = self.has_read(reading);
        if wish == Some(Wish::Count) {
            return self.count(info, record);
        }
        if stored_state::concerns(&parts, info) {
            if let Some(list) = Box::pin(self.list(&parts, record)).await {
                return list.map(|response| holding(response, permit));
            }
            info.owner = Box::pin(self.owner(&parts, info, record)).await?;
        }
        requests.refuse(info, &parts)?;
        if visit.is_some() || record.is_billed() {
            of_tenant(visit, record, info, (&parts.headers, &content.text[..])).await?;
        }
        urge(info, &parts.headers, record)?;
        let series = self.named(info, way.is_some(), record, visit)?;
        let now = self.router.at(read);
        let suspect = self.retries.poisons.look(&content.text, now)?;
        self.retries.budget.lock().request();
        let demand = self.scale.enter(&self.router, info, now);
        let chosen = self.choose(info).await;
        let Content { text: body, came, .. } = content;
        let (info, record, broken) = (shared, Arc::clone(record), Broken::default());
        let asked = Arc::new(Asked { parts, body, came, info, series, record, broken });
        let mut attempts = Attempts::new(self, &asked, suspect);
        let response = match attempts.run(chosen, demand).await {
            Some(response) => response,
            None => Box::pin(self.fall_back(&mut attempts, &asked, client)).await?,
        };
        // In a box: what few answers need.
        let error = engine_error::due(&response, &asked.parts.method, asked.parts.uri.path());
        let is_told = way.is_some() || error.is_some() || response.extensions().get::<FromTwo>().is_some();
        let response = if is_told { Box::pin(told(response, way, error)).await? } else { response };
        Ok(holding(response, permit))
    }

    /// A request has been read that was begun then; the time now.
    fn has_read(&self, reading: Instant) -> Instant {
        let read = Instant::now();
        self.metrics.routing.observe((read - reading).as_secs_f64());
        read
    }

    /// The API of a request, if KV of its prompt may come from another worker than the one that answers.
    pub(crate) fn moves_kv(&self, path: &str, body: &[u8]) -> Option<Api> {
        if !self.router.fleet().moves_kv() {
            return None;
        }
        let api = Some(Api::of(path)).filter(|api| api.says_its_end())?;
        kv_transfer::has_one_prompt(api, body).then_some(api)
    }

    /// The series of a request's model. The record is told of it, which name the client sent, and whether the
    /// request goes on as a chat.
    fn named(
        &self,
        info: &RequestInfo,
        translated: bool,
        record: &Record,
        visit: Option<&Visit>,
    ) -> Result<Arc<ModelSeries>, Error> {
        let series = self.metrics.model(info.model.as_deref());
        record.model(Arc::clone(&series));
        if info.renamed.is_some() {
            self.note_renamed(info, record);
        }
        if translated {
            record.translated();
        }
        // What its model costs is known now.
        if visit.is_some_and(Visit::has_budget) {
            record.hold()?;
        }
        Ok(series)
    }

    /// Answers how many tokens a prompt has: no worker is asked.
    fn count(&self, info: &RequestInfo, record: &Record) -> Result<Response, Error> {
        record.model(self.metrics.model(info.model.as_deref()));
        let counted = as_chat::count(info.tokens.as_ref())?;
        record.outcome(COMPLETE);
        Ok(counted)
    }

    async fn choose(&self, info: &RequestInfo) -> Result<Choice, Error> {
        match info.owner {
            // There is no other to wait for.
            Some(_) => Box::pin(self.router.choose(info, &[])).await.map_err(state_away),
            // Another model is asked before any first worker is waited for.
            None if self.has_fallbacks(info) => Box::pin(self.router.choose(info, &[])).await,
            None => self.scale.choose(&self.router, info).await,
        }
    }

    /// The worker that stores what a request names, if it names anything.
    async fn owner(
        &self,
        parts: &Parts,
        info: &RequestInfo,
        record: &Record,
    ) -> Result<Option<WorkerId>, Error> {
        let Some(stored) = self.router.stored_state() else { return Ok(None) };
        stored.owner((self.router.fleet(), &self.upstream), (parts, info), record).await
    }

    /// A list of what all workers store.
    async fn list(&self, parts: &Parts, record: &Record) -> Option<Result<Response, Error>> {
        let list =
            self.router.stored_state()?.list((self.router.fleet(), &self.upstream), parts, record).await?;
        Some(list.map(|answer| answer.map(full)))
    }

    /// Remembers the ids that an answer hands out.
    pub(crate) fn watch(&self, response: &mut Response, asked: &Asked, worker: &Worker) {
        if let Some(stored) = self.router.stored_state().filter(|_| response.status().is_success())
            && stored_state::concerns(&asked.parts, &asked.info)
            && let Some(tap) = stored.tap(&asked.parts, &asked.info, worker, &asked.record)
        {
            response.body_mut().watch(tap);
        }
    }

    /// What bounds an answer to this request, and in whose words it is.
    pub(crate) fn terms(&self, asked: &Asked) -> Terms {
        let (timeouts, max_event_bytes) = (self.timeouts, self.answers.max_event_bytes);
        Terms { api: Api::of(asked.parts.uri.path()), timeouts, max_event_bytes }
    }

    /// Looks where a session's prompt leaves its past; into a large one where no other client waits for it.
    pub(crate) fn look_for_drift(&self, asked: &Arc<Asked>) {
        let (doctor, ignored) = (&self.doctor, &self.requests.bodies.ignored);
        // Asked for only where needed: who has no large bodies needs no threads for them.
        let is_large = asked.body.len() > READING_INLINE_BYTES;
        match is_large.then(threads::large_bodies).flatten() {
            Some(threads) => {
                let (doctor, ignored, asked) = (Arc::clone(doctor), Arc::clone(ignored), Arc::clone(asked));
                threads.later(move || look_for_drift(&doctor, &ignored, &asked));
            }
            None => look_for_drift(doctor, ignored, asked),
        }
    }

    pub(crate) fn expose(
        &self,
        response: &mut Response,
        info: &RequestInfo,
        (worker, pick): (&Worker, &Pick),
    ) {
        if !self.answers.expose_routing {
            return;
        }
        let headers = response.headers_mut();
        if let Some(name) = worker.name_header() {
            headers.insert(WORKER, name.clone());
        }
        headers.insert(REASON, HeaderValue::from_static(pick.reason.as_str()));
        headers.insert(MATCHED_TOKENS, HeaderValue::from(pick.matched_tokens));
        let model = info.renamed.as_ref().and(info.model.as_deref());
        // A name that is no header's value is not configured.
        if let Some(model) = model.and_then(|model| HeaderValue::from_bytes(model.as_bytes()).ok()) {
            headers.insert(MODEL, model);
        }
    }
}

/// A request, which is its tenant's by now, is as urgent as it says, and no more than that tenant's others.
fn urge(info: &mut RequestInfo, headers: &HeaderMap, record: &Record) -> Result<(), Error> {
    let urgency = Urgency::of(headers)?;
    record.wants(urgency.ttft_objective);
    info.share = urgency.of_tenant_s(info.share);
    Ok(())
}

/// A request becomes its tenant's, if it has one, and what it may take is set aside. Whatever its path: what
/// reaches a worker is charged.
async fn of_tenant(
    visit: Option<&Visit>,
    record: &Record,
    info: &mut RequestInfo,
    (headers, text): (&HeaderMap, &[u8]),
) -> Result<(), Error> {
    let limited = visit.filter(|visit| visit.is_metered() && record.computes());
    if limited.is_some() || record.is_billed() {
        let estimate = Estimate::of(info, text.len(), content::has_files(headers, text));
        if let Some(visit) = limited {
            tenants::unclear(info, text)?;
            match visit.shared() {
                None => visit.reserve(estimate)?,
                // In a box: few gateways have a store.
                Some(shared) => Box::pin(visit.reserve_shared(shared, estimate)).await?,
            }
        }
        record.estimate(estimate);
        info.metered = true;
    }
    if let Some(visit) = visit {
        (info.share, info.index_owner) = (visit.share(), visit.index_owner());
    }
    Ok(())
}

/// The answer, which holds the request's place in the gateway from now on.
#[inline]
fn holding(mut response: Response, permit: Permit) -> Response {
    response.body_mut().hold_permit(permit);
    response
}

/// What the client is told: of an answer whose prompt another worker computed, one usage; of a request that
/// went on as a chat, an answer of its own API; of a worker's error, one that the API's clients read.
async fn told(
    mut response: Response,
    way: Option<WayBack>,
    error: Option<ErrorShape>,
) -> Result<Response, Error> {
    if let Some(from_two) = response.extensions().get::<FromTwo>().copied() {
        response = from_two.told(response).await?;
    }
    match (way, error) {
        (Some(way), _) => as_chat::answer_back(response, way).await,
        (None, Some(shape)) => Ok(engine_error::told(response, shape).await),
        (None, None) => Ok(response),
    }
}

fn look_for_drift(doctor: &DriftDoctor, ignored: &Ignored, asked: &Asked) {
    let Asked { parts, body, info, series, record, .. } = asked;
    record.drift(doctor.follow(&parts.headers, (body, ignored), info, series.label()));
}

/// Does `meanwhile` when `work` has got as far as it gets at once.
pub(crate) async fn once_begun<T>(
    mut work: Pin<&mut impl Future<Output = T>>,
    mut meanwhile: Option<impl FnOnce()>,
) -> T {
    poll_fn(|cx| {
        let polled = work.as_mut().poll(cx);
        if let Some(meanwhile) = meanwhile.take() {
            meanwhile();
        }
        polled
    })
    .await
}

/// Why a request cannot go to the worker that stores what it names.
fn state_away(error: Error) -> Error {
    if matches!(error, Error::NoWorker | Error::ModelNotFound { .. }) { Error::StateAway } else { error }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, pin::pin};

    use super::*;

    #[tokio::test]
    async fn what_is_done_meanwhile_is_done_once_and_after_the_first_step() {
        let done = RefCell::new(Vec::new());
        let work = pin!(async {
            done.borrow_mut().push("sent");
            tokio::task::yield_now().await;
            done.borrow_mut().push("answered");
        });
        once_begun(work, Some(|| done.borrow_mut().push("meanwhile"))).await;
        assert_eq!(*done.borrow(), ["sent", "meanwhile", "answered"]);
    }
}
