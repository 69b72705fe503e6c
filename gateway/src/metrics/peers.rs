//! The series of other gateways.

use prometheus::IntGaugeVec;

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
