//! A chat's answer as a message: whole, event by event, and its errors.

use serde_json::Value;

use super::answer::MessageHead;
use super::error::{error_of_body, error_of_event};
use super::events::{MessageEvents, write_error};
use crate::chat::{Told, read, read_chunk};
use crate::{Back, Counts, Finish, NoChat};

/// What an engine sends behind the last chunk.
const DONE: &[u8] = b"[DONE]";

/// Turns the answer to one chat into a message.
#[derive(Debug)]
pub(super) struct MessageBack {
    /// As the client asked for it; where it named none, as the engine names it.
    model: Option<String>,
    stops: Vec<String>,
    events: Option<MessageEvents>,
    /// How the answer ended. Its token counts may come behind.
    finish: Option<Finish>,
    counts: Counts,
    /// Whether the stream has its end, or its error.
    is_over: bool,
}

impl MessageBack {
    pub(super) fn new(model: Option<String>, stops: Vec<String>) -> Self {
        Self { model, stops, events: None, finish: None, counts: Counts::default(), is_over: false }
    }

    fn head(&mut self, told: &mut Told) -> MessageHead {
        MessageHead::new(self.model.take().or_else(|| told.model.take()).unwrap_or_default())
    }

    /// A stop sequence is told where it is one of the request's: engines have others of their own.
    fn known(&self, finish: Finish) -> Finish {
        match finish {
            Finish::Sequence(sequence) if !self.stops.contains(&sequence) => Finish::Stop,
            finish => finish,
        }
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &Value) {
        write_error(out, error);
        self.is_over = true;
    }
}

impl Back for MessageBack {
    fn whole(&mut self, chat: &[u8]) -> Result<Vec<u8>, NoChat> {
        let mut told = read(chat)?;
        let head = self.head(&mut told);
        let finish = self.known(told.finish.unwrap_or(Finish::Stop));
        let message = head.whole(&told.said, &finish, told.counts.unwrap_or_default());
        Ok(message.to_string().into_bytes())
    }

    fn event(&mut self, data: &[u8], out: &mut Vec<u8>) {
        if self.is_over {
            return;
        }
        if data.trim_ascii() == DONE {
            return self.end(out);
        }
        let Ok(mut told) = read_chunk(data) else { return self.fail(out, &error_of_event(data)) };
        if told.is_empty() {
            return;
        }
        if told.error.is_some() {
            return self.fail(out, &error_of_event(data));
        }
        let had_finish = self.finish.is_some();
        let has_counts = told.counts.is_some();
        self.counts = told.counts.unwrap_or(self.counts);
        if self.events.is_none() {
            self.events = Some(MessageEvents::new(self.head(&mut told)));
        }
        if let Some(events) = &mut self.events {
            events.begin(out, self.counts);
            events.say(out, told.said);
        }
        if let Some(finish) = told.finish {
            self.finish = Some(self.known(finish));
        }
        if had_finish && has_counts {
            self.end(out);
        }
    }

    /// A stream without a reason for its end broke off, and SDKs take one without an end for that.
    fn end(&mut self, out: &mut Vec<u8>) {
        if let (Some(events), Some(finish), false) = (&mut self.events, &self.finish, self.is_over) {
            events.end(out, finish, self.counts);
            self.is_over = true;
        }
    }

    fn error(&self, status: u16, body: &[u8]) -> Vec<u8> {
        error_of_body(status, body).to_string().into_bytes()
    }
}

#[cfg(test)]
mod tests;
