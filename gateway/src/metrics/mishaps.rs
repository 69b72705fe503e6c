//! Requests that did not end well, by what they have in common: for people who look why. The kinds that were
//! met last are kept; prompts and keys are no part of them.

use parking_lot::Mutex;
use serde::Serialize;

use crate::limits::MAX_MISHAPS;

/// Bytes of a path or an id that are kept.
const TEXT_BYTES: usize = 120;

/// What requests that did not end well have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MishapKind {
    /// How they ended, as `keyway_requests_total` says it.
    pub outcome: &'static str,
    /// Status that their clients saw; 0: none.
    pub status: u16,
    /// A name of the fleet's, `other` or `none`.
    pub model: String,
    /// Whose they were, where tenants are known.
    pub tenant: Option<String>,
    /// The worker that was asked last; empty: none was.
    pub worker: String,
}

/// One kind, and when it was met.
#[derive(Debug, Clone, Serialize)]
pub struct Mishap {
    #[serde(flatten)]
    kind: MishapKind,
    times: u64,
    /// Seconds since 1970.
    first: f64,
    last: f64,
    /// Path and id of the last of them.
    path: String,
    id: String,
}

/// The kinds met last.
#[derive(Debug, Default)]
pub struct Mishaps(Mutex<Vec<Mishap>>);

impl Mishaps {
    /// Counts a request that ended at `now`, in seconds since 1970.
    pub fn add(&self, kind: MishapKind, path: &str, id: &str, now: f64) {
        let (path, id) = (beginning(path), beginning(id));
        let mut all = self.0.lock();
        if let Some(known) = all.iter_mut().find(|known| known.kind == kind) {
            (known.times, known.last, known.path, known.id) = (known.times + 1, now, path, id);
            return;
        }
        if all.len() >= MAX_MISHAPS
            && let Some(oldest) = (0..all.len()).min_by(|&a, &b| all[a].last.total_cmp(&all[b].last))
        {
            all.swap_remove(oldest);
        }
        all.push(Mishap { kind, times: 1, first: now, last: now, path, id });
    }

    /// All that are kept, the newest first.
    pub fn newest_first(&self) -> Vec<Mishap> {
        let mut all = self.0.lock().clone();
        all.sort_by(|a, b| b.last.total_cmp(&a.last));
        all
    }
}

fn beginning(text: &str) -> String {
    let end = (0..=text.len().min(TEXT_BYTES)).rev().find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(worker: &str) -> MishapKind {
        let (outcome, model, worker) = ("upstream_timeout", "m".to_owned(), worker.to_owned());
        MishapKind { outcome, status: 504, model, tenant: None, worker }
    }

    #[test]
    fn those_of_a_kind_are_one_row_and_the_oldest_kind_goes() {
        let mishaps = Mishaps::default();
        for i in 0..3 {
            mishaps.add(kind("w"), "/v1/completions", &format!("id-{i}"), f64::from(i));
        }
        let [only] = &mishaps.newest_first()[..] else { panic!("one kind, one row") };
        assert_eq!((only.times, only.first, only.last, &*only.id), (3, 0.0, 2.0, "id-2"));
        for i in 0..MAX_MISHAPS {
            mishaps.add(kind(&i.to_string()), &"é".repeat(500), "id", 10.0 + i as f64);
        }
        let all = mishaps.newest_first();
        assert_eq!((all.len(), &*all[0].kind.worker), (MAX_MISHAPS, &*(MAX_MISHAPS - 1).to_string()));
        assert!(all.iter().all(|mishap| mishap.kind.worker != "w" && mishap.path.len() <= TEXT_BYTES));
    }
}
