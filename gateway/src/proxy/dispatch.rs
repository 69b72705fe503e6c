//! One request: read it, choose a worker, and ask it, and others where it does not serve
//! ([`crate::proxy::attempts`]). Cancellation needs no code: when the client leaves, this future is dropped,
//! and with it the request to the worker.
//!
//! Next: [`crate::proxy::attempts`], then [`crate::proxy::relay`].

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Version, request::Parts};
use http_body::Body;
use http_body_util::{LengthLimitError, Limited};
use keyway_core::{index::WorkerId, pick::Pick};
use keyway_wire::block_hash::Chain;

use crate::{
    access::{
        admission::{Admission, Permit},
        body_memory::Room,
        tenants::{self, Estimate, Used, Visit},
    },
    api::Api,
    client::Client,
    clock::Instant,
    config::Timeouts,
    error::Error,
    fleet::Worker,
    headers::{MATCHED_TOKENS, REASON, WORKER},
    impatient::{Impatient, Pace, TooSlow},
    limits::READING_INLINE_BYTES,
    machine::threads,
    metrics::Metrics,
    party::Stage,
    prompt::{
        content::{self, Content, Form, Plain},
        drift::DriftDoctor,
        ignored::Ignored,
        request::{RequestInfo, Untold},
        session,
        token_keyer::{TokenKeyer, TokenPrompt},
        work::Work,
    },
    proxy::{
        arriving,
        asked::Asked,
        attempts::Attempts,
        body::{Request, Response, full},
        poison::Broken,
        reading::{BodyReader, Sender},
        relay::Terms,
        resume::Resumer,
        retry_limits::RetryLimits,
        silence, whom,
    },
    routing::Router,
    scale::autoscale::Autoscale,
    stored_state,
    telemetry::record::Record,
    upstream::Upstream,
};

/// What dispatch needs besides the request.
#[derive(Debug, Clone)]
pub struct Dispatch {
    /// How many requests there may be.
    pub admission: Admission,
    /// Reads bodies into text and what routing knows of it, up to the largest size allowed.
    pub reader: BodyReader,
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
    /// Models whose prompts are known by their tokens.
    pub tokens: Arc<TokenKeyer>,
    /// Whether a session that the client names counts.
    pub session_hints: bool,
    /// Largest event of a stream.
    pub max_event_bytes: usize,
    /// Whether a request must name its model where workers serve different ones.
    pub require_model: bool,
    /// Whether answers name the worker and the reason.
    pub expose_routing: bool,
    /// Whether workers are asked for the usage of streams whose clients do not ask.
    pub ask_usage: bool,
    /// How long the parts of a request may take.
    pub timeouts: Timeouts,
    /// What bounds the attempts of all requests.
    pub retries: RetryLimits,
    /// Lets streams outlive their worker.
    pub resumer: Arc<Resumer>,
}

impl Dispatch {
    /// Serves one request under `/v1/`.
    pub async fn handle(
        &self,
        request: Request,
        client: &Arc<Client>,
        record: &Arc<Record>,
    ) -> Result<Response, Error> {
        // Before anything that costs: a refused request must be cheap.
        self.admission.may_come()?;
        let late = Error::Deadline { limit: self.timeouts.request };
        let begun = record.started();
        // In a box, so that what it needs is given back once the answer has begun: the connection keeps the
        // rest.
        let serving = Box::pin(self.serve(request, client, record));
        let served = silence::looking_until((begun, begun + self.timeouts.request), serving).await;
        if let Some(Err(_)) = &served
            && let Some(visit) = record.visit()
        {
            // Its client has nothing of it; what took too long may have been computed.
            visit.settle(Used::Nothing);
        }
        served.unwrap_or(Err(late))
    }

    /// All that routing knows of a request to `path`, which is this much `work`.
    pub async fn read(&self, work: Work, path: &str, headers: &HeaderMap, body: &Bytes) -> RequestInfo {
        let form = Form::of(content::kind(headers), body);
        let mut info = Arc::unwrap_or_clone(self.reader.text(form, body).await);
        self.complete(&mut info, work, path, headers);
        if info.tokens.is_none() {
            info.tokens = self.tokens(path, &info, body).await;
        }
        info
    }

    /// Adds what the body alone does not say.
    fn complete(&self, info: &mut RequestInfo, work: Work, path: &str, headers: &HeaderMap) {
        // Where it names none, there is no need to look for one.
        let path_of_kind = if work.fills_cache() { path } else { without_id(path) };
        info.kind = self.kind_of(path_of_kind, info.model.as_deref());
        if !work.fills_cache() {
            info.follow_no_prefix(work);
        } else if self.session_hints {
            info.session = session::of(headers, info, self.reader.keyer.key);
        }
    }

