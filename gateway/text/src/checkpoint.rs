//! A checkpoint directory's text side: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`. Not
//! its weights, and of `config.json` only the model's type.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::tokenizer::AddedToken;
use crate::{ChatTemplate, HarmonyTokens, TextError, Tokenizer};

/// The special tokens that have a name in `tokenizer_config.json`.
const SPECIAL: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Everything text about one model.
#[derive(Debug, Clone)]
pub struct TextModel {
    /// Turns text into ids and back: by its `tokenizer.json`, or byte by byte for a model without files.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template; for a model without one, rendering says so.
    pub template: Arc<ChatTemplate>,
    /// The id of the tokenizer's EOS token, where it names one.
    pub eos_token_id: Option<u32>,
    /// The tokens of the format that the model answers in, if that is gpt-oss's.
    pub harmony: Option<HarmonyTokens>,
}

impl TextModel {
    /// What this crate brings itself, for a model without files: bytes and ChatML.
    pub fn builtin() -> Self {
        let tokenizer = Tokenizer::builtin();
        Self {
            eos_token_id: tokenizer.token_id("<|im_end|>"),
            harmony: None,
            tokenizer: Arc::new(tokenizer),
            template: Arc::new(ChatTemplate::builtin()),
        }
    }

    /// The texts of a `tokenizer.json` and a `tokenizer_config.json` that say everything between them: the
    /// end token, and one chat template.
    pub fn from_json(tokenizer: &str, config: &str) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), tokenizer.as_bytes())?;
        let path = PathBuf::from("tokenizer_config.json");
        let config: Value = serde_json::from_str(config)
            .map_err(|e| TextError::Malformed { path: path.clone(), reason: e.to_string() })?;
        let eos_token_id = token_text(&config["eos_token"]).and_then(|eos| tokenizer.token_id(eos));
        let template = compiled(path, config["chat_template"].as_str(), None, Map::new())?;
        Ok(Self { tokenizer: Arc::new(tokenizer), template: Arc::new(template), eos_token_id, harmony: None })
    }

    /// Reads a Hugging Face checkpoint directory. `tokenizer.json` is required, the rest is optional.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let mut tokenizer = Tokenizer::from_file(&dir.join("tokenizer.json"))?;
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?;
        let special = special_tokens(dir, &config)?;
        tokenizer.add_tokens(&added_tokens(&config, &special))?;
        let eos_token_id =
            special.get("eos_token").and_then(Value::as_str).and_then(|eos| tokenizer.token_id(eos));
        let template = templates(dir, config_path, &config, special)?;
        let model = read_json(&dir.join("config.json"))?;
        let harmony = HarmonyTokens::of(&tokenizer).filter(|_| model["model_type"] == "gpt_oss");
        Ok(Self { tokenizer: Arc::new(tokenizer), template: Arc::new(template), eos_token_id, harmony })
    }
}

fn read_optional(path: &Path) -> Result<Option<String>, TextError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path: path.to_owned(), source }),
    }
}

fn read_json(path: &Path) -> Result<Value, TextError> {
    let Some(text) = read_optional(path)? else { return Ok(Value::Null) };
    serde_json::from_str(&text)
        .map_err(|e| TextError::Malformed { path: path.to_owned(), reason: e.to_string() })
}

/// The named special tokens' texts, which templates use. Those in `special_tokens_map.json` count where the
/// configuration does not describe its added tokens itself, which is how older checkpoints were written.
fn special_tokens(dir: &Path, config: &Value) -> Result<Map<String, Value>, TextError> {
    let legacy = match config["added_tokens_decoder"] {
        Value::Null => read_json(&dir.join("special_tokens_map.json"))?,
        _ => Value::Null,
    };
    let token = |name: &str| token_text(&legacy[name]).or_else(|| token_text(&config[name]));
    let named = SPECIAL.iter().filter_map(|name| Some(((*name).to_owned(), token(name)?.into())));
    // Any other `…_token` is a name of this model's own.
    let fields = config.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    let extra = config["extra_special_tokens"].as_object().into_iter().flatten();
    let own =
        fields.chain(extra).filter(|(name, token)| token.is_string() && !SPECIAL.contains(&name.as_str()));
    Ok(named.chain(own.map(|(name, token)| (name.clone(), token.clone()))).collect())
}

/// Tokens that the configuration adds to those of `tokenizer.json`, in the order of their ids; special tokens
/// last.
fn added_tokens(config: &Value, special: &Map<String, Value>) -> Vec<AddedToken> {
    let flag = |token: &Value, name: &str| token[name] == true;
    let described = config["added_tokens_decoder"].as_object().into_iter().flatten();
    let mut described: Vec<(u32, AddedToken)> = described
        .filter_map(|(id, token)| {
            let added = AddedToken {
                content: token["content"].as_str()?.to_owned(),
                single_word: flag(token, "single_word"),
                lstrip: flag(token, "lstrip"),
                rstrip: flag(token, "rstrip"),
                normalized: token["normalized"].as_bool().unwrap_or(!flag(token, "special")),
                special: flag(token, "special"),
                must_exist: false,
            };
            Some((id.parse().ok()?, added))
        })
        .collect();
    described.sort_by_key(|(id, _)| *id);
    let named = special.values().filter_map(Value::as_str).map(|text| AddedToken {
        content: text.to_owned(),
        single_word: false,
        lstrip: false,
        rstrip: false,
        normalized: false,
        special: true,
        must_exist: true,
    });
    described.into_iter().map(|(_, token)| token).chain(named).collect()
}

/// A special token is a string or an object with `content`.
fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// The templates for plain chats and for chats with tools. Files come before the configuration's
/// `chat_template`, which is a string or a list of named ones.
fn templates(
    dir: &Path,
    config_path: PathBuf,
    config: &Value,
    special: Map<String, Value>,
) -> Result<ChatTemplate, TextError> {
    let default_path = dir.join("chat_template.jinja");
    let tools_path = dir.join("additional_chat_templates").join("tool_use.jinja");
    let (default, tools) = (read_optional(&default_path)?, read_optional(&tools_path)?);
    if default.is_some() || tools.is_some() {
        let path = if default.is_some() { default_path } else { tools_path };
        return compiled(path, default.as_deref(), tools.as_deref(), special);
    }
    let template = &config["chat_template"];
    let named = |name: &str| {
        let template = template.as_array()?.iter().find(|t| t["name"] == name)?;
        template["template"].as_str()
    };
    compiled(config_path, template.as_str().or_else(|| named("default")), named("tool_use"), special)
}

fn compiled(
    path: PathBuf,
    default: Option<&str>,
    tool_use: Option<&str>,
    special: Map<String, Value>,
) -> Result<ChatTemplate, TextError> {
    ChatTemplate::new(default, tool_use, special)
        .map_err(|e| TextError::Malformed { path, reason: format!("chat template, {e}") })
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
