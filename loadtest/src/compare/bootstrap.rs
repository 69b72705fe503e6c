//! Resampling of two runs' requests: how far their figures would differ by chance alone. Whole requests are
//! drawn, in blocks of neighbours, because the gaps of one answer share its fate and neighbours in a queue
//! share their wait. Knows numbers only.
//!
//! Circular block bootstrap: Politis and Romano, "A circular block-resampling procedure for stationary data",
//! 1992. Of several runs on a side, whole runs are drawn first, so that what differs from run to run counts
//! too; as few runs show too little of that, each change is stretched by sqrt(n / (n - 1)) around the one
//! found (Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8).
//!
//! Block length: Politis and White, "Automatic block-length selection for the dependent bootstrap",
//! Econometric Reviews 23(1), 2004, with the correction of Patton, Politis and White, 2009.

use crate::{
    random::{Purpose, Rng},
    stats,
};

/// Resamples: the smallest p that can be told from 0 is 2/4000, a fifth of 5 % over 20 figures.
pub const RESAMPLES: usize = 4000;

/// The values of a metric in one run, by request in order of time.
#[derive(Debug, Clone, Default)]
pub struct Runs {
    /// For each request its values and how often each occurred.
    pub requests: Vec<Vec<(f64, u32)>>,
}

/// A figure of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stat {
    /// Arithmetic mean of all values, each as often as it occurred.
    Mean,
    /// A percentile by nearest rank, 0 to 100.
    Percentile(f64),
}

impl Stat {
    /// Requests of the smaller side that it takes to judge this figure.
    pub fn requests_min(self) -> usize {
        match self {
            Self::Mean => 2,
            Self::Percentile(percent) => stats::values_min(percent),
        }
    }
}

/// A figure in both runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// The figure over all requests of the first side.
    pub base: f64,
    /// The figure over all requests of the second side.
    pub new: f64,
    /// 95 % interval of new / base - 1.
    pub interval: (f64, f64),
    /// Chance of a difference as large if there were none, two-sided.
    pub p: f64,
}

/// A side prepared for resampling: its distinct values in order, and each request's as indices into them, run
/// after run.
struct Indexed {
    /// Requests of each run.
    lengths: Vec<usize>,
    values: Vec<f64>,
    requests: Vec<Vec<(usize, u32)>>,
}

/// Compares `stats` of two sides, each of one or several runs of one workload, by `resamples`. `paired`, for
/// one run each: request i of one is request i of the other, and both are drawn together. `None` for a
/// percentile with too few requests above it.
pub fn compare(
    base: &[Runs],
    new: &[Runs],
    paired: bool,
    stats: &[Stat],
    resamples: usize,
    seed: u64,
) -> Vec<Option<Difference>> {
    let requests = |side: &[Runs]| side.iter().map(|run| run.requests.len()).sum::<usize>();
    let n = requests(base).min(requests(new));
    if base.iter().chain(new).any(|run| run.requests.is_empty()) || n == 0 {
        return vec![None; stats.len()];
    }
    let runs = base.len().min(new.len()) as f64;
    let stretch = if runs > 1.0 { (runs / (runs - 1.0)).sqrt() } else { 1.0 };
    let block = base.iter().chain(new).map(|run| block_length(&run.means())).max().unwrap_or(1);
    let (base, new) = (Indexed::new(base), Indexed::new(new));
    let all = |side: &Indexed| side.figures(&mut (0..side.requests.len()), stats);
    let (base_figures, new_figures) = (all(&base), all(&new));

    let mut changes = vec![Vec::with_capacity(resamples); stats.len()];
    for i in 0..resamples {
        let mut rng = Rng::at(seed, Purpose::Bootstrap, i as u64);
        let base_draw = base.draw(block, &mut rng);
        let new_draw = if paired { base_draw.clone() } else { new.draw(block, &mut rng) };
        let base_drawn = base.figures(&mut base_draw.into_iter(), stats);
        let new_drawn = new.figures(&mut new_draw.into_iter(), stats);
        for (s, changes) in changes.iter_mut().enumerate() {
            let found = change(base_figures[s], new_figures[s]);
            changes.push(found + (change(base_drawn[s], new_drawn[s]) - found) * stretch);
        }
    }
    let difference = |i: usize| {
        (n >= stats[i].requests_min())
            .then(|| Difference::new(base_figures[i], new_figures[i], &mut changes[i]))
    };
    (0..stats.len()).map(difference).collect()
}

fn change(base: f64, new: f64) -> f64 {
    if base == new { 0.0 } else { new / base - 1.0 }
}

/// Which of several tests are significant together: Holm, "A Simple Sequentially Rejective Multiple Test
/// Procedure", Scandinavian Journal of Statistics 6(2), 1979. The chance that any of them is by accident
/// stays below `alpha`.
pub fn holm(p: &[f64], alpha: f64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut significant = vec![false; p.len()];
    for (rank, &i) in order.iter().enumerate() {
        if p[i] > alpha / (p.len() - rank) as f64 {
            break;
        }
        significant[i] = true;
    }
    significant
}

/// Draws n of n in blocks of `block` neighbours; the last is the first's neighbour.
fn draw(n: usize, block: usize, rng: &mut Rng) -> Vec<usize> {
    let mut drawn = Vec::with_capacity(n + block);
    while drawn.len() < n {
        let start = rng.below(n);
        drawn.extend((start..start + block).map(|i| i % n));
    }
    drawn.truncate(n);
    drawn
}

