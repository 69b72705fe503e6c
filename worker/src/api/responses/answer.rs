//! A response in the making: `keyway_apis` tells it, whole or in events. At its end it is kept, if its
//! request did not say otherwise.

use std::sync::Arc;

use bytes::Bytes;
use keyway_apis::responses::ResponseWriter;
use serde_json::Value;

use super::request::Asked;
use super::store::{Kept, State};
use crate::answer::reader::Shown;
use crate::api::App;
use crate::api::answer::unix_seconds;
use crate::api::request::Call;
use crate::api::running::Running;
use crate::api::told;

/// A response in the making.
#[derive(Debug)]
pub(in crate::api) struct Making {
    pub(super) writer: ResponseWriter,
    /// The input's items, if it is to be kept.
    input: Option<Vec<u8>>,
    /// Whether its client does not wait for it.
    in_background: bool,
    app: Arc<App>,
}

impl Making {
    /// Of a call, whose fields it takes.
    pub(in crate::api) fn new(app: &Arc<App>, call: &mut Call) -> Self {
        let Asked { repeated, items, in_background, names } = std::mem::take(&mut call.asked);
        let writer = ResponseWriter::new(call.model.clone(), unix_seconds(), repeated, names);
        Self { writer, input: items, in_background, app: Arc::clone(app) }
    }

    /// Keeps it before it ends, for its client to ask for; tells it as it is.
    pub(super) fn keep_unfinished(&self) -> Value {
        let response = self.writer.unfinished(false);
        let items = Bytes::from(self.input.clone().unwrap_or_default());
        let (told, input_bytes) = (Bytes::from(response.to_string()), items.len());
        let kept = Kept { response: told, items, input_bytes, state: State::Making(None) };
        self.app.responses.keep(self.writer.id(), kept);
        response
    }

    /// Notes that its answer has begun.
    pub(super) fn has_begun(&self) {
        let response = Bytes::from(self.writer.unfinished(true).to_string());
        self.app.responses.go_on(self.writer.id(), |kept| kept.response = response);
    }

    /// Ends a response that breaks off and that nobody waits for.
    pub(super) fn fail(mut self, message: &str) {
        let response = self.writer.fail(&mut Vec::new(), message);
        self.keep(&response);
    }

    /// Ends the response: its last item, and what is kept of it.
    pub(super) fn end(&mut self, out: &mut Vec<u8>, choice: &Running) -> Value {
        let counts = told::counts(std::slice::from_ref(choice));
        let response = self.writer.end(out, &told::finish(&choice.output), Some(counts));
        self.keep(&response);
        response
    }

    fn keep(&mut self, response: &Value) {
        let Some(mut items) = self.input.take() else { return };
        let input_bytes = items.len();
        for item in self.writer.items() {
            if !items.is_empty() {
                items.push(b',');
            }
            // Writing plain values to memory cannot fail.
            let _ = serde_json::to_writer(&mut items, item);
        }
        let (response, in_background) = (Bytes::from(response.to_string()), self.in_background);
        let state = State::Ended { in_background };
        let ended = Kept { response, items: items.into(), input_bytes, state };
        if in_background {
            self.app.responses.go_on(self.writer.id(), |kept| *kept = ended);
        } else {
            self.app.responses.keep(self.writer.id(), ended);
        }
    }

    /// The whole response, of all that was said.
    pub(in crate::api) fn whole(mut self, choice: &Running, text: Shown) -> Value {
        // There are no events.
        let mut out = Vec::new();
        self.writer.add(&mut out, told::said(text));
        self.end(&mut out, choice)
    }
}
