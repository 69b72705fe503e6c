//! Why a worker gave no answer, and whose fault that is: the worker's, neither side's, or the gateway's own.
//! Causes are for people and hold nothing of what either side sent.

use std::{borrow::Cow, fmt, io};

use super::http1::Http1Error;
use crate::{error::Error, shortage::Shortage};

/// Why a worker gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SendError {
    /// No connection: nothing was sent.
    Connect(FailureCause),
    /// The connection broke before the head of an answer, or what came is none.
    Lost(FailureCause),
    /// The worker says that it has not begun the request, and will not (HTTP/2).
    Refused,
    /// A kept connection was closed as the request went out, and it must not be sent twice. Neither side's
    /// fault.
    Raced,
    /// The gateway itself could open no connection. The worker has not been asked.
    Local(Shortage),
}

impl SendError {
    /// The worker says nothing, and seems to be gone.
    pub fn silent() -> Self {
        Self::Lost(FailureCause::of("it says nothing, and its port is closed"))
    }

    /// The worker's answer broke off before anything was made of it.
    pub fn broken_off() -> Self {
        Self::Lost(FailureCause::of("it broke off in its answer"))
    }

    /// For metrics and traces: one of a few words.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Lost(_) => "lost",
            Self::Refused => "refused",
            Self::Raced => "raced",
            Self::Local(_) => "local",
        }
    }

    /// Whether no worker was asked, so that another may be without counting as a retry.
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Local(_))
    }

    /// Whether it is a failure of the worker's, to be told to its operators.
    pub fn is_the_worker_s(&self) -> bool {
        !matches!(self, Self::Raced | Self::Local(_))
    }

    /// What the client is told where nothing else can be tried.
    pub fn to_client(&self) -> Error {
        match self {
            Self::Local(lacks) => Error::Short { lacks: *lacks },
            Self::Raced => Error::ConnectionClosed,
            _ => Error::WorkerLost,
        }
    }
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(cause) | Self::Lost(cause) => cause.fmt(f),
            Self::Refused => f.write_str("the worker says that it has not begun the request"),
            Self::Raced => f.write_str("a kept connection was closed as the request was sent"),
            Self::Local(lacks) => write!(f, "the gateway itself lacks {lacks}"),
        }
    }
}

/// A cause in one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureCause(Cow<'static, str>);

impl FailureCause {
    /// A worker's connection could not be opened, or it broke.
    pub(super) fn of_io(error: &io::Error) -> Self {
        Self(chain(error).into())
    }

    /// No answer over HTTP/1.1.
    pub(super) fn of_http1(error: &Http1Error) -> Self {
        Self(chain(error).into())
    }

    /// No answer over HTTP/2. What a worker adds to a GOAWAY in its own words is left out.
    pub(super) fn of_h2(error: &h2::Error) -> Self {
        let text = match (error.get_io(), error.reason()) {
            (Some(io), _) => return Self::of_io(io),
            (None, Some(reason)) if error.is_go_away() => format!("GOAWAY: {}", reason.description()),
            (None, Some(reason)) if error.is_reset() => {
                format!("the stream was reset: {}", reason.description())
            }
            _ => "the connection broke".to_owned(),
        };
        Self(text.into())
    }

    /// A cause of the gateway's own words.
    pub(super) const fn of(text: &'static str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        // Some say their cause themselves.
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    text
}
