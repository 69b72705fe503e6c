//! What gateways say to each other: lines of JSON. Facts alone, what each has at each worker; what follows
//! from them each works out for itself.

use std::collections::BTreeMap;

use keyway_core::{OwnLoad, waiting_room::OwnerWord};
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
    /// What owners of requests have had there, and which of their priorities wait: of those of which
    /// something has changed, or waits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub owners: Vec<OwnerEntry>,
    /// What it has placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<PlacementNews>,
}

impl Line {
    /// Whether there is a reason to send it.
    pub(super) fn says_something(&self) -> bool {
        let Self { gateway: _, all, workers, arrivals, stored, owners, placed } = self;
        let has_news = arrivals.is_some() || stored.is_some() || placed.is_some();
        *all || has_news || !workers.is_empty() || !owners.is_empty()
    }
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

/// What one owner of requests, a tenant mostly, has had at a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OwnerEntry {
    /// A number that follows from its name; 0: whoever is no tenant.
    pub owner: u32,
    /// Tokens for its weight, since the gateway's start.
    pub had: f64,
    /// The highest priority of its requests of late.
    #[serde(default)]
    pub priority: i32,
    /// The highest priority of those that wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<i32>,
}

impl From<OwnerWord> for OwnerEntry {
    fn from(OwnerWord { owner, had, priority, waits }: OwnerWord) -> Self {
        // To a tenth of a token.
        Self { owner, had: (had * 10.0).round() / 10.0, priority, waits }
    }
}

impl From<OwnerEntry> for OwnerWord {
    fn from(OwnerEntry { owner, had, priority, waits }: OwnerEntry) -> Self {
        Self { owner, had, priority, waits }
    }
}
