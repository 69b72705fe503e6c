//! `[usage]`: where it is kept who has used how much, and for how long.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigError, PriceTable, Prices};
use crate::limits;

/// `[usage]`: where it is kept who has used how much.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UsageFile {
    /// File in which tokens and requests are kept by key, tenant, model and hour; without it none are kept.
    /// Each gateway has one of its own.
    pub file: Option<PathBuf>,
    /// Days for which they are kept (400): by the hour for 35 days, then by the day.
    pub keep_days: Option<u32>,
    /// Rows of one hour (10000): what comes beyond them is added into one that is called `other`.
    pub max_series: Option<usize>,
    /// Name of this gateway in what `/usage` answers (HOSTNAME, else `keyway`).
    pub instance: Option<String>,
    /// What prices are in: one word, such as `EUR`; needed where there are prices.
    pub currency: Option<String>,
    /// What tokens cost, by model.
    pub price: Vec<PriceTable>,
}

/// `[usage]`, validated; made only where a file is named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageConfig {
    /// The file; no other process may have it.
    pub file: PathBuf,
    /// Days for which rows are kept.
    pub keep_days: u32,
    /// Rows of one hour, without the one for the rest.
    pub max_series: usize,
    /// Name of this gateway in answers.
    pub instance: String,
    /// What tokens cost; `None`: nobody has said it.
    pub prices: Option<Prices>,
}

impl UsageFile {
    /// What follows from it; `None`: nothing is kept.
    pub fn validated(&self) -> Result<Option<UsageConfig>, ConfigError> {
        let wrong = |why: &str| ConfigError(format!("usage.{why}"));
        let Some(file) = self.file.clone() else {
            let kept = if self.price.is_empty() {
                Ok(None)
            } else {
                Err("file must be named where there are prices")
            };
            return kept.map_err(wrong);
        };
        let keep_days = self.keep_days.unwrap_or(limits::USAGE_KEEP_DAYS);
        if keep_days == 0 {
            return Err(wrong("keep_days must be above 0"));
        }
        let max_series = self.max_series.unwrap_or(limits::USAGE_SERIES);
        if !(1..=limits::USAGE_SERIES_MAX).contains(&max_series) {
            return Err(wrong(&format!("max_series must be from 1 to {}", limits::USAGE_SERIES_MAX)));
        }
        let own = || std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
        let instance = self.instance.clone().or_else(own).unwrap_or_else(|| "keyway".to_owned());
        let prices = Prices::of(&self.price, self.currency.as_deref())?;
        Ok(Some(UsageConfig { file, keep_days, max_series, instance, prices }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_kept_and_named() {
        let of = |keep_days, max_series| UsageFile {
            file: Some("u".into()),
            keep_days,
            max_series,
            instance: Some("a".to_owned()),
            ..UsageFile::default()
        };
        let good = of(None, None).validated().unwrap().unwrap();
        assert_eq!((good.keep_days, good.max_series, &*good.instance), (400, 10_000, "a"));
        for (wrong, word) in [(of(Some(0), None), "keep_days"), (of(None, Some(0)), "max_series")] {
            assert!(wrong.validated().unwrap_err().to_string().contains(word));
        }
        assert_eq!(UsageFile::default().validated().unwrap(), None);
        let price = "[[price]]\nmodel = \"*\"\nprompt_per_million = 1\ngenerated_per_million = 2";
        let no_file: UsageFile = toml::from_str(price).unwrap();
        assert!(no_file.validated().unwrap_err().to_string().contains("usage.file"));
    }
}
