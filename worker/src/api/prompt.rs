//! Messages or prompts to token ids. Not their lengths' limits, which depend on the rest of the request.

use keyway_text::memory::TOKENIZE_BYTES_EACH;
use keyway_text::{
    ChatTemplate, Conversation, ConversationError, PromptText, RenderOptions, TextError, TextModel,
};
use serde_json::{Map, Value};

use super::error::ApiError;
use super::params::{Params, kind};
use crate::limits::INLINE_TOKENIZE_BYTES_MAX;
use crate::request_memory::Turn;

const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// How much a model may be told to reason.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// What is to be tokenised.
#[derive(Debug)]
pub(crate) enum PromptSource {
    /// A checked conversation and how to render it.
    Chat { messages: Value, options: Box<RenderOptions> },
    /// Texts or token ids from the field `param`, to which no chat template is applied.
    Prompts { prompts: Vec<Prompt>, add_special: bool, param: &'static str },
}

/// One of a completion request's prompts.
#[derive(Debug)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl PromptSource {
    /// Takes a chat request's fields.
    pub(crate) fn chat(
        params: &mut Params,
        template: &ChatTemplate,
        tools: Option<Value>,
    ) -> Result<Self, ApiError> {
        let messages = params.take("messages").ok_or_else(|| ApiError::missing("messages"))?;
        let Value::Array(messages) = messages else {
            let message = format!("'messages' must be an array, not {}.", kind(&messages));
            return Err(ApiError::invalid_value("messages", message));
        };
        if messages.is_empty() {
            return Err(ApiError::invalid_value("messages", "'messages' must hold at least one message."));
        }
        let messages = messages.into_iter().enumerate().map(|(i, m)| checked_message(i, m));
        let mut variables = params.take_object("chat_template_kwargs")?.unwrap_or_default();
        take_effort(params, template, &mut variables)?;
        let options = RenderOptions {
            add_generation_prompt: params.take_bool("add_generation_prompt")?.unwrap_or(true),
            continue_final_message: params.take_bool("continue_final_message")?.unwrap_or(false),
            variables,
            documents: take_documents(params)?,
            tools,
            ..RenderOptions::default()
        };
        Ok(Self::Chat { messages: messages.collect::<Result<Value, _>>()?, options: Box::new(options) })
    }

    /// Takes a completion request's fields.
    pub(crate) fn completion(params: &mut Params, vocab_size: usize) -> Result<Self, ApiError> {
        Self::prompts(params, "prompt", vocab_size)
    }

    /// Takes the field `name`: a text, token ids, or an array of either.
    pub(crate) fn prompts(
        params: &mut Params,
        name: &'static str,
        vocab_size: usize,
    ) -> Result<Self, ApiError> {
        let prompt = params.take(name).ok_or_else(|| ApiError::missing(name))?;
        let add_special = params.take_bool("add_special_tokens")?.unwrap_or(true);
        let prompts = match prompt {
            Value::Array(items) if items.iter().any(|item| item.is_string() || item.is_array()) => {
                items.into_iter().map(|item| one_prompt(item, name, vocab_size)).collect::<Result<_, _>>()?
            }
            one => vec![one_prompt(one, name, vocab_size)?],
        };
        Ok(Self::Prompts { prompts, add_special, param: name })
    }

    /// Renders the conversation of the field `param`, as another API than chats' has it.
    pub(super) fn conversation(
        text: &TextModel,
        conversation: Conversation<'_>,
        param: &'static str,
        max_tokens: Option<usize>,
        turn: &Turn,
    ) -> Result<Self, ApiError> {
        let bound = TextBound::of(text, max_tokens, turn);
        let wrong = |what: String| Err(ApiError::invalid_value(param, what));
        match conversation.render(&text.template, bound.bytes) {
            Ok(PromptText::Whole { text, add_special }) => {
                Ok(Self::Prompts { prompts: vec![Prompt::Text(text)], add_special, param })
            }
            Ok(PromptText::Beginning(_)) => {
                wrong(format!("'{param}' must hold text alone: this model reads nothing else."))
            }
            Err(ConversationError::Text(TextError::TooLong)) => Err(bound.exceeded(param)),
            Err(error) => Err(ApiError::conversation(&error, param)),
        }
    }

