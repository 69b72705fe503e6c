//! A generation request's fields with their defaults and ranges, checked as far as they can be without tokens.

use keyway_wire::extension::{FIELD, RequestExtension};
use serde_json::Value;

use super::App;
use super::error::{ApiError, EMITTED_BYTES, OUTPUT_IDS};
use super::params::{Params, kind};
use super::prompt::PromptSource;
use crate::limits::{PROMPTS_PER_REQUEST_MAX, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX};
use crate::sampler::Sampling;
use crate::sequence::GenerationRequest;

/// OpenAI's default for `/v1/completions`.
const COMPLETION_MAX_TOKENS: usize = 16;

/// Which of the two generating paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completion,
}

/// A checked request.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) endpoint: Endpoint,
    pub(crate) source: PromptSource,
    pub(crate) stops: Vec<String>,
    pub(crate) stream: bool,
    /// Whether a stream ends with a chunk of usage.
    pub(crate) include_usage: bool,
    max_tokens: Option<usize>,
    ignore_eos: bool,
    sampling: Sampling,
    salt: String,
    priority: i64,
    /// Present if the answer shall carry token ids.
    extension: Option<RequestExtension>,
}

impl Call {
    /// Reads a request's body.
    pub(crate) fn parse(app: &App, endpoint: Endpoint, body: &[u8]) -> Result<Self, ApiError> {
        let mut params = Params::parse(body)?;
        // A worker serves one model, so a request that names none means that one (as vLLM reads it).
        let model = params.take_string("model")?.unwrap_or_else(|| app.model.name.clone());
        if model != app.model.name {
            return Err(ApiError::model_not_found(&model, &app.model.name));
        }
        let source = match endpoint {
            Endpoint::Chat => PromptSource::chat(&mut params)?,
            Endpoint::Completion => PromptSource::completion(&mut params, app.model.vocab_size)?,
        };
        if let PromptSource::Prompts { prompts, .. } = &source
            && prompts.len() > PROMPTS_PER_REQUEST_MAX
        {
            let what =
                format!("'prompt' holds {} prompts; the most is {PROMPTS_PER_REQUEST_MAX}.", prompts.len());
            return Err(ApiError::invalid_value("prompt", what));
        }
        let extension = take_extension(&mut params, app.model.vocab_size)?;
        if extension.is_some() && !source.is_single() {
            return Err(ApiError::invalid_value(FIELD, "'keyway' goes with a single prompt only."));
        }
        let mut sampling = take_sampling(&mut params, app)?;
        if let Some(seed) = extension.as_ref().and_then(|extension| extension.seed) {
            sampling.seed = seed;
        }
        let (stream, include_usage) = take_stream(&mut params)?;
        let call = Self {
            endpoint,
            source,
            stream,
            include_usage,
            stops: take_stops(&mut params)?,
            max_tokens: take_max_tokens(&mut params)?,
            ignore_eos: params.take_bool("ignore_eos")?.unwrap_or(false),
            sampling,
            salt: params.take_string("cache_salt")?.unwrap_or_default(),
            priority: params.take_integer("priority", i64::MIN)?.unwrap_or(0),
            extension,
        };
        params.finish()?;
        Ok(call)
    }

    /// Whether the answer shall carry token ids.
    pub(crate) fn wants_ids(&self) -> bool {
        self.extension.is_some()
    }

    /// Whether a client has the beginning of the answer.
    pub(crate) fn resumes(&self) -> bool {
        self.extension.as_ref().is_some_and(|extension| extension.output_ids.is_some())
    }

    /// Bytes of text that a client has already.
    pub(crate) fn emitted_bytes(&self) -> usize {
        self.extension.as_ref().map_or(0, |extension| extension.emitted_bytes as usize)
    }

    /// What the engine is asked for, once the prompts' ids are known; checks that they fit the context.
    pub(crate) fn requests(
        &self,
        app: &App,
        prompts: Vec<Vec<u32>>,
    ) -> Result<Vec<GenerationRequest>, ApiError> {
        let (noun, default) = match self.endpoint {
            Endpoint::Chat => ("messages", app.defaults.max_new_tokens),
            Endpoint::Completion => ("prompt", Some(COMPLETION_MAX_TOKENS)),
        };
        let max_len = app.model.max_model_len;
        let salt: std::sync::Arc<[u8]> = std::sync::Arc::from(self.salt.as_bytes());
        let request = |prompt: Vec<u32>| {
            if prompt.iter().any(|id| *id as usize >= app.model.vocab_size) {
                // A tokenizer with more tokens than the model.
                return Err(ApiError::invalid_value(
                    noun,
                    format!("'{noun}' holds a token this model does not know."),
                ));
            }
            let room = max_len.saturating_sub(prompt.len());
            if room == 0 || self.max_tokens.is_some_and(|max| max > room) {
                return Err(ApiError::context_length(max_len, prompt.len(), self.max_tokens, noun));
            }
            let max_tokens = self.max_tokens.or(default).unwrap_or(room).min(room);
            let output_ids = self.extension.as_ref().and_then(|e| e.output_ids.clone()).unwrap_or_default();
            let ends = |id: &u32| !self.ignore_eos && app.model.eos_token_ids.contains(id);
            if output_ids.len() >= max_tokens || output_ids.iter().any(ends) {
                return Err(ApiError::output_complete());
            }
            Ok(GenerationRequest {
                prompt,
                output_ids,
                max_tokens,
                ignore_eos: self.ignore_eos,
                sampling: self.sampling,
                salt: salt.clone(),
                priority: self.priority,
            })
        };
        prompts.into_iter().map(request).collect()
    }
}

