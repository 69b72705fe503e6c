//! When requests of an open loop arrive: a renewal process of mean rate 1, stretched by the rate's shape.
//! Computed from the seed alone, before anything is sent.

use serde::{Deserialize, Serialize};

use crate::{
    random::{Purpose, Rng},
    schedule::rate::RateShape,
};

/// How the gaps between arrivals vary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Arrival {
    /// Independent arrivals: exponential gaps.
    Poisson,
    /// Equal gaps.
    Constant,
    /// Gamma-distributed gaps of shape `--burstiness`: below 1 burstier than Poisson, above 1 more even.
    Gamma,
}

/// Why options name no arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ArrivalError {
    /// A rate without bound has no gaps that could vary.
    #[error("--rate inf is for `run`: write a number")]
    Unbounded,
    /// No option says how fast.
    #[error("say how fast: --rate R, --rate-shape PIECES, --concurrency N or --users N")]
    NoRate,
    /// Gamma gaps without their shape.
    #[error("--arrival gamma needs --burstiness SHAPE")]
    NoBurstiness,
    /// A shape for gaps that have none.
    #[error("--burstiness is for --arrival gamma")]
    NotGamma,
}

/// Arrival times in nanoseconds, never going back. `burstiness` is the shape of gamma gaps; their coefficient
/// of variation is 1/sqrt(burstiness).
pub fn arrivals(
    shape: &RateShape,
    arrival: Arrival,
    burstiness: f64,
    seed: u64,
) -> impl Iterator<Item = u64> + '_ {
    let mut mean_count = 0.0;
    (0u64..).map_while(move |i| {
        let mut rng = Rng::at(seed, Purpose::Arrival, i);
        mean_count = match arrival {
            Arrival::Constant => i as f64,
            Arrival::Poisson => mean_count + rng.exponential(),
            Arrival::Gamma => mean_count + rng.gamma(burstiness),
        };
        shape.time_of(mean_count).map(|seconds| (seconds * 1e9) as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(shape: &str, arrival: Arrival, burstiness: f64, seed: u64) -> Vec<f64> {
        let shape: RateShape = shape.parse().unwrap();
        arrivals(&shape, arrival, burstiness, seed).map(|ns| ns as f64 / 1e9).collect()
    }

    /// Coefficient of variation of the gaps.
    fn variation(times: &[f64]) -> f64 {
        let gaps: Vec<f64> = times.windows(2).map(|w| w[1] - w[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt() / mean
    }

    #[test]
    fn rates_and_variations() {
        assert_eq!(times("2@3s", Arrival::Constant, 1.0, 1), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
        for (arrival, burstiness, want) in
            [(Arrival::Poisson, 1.0, 1.0), (Arrival::Gamma, 0.25, 2.0), (Arrival::Gamma, 4.0, 0.5)]
        {
            let times = times("50@2000s", arrival, burstiness, 5);
            assert!((times.len() as f64 - 100_000.0).abs() < 2_000.0, "{arrival:?}: {}", times.len());
            assert!(times.is_sorted());
            assert!((variation(&times) - want).abs() < 0.03, "{arrival:?}: {}", variation(&times));
        }
    }

    #[test]
    fn a_ramp_has_as_many_arrivals_as_its_area_in_each_half() {
        let times = times("0..100@100s", Arrival::Poisson, 1.0, 9);
        let first = times.iter().filter(|&&t| t < 50.0).count();
        assert!((first as f64 - 1250.0).abs() < 110.0, "{first}");
        assert!((times.len() as f64 - 5000.0).abs() < 220.0, "{}", times.len());
    }

    #[test]
    fn the_seed_alone_decides() {
        let of = |seed| times("5@60s", Arrival::Poisson, 1.0, seed);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
