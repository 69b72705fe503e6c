//! Where requests went lately: how many to which worker, and whose models' they were. Each worker's own count
//! of the times it was chosen is read now and then; a request moves nothing more for it. A worker that serves
//! several models has one count for all of them.

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
};

use serde::Serialize;

use super::gains::OTHERS;
use crate::{
    fleet::Worker,
    limits::{MAX_HISTORY_MODELS, MAX_HISTORY_STEPS, MINUTE_STEPS},
};

/// Workers that are in the fleet no more; no worker is called so.
const GONE: &str = "(gone)";
/// What a worker serves that has not said it yet; no model is called so.
const NOT_KNOWN: &str = "(not known)";

/// How often a worker was chosen since it came.
#[derive(Debug)]
pub(super) struct Choices {
    /// Its name.
    pub(super) worker: String,
    /// What it serves, for people.
    pub(super) models: String,
    /// How often.
    pub(super) times: u64,
}

/// The last hour's requests, by worker.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    here: BTreeMap<String, ToWorker>,
    /// Those to workers that have left, by models.
    gone: BTreeMap<String, ToWorker>,
}

#[derive(Debug, Default)]
struct ToWorker {
    models: String,
    /// As it was at the last sample.
    times: u64,
    /// Requests between two samples, the newest last.
    gained: VecDeque<u32>,
}

/// Requests of some models to one worker. A second attempt counts as one, too.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct TrafficRow {
    models: String,
    worker: String,
    /// Requests of the last minute.
    minute: u64,
    /// Requests of the last hour.
    hour: u64,
}

impl Choices {
    pub(super) fn of(worker: &Worker) -> Self {
        let models = match (worker.primary_model(), worker.model_count()) {
            (None, _) => NOT_KNOWN.to_owned(),
            (Some(only), 0 | 1) => only,
            (Some(first), count) => format!("{first} and {} more", count - 1),
        };
        Self { worker: worker.name.clone(), models, times: worker.times_chosen() }
    }
}

impl Traffic {
    /// Takes a sample of all workers.
    pub(super) fn sample(&mut self, all: Vec<Choices>) {
        // One that drains and one that has taken its address have one name and one count.
        let mut now: BTreeMap<String, Choices> = BTreeMap::new();
        for choices in all {
            let known = now.get(&choices.worker).map_or(0, |known| known.times);
            if choices.times >= known {
                now.insert(choices.worker.clone(), choices);
            }
        }
        let mut before = mem::take(&mut self.here);
        for (name, Choices { models, times, .. }) in now {
            let mut to = before.remove(&name).unwrap_or_default();
            // The count of a worker that has left and come back begins anew.
            to.push(times.checked_sub(to.times).unwrap_or(times));
            (to.models, to.times) = (models, times);
            self.here.insert(name, to);
        }
        for to in self.gone.values_mut() {
            to.push(0);
        }
        for mut to in before.into_values() {
            to.push(0);
            let has_room = self.gone.len() < MAX_HISTORY_MODELS || self.gone.contains_key(&to.models);
            let models = if has_room { to.models.clone() } else { OTHERS.to_owned() };
            self.gone.entry(models).or_default().add(&to);
        }
        self.gone.retain(|_, to| to.last(MAX_HISTORY_STEPS) > 0);
    }

    /// Of each worker that was sent anything.
    pub(super) fn rows(&self) -> Vec<TrafficRow> {
        let here = self.here.iter().map(|(worker, to)| to.row(worker, &to.models));
        let gone = self.gone.iter().map(|(models, to)| to.row(GONE, models));
        here.chain(gone).filter(|row| row.hour > 0).collect()
    }
}

impl ToWorker {
    fn push(&mut self, gained: u64) {
        if self.gained.len() >= MAX_HISTORY_STEPS {
            self.gained.pop_front();
        }
        self.gained.push_back(u32::try_from(gained).unwrap_or(u32::MAX));
    }

    /// Both end at the same sample.
    fn add(&mut self, other: &Self) {
        while self.gained.len() < other.gained.len() {
            self.gained.push_front(0);
        }
        for (own, more) in self.gained.iter_mut().rev().zip(other.gained.iter().rev()) {
            *own = own.saturating_add(*more);
        }
    }

    fn last(&self, samples: usize) -> u64 {
        self.gained.iter().rev().take(samples).map(|gained| u64::from(*gained)).sum()
    }

