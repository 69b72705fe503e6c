//! A chat's answer back as a response. A streamed chat brings its usage behind the end of its text, so the
//! response ends with what comes last.

use super::writer::ResponseWriter;
use crate::chat::{self, Told};
use crate::engine_error::{ErrorShape, message, shortened};
use crate::{Back, Counts, Finish, NoChat};

/// What is told of an event that is no chunk.
const UNREAD: &str = "The engine's stream holds what is no chunk of a chat.";

/// Turns the answer to one chat into a response.
#[derive(Debug)]
pub(super) struct ResponseBack {
    writer: ResponseWriter,
    stage: Stage,
    finish: Option<Finish>,
    counts: Option<Counts>,
}

/// How far a stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing was told yet.
    Before,
    Within,
    Over,
}

impl ResponseBack {
    pub(super) const fn new(writer: ResponseWriter) -> Self {
        Self { writer, stage: Stage::Before, finish: None, counts: None }
    }
}

impl Back for ResponseBack {
    fn whole(&mut self, chat: &[u8]) -> Result<Vec<u8>, NoChat> {
        let told = chat::read(chat)?;
        self.writer.note(told.created, told.model);
        // There are no events.
        let mut out = Vec::new();
        self.writer.add(&mut out, told.said);
        let finish = told.finish.unwrap_or(Finish::Stop);
        Ok(self.writer.end(&mut out, &finish, told.counts).to_string().into_bytes())
    }

    fn event(&mut self, data: &[u8], out: &mut Vec<u8>) {
        if self.stage == Stage::Over {
            return;
        }
        if data.trim_ascii() == b"[DONE]" {
            return self.end(out);
        }
        // Of what cannot be read something would be lost: the client has to know.
        let unread = || Told { error: Some(UNREAD.into()), ..Told::default() };
        let told = chat::read_chunk(data).unwrap_or_else(|_| unread());
        if told.is_empty() {
            return;
        }
        if self.stage == Stage::Before {
            self.writer.note(told.created, told.model);
            self.writer.begin(out);
            self.stage = Stage::Within;
        }
        self.writer.add(out, told.said);
        if let Some(error) = told.error {
            self.writer.fail(out, shortened(&message(&error)));
            self.stage = Stage::Over;
            return;
        }
        self.finish = told.finish.or(self.finish.take());
        self.counts = told.counts.or(self.counts);
        if self.counts.is_some() {
            self.end(out);
        }
    }

    /// Of a stream that broke off, without saying how it ends, nothing more is told.
    fn end(&mut self, out: &mut Vec<u8>) {
        if self.stage == Stage::Over {
            return;
        }
        if let Some(finish) = &self.finish {
            self.writer.end(out, finish, self.counts);
            self.stage = Stage::Over;
        }
    }

    fn error(&self, status: u16, body: &[u8]) -> Vec<u8> {
        let told = ErrorShape::OpenAi.told(status, body);
        told.map_or_else(|| body.to_vec(), |error| error.to_string().into_bytes())
    }
}
