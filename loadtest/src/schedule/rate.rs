//! How many requests a second, over time: constant, or pieces that hold or ramp, such as `1..20@60s,20@30s`.
//! Says when the n-th request is due on average; knows nothing of randomness.

use std::{fmt, str::FromStr};

use crate::{limits, units};

/// A stretch in which the rate goes in a straight line.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Piece {
    /// Requests a second at its start.
    from: f64,
    /// And at its end.
    to: f64,
    /// Infinite for a constant rate without an end.
    seconds: f64,
}

/// A rate over time. After its last piece nothing is due.
#[derive(Debug, Clone, PartialEq)]
pub struct RateShape {
    pieces: Vec<Piece>,
}

// === impl Piece ===

impl Piece {
    /// Requests due within the piece.
    fn requests(&self) -> f64 {
        if self.from == 0.0 && self.to == 0.0 { 0.0 } else { self.from.midpoint(self.to) * self.seconds }
    }

    /// Seconds into the piece until `count` requests are due: the root of from·t + (to - from)/(2·seconds)·t²
    /// = count, in the form that loses no digits when the ramp is flat.
    fn time_of(&self, count: f64) -> f64 {
        if count <= 0.0 {
            return 0.0;
        }
        let slope = if self.seconds.is_finite() { (self.to - self.from) / self.seconds } else { 0.0 };
        let root = (self.from * self.from + 2.0 * slope * count).max(0.0).sqrt();
        (2.0 * count / (self.from + root)).min(self.seconds)
    }
}

// === impl RateShape ===

impl RateShape {
    /// This many requests a second, without end.
    pub fn constant(rate: f64) -> Self {
        Self { pieces: vec![Piece { from: rate, to: rate, seconds: f64::INFINITY }] }
    }

    /// When the mean number of requests since the start reaches `count`, in seconds; `None` after the end.
    pub fn time_of(&self, mut count: f64) -> Option<f64> {
        let mut start = 0.0;
        for piece in &self.pieces {
            let requests = piece.requests();
            if count < requests {
                return Some(start + piece.time_of(count));
            }
            count -= requests;
            start += piece.seconds;
        }
        None
    }

    /// Whether it ends by itself.
    pub fn ends(&self) -> bool {
        self.pieces.iter().all(|piece| piece.seconds.is_finite())
    }
}

impl FromStr for RateShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |piece: &str| {
            format!(
                "`{piece}` is no piece of a rate: write RATE@TIME or FROM..TO@TIME, such as 1..20@60s,20@30s"
            )
        };
        let rate = |text: &str, piece: &str| match text.trim().parse::<f64>() {
            Ok(rate) if rate.is_finite() && rate >= 0.0 => Ok(rate),
            _ => Err(wrong(piece)),
        };
        let mut pieces = Vec::new();
        for piece in text.split(',') {
            let (rates, time) = piece.split_once('@').ok_or_else(|| wrong(piece))?;
            let (from, to) = rates.split_once("..").unwrap_or((rates, rates));
            let seconds = units::duration(time)?.as_secs_f64();
            pieces.push(Piece { from: rate(from, piece)?, to: rate(to, piece)?, seconds });
        }
        if pieces.len() > limits::RATE_PIECES_MAX {
            return Err(format!("{} pieces of a rate: at most {}", pieces.len(), limits::RATE_PIECES_MAX));
        }
        if pieces.iter().all(|piece| piece.requests() == 0.0) {
            return Err(format!("`{text}`: no request is ever due"));
        }
        Ok(Self { pieces })
    }
}

impl fmt::Display for RateShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, Piece { from, to, seconds }) in self.pieces.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            match (from == to, seconds.is_finite()) {
                (true, false) => write!(f, "{comma}{from}")?,
                (true, true) => write!(f, "{comma}{from}@{seconds}s")?,
                (false, _) => write!(f, "{comma}{from}..{to}@{seconds}s")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shape(text: &str) -> RateShape {
        text.parse().unwrap()
    }

    #[test]
    fn when_the_nth_request_is_due() {
        assert_eq!(RateShape::constant(4.0).time_of(10.0), Some(2.5));
        let ramp = shape("0..10@10s,10@5s,0@60s,2@5s");
        // 50 requests in the ramp, half of them after sqrt(1/2) of it.
        assert!((ramp.time_of(25.0).unwrap() - 10.0 * 0.5f64.sqrt()).abs() < 1e-12);
        assert_eq!(ramp.time_of(60.0), Some(11.0));
        assert_eq!(ramp.time_of(100.0), Some(75.0));
        assert_eq!(ramp.time_of(110.0), None);
        assert!(ramp.ends() && !RateShape::constant(1.0).ends());
        let down = shape("10..0@10s");
        assert!((down.time_of(49.999_999).unwrap() - 10.0).abs() < 1e-2);
    }

    #[test]
    fn bad_shapes_say_what_to_write() {
        for bad in ["", "5", "5@", "1..@3s", "-1@5s", "0@5s", "1@0s", "NaN@1s", "1..2..3@4s"] {
            assert!(bad.parse::<RateShape>().is_err(), "{bad}");
        }
        assert_eq!(shape("1..20@60s,20@30s").to_string(), "1..20@60s,20@30s");
    }

    proptest! {
        #[test]
        fn time_inverts_the_area_under_the_rate(
            pieces in prop::collection::vec((0u32..50, 0u32..50, 1u32..100), 1..6),
            share in 0.0f64..1.0,
        ) {
            let pieces: Vec<Piece> = pieces.into_iter()
                .map(|(from, to, s)| Piece { from: from.into(), to: to.into(), seconds: s.into() }).collect();
            let total: f64 = pieces.iter().map(Piece::requests).sum();
            prop_assume!(total > 0.0);
            let count = share * total * 0.999;
            let time = RateShape { pieces: pieces.clone() }.time_of(count).unwrap();
            let (mut area, mut start) = (0.0, 0.0);
            for piece in &pieces {
                let t = (time - start).clamp(0.0, piece.seconds);
                area += piece.from * t + (piece.to - piece.from) / piece.seconds * t * t / 2.0;
                start += piece.seconds;
            }
            prop_assert!((area - count).abs() < 1e-6 * total.max(1.0), "{area} {count}");
        }
    }
}