    /// Adds the prompt's tokens, where it came as such or the model's tokenizer is known.
    async fn add_tokens(&self, info: &mut RequestInfo, path: &str, body: &Bytes) {
        if info.work.fills_cache() {
            self.router.tokens_come();
        }
        if info.tokens.is_none() {
            info.tokens = self.tokens(path, info, body).await;
        }
    }

    /// The prompt's tokens, where the model's tokenizer is known.
    async fn tokens(&self, path: &str, info: &RequestInfo, body: &Bytes) -> Option<TokenPrompt> {
        let tokens = &self.tokens;
        let finds_nothing = info.untold.is_some_and(Untold::finds_nothing);
        if tokens.is_empty() || !info.work.fills_cache() || finds_nothing {
            return None;
        }
        // An adapter's prompts are made of its base model's tokens.
        let base = info.model.as_deref().filter(|model| !tokens.knows(model));
        let base = base.and_then(|adapter| self.router.fleet().parent_of(adapter));
        let context = || self.router.fleet().longest_context(info.model.as_deref()?);
        tokens.tokens(path, body, base.as_deref().or(info.model.as_deref()), context).await
    }

    /// Names a kind of request: workers may refuse one, and serve others.
    fn kind_of(&self, path: &str, model: Option<&str>) -> u64 {
        Chain::new(self.reader.keyer.key, path.as_bytes()).push(model.unwrap_or_default().as_bytes()).0
    }

