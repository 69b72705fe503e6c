//! The file of tenants: who may come in by which keys, and how much each may ask for. Keys are in it only as
//! hashes.

use std::{collections::HashMap, fmt::Write as _, fs, path::Path};

use keyway_core::Money;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::{
    config::{BudgetUnits, ConfigError},
    limits::{BUDGET_WARN_AT, MAX_TENANTS},
};

/// SHA-256 of a key. Keys are made of random bits, so a plain hash cannot be searched.
pub(super) type KeyHash = [u8; 32];

/// The hash of a key that a client showed.
pub fn key_hash(key: &[u8]) -> KeyHash {
    Sha256::digest(key).into()
}

/// Bytes in hex, as the file wants a hash.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// `[[tenant]]` in the file of tenants: one tenant, the hashes of its keys and its limits.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantTable {
    /// In logs and metrics.
    pub name: String,
    /// SHA-256 of each of its keys, in hex.
    pub key_sha256: Vec<String>,
    /// Its requests in flight at once.
    pub max_in_flight: Option<usize>,
    /// Its requests in a minute.
    pub requests_per_minute: Option<f64>,
    /// Its tokens in a minute, of prompts and answers.
    pub tokens_per_minute: Option<f64>,
    /// Where requests wait for a worker, those of a higher priority go first (0). A request may lower its own
    /// by the header `x-keyway-priority`.
    pub priority: Option<i32>,
    /// Its share of the tokens among those of its priority who want more than there is (1.0).
    pub weight: Option<f64>,
    /// What it may use in a day or month.
    pub budget: Option<BudgetTable>,
}

/// `[tenant.budget]`: what a tenant may use in a day or month, which begin at midnight in UTC.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BudgetTable {
    /// Tokens of prompts and answers in a day.
    pub tokens_per_day: Option<u64>,
    /// Tokens of prompts and answers in a month.
    pub tokens_per_month: Option<u64>,
    /// What they may cost in a day, in `usage.currency`; nine decimal places at most.
    pub cost_per_day: Option<f64>,
    /// What they may cost in a month, in the same currency.
    pub cost_per_month: Option<f64>,
    /// The share of each from which on the tenant is warned (0.8).
    pub warn_at: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantFile {
    tenant: Vec<TenantTable>,
}

/// The tenants, and whose each key is.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) tenants: Vec<TenantTable>,
    pub(super) of_key: HashMap<KeyHash, usize>,
}

/// `units`: what budgets can be kept in.
pub(super) fn read(path: &Path, units: BudgetUnits) -> Result<Parsed, ConfigError> {
    let wrong =
        |error: &dyn std::fmt::Display| ConfigError(format!("tenants_file {}: {error}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
    parse(&text, units).map_err(|error| wrong(&error))
}

fn parse(text: &str, units: BudgetUnits) -> Result<Parsed, ConfigError> {
    // The parser's own text quotes the line, which may hold what should be secret.
    let file: TenantFile =
        toml::from_str(text).map_err(|error| ConfigError(without_values(error.message())))?;
    let mut of_key = HashMap::new();
    for (i, tenant) in file.tenant.iter().enumerate() {
        let wrong = |why: &str| ConfigError(format!("tenant {:?}: {why}", tenant.name));
        if file.tenant[..i].iter().any(|other| other.name == tenant.name) {
            return Err(wrong("is there twice"));
        }
        let limits = [tenant.requests_per_minute, tenant.tokens_per_minute, tenant.weight];
        if limits.into_iter().flatten().any(|limit| !limit.is_finite() || limit <= 0.0)
            || tenant.max_in_flight == Some(0)
        {
            return Err(wrong("limits and weight must be above 0"));
        }
        tenant.budget.as_ref().map_or(Ok(()), |budget| budget.checked(units)).map_err(wrong)?;
        for hash in &tenant.key_sha256 {
            let bytes = hash_of_hex(hash);
            let bytes = bytes.ok_or_else(|| {
                wrong("key_sha256 must be 64 hex digits: `keyway new-key` prints a key and its hash")
            })?;
            if of_key.insert(bytes, i).is_some_and(|other| other != i) {
                return Err(wrong("has a key of another tenant"));
            }
        }
    }
    if file.tenant.len() > MAX_TENANTS {
        return Err(ConfigError(format!("more than {MAX_TENANTS} tenants")));
    }
    Ok(Parsed { tenants: file.tenant, of_key })
}

impl BudgetTable {
    /// From which share of each budget on the tenant is warned.
    pub(super) fn warn_at(&self) -> f64 {
        self.warn_at.unwrap_or(BUDGET_WARN_AT)
    }

    fn checked(&self, units: BudgetUnits) -> Result<(), &'static str> {
        let tokens = [self.tokens_per_day, self.tokens_per_month];
        let costs = [self.cost_per_day, self.cost_per_month];
        if tokens.into_iter().flatten().any(|tokens| tokens == 0) {
            return Err("budgets must be above 0");
        }
        let is_amount = |cost| Money::of_decimal(cost).is_some_and(|cost| cost.nanos() > 0);
        if !costs.into_iter().flatten().all(is_amount) {
            return Err("budgets of cost must be above 0, with nine decimal places at most");
        }
        if !(0.0..=1.0).contains(&self.warn_at()) {
            return Err("budget.warn_at must be from 0 to 1");
        }
        if !units.tokens {
            return Err("a budget needs to know what was used: name a file for that (usage.file)");
        }
        if !units.cost && costs.into_iter().flatten().next().is_some() {
            return Err("a budget of cost needs prices ([[usage.price]])");
        }
        Ok(())
    }
}

impl TenantTable {
    /// Whether what was used of one's limits is used of the other's.
    pub(super) fn same_limits(&self, other: &Self) -> bool {
        let limits = |table: &Self| (table.max_in_flight, table.requests_per_minute, table.tokens_per_minute);
        let share = |table: &Self| (table.priority, table.weight);
        limits(self) == limits(other) && share(self) == share(other)
    }
}

/// A number that follows from a tenant's name, so that a file that is read again gives the same.
pub(super) fn number_of(name: &str) -> u32 {
    let hash = key_hash(name.as_bytes());
    u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]])
}

