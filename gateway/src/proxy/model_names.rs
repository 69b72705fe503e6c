//! From the name that a client sent to the model that its request is for: aliases, shares that go to other
//! models, and models that stand in for one. What is configured of it is in `config/models.rs`, a body with
//! another name in it in `proxy/named_body.rs`.

use std::collections::BTreeMap;

use http::{
    HeaderMap,
    uri::{PathAndQuery, Uri},
};
use keyway_wire::block_hash::{Chain, HashKey};

use crate::{
    config::{ModelRules, ModelRulesByName},
    json::Value,
    path::as_engines_read,
    prompt::{
        request::{Renamed, RenamedBy, RequestInfo},
        session,
    },
};

/// Where the API describes one model.
const MODELS: &str = "/v1/models/";

/// Bytes of what a prompt without messages begins with that stand for its conversation.
const BEGINNING_BYTES: usize = 2 << 10;

/// The rules of models, as requests look them up.
#[derive(Debug, Default)]
pub struct ModelNames {
    rules: ModelRulesByName,
    /// The model of each alias.
    real: BTreeMap<String, String>,
    /// Whether a request may go by another name than its own.
    renames: bool,
}

impl ModelNames {
    /// What a configuration says of models.
    pub fn new(rules: &ModelRulesByName) -> Self {
        let alias = |(model, rules): (&String, &ModelRules)| {
            let aliases = rules.aliases.clone();
            let model = model.clone();
            aliases.into_iter().map(move |alias| (alias, model.clone())).collect::<Vec<_>>()
        };
        let renames = |rules: &ModelRules| {
            !(rules.aliases.is_empty() && rules.fallbacks.is_empty() && rules.split.is_empty())
        };
        Self {
            real: rules.iter().flat_map(alias).collect(),
            renames: rules.values().any(renames),
            rules: rules.clone(),
        }
    }

    /// Whether every request goes to the model that it names: there is nothing to look up.
    pub fn is_empty(&self) -> bool {
        !self.renames
    }

    /// What is said of a model; `None`: nothing.
    pub fn rules(&self, model: &str) -> Option<&ModelRules> {
        self.rules.get(model)
    }

    /// Each alias, and its model.
    pub fn aliases(&self) -> impl Iterator<Item = (&str, &str)> {
        self.real.iter().map(|(alias, model)| (alias.as_str(), model.as_str()))
    }

    /// The model that a name stands for: an alias's, or the one of this name.
    pub fn real<'a>(&'a self, name: &'a str) -> &'a str {
        self.real.get(name).map_or(name, String::as_str)
    }

    /// The model that a request goes to in place of the one that it names; `None`: to that one. `place` is
    /// where its conversation lies among all of those that ask for a model, from 0 to 1.
    pub fn resolve(&self, asked: &str, mut place: impl FnMut(&str) -> f64) -> Option<(&str, RenamedBy)> {
        let real = self.real.get(asked).map(String::as_str);
        let mut found = real.map(|real| (real, RenamedBy::Alias));
        let mut model = real.unwrap_or(asked);
        // Splits lead in no circle.
        while let Some(rules) = self.rules.get(model).filter(|rules| !rules.split.is_empty()) {
            let mut left = place(model);
            let chosen = rules.split.iter().find(|(_, share)| {
                left -= share;
                left < 0.0
            });
            let Some((other, _)) = chosen else { break };
            model = other;
            found = Some((other, RenamedBy::Split));
        }
        found
    }

    /// Models that take a request where none of its model's workers can, in order. One that went to another
    /// model by a split may come back to the model that it names.
    pub fn fallbacks(&self, info: &RequestInfo) -> Vec<&str> {
        let Some(model) = info.model.as_deref().filter(|_| self.renames) else { return Vec::new() };
        let of = |model: &str| self.rules.get(model).into_iter().flat_map(|rules| &rules.fallbacks);
        let mut all: Vec<&str> = of(model).map(String::as_str).collect();
        let split = info.renamed.as_ref().filter(|renamed| renamed.by == RenamedBy::Split);
        if let Some((own, _)) = split.and_then(|renamed| {
            let own = self.real(&renamed.asked);
            self.rules.get_key_value(own)
        }) {
            all.push(own);
            all.extend(of(own).map(String::as_str));
        }
        let mut each = Vec::with_capacity(all.len());
        for name in all {
            if name != model && !each.contains(&name) {
                each.push(name);
            }
        }
        each
    }

    /// Puts a model's own name into a path that ends with an alias (`/v1/models/ALIAS`).
    pub fn in_path(&self, uri: &mut Uri) {
        let path = as_engines_read(uri.path());
        let real = path.strip_prefix(MODELS).and_then(|alias| self.real.get(alias));
        let Some(real) = real else { return };
        // A name that is no part of a path stays as it is, and is not known to the worker.
        if let Ok(path) = format!("{MODELS}{real}").parse::<PathAndQuery>() {
            let mut parts = std::mem::take(uri).into_parts();
            parts.path_and_query = Some(path);
            *uri = Uri::from_parts(parts).unwrap_or_default();
        }
    }
}

/// How a request came to a model that its client did not name.
pub fn renamed(asked: &str, by: RenamedBy) -> Box<Renamed> {
    Box::new(Renamed { asked: asked.to_owned(), by })
}

/// Where a request's conversation lies among those that ask for `model`, from 0 to 1: always at the same
/// place, so that its turns meet what they left in a cache. What belongs to none is somewhere.
pub fn place(model: &str, headers: &HeaderMap, (info, text): (&RequestInfo, &[u8]), key: HashKey) -> f64 {
    let mut chain = Chain::new(key, model.as_bytes());
    let session = session::of(headers, info, key).map(|session| session.name);
    let name = if let Some(name) = session.or(info.talk.opening) {
        chain.hash(&name.to_le_bytes())
    } else if let Some(beginning) = beginning(text) {
        chain.hash(info.salt.as_bytes());
        chain.hash(beginning.as_bytes())
    } else {
        fastrand::u64(..)
    };
    // The 53 bits that a float has.
    (name >> 11) as f64 / (1_u64 << 53) as f64
}

/// What a body's conversation begins with, as it is written: its first message by a user, else the beginning
/// of its prompt.
fn beginning(text: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(text).ok()?;
    let prompts = Value::document(text)?.map_while(Result::ok);
    let mut prompts = prompts.filter(|(name, _)| matches!(&**name, "messages" | "input" | "prompt"));
    let (_, prompt) = prompts.next()?;
    let by_user = |item: &Value<'_>| {
        let mut fields = item.fields().into_iter().flatten().map_while(Result::ok);
        fields.any(|(name, value)| name == "role" && value.raw() == "\"user\"")
    };
    let first = prompt.items().and_then(|items| items.map_while(Result::ok).find(by_user));
    let raw = first.map_or(prompt.raw(), Value::raw);
    if first.is_some() {
        return Some(raw);
    }
    let end = (0..=raw.len().min(BEGINNING_BYTES)).rev().find(|end| raw.is_char_boundary(*end));
    raw.get(..end.unwrap_or_default())
}

#[cfg(test)]
mod tests;
