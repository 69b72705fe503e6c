//! `[routing]`: how prompts are identified, the index sized, requests made to wait, and what is said of that.

use std::{fs, num::NonZeroUsize, path::PathBuf, time::Duration};

use keyway_core::{Splitting, waiting_room::RoomRules, working_sets::SetRules};
use keyway_wire::block_hash::HashKey;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigError, IgnoreTable, RoutingFile, ScaleFile, millis_or_never};
use crate::limits;

/// How prompts are identified, the index sized and requests made to wait.
#[derive(Debug, Clone)]
pub struct RoutingConfig {
    /// Bytes of prompt text in one block.
    pub block_bytes: Option<NonZeroUsize>,
    /// Memory for the prefix index.
    pub index_bytes: usize,
    /// Secret of the hash chain.
    pub hash_key: HashKey,
    /// The file that it is from; else it is random.
    pub hash_key_file: Option<PathBuf>,
    /// Whether answers name the worker.
    pub expose: bool,
    /// Where the index is written at the end and read at the start.
    pub snapshot_file: Option<PathBuf>,
    /// Whether workers are asked for the usage of streams whose clients do not ask.
    pub ask_usage: bool,
    /// Which prompts other workers compute than those that answer.
    pub split: Splitting,
    /// Whether workers fetch from each other what they have cached of a prompt.
    pub pull: Splitting,
    /// Uncached prompt tokens below which none is.
    pub prefill_from_tokens: u64,
    /// Whether a request must name its model where workers serve different ones.
    pub require_model: bool,
    /// When requests wait in the gateway; `None`: never.
    pub room: Option<RoomRules>,
    /// How often workers that others send to as well are asked for their load; `None`: no worker is.
    pub load_scrape: Option<Duration>,
    /// How long workers that come up join gradually; `None`: they join at once.
    pub slow_start: Option<Duration>,
    /// Whether a session that a client names decides among equals.
    pub session_hints: bool,
    /// Whether workers are asked where their KV events are.
    pub finds_kv_events: bool,
    /// Prompt tokens that a worker fetches in a millisecond from its other tiers; `None`: these do not count.
    pub fetch_tokens_per_ms: Option<f64>,
    /// What is left out of hashes of text.
    pub ignored: Vec<IgnoreTable>,
    /// File for choices, and the share of them that go there.
    pub decision_log: Option<(PathBuf, f64)>,
}

/// Which prompts a worker for prefill computes for one for decode, and of which a worker fetches what another
/// one has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SplitFile {
    /// Those for which that costs less.
    #[default]
    Auto,
    /// All that may, whatever it costs.
    Always,
    /// None, whatever it costs.
    Never,
}

impl SplitFile {
    fn rule(self) -> Splitting {
        match self {
            Self::Auto => Splitting::Auto,
            Self::Always => Splitting::Always,
            Self::Never => Splitting::Never,
        }
    }
}

impl RoutingConfig {
    /// How long a request waits for a room at a worker that answers with KV from elsewhere.
    pub fn room_wait(&self) -> Duration {
        let of =
            |rules: RoomRules| rules.shed_after.map_or(limits::ROOM_WAIT, |shed| shed.min(limits::ROOM_WAIT));
        self.room.map_or(Duration::ZERO, of)
    }

    /// What the file says, and defaults for the rest.
    pub(super) fn of(file: RoutingFile, scale: &ScaleFile) -> Result<Self, ConfigError> {
        let hash_key = match &file.hash_key_file {
            Some(path) => HashKey::from_bytes(
                &fs::read(path)
                    .map_err(|error| ConfigError(format!("hash_key_file {}: {error}", path.display())))?,
            ),
            None => HashKey::new(fastrand::u64(..)),
        };
        let share = file.decision_log_share.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&share) {
            return Err(ConfigError("routing.decision_log_share must be between 0 and 1".to_owned()));
        }
        let (room, fetch_tokens_per_ms) = (room_rules(&file, scale)?, fetch_rate(&file)?);
        Ok(Self {
            block_bytes: file.block_bytes,
            index_bytes: file.index_bytes.unwrap_or(limits::INDEX_BYTES),
            hash_key,
            hash_key_file: file.hash_key_file,
            expose: file.expose,
            snapshot_file: file.snapshot_file,
            ask_usage: file.ask_usage.unwrap_or(true),
            split: file.split.unwrap_or_default().rule(),
            pull: file.pull.unwrap_or_default().rule(),
            prefill_from_tokens: file.prefill_from_tokens.unwrap_or(limits::PREFILL_FROM_TOKENS),
            require_model: file.require_model.unwrap_or(true),
            room,
            load_scrape: millis_or_never(file.load_scrape_ms.unwrap_or(1_000)),
            slow_start: millis_or_never(file.slow_start_ms.unwrap_or(30_000)),
            session_hints: file.session_hints.unwrap_or(true),
            finds_kv_events: file.find_kv_events.unwrap_or(true),
            fetch_tokens_per_ms,
            ignored: file.ignore,
            decision_log: file.decision_log.map(|path| (path, share)),
        })
    }
}

fn room_rules(file: &RoutingFile, scale: &ScaleFile) -> Result<Option<RoomRules>, ConfigError> {
    let default = RoomRules::default();
    let horizon_ms = file.hold_horizon_ms.unwrap_or(default.horizon_ms);
    if !horizon_ms.is_finite() || horizon_ms < 0.0 {
        return Err(ConfigError("routing.hold_horizon_ms must be 0 or more".to_owned()));
    }
    let max_waiting = file.hold_max.unwrap_or(default.max_waiting);
    if file.shed_after_ms == Some(0) {
        return Err(ConfigError("routing.shed_after_ms must be above 0".to_owned()));
    }
    let shed_after = file.shed_after_ms.map(Duration::from_millis);
    let scaled_for = scale.ttft_slo_seconds.and_then(|slo_s| Duration::try_from_secs_f64(slo_s).ok());
    let objective = file.ttft_objective_ms.map_or(scaled_for, millis_or_never);
    let pauses = SetRules::default();
    let longest_pause = file.session_pause_ms.map_or(Some(pauses.longest_pause), millis_or_never);
    // A turn that has waited for so long begins; at the end of `shed_after` it would be refused.
    let at_most = shed_after.map_or(Duration::MAX, |limit| limit / 2);
    let pauses = longest_pause.map(|longest| SetRules { longest_pause: longest.min(at_most), ..pauses });
    let rules = RoomRules { horizon_ms, max_waiting, objective, shed_after, pauses, ..default };
    Ok(file.hold.unwrap_or(true).then_some(rules))
}

fn fetch_rate(file: &RoutingFile) -> Result<Option<f64>, ConfigError> {
    let per_second = file.fetch_tokens_per_second.unwrap_or(limits::FETCH_TOKENS_PER_SECOND);
    if !per_second.is_finite() || per_second < 0.0 {
        return Err(ConfigError("routing.fetch_tokens_per_second must be 0 or more".to_owned()));
    }
    Ok((per_second > 0.0).then_some(per_second / 1e3))
}
