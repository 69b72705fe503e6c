//! What is wrong with a worker: a cause of a closed set, the URL that was asked, what came, and what to do
//! about it.

use std::fmt;

/// Why a worker cannot be used, or not in full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Its name has no address.
    Dns,
    /// No process listens at its port.
    Refused,
    /// The network knows no way to it.
    Unreachable,
    /// It did not answer in time.
    Timeout,
    /// It closed the connection, or what it said is no HTTP.
    Reset,
    /// One side speaks TLS and the other does not.
    Tls,
    /// Its certificate is not believed, or ours is wanted.
    Certificate,
    /// 401 or 403: it wants a key, or does not take the configured one.
    Unauthorized,
    /// 404, 405 or 501 where an engine answers.
    NotFound,
    /// 3xx: redirects are not followed, so the URL is not the engine's own.
    Redirect,
    /// 5xx, except 501: the engine starts, or has failed.
    ServerError,
    /// Any other status that is no success.
    Status,
    /// What it says where its list of models would be is not even JSON.
    NotJson,
    /// ... is JSON, and no list.
    NoList,
    /// It lists no model that it could be asked for.
    NoModels,
    /// Its answer is longer than is read.
    TooLarge,
    /// The gateway itself cannot open a connection.
    Own,
}

impl Cause {
    /// Its name in metrics, logs and `/workers`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::Timeout => "timeout",
            Self::Reset => "reset",
            Self::Tls => "tls",
            Self::Certificate => "certificate",
            Self::Unauthorized => "unauthorized",
            Self::NotFound => "not_found",
            Self::Redirect => "redirect",
            Self::ServerError => "server_error",
            Self::Status => "status",
            Self::NotJson => "not_json",
            Self::NoList => "no_list",
            Self::NoModels => "no_models",
            Self::TooLarge => "too_large",
            Self::Own => "gateway",
        }
    }
}

/// What a probe found wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Its kind: a label in metrics, by which the log also knows a fault again.
    pub cause: Cause,
    /// The URL that was asked, or would have been, had the port taken a connection.
    pub url: String,
    /// What came of it.
    pub text: String,
    /// What an operator can do about it; shown behind the text.
    pub remedy: &'static str,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.text, self.remedy)
    }
}
