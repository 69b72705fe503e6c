//! Where a request goes that names what is stored: to the worker that stores it; where that is not known, or
//! the worker is not there, to one that says that it has it. No worker is asked for a tenant's things: what
//! is not known to be a tenant's own is not its own.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{
    HeaderName, HeaderValue, Method,
    header::{
        ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, IF_MATCH, IF_MODIFIED_SINCE,
        IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, RANGE,
    },
    request::Parts,
    uri::PathAndQuery,
};
use keyway_core::index::WorkerId;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::{OF_TENANTS, Owner, StoredPath, StoredState, is};
use crate::{
    clock,
    error::Error,
    fleet::{Fleet, Worker},
    headers,
    limits::{PROBE_TIMEOUT, STORED_ASKED_AT_ONCE, STORED_NEWS_PATIENCE},
    path::as_engines_read,
    prompt::request::RequestInfo,
    telemetry::record::Record,
    upstream::{Outgoing, Upstream},
};

/// What of a client's headers is not for a question whether something is there.
const OF_THE_REQUEST: [HeaderName; 8] = [
    CONTENT_TYPE,
    CONTENT_ENCODING,
    RANGE,
    IF_RANGE,
    IF_MATCH,
    IF_NONE_MATCH,
    IF_MODIFIED_SINCE,
    IF_UNMODIFIED_SINCE,
];

/// What of an id would be something else in a path.
const NOT_IN_A_WORD: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'/')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'\\')
    .add(b'`')
    .add(b'{')
    .add(b'}');

/// An id that a request names, and where it would be asked for.
struct Sought<'a> {
    id: &'a str,
    collection: Option<&'a str>,
}

impl Sought<'_> {
    fn is_of_tenants(&self) -> bool {
        self.collection.is_some_and(|collection| OF_TENANTS.contains(&collection))
    }
}

impl StoredState {
    /// The worker that a request is for, because it stores what the request names; `None`: any.
    pub async fn owner(
        &self,
        (fleet, upstream): (&Fleet, &Upstream),
        (parts, info): (&Parts, &RequestInfo),
        record: &Record,
    ) -> Result<Option<WorkerId>, Error> {
        let path = as_engines_read(parts.uri.path());
        let Some(place) = StoredPath::of(&path) else { return Ok(None) };
        let named = named(&parts.method, place, info);
        if named.is_empty() {
            return Ok(None);
        }
        let outcome = |outcome: &str| self.metrics.requests.with_label_values(&[outcome]).inc();
        let tenant = self.tenant_of(record);
        let (mut found, mut away) = (None, None);
        for named in &named {
            let known = match self.worker_of(named.id) {
                None if tenant != 0 && named.is_of_tenants() => {
                    // It may have come at another gateway just now.
                    clock::sleep(STORED_NEWS_PATIENCE).await;
                    self.worker_of(named.id)
                }
                known => known,
            };
            match known {
                Some(owner) if owner.tenant != tenant => {
                    outcome("foreign");
                    return Err(Error::StateNotFound);
                }
                Some(owner) => match fleet.all().iter().find(is(owner.worker)) {
                    Some(worker) if worker.routable() => found = found.or(Some(owner.worker)),
                    Some(_) => away = Some(Error::StateAway),
                    None => away = away.or(Some(Error::StateGone)),
                },
                None if tenant != 0 && named.is_of_tenants() => {
                    outcome("foreign");
                    return Err(Error::StateNotFound);
                }
                None => {}
            }
        }
        // Only now: all that it names must be its tenant's.
        if found.is_some() {
            outcome("known");
            return Ok(found);
        }
        if away.is_none() && named.iter().all(|named| named.collection.is_none()) {
            return Ok(None);
        }
        let _place = self.searches.acquire().await;
        for Sought { id, collection } in &named {
            let Some(collection) = collection else { continue };
            if let Some(worker) = self.search((fleet, upstream), (parts, info), (collection, id)).await {
                outcome("found");
                self.learn(id, Owner { worker, tenant });
                return Ok(Some(worker));
            }
        }
        outcome(if away.is_some() { "away" } else { "unknown" });
        away.map_or(Ok(None), Err)
    }

    /// Asks the workers for it; the first that has it.
    async fn search(
        &self,
        (fleet, upstream): (&Fleet, &Upstream),
        (parts, info): (&Parts, &RequestInfo),
        (collection, id): (&str, &str),
    ) -> Option<WorkerId> {
        let id = utf8_percent_encode(id, NOT_IN_A_WORD);
        let path: PathAndQuery = format!("{collection}/{id}").parse().ok()?;
        let all = fleet.all();
        let may_have = |worker: &&Arc<Worker>| worker.routable() && worker.may_serve(info.model.as_deref());
        let workers: Vec<Arc<Worker>> = all.iter().filter(may_have).cloned().collect();
        // Who is the only one is sent the request itself.
        if all.len() == 1 {
            return None;
        }
        let asked = workers.into_iter().map(|worker| has_it(upstream, worker, parts, &path));
        let mut answers = stream::iter(asked).buffer_unordered(STORED_ASKED_AT_ONCE);
        while let Some(answer) = answers.next().await {
            if answer.is_some() {
                return answer;
            }
        }
        None
    }
}

async fn has_it(
    upstream: &Upstream,
    worker: Arc<Worker>,
    parts: &Parts,
    path: &PathAndQuery,
) -> Option<WorkerId> {
    has(upstream, &worker, parts, path).await.then_some(worker.id)
}

/// Whether a worker answers that it has what the path names. It is asked as the client would ask.
async fn has(upstream: &Upstream, worker: &Worker, parts: &Parts, path: &PathAndQuery) -> bool {
    let question = question(worker, parts, path);
    let answer = clock::timeout(PROBE_TIMEOUT, upstream.send(worker.origin(), question)).await;
    matches!(answer, Ok(Ok(answer)) if answer.status().is_success())
}

/// A question of the gateway's own, as the client would ask it.
pub(super) fn question<'a>(worker: &Worker, parts: &'a Parts, path: &PathAndQuery) -> Outgoing<'a> {
    let mut question = Outgoing::new(Method::GET, worker.target(path), &parts.headers, Bytes::new());
    for name in OF_THE_REQUEST {
        question.leave_out(name);
    }
    if let Some(key) = worker.api_key() {
        question.set(AUTHORIZATION, key.clone());
    }
    if let Some(rank) = worker.rank() {
        question.set(headers::DATA_PARALLEL_RANK, rank.into());
    }
    // Its answer is read here.
    question.set(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    question
}

/// The ids that a request names: in its path, then in its body.
fn named<'a>(method: &Method, place: StoredPath<'a>, info: &'a RequestInfo) -> Vec<Sought<'a>> {
    // What is posted to two words, of which the first is not listed, may well be for a path of its own.
    let known = OF_TENANTS.contains(&place.collection) || *method != Method::POST || !place.rest.is_empty();
    let in_path = place.ids().enumerate().map(|(at, id)| {
        let collection = Some(place.collection).filter(|_| at == 0 && place.id.is_some() && known);
        Sought { id, collection }
    });
    let in_body = info.names.iter().map(|reference| {
        let collection = reference.kind.collection();
        Sought { id: &reference.id, collection }
    });
    in_path.chain(in_body).collect()
}
