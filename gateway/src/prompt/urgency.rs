//! What a request itself says of how urgent it is: a priority among those that wait for a worker, and the
//! time to first token that it wants. A client may make a request less urgent than its tenant's, never more.

use std::{str::FromStr, time::Duration};

use http::{HeaderMap, HeaderName};
use keyway_core::waiting_room::Share;

use crate::{
    error::Error,
    headers::{PRIORITY, TTFT_OBJECTIVE},
};

/// llm-d's router calls the same objective so, in milliseconds too.
const LLM_D_TTFT_OBJECTIVE: HeaderName = HeaderName::from_static("x-llm-d-slo-ttft-ms");
/// Priorities that a request may say. Beyond them nothing is gained.
const PRIORITIES: std::ops::RangeInclusive<i32> = -1_000..=1_000;
/// The longest objective, in milliseconds: a day.
const OBJECTIVE_MS_MAX: f64 = 86_400_000.0;

/// How urgent a request is, as far as it says so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Urgency {
    priority: Option<i32>,
    /// The time to first token that it wants.
    pub ttft_objective: Option<Duration>,
}

impl Urgency {
    /// What the request's head says of it.
    ///
    /// # Errors
    /// [`Error::BadQuery`], which names the header and says what it may hold.
    pub fn of(headers: &HeaderMap) -> Result<Self, Error> {
        // Most requests say nothing of it: to look at their names once takes less than to look three up.
        let may_be = |name: &HeaderName| {
            let name = name.as_str();
            name.starts_with("x-") && (name.ends_with("-priority") || name.ends_with("-ttft-ms"))
        };
        if !headers.keys().any(may_be) {
            return Ok(Self::default());
        }
        let priority = value(headers, &PRIORITY, "a whole number from -1000 to 1000", |priority: &i32| {
            PRIORITIES.contains(priority)
        })?;
        let allowed = "milliseconds above 0, of a day at most, such as 800";
        let is_objective = |ms: &f64| *ms > 0.0 && *ms <= OBJECTIVE_MS_MAX;
        let mut objective_ms = value(headers, &TTFT_OBJECTIVE, allowed, is_objective)?;
        if objective_ms.is_none() {
            objective_ms = value(headers, &LLM_D_TTFT_OBJECTIVE, allowed, is_objective)?;
        }
        Ok(Self { priority, ttft_objective: objective_ms.map(|ms| Duration::from_secs_f64(ms / 1e3)) })
    }

    /// The place that such a request has, where its tenant's have this one.
    pub fn of_tenant_s(self, tenant_s: Share) -> Share {
        let priority = self.priority.map_or(tenant_s.priority, |own| own.min(tenant_s.priority));
        Share { priority, objective: self.ttft_objective.or(tenant_s.objective), ..tenant_s }
    }
}

/// A header's value, if it is there: once, and allowed.
fn value<T: FromStr>(
    headers: &HeaderMap,
    name: &HeaderName,
    allowed: &str,
    is_allowed: impl Fn(&T) -> bool,
) -> Result<Option<T>, Error> {
    let mut values = headers.get_all(name).iter();
    let Some(first) = values.next() else { return Ok(None) };
    let read = first.to_str().ok().and_then(|text| text.trim().parse().ok()).filter(is_allowed);
    match (read, values.next()) {
        (Some(read), None) => Ok(Some(read)),
        _ => Err(Error::BadQuery {
            message: format!("the header {name} must be there once and be {allowed}"),
            param: Some(name.to_string()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn urgency(said: &[(&'static str, &'static str)]) -> Result<Urgency, Error> {
        let mut headers = HeaderMap::new();
        for (name, value) in said {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        Urgency::of(&headers)
    }

    #[test]
    fn a_request_may_be_less_urgent_than_its_tenant_s_and_not_more() {
        let tenant_s = Share { owner: 3, priority: 2, ..Share::default() };
        let of = |said: &'static str| {
            urgency(&[("x-keyway-priority", said)]).unwrap().of_tenant_s(tenant_s).priority
        };
        assert_eq!(["-7", "0", "2", "3", "1000", "+1", " 1 "].map(of), [-7, 0, 2, 2, 2, 1, 1]);
        assert_eq!(Urgency::default().of_tenant_s(tenant_s), tenant_s);
        let nobody_s = urgency(&[("x-keyway-priority", "9")]).unwrap().of_tenant_s(Share::default());
        assert_eq!(nobody_s, Share::default(), "without tenants nobody goes before the others");
    }

    #[test]
    fn an_objective_is_in_milliseconds_by_either_name() {
        for (said, ms) in [("800", 800.0), ("0.5", 0.5), ("86400000", 86_400_000.0)] {
            for name in ["x-keyway-slo-ttft-ms", "x-llm-d-slo-ttft-ms"] {
                let share = urgency(&[(name, said)]).unwrap().of_tenant_s(Share::default());
                assert_eq!(share.objective, Some(Duration::from_secs_f64(ms / 1e3)), "{name}: {said}");
            }
        }
        let both = [("x-llm-d-slo-ttft-ms", "5"), ("x-keyway-slo-ttft-ms", "7")];
        assert_eq!(urgency(&both).unwrap().ttft_objective, Some(Duration::from_millis(7)));
    }

    #[test]
    fn what_is_neither_is_refused_and_named() {
        for (name, values) in [
            ("x-keyway-priority", ["high", "", "1.5", "1001", "99999999999999999999", "1, 2"].as_slice()),
            ("x-keyway-slo-ttft-ms", &["soon", "", "0", "-1", "inf", "NaN", "1e9"]),
            ("x-llm-d-slo-ttft-ms", &["0"]),
        ] {
            for value in values {
                let error = urgency(&[(name, value)]).unwrap_err();
                assert!(
                    error.to_string().contains(name) && error.code() == "invalid_value",
                    "{value}: {error}"
                );
            }
            assert!(urgency(&[(name, "1"), (name, "1")]).is_err(), "twice");
        }
    }
}
