//! A conversation to the text of a prompt, by the model's own template, rendered as Hugging Face's
//! `apply_chat_template` does it (transformers 5). The template language is `jinja/`. Knows nothing of tokens
//! besides the texts of the special ones.

use std::borrow::Cow;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

use crate::TextError;
use crate::conversation::{TemplateTraits, later_system};
use crate::developer;
use crate::jinja::{Error, Template};
use crate::limits::RENDER_BYTES_MAX;
use crate::message::{Field, Message};

/// ChatML, the random model's format, with functions and calls as Hermes 2 Pro writes them.
const CHATML: &str = "{% if tools %}<|im_start|>system\n# Tools\n\nThese functions may be called:\n\
{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}A call is written as\n\
<tool_call>\n{\"name\": NAME, \"arguments\": OBJECT}\n</tool_call><|im_end|>\n{% endif %}\
{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
{% for call in message.tool_calls or [] %}{{ '\\n' }}<tool_call>\n{\"name\": {{ call.function.name | tojson }}, \"arguments\": \
{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// What a message's reasoning may be called; the first is the name that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Marks where the last message ends, when the model is to go on with it.
const CONTINUE: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A model's compiled chat templates.
#[derive(Debug)]
pub struct ChatTemplate {
    default: Option<Named>,
    /// Takes the place of `default` when there are tools.
    tool_use: Option<Named>,
    /// `bos_token` and so on.
    special: Map<String, Value>,
    /// Found out when they are first asked for.
    traits: OnceLock<TemplateTraits>,
}

#[derive(Debug)]
struct Named {
    template: Template,
    source: String,
    /// Whether it takes a message's content as a list of parts.
    reads_parts: bool,
    knows_developers: bool,
}

/// How a conversation is rendered.
#[derive(Debug, Clone)]
pub struct RenderOptions {
    /// Whether the text ends with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Whether the text ends inside the last message, for the model to go on with it.
    pub continue_final_message: bool,
    /// Whether messages' contents are made what the template takes, as vLLM does: text parts joined for one
    /// that takes text, text made a part for one that goes through parts.
    pub fit_contents: bool,
    /// The functions the model may call: an array of OpenAI's tool objects.
    pub tools: Option<Value>,
    /// Documents for the templates of retrieval models: an array of objects.
    pub documents: Option<Value>,
    /// Further variables for the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The moment that `strftime_now` names, in seconds since 1970; the system's clock if absent.
    pub now_unix_seconds: Option<u64>,
    /// Bytes that the prompt's text may have, and any that is made on the way to it; at most 256 MiB.
    pub bytes_max: usize,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            continue_final_message: false,
            fit_contents: true,
            tools: None,
            documents: None,
            variables: Map::new(),
            now_unix_seconds: None,
            bytes_max: RENDER_BYTES_MAX,
        }
    }
}

// === impl Named ===

impl Named {
    fn new(source: &str) -> Result<Self, Error> {
        let template = Template::new(source)?;
        let reads_parts = template.goes_through_parts();
        let knows_developers = developer::is_known(source);
        Ok(Self { template, source: source.to_owned(), reads_parts, knows_developers })
    }
}

// === impl ChatTemplate ===

impl ChatTemplate {
    /// The random model's ChatML.
    pub(crate) fn builtin() -> Self {
        // A constant that the tests render.
        Self { default: Named::new(CHATML).ok(), ..Self::none() }
    }

    /// Stands for a model without a template: every use says so.
    pub(crate) fn none() -> Self {
        Self { default: None, tool_use: None, special: Map::new(), traits: OnceLock::new() }
    }

    /// Compiles templates. The error is the parser's, with its line.
    pub(crate) fn new(
        default: Option<&str>,
        tool_use: Option<&str>,
        special: Map<String, Value>,
    ) -> Result<Self, Error> {
        let compile = |source: Option<&str>| source.map(Named::new).transpose();
        Ok(Self {
            default: compile(default)?,
            tool_use: compile(tool_use)?,
            special,
            traits: OnceLock::new(),
        })
    }

    /// Compiles one template. `special` holds the special tokens' texts that it may name, such as
    /// `bos_token`.
    pub fn from_source(source: &str, special: Map<String, Value>) -> Result<Self, TextError> {
        Self::new(Some(source), None, special).map_err(|e| TextError::Template(e.to_string()))
    }