    /// Prompts it comes to.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Chat { .. } => 1,
            Self::Prompts { prompts, .. } => prompts.len(),
        }
    }

    /// Whether it comes to one prompt.
    pub(crate) fn is_single(&self) -> bool {
        self.len() == 1
    }

    /// The field that holds the text.
    pub(crate) const fn param(&self) -> &'static str {
        match self {
            Self::Chat { .. } => "messages",
            Self::Prompts { param, .. } => param,
        }
    }

    /// Token ids of each prompt. What cannot fit in so many tokens is refused before it is tokenised, and
    /// what `turn` has no memory for.
    pub(crate) fn tokenize(
        self,
        text: &TextModel,
        max_tokens: Option<usize>,
        turn: &mut Turn,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let param = self.param();
        let (prompts, add_special) = match self {
            Self::Chat { messages, options } => {
                (vec![rendered(text, &messages, *options, max_tokens, turn)?], false)
            }
            Self::Prompts { prompts, add_special, .. } => (prompts, add_special),
        };
        let texts = prompts.iter().map(Prompt::text_bytes);
        let (longest, all) = texts.fold((0, 0), |(longest, all), bytes| (bytes.max(longest), all + bytes));
        if let Some(max) = max_tokens
            && prompts.iter().any(|prompt| prompt.comes_to(text, max))
        {
            return Err(ApiError::too_many_tokens(max, param));
        }
        // They come one after the other; of each the ids stay.
        turn.needs(longest * TOKENIZE_BYTES_EACH + all * size_of::<u32>()).map_err(ApiError::no_memory)?;
        let encode =
            |prompt: &str| text.tokenizer.encode(prompt, add_special).map_err(|e| ApiError::text(&e, param));
        let ids = prompts.into_iter().map(|prompt| match prompt {
            Prompt::Text(text) => encode(&text),
            Prompt::Ids(ids) => Ok(ids),
        });
        let ids: Vec<Vec<u32>> = ids.collect::<Result<_, _>>()?;
        if ids.iter().any(Vec::is_empty) {
            return Err(ApiError::invalid_value(
                param,
                format!("'{param}' must come to at least one token."),
            ));
        }
        Ok(ids)
    }
}

impl Prompt {
    /// Bytes that are still to be tokenised.
    fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Ids(_) => 0,
        }
    }

    /// Whether it certainly comes to `max` tokens; a short text is rather tokenised.
    fn comes_to(&self, text: &TextModel, max: usize) -> bool {
        match self {
            Self::Text(prompt) => {
                prompt.len() > INLINE_TOKENIZE_BYTES_MAX && text.tokenizer.comes_to(prompt, max)
            }
            Self::Ids(_) => false, // they are counted as they are
        }
    }
}

/// Whether a template makes anything of how much the model shall reason: some know efforts, some only whether
/// it thinks.
pub(super) fn reads_effort(template: &ChatTemplate, effort: &str) -> bool {
    template.mentions("reasoning_effort") || (effort == "none" && template.mentions("enable_thinking"))
}

/// Takes how much the model shall reason. It is no reason to refuse a chat where the template makes nothing
/// of it, and is named to the client then.
fn take_effort(
    params: &mut Params,
    template: &ChatTemplate,
    variables: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let Some(effort) = params.take_string("reasoning_effort")? else { return Ok(()) };
    if !EFFORTS.contains(&&*effort) {
        let what = format!("'reasoning_effort' must be one of {}.", EFFORTS.join(", "));
        return Err(ApiError::invalid_value("reasoning_effort", what));
    }
    if !reads_effort(template, &effort) {
        params.ignore("reasoning_effort".to_owned());
    }
    variables.entry("enable_thinking").or_insert(Value::Bool(effort != "none"));
    variables.insert("reasoning_effort".to_owned(), effort.into());
    Ok(())
}

