//! A request as it was read, and what each attempt sends of it: the client's own headers and body, but for what belongs
//! to the hop. Who it is sent to, and how often, is decided in [`crate::dispatch`] and [`crate::resume`].

use std::sync::Arc;

use bytes::Bytes;
use http::{
    HeaderValue, Method,
    header::{ACCEPT_ENCODING, AUTHORIZATION},
    request::Parts,
    uri::PathAndQuery,
};

use crate::{
    fleet::Worker, headers, metrics::ModelSeries, record::Record, request::RequestInfo, upstream::Outgoing,
};

/// One request, read to its end.
#[derive(Debug)]
pub struct Asked {
    /// Its head.
    pub parts: Parts,
    /// Its body, with the tenant's salt.
    pub body: Bytes,
    /// What routing knows of it.
    pub info: Arc<RequestInfo>,
    /// Its model's series.
    pub series: Arc<ModelSeries>,
    /// Its record.
    pub record: Arc<Record>,
}

impl Asked {
    /// What a worker is sent: this head, and `body`.
    pub fn outgoing(&self, body: Bytes, worker: &Worker) -> Outgoing<'_> {
        const ROOT: PathAndQuery = PathAndQuery::from_static("/");
        let Parts { method, uri, headers, .. } = &self.parts;
        let target = uri.path_and_query().map_or(ROOT, |path| worker.target(path));
        let outgoing = Outgoing::new(method.clone(), target, headers, body);
        let mut outgoing = outgoing.repeatable(self.may_repeat());
        outgoing.set(headers::REQUEST_ID, self.record.id_header().clone());
        self.record.tell_trace(&mut outgoing);
        if let Some(key) = worker.api_key() {
            outgoing.set(AUTHORIZATION, key.clone());
        }
        if let Some(rank) = worker.rank() {
            outgoing.set(headers::DATA_PARALLEL_RANK, rank.into());
        }
        if self.info.work.is_inference() {
            // The relay must see where events end; engines do not compress streams unasked.
            outgoing.set(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        outgoing
    }

    /// Whether a request that a worker may have begun to compute can be sent to another one. Generating is free of side
    /// effects; of other POSTs (files, batches) that is not known.
    pub fn may_repeat(&self) -> bool {
        self.parts.method.is_safe() || self.info.work.has_no_side_effects()
    }

    /// Whether a request that a worker says it has not begun can be sent to another one: also what leaves the same behind however
    /// often it is done. Other POSTs (files, batches) may have left something, whatever the answer says.
    pub fn may_repeat_unbegun(&self) -> bool {
        self.may_repeat() || self.parts.method.is_idempotent()
    }

    /// Whether every worker of the model ought to answer it alike: it asks for nothing that one of them has stored.
    pub fn is_alike_everywhere(&self) -> bool {
        let is_media = |path: &str| path.starts_with("/v1/audio/") || path.starts_with("/v1/images/");
        let makes_media = self.parts.method == Method::POST && is_media(self.parts.uri.path());
        self.info.work.has_no_side_effects() || makes_media
    }
}
