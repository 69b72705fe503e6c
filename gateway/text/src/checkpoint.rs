//! A checkpoint directory's text side: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`. Not its
//! weights or `config.json`.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::chat_template::SpecialTokens;
use crate::{ChatTemplate, TextError, Tokenizer};

/// Everything text about one model.
#[derive(Debug, Clone)]
pub struct TextModel {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template; for a model without one, rendering says so.
    pub template: Arc<ChatTemplate>,
    /// The id of the tokenizer's EOS token, where it names one.
    pub eos_token_id: Option<u32>,
}

impl TextModel {
    /// The built-in model's: bytes and ChatML.
    pub fn builtin() -> Self {
        let tokenizer = Tokenizer::builtin();
        Self {
            eos_token_id: tokenizer.token_id("<|im_end|>"),
            tokenizer: Arc::new(tokenizer),
            template: Arc::new(ChatTemplate::builtin()),
        }
    }

    /// Reads a Hugging Face checkpoint directory. `tokenizer.json` is required, the rest is optional.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_file(&dir.join("tokenizer.json"))?;
        let config_path = dir.join("tokenizer_config.json");
        let config: Value = match read_optional(&config_path)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|e| TextError::Malformed { path: config_path.clone(), reason: e.to_string() })?,
            None => Value::Null,
        };
        let special =
            SpecialTokens { bos: token_text(&config["bos_token"]), eos: token_text(&config["eos_token"]) };
        let eos_token_id = tokenizer.token_id(&special.eos);
        let jinja_path = dir.join("chat_template.jinja");
        let (path, source) = match read_optional(&jinja_path)? {
            Some(source) => (jinja_path, Some(source)),
            None => (config_path, default_template(&config["chat_template"]).map(str::to_owned)),
        };
        let template = match source {
            Some(source) => ChatTemplate::new(&source, special).map_err(|e| TextError::Malformed {
                path,
                reason: format!("chat template, line {}: {e}", e.line().unwrap_or(1)),
            })?,
            None => ChatTemplate::none(),
        };
        Ok(Self { tokenizer: Arc::new(tokenizer), template: Arc::new(template), eos_token_id })
    }
}

fn read_optional(path: &Path) -> Result<Option<String>, TextError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path: path.to_owned(), source }),
    }
}

/// A special token is a string or an object with `content`.
fn token_text(token: &Value) -> String {
    token.as_str().or_else(|| token["content"].as_str()).unwrap_or_default().to_owned()
}

/// `chat_template` is a string or a list of named ones, of which `default` is for plain chats.
fn default_template(template: &Value) -> Option<&str> {
    let named = || template.as_array()?.iter().find(|t| t["name"] == "default")?["template"].as_str();
    template.as_str().or_else(named)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::RenderOptions;

    /// A byte-level BPE with one merge and a special token, as a checkpoint ships it.
    fn tokenizer_json() -> Value {
        let vocab: serde_json::Map<String, Value> = ["h", "i", "Ġ", "hi", "Ã", "©"]
            .iter()
            .enumerate()
            .map(|(i, t)| ((*t).to_owned(), json!(i)))
            .collect();
        json!({
            "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": null, "normalizer": null,
            "added_tokens": [{"id": 6, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                      "vocab": vocab, "merges": [["h", "i"]]},
        })
    }

    fn checkpoint(files: &[(&str, String)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer_json().to_string()).unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn a_checkpoint_encodes_whole_and_decodes_piecewise() {
        let dir =
            checkpoint(&[("tokenizer_config.json", json!({"eos_token": {"content": "</s>"}}).to_string())]);
        let text = TextModel::from_dir(dir.path()).unwrap();
        assert_eq!(text.eos_token_id, Some(6));
        assert_eq!(text.tokenizer.vocab_size(), 7);
        // Longer than the file's truncation, which must not cut a prompt.
        let ids = text.tokenizer.encode("hi hié</s>", false).unwrap();
        assert_eq!(ids, [3, 2, 3, 4, 5, 6]);
        let mut decoder = crate::Decoder::new(text.tokenizer.clone(), &ids[..1]).unwrap();
        let pieces: Vec<String> = ids[1..].iter().map(|id| decoder.push(*id).unwrap()).collect();
        assert_eq!(pieces, [" ", "hi", "", "é", ""]);
    }

    #[test]
    fn the_jinja_file_wins_over_the_config_and_a_list_has_a_default() {
        let config = json!({"bos_token": "<s>", "chat_template": [
            {"name": "tool_use", "template": "T"}, {"name": "default", "template": "{{ bos_token }}D"}]});
        let config = ("tokenizer_config.json", config.to_string());
        let render = |dir: &Path| {
            TextModel::from_dir(dir).unwrap().template.render(&json!([]), &RenderOptions::default()).unwrap()
        };
        assert_eq!(render(checkpoint(std::slice::from_ref(&config)).path()), "<s>D");
        assert_eq!(render(checkpoint(&[config, ("chat_template.jinja", "J".into())]).path()), "J");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = TextModel::from_dir(dir.path()).unwrap_err().to_string();
        assert!(error.starts_with("cannot read") && error.contains("tokenizer.json"), "{error}");
        std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        let error = TextModel::from_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json is malformed"), "{error}");
        let dir = checkpoint(&[("chat_template.jinja", "\n{% if %}".into())]);
        let error = TextModel::from_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains("chat_template.jinja is malformed: chat template, line 2"), "{error}");
        let dir = checkpoint(&[("tokenizer_config.json", "{".into())]);
        let error = TextModel::from_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json is malformed"), "{error}");
    }
}
