//! How a tenant's limits stand, in the headers of its answers: as OpenAI's clients read them, and as
//! Anthropic's do.
//!
//! Formats: OpenAI's API reference ("rate limits": headers), Anthropic's ("rate limits": response headers).

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use k8s_openapi::jiff::Timestamp;
use keyway_core::Standing;

use super::Tenant;
use crate::{clock, headers::BUDGET_LEFT};

/// Names of one limit: itself, what is left of it, when it is whole again.
type Names = [HeaderName; 3];

const OPENAI_REQUESTS: Names = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const OPENAI_TOKENS: Names = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];
const ANTHROPIC_REQUESTS: Names = [
    HeaderName::from_static("anthropic-ratelimit-requests-limit"),
    HeaderName::from_static("anthropic-ratelimit-requests-remaining"),
    HeaderName::from_static("anthropic-ratelimit-requests-reset"),
];
const ANTHROPIC_TOKENS: Names = [
    HeaderName::from_static("anthropic-ratelimit-tokens-limit"),
    HeaderName::from_static("anthropic-ratelimit-tokens-remaining"),
    HeaderName::from_static("anthropic-ratelimit-tokens-reset"),
];
/// What a worker may say of tokens besides: no tenant has such limits here.
const ANTHROPIC_PARTS: [Names; 2] = [
    [
        HeaderName::from_static("anthropic-ratelimit-input-tokens-limit"),
        HeaderName::from_static("anthropic-ratelimit-input-tokens-remaining"),
        HeaderName::from_static("anthropic-ratelimit-input-tokens-reset"),
    ],
    [
        HeaderName::from_static("anthropic-ratelimit-output-tokens-limit"),
        HeaderName::from_static("anthropic-ratelimit-output-tokens-remaining"),
        HeaderName::from_static("anthropic-ratelimit-output-tokens-reset"),
    ],
];

impl Tenant {
    /// Says in an answer to a request for `path` how the tenant's limits stand, in place of what a worker
    /// says of its own.
    pub fn tell(&self, path: &str, headers: &mut HeaderMap) {
        if let Some(left) = self.account().and_then(|account| account.left(clock::unix_seconds() as u64)) {
            headers.insert(BUDGET_LEFT, left);
        }
        let table = &self.table;
        if table.requests_per_minute.is_none() && table.tokens_per_minute.is_none() {
            return;
        }
        let (now, judge) = (self.clock.now(), self.judge());
        let (requests, tokens) = {
            let mut left = self.left.lock();
            let requests = left.requests.as_mut().map(|limit| limit.standing(judge, now));
            (requests, left.tokens.as_mut().map(|limit| limit.standing(judge, now)))
        };
        let anthropic = is_anthropic(path);
        for (standing, of_openai, of_anthropic) in
            [(requests, OPENAI_REQUESTS, ANTHROPIC_REQUESTS), (tokens, OPENAI_TOKENS, ANTHROPIC_TOKENS)]
        {
            let Some(standing) = standing else { continue };
            let (names, others) =
                if anthropic { (of_anthropic, of_openai) } else { (of_openai, of_anthropic) };
            remove(headers, &others);
            insert(headers, names, &standing, anthropic);
        }
        if tokens.is_some() {
            for names in &ANTHROPIC_PARTS {
                remove(headers, names);
            }
        }
    }
}

/// Whether a path is of Anthropic's API.
fn is_anthropic(path: &str) -> bool {
    path.strip_prefix("/v1/messages").is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn remove(headers: &mut HeaderMap, names: &Names) {
    for name in names {
        headers.remove(name);
    }
}

fn insert(headers: &mut HeaderMap, [limit, left, reset]: Names, standing: &Standing, anthropic: bool) {
    // A limit below one is one in more than a minute.
    headers.insert(limit, HeaderValue::from(standing.per_minute.round().max(1.0) as u64));
    headers.insert(left, HeaderValue::from(standing.left.floor() as u64));
    let when = if anthropic { date(standing.full_in) } else { duration(standing.full_in) };
    // Digits and letters are always a header's value.
    if let Ok(when) = HeaderValue::try_from(when) {
        headers.insert(reset, when);
    }
}

/// As OpenAI writes it: `120ms`, `1.5s`, `6m0s`, `1h0m0s`.
fn duration(time: Duration) -> String {
    let millis = time.as_nanos().div_ceil(1_000_000);
    let (seconds, below) = (millis / 1_000, millis % 1_000);
    if seconds == 0 && below > 0 {
        return format!("{below}ms");
    }
    let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
    let mut text = match (hours, minutes) {
        (0, 0) => String::new(),
        (0, minutes) => format!("{minutes}m"),
        (hours, minutes) => format!("{hours}h{minutes}m"),
    };
    text += &(seconds % 60).to_string();
    if below > 0 {
        text += format!(".{below:03}").trim_end_matches('0');
    }
    text + "s"
}

/// The moment after `time` in RFC 3339, in whole seconds.
fn date(time: Duration) -> String {
    let then = (clock::unix_seconds() + time.as_secs_f64()).ceil();
    Timestamp::from_second(then as i64).unwrap_or(Timestamp::MAX).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_openai_s_clients_read_it() {
        for (millis, text) in [
            (0, "0s"),
            (1, "1ms"),
            (120, "120ms"),
            (1_000, "1s"),
            (1_500, "1.5s"),
            (8_640, "8.64s"),
            (60_000, "1m0s"),
            (86_400, "1m26.4s"),
            (360_000, "6m0s"),
            (3_600_000, "1h0m0s"),
            (90_061_001, "25h1m1.001s"),
        ] {
            assert_eq!(duration(Duration::from_millis(millis)), text);
        }
        assert_eq!(duration(Duration::from_nanos(1)), "1ms", "never too early");
        assert!(duration(Duration::MAX).ends_with('s'));
    }

    #[test]
    fn a_moment_is_written_as_anthropic_s_clients_read_it() {
        let at = |after: u64| date(Duration::from_secs(after)).parse::<Timestamp>().unwrap().as_second();
        let now = clock::unix_seconds() as i64;
        assert!((now..now + 5).contains(&at(0)) && (now + 60..now + 65).contains(&at(60)));
        assert_eq!(date(Duration::ZERO).len(), "2026-11-26T07:08:05Z".len());
        assert!(date(Duration::MAX).ends_with('Z'));
    }

    #[test]
    fn a_path_of_anthropic_s_api_is_seen() {
        for path in ["/v1/messages", "/v1/messages/", "/v1/messages/count_tokens"] {
            assert!(is_anthropic(path), "{path}");
        }
        for path in ["/v1/messages2", "/v1/chat/completions", "/v1/message"] {
            assert!(!is_anthropic(path), "{path}");
        }
    }
}
