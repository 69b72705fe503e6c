//! A generation request's fields with their defaults and ranges, checked as far as they can be without
//! tokens. How tokens are chosen is `sampling.rs`, what the answer holds `shape.rs`, functions and formats
//! `tools.rs`.

use std::sync::OnceLock;

use keyway_wire::extension::{FIELD, RequestExtension};
use serde_json::Value;

use super::error::{ApiError, EMITTED_BYTES, OUTPUT_IDS};
use super::kv_transfer::{self, KvWish};
use super::params::{Params, kind};
use super::prompt::PromptSource;
use super::responses::request::Asked;
use super::sampling::{take_rules, take_sampling};
use super::shape::Shape;
use super::tools::Tools;
use super::{App, constraint, messages, responses};
use crate::answer::reader::{ReadOptions, opens_thoughts};
use crate::answer::stop::StopStrings;
use crate::engine::grammar::{Form, Grammar};
use crate::engine::sampler::Sampling;
use crate::engine::sequence::GenerationRequest;
use crate::engine::token_rules::TokenRules;
use crate::limits::{PROMPTS_PER_REQUEST_MAX, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX};
use crate::request_memory::Turn;

/// OpenAI's default for `/v1/completions`.
const COMPLETION_MAX_TOKENS: usize = 16;

/// Which of the generating paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completion,
    /// Anthropic's.
    Messages,
    /// OpenAI's newer one.
    Responses,
}

impl Endpoint {
    pub(crate) fn at(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completion),
            "/v1/messages" => Some(Self::Messages),
            "/v1/responses" => Some(Self::Responses),
            _ => None,
        }
    }

    /// Whether it is one of those that agents use, and whose conversations are not written as chats are.
    pub(crate) const fn is_of_agents(self) -> bool {
        matches!(self, Self::Messages | Self::Responses)
    }

    /// The field with the prompt.
    const fn noun(self) -> &'static str {
        match self {
            Self::Chat | Self::Messages => "messages",
            Self::Completion => "prompt",
            Self::Responses => "input",
        }
    }

    /// The field with the stop strings.
    const fn stops(self) -> &'static str {
        match self {
            Self::Chat | Self::Completion | Self::Responses => "stop",
            Self::Messages => "stop_sequences",
        }
    }
}

/// A checked request, its prompts not tokenised yet. Only those of agents are rendered.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) endpoint: Endpoint,
    /// The name by which the client knows the model.
    pub(crate) model: String,
    pub(crate) source: PromptSource,
    pub(crate) stops: StopStrings,
    pub(crate) stream: bool,
    pub(crate) shape: Shape,
    pub(crate) tools: Tools,
    /// The form that the answer must have.
    form: Option<Form>,
    /// It compiled, where it is the same behind each prompt.
    compiled: OnceLock<Grammar>,
    special_tokens: bool,
    max_tokens: Option<usize>,
    ignore_eos: bool,
    sampling: Sampling,
    rules: TokenRules,
    salt: String,
    priority: i64,
    /// Present if the answer shall carry token ids.
    extension: Option<RequestExtension>,
    /// Names of fields that are not acted on, where that is no error.
    pub(crate) ignored: Vec<String>,
    /// What shall become of the prompt's KV, or where it is.
    pub(super) kv: Option<KvWish>,
    /// Of a response: what its answer needs.
    pub(super) asked: Asked,
}

impl Call {
    /// Reads a request's body.
    pub(crate) fn parse(app: &App, endpoint: Endpoint, body: &[u8], turn: &Turn) -> Result<Self, ApiError> {
        let mut params = Params::parse(body)?;
        let model = app.model.named_in(&mut params)?;
        let vocab_size = app.model.vocab_size;
        let mut asked = Asked::default();
        let (source, tools) = match endpoint {
            Endpoint::Chat => {
                let mut tools = Tools::take(&mut params)?;
                (PromptSource::chat(&mut params, &app.text.template, tools.definitions.take())?, tools)
            }
            Endpoint::Completion => (PromptSource::completion(&mut params, vocab_size)?, Tools::default()),
            Endpoint::Messages => messages::request::take(app, &mut params, body, turn)?,
            Endpoint::Responses => {
                let taken = responses::request::take(app, &mut params, body, turn)?;
                asked = taken.asked;
                (taken.source, taken.tools)
            }
        };
        let (stream, shape) = Shape::take(&mut params, endpoint)?;
        check_choices(&source, shape.n)?;
        let extension = if endpoint.is_of_agents() { None } else { take_extension(&mut params, vocab_size)? };
        let mut sampling = take_sampling(&mut params, app)?;
        if let Some(seed) = extension.as_ref().and_then(|extension| extension.seed) {
            sampling.seed = seed;
        }
        let rules = take_rules(&mut params, app)?;
        let kv = kv_transfer::take(&mut params, app)?;
        let mut call = Self {
            endpoint,
            model,
            source,
            stream,
            stops: take_stops(&mut params, endpoint.stops(), rules.min_tokens)?,
            max_tokens: take_max_tokens(&mut params, usize::from(!shape.may_be_empty()))?,
            shape,
            tools,
            form: constraint::take(&mut params)?,
            compiled: OnceLock::new(),
            special_tokens: !params.take_bool("skip_special_tokens")?.unwrap_or(true),
            ignore_eos: params.take_bool("ignore_eos")?.unwrap_or(false),
            sampling,
            rules,
            salt: params.take_string("cache_salt")?.unwrap_or_default(),
            priority: params.take_integer("priority", i64::MIN)?.unwrap_or(0),
            extension,
            ignored: Vec::new(),
            kv,
            asked,
        };
        call.ignored = if endpoint.is_of_agents() { params.finish_agents()? } else { params.finish()? };
        call.check_extension()?;
        call.check_kept()?;
        Ok(call)
    }

