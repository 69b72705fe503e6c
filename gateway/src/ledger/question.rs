//! What an operator asks of the rows: for which time, by which pieces of it, for whom, and told apart by
//! what.

use std::ops::Range;

use http::{HeaderMap, header::ACCEPT};
use k8s_openapi::jiff::{Timestamp, civil::Date, tz::Offset};

use crate::{error::Error, limits::USAGE_HOURLY_DAYS};

/// Seconds of a day.
const DAY_S: u64 = 86_400;

/// How the answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One object, with a list of rows.
    Json,
    /// A line of names, then a line for each row.
    Csv,
}

/// Pieces of time that rows are added up by, in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// From a whole hour on.
    Hour,
    /// From midnight to midnight.
    Day,
    /// From midnight of its first day on.
    Month,
}

/// What tells rows apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Group {
    pub(super) tenant: bool,
    pub(super) key: bool,
    pub(super) model: bool,
}

/// A question that can be answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageQuestion {
    pub(super) by: By,
    /// Seconds since 1970, whole hours: from here on.
    pub(super) from: u64,
    /// Up to here, in seconds since 1970.
    pub(super) to: u64,
    pub(super) group: Group,
    pub(super) tenant: Option<String>,
    pub(super) key: Option<String>,
    pub(super) model: Option<String>,
    pub(super) format: Format,
}

fn wrong(param: &str, allowed: &str) -> Error {
    Error::BadQuery { message: format!("{param} must be {allowed}"), param: Some(param.to_owned()) }
}

impl UsageQuestion {
    /// Reads the part of a path behind its question mark, and what the client accepts. `now`: seconds since
    /// 1970.
    ///
    /// # Errors
    /// [`Error::BadQuery`], which says what may be asked.
    pub fn read(query: &str, headers: &HeaderMap, now: u64) -> Result<Self, Error> {
        let accepts_csv = headers.get(ACCEPT).is_some_and(|kinds| kinds.as_bytes().starts_with(b"text/csv"));
        let mut asked = Self {
            by: By::Day,
            from: start_of_month(now),
            to: (now / 3_600 + 1) * 3_600,
            group: Group::default(),
            tenant: None,
            key: None,
            model: None,
            format: if accepts_csv { Format::Csv } else { Format::Json },
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "by" => asked.by = by(&value)?,
                "from" => asked.from = moment("from", &value)? / 3_600 * 3_600,
                "to" => asked.to = moment("to", &value)?.div_ceil(3_600) * 3_600,
                "group" => asked.group = group(&value)?,
                "tenant" => asked.tenant = Some(value.into_owned()),
                "key" => asked.key = Some(value.into_owned()),
                "model" => asked.model = Some(value.into_owned()),
                "format" => asked.format = format(&value)?,
                other => {
                    let all = "by, from, to, tenant, key, model, group and format";
                    let message = format!("there is no parameter {other:?}; there are {all}");
                    return Err(Error::BadQuery { message, param: Some(other.to_owned()) });
                }
            }
        }
        if asked.from >= asked.to {
            return Err(wrong("from", "before to"));
        }
        if asked.by == By::Hour && asked.from < hourly_from(now) {
            let days = format!("day or month for what is older than {USAGE_HOURLY_DAYS} days");
            return Err(wrong("by", &days));
        }
        Ok(asked)
    }

    /// Of the answer's text.
    pub fn content_type(&self) -> &'static str {
        match self.format {
            Format::Json => "application/json",
            Format::Csv => "text/csv; charset=utf-8",
        }
    }
}

/// Since when rows are kept by the hour at least.
fn hourly_from(now: u64) -> u64 {
    (now / DAY_S).saturating_sub(u64::from(USAGE_HOURLY_DAYS)) * DAY_S
}

fn by(value: &str) -> Result<By, Error> {
    match value {
        "hour" => Ok(By::Hour),
        "day" => Ok(By::Day),
        "month" => Ok(By::Month),
        _ => Err(wrong("by", "hour, day or month")),
    }
}

fn format(value: &str) -> Result<Format, Error> {
    match value {
        "json" => Ok(Format::Json),
        "csv" => Ok(Format::Csv),
        _ => Err(wrong("format", "json or csv")),
    }
}

fn group(value: &str) -> Result<Group, Error> {
    let mut group = Group::default();
    for name in value.split(',').filter(|name| !name.is_empty()) {
        match name {
            "tenant" => group.tenant = true,
            "key" => group.key = true,
            "model" => group.model = true,
            _ => return Err(wrong("group", "some of tenant, key and model, with commas between them")),
        }
    }
    Ok(group)
}

/// A time of RFC 3339, or a date's beginning in UTC.
fn moment(param: &str, value: &str) -> Result<u64, Error> {
    let date = || value.parse::<Date>().ok().and_then(|date| seconds(date.at(0, 0, 0, 0)));
    // What a `+` in a query means is a space.
    let time = || value.replace(' ', "+").parse::<Timestamp>().ok();
    let found = if value.contains(['T', 't']) { time().map(Timestamp::as_second) } else { date() };
    let allowed = "a date such as 2026-11-29, or a time such as 2026-11-29T13:00:00Z";
    found.and_then(|at| u64::try_from(at).ok()).ok_or_else(|| wrong(param, allowed))
}

fn seconds(at: k8s_openapi::jiff::civil::DateTime) -> Option<i64> {
    Offset::UTC.to_timestamp(at).ok().map(Timestamp::as_second)
}

fn date_of(at: u64) -> Option<Date> {
    Timestamp::from_second(i64::try_from(at).ok()?).ok().map(|at| Offset::UTC.to_datetime(at).date())
}

