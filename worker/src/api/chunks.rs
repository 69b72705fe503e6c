//! A stream in OpenAI's chunks, of chats and completions; its end is `[DONE]`.

use std::sync::Arc;

use keyway_wire::extension::AnswerExtension;

use super::App;
use super::answer::{AnswerHead, Piece, UsageField};
use super::error::ApiError;
use super::request::{Call, Endpoint};
use super::running::{Running, usage_of};
use super::stream::Events;
use crate::answer::reader::Shown;

/// Tells choices in chunks.
#[derive(Debug)]
pub(super) struct Chunks {
    head: AnswerHead,
    /// Whose first chunk is still to come, and is the one that names the role.
    roles_due: Vec<bool>,
    include_usage: bool,
    continuous_usage: bool,
    /// Whether chunks carry the worker extension.
    with_ids: bool,
}

impl Chunks {
    pub(super) fn new(app: &Arc<App>, call: &Call, choices: usize) -> Self {
        Self {
            head: AnswerHead::new(app, call),
            roles_due: vec![call.endpoint == Endpoint::Chat && !call.resumes(); choices],
            include_usage: call.shape.include_usage,
            continuous_usage: call.shape.continuous_usage,
            with_ids: call.wants_ids(),
        }
    }

    fn take_ids(&self, choice: &mut Running) -> Option<AnswerExtension> {
        self.with_ids.then(|| choice.untold.take_ids())
    }

    fn write(
        &self,
        out: &mut Vec<u8>,
        choices: &mut [Running],
        index: usize,
        piece: Piece<'_>,
        keyway: Option<AnswerExtension>,
    ) {
        let usage = if self.continuous_usage {
            UsageField::Counts(usage_of(choices))
        } else if self.include_usage {
            UsageField::Null(())
        } else {
            UsageField::Absent
        };
        self.head.write_piece(out, index, piece, &mut choices[index], usage, keyway);
    }
}

impl Events for Chunks {
    fn say(&mut self, out: &mut Vec<u8>, choices: &mut [Running], index: usize, text: Shown) {
        if std::mem::take(&mut self.roles_due[index]) {
            let no_ids = self.with_ids.then(AnswerExtension::default);
            self.write(out, choices, index, Piece::Role, no_ids);
        }
        if choices[index].output.finish.is_none() {
            if !text.is_empty() {
                let keyway = self.take_ids(&mut choices[index]);
                self.write(out, choices, index, Piece::Text(&text), keyway);
            }
            return;
        }
        let mut rest = text;
        // With ids, text and end come in one chunk, so that a stream is never broken between the two.
        if !self.with_ids && !rest.is_empty() {
            self.write(out, choices, index, Piece::Text(&rest), None);
            rest = Shown::default();
        }
        let keyway = self.take_ids(&mut choices[index]);
        self.write(out, choices, index, Piece::End(&rest), keyway);
    }

    fn end(&mut self, out: &mut Vec<u8>, choices: &mut [Running]) {
        if self.include_usage {
            let usage = usage_of(choices);
            let keyway = choices.first_mut().and_then(|first| self.take_ids(first));
            self.head.write_usage(out, usage, keyway);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        out.extend_from_slice(error.to_event().as_bytes());
    }
}
