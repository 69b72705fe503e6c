//! The objects, their versions, and who watches them: every write is a version, and a watch is told of each
//! that comes after the one it began at.

use std::collections::BTreeMap;
use std::io;

use bytes::Bytes;
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::selector::Selector;
use super::{Line, status};

/// What a path names: all objects of a kind in a namespace, or one of them.
#[derive(Debug)]
pub(super) struct Target {
    /// Path of the kind.
    pub(super) collection: String,
    /// Name of the object.
    pub(super) name: Option<String>,
}

impl Target {
    pub(super) fn of(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let start = match parts[..] {
            ["api", _, ..] => 2,
            ["apis", _, _, ..] => 3,
            _ => return None,
        };
        let scoped = parts.get(start) == Some(&"namespaces") && parts.len() > start + 2;
        let kind = if scoped { start + 2 } else { start };
        parts.get(kind)?;
        let collection = format!("/{}", parts[..=kind].join("/"));
        Some(Self { collection, name: parts.get(kind + 1).map(|&name| name.to_owned()) })
    }
}

/// A write.
#[derive(Debug)]
struct Event {
    version: u64,
    collection: String,
    /// What the object was before, if it was.
    before: Option<Value>,
    /// What it is, unless it is gone.
    after: Option<Value>,
}

#[derive(Debug)]
struct Watch {
    collection: String,
    selector: Selector,
    bookmarks: bool,
    lines: mpsc::UnboundedSender<Line>,
}

/// All objects by their paths.
#[derive(Debug, Default)]
pub(super) struct Store {
    version: u64,
    /// Versions before it are forgotten.
    oldest: u64,
    /// Whether that is said by the answer's status.
    by_status: bool,
    objects: BTreeMap<String, Value>,
    events: Vec<Event>,
    watches: Vec<Watch>,
}

impl Store {
    pub(super) fn get(&self, path: &str) -> Option<&Value> {
        self.objects.get(path)
    }

    pub(super) fn all(&self) -> Vec<Value> {
        self.objects.values().cloned().collect()
    }

    /// Writes an object; returns it with what the server adds.
    pub(super) fn put(&mut self, path: &str, mut object: Value) -> Value {
        let version = self.version + 1;
        let before = self.objects.get(path).cloned();
        let meta = &mut object["metadata"];
        meta["resourceVersion"] = json!(version.to_string());
        // A UID is given once; a test may choose it.
        match &before {
            Some(before) => meta["uid"] = before["metadata"]["uid"].clone(),
            None if meta["uid"].is_null() => meta["uid"] = json!(format!("uid-{version}")),
            None => {}
        }
        if let Some((_, rest)) = path.split_once("/namespaces/") {
            meta["namespace"] = json!(rest.split('/').next());
        }
        self.objects.insert(path.to_owned(), object.clone());
        self.happened(path, before, Some(object.clone()));
        object
    }

    pub(super) fn remove(&mut self, path: &str) -> Option<Value> {
        let mut object = self.objects.remove(path)?;
        // A deletion is a version of its own.
        object["metadata"]["resourceVersion"] = json!((self.version + 1).to_string());
        self.happened(path, Some(object.clone()), None);
        Some(object)
    }

    fn happened(&mut self, path: &str, before: Option<Value>, after: Option<Value>) {
        self.version += 1;
        let collection = Target::of(path).expect("a path of an object").collection;
        let event = Event { version: self.version, collection, before, after };
        self.watches.retain(|watch| {
            watch.collection != event.collection
                || line(&event, &watch.selector).is_none_or(|line| send(watch, &line))
        });
        self.events.push(event);
    }