    fn row(&self, worker: &str, models: &str) -> TrafficRow {
        TrafficRow {
            models: models.to_owned(),
            worker: worker.to_owned(),
            minute: self.last(MINUTE_STEPS),
            hour: self.last(MAX_HISTORY_STEPS),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use keyway_core::policy::Reason;

    use super::*;
    use crate::{
        clock::Clock,
        fleet::{Fleet, Model, ejection::Ejections},
        metrics::Metrics,
    };

    fn choices(worker: &str, models: &str, times: u64) -> Choices {
        Choices { worker: worker.to_owned(), models: models.to_owned(), times }
    }

    fn row(models: &str, worker: &str, minute: u64, hour: u64) -> TrafficRow {
        TrafficRow { models: models.to_owned(), worker: worker.to_owned(), minute, hour }
    }

    #[test]
    fn a_minute_and_an_hour_pass_and_then_their_requests_are_forgotten() {
        let mut traffic = Traffic::default();
        traffic.sample(vec![choices("w:1", "a", 7), choices("w:2", "b", 0)]);
        for sample in 1..=MAX_HISTORY_STEPS {
            let (minute, hour) = match sample {
                1 => (7, 7),
                2..=MINUTE_STEPS => (9, 9),
                _ if sample == MINUTE_STEPS + 1 => (2, 9),
                _ => (0, 9),
            };
            assert_eq!(traffic.rows(), [row("a", "w:1", minute, hour)], "{sample}");
            traffic.sample(vec![choices("w:1", "a", 9), choices("w:2", "b", 0)]);
        }
        assert_eq!(traffic.rows(), [row("a", "w:1", 0, 2)]);
        traffic.sample(vec![choices("w:1", "a", 9), choices("w:2", "b", 0)]);
        assert!(traffic.rows().is_empty(), "{:?}", traffic.rows());
    }

    #[test]
    fn what_went_to_workers_that_have_left_stays_for_an_hour() {
        let mut traffic = Traffic::default();
        traffic.sample(vec![choices("w:1", "a", 5)]);
        traffic.sample(vec![choices("w:1", "a", 6), choices("w:2", "a", 3), choices("w:3", "b", 4)]);
        traffic.sample(vec![choices("w:3", "b", 4)]);
        assert_eq!(traffic.rows(), [row("b", "w:3", 4, 4), row("a", GONE, 9, 9)]);
        // The first is back, and counts from nothing.
        traffic.sample(vec![choices("w:1", "a", 2), choices("w:3", "b", 4)]);
        assert_eq!(traffic.rows(), [row("a", "w:1", 2, 2), row("b", "w:3", 4, 4), row("a", GONE, 9, 9)]);
        for _ in 0..MAX_HISTORY_STEPS {
            traffic.sample(vec![choices("w:1", "a", 2)]);
        }
        assert_eq!((traffic.rows(), traffic.gone.len()), (vec![], 0));
    }

    #[test]
    fn very_many_models_of_workers_that_have_left_are_one_row_at_last() {
        let mut traffic = Traffic::default();
        let worker = |i: usize| choices(&format!("w:{i}"), &format!("m{i}"), 1);
        traffic.sample((0..MAX_HISTORY_MODELS + 5).map(worker).collect());
        traffic.sample(Vec::new());
        assert_eq!(traffic.rows().len(), MAX_HISTORY_MODELS + 1);
        assert!(traffic.rows().contains(&row(OTHERS, GONE, 5, 5)), "{:?}", traffic.rows());
    }

    #[test]
    fn one_that_drains_and_one_at_its_address_are_counted_once() {
        let mut traffic = Traffic::default();
        traffic.sample(vec![choices("w:1", "a", 5), choices("w:1", "a", 0)]);
        traffic.sample(vec![choices("w:1", "a", 0), choices("w:1", "a", 8)]);
        assert_eq!(traffic.rows(), [row("a", "w:1", 8, 8)]);
    }

    #[test]
    fn choices_are_a_worker_s_own_count_under_its_first_model() {
        let metrics = Metrics::new().unwrap();
        let config = "http://127.0.0.1:1".parse().unwrap();
        let clock = Clock::start();
        let fleet = Fleet::new(&[config], Duration::ZERO, &Ejections::new(clock, None));
        let worker = Arc::clone(&fleet.all()[0]);
        let of = |worker: &Worker| {
            let Choices { models, times, .. } = Choices::of(worker);
            (models, times)
        };
        assert_eq!(of(&worker), (NOT_KNOWN.to_owned(), 0));
        let series = String::from_utf8(metrics.render()).unwrap();
        assert!(!series.contains("127.0.0.1:1"), "a look makes no series: {series}");
        worker.series(&metrics).picked(Reason::Prefix);
        worker.series(&metrics).picked(Reason::Only);
        let model = |id: &str| {
            let json = serde_json::value::to_raw_value(id).unwrap();
            Model {
                id: id.to_owned(),
                parent: None,
                json,
                context: None,
                numerics_id: None,
                kv_source_port: None,
            }
        };
        worker.set_models(vec![model("base")]);
        assert_eq!(of(&worker), ("base".to_owned(), 2));
        worker.set_models(vec![model("base"), model("lora-1"), model("lora-2")]);
        assert_eq!(of(&worker), ("base and 2 more".to_owned(), 2));
    }
}
