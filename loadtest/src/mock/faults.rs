//! Faults that users ask for: what goes wrong, on which worker, from when to when. Reads and remembers them;
//! doing them is the worker's and the answers' part.
//!
//! `[WORKER:]KIND[=VALUE][xSHARE][@START[..[END]]]`, such as `2:die@30s..45s`, `slow=3`,
//! `status=503x0.25@10s..`.

use std::{fmt, str::FromStr, time::Duration};

use crate::{limits::MOCK_FAULTS_MAX, units};

/// What goes wrong, with the number behind `KIND=` where it has one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// The process is gone: nothing listens, all connections break; at the end it starts anew with an empty
    /// cache.
    Die,
    /// As [`Kind::Die`], back at once.
    Restart,
    /// The engine does nothing; HTTP goes on.
    Stall,
    /// Steps take this many times as long.
    Slow(f64),
    /// Requests are answered with this status.
    Status(u16),
    /// The connection breaks after this many tokens of a stream.
    Cut(u32),
    /// Batches of KV events are numbered and kept for replay, but not sent.
    LoseEvents,
}

/// One fault: what goes wrong, where, how often, and from when to when.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// On which worker; `None`: on each.
    pub worker: Option<usize>,
    /// What goes wrong; of `slow`, `status` and `cut` with their number.
    pub kind: Kind,
    /// Of the requests, streams or batches it is about, how many: 0 to 1.
    pub share: f64,
    /// When it begins: since the start of the mock, or since it was asked for.
    pub start: Duration,
    /// When it ends, if it does.
    pub end: Option<Duration>,
}

const GRAMMAR: &str = "write [WORKER:]KIND[=VALUE][xSHARE][@START[..[END]]] with KIND die, restart, stall, slow=FACTOR, \
                       status=CODE, cut=TOKENS or lose-events, such as 2:die@30s..45s or status=503x0.25";

// === impl Fault ===

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |what: &str| format!("`{text}`: {what}; {GRAMMAR}");
        let (rest, time) = text.split_once('@').map_or((text, None), |(rest, time)| (rest, Some(time)));
        let (worker, rest) = match rest.split_once(':') {
            Some((worker, rest)) => {
                (Some(worker.trim().parse().map_err(|_| bad("the worker is its number"))?), rest)
            }
            None => (None, rest),
        };
        let (rest, share) = match rest.rsplit_once('x') {
            Some((rest, share)) => (rest, share.parse().map_err(|_| bad("the share is a number"))?),
            None => (rest, 1.0),
        };
        if !(0.0..=1.0).contains(&share) {
            return Err(bad("the share lies between 0 and 1"));
        }
        let (name, value) = rest.split_once('=').map_or((rest, None), |(name, value)| (name, Some(value)));
        let kind = kind(name.trim(), value.map(str::trim)).map_err(|what| bad(&what))?;
        let (start, end) = times(time.unwrap_or("0s")).map_err(|what| bad(&what))?;
        Ok(Self { worker, kind, share, start, end })
    }
}

fn kind(name: &str, value: Option<&str>) -> Result<Kind, String> {
    fn number<T: FromStr>(name: &str, value: Option<&str>) -> Result<T, String> {
        value.and_then(|value| value.parse().ok()).ok_or_else(|| format!("`{name}` needs a number"))
    }
    let kind = match name {
        "die" => Kind::Die,
        "restart" => Kind::Restart,
        "stall" => Kind::Stall,
        "lose-events" => Kind::LoseEvents,
        "slow" => Kind::Slow(units::positive(value.unwrap_or_default())?),
        "status" => match number(name, value)? {
            code @ 400..=599 => Kind::Status(code),
            _ => return Err("`status` is an error's code".into()),
        },
        "cut" => Kind::Cut(number(name, value)?),
        _ => return Err(format!("there is no fault `{name}`")),
    };
    let takes_value = matches!(kind, Kind::Slow(_) | Kind::Status(_) | Kind::Cut(_));
    if value.is_some() && !takes_value { Err(format!("`{name}` takes no value")) } else { Ok(kind) }
}

fn times(text: &str) -> Result<(Duration, Option<Duration>), String> {
    let (start, end) = text.split_once("..").unwrap_or((text, ""));
    let start = units::duration(start)?;
    let end = if end.is_empty() { None } else { Some(units::duration(end)?) };
    if end.is_some_and(|end| end <= start) {
        return Err("it ends before it begins".into());
    }
    Ok((start, end))
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(worker) = self.worker {
            write!(f, "{worker}:")?;
        }
        match self.kind {
            Kind::Die => f.write_str("die")?,
            Kind::Restart => f.write_str("restart")?,
            Kind::Stall => f.write_str("stall")?,
            Kind::LoseEvents => f.write_str("lose-events")?,
            Kind::Slow(factor) => write!(f, "slow={factor}")?,
            Kind::Status(code) => write!(f, "status={code}")?,
            Kind::Cut(tokens) => write!(f, "cut={tokens}")?,
        }
        if self.share < 1.0 {
            write!(f, "x{}", self.share)?;
        }
        write!(f, "@{}s..", self.start.as_secs_f64())?;
        self.end.map_or(Ok(()), |end| write!(f, "{}s", end.as_secs_f64()))
    }
}

/// A worker takes no more faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there are {most} faults already: clear them first", most = MOCK_FAULTS_MAX)]
pub struct TooManyFaults;

/// The faults of one worker, times since the mock's start.
#[derive(Debug, Default)]
pub(super) struct Faults {
    all: Vec<Counted>,
}

