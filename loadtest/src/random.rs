//! Seeded randomness that can be asked for by number: the draws of request 17 are the same whether or not
//! request 16 was made first, in any process. Draws numbers only; what they mean is the caller's.

/// What a generator's draws are for, so that two purposes never share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Purpose {
    Arrival = 1,
    PromptLength,
    OutputLength,
    Group,
    Phase,
    ThinkTime,
    Turns,
    Bootstrap,
    Agents,
}

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The generator of the `index`-th thing of one purpose.
    pub fn at(seed: u64, purpose: Purpose, index: u64) -> Self {
        Self(splitmix(splitmix(splitmix(seed) ^ purpose as u64) ^ splitmix(index)))
    }

    /// The next 64 random bits, which all other draws are made from.
    pub fn bits(&mut self) -> u64 {
        let bits = splitmix(self.0);
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        bits
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number in 0..n; `n` > 0. The bias of the multiplication is below n / 2^64.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// Exponential with mean 1, by inversion.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Standard normal, by Box and Muller (1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Gamma of this shape with mean 1; `shape` > 0. Marsaglia and Tsang, "A Simple Method for Generating
    /// Gamma Variables", ACM TOMS 26(3), 2000; shapes below 1 by their section 6.
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let boost = (1.0 - self.unit()).powf(1.0 / shape);
            return self.standard_gamma(shape + 1.0) * boost / shape;
        }
        self.standard_gamma(shape) / shape
    }

    fn standard_gamma(&mut self, shape: f64) -> f64 {
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && (1.0 - self.unit()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}

/// One step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), also used as a 64-bit mixer.
pub fn splitmix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and variance of 200,000 draws.
    fn moments(mut draw: impl FnMut(&mut Rng) -> f64) -> (f64, f64) {
        let mut rng = Rng::at(7, Purpose::Arrival, 0);
        let draws: Vec<f64> = (0..200_000).map(|_| draw(&mut rng)).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        (mean, draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64)
    }

    #[track_caller]
    fn assert_moments(draw: impl FnMut(&mut Rng) -> f64, mean: f64, variance: f64) {
        let got = moments(draw);
        assert!((got.0 - mean).abs() < 0.02, "{got:?}");
        assert!((got.1 - variance).abs() < 0.05 * variance.max(1.0), "{got:?}");
    }

    #[test]
    fn each_distribution_has_its_mean_and_variance() {
        assert_moments(Rng::unit, 0.5, 1.0 / 12.0);
        assert_moments(Rng::exponential, 1.0, 1.0);
        assert_moments(Rng::normal, 0.0, 1.0);
        for shape in [0.25, 0.5, 1.0, 4.0] {
            assert_moments(|rng| rng.gamma(shape), 1.0, 1.0 / shape);
        }
        assert_moments(|rng| rng.below(3) as f64, 1.0, 2.0 / 3.0);
    }

    #[test]
    fn seed_purpose_and_index_each_change_the_draws() {
        let bits = |seed, purpose, index| Rng::at(seed, purpose, index).bits();
        let base = bits(1, Purpose::Arrival, 1);
        assert_eq!(base, bits(1, Purpose::Arrival, 1));
        for other in [bits(2, Purpose::Arrival, 1), bits(1, Purpose::Group, 1), bits(1, Purpose::Arrival, 2)]
        {
            assert_ne!(base, other);
        }
    }
}
