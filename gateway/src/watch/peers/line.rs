//! What gateways say to each other: lines of JSON. Facts alone, what each has at each worker; what follows
//! from them each works out for itself.

use std::collections::BTreeMap;

use keyway_core::OwnLoad;
use serde::{Deserialize, Serialize};

use super::{GatewayId, PlacementNews};
use crate::stored_state::StoredNews;

/// One word of a gateway.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Who speaks; in the first line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<GatewayId>,
    /// Whether this is all it has: nothing at the workers that are not named. Else what has changed.
    #[serde(default)]
    pub all: bool,
    /// What it has at each worker named; 0 at one where all has ended since the last line.
    pub workers: Vec<LoadEntry>,
    /// Requests a second that it has sent lately to each worker named, and hardly any to the others. Now and
    /// then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrivals: Option<BTreeMap<String, f64>>,
    /// Ids of what workers store that came there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredNews>,
    /// What it has placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<PlacementNews>,
}

/// What a gateway has at one worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadEntry {
    /// The worker's name: its `host:port`, with the path and the `@rank` that it may have.
    pub worker: String,
    /// Requests that have not ended.
    pub requests: u64,
    /// Those among them without a first token.
    pub waiting: u64,
    /// Their uncached prompt tokens that are still to be computed.
    pub waiting_tokens: u64,
}

impl LoadEntry {
    pub(super) fn new(worker: String, load: OwnLoad) -> Self {
        let OwnLoad { requests, waiting, waiting_tokens, .. } = load;
        Self { worker, requests, waiting, waiting_tokens }
    }

    pub(super) fn load(&self) -> OwnLoad {
        let Self { requests, waiting, waiting_tokens, .. } = *self;
        OwnLoad { requests, waiting, waiting_tokens, ..OwnLoad::default() }
    }
}
