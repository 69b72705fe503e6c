//! `[scale]`: what the operator wants of each model's fleet. What follows from it is
//! `keyway_core::autoscale`'s business.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use keyway_core::autoscale::ScaleRules;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigError, Role};
use crate::limits;

/// `[scale]`: the rules for all models, and in `[[scale.model]]` for one.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ScaleFile {
    /// Workers at least (1); 0 lets a model's fleet go to nothing.
    pub min: Option<u32>,
    /// Workers at most (64).
    pub max: Option<u32>,
    /// Seconds to the first token that nine of ten streams are to keep (2.0).
    pub ttft_slo_seconds: Option<f64>,
    /// Mean seconds between an answer's tokens that nine of ten requests are to keep; not watched if absent.
    pub itl_slo_seconds: Option<f64>,
    /// Share of the measured prefill rate that is planned for (0.95).
    pub utilisation: Option<f64>,
    /// Share of the KV cache that running requests may hold (0.8).
    pub kv_share: Option<f64>,
    /// Running requests that one worker bears; not a limit if absent.
    pub running_per_worker: Option<f64>,
    /// Prompt tokens that one worker computes in a second, until its answers tell (8000).
    pub prefill_tokens_per_second: Option<f64>,
    /// A quarter of the seconds over which arrivals and the objectives are looked at (30).
    pub window_seconds: Option<f64>,
    /// Seconds from asking for a worker until it takes requests (60).
    pub start_seconds: Option<f64>,
    /// Seconds for which one worker fewer must have been enough (300).
    pub scale_in_seconds: Option<f64>,
    /// Seconds that a request waits for the first worker of its model; 0 refuses it at once (0).
    pub wait_seconds: Option<f64>,
    /// Requests that may wait so; those beyond are refused (256).
    pub wait_max: Option<usize>,
    /// Address of KEDA's external scaler (gRPC without TLS); not served if absent.
    pub external_listen: Option<SocketAddr>,
    /// What is different for one model.
    pub model: Vec<ScaleModelTable>,
}

/// `[[scale.model]]`: what differs for one model, or for its workers of one role; all else is as in
/// `[scale]`, and for a role as in the model's table without one.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScaleModelTable {
    /// As workers list it first; requests for it may wait although no worker was ever seen.
    pub name: String,
    /// Of its workers for this part of requests alone: `prefill`, `decode` or `both`; each role has a sum of
    /// its own. Of all if absent.
    pub role: Option<Role>,
    /// Fewest workers of this model; as in `[scale]` if absent.
    pub min: Option<u32>,
    /// Most workers of this model; as in `[scale]` if absent.
    pub max: Option<u32>,
    /// Seconds to the first token that nine of ten streams are to keep.
    pub ttft_slo_seconds: Option<f64>,
    /// Running requests that one worker bears.
    pub running_per_worker: Option<f64>,
    /// Prompt tokens that one worker computes in a second, until its answers tell.
    pub prefill_tokens_per_second: Option<f64>,
}

/// The rules of one model, and the rate that holds until its answers tell.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelScale {
    /// Bounds, objectives and times of its autoscaling sum; the operator sets most of them.
    pub rules: ScaleRules,
    /// Prompt tokens that one worker computes in a second.
    pub prior_tokens_per_s: f64,
}

/// `[scale]`, validated: the rules of every model, and how requests wait for a first worker.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaleConfig {
    /// For models without rules of their own.
    pub default: ModelScale,
    /// By name, models that have a `[[scale.model]]` of their own.
    pub models: BTreeMap<String, ModelScale>,
    /// The same for workers of one role.
    pub roles: BTreeMap<(String, Role), ModelScale>,
    /// Uncached prompt tokens from which on a worker for decode has another one compute them.
    pub prefill_from_tokens: u64,
    /// How long a request waits for the first worker of its model; zero: not at all.
    pub wait: Duration,
    /// Requests that may wait so.
    pub wait_max: usize,
    /// Where KEDA's external scaler is served, by gRPC without TLS; `None`: nowhere.
    pub external_listen: Option<SocketAddr>,
}

