//! Why a form is not compiled. Those who ask are told, so each says in a line what to change, or to wait.

use super::bounds::FormBound;
use crate::limits::GRAMMAR_COMPILE_MAX;

/// A form that was not compiled.
#[derive(Debug, PartialEq)]
pub(crate) enum NotCompiled {
    /// For what it is.
    Form(FormError),
    /// Others are compiled, or there is no memory for a thread.
    Busy,
    /// The grammars of answers under way leave too little memory.
    Memory,
}

/// A form that cannot be compiled, whoever else asks for one.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum FormError {
    /// It is larger or more intricate than forms may be.
    #[error(transparent)]
    Bound(#[from] FormBound),
    #[error(transparent)]
    Vocabulary(#[from] NoTable),
    /// What llguidance says of it, on one line.
    #[error("{0}")]
    Wrong(String),
    #[error("it takes longer than {} s; simplify it", GRAMMAR_COMPILE_MAX.as_secs())]
    Slow,
    /// The thread that compiled it ended in a panic.
    #[error("the compiler fails at it")]
    Panic,
}

/// A vocabulary that llguidance makes no table of; what it says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this model's vocabulary has no table: {0}")]
pub(crate) struct NoTable(pub(super) String);

impl From<FormError> for NotCompiled {
    fn from(error: FormError) -> Self {
        Self::Form(error)
    }
}
