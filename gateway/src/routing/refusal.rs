//! What a worker may be accused of, as the head of its answer says it, and when it wants to be asked again.

use std::time::{Duration, UNIX_EPOCH};

use http::{
    HeaderMap, StatusCode,
    header::{DATE, RETRY_AFTER},
};

use crate::clock;

/// "Overloaded", as Anthropic's API and engines that follow it say it.
const OVERLOADED: u16 = 529;

/// What a worker did instead of serving a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Charge {
    /// "Not now" (429, 503, 529): it has not begun. True whatever others say.
    Busy {
        /// When to ask again, where it says so.
        retry_after: Option<Duration>,
    },
    /// The connection broke before an answer's head. True whatever others say.
    Lost,
    /// It failed (500, 502, 504): its own fault, unless the request does that to others too.
    Failed,
    /// It will not (401, 404, 400): the request's fault, unless others serve it.
    Rejected(StatusCode),
    /// The first event of its stream is an error: as [`Charge::Rejected`].
    ErrorEvent,
}

impl Charge {
    /// What the head of an answer says; `None` where it is none of these.
    pub fn of(status: StatusCode, headers: &HeaderMap) -> Option<Self> {
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                Some(Self::Busy { retry_after: retry_after(headers) })
            }
            _ if status.as_u16() == OVERLOADED => Some(Self::Busy { retry_after: retry_after(headers) }),
            StatusCode::NOT_IMPLEMENTED | StatusCode::HTTP_VERSION_NOT_SUPPORTED => {
                Some(Self::Rejected(status))
            }
            _ if status.is_server_error() => Some(Self::Failed),
            _ if status.is_client_error() => Some(Self::Rejected(status)),
            _ => None,
        }
    }

    /// For logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Busy { .. } => "busy",
            Self::Lost => "lost",
            Self::Failed => "failed",
            Self::Rejected(_) => "rejected",
            Self::ErrorEvent => "error_event",
        }
    }

    /// Whether it stands without another worker's word.
    pub(crate) fn is_plain(self) -> bool {
        matches!(self, Self::Busy { .. } | Self::Lost)
    }

    /// What an operator looks at first.
    pub(crate) fn check(self) -> &'static str {
        match self {
            Self::Rejected(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => "its key (api_key_file)",
            Self::Rejected(StatusCode::NOT_FOUND) => {
                "the models that it serves, the path of its URL, its engine's version"
            }
            Self::Rejected(StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED) => {
                "its URL, its engine's version"
            }
            Self::Rejected(_) => "its model, its longest context, its engine's version and flags",
            Self::ErrorEvent => "its engine's log, its model and flags",
            Self::Busy { .. } | Self::Lost | Self::Failed => "its engine's log",
        }
    }
}

/// `Retry-After`, in either form; a date is held against the answer's own, where it has one.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let seconds = |text: &str| httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok();
    let sent = headers.get(DATE).and_then(|date| seconds(date.to_str().ok()?));
    let now = sent.unwrap_or_else(|| Duration::from_secs_f64(clock::unix_seconds()));
    Some(seconds(text)?.saturating_sub(now))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    const DAY: &str = "Wed, 25 Nov 2026 12:00:00 GMT";

    fn after(said: &str, date: Option<&'static str>) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_str(said).unwrap());
        if let Some(date) = date {
            headers.insert(DATE, HeaderValue::from_static(date));
        }
        retry_after(&headers)
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        for (said, seconds) in [
            ("0", Some(0)),
            (" 7 ", Some(7)),
            ("86400", Some(86_400)),
            ("Wed, 25 Nov 2026 12:00:09 GMT", Some(9)),
            ("Wednesday, 25-Nov-26 12:01:00 GMT", Some(60)),
            ("Wed Nov 25 12:00:03 2026", Some(3)),
            ("Wed, 25 Nov 2026 11:00:00 GMT", Some(0)),
            ("soon", None),
            ("-1", None),
            ("1.5", None),
            ("", None),
            ("99999999999999999999999999", None),
        ] {
            assert_eq!(after(said, Some(DAY)), seconds.map(Duration::from_secs), "{said:?}");
        }
        // Without a date of the answer's, by the gateway's clock.
        assert_eq!(after("Thu, 01 Jan 1970 00:00:10 GMT", None), Some(Duration::ZERO));
        assert!(after("Fri, 31 Dec 9999 23:59:59 GMT", None) > Some(Duration::from_secs(1 << 30)));
    }

    #[test]
    fn statuses_mean_what_they_say() {
        let of = |status: u16| {
            Charge::of(StatusCode::from_u16(status).unwrap(), &HeaderMap::new()).map(Charge::as_str)
        };
        for (statuses, charge) in [
            (&[200, 201, 204, 206, 301, 307, 304][..], None),
            (&[429, 503, 529][..], Some("busy")),
            (&[500, 502, 504, 507, 520][..], Some("failed")),
            (&[400, 401, 403, 404, 405, 408, 413, 415, 422, 499, 501, 505][..], Some("rejected")),
        ] {
            for status in statuses {
                assert_eq!(of(*status), charge, "{status}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_retry_after_is_read_or_left(said in "[ -~]{0,40}", date in "[ -~]{0,40}") {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, HeaderValue::from_str(&said).unwrap());
            headers.insert(DATE, HeaderValue::from_str(&date).unwrap());
            let read = retry_after(&headers);
            prop_assert_eq!(read.is_some(), said.trim().parse::<u64>().is_ok() || httpdate::parse_http_date(said.trim()).is_ok());
        }
    }
}