impl TryFrom<&ScaleFile> for ScaleConfig {
    type Error = ConfigError;

    fn try_from(file: &ScaleFile) -> Result<Self, ConfigError> {
        let usual = ScaleRules::default();
        let seconds = |value: Option<f64>, usual: Duration, name: &str| match value {
            None => Ok(usual),
            Some(value) => Duration::try_from_secs_f64(value)
                .map_err(|_| ConfigError(format!("scale.{name} must be a number of seconds, 0 or more"))),
        };
        let rules = ScaleRules {
            min: file.min.unwrap_or(usual.min),
            max: file.max.unwrap_or(usual.max),
            ttft_slo_s: file.ttft_slo_seconds.unwrap_or(usual.ttft_slo_s),
            itl_slo_s: file.itl_slo_seconds,
            utilisation: file.utilisation.unwrap_or(usual.utilisation),
            kv_share: file.kv_share.unwrap_or(usual.kv_share),
            running_per_worker: file.running_per_worker,
            catch_up: usual.catch_up,
            start: seconds(file.start_seconds, usual.start, "start_seconds")?,
            scale_in_after: seconds(file.scale_in_seconds, usual.scale_in_after, "scale_in_seconds")?,
            window: seconds(file.window_seconds, usual.window, "window_seconds")?,
        };
        let prior = file.prefill_tokens_per_second.unwrap_or(limits::PRIOR_PREFILL_TOKENS_PER_S);
        let default = checked(ModelScale { rules, prior_tokens_per_s: prior }, "scale")?;
        let (mut models, mut roles) = (BTreeMap::new(), BTreeMap::new());
        let twice = |table: &ScaleModelTable| ConfigError(format!("scale.{} is listed twice", table.shown()));
        for table in file.model.iter().filter(|table| table.role.is_none()) {
            if models.insert(table.name.clone(), table.over(&default)?).is_some() {
                return Err(twice(table));
            }
        }
        // Whatever the order in which they stand.
        for (table, role) in file.model.iter().filter_map(|table| Some((table, table.role?))) {
            let own = table.over(models.get(&table.name).unwrap_or(&default))?;
            if roles.insert((table.name.clone(), role), own).is_some() {
                return Err(twice(table));
            }
        }
        let wait = seconds(file.wait_seconds, Duration::ZERO, "wait_seconds")?;
        let wait_max = file.wait_max.unwrap_or(limits::FIRST_WORKER_WAITERS);
        let external_listen = file.external_listen;
        let prefill_from_tokens = limits::PREFILL_FROM_TOKENS;
        Ok(Self { default, models, roles, prefill_from_tokens, wait, wait_max, external_listen })
    }
}

impl ScaleConfig {
    /// The rules of a model's workers, or of those of a role.
    pub fn of(&self, model: &str, role: Option<Role>) -> &ModelScale {
        let own = role.and_then(|role| self.roles.get(&(model.to_owned(), role)));
        own.or_else(|| self.models.get(model)).unwrap_or(&self.default)
    }

    /// All rules that there are.
    pub fn all(&self) -> impl Iterator<Item = &ModelScale> {
        self.models.values().chain(self.roles.values()).chain([&self.default])
    }
}

impl ScaleModelTable {
    /// These rules, and where the table says nothing, the others.
    fn over(&self, usual: &ModelScale) -> Result<ModelScale, ConfigError> {
        let mut own = usual.clone();
        own.rules.min = self.min.unwrap_or(own.rules.min);
        own.rules.max = self.max.unwrap_or(own.rules.max);
        own.rules.ttft_slo_s = self.ttft_slo_seconds.unwrap_or(own.rules.ttft_slo_s);
        own.rules.running_per_worker = self.running_per_worker.or(own.rules.running_per_worker);
        own.prior_tokens_per_s = self.prefill_tokens_per_second.unwrap_or(own.prior_tokens_per_s);
        checked(own, &format!("scale.{}", self.shown()))
    }

