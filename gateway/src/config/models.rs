//! `[[model]]`: what is said of models by name: a tokenizer, further names, which models stand in for one,
//! and what share of its requests goes to others.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigError, first_duplicate};
use crate::limits::MAX_MODEL_BYTES;

/// How far a sum of shares may be above 1 and still be taken for it: decimal fractions are not exact.
const SHARE_SLACK: f64 = 1e-9;

/// `[[model]]`: a model's tokenizer, its further names, and which models take its requests beside it.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelTable {
    /// As workers name it.
    pub name: String,
    /// Folder with its `tokenizer.json`, `tokenizer_config.json` and chat template; `builtin` or `random` for
    /// the worker's own models. Without it its prompts are routed by their text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Further names by which clients may ask for it (none); workers get its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Models that take its requests where none of its workers can, the first that can (none).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<String>,
    /// Shares of its requests, by conversation, that go to other models: `{ "other" = 0.05 }` (none).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub split: BTreeMap<String, f64>,
    /// Which requests of `/v1/messages` and `/v1/responses` go to its workers as chats, and the chats'
    /// answers back: `true`, all; `"custom-tools"`, Responses with such tools; `false`, none (false).
    #[serde(default, skip_serializing_if = "Translate::is_never")]
    pub translate: Translate,
    /// Whether its worker keeps the conversations of `/v1/messages` that go on by `thread` (false): else such
    /// requests are refused, in the way by which clients send the whole conversation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub threads: bool,
}

/// Which requests of other APIs a model's workers get as chats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "TranslateFile", into = "TranslateFile")]
#[schemars(with = "TranslateFile")]
pub enum Translate {
    /// None: its engines have these APIs themselves.
    #[default]
    Never,
    /// Responses with custom tools, such as Codex's: engines that have this API refuse them.
    CustomTools,
    /// All: its engines speak chats alone.
    Always,
}

/// [`Translate`], as it is written.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "it is true, false or \"custom-tools\"")]
enum TranslateFile {
    /// `true` for all of them, `false` for none.
    All(bool),
    /// The kind of requests by its name.
    Some(TranslateSome),
}

/// A kind of requests that engines with other APIs of their own refuse.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum TranslateSome {
    /// `custom-tools`: Responses with such tools, as Codex sends them.
    CustomTools,
}

impl Translate {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks with a reference")]
    fn is_never(&self) -> bool {
        *self == Self::Never
    }
}

impl From<TranslateFile> for Translate {
    fn from(written: TranslateFile) -> Self {
        match written {
            TranslateFile::All(false) => Self::Never,
            TranslateFile::All(true) => Self::Always,
            TranslateFile::Some(TranslateSome::CustomTools) => Self::CustomTools,
        }
    }
}

impl From<Translate> for TranslateFile {
    fn from(translate: Translate) -> Self {
        match translate {
            Translate::Never => Self::All(false),
            Translate::Always => Self::All(true),
            Translate::CustomTools => Self::Some(TranslateSome::CustomTools),
        }
    }
}

/// What holds for requests that name a model; other models are named by their own names here.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelRules {
    /// Further names of the model.
    pub aliases: Vec<String>,
    /// Models that take its requests where none of its workers can, in order.
    pub fallbacks: Vec<String>,
    /// Models that take shares of its requests, with the shares, which are at most 1 together.
    pub split: Vec<(String, f64)>,
    /// Which requests of other APIs its workers get as chats.
    pub translate: Translate,
    /// Whether its worker keeps the conversations that a `thread` goes on from.
    pub threads: bool,
}

/// The rules of models, by their own names; without those of which nothing is said.
pub type ModelRulesByName = BTreeMap<String, ModelRules>;

/// The folders of tokenizers by model, and the rules of models.
pub(super) type Models = (Vec<(String, PathBuf)>, ModelRulesByName);

/// What the tables say, if no name in them could mean two models.
pub(super) fn validated(tables: Vec<ModelTable>) -> Result<Models, ConfigError> {
    if let Some(twice) = first_duplicate(tables.iter().map(|table| table.name.clone())) {
        return Err(ConfigError(format!("model {twice} has two tables [[model]]; make them one")));
    }
    let real = real_names(&tables)?;
    let (mut tokenizers, mut all) = (Vec::new(), ModelRulesByName::new());
    for table in tables {
        let rules = rules(&table, &real)?;
        if rules != ModelRules::default() {
            all.insert(table.name.clone(), rules);
        }
        tokenizers.extend(table.tokenizer.map(|dir| (table.name, dir)));
    }
    no_circles(&all)?;
    Ok((tokenizers, all))
}