/// The first second of the month in UTC.
fn start_of_month(at: u64) -> u64 {
    let first = date_of(at).and_then(|date| seconds(date.first_of_month().at(0, 0, 0, 0)));
    first.and_then(|first| u64::try_from(first).ok()).unwrap_or(0)
}

impl By {
    /// Where the piece of time begins that this second is in.
    pub(super) fn start(self, at: u64) -> u64 {
        match self {
            Self::Hour => at / 3_600 * 3_600,
            Self::Day => at / DAY_S * DAY_S,
            Self::Month => start_of_month(at),
        }
    }

    /// The piece of time that this second is in: from its first second to the next one's.
    pub fn time(self, at: u64) -> Range<u64> {
        let start = self.start(at);
        let end = match self {
            Self::Hour => start + 3_600,
            Self::Day => start + DAY_S,
            // No month has more days.
            Self::Month => start_of_month(start + 31 * DAY_S),
        };
        start..end
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Month => "month",
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// 2026-11-29T09:30:00Z.
    const NOW: u64 = 1_795_944_600;

    fn read(query: &str) -> Result<UsageQuestion, Error> {
        UsageQuestion::read(query, &HeaderMap::new(), NOW)
    }

    #[test]
    fn what_is_asked_is_understood() {
        let plain = read("").unwrap();
        let text = |at: u64| Timestamp::from_second(at as i64).unwrap().to_string();
        assert_eq!(
            (text(plain.from), text(plain.to)),
            ("2026-11-01T00:00:00Z".into(), "2026-11-29T10:00:00Z".into())
        );
        assert_eq!((plain.by, plain.group, plain.format), (By::Day, Group::default(), Format::Json));
        let full = read("by=hour&from=2026-11-28&to=2026-11-28T12:30:00%2B02:00&group=tenant,model&tenant=a%20b&key=&model=m&format=csv").unwrap();
        assert_eq!(
            (text(full.from), text(full.to)),
            ("2026-11-28T00:00:00Z".into(), "2026-11-28T11:00:00Z".into())
        );
        assert_eq!(full.group, Group { tenant: true, key: false, model: true });
        assert_eq!(
            (full.tenant.as_deref(), full.key.as_deref(), full.format),
            (Some("a b"), Some(""), Format::Csv)
        );
        assert_eq!(
            read("from=2026-11-28T00:00:00+02:00").unwrap().from,
            read("from=2026-11-27T22:00:00Z").unwrap().from
        );
        let headers = [(ACCEPT, "text/csv".parse().unwrap())].into_iter().collect();
        assert_eq!(UsageQuestion::read("", &headers, NOW).unwrap().format, Format::Csv);
        assert_eq!(UsageQuestion::read("format=json", &headers, NOW).unwrap().format, Format::Json);
    }

    #[test]
    fn what_is_wrong_is_answered_with_what_is_allowed() {
        for (query, word) in [
            ("by=week", "hour, day or month"),
            ("from=yesterday", "2026-11-29T13:00:00Z"),
            ("to=2026-13-01", "a date such as"),
            ("to=2026-11-01T00:00:00", "a time such as"),
            ("from=1950-01-01", "a date such as"),
            ("from=2026-11-29&to=2026-11-29", "before to"),
            ("group=user", "tenant, key and model"),
            ("format=xml", "json or csv"),
            ("limit=3", "by, from, to"),
            ("by=hour&from=2026-01-01", "35 days"),
        ] {
            let error = read(query).unwrap_err();
            assert!(
                matches!(error, Error::BadQuery { .. }) && error.to_string().contains(word),
                "{query}: {error}"
            );
        }
    }

    #[test]
    fn months_have_the_days_of_the_calendar() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap().as_second() as u64;
        for (day, end) in [
            ("2026-02-28T23:59:59Z", "2026-03-01T00:00:00Z"),
            ("2028-02-28T23:59:59Z", "2028-03-01T00:00:00Z"),
            ("2028-02-29T00:00:00Z", "2028-03-01T00:00:00Z"),
            ("2100-02-28T12:00:00Z", "2100-03-01T00:00:00Z"),
            ("2026-04-30T23:59:59Z", "2026-05-01T00:00:00Z"),
            ("2026-12-31T23:59:59Z", "2027-01-01T00:00:00Z"),
            ("2027-01-01T00:00:00Z", "2027-02-01T00:00:00Z"),
        ] {
            assert_eq!(By::Month.time(at(day)).end, at(end), "{day}");
        }
        assert_eq!(By::Day.time(at("2028-02-28T23:59:59Z")).end, at("2028-02-29T00:00:00Z"));
    }

    proptest! {
        /// Pieces of time begin at or before what is in them, and are what they begin with.
        #[test]
        fn a_piece_of_time_has_one_beginning(at in 0..4_000_000_000_u64) {
            for by in [By::Hour, By::Day, By::Month] {
                let start = by.start(at);
                prop_assert!(start <= at && at - start < 31 * DAY_S && by.start(start) == start);
            }
        }

        /// A piece of time ends where the next one begins.
        #[test]
        fn a_piece_of_time_has_one_end(at in 0..4_000_000_000_u64) {
            for by in [By::Hour, By::Day, By::Month] {
                let time = by.time(at);
                prop_assert!(time.contains(&at) && by.start(time.end) == time.end);
                prop_assert_eq!(by.start(time.end - 1), time.start);
            }
        }

        #[test]
        fn no_query_is_a_panic(query in ".{0,64}", value in ".{0,32}") {
            let _ = read(&query);
            for name in ["by", "from", "to", "group", "format"] {
                let _ = read(&format!("{name}={value}"));
            }
        }
    }
}
