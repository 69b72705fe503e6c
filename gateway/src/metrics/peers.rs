//! The series of other gateways.

use prometheus::IntGaugeVec;

use super::Declare;

/// `keyway_peers{state="heard|silent"}`.
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
        Ok(Self(d.gauges("keyway_peers", help, &["state"])?))
    }

    /// An address that has said nothing yet.
    pub fn follow(&self) -> PeerState {
        let mut state = PeerState { states: self.clone(), now: None };
        state.is(Some("silent"));
        state
    }
}

impl PeerState {
    /// It speaks.
    pub fn heard(&mut self) {
        self.is(Some("heard"));
    }

    /// It does not.
    pub fn silent(&mut self) {
        self.is(Some("silent"));
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