/// A conversation as its template has it. A text that could not be tokenised, or would not fit, is not made
/// whole.
fn rendered(
    text: &TextModel,
    messages: &Value,
    mut options: RenderOptions,
    max_tokens: Option<usize>,
    turn: &Turn,
) -> Result<Prompt, ApiError> {
    let bound = TextBound::of(text, max_tokens, turn);
    options.bytes_max = bound.bytes;
    match text.template.render(messages, &options) {
        Ok(text) => Ok(Prompt::Text(text)),
        Err(TextError::TooLong) => Err(bound.exceeded("messages")),
        Err(error) => Err(ApiError::text(&error, "messages")),
    }
}

/// How long a rendered text may be.
#[derive(Debug, Clone, Copy)]
struct TextBound {
    bytes: usize,
    /// Tokens that do not leave room for more text; otherwise memory does not.
    tokens: Option<usize>,
}

impl TextBound {
    fn of(text: &TextModel, max_tokens: Option<usize>, turn: &Turn) -> Self {
        // Of a short body the text is short: not worth looking through the vocabulary.
        let fits = |tokens: usize| Some(tokens.saturating_mul(text.tokenizer.longest_token()?));
        let most = max_tokens.filter(|_| turn.is_long()).and_then(fits);
        let memory = turn.text_bytes_max();
        let tokens = max_tokens.filter(|_| most.is_some_and(|most| most <= memory));
        Self { bytes: most.unwrap_or(usize::MAX).min(memory), tokens }
    }

    fn exceeded(self, param: &'static str) -> ApiError {
        match self.tokens {
            Some(max) => ApiError::too_many_tokens(max, param),
            None => ApiError::text_too_large(self.bytes),
        }
    }
}

/// Documents for templates of retrieval models.
fn take_documents(params: &mut Params) -> Result<Option<Value>, ApiError> {
    match params.take("documents") {
        None => Ok(None),
        Some(Value::Array(documents)) if documents.iter().all(Value::is_object) => {
            Ok(Some(Value::Array(documents)).filter(|documents| *documents != Value::Array(Vec::new())))
        }
        Some(_) => Err(ApiError::invalid_value("documents", "'documents' must be an array of objects.")),
    }
}

/// A message as templates expect it: text, or text parts, and calls with their arguments as objects.
fn checked_message(i: usize, message: Value) -> Result<Value, ApiError> {
    let Value::Object(mut message) = message else {
        let what = format!("'messages[{i}]' must be an object, not {}.", kind(&message));
        return Err(ApiError::invalid_value(&format!("messages[{i}]"), what));
    };
    if !message.get("role").and_then(Value::as_str).is_some_and(|role| ROLES.contains(&role)) {
        let what = format!("'messages[{i}].role' must be one of {}.", ROLES.join(", "));
        return Err(ApiError::invalid_value(&format!("messages[{i}].role"), what));
    }
    parse_calls(i, &mut message)?;
    match message.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => check_parts(i, parts)?,
        None | Some(Value::Null) if has_calls(&message) => {
            // In its place: a template may print a whole message.
            message.insert("content".to_owned(), Value::String(String::new()));
        }
        other => {
            let what = format!(
                "'messages[{i}].content' must be a string or an array of text parts, not {}.",
                other.map_or("absent", kind)
            );
            return Err(ApiError::invalid_value(&format!("messages[{i}].content"), what));
        }
    }
    Ok(Value::Object(message))
}