    /// Whether a template's source has this text: its family's marks.
    pub fn mentions(&self, text: &str) -> bool {
        [&self.default, &self.tool_use].into_iter().flatten().any(|named| named.source.contains(text))
    }

    /// Whether what the system says among the messages is moved in front, where it changes all that follows.
    pub fn moves_later_systems(&self) -> bool {
        self.traits().system_comes_first
    }

    /// Whether it shows where it stands what the system says late, and the same of developers.
    pub fn shows_late(&self) -> (bool, bool) {
        let traits = self.traits();
        (traits.shows_late_systems, traits.shows_late_developers)
    }

    /// What decides how it is given Anthropic's requests.
    pub(crate) fn traits(&self) -> &TemplateTraits {
        self.traits.get_or_init(|| TemplateTraits::of(self))
    }

    /// Whether one of the templates does not take what a system says behind its first word, tried as vLLM
    /// tries it: without what transformers adds to the language.
    pub(crate) fn refuses_later_systems(&self) -> bool {
        let takes = |named: &Named| {
            !named.source.contains("endgeneration")
                && named.template.renders_bare(&later_system(), RENDER_BYTES_MAX)
        };
        let mut all = [&self.default, &self.tool_use].into_iter().flatten().peekable();
        all.peek().is_none() || !all.all(takes)
    }

    /// The prompt's text. `messages` is an array of objects with `role` and `content`; fields that are `null`
    /// count as absent.
    pub fn render(&self, messages: &Value, options: &RenderOptions) -> Result<String, TextError> {
        let wrong = || TextError::Render("messages must be an array of objects".to_owned());
        let messages: Option<Vec<Message<'_>>> =
            messages.as_array().ok_or_else(wrong)?.iter().map(Message::of).collect();
        self.render_messages(messages.ok_or_else(wrong)?, options)
    }

    /// [`ChatTemplate::render`] of messages that are no JSON value any more.
    pub fn render_messages(
        &self,
        mut messages: Vec<Message<'_>>,
        options: &RenderOptions,
    ) -> Result<String, TextError> {
        let tool_use = self.tool_use.as_ref().filter(|_| options.tools.is_some());
        let named = tool_use.or(self.default.as_ref()).ok_or(TextError::NoChatTemplate)?;
        for message in &mut messages {
            normalize(message);
            if options.fit_contents {
                fit_content(message, named.reads_parts);
            }
        }
        if !named.knows_developers {
            developer::to_system(&mut messages);
        }
        let tagged = if options.continue_final_message {
            if options.add_generation_prompt {
                return Err(unfit("it and add_generation_prompt exclude each other"));
            }
            if !named.source.contains("content") {
                return Err(unfit("the template does not read 'content'"));
            }
            Some(tag(messages.last_mut())?)
        } else {
            None
        };
        let generate = Value::Bool(options.add_generation_prompt);
        let fixed = [
            ("tools", options.tools.as_ref().unwrap_or(&Value::Null)),
            ("documents", options.documents.as_ref().unwrap_or(&Value::Null)),
            ("add_generation_prompt", &generate),
        ];
        let more = options.variables.iter().chain(&self.special).map(|(name, value)| (name.as_str(), value));
        let now = options.now_unix_seconds.unwrap_or_else(unix_seconds);
        let refused = |error: Error| {
            if error.raised {
                TextError::Rejected(error.message)
            } else if error.too_long {
                TextError::TooLong
            } else {
                TextError::Render(error.to_string())
            }
        };
        let bytes_max = options.bytes_max.min(RENDER_BYTES_MAX);
        let variables = fixed.into_iter().chain(more);
        let text = named.template.render(&messages, variables, now, bytes_max).map_err(refused)?;
        match tagged {
            Some(last) => cut(text, &last),
            None => Ok(text),
        }
    }
}

