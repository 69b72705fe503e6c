//! A choice while its tokens come, and what all choices of an answer add up to. Whole answers and streams share it.

use std::task::{Context, Poll, ready};

use keyway_wire::extension::AnswerExtension;
use keyway_wire::openai::Usage;

use super::answer::usage;
use super::error::ApiError;
use crate::metrics::Outcome;
use crate::output::TextOutput;
use crate::reader::Shown;
use crate::sequence::{FinishReason, Generation};

/// One choice of an answer in the making.
#[derive(Debug)]
pub(crate) struct Running {
    /// `None` once the choice is complete: a stop string ends the generation too.
    pub(crate) generation: Option<Generation>,
    pub(crate) output: TextOutput,
    pub(crate) prompt_tokens: usize,
    /// Ids taken and not yet told; `None` if the client does not want them.
    pub(crate) untold_ids: Option<Vec<u32>>,
}

impl Running {
    /// The text of the next token, often none. `None` once the choice is complete.
    pub(crate) fn poll_text(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Shown>, ApiError>> {
        let Some(generation) = &mut self.generation else { return Poll::Ready(Ok(None)) };
        let event = ready!(generation.poll_next(context)).ok_or_else(ApiError::engine_stopped)?;
        if let Some(ids) = &mut self.untold_ids {
            ids.push(event.token);
        }
        let text = self.output.push(event).map_err(ApiError::internal)?;
        if self.output.finish.is_some() {
            self.generation = None;
        }
        Poll::Ready(Ok(Some(text)))
    }

    /// What an answer or chunk says of the ids taken since the one before.
    pub(crate) fn tell_ids(&mut self) -> Option<AnswerExtension> {
        self.untold_ids.as_mut().map(|ids| AnswerExtension { ids: std::mem::take(ids) })
    }
}

/// Token counts over all choices.
pub(crate) fn usage_of(choices: &[Running]) -> Usage {
    let sum = |count: fn(&Running) -> usize| choices.iter().map(count).sum();
    usage(sum(|c| c.prompt_tokens), sum(|c| c.output.completion_tokens), sum(|c| c.output.cached_tokens))
}

/// An answer counts as cut off if any of its choices was.
pub(crate) fn outcome(mut finishes: impl Iterator<Item = FinishReason>) -> Outcome {
    if finishes.any(|finish| finish == FinishReason::Length) { Outcome::Length } else { Outcome::Stop }
}
