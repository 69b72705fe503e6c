//! Why streams that broke off ended there: the label `reason` of `keyway_streams_not_resumed_total`.

/// Why a stream does not go on elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// The configuration says so.
    Off,
    /// Another path than the two generating ones.
    Path,
    /// The worker is no `keyway-worker`, and streams are not continued by their text.
    Engine,
    /// A function that must be called.
    Tools,
    /// A form for the answer.
    Form,
    /// More than one answer.
    Choices,
    /// The prompt is to be in the answer.
    Echo,
    /// The client uses the worker extension itself, or asks for a continuation.
    OwnExtension,
    /// To be continued by its text, but each token is to have more than that.
    Logprobs,
    /// To be continued by its text, but the prompt is not one.
    PromptIds,
    /// To be continued by its text, but it has thoughts.
    Thoughts,
    /// The request, or a chunk, cannot be read.
    Unreadable,
    /// The request is large, or too much is kept for others.
    Memory,
    /// No worker of the same numerics is ready.
    NoWorker,
    /// The retry budget is spent.
    Budget,
    /// It was tried often enough.
    Attempts,
}

impl Obstacle {
    /// Every obstacle, so that each has a series from the start.
    pub const ALL: [Self; 16] = [
        Self::Off,
        Self::Path,
        Self::Engine,
        Self::Tools,
        Self::Form,
        Self::Choices,
        Self::Echo,
        Self::OwnExtension,
        Self::Logprobs,
        Self::PromptIds,
        Self::Thoughts,
        Self::Unreadable,
        Self::Memory,
        Self::NoWorker,
        Self::Budget,
        Self::Attempts,
    ];

    /// For logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Path => "path",
            Self::Engine => "engine",
            Self::Tools => "tools",
            Self::Form => "form",
            Self::Choices => "choices",
            Self::Echo => "echo",
            Self::OwnExtension => "own_extension",
            Self::Logprobs => "logprobs",
            Self::PromptIds => "prompt_ids",
            Self::Thoughts => "thoughts",
            Self::Unreadable => "unreadable",
            Self::Memory => "memory",
            Self::NoWorker => "no_worker",
            Self::Budget => "budget",
            Self::Attempts => "attempts",
        }
    }
}
