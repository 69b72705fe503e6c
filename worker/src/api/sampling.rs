//! The fields that say how tokens are chosen: sampling, penalties, biases, ends.

use serde_json::Value;

use super::App;
use super::error::ApiError;
use super::params::{Params, kind};
use crate::engine::sampler::Sampling;
use crate::engine::token_rules::{Penalties, TokenRules};
use crate::limits::TOKEN_RULES_MAX;

/// OpenAI's range of a logit bias.
const BIAS_MAX: f64 = 100.0;

pub(super) fn take_sampling(params: &mut Params, app: &App) -> Result<Sampling, ApiError> {
    let temperature = params.take_number("temperature", 0.0, 2.0)?.map(|t| t as f32);
    let top_p = params.take_number("top_p", 0.0, 1.0)?.map(|p| p as f32);
    let min_p = params.take_number("min_p", 0.0, 1.0)?.map(|p| p as f32);
    // vLLM's clients say -1 for "all".
    let top_k = params.take_integer("top_k", -1)?.map(|k| k.max(0) as usize);
    let seed = params.take_integer("seed", i64::MIN)?.map(|seed| seed as u64);
    Ok(Sampling {
        temperature: temperature.or(app.defaults.temperature).unwrap_or(1.0),
        top_p: top_p.or(app.defaults.top_p).unwrap_or(1.0),
        top_k: top_k.or(app.defaults.top_k).unwrap_or(0),
        min_p: min_p.or(app.defaults.min_p).unwrap_or(0.0),
        seed: seed.unwrap_or_else(|| fastrand::u64(..)),
    })
}

pub(super) fn take_rules(params: &mut Params, app: &App) -> Result<TokenRules, ApiError> {
    let mut penalty = |name| Ok(params.take_number(name, -2.0, 2.0)?.unwrap_or(0.0) as f32);
    let (presence, frequency) = (penalty("presence_penalty")?, penalty("frequency_penalty")?);
    let repetition = params.take_number("repetition_penalty", 0.01, 100.0)?.map(|p| p as f32);
    let repetition = repetition.or(app.defaults.repetition_penalty).unwrap_or(1.0);
    let vocab_size = app.model.vocab_size;
    let stop_token_ids = params.take_ids("stop_token_ids", "stop_token_ids", vocab_size)?.unwrap_or_default();
    bounded("stop_token_ids", stop_token_ids.len())?;
    Ok(TokenRules {
        penalties: Penalties { presence, frequency, repetition },
        logit_bias: take_bias(params, vocab_size)?,
        min_tokens: params.take_integer("min_tokens", 0)?.unwrap_or(0) as usize,
        stop_token_ids,
    })
}

/// An object from token ids, written as strings, to numbers.
fn take_bias(params: &mut Params, vocab_size: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let fields = params.take_object("logit_bias")?.unwrap_or_default();
    bounded("logit_bias", fields.len())?;
    let one = |(id, bias): (String, Value)| {
        let known = id.parse::<u32>().ok().filter(|id| (*id as usize) < vocab_size);
        let id = known.ok_or_else(|| {
            let what =
                format!("'logit_bias' has a key that is not a token id between 0 and {}.", vocab_size - 1);
            ApiError::invalid_value("logit_bias", what)
        })?;
        let in_range = bias.as_f64().filter(|bias| (-BIAS_MAX..=BIAS_MAX).contains(bias));
        let bias = in_range.ok_or_else(|| {
            let what = format!("'logit_bias' must map to numbers between -100 and 100, not {}.", kind(&bias));
            ApiError::invalid_value("logit_bias", what)
        })?;
        Ok((id, bias as f32))
    };
    fields.into_iter().map(one).collect()
}

fn bounded(name: &str, count: usize) -> Result<(), ApiError> {
    if count <= TOKEN_RULES_MAX {
        return Ok(());
    }
    let what = format!("'{name}' holds {count} tokens; the most is {TOKEN_RULES_MAX}.");
    Err(ApiError::invalid_value(name, what))
}
