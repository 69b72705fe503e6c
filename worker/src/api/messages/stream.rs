//! A message in Anthropic's events, as a choice's tokens come.

use keyway_apis::messages::{MessageEvents, MessageHead, write_error};

use crate::answer::reader::Shown;
use crate::api::error::ApiError;
use crate::api::request::Call;
use crate::api::running::Running;
use crate::api::stream::Events;
use crate::api::told;

/// Tells the message of one choice.
#[derive(Debug)]
pub(in crate::api) struct ChoiceEvents(MessageEvents);

impl ChoiceEvents {
    pub(in crate::api) fn new(call: &Call) -> Self {
        Self(MessageEvents::new(MessageHead::new(call.model.clone())))
    }
}

impl Events for ChoiceEvents {
    /// The message begins once its prompt's tokens are known to be cached or not.
    fn say(&mut self, out: &mut Vec<u8>, choices: &mut [Running], _index: usize, text: Shown) {
        self.0.begin(out, told::counts(choices));
        self.0.say(out, told::said(text));
    }

    fn end(&mut self, out: &mut Vec<u8>, choices: &mut [Running]) {
        let Some(choice) = choices.first() else { return };
        self.0.end(out, &told::finish(&choice.output), told::counts(choices));
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write_error(out, &super::error_of(error));
    }
}
