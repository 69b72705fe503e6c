//! Distributions people write on the command line: `1024`, `uniform(1,9)`, `normal(1024,256)`,
//! `lognormal(1024,512)`, `exp(3s)`. The numbers are the mean and the standard deviation of the drawn value
//! itself. Draws; rounds nothing.

use std::{fmt, str::FromStr, time::Duration};

use crate::{limits, random::Rng, units};

/// A distribution over positive numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Dist {
    /// Always this value; nothing is drawn.
    Fixed(f64),
    /// Evenly from the first to the second.
    Uniform(f64, f64),
    /// Mean and standard deviation; draws below 0 become 0.
    Normal(f64, f64),
    /// Mean and standard deviation of the value, not of its logarithm.
    LogNormal(f64, f64),
    /// Exponential, with this mean and no upper bound.
    Exponential(f64),
}

const FORMS: &str = "a number, uniform(LOW,HIGH), normal(MEAN,SD), lognormal(MEAN,SD) or exp(MEAN)";

impl Dist {
    /// Reads a distribution whose numbers are read by `number`.
    pub fn parse(text: &str, number: impl Fn(&str) -> Result<f64, String>) -> Result<Self, String> {
        let text = text.trim();
        let Some((name, rest)) = text.split_once('(') else { return Ok(Self::Fixed(number(text)?)) };
        let wrong = || format!("`{text}` is no distribution: write {FORMS}");
        let list = rest.strip_suffix(')').ok_or_else(wrong)?;
        let values = list.split(',').map(|value| number(value.trim())).collect::<Result<Vec<_>, _>>()?;
        match (name.trim(), values.as_slice()) {
            ("uniform", &[low, high]) if low <= high => Ok(Self::Uniform(low, high)),
            ("uniform", &[_, _]) => Err(format!("`{text}`: the first number must not be above the second")),
            ("normal", &[mean, sd]) => Ok(Self::Normal(mean, sd)),
            ("lognormal", &[mean, sd]) => Ok(Self::LogNormal(mean, sd)),
            ("exp", &[mean]) => Ok(Self::Exponential(mean)),
            _ => Err(wrong()),
        }
    }

    /// The mean, before any cut.
    pub fn mean(&self) -> f64 {
        match *self {
            Self::Fixed(mean)
            | Self::Normal(mean, _)
            | Self::LogNormal(mean, _)
            | Self::Exponential(mean) => mean,
            Self::Uniform(low, high) => low.midpoint(high),
        }
    }

    /// One draw, never below 0.
    pub fn draw(&self, rng: &mut Rng) -> f64 {
        match *self {
            Self::Fixed(value) => value,
            Self::Uniform(low, high) => low + (high - low) * rng.unit(),
            Self::Normal(mean, sd) => (mean + sd * rng.normal()).max(0.0),
            Self::LogNormal(mean, sd) => {
                // Of a log-normal with mean m and variance s^2, the logarithm has variance ln(1 + (s/m)^2).
                let variance = (sd / mean).powi(2).ln_1p();
                (mean.ln() - variance / 2.0 + variance.sqrt() * rng.normal()).exp()
            }
            Self::Exponential(mean) => mean * rng.exponential(),
        }
    }
}

/// A length in tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tokens(pub Dist);

impl Tokens {
    /// One draw: at least 1, at most [`limits::LENGTH_TOKENS_MAX`].
    pub fn draw(&self, rng: &mut Rng) -> u32 {
        self.0.draw(rng).round().clamp(1.0, f64::from(limits::LENGTH_TOKENS_MAX)) as u32
    }
}

impl FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let value = units::positive(text)?;
            let fits = value <= f64::from(limits::LENGTH_TOKENS_MAX);
            fits.then_some(value)
                .ok_or_else(|| format!("{text} tokens: more than {}", limits::LENGTH_TOKENS_MAX))
        };
        Dist::parse(text, number).map(Self)
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_dist(self.0, "", f)
    }
}

/// A time in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seconds(pub Dist);

impl Seconds {
    /// One draw; [`Duration::MAX`] where it would be too long for one.
    pub fn draw(&self, rng: &mut Rng) -> Duration {
        Duration::try_from_secs_f64(self.0.draw(rng)).unwrap_or(Duration::MAX)
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Dist::parse(text, |text| units::duration(text).map(|time| time.as_secs_f64())).map(Self)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_dist(self.0, "s", f)
    }
}

fn write_dist(dist: Dist, unit: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match dist {
        Dist::Fixed(value) => write!(f, "{value}{unit}"),
        Dist::Uniform(low, high) => write!(f, "uniform({low}{unit},{high}{unit})"),
        Dist::Normal(mean, sd) => write!(f, "normal({mean}{unit},{sd}{unit})"),
        Dist::LogNormal(mean, sd) => write!(f, "lognormal({mean}{unit},{sd}{unit})"),
        Dist::Exponential(mean) => write!(f, "exp({mean}{unit})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Purpose;

    #[test]
    fn what_people_write() {
        for text in ["1024", "uniform(1,9)", "normal(1024,256)", "lognormal(1024,512)", "exp(30)"] {
            let read: Tokens = text.parse().unwrap();
            assert_eq!(read.to_string(), text);
        }
        assert_eq!("exp(3s)".parse::<Seconds>().unwrap().0, Dist::Exponential(3.0));
        for bad in
            ["", "0", "normal(5)", "uniform(9,1)", "poisson(3)", "exp(3", "-4", "normal(1,NaN)", "1e12"]
        {
            assert!(bad.parse::<Tokens>().is_err(), "{bad}");
        }
        assert!("3".parse::<Seconds>().is_err());
    }

    #[test]
    fn draws_have_the_mean_and_deviation_that_were_asked_for() {
        for (text, mean, sd) in [
            ("700", 700.0, 0.0),
            ("uniform(100,300)", 200.0, 200.0 / 12f64.sqrt()),
            ("normal(1000,200)", 1000.0, 200.0),
            ("lognormal(1000,500)", 1000.0, 500.0),
            ("exp(400)", 400.0, 400.0),
        ] {
            let lengths: Tokens = text.parse().unwrap();
            let draws: Vec<f64> = (0..100_000)
                .map(|i| f64::from(lengths.draw(&mut Rng::at(3, Purpose::PromptLength, i))))
                .collect();
            let got = draws.iter().sum::<f64>() / draws.len() as f64;
            let var = draws.iter().map(|x| (x - got).powi(2)).sum::<f64>() / draws.len() as f64;
            assert!((got - mean).abs() < 0.01 * mean, "{text}: mean {got}");
            assert!((var.sqrt() - sd).abs() < 0.02 * sd + 0.01, "{text}: deviation {}", var.sqrt());
        }
    }
}
