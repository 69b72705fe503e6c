//! What others are told of the ids that are known here, and what is taken of theirs: other gateways, as ids
//! come, and the process that comes after this one, through the snapshot. Hashes alone.

use std::time::Duration;

use keyway_core::index::WorkerId;
use keyway_wire::block_hash::Chain;
use serde::{Deserialize, Serialize};

use super::{IdEntry, Owner, StoredState};
use crate::limits::STORED_NEWS_MAX;

/// Ids that came at another gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredNews {
    /// Tells by which key they are hashed.
    pub check: u64,
    /// Each id, whose it is, and the worker.
    pub ids: Vec<(u64, u64, u32)>,
}

impl StoredState {
    /// What is to be told to who has heard of so many, if anything is, and of how many that is then.
    pub fn news(&self, heard: u64) -> (Option<StoredNews>, u64) {
        let (entries, next) = self.ids.lock().told_after(heard, STORED_NEWS_MAX);
        let plain = |IdEntry { id, owner, .. }: IdEntry| (id, owner.tenant, owner.worker.0);
        let ids: Vec<_> = entries.into_iter().map(plain).collect();
        ((!ids.is_empty()).then(|| StoredNews { check: self.check(), ids }), next)
    }

    /// Takes what another gateway tells.
    pub fn hear(&self, news: &StoredNews) {
        // By another key they are other names.
        if news.check == self.check() {
            let now = self.now();
            let mut ids = self.ids.lock();
            for &(id, tenant, worker) in &news.ids {
                ids.hear(now, id, Owner { worker: WorkerId(worker), tenant });
            }
            self.metrics.ids.set(ids.len() as i64);
        }
    }

    /// All that is known, and for how long already.
    pub fn all(&self) -> Vec<(IdEntry, Duration)> {
        let now = self.now();
        self.ids.lock().iter().map(|entry| (entry, now.saturating_sub(entry.since))).collect()
    }

    /// Takes what a process before this one knew.
    pub fn recall(&self, entries: Vec<(u64, Owner)>) {
        let now = self.now();
        let mut ids = self.ids.lock();
        for (id, owner) in entries {
            ids.insert(now, id, owner);
        }
        self.metrics.ids.set(ids.len() as i64);
    }

    /// How long an id is known.
    pub fn keep(&self) -> Duration {
        self.ids.lock().keep()
    }

    fn check(&self) -> u64 {
        Chain::new(self.key, b"stored id").hash(b"")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use keyway_wire::block_hash::HashKey;

    use super::*;
    use crate::{clock::Clock, config::StoredStateConfig, metrics::Metrics};

    fn state(key: u64) -> Arc<StoredState> {
        let config = StoredStateConfig { memory_bytes: 1 << 20, keep: Duration::from_secs(9) };
        let metrics = Metrics::new().unwrap().stored_state;
        StoredState::new(config, HashKey::new(key), Clock::start(), metrics).unwrap()
    }

    fn owner(worker: u32) -> Owner {
        Owner { worker: WorkerId(worker), tenant: u64::MAX }
    }

    /// Everything that one tells, in lines.
    fn told(state: &StoredState, mut heard: u64) -> (Vec<StoredNews>, u64) {
        let mut lines = Vec::new();
        loop {
            let (news, next) = state.news(heard);
            lines.extend(news);
            if next == heard {
                return (lines, next);
            }
            heard = next;
        }
    }

    #[test]
    fn what_one_knows_another_is_told_in_short_lines_and_does_not_tell_on() {
        let (here, there) = (state(1), state(1));
        let names: Vec<String> = (0..=2 * STORED_NEWS_MAX).map(|i| format!("resp_{i}")).collect();
        for id in &names {
            here.learn(id, owner(7));
        }
        let (lines, heard) = told(&here, 0);
        assert_eq!(
            lines.iter().map(|line| line.ids.len()).collect::<Vec<_>>(),
            [STORED_NEWS_MAX, STORED_NEWS_MAX, 1]
        );
        // As it goes over the wire.
        let lines: Vec<StoredNews> = lines
            .iter()
            .map(|line| serde_json::from_slice(&serde_json::to_vec(line).unwrap()).unwrap())
            .collect();
        for line in &lines {
            there.hear(line);
        }
        assert!(names.iter().all(|id| there.worker_of(id) == Some(owner(7))));
        assert_eq!(told(&there, 0).0, []);
        here.learn("resp_new", owner(8));
        assert_eq!(told(&here, heard).0[0].ids.len(), 1);
    }

    #[test]
    fn a_line_of_all_that_may_be_told_is_one_that_peers_read() {
        let ids = vec![(u64::MAX, u64::MAX, u32::MAX); STORED_NEWS_MAX];
        let line = serde_json::to_vec(&StoredNews { check: u64::MAX, ids }).unwrap();
        assert!(line.len() < crate::limits::MAX_PEER_LINE_BYTES / 2, "{} bytes", line.len());
    }

    #[test]
    fn names_by_another_key_are_not_believed() {
        let (here, there) = (state(1), state(2));
        here.learn("resp_1", owner(7));
        told(&here, 0).0.iter().for_each(|line| there.hear(line));
        assert!(there.all().is_empty());
    }
}