/// The model of each alias.
fn real_names(tables: &[ModelTable]) -> Result<BTreeMap<String, String>, ConfigError> {
    let names: BTreeSet<&str> = tables.iter().map(|table| table.name.as_str()).collect();
    let mut real = BTreeMap::new();
    for table in tables {
        may_be_a_name(table, "name", &table.name)?;
        for alias in &table.aliases {
            may_be_a_name(table, "aliases", alias)?;
            if names.contains(alias.as_str()) {
                return Err(wrong(table, "aliases", &format!("{alias:?} is the name of a model already")));
            }
            if let Some(other) = real.insert(alias.clone(), table.name.clone()) {
                let why = format!("{alias:?} is an alias of model {other:?} already");
                return Err(wrong(table, "aliases", &why));
            }
        }
    }
    Ok(real)
}

fn rules(table: &ModelTable, real: &BTreeMap<String, String>) -> Result<ModelRules, ConfigError> {
    let other = |key: &str, name: &String| {
        may_be_a_name(table, key, name)?;
        let model = real.get(name).unwrap_or(name);
        if *model == table.name {
            Err(wrong(table, key, "it names the model itself"))
        } else {
            Ok(model.clone())
        }
    };
    let fallbacks = table.fallbacks.iter().map(|name| other("fallbacks", name));
    let fallbacks = fallbacks.collect::<Result<Vec<_>, _>>()?;
    let split = table.split.iter().map(|(name, share)| {
        let model = other("split", name)?;
        if *share > 0.0 && *share <= 1.0 {
            return Ok((model, *share));
        }
        Err(wrong(
            table,
            "split",
            &format!("the share of {name:?} is {share}; it must be above 0 and at most 1"),
        ))
    });
    let split = split.collect::<Result<Vec<_>, _>>()?;
    let sum: f64 = split.iter().map(|(_, share)| share).sum();
    if sum > 1.0 + SHARE_SLACK {
        return Err(wrong(table, "split", &format!("the shares are {sum} together; they must be at most 1")));
    }
    for (key, models) in
        [("fallbacks", fallbacks.clone()), ("split", split.iter().map(|(m, _)| m.clone()).collect())]
    {
        if let Some(twice) = first_duplicate(models.into_iter()) {
            return Err(wrong(table, key, &format!("it names {twice:?} twice")));
        }
    }
    let ModelTable { translate, threads, .. } = *table;
    if translate == Translate::Always && threads {
        return Err(wrong(table, "threads", "engines that speak chats alone keep no threads; leave it out"));
    }
    Ok(ModelRules { aliases: table.aliases.clone(), fallbacks, split, translate, threads })
}

/// Refuses what no request could name, and what could not stand in a header.
fn may_be_a_name(table: &ModelTable, key: &str, name: &str) -> Result<(), ConfigError> {
    let why = if name.is_empty() {
        "a name is empty".to_owned()
    } else if name.len() > MAX_MODEL_BYTES {
        format!("a name has {} bytes; it may have {MAX_MODEL_BYTES}", name.len())
    } else if name.chars().any(char::is_control) {
        format!("{name:?} holds a control character")
    } else {
        return Ok(());
    };
    Err(wrong(table, key, &why))
}

/// Refuses splits by which a request could come back to a model that it was sent on from.
fn no_circles(all: &ModelRulesByName) -> Result<(), ConfigError> {
    let next =
        |model: &str| all.get(model).into_iter().flat_map(|rules| &rules.split).map(|(model, _)| model);
    for start in all.keys() {
        let (mut seen, mut open): (BTreeSet<&String>, Vec<&String>) =
            (BTreeSet::new(), next(start).collect());
        while let Some(model) = open.pop() {
            if model == start {
                let why = "its requests would come back to it by the splits of others; leave one of them out";
                return Err(ConfigError(format!("model {start:?}: split: {why}")));
            }
            if seen.insert(model) {
                open.extend(next(model));
            }
        }
    }
    Ok(())
}