    async fn serve(
        &self,
        request: Request,
        client: &Arc<Client>,
        record: &Arc<Record>,
    ) -> Result<Response, Error> {
        let visit = record.visit();
        let admit = |stage| self.admission.admit(stage, client, visit.clone());
        let room = || self.reader.memory.room(client, visit.clone());
        let (mut parts, body) = request.into_parts();
        let body = self.read_body((body, parts.version), || Some(room()), || admit(Stage::Arriving)).await?;
        // It has come whole.
        let permit = admit(Stage::Serving)?;
        // The server's own marks would outlive their use.
        parts.extensions.clear();
        // What few requests need is in boxes here, so that the others have no room for it.
        let plain = if Plain::is_coded(&parts.headers, &body) {
            Box::pin(Plain::of(&mut parts.headers, body, self.reader.max_bytes)).await?
        } else {
            Plain::as_it_came(body)
        };
        let (reading, sender) = (Instant::now(), Sender { client, visit: visit.as_ref() });
        let (content, mut shared) = if BodyReader::is_large(&plain) {
            Box::pin(self.reader.read(&mut parts, plain, sender)).await?
        } else {
            self.reader.read_here(&mut parts, plain, sender)?
        };
        let (info, visit) = (Arc::make_mut(&mut shared), visit.as_deref());
        let work = Work::of(&parts.method, parts.uri.path());
        self.complete(info, work, parts.uri.path(), &parts.headers);
        if info.tokens.is_some() || !self.tokens.is_empty() {
            Box::pin(self.add_tokens(info, parts.uri.path(), &content.text)).await;
        }
        info.model = info.model.take().or_else(|| whom::model_in_target(self.router.fleet(), &parts));
        info.unread = content.unread.or(info.unread.filter(|_| !content.text.is_empty()));
        if parts.method != Method::POST {
            // To look for what is stored is another kind than to compute.
            info.kind = !info.kind;
        }
        let read = Instant::now();
        self.metrics.routing.observe((read - reading).as_secs_f64());
        if stored_state::concerns(&parts, info) {
            if let Some(list) = Box::pin(self.list(&parts, record)).await {
                return list.map(|response| response.map(|body| body.with_permit(permit)));
            }
            info.owner = Box::pin(self.owner(&parts, info, record)).await?;
        }
        if self.require_model && info.owner.is_none() {
            whom::model_is_known_or_one(self.router.fleet(), &parts, info)?;
        }
        if let Some(visit) = visit.filter(|visit| visit.is_metered() && record.computes()) {
            // Whatever its path: what reaches a worker is charged.
            tenants::unclear(info, &content.text)?;
            let has_files = content::has_files(&parts.headers, &content.text);
            visit.reserve(Estimate::of(info, content.text.len(), has_files))?;
            info.metered = true;
        }
        info.share = visit.map(Visit::share).unwrap_or_default();
        info.index_owner = visit.map(Visit::index_owner).unwrap_or_default();
        let series = self.metrics.model(info.model.as_deref());
        record.model(Arc::clone(&series));
        let now = self.router.at(read);
        let suspect = self.retries.poisons.look(&content.text, now)?;
        self.retries.budget.lock().request();
        let demand = self.scale.enter(&self.router, info, now);
        let mut choice = match info.owner {
            // There is no other to wait for.
            Some(_) => Box::pin(self.router.choose(info, &[])).await.map_err(state_away)?,
            None => self.scale.choose(&self.router, info).await?,
        };
        choice.ticket.carry(demand);
        let Content { text: body, came, .. } = content;
        if let Some(visit) = visit.filter(|_| info.metered) {
            visit.asks();
        }
        let (info, record, broken) = (shared, Arc::clone(record), Broken::default());
        let asked = Arc::new(Asked { parts, body, came, info, series, record, broken });
        let response = Attempts::new(self, &asked, suspect).run(choice).await?;
        Ok(response.map(|body| body.with_permit(permit)))
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

    /// All of a body. What is not there at once takes a place of those that arrive.
    async fn read_body(
        &self,
        (body, version): (hyper::body::Incoming, Version),
        room: impl FnOnce() -> Option<Room>,
        arrives: impl FnOnce() -> Result<Permit, Error>,
    ) -> Result<Bytes, Error> {
        let too_large = Error::BodyTooLarge { limit_bytes: self.reader.max_bytes };
        // As long as its head says.
        if body.size_hint().lower() > self.reader.max_bytes as u64 {
            return Err(too_large);
        }
        let pace = Pace { idle: self.timeouts.body_idle, whole: self.timeouts.body };
        let body = Limited::new(Impatient::new(body, pace), self.reader.max_bytes);
        let mut whole = pin!(arriving::whole((body, version == Version::HTTP_2), room));
        let whole = match poll_fn(|cx| Poll::Ready(whole.as_mut().poll(cx))).await {
            Poll::Ready(whole) => whole,
            Poll::Pending => {
                let _arriving = arrives()?;
                whole.await
            }
        };
        whole.map_err(|error| match (error.downcast_ref::<TooSlow>(), error.downcast_ref::<Error>()) {
            (Some(why), _) => Error::BodyTooSlow(*why),
            (_, Some(refused)) => refused.clone(),
            _ if error.is::<LengthLimitError>() => too_large,
            _ => Error::BodyUnreadable(error.to_string()),
        })
    }

    /// What bounds an answer to this request, and in whose words it is.
    pub(crate) fn terms(&self, asked: &Asked) -> Terms {
        let (timeouts, max_event_bytes) = (self.timeouts, self.max_event_bytes);
        Terms { api: Api::of(asked.parts.uri.path()), timeouts, max_event_bytes }
    }

    /// Looks where a session's prompt leaves its past; into a large one where no other client waits for it.
    pub(crate) fn look_for_drift(&self, asked: &Arc<Asked>) {
        let (doctor, ignored) = (&self.doctor, &self.reader.ignored);
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

    pub(crate) fn expose(&self, response: &mut Response, worker: &Worker, pick: &Pick) {
        if !self.expose_routing {
            return;
        }
        let headers = response.headers_mut();
        if let Some(name) = worker.name_header() {
            headers.insert(WORKER, name.clone());
        }
        headers.insert(REASON, HeaderValue::from_static(pick.reason.as_str()));
        headers.insert(MATCHED_TOKENS, HeaderValue::from(pick.matched_tokens));
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

/// A path up to what names one thing among many: `/v1/files` of `/v1/files/abc/content`.
fn without_id(path: &str) -> &str {
    let mut slashes = memchr::memchr_iter(b'/', path.as_bytes()).skip(2);
    let (Some(second), third) = (slashes.next(), slashes.next()) else { return path };
    let has_parts = matches!(&path[..second], "/v1/chat" | "/v1/messages" | "/v1/audio" | "/v1/images");
    if has_parts { &path[..third.unwrap_or(path.len())] } else { &path[..second] }
}

/// Why a request cannot go to the worker that stores what it names.
fn state_away(error: Error) -> Error {
    if matches!(error, Error::NoWorker | Error::ModelNotFound { .. }) { Error::StateAway } else { error }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_kind_has_no_ids() {
        for (path, kind) in [
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/chat/completions/abc", "/v1/chat/completions"),
            ("/v1/completions", "/v1/completions"),
            ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
            ("/v1/responses/resp_1/input_items", "/v1/responses"),
            ("/v1/files/abc/content", "/v1/files"),
            ("/tokenize", "/tokenize"),
            ("/v2/rerank", "/v2/rerank"),
            ("/v1/", "/v1/"),
            ("//", "//"),
            ("///", "//"),
        ] {
            assert_eq!(without_id(path), kind);
        }
    }

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