/// Makes a message's content what the template takes, as vLLM does: its parts joined by newlines or, for a
/// template that goes through parts, a list of them. What a tool says is text to all. The reference
/// (transformers) hands contents to the template as they are, which it may print as lists or break on.
fn fit_content(message: &mut Message<'_>, reads_parts: bool) {
    let by_tool = matches!(message.get("role"), Some(Field::Text(role)) if role == "tool");
    let Some(content) = message.get_mut("content") else { return };
    match content {
        Field::Text(text) if reads_parts && !by_tool => {
            let part = serde_json::json!([{ "type": "text", "text": std::mem::take(text) }]);
            *content = Field::Other(Cow::Owned(part));
        }
        Field::Text(_) => {}
        Field::Other(parts) => {
            let Some(parts) = parts.as_array() else { return };
            let text = |part: &Value| part["text"].as_str().map(str::to_owned);
            let texts: Option<Vec<String>> = if reads_parts {
                by_tool.then(|| parts.iter().map(text).collect()).flatten()
            } else {
                let named = |part: &Value| part["name"].as_str().map(str::to_owned);
                parts.iter().map(|part| text(part).or_else(|| named(part))).collect()
            };
            let Some(mut texts) = texts else { return };
            if !reads_parts {
                texts.retain(|text| !text.is_empty());
            }
            *content = Field::Text(texts.join("\n").into());
        }
    }
}

fn unfit(why: &str) -> TextError {
    TextError::Rejected(format!("continue_final_message: {why}"))
}

/// Leaves out fields that are `null`, and puts the reasoning under each of its usual names. The order is that
/// of the reference, for templates that print a whole message.
fn normalize(message: &mut Message<'_>) {
    message.drop_nulls();
    if let Some(reasoning) = REASONING.iter().find_map(|name| message.get(name)).cloned() {
        let thinking = message.get(REASONING[1]).cloned();
        message.set_first(REASONING[1], thinking.unwrap_or_else(|| reasoning.clone()));
        message.set(REASONING[0], reasoning);
    }
}

/// Appends the mark to the last message's text; returns that text without it.
fn tag(last: Option<&mut Message<'_>>) -> Result<String, TextError> {
    let none = || unfit("the last message has no text to go on with");
    match last.and_then(|message| message.get_mut("content")).ok_or_else(none)? {
        Field::Text(text) => {
            let before = text.clone().into_owned();
            text.to_mut().push_str(CONTINUE);
            Ok(before)
        }
        parts @ Field::Other(_) => {
            let parts = parts.items_mut().ok_or_else(none)?.iter_mut();
            let text = parts.rev().find_map(|part| part.get_mut("text"));
            let Some(Value::String(text)) = text else { return Err(none()) };
            let before = text.clone();
            text.push_str(CONTINUE);
            Ok(before)
        }
    }
}