fn wrong(table: &ModelTable, key: &str, why: &str) -> ConfigError {
    ConfigError(format!("model {:?}: {key}: {why}", table.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::File;

    fn of(text: &str) -> Result<Models, ConfigError> {
        validated(File::parse(text)?.model)
    }

    #[test]
    fn which_requests_are_translated_is_a_word_or_a_truth_value() {
        for (written, meant) in [
            ("true", Translate::Always),
            ("false", Translate::Never),
            ("\"custom-tools\"", Translate::CustomTools),
        ] {
            let table = format!("[[model]]\nname = \"m\"\nthreads = false\ntranslate = {written}\n");
            let (_, rules) = of(&table).unwrap();
            assert_eq!(rules.get("m").map_or(Translate::Never, |rules| rules.translate), meant);
            let shown = toml::to_string(&File::parse(&table).unwrap().model[0]).unwrap();
            assert_eq!(
                shown.contains(&format!("translate = {written}")),
                meant != Translate::Never,
                "{shown}"
            );
        }
        // Threads are of another API than custom tools.
        assert!(of("[[model]]\nname = \"m\"\ntranslate = \"custom-tools\"\nthreads = true\n").is_ok());
        let error = File::parse("[[model]]\nname = \"m\"\ntranslate = \"tools\"\n").unwrap_err().to_string();
        assert!(error.contains("true, false or \"custom-tools\""), "{error}");
    }

    #[test]
    fn what_is_said_of_a_model_is_kept_by_its_name_and_aliases_stand_for_models() {
        let (tokenizers, rules) = of("\
            [[model]]\nname = \"big\"\naliases = [\"default\", \"gpt-4o\"]\nfallbacks = [\"tiny\", \"other\"]\n\
            split = { \"tiny\" = 0.25, other = 0.5 }\ntranslate = true\n\
            [[model]]\nname = \"small\"\ntokenizer = \"t\"\naliases = [\"tiny\"]\nthreads = true\n\
            [[model]]\nname = \"bare\"\n")
        .unwrap();
        assert_eq!(tokenizers, [("small".to_owned(), PathBuf::from("t"))]);
        let big = &rules["big"];
        assert_eq!(big.aliases, ["default", "gpt-4o"]);
        assert_eq!(big.fallbacks, ["small", "other"]);
        assert_eq!(big.split, [("other".to_owned(), 0.5), ("small".to_owned(), 0.25)]);
        assert_eq!((big.translate, rules["small"].translate), (Translate::Always, Translate::Never));
        assert!(rules["small"].threads && !big.threads);
        assert!(!rules.contains_key("bare"), "nothing is said of it");
    }

    #[test]
    fn a_name_that_could_mean_two_models_and_a_share_that_is_none_are_refused_by_table_and_key() {
        let long = "x".repeat(MAX_MODEL_BYTES + 1);
        for (fields, words) in [
            ("aliases = [\"b\"]", "aliases: \"b\" is the name of a model"),
            ("aliases = [\"a\"]", "aliases: \"a\" is the name of a model"),
            ("aliases = [\"of-b\"]", "aliases: \"of-b\" is an alias of model"),
            ("aliases = [\"c\", \"c\"]", "aliases: \"c\" is an alias of model"),
            ("aliases = [\"\"]", "aliases: a name is empty"),
            ("aliases = [\"c\\n\"]", "control character"),
            (&format!("aliases = [\"{long}\"]"), "aliases: a name has 513 bytes; it may have 512"),
            ("fallbacks = [\"a\"]", "fallbacks: it names the model itself"),
            ("aliases = [\"c\"]\nfallbacks = [\"c\"]", "fallbacks: it names the model itself"),
            ("fallbacks = [\"b\", \"of-b\"]", "fallbacks: it names \"b\" twice"),
            ("split = { a = 0.1 }", "split: it names the model itself"),
            ("split = { b = 0.0 }", "split: the share of \"b\" is 0"),
            ("split = { b = 1.5 }", "at most 1"),
            ("split = { b = nan }", "split: the share of \"b\" is NaN"),
            ("split = { b = -0.1 }", "above 0"),
            ("split = { b = 0.7, c = 0.4 }", "split: the shares are 1.1"),
            ("split = { b = 0.1, of-b = 0.1 }", "split: it names \"b\" twice"),
            ("translate = true\nthreads = true", "threads: engines that speak chats alone"),
        ] {
            let other = "[[model]]\nname = \"b\"\naliases = [\"of-b\"]";
            for text in [
                format!("[[model]]\nname = \"a\"\n{fields}\n{other}"),
                format!("{other}\n[[model]]\nname = \"a\"\n{fields}\n"),
            ] {
                let error = of(&text).unwrap_err().to_string();
                assert!(error.starts_with("model \"") && error.contains(words), "{text}: {error}");
            }
        }
    }

    #[test]
    fn splits_may_follow_each_other_and_never_lead_back() {
        let table =
            |name: &str, to: &str| format!("[[model]]\nname = \"{name}\"\nsplit = {{ {to} = 0.1 }}\n");
        of(&[table("a", "b"), table("b", "c"), table("d", "b")].concat()).unwrap();
        for circle in [
            [table("a", "b"), table("b", "a")].concat(),
            [table("a", "b"), table("b", "c"), table("c", "a")].concat(),
            [table("x", "a"), table("a", "b"), table("b", "of-a")].concat() + "[[model]]\nname = \"c\"\n",
        ] {
            let circle = circle.replace("name = \"a\"\n", "name = \"a\"\naliases = [\"of-a\"]\n");
            let error = of(&circle).unwrap_err().to_string();
            assert!(error.contains("split: its requests would come back to it"), "{circle}: {error}");
        }
        // Who stands in for whom may go both ways: one step is taken.
        of("[[model]]\nname = \"a\"\nfallbacks = [\"b\"]\n[[model]]\nname = \"b\"\nfallbacks = [\"a\"]")
            .unwrap();
    }

    #[test]
    fn shares_of_decimal_fractions_may_be_all_of_it() {
        let shares = (0..10).map(|i| format!("m{i} = 0.1")).collect::<Vec<_>>().join(", ");
        of(&format!("[[model]]\nname = \"a\"\nsplit = {{ {shares} }}")).unwrap();
    }
}
