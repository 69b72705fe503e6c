//! Which term of the sum decided how many workers are wanted.

/// Which term of the sum, or which bound on it, decided how many workers are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleReason {
    /// Nothing asks for more than the minimum.
    Minimum,
    /// The uncached prompt tokens that come ask for more workers than what runs and what it holds.
    Prefill,
    /// Prompts that wait ask for more workers than [`super::Terms::steady`].
    Backlog,
    /// Requests past their first token ask for more workers than what comes and what the caches hold.
    Decode,
    /// The cache they hold.
    Kv,
    /// An SLO was missed although the sum held, so the guard asks for more workers than the sum.
    Guard,
    /// Fewer would do, but not for long enough.
    Held,
    /// More than the maximum would be needed.
    Maximum,
}

impl ScaleReason {
    /// All, in the order of the enum.
    pub const ALL: [Self; 8] = [
        Self::Minimum,
        Self::Prefill,
        Self::Backlog,
        Self::Decode,
        Self::Kv,
        Self::Guard,
        Self::Held,
        Self::Maximum,
    ];

    /// Its name in metrics and on the operators' page.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Minimum => "minimum",
            Self::Prefill => "prefill",
            Self::Backlog => "backlog",
            Self::Decode => "decode",
            Self::Kv => "kv",
            Self::Guard => "guard",
            Self::Held => "held",
            Self::Maximum => "maximum",
        }
    }
}
