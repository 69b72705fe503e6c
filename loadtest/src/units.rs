//! Reads what people write for times: `500ms`, `60s`, `20m`, and spans such as `0s..1200s`. No other units.

use std::{fmt, str::FromStr, time::Duration};

/// Reads a duration: a number and one of `ms`, `s`, `m`, `h`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let seconds = match unit {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => {
            return Err(format!("`{text}` is not a duration: write a number and ms, s, m or h, such as 60s"));
        }
    };
    let number: f64 =
        number.parse().map_err(|_| format!("`{text}` is not a duration: `{number}` is no number"))?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| format!("`{text}` is too long"))
}

/// A half-open stretch of time, `start..end`; without an end it lasts to the end of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    /// First moment inside; 0 if the text leaves it out.
    pub start: Duration,
    /// First moment after it; `None` if the span is open to the end.
    pub end: Option<Duration>,
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (start, end) = text
            .split_once("..")
            .ok_or_else(|| format!("`{text}` is not a span: write START..END, such as 0s..20m"))?;
        let start = if start.trim().is_empty() { Duration::ZERO } else { duration(start)? };
        let end = if end.trim().is_empty() { None } else { Some(duration(end)?) };
        match end {
            Some(end) if end <= start => Err(format!("`{text}` is empty: its end must come after its start")),
            _ => Ok(Self { start, end }),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s..", self.start.as_secs_f64())?;
        self.end.map_or(Ok(()), |end| write!(f, "{}s", end.as_secs_f64()))
    }
}

/// Reads a finite number above zero.
pub fn positive(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err(format!("`{text}` is not a number above 0")),
    }
}

/// Reads a rate: a finite number above zero, or `inf` for all at once.
pub fn rate(text: &str) -> Result<f64, String> {
    if text.trim().eq_ignore_ascii_case("inf") { Ok(f64::INFINITY) } else { positive(text) }
}

/// Reads a share: a number above 0 and below 1.
pub fn share(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(value) if value > 0.0 && value < 1.0 => Ok(value),
        _ => Err(format!("`{text}` is not a share between 0 and 1")),
    }
}

/// Reads a finite number that is not below zero.
pub fn not_negative(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err(format!("`{text}` is not a number of 0 or more")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, ms) in
            [("500ms", 500), ("60s", 60_000), ("20m", 1_200_000), ("1h", 3_600_000), ("1.5s", 1500)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for bad in ["", "60", "s", "1d", "-1s", "1 s 2", "1..2s", "1e400s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn spans() {
        let span: Span = "0s..1200s".parse().unwrap();
        assert_eq!(span, Span { start: Duration::ZERO, end: Some(Duration::from_secs(1200)) });
        assert_eq!(span.to_string().parse(), Ok(span));
        assert_eq!("..20m".parse(), Ok(span));
        assert_eq!("90s..".parse(), Ok(Span { start: Duration::from_secs(90), end: None }));
        for bad in ["5s", "5s..5s", "9s..1s", "a..b", "1..2"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_above_zero() {
        assert_eq!(positive("0.03125"), Ok(0.03125));
        for bad in ["0", "-1", "NaN", "inf", "x"] {
            assert!(positive(bad).is_err(), "{bad}");
        }
    }
}
