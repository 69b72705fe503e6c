//! The series of other gateways.

use prometheus::{IntCounter, IntCounterVec, IntGaugeVec};

use super::Declare;

const HEARD: &str = "heard";
const SILENT: &str = "silent";

/// `keyway_peers{state="heard|silent"}`: addresses of other gateways that tell what they have, or do not.
#[derive(Debug, Clone)]
pub struct PeerStates(IntGaugeVec);

/// An address at which another gateway may be, counted in its state for as long as it is followed.
#[derive(Debug)]
pub struct PeerState {
    states: PeerStates,
    now: Option<&'static str>,
}

/// What gateways tell each other of their placements.
#[derive(Debug, Clone)]
pub struct PlacementMetrics {
    told: IntCounter,
    told_bytes: IntCounter,
    missed: IntCounter,
    heard: IntCounterVec,
}

impl PlacementMetrics {
    /// In the index here too.
    pub const RECORDED: &str = "recorded";
    /// It goes on from a block that is not known here.
    pub const UNFOUNDED: &str = "unfounded";
    /// At a worker that is unknown here, or that says itself what it holds.
    pub const ELSEWHERE: &str = "elsewhere";
    /// Of a gateway that names prompts otherwise.
    pub const OTHER_NAMES: &str = "other_names";

    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let help = "Placements told to other gateways, once for each that listens.";
        let told = d.counter("keyway_peer_placements_told_total", help, &[])?.with_label_values::<&str>(&[]);
        let help = "Bytes of the words that placements were told in, once for each gateway that listens.";
        let told_bytes = d.counter("keyway_peer_placements_told_bytes_total", help, &[])?;
        let help =
            "Words on placements that another gateway was too slow to take, so that it never heard them.";
        let missed = d.counter("keyway_peer_placements_missed_total", help, &[])?;
        let help = "Placements that other gateways told of: recorded here; unfounded, as they go on from a block that is not \
                    known here; elsewhere, at a worker that is not known here or says itself what it holds; of a gateway \
                    with other_names for prompts.";
        let heard = d.counter("keyway_peer_placements_heard_total", help, &["outcome"])?;
        for outcome in [Self::RECORDED, Self::UNFOUNDED, Self::ELSEWHERE, Self::OTHER_NAMES] {
            heard.with_label_values(&[outcome]);
        }
        let only = |family: IntCounterVec| family.with_label_values::<&str>(&[]);
        Ok(Self { told, told_bytes: only(told_bytes), missed: only(missed), heard })
    }

    /// So many were told, in so many bytes, and so many words were missed before.
    pub fn told(&self, placements: u64, bytes: usize, missed: u64) {
        self.told.inc_by(placements);
        self.told_bytes.inc_by(bytes as u64);
        self.missed.inc_by(missed);
    }

    /// So many were heard, of which this became.
    pub fn heard(&self, outcome: &str, placements: u64) {
        self.heard.with_label_values(&[outcome]).inc_by(placements);
    }
}

impl PeerStates {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let help = "Addresses of other gateways: those that say what they have at each worker, and those that do not.";
        let states = d.gauges("keyway_peers", help, &["state"])?;
        // There from the start, so that an alert on them looks at something.
        for state in [HEARD, SILENT] {
            states.with_label_values(&[state]).set(0);
        }
        Ok(Self(states))
    }

    /// How many other gateways are heard now.
    pub fn heard_now(&self) -> usize {
        usize::try_from(self.0.with_label_values(&[HEARD]).get()).unwrap_or_default()
    }

    /// An address that has said nothing yet.
    pub fn follow(&self) -> PeerState {
        let mut state = PeerState { states: self.clone(), now: None };
        state.is(Some(SILENT));
        state
    }
}

impl PeerState {
    /// It has begun to tell what its gateway has at each worker.
    pub fn heard(&mut self) {
        self.is(Some(HEARD));
    }

    /// No connection to it could be made, or the one there was ended.
    pub fn silent(&mut self) {
        self.is(Some(SILENT));
    }

    /// It is this gateway, or counts at another address.
    pub fn elsewhere(&mut self) {
        self.is(None);
    }

    fn is(&mut self, state: Option<&'static str>) {
        let gauge = |state: &'static str| self.states.0.with_label_values(&[state]);
        if let Some(before) = self.now {
            gauge(before).dec();
        }
        if let Some(now) = state {
            gauge(now).inc();
        }
        self.now = state;
    }
}

impl Drop for PeerState {
    fn drop(&mut self) {
        self.is(None);
    }
}