#[derive(Debug)]
struct Counted {
    fault: Fault,
    /// Requests, streams or batches seen, and those of them it struck.
    seen: u64,
    struck: u64,
}

// === impl Faults ===

impl Faults {
    /// Adds a fault whose times count from `since`; an error if there are too many.
    pub(super) fn add(&mut self, fault: Fault, since: Duration) -> Result<(), TooManyFaults> {
        if self.all.len() == MOCK_FAULTS_MAX {
            return Err(TooManyFaults);
        }
        let fault = Fault { start: since + fault.start, end: fault.end.map(|end| since + end), ..fault };
        self.all.push(Counted { fault, seen: 0, struck: 0 });
        Ok(())
    }

    /// Forgets all faults, those that have not begun too.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }

    /// All faults: those to come, those going on, and those that have ended.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.all.iter().map(|counted| &counted.fault)
    }

    /// Those that are going on at `now`.
    pub(super) fn active(&self, now: Duration) -> impl Iterator<Item = &Fault> {
        self.iter().filter(move |fault| fault.start <= now && fault.end.is_none_or(|end| now < end))
    }

    /// Whether a restart is due between two moments, the first excluded unless it is the very start.
    pub(super) fn restarts_between(&self, from: Option<Duration>, to: Duration) -> bool {
        let due = |fault: &Fault| from.is_none_or(|from| from < fault.start) && fault.start <= to;
        self.iter().any(|fault| fault.kind == Kind::Restart && due(fault))
    }

    /// When something begins or ends next after `now`.
    pub(super) fn next_change_after(&self, now: Duration) -> Option<Duration> {
        self.iter().flat_map(|fault| [Some(fault.start), fault.end]).flatten().filter(|&at| at > now).min()
    }

    /// The first fault that strikes the next request, stream or batch for which `wanted` gives something.
    /// Each strikes its share evenly: every fourth, not a coin's quarter.
    pub(super) fn strike<T>(&mut self, now: Duration, wanted: impl Fn(Kind) -> Option<T>) -> Option<T> {
        let mut struck = None;
        for counted in &mut self.all {
            let fault = &counted.fault;
            let going_on = fault.start <= now && fault.end.is_none_or(|end| now < end);
            let Some(value) = wanted(fault.kind).filter(|_| going_on) else { continue };
            counted.seen += 1;
            if counted.seen as f64 * fault.share >= (counted.struck + 1) as f64 - 1e-9 {
                counted.struck += 1;
                struck = struck.or(Some(value));
            }
        }
        struck
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn what_people_write() {
        let fault = |text: &str| text.parse::<Fault>().unwrap();
        assert_eq!(
            fault("2:die@30s..45s"),
            Fault { worker: Some(2), kind: Kind::Die, share: 1.0, start: s(30), end: Some(s(45)) }
        );
        assert_eq!(
            fault("status=503x0.25@10s.."),
            Fault { worker: None, kind: Kind::Status(503), share: 0.25, start: s(10), end: None }
        );
        assert_eq!(fault("slow=3").kind, Kind::Slow(3.0));
        assert_eq!(fault("0:cut=5").kind, Kind::Cut(5));
        for bad in [
            "",
            "dye",
            "x:die",
            "slow",
            "slow=-1",
            "slow=0",
            "status=200",
            "die=3",
            "stall@5s..2s",
            "stall@soon",
            "status=503x2",
            "cut",
        ] {
            let error = bad.parse::<Fault>().unwrap_err();
            assert!(error.contains("write [WORKER:]KIND"), "{error}");
        }
    }

    #[test]
    fn a_share_strikes_evenly() {
        let mut faults = Faults::default();
        faults.add("status=429x0.25@1s..5s".parse().unwrap(), s(10)).unwrap();
        let mut hits = |now| {
            let status = |kind| if let Kind::Status(code) = kind { Some(code) } else { None };
            (0..8).filter(|_| faults.strike(now, status) == Some(429)).count()
        };
        assert_eq!((hits(s(10)), hits(s(12)), hits(s(15))), (0, 2, 0));
    }

    #[test]
    fn changes_and_restarts_are_found_in_time() {
        let mut faults = Faults::default();
        faults.add("stall@2s..4s".parse().unwrap(), s(0)).unwrap();
        faults.add("restart@3s".parse().unwrap(), s(0)).unwrap();
        assert_eq!(faults.next_change_after(s(0)), Some(s(2)));
        assert_eq!(faults.next_change_after(s(3)), Some(s(4)));
        assert_eq!(faults.next_change_after(s(4)), None);
        assert!(!faults.restarts_between(Some(s(0)), s(2)) && faults.restarts_between(Some(s(2)), s(3)));
        assert!(!faults.restarts_between(Some(s(3)), s(9)));
        assert_eq!(faults.active(s(3)).count(), 2);
    }

    proptest! {
        #[test]
        fn what_is_shown_reads_back(
            worker in prop::option::of(0usize..9),
            which in 0usize..7,
            share in prop_oneof![Just(1.0), Just(0.5), Just(0.125)],
            start in 0u64..100,
            length in prop::option::of(1u64..100),
        ) {
            let kinds = [Kind::Die, Kind::Restart, Kind::Stall, Kind::LoseEvents, Kind::Slow(2.5), Kind::Status(429), Kind::Cut(3)];
            let fault = Fault { worker, kind: kinds[which], share, start: s(start), end: length.map(|l| s(start + l)) };
            prop_assert_eq!(fault.to_string().parse::<Fault>().unwrap(), fault);
        }

        #[test]
        fn any_text_is_an_answer_not_a_panic(text in ".{0,40}") {
            let _ = text.parse::<Fault>();
        }
    }
}
