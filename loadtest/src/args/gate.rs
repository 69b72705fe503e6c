//! A condition that makes `compare` fail, such as `ttft.p99>+5%`: which figure, in which direction, by how
//! much.

use std::{fmt, str::FromStr};

/// A condition on the change of a figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Gate {
    /// The figure's name, such as `ttft.p99`.
    pub figure: String,
    /// The relative change beyond which it fails: above, if positive or zero, else below.
    pub change: f64,
    /// Whether a larger change fails, or a smaller.
    pub above: bool,
}

impl Gate {
    /// Whether a figure that changed so much, by more than chance, fails.
    pub fn fails(&self, change: f64, significant: bool) -> bool {
        significant && if self.above { change > self.change } else { change < self.change }
    }
}

impl FromStr for Gate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no gate: write FIGURE>+N% or FIGURE<-N%, such as ttft.p99>+5%");
        let at = text.find(['<', '>']).ok_or_else(wrong)?;
        let (figure, bound) = (text[..at].trim(), text[at + 1..].trim());
        let percent = bound.strip_suffix('%').ok_or_else(wrong)?;
        let percent: f64 = percent.trim_start_matches('+').trim().parse().map_err(|_| wrong())?;
        if figure.is_empty() || !percent.is_finite() {
            return Err(wrong());
        }
        let figure = figure.strip_prefix("response.").unwrap_or(figure).to_owned();
        Ok(Self { figure, change: percent / 100.0, above: text.as_bytes()[at] == b'>' })
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{:+}%", self.figure, if self.above { '>' } else { '<' }, self.change * 100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write() {
        let gate: Gate = "response.ttft.p99 > +5%".parse().unwrap();
        assert_eq!(gate, Gate { figure: "ttft.p99".into(), change: 0.05, above: true });
        assert_eq!(gate.to_string(), "ttft.p99>+5%");
        assert!(gate.fails(0.06, true) && !gate.fails(0.06, false) && !gate.fails(0.05, true));
        let fall: Gate = "requests_per_s<-10%".parse().unwrap();
        assert!(fall.fails(-0.2, true) && !fall.fails(-0.05, true));
        for bad in ["", "ttft.p99", "ttft.p99>5", ">+5%", "ttft.p99>x%", "ttft.p99>inf%"] {
            assert!(bad.parse::<Gate>().is_err(), "{bad}");
        }
    }
}
