//! A response in OpenAI's events.

use super::answer::Making;
use crate::answer::reader::Shown;
use crate::api::error::ApiError;
use crate::api::running::Running;
use crate::api::stream::Events;
use crate::api::told::said;

/// Tells one response.
#[derive(Debug)]
pub(in crate::api) struct ResponseEvents {
    making: Making,
}

impl ResponseEvents {
    pub(in crate::api) const fn new(making: Making) -> Self {
        Self { making }
    }
}

impl Events for ResponseEvents {
    fn begin(&mut self, out: &mut Vec<u8>) {
        self.making.writer.begin(out);
    }

    fn say(&mut self, out: &mut Vec<u8>, _choices: &mut [Running], _index: usize, text: Shown) {
        self.making.writer.add(out, said(text));
    }

    fn end(&mut self, out: &mut Vec<u8>, choices: &mut [Running]) {
        let Some(choice) = choices.first() else { return };
        self.making.end(out, choice);
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        self.making.writer.fail(out, &error.detail().message);
    }
}
