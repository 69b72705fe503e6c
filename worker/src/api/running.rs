//! A choice while its tokens come, and what all choices of an answer add up to. Whole answers and streams
//! share it.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use keyway_text::Tokenizer;
use keyway_wire::extension::AnswerExtension;
use keyway_wire::openai::Usage;

use super::answer::usage;
use super::error::ApiError;
use super::logprobs::Told;
use crate::answer::output::TextOutput;
use crate::answer::reader::Shown;
use crate::engine::holds::Hold;
use crate::engine::sequence::{Event, FinishReason, Generation};
use crate::metrics::Outcome;

/// One choice of an answer in the making.
#[derive(Debug)]
pub(crate) struct Running {
    /// `None` once the choice is complete: a stop string ends the generation too.
    pub(crate) generation: Option<Generation>,
    pub(crate) output: TextOutput,
    pub(crate) prompt: Vec<u32>,
    /// Whether it is the first of its prompt's choices, which counts the prompt.
    pub(crate) counts_prompt: bool,
    pub(crate) untold: Untold,
    /// Of the prompt, once it is computed, if asked for: its own field, not the text's.
    pub(crate) prompt_scores: Vec<crate::engine::logprobs::TokenScore>,
    pub(crate) cached_tokens: usize,
    /// Whether the request asked for the prompt's KV to be held.
    pub(crate) keeps: bool,
    /// That KV, unless too much is held.
    pub(crate) kept: Option<Arc<Hold>>,
    pub(crate) has_calls: bool,
}

/// What is to be said of the tokens taken since the chunk before.
#[derive(Debug, Default)]
pub(crate) struct Untold {
    pub(crate) ids: Vec<u32>,
    /// Tokens with their scores, the prompt's first where it is echoed.
    pub(crate) told: Vec<Told>,
    /// Characters of the text before `told`.
    pub(crate) offset: usize,
    /// Whether the prompt's tokens belong to the text.
    pub(crate) echo: bool,
}

impl Running {
    /// What the next event gives to show, often nothing. `None` once the choice is complete.
    pub(crate) fn poll_text(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Shown>, ApiError>> {
        let Some(generation) = &mut self.generation else { return Poll::Ready(Ok(None)) };
        let event = ready!(generation.poll_next(context)).ok_or_else(ApiError::engine_stopped)?;
        let shown = match event {
            Event::Token(event) => {
                self.cached_tokens = event.cached_tokens;
                self.untold.ids.push(event.token);
                let shown = self.output.push(&event).map_err(ApiError::internal)?;
                if let Some(score) = event.score {
                    self.untold.told.push(Told { id: event.token, score: Some(*score) });
                }
                shown
            }
            Event::Kept(hold) => {
                self.kept = Some(hold);
                Shown::default()
            }
            Event::Failed(reason) => return Poll::Ready(Err(ApiError::form_failed(&reason))),
            Event::BrokenOff(reason) => return Poll::Ready(Err(ApiError::broken_off(&reason))),
            Event::Prompt(outcome) => {
                self.cached_tokens = outcome.cached_tokens;
                if self.untold.echo {
                    let first = Told { id: self.prompt[0], score: None };
                    self.untold.told.push(first);
                    let rest = outcome.scores.iter().cloned();
                    self.untold.told.extend(rest.map(|score| Told { id: score.id, score: Some(score) }));
                }
                self.prompt_scores = outcome.scores;
                if !outcome.is_last {
                    return Poll::Ready(Ok(Some(Shown::default())));
                }
                self.output.finish = Some(FinishReason::Length);
                self.output.owed()
            }
        };
        self.has_calls |= !shown.calls.is_empty();
        if self.output.finish.is_some() {
            self.generation = None;
        }
        Poll::Ready(Ok(Some(shown)))
    }

    /// OpenAI's word for the end: a choice that calls functions ends for that.
    pub(crate) fn finish_reason(&self) -> Option<&'static str> {
        match self.output.finish? {
            FinishReason::Length => Some("length"),
            _ if self.has_calls => Some("tool_calls"),
            other => Some(other.as_str()),
        }
    }
}

impl Untold {
    /// What an answer or chunk says of the ids taken since the one before.
    pub(crate) fn take_ids(&mut self) -> AnswerExtension {
        AnswerExtension { ids: std::mem::take(&mut self.ids) }
    }

    /// The scores since the chunk before, and how many characters of text came before them.
    pub(crate) fn take_told(&mut self, tokenizer: &Tokenizer) -> (Vec<Told>, usize) {
        let told = std::mem::take(&mut self.told);
        let begin = self.offset;
        self.offset += told.iter().map(|told| told.chars(tokenizer)).sum::<usize>();
        (told, begin)
    }
}

/// Token counts over all choices; a prompt counts once, however many choices it has.
pub(crate) fn usage_of(choices: &[Running]) -> Usage {
    let prompts = || choices.iter().filter(|choice| choice.counts_prompt);
    usage(
        prompts().map(|c| c.prompt.len()).sum(),
        choices.iter().map(|c| c.output.completion_tokens).sum(),
        prompts().map(|c| c.cached_tokens).sum(),
    )
}

/// An answer counts as cut off if any of its choices was.
pub(crate) fn outcome(mut finishes: impl Iterator<Item = FinishReason>) -> Outcome {
    if finishes.any(|finish| finish == FinishReason::Length) { Outcome::Length } else { Outcome::Stop }
}