    /// A page of a list. Its `continue` names the version and the place.
    pub(super) fn list(
        &self,
        collection: &str,
        selector: &Selector,
        limit: usize,
        from: &str,
    ) -> Result<Value, ()> {
        let place = match from.split_once(':') {
            None => 0,
            Some((version, _)) if version.parse::<u64>().is_ok_and(|version| version < self.oldest) => {
                return Err(());
            }
            Some((_, place)) => place.parse().map_err(|_| ())?,
        };
        let prefix = format!("{collection}/");
        let all: Vec<&Value> = self
            .objects
            .iter()
            .filter(|(path, object)| path.starts_with(&prefix) && selector.selects(object))
            .map(|(_, object)| object)
            .collect();
        let page: Vec<&Value> = all.iter().skip(place).take(limit).copied().collect();
        let end = place + page.len();
        let next = if end < all.len() { format!("{}:{end}", self.version) } else { String::new() };
        Ok(json!({ "apiVersion": "v1", "kind": "List", "items": page,
            "metadata": { "resourceVersion": self.version.to_string(), "continue": next } }))
    }

    /// A watch from a version on; `Err`: that is too old, which the status says.
    pub(super) fn watch(
        &mut self,
        collection: &str,
        selector: Selector,
        from: u64,
        bookmarks: bool,
    ) -> Result<mpsc::UnboundedReceiver<Line>, ()> {
        let (lines, receiver) = mpsc::unbounded_channel(); // bounded by what the test writes
        let watch = Watch { collection: collection.to_owned(), selector, bookmarks, lines };
        if from != 0 && from < self.oldest {
            if self.by_status {
                return Err(());
            }
            send(
                &watch,
                &json!({ "type": "ERROR", "object": status(410, "Expired", "too old resource version") }),
            );
            return Ok(receiver);
        }
        let missed = self.events.iter().filter(|e| e.version > from && e.collection == watch.collection);
        for line in missed.filter_map(|event| line(event, &watch.selector)) {
            send(&watch, &line);
        }
        self.watches.push(watch);
        Ok(receiver)
    }

    pub(super) fn expire(&mut self, by_status: bool) {
        self.oldest = self.version;
        self.by_status = by_status;
        self.events.clear();
    }

    pub(super) fn bookmark(&mut self) {
        let object = json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "resourceVersion": self.version.to_string() } });
        let line = json!({ "type": "BOOKMARK", "object": object });
        self.watches.retain(|watch| !watch.bookmarks || send(watch, &line));
    }

    pub(super) fn end_watches(&mut self, within_a_line: bool) {
        for watch in self.watches.drain(..) {
            if within_a_line {
                // Neither matters if the watch is gone already.
                drop(
                    watch
                        .lines
                        .send(Ok(Frame::data(Bytes::from_static(b"{\"type\":\"ADDED\",\"object\":{\"ki")))),
                );
                drop(watch.lines.send(Err(io::Error::other("cut"))));
            }
        }
    }

    pub(super) fn watches(&mut self) -> usize {
        self.watches.retain(|watch| !watch.lines.is_closed());
        self.watches.len()
    }
}

/// What a watch with this selector is told of a write: an object that comes to have the labels is added, one
/// that no longer has them deleted.
fn line(event: &Event, selector: &Selector) -> Option<Value> {
    let selected = |object: &Option<Value>| object.as_ref().is_some_and(|object| selector.selects(object));
    let (kind, object) = match (selected(&event.before), selected(&event.after)) {
        (false, false) => return None,
        (false, true) => ("ADDED", event.after.clone()),
        (true, true) => ("MODIFIED", event.after.clone()),
        (true, false) => ("DELETED", event.before.clone()),
    };
    let mut object = object?;
    object["metadata"]["resourceVersion"] = json!(event.version.to_string());
    Some(json!({ "type": kind, "object": object }))
}

/// Whether the watch is still there.
fn send(watch: &Watch, line: &Value) -> bool {
    watch.lines.send(Ok(Frame::data(Bytes::from(format!("{line}\n"))))).is_ok()
}

/// JSON merge patch: RFC 7386.
pub(super) fn merge(object: &mut Value, patch: &Value) {
    let (Some(fields), true) = (patch.as_object(), patch.is_object()) else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (key, value) in fields {
        if value.is_null() {
            object.as_object_mut().and_then(|object| object.remove(key));
        } else {
            merge(&mut object[key], value);
        }
    }
}