/// The block length that makes the variance of a mean right.
fn block_length(series: &[f64]) -> usize {
    let n = series.len();
    let mean = series.iter().sum::<f64>() / n.max(1) as f64;
    let covariance = |lag: usize| {
        (0..n - lag).map(|i| (series[i] - mean) * (series[i + lag] - mean)).sum::<f64>() / n as f64
    };
    let variance = if n == 0 { 0.0 } else { covariance(0) };
    if variance <= 0.0 {
        return 1;
    }
    // The first of `run` lags in a row at which nothing is left of the correlation.
    let noise = 2.0 * ((n as f64).log10() / n as f64).sqrt();
    let run = 5.max((n as f64).log10().sqrt() as usize);
    let lags_max = ((n as f64).sqrt() as usize + run).min(n - 1);
    let (mut quiet, mut last) = (0, lags_max);
    let mut covariances = vec![variance];
    for lag in 1..=lags_max {
        covariances.push(covariance(lag));
        quiet = if covariances[lag].abs() < noise * variance { quiet + 1 } else { 0 };
        if quiet == run {
            last = lag - run;
            break;
        }
    }
    // Flat-top window: 1 up to half of the bandwidth, then down to 0.
    let bandwidth = (2 * last.max(1)).min(covariances.len() - 1).max(1);
    let window = |lag: usize| (2.0 * (1.0 - lag as f64 / bandwidth as f64)).clamp(0.0, 1.0);
    let sum = |weight: fn(usize) -> f64| {
        (1..=bandwidth.min(covariances.len() - 1))
            .map(|lag| 2.0 * window(lag) * weight(lag) * covariances[lag])
            .sum::<f64>()
    };
    let (spectrum, slope) = (variance + sum(|_| 1.0), sum(|lag| lag as f64));
    if spectrum <= 0.0 {
        return 1;
    }
    let length = (1.5 * (slope / spectrum).powi(2) * n as f64).cbrt();
    (length.ceil() as usize).clamp(1, (n / 10).max(1))
}

// === impl Runs ===

impl Runs {
    /// Each request's mean; requests without values are left out.
    fn means(&self) -> Vec<f64> {
        let mean = |values: &Vec<(f64, u32)>| {
            let count: f64 = values.iter().map(|(_, count)| f64::from(*count)).sum();
            (count > 0.0).then(|| values.iter().map(|(v, c)| v * f64::from(*c)).sum::<f64>() / count)
        };
        self.requests.iter().filter_map(mean).collect()
    }
}

// === impl Indexed ===

impl Indexed {
    fn new(runs: &[Runs]) -> Self {
        let lengths = runs.iter().map(|run| run.requests.len()).collect();
        let requests = || runs.iter().flat_map(|run| &run.requests);
        let mut values: Vec<f64> = requests().flatten().map(|(value, _)| *value).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let index = |value: f64| values.partition_point(|&other| other < value);
        let request = |request: &Vec<(f64, u32)>| request.iter().map(|&(v, c)| (index(v), c)).collect();
        Self { lengths, requests: requests().map(request).collect(), values }
    }

    /// As many runs as there are, drawn, and of each its requests in blocks.
    fn draw(&self, block: usize, rng: &mut Rng) -> Vec<usize> {
        let mut drawn = Vec::with_capacity(self.requests.len());
        for _ in 0..self.lengths.len() {
            let run = if self.lengths.len() > 1 { rng.below(self.lengths.len()) } else { 0 };
            let first: usize = self.lengths[..run].iter().sum();
            drawn.extend(draw(self.lengths[run], block, rng).into_iter().map(|i| first + i));
        }
        drawn
    }

    /// The figures of the drawn requests.
    fn figures(&self, drawn: &mut dyn Iterator<Item = usize>, stats: &[Stat]) -> Vec<f64> {
        let mut counts = vec![0u64; self.values.len()];
        for request in drawn {
            for &(value, count) in &self.requests[request] {
                counts[value] += u64::from(count);
            }
        }
        let total: u64 = counts.iter().sum();
        let figure = |stat: &Stat| match stat {
            Stat::Mean => {
                let sum: f64 =
                    counts.iter().zip(&self.values).map(|(&count, value)| count as f64 * value).sum();
                sum / total.max(1) as f64
            }
            Stat::Percentile(percent) => {
                let rank = (total as f64 * percent / 100.0 - 1e-6).ceil().max(1.0) as u64;
                let mut below = 0;
                let at = counts.iter().position(|&count| {
                    below += count;
                    below >= rank
                });
                at.map_or(0.0, |at| self.values[at])
            }
        };
        stats.iter().map(figure).collect()
    }
}

// === impl Difference ===

impl Difference {
    fn new(base: f64, new: f64, changes: &mut [f64]) -> Self {
        changes.sort_by(f64::total_cmp);
        let n = changes.len();
        let at = |share: f64| changes[((n - 1) as f64 * share).round() as usize];
        let below = changes.iter().filter(|&&change| change <= 0.0).count();
        let above = changes.iter().filter(|&&change| change >= 0.0).count();
        let p = (2.0 * below.min(above) as f64 / n as f64).min(1.0);
        Self { base, new, interval: (at(0.025), at(0.975)), p }
    }

    /// new / base - 1.
    pub fn change(&self) -> f64 {
        change(self.base, self.new)
    }
}

#[cfg(test)]
mod tests;
