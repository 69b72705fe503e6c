//! Lists of what is stored (`GET /v1/files`): every worker has its part. All are asked, and what they list is
//! one list, the newest first as the API has it; for a tenant of its own alone. Pages are each worker's own,
//! so a list that is cut says that there is more, and goes on behind an id only at the worker that stores it.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderValue, Method, Response, header::CONTENT_TYPE, request::Parts, uri::PathAndQuery};
use http_body_util::{BodyExt, Limited};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{OF_TENANTS, StoredPath, StoredState, find::question};
use crate::{
    clock,
    error::Error,
    fleet::{Fleet, Worker},
    limits::{LIST_ITEMS_MAX, MAX_LIST_BYTES, PROBE_TIMEOUT, STORED_ASKED_AT_ONCE},
    telemetry::record::Record,
    upstream::Upstream,
};

/// A list, as the API writes them.
#[derive(Debug, Deserialize)]
struct Part {
    data: Vec<Box<RawValue>>,
    #[serde(default)]
    has_more: Option<bool>,
}

/// What of its items is looked at.
#[derive(Debug, Deserialize)]
struct Item {
    id: Option<String>,
    created_at: Option<f64>,
}

/// The list that is made of them.
#[derive(Debug, Serialize)]
struct Whole {
    object: &'static str,
    data: Vec<Box<RawValue>>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// What a client asks of a list.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Wanted {
    ascending: bool,
    limit: usize,
}

impl StoredState {
    /// The list that a request asks for; `None`: it asks for none, or no worker has one.
    pub async fn list(
        &self,
        (fleet, upstream): (&Fleet, &Upstream),
        parts: &Parts,
        record: &Record,
    ) -> Option<Result<Response<Bytes>, Error>> {
        let path = crate::path::as_engines_read(parts.uri.path());
        let place = StoredPath::of(&path)?;
        let lists = parts.method == Method::GET && place.is_whole() && OF_TENANTS.contains(&place.collection);
        let tenant = self.tenant_of(record);
        let all = fleet.all();
        if !lists || (tenant == 0 && all.len() < 2) {
            return None;
        }
        let workers: Vec<Arc<Worker>> = all.iter().filter(|worker| worker.routable()).cloned().collect();
        let target = parts.uri.path_and_query()?;
        let _place = self.searches.acquire().await;
        let asked = workers.into_iter().map(|worker| part_of(upstream, worker, parts, target));
        let mut answers = stream::iter(asked).buffer_unordered(STORED_ASKED_AT_ONCE);
        let (mut items, mut more, mut found) = (Vec::new(), false, false);
        while let Some(part) = answers.next().await {
            let Some(part) = part else { continue };
            found = true;
            more |= part.has_more == Some(true) || items.len() + part.data.len() > LIST_ITEMS_MAX;
            let room = LIST_ITEMS_MAX.saturating_sub(items.len());
            items.extend(part.data.into_iter().filter_map(|item| self.own(item, tenant)).take(room));
        }
        match (found, tenant) {
            (true, _) => {
                record.outcome("complete");
                Some(Ok(whole(items, Wanted::of(parts.uri.query().unwrap_or_default()), more)))
            }
            // What is no list could be another tenant's.
            (false, 1..) => Some(Err(Error::StateNotFound)),
            (false, 0) => None,
        }
    }

    /// An item, unless it is another tenant's.
    fn own(&self, raw: Box<RawValue>, tenant: u64) -> Option<(Item, Box<RawValue>)> {
        let item: Item = serde_json::from_str(raw.get()).ok()?;
        let owner = || self.worker_of(item.id.as_deref()?);
        (tenant == 0 || owner().is_some_and(|owner| owner.tenant == tenant)).then_some((item, raw))
    }
}

async fn part_of(
    upstream: &Upstream,
    worker: Arc<Worker>,
    parts: &Parts,
    target: &PathAndQuery,
) -> Option<Part> {
    let asking = async {
        let answer = upstream.send(worker.origin(), question(&worker, parts, target)).await.ok()?;
        let answer = answer.status().is_success().then_some(answer)?;
        let body = Limited::new(answer.into_body(), MAX_LIST_BYTES).collect().await.ok()?;
        serde_json::from_slice(&body.to_bytes()).ok()
    };
    clock::timeout(PROBE_TIMEOUT, asking).await.ok().flatten()
}

impl Wanted {
    fn of(query: &str) -> Self {
        let mut wanted = Self { ascending: false, limit: usize::MAX };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match name.as_ref() {
                "order" => wanted.ascending = value == "asc",
                "limit" => wanted.limit = value.parse().unwrap_or(usize::MAX),
                _ => {}
            }
        }
        wanted
    }
}

/// The items in their order, as many as are wanted.
fn whole(mut items: Vec<(Item, Box<RawValue>)>, wanted: Wanted, more: bool) -> Response<Bytes> {
    items.sort_by(|(a, _), (b, _)| {
        let order = a.created_at.unwrap_or(0.0).total_cmp(&b.created_at.unwrap_or(0.0));
        if wanted.ascending { order } else { order.reverse() }
    });
    let has_more = more || items.len() > wanted.limit;
    items.truncate(wanted.limit);
    let id = |item: Option<&(Item, Box<RawValue>)>| item.and_then(|(item, _)| item.id.clone());
    let (first_id, last_id) = (id(items.first()), id(items.last()));
    let data = items.into_iter().map(|(_, raw)| raw).collect();
    let list = Whole { object: "list", data, first_id, last_id, has_more };
    // Raw JSON that was parsed once always serialises.
    let mut response = Response::new(Bytes::from(serde_json::to_vec(&list).unwrap_or_default()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn made(items: &[(&str, f64)], query: &str, more: bool) -> serde_json::Value {
        let item = |(id, created_at): &(&str, f64)| {
            let raw = serde_json::value::to_raw_value(&json!({"id": id, "created_at": created_at})).unwrap();
            (serde_json::from_str(raw.get()).unwrap(), raw)
        };
        let response = whole(items.iter().map(item).collect(), Wanted::of(query), more);
        serde_json::from_slice(response.body()).unwrap()
    }

    #[test]
    fn parts_become_one_list_in_the_order_that_is_asked_for() {
        let items = [("b", 2.0), ("d", 4.0), ("a", 1.0), ("c", 3.0)];
        for (query, more, ids, says_more) in [
            ("", false, &["d", "c", "b", "a"][..], false),
            ("order=asc", false, &["a", "b", "c", "d"], false),
            ("limit=2&order=desc", false, &["d", "c"], true),
            ("limit=4", false, &["d", "c", "b", "a"], false),
            ("limit=x", true, &["d", "c", "b", "a"], true),
        ] {
            let list = made(&items, query, more);
            let found: Vec<&str> =
                list["data"].as_array().unwrap().iter().filter_map(|item| item["id"].as_str()).collect();
            assert_eq!((&found[..], list["has_more"] == true), (ids, says_more), "{query}");
            assert_eq!((&list["first_id"], &list["last_id"]), (&json!(ids.first()), &json!(ids.last())));
        }
        assert_eq!(
            made(&[], "", false),
            json!({"object": "list", "data": [], "first_id": null, "last_id": null, "has_more": false})
        );
    }
}