/// `max_completion_tokens` is the newer name of `max_tokens` and wins.
fn take_max_tokens(params: &mut Params) -> Result<Option<usize>, ApiError> {
    let old = params.take_integer("max_tokens", 1)?;
    let new = params.take_integer("max_completion_tokens", 1)?;
    Ok(new.or(old).map(|max| max as usize))
}

fn take_sampling(params: &mut Params, app: &App) -> Result<Sampling, ApiError> {
    let temperature = params.take_number("temperature", 0.0, 2.0)?.map(|t| t as f32);
    let top_p = params.take_number("top_p", 0.0, 1.0)?.map(|p| p as f32);
    // vLLM's clients say -1 for "all".
    let top_k = params.take_integer("top_k", -1)?.map(|k| k.max(0) as usize);
    let seed = params.take_integer("seed", i64::MIN)?.map(|seed| seed as u64);
    Ok(Sampling {
        temperature: temperature.or(app.defaults.temperature).unwrap_or(1.0),
        top_p: top_p.or(app.defaults.top_p).unwrap_or(1.0),
        top_k: top_k.or(app.defaults.top_k).unwrap_or(0),
        seed: seed.unwrap_or_else(|| fastrand::u64(..)),
    })
}

fn take_extension(params: &mut Params, vocab_size: usize) -> Result<Option<RequestExtension>, ApiError> {
    let Some(fields) = params.take_object(FIELD)? else { return Ok(None) };
    let mut fields = Params::new(fields);
    let seed = fields.take_unsigned("seed", "keyway.seed")?;
    let emitted_bytes = fields.take_unsigned("emitted_bytes", EMITTED_BYTES)?.unwrap_or(0);
    let id = |value: &Value| value.as_u64().filter(|id| *id < vocab_size as u64).map(|id| id as u32);
    let output_ids = match fields.take("output_ids") {
        None => None,
        Some(Value::Array(ids)) => {
            Some(ids.iter().map(id).collect::<Option<Vec<u32>>>().ok_or_else(|| {
                let last = vocab_size - 1;
                let what =
                    format!("'{OUTPUT_IDS}' holds something that is not a token id between 0 and {last}.");
                ApiError::invalid_value(OUTPUT_IDS, what)
            })?)
        }
        Some(other) => {
            let what = format!("'{OUTPUT_IDS}' must be an array of token ids, not {}.", kind(&other));
            return Err(ApiError::invalid_value(OUTPUT_IDS, what));
        }
    };
    fields.finish()?;
    if output_ids.is_none() && emitted_bytes > 0 {
        let what = format!("'{EMITTED_BYTES}' needs '{OUTPUT_IDS}', the ids that the text came from.");
        return Err(ApiError::invalid_value(EMITTED_BYTES, what));
    }
    Ok(Some(RequestExtension { seed, output_ids, emitted_bytes }))
}

fn take_stream(params: &mut Params) -> Result<(bool, bool), ApiError> {
    let stream = params.take_bool("stream")?.unwrap_or(false);
    let Some(options) = params.take_object("stream_options")? else { return Ok((stream, false)) };
    if !stream {
        let what = "'stream_options' is only allowed when 'stream' is true.";
        return Err(ApiError::invalid_value("stream_options", what));
    }
    let mut options = Params::new(options);
    let include_usage = options.take_bool("include_usage")?.unwrap_or(false);
    // Padding against traffic analysis; without it the text is the same.
    options.take_bool("include_obfuscation")?;
    if options.take_bool("continuous_usage_stats")? == Some(true) {
        let param = "stream_options.continuous_usage_stats";
        return Err(ApiError::unsupported(
            param,
            format!("This worker does not support '{param}'. Leave it out."),
        ));
    }
    options.finish()?;
    Ok((stream, include_usage))
}

fn take_stops(params: &mut Params) -> Result<Vec<String>, ApiError> {
    let wrong = |what: String| Err(ApiError::invalid_value("stop", what));
    let stops = match params.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![Value::String(stop)],
        Some(Value::Array(stops)) => stops,
        Some(other) => {
            return wrong(format!("'stop' must be a string or an array of strings, not {}.", kind(&other)));
        }
    };
    if stops.len() > STOP_STRINGS_MAX {
        return wrong(format!("'stop' holds {} strings; the most is {STOP_STRINGS_MAX}.", stops.len()));
    }
    let mut texts = Vec::with_capacity(stops.len());
    for stop in stops {
        match stop {
            Value::String(text) if (1..=STOP_STRING_BYTES_MAX).contains(&text.len()) => texts.push(text),
            Value::String(_) => {
                return wrong(format!("Each 'stop' string must have 1 to {STOP_STRING_BYTES_MAX} bytes."));
            }
            other => return wrong(format!("'stop' must hold strings, not {}.", kind(&other))),
        }
    }
    Ok(texts)
}
