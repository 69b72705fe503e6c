//! `[limits]`: what clients may take, and how long they have at the end. How long the parts of a request may
//! take is in `timeouts.rs`.

use std::time::Duration;

use super::{ConfigError, LimitsFile};
use crate::limits;

/// What clients may take, and how long they have at the end.
#[derive(Debug, Clone, Copy)]
pub struct LimitsConfig {
    /// Bytes of the largest request body; a larger one is refused with 413.
    pub max_body_bytes: usize,
    /// Largest event of a stream.
    pub max_event_bytes: usize,
    /// Bytes of request bodies at once.
    pub max_body_memory_bytes: usize,
    /// Requests in flight at once.
    pub max_in_flight: usize,
    /// Client connections at once.
    pub max_connections: usize,
    /// Cores that serve clients, at most.
    pub max_cores: usize,
    /// Time for open requests after SIGTERM.
    pub drain_timeout: Duration,
    /// Time between the word that the gateway is going and its listener's end.
    pub drain_delay: Duration,
}

impl TryFrom<&LimitsFile> for LimitsConfig {
    type Error = ConfigError;

    fn try_from(file: &LimitsFile) -> Result<Self, ConfigError> {
        let config = Self {
            max_body_bytes: file.max_body_bytes.unwrap_or(limits::MAX_BODY_BYTES),
            max_event_bytes: file.max_event_bytes.unwrap_or(limits::MAX_EVENT_BYTES),
            max_body_memory_bytes: file.max_body_memory_bytes.unwrap_or(limits::MAX_BODY_MEMORY_BYTES),
            max_in_flight: file.max_in_flight.unwrap_or(limits::MAX_IN_FLIGHT),
            max_connections: file.max_connections.unwrap_or(limits::MAX_CONNECTIONS),
            max_cores: file.max_cores.unwrap_or(usize::MAX),
            drain_timeout: file.drain_seconds.map_or(limits::DRAIN_TIMEOUT, Duration::from_secs),
            drain_delay: file.drain_delay_seconds.map_or(Duration::ZERO, Duration::from_secs),
        };
        config.allows_something()?;
        Ok(config)
    }
}

impl LimitsConfig {
    /// That no limit is 0.
    fn allows_something(&self) -> Result<(), ConfigError> {
        let limits = [
            ("max_body_bytes", self.max_body_bytes),
            ("max_event_bytes", self.max_event_bytes),
            ("max_body_memory_bytes", self.max_body_memory_bytes),
            ("max_in_flight", self.max_in_flight),
            ("max_connections", self.max_connections),
            ("max_cores", self.max_cores),
        ];
        match limits.iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err(ConfigError(format!("limits.{name} must be above 0"))),
            None => Ok(()),
        }
    }
}
