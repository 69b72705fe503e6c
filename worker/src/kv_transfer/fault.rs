//! Why KV did not get from one worker to another: for the metric, the log, and the other end.

use crate::engine::holds::HoldError;

/// What a transfer ended with that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    #[error("the other worker cannot be reached")]
    Unreachable,
    #[error("without a key KV is fetched from this machine alone")]
    NotLoopback,
    #[error("the other worker took too long")]
    Timeout,
    #[error("the connection broke")]
    Lost,
    #[error("the other worker speaks another version")]
    Version,
    #[error("the other worker has another key")]
    Unauthenticated,
    #[error("the other worker has other weights or another arithmetic")]
    Numerics,
    #[error("the other worker's KV is laid out otherwise")]
    Layout,
    #[error("the KV is not kept, or no longer")]
    Unknown,
    #[error("the KV is of another prompt")]
    Prompt,
    #[error("what came is not what was sent")]
    Corrupt,
    #[error("the other worker said what makes no sense")]
    Protocol,
    #[error("its blocks were needed by others")]
    Gone,
    #[error("no KV block is free for it")]
    NoRoom,
    #[error("too many transfers are under way")]
    Busy,
    #[error("the KV is not kept by a keyway-worker")]
    Foreign,
    #[error("the other worker has nothing of the prompt, or cannot hold it")]
    Absent,
}

impl Fault {
    /// As a metric's label.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::NotLoopback => "not_loopback",
            Self::Timeout => "timeout",
            Self::Lost => "lost",
            Self::Version => "version",
            Self::Unauthenticated => "unauthenticated",
            Self::Numerics => "numerics",
            Self::Layout => "layout",
            Self::Unknown => "unknown",
            Self::Prompt => "prompt",
            Self::Corrupt => "corrupt",
            Self::Protocol => "protocol",
            Self::Gone => "gone",
            Self::NoRoom => "no_room",
            Self::Busy => "busy",
            Self::Foreign => "foreign",
            Self::Absent => "absent",
        }
    }

    /// What the exporter tells of it, in a byte; only of what it finds in an authenticated request.
    pub(super) const fn code(self) -> Option<u8> {
        match self {
            Self::Numerics => Some(1),
            Self::Layout => Some(2),
            Self::Unknown => Some(3),
            Self::Prompt => Some(4),
            Self::Gone => Some(5),
            Self::Absent => Some(6),
            _ => None,
        }
    }

    /// What such a byte means.
    pub(super) fn told(code: u8) -> Self {
        let known = [Self::Numerics, Self::Layout, Self::Unknown, Self::Prompt, Self::Gone, Self::Absent];
        known.into_iter().find(|fault| fault.code() == Some(code)).unwrap_or(Self::Protocol)
    }
}

impl From<HoldError> for Fault {
    fn from(error: HoldError) -> Self {
        match error {
            HoldError::Gone => Self::Gone,
            HoldError::NoRoom => Self::NoRoom,
            HoldError::NoCopies => Self::Layout,
        }
    }
}
