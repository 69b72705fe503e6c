//! How long the parts of a request may take.

use std::time::Duration;

use super::{ConfigError, LimitsFile};
use crate::limits;

/// The times that operators set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// To open a connection to a worker.
    pub connect: Duration,
    /// For a request's head to come, and for a connection's first bytes.
    pub header_read: Duration,
    /// Between two pieces of a request's body.
    pub body_idle: Duration,
    /// For a request's body to come whole.
    pub body: Duration,
    /// Between two pieces of an answer, once it has begun.
    pub answer_idle: Duration,
    /// From a request's head to its answer's end.
    pub request: Duration,
    /// For which a client may take nothing of what is sent to it.
    pub client_stall: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: limits::CONNECT_TIMEOUT,
            header_read: limits::HEADER_READ_TIMEOUT,
            body_idle: limits::BODY_IDLE_TIMEOUT,
            body: limits::BODY_TIMEOUT,
            answer_idle: limits::ANSWER_IDLE_TIMEOUT,
            request: limits::REQUEST_TIMEOUT,
            client_stall: limits::CLIENT_STALL_TIMEOUT,
        }
    }
}

impl TryFrom<&LimitsFile> for Timeouts {
    type Error = ConfigError;

    fn try_from(file: &LimitsFile) -> Result<Self, ConfigError> {
        let default = Self::default();
        let time = |name: &str, ms: Option<u64>, default: Duration| match ms {
            Some(0) => Err(ConfigError(format!("limits.{name} must be above 0"))),
            Some(ms) => Ok(Duration::from_millis(ms)),
            None => Ok(default),
        };
        Ok(Self {
            connect: time("connect_timeout_ms", file.connect_timeout_ms, default.connect)?,
            header_read: time("header_read_ms", file.header_read_ms, default.header_read)?,
            body_idle: time("body_idle_ms", file.body_idle_ms, default.body_idle)?,
            body: time("body_timeout_ms", file.body_timeout_ms, default.body)?,
            answer_idle: time("answer_idle_ms", file.answer_idle_ms, default.answer_idle)?,
            request: time("request_timeout_ms", file.request_timeout_ms, default.request)?,
            client_stall: time("client_stall_ms", file.client_stall_ms, default.client_stall)?,
        })
    }
}