    /// Lets go of what is needed no more once all choices are prepared: it may be large.
    pub(super) fn forget_what_is_done(&mut self) {
        self.tools.definitions = None;
        self.form = None;
        self.compiled = OnceLock::new();
    }

    /// Whether the prompt's KV is to be held for another worker.
    pub(super) fn keeps_kv(&self) -> bool {
        self.kv == Some(KvWish::Keep)
    }

    /// KV is kept of one prompt, and told in a whole answer.
    fn check_kept(&self) -> Result<(), ApiError> {
        let is_waited_for = !self.stream && !self.asked.in_background;
        let is_one = self.source.is_single() && self.shape.n == 1 && is_waited_for;
        if self.kv != Some(KvWish::Keep) || is_one {
            return Ok(());
        }
        let what = "'kv_transfer_params.do_remote_decode' goes with one prompt, one answer and no stream.";
        Err(ApiError::invalid_value(kv_transfer::PARAMS, what))
    }

    /// What the worker extension goes with, and what can be resumed.
    fn check_extension(&self) -> Result<(), ApiError> {
        if !self.wants_ids() {
            return Ok(());
        }
        if !self.source.is_single() || self.shape.n > 1 {
            return Err(ApiError::invalid_value(
                FIELD,
                "'keyway' goes with a single prompt and answer only.",
            ));
        }
        let obstacle = [
            (self.form.is_some(), "a form for the answer"),
            (self.tools.must_call(), "a function that must be called"),
            (self.shape.prompt_logprobs.is_some(), "'prompt_logprobs'"),
            (self.shape.echo, "'echo'"),
        ];
        match obstacle.iter().find(|(there, _)| *there && self.resumes()) {
            Some((_, what)) => Err(ApiError::not_resumable(what)),
            None => Ok(()),
        }
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

    /// What is told apart in the answer's text.
    pub(crate) fn read_options(&self, app: &App) -> ReadOptions {
        let options = match self.endpoint {
            Endpoint::Completion => ReadOptions::default(),
            _ => ReadOptions::chat(app.formats),
        };
        ReadOptions {
            functions: self.tools.callable.clone(),
            parallel_calls: self.tools.parallel,
            special_tokens: self.special_tokens,
            ..options
        }
    }

    /// The grammar of the whole answer behind a prompt.
    fn grammar(&self, app: &App, prompt: &[u32]) -> Result<Option<Grammar>, ApiError> {
        let read = |prompt: &[u32]| opens_thoughts(&app.text, prompt).map_err(ApiError::internal);
        let form = match self.endpoint {
            Endpoint::Completion => self.form.clone(),
            _ => constraint::whole_form(app, self.form.as_ref(), &self.tools, read(prompt)?)
                .map_err(ApiError::bad_form)?,
        };
        let Some(form) = form else { return Ok(None) };
        if let Some(grammar) = self.compiled.get() {
            return Ok(Some(grammar.clone()));
        }
        let grammar = app.grammars.compile(form).map_err(ApiError::not_compiled)?;
        if self.endpoint == Endpoint::Completion {
            return Ok(Some(self.compiled.get_or_init(|| grammar).clone()));
        }
        Ok(Some(grammar))
    }

    /// What the engine is asked for, once a prompt's ids are known; checks that they fit the context.
    pub(crate) fn request(&self, app: &App, prompt: Vec<u32>) -> Result<GenerationRequest, ApiError> {
        let default = match self.endpoint {
            Endpoint::Completion => Some(COMPLETION_MAX_TOKENS),
            _ => app.defaults.max_new_tokens,
        };
        let room = app.model.room_behind(&prompt, self.max_tokens, self.endpoint.noun())?;
        let max_tokens = self.max_tokens.or(default).unwrap_or(room).min(room);
        let output_ids = self.extension.as_ref().and_then(|e| e.output_ids.clone()).unwrap_or_default();
        let ends = |id: &u32| {
            !self.ignore_eos && app.model.eos_token_ids.contains(id) || self.rules.stop_token_ids.contains(id)
        };
        if self.resumes() && (output_ids.len() >= max_tokens || output_ids.iter().any(ends)) {
            return Err(ApiError::output_complete());
        }
        let grammar = self.grammar(app, &prompt)?;
        Ok(GenerationRequest {
            prompt,
            grammar,
            output_ids,
            max_tokens,
            ignore_eos: self.ignore_eos,
            sampling: self.sampling,
            rules: self.rules.clone(),
            logprobs: self.shape.logprobs,
            prompt_logprobs: self.shape.prompt_scores(),
            hidden: false,
            salt: std::sync::Arc::from(self.salt.as_bytes()),
            priority: self.priority,
            keep: self.keeps_kv(),
            imported: None,
        })
    }
}

fn check_choices(source: &PromptSource, n: usize) -> Result<(), ApiError> {
    let prompts = source.len();
    if prompts > PROMPTS_PER_REQUEST_MAX {
        let what = format!("'prompt' holds {prompts} prompts; the most is {PROMPTS_PER_REQUEST_MAX}.");
        return Err(ApiError::invalid_value("prompt", what));
    }
    if prompts * n > PROMPTS_PER_REQUEST_MAX {
        let what = format!(
            "{prompts} prompts with n {n} are too many answers; the most is {PROMPTS_PER_REQUEST_MAX}."
        );
        return Err(ApiError::invalid_value("n", what));
    }
    Ok(())
}

/// `max_completion_tokens` is the newer name of `max_tokens` and wins.
fn take_max_tokens(params: &mut Params, min: usize) -> Result<Option<usize>, ApiError> {
    let old = params.take_integer("max_tokens", min as i64)?;
    let new = params.take_integer("max_completion_tokens", min as i64)?;
    Ok(new.or(old).map(|max| max as usize))
}

fn take_extension(params: &mut Params, vocab_size: usize) -> Result<Option<RequestExtension>, ApiError> {
    let Some(fields) = params.take_object(FIELD)? else { return Ok(None) };
    let mut fields = Params::new(fields);
    let seed = fields.take_unsigned("seed", "keyway.seed")?;
    let emitted_bytes = fields.take_unsigned("emitted_bytes", EMITTED_BYTES)?.unwrap_or(0);
    let output_ids = fields.take_ids("output_ids", OUTPUT_IDS, vocab_size)?;
    fields.finish()?;
    if output_ids.is_none() && emitted_bytes > 0 {
        let what = format!("'{EMITTED_BYTES}' needs '{OUTPUT_IDS}', the ids that the text came from.");
        return Err(ApiError::invalid_value(EMITTED_BYTES, what));
    }
    Ok(Some(RequestExtension { seed, output_ids, emitted_bytes }))
}

fn take_stops(params: &mut Params, name: &'static str, min_tokens: usize) -> Result<StopStrings, ApiError> {
    let shown = params.take_bool("include_stop_str_in_output")?.unwrap_or(false);
    Ok(StopStrings { texts: take_stop_texts(params, name)?, shown, min_tokens })
}

fn take_stop_texts(params: &mut Params, name: &'static str) -> Result<Vec<String>, ApiError> {
    let wrong = |what: String| Err(ApiError::invalid_value(name, what));
    let stops = match params.take(name) {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![Value::String(stop)],
        Some(Value::Array(stops)) => stops,
        Some(other) => {
            return wrong(format!("'{name}' must be a string or an array of strings, not {}.", kind(&other)));
        }
    };
    if stops.len() > STOP_STRINGS_MAX {
        return wrong(format!("'{name}' holds {} strings; the most is {STOP_STRINGS_MAX}.", stops.len()));
    }
    let mut texts = Vec::with_capacity(stops.len());
    for stop in stops {
        match stop {
            Value::String(text) if (1..=STOP_STRING_BYTES_MAX).contains(&text.len()) => texts.push(text),
            Value::String(_) => {
                return wrong(format!(
                    "Each string of '{name}' must have 1 to {STOP_STRING_BYTES_MAX} bytes."
                ));
            }
            other => return wrong(format!("'{name}' must hold strings, not {}.", kind(&other))),
        }
    }
    Ok(texts)
}
