//! Which pod of a fleet a scale-in should take: the one that is worth least. It changes seldom, because each
//! change is a write, and every controller of the cluster reads it.

use std::time::Duration;

use crate::limits::{KUBERNETES_MARK_INTERVAL, KUBERNETES_MARK_MARGIN_TOKENS};

/// A pod, and what the fleet would lose with it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Worth {
    /// The pod's UID, which tells it from a later pod of the same name.
    pub(super) uid: String,
    /// Tokens that its cache saved lately, and requests in flight.
    pub(super) tokens: f64,
}

/// What is marked, and since when.
#[derive(Debug, Default)]
pub(super) struct Choice {
    marked: Option<String>,
    changed: Option<Duration>,
}

impl Choice {
    /// The pod to mark instead of [`Choice::marked`], if it is time to. `None` while nothing is known: the
    /// first mark would be a guess.
    pub(super) fn next(&self, pods: &[Worth], now: Duration) -> Option<String> {
        let least =
            pods.iter().min_by(|a, b| a.tokens.total_cmp(&b.tokens).then_with(|| a.uid.cmp(&b.uid)))?;
        let known = pods.iter().any(|pod| pod.tokens > 0.0);
        let marked = pods.iter().find(|pod| Some(&pod.uid) == self.marked.as_ref());
        let better = match marked {
            // None yet, or what was marked is gone: that is what the mark was for.
            None => known && pods.len() > 1,
            Some(marked) => {
                let rested = self.changed.is_none_or(|then| now >= then + KUBERNETES_MARK_INTERVAL);
                rested && marked.tokens > 1.25 * least.tokens + KUBERNETES_MARK_MARGIN_TOKENS
            }
        };
        better.then(|| least.uid.clone())
    }

    /// UID of the pod that is marked; `None`: none is.
    pub(super) fn marked(&self) -> Option<&str> {
        self.marked.as_deref()
    }

    /// Notes that this pod is marked and no other; `None`: none is.
    pub(super) fn note(&mut self, marked: Option<String>, now: Duration) {
        self.marked = marked;
        self.changed = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(tokens: &[f64]) -> Vec<Worth> {
        let worth = |(i, &tokens): (usize, &f64)| Worth { uid: format!("u{i}"), tokens };
        tokens.iter().enumerate().map(worth).collect()
    }

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_pod_that_is_worth_least_is_marked_once_anything_is_known() {
        let choice = Choice::default();
        assert_eq!(choice.next(&pods(&[0.0, 0.0]), secs(0)), None, "a guess");
        assert_eq!(choice.next(&pods(&[5.0]), secs(0)), None, "there is no choice");
        assert_eq!(choice.next(&pods(&[9_000.0, 10.0, 500.0]), secs(0)).as_deref(), Some("u1"));
    }

    #[test]
    fn a_mark_moves_seldom_and_only_for_a_clear_reason() {
        let mut choice = Choice::default();
        choice.note(Some("u1".to_owned()), secs(100));
        let changed = pods(&[100.0, 50_000.0]);
        assert_eq!(choice.next(&changed, secs(101)), None, "too soon");
        let late = secs(100) + KUBERNETES_MARK_INTERVAL;
        assert_eq!(choice.next(&changed, late).as_deref(), Some("u0"));
        assert_eq!(choice.next(&pods(&[100_000.0, 110_000.0]), late), None, "a tenth is no reason");
        assert_eq!(choice.next(&pods(&[0.0, 200.0]), late), None, "nor are some tokens");
    }

    #[test]
    fn once_the_marked_pod_is_gone_the_next_is_marked_at_once() {
        let mut choice = Choice::default();
        choice.note(Some("gone".to_owned()), secs(100));
        assert_eq!(choice.next(&pods(&[700.0, 60.0]), secs(101)).as_deref(), Some("u1"));
    }
}