/// The arguments of earlier calls, which OpenAI sends as JSON in a string, as what templates print.
fn parse_calls(i: usize, message: &mut Map<String, Value>) -> Result<(), ApiError> {
    let calls = match message.get_mut("tool_calls") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Array(calls)) => calls,
        Some(other) => {
            let param = format!("messages[{i}].tool_calls");
            let what = format!("'{param}' must be an array, not {}.", kind(other));
            return Err(ApiError::invalid_value(&param, what));
        }
    };
    for (j, call) in calls.iter_mut().enumerate() {
        let wrong = |what: &str| {
            let param = format!("messages[{i}].tool_calls[{j}].function");
            ApiError::invalid_value(&param, format!("'{param}' must have {what}."))
        };
        if !call["function"]["name"].is_string() {
            return Err(wrong("a 'name'"));
        }
        let parsed = match call["function"].get("arguments") {
            Some(Value::String(json)) if json.trim().is_empty() => Value::Object(Map::new()),
            Some(Value::String(json)) => {
                serde_json::from_str(json).map_err(|_| wrong("'arguments' that are JSON"))?
            }
            Some(object @ Value::Object(_)) => object.clone(),
            _ => return Err(wrong("'arguments', a string of JSON")),
        };
        call["function"]["arguments"] = parsed;
        *call = keyway_text::chat_call(call.take());
    }
    Ok(())
}

fn has_calls(message: &Map<String, Value>) -> bool {
    message.get("role").is_some_and(|r| r == "assistant")
        && ["tool_calls", "function_call"].iter().any(|name| message.get(*name).is_some_and(|v| !v.is_null()))
}

fn check_parts(i: usize, parts: &[Value]) -> Result<(), ApiError> {
    for (j, part) in parts.iter().enumerate() {
        if part["type"] != "text" || !part["text"].is_string() {
            let param = format!("messages[{i}].content[{j}]");
            let what = format!(
                "'{param}' must be of type text with a 'text' string: this model reads nothing else."
            );
            return Err(ApiError::invalid_value(&param, what));
        }
    }
    Ok(())
}

fn one_prompt(prompt: Value, name: &str, vocab_size: usize) -> Result<Prompt, ApiError> {
    let id = |value: &Value| value.as_u64().filter(|id| *id < vocab_size as u64).map(|id| id as u32);
    match prompt {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) => {
            let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
            ids.map(Prompt::Ids).ok_or_else(|| {
                let what = format!(
                    "'{name}' holds something that is not a token id between 0 and {}.",
                    vocab_size - 1
                );
                ApiError::invalid_value(name, what)
            })
        }
        other => {
            let what =
                format!("'{name}' must be a string, token ids, or an array of them, not {}.", kind(&other));
            Err(ApiError::invalid_value(name, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_effort_goes_to_the_template_and_is_named_where_that_makes_nothing_of_it() {
        let both = "{{ reasoning_effort }}/{{ enable_thinking }}";
        for (source, fields, want, ignored) in [
            (both, json!({"reasoning_effort": "high"}), "high/True", &[][..]),
            (both, json!({"reasoning_effort": "none"}), "none/False", &[]),
            (both, json!({"reasoning_effort": null}), "/", &[]),
            (
                both,
                json!({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false}}),
                "low/False",
                &[],
            ),
            ("{{ enable_thinking }}", json!({"reasoning_effort": "none"}), "False", &[]),
            ("{{ enable_thinking }}", json!({"reasoning_effort": "max"}), "True", &["reasoning_effort"]),
            ("fixed", json!({"reasoning_effort": "none"}), "fixed", &["reasoning_effort"]),
        ] {
            let template = ChatTemplate::from_source(source, Map::new()).unwrap();
            let mut params = Params::new(fields.as_object().unwrap().clone());
            params.put("messages", json!([{"role": "user", "content": "Hi"}]));
            let chat = PromptSource::chat(&mut params, &template, None).unwrap();
            let PromptSource::Chat { messages, options } = chat else { panic!("{fields}") };
            assert_eq!(template.render(&messages, &options).unwrap(), want, "{source} {fields}");
            assert_eq!(params.finish().unwrap(), ignored, "{source} {fields}");
        }
    }
}
