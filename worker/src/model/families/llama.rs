//! Llama, and Mistral, which is Llama with a sliding window in all layers.

use super::shared::{Parts, assemble, dense, grouped, layers};
use crate::model::ModelError;
use crate::model::config::{Config, RawConfig, RawWindow, refuse};

/// Mistral's window where its configuration has no such key.
const MISTRAL_WINDOW: usize = 4096;

pub(super) fn llama(raw: &RawConfig) -> Result<Config, ModelError> {
    if raw.sliding_window.given().is_some() {
        return refuse("sliding_window", "Llama has none; a Mistral model names MistralForCausalLM");
    }
    let layers = layers(raw, |_| None, |_| dense(raw))?;
    assemble(raw, Parts::new(grouped(raw, false)?, layers))
}

pub(super) fn mistral(raw: &RawConfig) -> Result<Config, ModelError> {
    let window = match raw.sliding_window {
        RawWindow::Absent => Some(MISTRAL_WINDOW),
        said => said.given(),
    };
    let layers = layers(raw, |_| window, |_| dense(raw))?;
    assemble(raw, Parts::new(grouped(raw, false)?, layers))
}
