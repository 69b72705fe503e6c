//! `[[usage.price]]`: what tokens cost, by model.

use std::collections::BTreeMap;

use keyway_core::{Money, Price};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use crate::limits::PRICES_MAX;

/// Stands for all models that have no price of their own.
const OTHERS: &str = "*";

/// `[[usage.price]]`: what a million tokens of a model cost.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PriceTable {
    /// The model as workers name it; `*`: every model that has no price of its own.
    pub model: String,
    /// Of a million prompt tokens that workers compute, in `usage.currency`; six decimal places at most.
    pub prompt_per_million: f64,
    /// Of a million prompt tokens that workers have cached (what other prompt tokens cost).
    pub cached_per_million: Option<f64>,
    /// Of a million generated tokens.
    pub generated_per_million: f64,
}

/// What tokens cost, by their model and kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prices {
    /// In which currency, in a word.
    pub currency: String,
    of_model: BTreeMap<String, Price>,
    of_others: Option<Price>,
}

impl Prices {
    /// What follows from the tables; `None`: there are none.
    pub(super) fn of(tables: &[PriceTable], currency: Option<&str>) -> Result<Option<Self>, ConfigError> {
        let wrong = |why: String| ConfigError(format!("usage.{why}"));
        if tables.is_empty() {
            return Ok(None);
        }
        let is_word =
            |word: &&str| (1..=16).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_alphanumeric());
        let currency = currency.filter(is_word).ok_or_else(|| {
            wrong("currency must be one word that says what prices are in, such as EUR".to_owned())
        })?;
        if tables.len() > PRICES_MAX {
            return Err(wrong(format!("price: there may be {PRICES_MAX} at most")));
        }
        let mut prices = Self { currency: currency.to_owned(), of_model: BTreeMap::new(), of_others: None };
        for table in tables {
            let PriceTable { model, prompt_per_million, generated_per_million, .. } = table;
            let cached = table.cached_per_million.unwrap_or(*prompt_per_million);
            let price = Price::per_million(*prompt_per_million, cached, *generated_per_million);
            let price = price.ok_or_else(|| {
                wrong(format!("price of {model:?}: each must be 0 or more, with six decimal places at most"))
            })?;
            let before = match model.as_str() {
                OTHERS => prices.of_others.replace(price),
                model => prices.of_model.insert(model.to_owned(), price),
            };
            if before.is_some() {
                return Err(wrong(format!("price: {model:?} has two")));
            }
        }
        Ok(Some(prices))
    }

    /// What a request costs that went to this model; `None`: the model has no price.
    pub fn cost(&self, model: &str, prompt: u64, cached: u64, generated: u64) -> Option<Money> {
        let price = self.of_model.get(model).or(self.of_others.as_ref())?;
        Some(price.cost(prompt, cached, generated))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prices(text: &str, currency: &str) -> Result<Option<Prices>, ConfigError> {
        let usage: super::super::UsageFile = toml::from_str(text).unwrap();
        Prices::of(&usage.price, Some(currency))
    }

    fn price(model: &str, prompt: &str) -> String {
        format!("[[price]]\nmodel = {model:?}\nprompt_per_million = {prompt}\ngenerated_per_million = 8\n")
    }

    #[test]
    fn a_model_has_its_own_price_or_the_others() {
        let own = price("a", "2.0") + "cached_per_million = 0.5\n" + &price("*", "1.0");
        let prices = prices(&own, "EUR").unwrap().unwrap();
        let cost = |model, cached| prices.cost(model, 10, cached, 1).unwrap().nanos();
        assert_eq!((cost("a", 0), cost("a", 4)), (10 * 2_000 + 8_000, 6 * 2_000 + 4 * 500 + 8_000));
        assert_eq!((cost("b", 0), cost("b", 4)), (18_000, 18_000), "cached ones cost the same by default");
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(prices("", "").unwrap(), None);
        for (text, currency, word) in [
            (price("a", "1.0") + &price("a", "2.0"), "EUR", "\"a\" has two"),
            (price("a", "-1.0"), "EUR", "0 or more"),
            (price("a", "0.0000001"), "EUR", "six decimal places"),
            (price("a", "1.0"), "", "currency"),
            (price("a", "1.0"), "US dollar", "currency"),
            ((0..=PRICES_MAX).map(|i| price(&i.to_string(), "1")).collect(), "EUR", "at most"),
        ] {
            let error = prices(&text, currency).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
