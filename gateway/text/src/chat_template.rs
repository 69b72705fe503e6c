//! A conversation to the text of a prompt, by the model's own Jinja template, rendered as Hugging Face's
//! `apply_chat_template` does it. Knows nothing of tokens besides the texts of BOS and EOS.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error, ErrorKind};

use crate::strftime::strftime;
use crate::{TextError, tojson};

/// ChatML, the built-in model's format.
const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const NAME: &str = "chat_template";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
}

/// Texts of the special tokens that templates name; empty where the model has none.
#[derive(Debug, Clone, Default)]
pub(crate) struct SpecialTokens {
    pub(crate) bos: String,
    pub(crate) eos: String,
}

/// How a conversation is rendered.
#[derive(Debug, Clone)]
pub struct RenderOptions {
    /// Whether the text ends with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables for the template, such as `enable_thinking`.
    pub variables: serde_json::Map<String, serde_json::Value>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, variables: serde_json::Map::new() }
    }
}

/// What `raise_exception` carries, so that a refusal is told from a broken template.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// The built-in model's ChatML.
    pub(crate) fn builtin() -> Self {
        // A constant that the tests render.
        Self::new(CHATML, SpecialTokens::default()).unwrap_or_else(|_| Self::none())
    }

    /// Stands for a model without a template: every use says so.
    pub(crate) fn none() -> Self {
        Self { environment: Environment::empty(), special: SpecialTokens::default() }
    }

    /// Compiles `source`. The error is the parser's, with its line.
    pub(crate) fn new(source: &str, special: SpecialTokens) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson::tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
        });
        environment.add_function("strftime_now", |format: String| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            strftime(&format, now.as_secs())
        });
        // `{% generation %}` marks the assistant's tokens for training; here it only encloses them.
        let source = replace_tag(&replace_tag(source, "generation", "if true"), "endgeneration", "endif");
        environment.add_template_owned(NAME, source)?;
        Ok(Self { environment, special })
    }

    /// The prompt's text. `messages` is an array of objects with `role` and `content`.
    pub fn render(&self, messages: &serde_json::Value, options: &RenderOptions) -> Result<String, TextError> {
        let template = self.environment.get_template(NAME).map_err(|_| TextError::NoChatTemplate)?;
        let context = minijinja::context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => options.add_generation_prompt,
            bos_token => &self.special.bos,
            eos_token => &self.special.eos,
            ..Value::from(Serde(&options.variables))
        };
        template.render(context).map_err(|e| match raised(&e) {
            Some(message) => TextError::Rejected(message),
            None => TextError::Render(e.to_string()),
        })
    }
}

/// Replaces the tag `{% from %}` in all its whitespace-control forms.
fn replace_tag(source: &str, from: &str, to: &str) -> String {
    let mut out = source.to_owned();
    for open in ["{%", "{%-", "{%+"] {
        for close in ["%}", "-%}", "+%}"] {
            out = out.replace(&format!("{open} {from} {close}"), &format!("{open} {to} {close}"));
        }
    }
    out
}

fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(e) = source {
        if let Some(Raised(message)) = e.downcast_ref() {
            return Some(message.clone());
        }
        source = e.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, messages: &serde_json::Value) -> Result<String, TextError> {
        let special = SpecialTokens { bos: "<s>".into(), eos: "</s>".into() };
        ChatTemplate::new(source, special).unwrap().render(messages, &RenderOptions::default())
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
        let error = ChatTemplate::new("a\n{% if %}", SpecialTokens::default()).unwrap_err();
        assert_eq!(error.line(), Some(2));
        assert!(matches!(render("{{ messages.a.b }}", &json!([])), Err(TextError::Render(_))));
    }

    #[test]
    fn variables_reach_the_template_and_generation_tags_enclose() {
        let template = ChatTemplate::new(
            "{%- generation -%} {{ enable_thinking }}{{ undefined_one }} {%- endgeneration -%} ",
            SpecialTokens::default(),
        );
        let variables = json!({"enable_thinking": false}).as_object().unwrap().clone();
        let options = RenderOptions { variables, ..RenderOptions::default() };
        assert_eq!(template.unwrap().render(&json!([]), &options).unwrap(), "False");
    }

    #[test]
    fn values_print_as_json_and_not_as_html() {
        assert_eq!(
            render("{{ messages[0] | tojson }}", &json!([{"role": "<user>", "n": 1}])).unwrap(),
            r#"{"n": 1, "role": "<user>"}"#
        );
    }

    #[test]
    fn a_model_without_a_template_says_so() {
        let error = ChatTemplate::none().render(&json!([]), &RenderOptions::default()).unwrap_err();
        assert!(error.to_string().contains("/v1/completions"), "{error}");
    }
}
