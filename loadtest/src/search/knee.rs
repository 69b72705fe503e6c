//! The search for the most load that keeps an objective: growth, then bisection, then repetition at the edge.
//! Says which load to try next; measures nothing.

use crate::limits;

/// What to search for.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The first load tried.
    pub from: f64,
    /// The highest load tried.
    pub to: f64,
    /// How close the edge's two sides come, such as 0.05.
    pub tolerance: f64,
    /// Probes at each side of the edge.
    pub repeats: usize,
    /// Loads are whole numbers.
    pub whole: bool,
}

/// One load that was tried.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    /// The load: requests a second, or requests under way.
    pub load: f64,
    /// Share of requests that kept the objective over the share that must: at least 1 if it was kept.
    pub attainment: f64,
    /// Requests that ended in it: its weight among the probes of one load.
    pub requests: u64,
}

/// How the search ended, with the loads it found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Knee {
    /// The objective is kept at `low` and lost at `high`, each on average over its probes; `load` lies
    /// between, where the line between both attainments, straight over the load's logarithm, crosses 1.
    Knee {
        /// The most load that keeps the objective.
        load: f64,
        /// Lower side of the edge, where the objective is kept.
        low: f64,
        /// Upper side of the edge, where the objective is lost.
        high: f64,
    },
    /// Kept at the highest load allowed.
    AboveAll(f64),
    /// Lost at the lowest load tried.
    BelowAll(f64),
}

/// A search under way.
#[derive(Debug)]
pub struct Search {
    settings: Settings,
    probes: Vec<Probe>,
    /// Thought to keep the objective; it may still have no probe.
    low: Option<f64>,
    /// Thought to lose it.
    high: Option<f64>,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step {
    /// Measure at this load, then call [`Search::add`].
    Try(f64),
    /// The search is over.
    Done(Knee),
}

impl Search {
    /// A search that has not tried any load yet.
    pub fn new(settings: Settings) -> Self {
        Self { settings, probes: Vec::new(), low: None, high: None }
    }

    /// Takes a probe in.
    pub fn add(&mut self, probe: Probe) {
        self.probes.push(probe);
        let kept = self.pooled(probe.load).is_some_and(|(attainment, _)| attainment >= 1.0);
        match (kept, self.low, self.high) {
            // Growth and bisection move the side that the probe's outcome belongs to.
            (true, low, high) if low.is_none_or(|low| probe.load > low) => {
                self.low = Some(probe.load);
                if high.is_some_and(|high| high <= probe.load) {
                    self.high = Some(self.above(probe.load));
                }
            }
            (false, low, high) if high.is_none_or(|high| probe.load < high) => {
                self.high = Some(probe.load);
                if low.is_some_and(|low| low >= probe.load) {
                    self.low = self.below(probe.load);
                }
            }
            // A repetition at the edge turned its side over: the edge walks one step.
            (true, _, Some(high)) if high == probe.load => {
                self.low = Some(high);
                self.high = Some(self.above(high));
            }
            (false, Some(low), _) if low == probe.load => {
                self.high = Some(low);
                self.low = self.below(low);
            }
            _ => {}
        }
    }

    /// What to do next.
    pub fn next(&self) -> Step {
        let Settings { from, to, repeats, .. } = self.settings;
        let clamp = |load: f64| self.round(load.min(to));
        if self.probes.is_empty() {
            return Step::Try(clamp(from));
        }
        match (self.low, self.high) {
            (Some(low), None) if low >= to => Step::Done(Knee::AboveAll(low)),
            (Some(low), None) => Step::Try(clamp(low * 2.0)),
            (None, Some(high)) if self.is_lowest(high) => Step::Done(Knee::BelowAll(high)),
            (None, Some(high)) => Step::Try(self.round(high / 2.0)),
            (Some(low), Some(high)) => {
                let exhausted = self.probes.len() >= limits::SEARCH_PROBES_MAX;
                if !self.is_edge(low, high) {
                    return Step::Try(self.middle(low, high));
                }
                match [low, high].into_iter().find(|&load| self.count(load) < repeats) {
                    Some(load) if !exhausted => Step::Try(load),
                    _ => Step::Done(self.knee(low, high)),
                }
            }
            (None, None) => Step::Try(clamp(from)),
        }
    }

    fn knee(&self, low: f64, high: f64) -> Knee {
        let attainment = |load| self.pooled(load).map_or(1.0, |(attainment, _)| attainment);
        let (above, below) = (attainment(low) - 1.0, 1.0 - attainment(high));
        let share = if above + below > 0.0 { (above / (above + below)).clamp(0.0, 1.0) } else { 0.5 };
        let load = self.round(low * (high / low).powf(share)).max(low);
        // Between two whole numbers there is none: the lower one keeps the objective.
        let load = if self.settings.whole { low } else { load };
        Knee::Knee { load, low, high }
    }

    /// Mean attainment at `load` over all its probes, by requests, and how many probes.
    fn pooled(&self, load: f64) -> Option<(f64, usize)> {
        let probes: Vec<_> = self.probes.iter().filter(|probe| probe.load == load).collect();
        let requests: u64 = probes.iter().map(|probe| probe.requests.max(1)).sum();
        let sum: f64 = probes.iter().map(|probe| probe.attainment * probe.requests.max(1) as f64).sum();
        (!probes.is_empty()).then(|| (sum / requests as f64, probes.len()))
    }

    fn count(&self, load: f64) -> usize {
        self.pooled(load).map_or(0, |(_, count)| count)
    }

    fn round(&self, load: f64) -> f64 {
        if self.settings.whole { load.round().max(1.0) } else { load }
    }

    /// One step above `load`.
    fn above(&self, load: f64) -> f64 {
        let step = load * (1.0 + self.settings.tolerance);
        if self.settings.whole { step.floor().max(load + 1.0) } else { step }
    }

    /// One step below `load`, if there is any.
    fn below(&self, load: f64) -> Option<f64> {
        let step = load / (1.0 + self.settings.tolerance);
        let step = if self.settings.whole { step.ceil().min(load - 1.0) } else { step };
        (!self.is_lowest(load)).then_some(step)
    }

    fn is_lowest(&self, load: f64) -> bool {
        if self.settings.whole { load <= 1.0 } else { load <= self.settings.from * limits::SEARCH_SHRINK_MIN }
    }

    fn is_edge(&self, low: f64, high: f64) -> bool {
        let close = high / low <= 1.0 + self.settings.tolerance * 1.000_001;
        close || (self.settings.whole && high - low <= 1.0)
    }

    fn middle(&self, low: f64, high: f64) -> f64 {
        let middle = (low * high).sqrt();
        if self.settings.whole { middle.round().clamp(low + 1.0, high - 1.0) } else { middle }
    }
}

#[cfg(test)]
mod tests;