/// The text up to the mark. A template that trims its messages took the mark's blank, and takes the text's
/// own too.
fn cut(mut text: String, last: &str) -> Result<String, TextError> {
    let mark = CONTINUE.trim_end();
    let at = text.rfind(mark).filter(|_| text.contains(last.trim()));
    let at = at.ok_or_else(|| unfit("the template does not show the last message as it is"))?;
    let whole = text[at..].starts_with(CONTINUE);
    text.truncate(at);
    if !whole {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

/// For templates that write which day it is, where the caller does not say.
#[allow(
    clippy::disallowed_methods,
    reason = "nothing waits for it, and a caller that must agree with others passes it"
)]
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, messages: &Value) -> Result<String, TextError> {
        let special = json!({"bos_token": "<s>", "eos_token": "</s>"}).as_object().unwrap().clone();
        ChatTemplate::from_source(source, special).unwrap().render(messages, &RenderOptions::default())
    }

    #[test]
    fn chatml() {
        let messages =
            json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]);
        assert_eq!(
            ChatTemplate::builtin().render(&messages, &RenderOptions::default()).unwrap(),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn chatml_shows_functions_and_earlier_calls() {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let messages = json!([{"role": "assistant", "content": "", "tool_calls": [call]}]);
        let options = RenderOptions {
            tools: Some(json!([{"type": "function", "function": {"name": "f"}}])),
            ..RenderOptions::default()
        };
        let text = ChatTemplate::builtin().render(&messages, &options).unwrap();
        assert!(text.contains("\n{\"type\": \"function\", \"function\": {\"name\": \"f\"}}\n"), "{text}");
        let shown = "assistant\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call><|im_end|>\n";
        assert!(text.contains(shown), "{text}");
    }

    #[test]
    fn blocks_leave_no_whitespace_and_python_methods_work() {
        let source = "{{ bos_token }}\n{% for m in messages %}\n  {% if m['content'].startswith('x') %}\n\
            {{ m.content.strip() | trim }}{{ eos_token }}\n  {% break %}\n  {% endif %}\n{% endfor %}\n";
        assert_eq!(
            render(source, &json!([{"role": "user", "content": "x y "}, {"content": "x"}])).unwrap(),
            "<s>\nx y</s>\n"
        );
    }

    #[test]
    fn a_refusal_is_the_templates_own_sentence() {
        let source =
            "{% if messages[0].role != 'user' %}{{ raise_exception('Start with a user.') }}{% endif %}";
        let error = render(source, &json!([{"role": "system", "content": ""}])).unwrap_err();
        assert!(matches!(&error, TextError::Rejected(m) if m == "Start with a user."), "{error}");
    }

    #[test]
    fn a_broken_template_says_where() {
        let error = ChatTemplate::new(Some("a\n{% if %}"), None, Map::new()).unwrap_err();
        assert_eq!(error.line, 2);
        let error = render("a\n{{ messages.a.b }}", &json!([])).unwrap_err().to_string();
        assert!(error.contains("line 2: 'a' is undefined"), "{error}");
    }

    #[test]
    fn variables_reach_the_template_and_generation_tags_enclose() {
        let source = "{%- generation -%} {{ enable_thinking }}{{ undefined_one }} {%- endgeneration -%} ";
        let template = ChatTemplate::from_source(source, Map::new());
        let variables = json!({"enable_thinking": false}).as_object().unwrap().clone();
        let options = RenderOptions { variables, ..RenderOptions::default() };
        assert_eq!(template.unwrap().render(&json!([]), &options).unwrap(), "False");
    }

    #[test]
    fn objects_print_in_the_clients_order_and_not_as_html() {
        assert_eq!(
            render("{{ messages[0] | tojson }}", &json!([{"role": "<user>", "n": 1, "a": 1.0}])).unwrap(),
            r#"{"role": "<user>", "n": 1, "a": 1.0}"#
        );
    }

    #[test]
    fn tools_choose_their_template() {
        let template = ChatTemplate::new(Some("D"), Some("{{ tools | length }}"), Map::new()).unwrap();
        let with = RenderOptions { tools: Some(json!([{}, {}])), ..RenderOptions::default() };
        assert_eq!(template.render(&json!([]), &with).unwrap(), "2");
        assert_eq!(template.render(&json!([]), &RenderOptions::default()).unwrap(), "D");
    }

    #[test]
    fn the_last_message_can_stay_open() {
        let source = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
        let options = RenderOptions {
            add_generation_prompt: false,
            continue_final_message: true,
            ..RenderOptions::default()
        };
        let template = ChatTemplate::from_source(source, Map::new()).unwrap();
        let render = |m: Value| template.render(&m, &options);
        assert_eq!(render(json!([{"content": "a"}, {"content": "b "}])).unwrap(), "[a][b ");
        assert!(render(json!([{"content": 1}])).is_err());
        assert!(render(json!([])).is_err());
    }

    #[test]
    fn contents_are_text_or_parts_as_the_template_takes_them() {
        let parts = json!([{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
        let strings = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}";
        assert_eq!(render(strings, &parts).unwrap(), "[a\nb]");
        assert_eq!(render("{% for m in messages %}{{ m.content }}{% endfor %}", &parts).unwrap(), "a\nb");
        let both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
            {% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}";
        assert_eq!(render(both, &parts).unwrap(), "(a)(b)");
        assert_eq!(render(both, &json!([{"content": "c"}])).unwrap(), "(c)");
        // What a tool says is text, to any template.
        assert_eq!(render(both, &json!([{"role": "tool", "content": "c"}])).unwrap(), "c");
    }

    #[test]
    fn a_model_without_a_template_says_so() {
        let error = ChatTemplate::none().render(&json!([]), &RenderOptions::default()).unwrap_err();
        assert!(error.to_string().contains("/v1/completions"), "{error}");
    }
}
