//! Endpoints that vanish: one that moves from a slice to another is in neither for a moment. It still gets
//! requests for a second, as if nobody had looked in that moment, and then none. It drains only if it has not
//! come back after a while, so that the cache that is known of it is not forgotten. A pod that ends says so
//! and drains at once.

use std::collections::{BTreeMap, HashSet};

use super::slices::{Found, View};
use crate::{
    clock::Instant,
    limits::{KUBERNETES_MOVE_GAP, KUBERNETES_MOVE_TIME},
};

/// Who was there, and who has vanished since.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// Workers that the slices listed at the last look, by identity.
    there: BTreeMap<String, Found>,
    /// Workers that have vanished, by identity.
    gone: BTreeMap<String, Gone>,
}

/// A worker that has vanished.
#[derive(Debug)]
struct Gone {
    /// As it was last listed.
    found: Found,
    /// When it gets no more requests; none once that was so.
    until_paused: Option<Instant>,
    /// When it is given up.
    until: Instant,
}

impl Gone {
    fn new(found: Found, now: Instant) -> Self {
        Self { found, until_paused: Some(now + KUBERNETES_MOVE_GAP), until: now + KUBERNETES_MOVE_TIME }
    }

    fn settle(&mut self, now: Instant) {
        if self.until_paused.is_some_and(|until| until <= now) {
            self.until_paused = None;
            self.found.listed.ready = false;
        }
    }
}

impl Moves {
    /// The members that follow from what the slices say now.
    pub(super) fn settle(&mut self, view: View, now: Instant) -> Vec<Found> {
        let View { workers, ending } = view;
        let there: BTreeMap<String, Found> =
            workers.into_iter().map(|found| (found.identity(), found)).collect();
        for (identity, found) in std::mem::take(&mut self.there) {
            if !there.contains_key(&identity) {
                self.gone.insert(identity, Gone::new(found, now));
            }
        }
        let named = |found: &Found| found.listed.config.name();
        let taken: HashSet<String> = there.values().map(named).collect();
        self.gone.retain(|identity, gone| {
            gone.settle(now);
            let back = there.contains_key(identity) || ending.contains(identity);
            !back && gone.until > now && !taken.contains(&named(&gone.found))
        });
        self.there = there;
        self.there.values().chain(self.gone.values().map(|gone| &gone.found)).cloned().collect()
    }

    /// When the next that has vanished gets no more requests, or is given up.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.gone.values().map(|gone| gone.until_paused.unwrap_or(gone.until)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::WorkerConfig, watch::members::Listed};

    fn worker(address: &str, uid: &str) -> Found {
        let config: WorkerConfig = format!("http://{address}:1").parse().unwrap();
        let config = WorkerConfig { identity: Some(uid.to_owned()), ..config };
        Found { listed: Listed { config, ready: true }, pod: None }
    }

    fn view(workers: &[Found], ending: &[&str]) -> View {
        View { workers: workers.to_vec(), ending: ending.iter().map(|&uid| uid.to_owned()).collect() }
    }

    fn shown(found: &[Found]) -> Vec<(String, bool)> {
        found.iter().map(|found| (found.identity(), found.listed.ready)).collect()
    }

    fn list(all: &[(&str, bool)]) -> Vec<(String, bool)> {
        all.iter().map(|(uid, ready)| ((*uid).to_owned(), *ready)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_vanishes_is_soon_held_back_then_given_up_and_one_that_returns_is_as_before() {
        let (a, b, now) = (worker("10.0.0.1", "a"), worker("10.0.0.2", "b"), Instant::now());
        let mut moves = Moves::default();
        moves.settle(view(&[a.clone(), b.clone()], &[]), now);
        let without_a = || view(std::slice::from_ref(&b), &[]);
        let (paused, given_up) = (now + KUBERNETES_MOVE_GAP, now + KUBERNETES_MOVE_TIME);
        assert_eq!(shown(&moves.settle(without_a(), now)), list(&[("b", true), ("a", true)]));
        assert_eq!(moves.next_end(), Some(paused));
        assert_eq!(shown(&moves.settle(without_a(), paused)), list(&[("b", true), ("a", false)]));
        assert_eq!(moves.next_end(), Some(given_up));
        let back = moves.settle(view(&[a, b.clone()], &[]), paused);
        assert_eq!((shown(&back), moves.next_end()), (list(&[("a", true), ("b", true)]), None));
        moves.settle(view(std::slice::from_ref(&b), &[]), now);
        assert_eq!(shown(&moves.settle(view(&[b], &[]), given_up)), list(&[("b", true)]));
        assert_eq!(moves.next_end(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_ends_or_whose_address_is_taken_is_given_up_at_once() {
        let (a, b, now) = (worker("10.0.0.1", "a"), worker("10.0.0.2", "b"), Instant::now());
        let mut moves = Moves::default();
        moves.settle(view(&[a.clone(), b], &[]), now);
        let heir = worker("10.0.0.2", "c");
        assert_eq!(
            shown(&moves.settle(view(std::slice::from_ref(&heir), &["a"]), now)),
            list(&[("c", true)])
        );
        // One that vanished first and then turns out to end.
        moves.settle(view(&[a, heir.clone()], &[]), now);
        assert_eq!(shown(&moves.settle(view(std::slice::from_ref(&heir), &[]), now)).len(), 2);
        assert_eq!(shown(&moves.settle(view(&[heir], &["a"]), now)), list(&[("c", true)]));
    }
}
