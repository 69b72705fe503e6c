//! The gateway's own `GET /v1/models`: the union of what the ready workers serve.

use std::collections::BTreeMap;

use http::{HeaderValue, header};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::{
    fleet::Fleet,
    proxy::body::{Response, full},
};

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<&'a RawValue>,
}

/// The merged list, each model once, as its first worker describes it.
pub fn merged(fleet: &Fleet) -> Response {
    let mut models = BTreeMap::new();
    for worker in fleet.all().iter().filter(|worker| worker.routable()) {
        for model in worker.models() {
            models.entry(model.id).or_insert(model.json);
        }
    }
    let list = List { object: "list", data: models.values().map(|json| &**json).collect() };
    // Raw JSON that was parsed once always serialises.
    let mut response = Response::new(full(serde_json::to_vec(&list).unwrap_or_default()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