fn hash_of_hex(text: &str) -> Option<KeyHash> {
    let mut hash = KeyHash::default();
    if text.len() != 2 * hash.len() {
        return None;
    }
    for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// A message without what it quotes: that may be a key in the wrong place.
fn without_values(message: &str) -> String {
    let parts = message.split('"').enumerate().map(|(i, part)| if i % 2 == 0 { part } else { "\"…\"" });
    parts.collect::<String>().replace('\n', "; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_named_and_no_key_is_repeated() {
        let hash = "ab".repeat(32);
        let tenant = |name: &str, more: &str| {
            format!("[[tenant]]\nname = {name:?}\nkey_sha256 = [{hash:?}]\n{more}\n")
        };
        let parse = |text: &str| parse(text, BudgetUnits::default());
        assert_eq!(parse(&tenant("a", "max_in_flight = 3")).unwrap().of_key.len(), 1);
        for (text, word) in [
            (tenant("a", "") + &tenant("b", ""), "another tenant"),
            (tenant("a", "") + &tenant("a", ""), "twice"),
            (tenant("a", "requests_per_minute = 0.0"), "above 0"),
            (tenant("a", "request_per_minute = 1.0"), "request_per_minute"),
            ("[[tenant]]\nname = \"a\"\nkey_sha256 = [\"canary-key\"]".into(), "new-key"),
            ("[[tenant]]\nname = \"a\"\nkey = \"canary-key\"".into(), "key"),
            ("[[tenant]]\nname = \"a\"\nkey_sha256 = \"canary-key\"".into(), "sequence"),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
            assert!(!error.contains("canary"), "{error}");
        }
    }

    #[test]
    fn a_budget_says_what_it_needs() {
        let tenant =
            |budget: &str| format!("[[tenant]]\nname = \"a\"\nkey_sha256 = []\n[tenant.budget]\n{budget}\n");
        let [none, tokens, cost] =
            [(false, false), (true, false), (true, true)].map(|(tokens, cost)| BudgetUnits { tokens, cost });
        let both = tenant("tokens_per_day = 1000\ncost_per_month = 12.5\nwarn_at = 0.5");
        let parsed = parse(&both, cost).unwrap();
        assert_eq!(parsed.tenants[0].budget.as_ref().unwrap().warn_at(), 0.5);
        for (text, units, word) in [
            (&*both, none, "usage.file"),
            (&both, tokens, "usage.price"),
            (&tenant("tokens_per_month = 0"), cost, "above 0"),
            (&tenant("cost_per_day = 0.0"), cost, "above 0"),
            (&tenant("cost_per_day = 0.0000000001"), cost, "nine decimal places"),
            (&tenant("cost_per_day = inf"), cost, "nine decimal places"),
            (&tenant("tokens_per_day = 1\nwarn_at = 1.5"), cost, "warn_at"),
            (&tenant("tokens_per_year = 1"), cost, "tokens_per_year"),
        ] {
            let error = parse(text, units).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
