//! Rows that are not in the file yet. Of each hour there are only so many, those included that are in the
//! file already; what comes beyond them is added into one row for the rest.

use std::collections::{BTreeMap, HashMap};

use super::{Counts, Series};
use crate::limits::USAGE_HELD_HOURS;

/// One hour's row: the hour since 1970, whose it is, its sums.
pub(super) type HourRow = (u32, Series, Counts);

/// The rows of some hours.
#[derive(Debug)]
pub(super) struct Pending {
    max_series: usize,
    /// By the hour since 1970. Of the newest hour rows stay when they are written, with sums of 0.
    hours: BTreeMap<u32, HashMap<Series, Counts>>,
    requests: u64,
}

impl Pending {
    pub(super) fn new(max_series: usize) -> Self {
        Self { max_series, hours: BTreeMap::new(), requests: 0 }
    }

    /// Adds to a row; whether that was the one for the rest.
    pub(super) fn add(&mut self, hour: u32, series: Series, counts: &Counts) -> bool {
        // Of several hours there are only where the file cannot be written.
        let earlier = self.hours.range(..hour).take(USAGE_HELD_HOURS).count();
        let rows = self.hours.entry(hour).or_default();
        let has_room = earlier < USAGE_HELD_HOURS && rows.len() < self.max_series;
        let is_other = !has_room && !rows.contains_key(&series);
        let series = if is_other { Series::other() } else { series };
        rows.entry(series).or_default().add(counts);
        self.requests += counts.requests();
        is_other
    }

    /// These rows of an hour are in the file.
    pub(super) fn know(&mut self, hour: u32, known: Vec<Series>) {
        let rows = self.hours.entry(hour).or_default();
        for series in known {
            rows.entry(series).or_default();
        }
    }

    /// Takes what is new out, for the file.
    pub(super) fn take(&mut self) -> Vec<HourRow> {
        let new = self.all();
        self.requests = 0;
        let newest = self.hours.keys().next_back().copied();
        self.hours.retain(|hour, _| Some(*hour) == newest);
        self.hours.values_mut().flat_map(HashMap::values_mut).for_each(|counts| *counts = Counts::default());
        new
    }

    /// Takes back what could not be written.
    pub(super) fn put_back(&mut self, batch: Vec<HourRow>) {
        for (hour, series, counts) in batch {
            self.add(hour, series, &counts);
        }
    }

    /// All that is not in the file.
    pub(super) fn all(&self) -> Vec<HourRow> {
        let rows = self.hours.iter().flat_map(|(hour, rows)| rows.iter().map(|row| (*hour, row)));
        let new = rows.filter(|(_, (_, counts))| counts.requests() > 0);
        new.map(|(hour, (series, counts))| (hour, series.clone(), *counts)).collect()
    }

    /// Requests that are not in the file.
    pub(super) fn requests(&self) -> u64 {
        self.requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{BilledEnd, Tokens};

    fn one() -> Counts {
        Counts::of(
            BilledEnd::Completed,
            Tokens { prompt: 2, cached: 1, generated: 3 },
            Tokens::default(),
            None,
        )
    }

    fn of(model: usize) -> Series {
        Series::new(None, &model.to_string())
    }

    fn requests(rows: &[HourRow]) -> u64 {
        rows.iter().map(|(.., counts)| counts.requests()).sum()
    }

    #[test]
    fn an_hour_has_so_many_rows_and_the_rest_is_one() {
        let mut pending = Pending::new(3);
        let others = (0..10).filter(|model| pending.add(1, of(*model), &one())).count();
        assert_eq!(others, 7);
        assert!(!pending.add(1, of(0), &one()), "who is in stays in");
        let first = pending.take();
        assert_eq!((first.len(), requests(&first), pending.requests()), (4, 11, 0));
        // What was written still counts against the bound; another hour has rows of its own.
        assert!(pending.add(1, of(5), &one()) && !pending.add(2, of(5), &one()));
        assert_eq!(requests(&pending.take()), 2);
        assert_eq!(pending.hours.len(), 1, "only the newest hour is remembered");
    }

    #[test]
    fn rows_of_the_file_count_against_the_bound() {
        let mut pending = Pending::new(2);
        pending.know(1, vec![of(0), of(1)]);
        assert!(pending.all().is_empty());
        assert!(!pending.add(1, of(1), &one()) && pending.add(1, of(2), &one()));
    }

    #[test]
    fn what_is_put_back_is_there_once_and_memory_is_bounded() {
        let mut pending = Pending::new(100);
        for hour in 0..1_000 {
            for model in 0..10 {
                pending.add(hour, of(model), &one());
            }
            let batch = pending.take();
            pending.put_back(batch);
        }
        assert_eq!((pending.requests(), requests(&pending.all())), (10_000, 10_000));
        let rows: usize = pending.hours.values().map(HashMap::len).sum();
        assert!(rows <= USAGE_HELD_HOURS * 10 + 1_000 + 10, "{rows}");
    }
}
