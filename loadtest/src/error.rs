//! What can stop a command, and the exit code each kind ends with. Failures of single requests are not errors
//! of the command: they are counted (see `record.rs`).

use std::{path::PathBuf, process::ExitCode};

use crate::{
    client::ClientError,
    engine_model::UnknownProfile,
    schedule::{ScheduleError, arrivals::ArrivalError},
    stats::samples::SamplesError,
    trace::TraceError,
    workload::{synthetic::PrefixError, texts::TextError},
};

/// Exit code of a run in which nothing succeeded or the server could not be reached.
pub const EXIT_FAILED: u8 = 1;
/// Exit code of bad input.
pub const EXIT_USAGE: u8 = 2;
/// Exit code of a run that sent its requests too late to be trusted.
pub const EXIT_INVALID: u8 = 3;
/// Exit code of a run that does not keep its objective, and of a comparison that fails its gate.
pub const EXIT_GATE: u8 = 4;
/// Exit code of a run ended by SIGINT or SIGTERM; its report covers what was done.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Why a command stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arguments contradict each other or the input.
    #[error("{0}")]
    Usage(String),
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A file of prompts cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// There can be no such tree of shared prefixes.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// The options do not say how requests arrive.
    #[error(transparent)]
    Arrival(#[from] ArrivalError),
    /// There can be no such schedule.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// No simulated engine has this name.
    #[error(transparent)]
    Profile(#[from] UnknownProfile),
    /// There can be no such fleet of simulated engines. The mock, which imports this file, says why.
    #[error(transparent)]
    Mock(Box<dyn std::error::Error + Send + Sync>),
    /// The server cannot be reached or does not answer as an OpenAI-compatible server does.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A result cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The system's own error, with which the message ends.
        source: std::io::Error,
    },
    /// A report cannot be read.
    #[error("{path}: {reason}")]
    Report {
        /// The report's file, or the run's folder.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The single requests in a report cannot be read.
    #[error("{path}: {source}")]
    Samples {
        /// The report's file, or the run's folder.
        path: PathBuf,
        /// How they are damaged.
        source: SamplesError,
    },
    /// A probe of a search was sent too late to be trusted.
    #[error("invalid measurement {0}")]
    Invalid(String),
    /// A request that everything else needs failed.
    #[error("a request failed: {0}")]
    Failed(String),
    /// A search or sweep was ended by a signal.
    #[error("interrupted")]
    Interrupted,
    /// The process cannot start its threads or its signal handlers.
    #[error("cannot start: {0}")]
    Start(#[from] std::io::Error),
}

impl Error {
    /// The code to end the process with.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage(_)
            | Self::Trace(_)
            | Self::Text(_)
            | Self::Prefix(_)
            | Self::Arrival(_)
            | Self::Schedule(_)
            | Self::Profile(_)
            | Self::Mock(_)
            | Self::Report { .. }
            | Self::Samples { .. }
            | Self::Client(
                ClientError::Url { .. }
                | ClientError::Header { .. }
                | ClientError::KeyFile { .. }
                | ClientError::NoKey(_),
            ) => EXIT_USAGE,
            Self::Interrupted => EXIT_INTERRUPTED,
            Self::Invalid(_) => EXIT_INVALID,
            Self::Client(_) | Self::Failed(_) | Self::Write { .. } | Self::Start(_) => EXIT_FAILED,
        })
    }
}
