//! A request as it was read, and what each attempt sends of it: the client's own headers and body, but for
//! what belongs to the hop. Who it is sent to, and how often, is decided in [`crate::proxy::dispatch`] and
//! [`crate::proxy::resume`].

use std::sync::Arc;

use bytes::Bytes;
use http::{
    HeaderValue, Method,
    header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE},
    request::Parts,
    uri::PathAndQuery,
};

use crate::{
    fleet::Worker,
    headers,
    metrics::ModelSeries,
    prompt::{content, request::RequestInfo},
    proxy::poison::Broken,
    telemetry::record::Record,
    upstream::Outgoing,
};

/// One request, read to its end.
#[derive(Debug)]
pub struct Asked {
    /// Method, target and headers, from which [`Asked::outgoing`] makes what a worker is sent.
    pub parts: Parts,
    /// Its body's text, with the tenant's salt: what is read, and what anything is put into.
    pub body: Bytes,
    /// What is sent where nothing is put into the body, if that is not its text.
    pub came: Option<Bytes>,
    /// What routing knows of it.
    pub info: Arc<RequestInfo>,
    /// Series of the model that it names, where its answer is counted; `other` for one that the fleet lacks.
    pub series: Arc<ModelSeries>,
    /// Where its attempts and its end are noted, for the log, the metrics and the trace.
    pub record: Arc<Record>,
    /// Workers that broke behind it.
    pub broken: Broken,
}

impl Asked {
    /// What a worker is sent: this head, and `body`.
    pub fn outgoing(&self, body: Bytes, worker: &Worker) -> Outgoing<'_> {
        const ROOT: PathAndQuery = PathAndQuery::from_static("/");
        let Parts { method, uri, headers, .. } = &self.parts;
        let untouched = body.as_ptr() == self.body.as_ptr() && body.len() == self.body.len();
        let transcoded = self.came.is_some() && !untouched;
        let body = self.came.clone().filter(|_| untouched).unwrap_or(body);
        let target = uri.path_and_query().map_or(ROOT, |path| worker.target(path));
        let outgoing = Outgoing::new(method.clone(), target, headers, body);
        let mut outgoing = outgoing.repeatable(self.may_repeat());
        outgoing.set(headers::REQUEST_ID, self.record.id_header().clone());
        if transcoded && let Some(kind) = content::in_utf8(headers) {
            outgoing.set(CONTENT_TYPE, kind);
        }
        self.record.tell_trace(&mut outgoing);
        if let Some(key) = worker.api_key() {
            outgoing.set(AUTHORIZATION, key.clone());
        }
        if let Some(rank) = worker.rank() {
            outgoing.set(headers::DATA_PARALLEL_RANK, rank.into());
        }
        if self.info.work.is_inference() || self.info.metered {
            // The relay must see where events end, and what is charged; engines do not compress streams
            // unasked.
            outgoing.set(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        outgoing
    }

    /// Whether a request that a worker may have begun to compute can be sent to another one. Generating is
    /// free of side effects; of other POSTs (files, batches) that is not known.
    pub fn may_repeat(&self) -> bool {
        self.parts.method.is_safe() || self.info.work.has_no_side_effects()
    }

    /// Whether a request that a worker says it has not begun can be sent to another one: also what leaves the
    /// same behind however often it is done. Other POSTs (files, batches) may have left something, whatever
    /// the answer says.
    pub fn may_repeat_unbegun(&self) -> bool {
        self.may_repeat() || self.parts.method.is_idempotent()
    }

    /// Whether every worker of the model ought to answer it alike: it asks for nothing that one of them has
    /// stored.
    pub fn is_alike_everywhere(&self) -> bool {
        let is_media = |path: &str| path.starts_with("/v1/audio/") || path.starts_with("/v1/images/");
        let makes_media = self.parts.method == Method::POST && is_media(self.parts.uri.path());
        self.info.owner.is_none() && (self.info.work.has_no_side_effects() || makes_media)
    }
}