    fn shown(&self) -> String {
        match self.role {
            None => format!("model {:?}", self.name),
            Some(role) => format!("model {:?} for {}", self.name, role.as_str()),
        }
    }
}

fn checked(scale: ModelScale, place: &str) -> Result<ModelScale, ConfigError> {
    let rules = &scale.rules;
    let positive = |value: f64| value.is_finite() && value > 0.0;
    let fault = if rules.max == 0 || rules.min > rules.max {
        Some("min must be at most max, and max above 0")
    } else if !positive(rules.ttft_slo_s) {
        Some("ttft_slo_seconds must be above 0")
    } else if rules.itl_slo_s.is_some_and(|slo| !positive(slo)) {
        Some("itl_slo_seconds must be above 0")
    } else if !(0.1..=1.0).contains(&rules.utilisation) || !(0.1..=1.0).contains(&rules.kv_share) {
        Some("utilisation and kv_share must be between 0.1 and 1")
    } else if rules.running_per_worker.is_some_and(|running| !positive(running)) {
        Some("running_per_worker must be above 0")
    } else if !positive(scale.prior_tokens_per_s) {
        Some("prefill_tokens_per_second must be above 0")
    } else if rules.window.is_zero() {
        Some("window_seconds must be above 0")
    } else {
        None
    };
    match fault {
        Some(fault) => Err(ConfigError(format!("{place}: {fault}"))),
        None => Ok(scale),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(text: &str) -> Result<ScaleConfig, ConfigError> {
        ScaleConfig::try_from(&toml::from_str::<ScaleFile>(text).unwrap())
    }

    #[test]
    fn a_model_has_the_common_rules_where_it_names_none() {
        let scale =
            scale("min = 2\nttft_slo_seconds = 1.5\n[[model]]\nname = \"m\"\nmin = 0\nmax = 3").unwrap();
        assert_eq!((scale.default.rules.min, scale.default.rules.ttft_slo_s), (2, 1.5));
        let model = &scale.models["m"].rules;
        assert_eq!((model.min, model.max, model.ttft_slo_s), (0, 3, 1.5));
        assert!(scale.wait.is_zero());
    }

    #[test]
    fn a_role_has_its_model_s_rules_where_it_names_none() {
        let scale = scale(
            "max = 9\n[[model]]\nname = \"m\"\nrole = \"prefill\"\nmin = 2\n\
             [[model]]\nname = \"m\"\nmax = 5\n[[model]]\nname = \"n\"\nrole = \"decode\"\nmin = 3",
        )
        .unwrap();
        let bounds = |model, role| {
            let rules = &scale.of(model, role).rules;
            (rules.min, rules.max)
        };
        assert_eq!(bounds("m", Some(Role::Prefill)), (2, 5));
        assert_eq!((bounds("m", Some(Role::Decode)), bounds("m", None)), ((1, 5), (1, 5)));
        assert_eq!((bounds("n", Some(Role::Decode)), bounds("n", None)), ((3, 9), (1, 9)));
        assert_eq!(scale.all().count(), 4);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, word) in [
            ("min = 5\nmax = 4", "min"),
            ("max = 0\nmin = 0", "max"),
            ("ttft_slo_seconds = 0.0", "ttft_slo"),
            ("utilisation = 1.5", "utilisation"),
            ("running_per_worker = 0.0", "running_per_worker"),
            ("itl_slo_seconds = 0.0", "itl_slo"),
            ("start_seconds = -1.0", "start_seconds"),
            ("wait_seconds = -1.0", "wait_seconds"),
            ("window_seconds = 0.0", "window_seconds"),
            ("prefill_tokens_per_second = 0.0", "prefill_tokens"),
            ("[[model]]\nname = \"m\"\n[[model]]\nname = \"m\"", "twice"),
            ("[[model]]\nname = \"m\"\nmin = 100", "\"m\""),
            (
                "[[model]]\nname = \"m\"\nrole = \"decode\"\n[[model]]\nname = \"m\"\nrole = \"decode\"",
                "\"m\" for decode is listed twice",
            ),
        ] {
            let error = scale(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
