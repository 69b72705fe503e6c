//! A response in OpenAI's events, each with its number: it is created, its items grow, it is completed.

use serde_json::{Value, json};

use super::answer::{Making, Status};
use crate::answer::reader::Shown;
use crate::api::error::ApiError;
use crate::api::running::Running;
use crate::api::stream::Events;

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
        for event in ["response.created", "response.in_progress"] {
            let response = self.making.told(Status::InProgress, Value::Null);
            self.making.items.tell(out, event, json!({"response": response}));
        }
    }

    fn say(&mut self, out: &mut Vec<u8>, _choices: &mut [Running], _index: usize, text: Shown) {
        self.making.items.add(out, text);
    }

    fn end(&mut self, out: &mut Vec<u8>, choices: &mut [Running]) {
        let Some(choice) = choices.first() else { return };
        let ended = self.making.end(out, choice);
        self.making.items.tell(out, ended.event, json!({"response": ended.response}));
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        self.making.items.close(out, "incomplete");
        let response = self.making.told(Status::Failed(&error.detail().message), Value::Null);
        self.making.items.tell(out, "response.failed", json!({"response": response}));
    }
}
