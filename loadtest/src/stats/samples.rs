//! The figures of single requests that a report keeps, so that two runs can be compared request by request.
//! Of a long run it keeps the share of requests whose numbers hash lowest, which are the same requests in
//! every run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{client::record::Record, limits, random::splitmix, stats::hdr};

/// Buckets for each doubling of a time between tokens, as an exponent: within 0.4 %.
pub const ITL_HALF_MAGNITUDE: u32 = 7;

/// One good answer, in microseconds. Times to the first token and to the end count from when it was due.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The request's number in its workload, by which two runs are paired.
    pub row: usize,
    /// When it was due, after the run's zero.
    pub due_us: u64,
    /// To the first token.
    pub ttft: Option<u64>,
    /// From the first to the second event with text.
    pub ttst: Option<u64>,
    /// Per token after the first.
    pub tpot: Option<u64>,
    /// To the end of the answer, which every good answer has.
    pub e2e: u64,
    /// Between events with text: bucket and count.
    pub itl: Vec<(usize, u64)>,
}

/// How the lists of a report's samples are damaged.
#[derive(Debug, thiserror::Error)]
pub enum SamplesError {
    /// One of them does not hold what it should.
    #[error("`samples` is damaged: {0}")]
    Json(#[from] serde_json::Error),
    /// They are not of one length.
    #[error("`samples` is damaged: its lists differ in length")]
    Lengths,
}

/// Collects single good answers, at most [`limits::SAMPLES_MAX`] of them.
#[derive(Debug, Clone, Default)]
pub struct Reservoir {
    /// By (hash of the number, number): the last is the first to go.
    kept: BTreeMap<(u64, usize), Sample>,
    seen: u64,
}

/// Reservoir in the shape of run.json: a list for each figure, all of the same length.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Columns {
    /// Good answers; more than are kept if there were too many.
    pub of: u64,
    /// Numbers of the requests, in order of when they were due.
    pub row: Box<RawValue>,
    /// When each was due, in microseconds.
    pub due_us: Box<RawValue>,
    /// The figures, in microseconds; null where an answer has none.
    pub ttft_us: Box<RawValue>,
    /// From the first to the second event with text, in microseconds; null with fewer than two.
    pub ttst_us: Box<RawValue>,
    /// Mean time of a token after the first, in microseconds; null where an answer has none.
    pub tpot_us: Box<RawValue>,
    /// From when each was due to its end, in microseconds; never null.
    pub e2e_us: Box<RawValue>,
    /// Times between events with text: for each request bucket, count, bucket, count…; buckets as in
    /// HdrHistogram with 128 for each doubling.
    pub itl: Box<RawValue>,
}

// === impl Reservoir ===

impl Reservoir {
    /// Adds a good answer.
    pub fn add(&mut self, record: &Record) {
        self.seen += 1;
        let key = key(record.row);
        if !self.has_room(key) {
            return;
        }
        let us = |ns: u64| (ns + 500) / 1000;
        let mut itl = BTreeMap::new();
        for gaps in record.exchange.gaps_us.chunk_by(|a, b| a == b) {
            *itl.entry(hdr::bucket(gaps[0].into(), ITL_HALF_MAGNITUDE)).or_insert(0) += gaps.len() as u64;
        }
        let sample = Sample {
            row: record.row,
            due_us: us(record.intended_ns),
            ttft: record.ttft_ns().map(us),
            ttst: record.ttst_ns().map(us),
            tpot: record.tpot_ns().map(us),
            e2e: us(record.e2e_ns()),
            itl: itl.into_iter().collect(),
        };
        self.kept.insert(key, sample);
    }

    /// Adds those of `of` good answers that another reservoir has kept.
    pub fn add_kept(&mut self, of: u64, samples: impl IntoIterator<Item = Sample>) {
        self.seen += of;
        for sample in samples {
            let key = key(sample.row);
            if self.has_room(key) {
                self.kept.insert(key, sample);
            }
        }
    }

    /// Whether it keeps this one; another may have to go for it.
    fn has_room(&mut self, key: (u64, usize)) -> bool {
        if self.kept.len() < limits::SAMPLES_MAX {
            return true;
        }
        let is_lower = self.kept.last_key_value().is_some_and(|(&last, _)| key < last);
        if is_lower {
            self.kept.pop_last();
        }
        is_lower
    }

    /// Those kept, in no order that matters.
    pub fn kept(&self) -> impl Iterator<Item = &Sample> {
        self.kept.values()
    }

    /// The samples in order of when they were due.
    pub fn columns(&self) -> Columns {
        let mut kept: Vec<&Sample> = self.kept.values().collect();
        kept.sort_by_key(|sample| (sample.due_us, sample.row));
        Columns {
            of: self.seen,
            row: column(&kept, |s| s.row),
            due_us: column(&kept, |s| s.due_us),
            ttft_us: column(&kept, |s| s.ttft),
            ttst_us: column(&kept, |s| s.ttst),
            tpot_us: column(&kept, |s| s.tpot),
            e2e_us: column(&kept, |s| s.e2e),
            itl: column(&kept, |s| s.itl.iter().flat_map(|&(b, n)| [b as u64, n]).collect::<Vec<_>>()),
        }
    }
}

/// By what a request's place in a reservoir is decided.
fn key(row: usize) -> (u64, usize) {
    (splitmix(row as u64), row)
}

/// One line of JSON: a pretty-printed list would take a line for each number.
fn column<T: Serialize>(samples: &[&Sample], figure: impl Fn(&Sample) -> T) -> Box<RawValue> {
    let list: Vec<T> = samples.iter().map(|sample| figure(sample)).collect();
    // Numbers always serialise.
    serde_json::value::to_raw_value(&list).unwrap_or_default()
}

// === impl Columns ===

impl Columns {
    /// Reads the lists back into samples; an error says how they are damaged.
    pub fn read(&self) -> Result<Vec<Sample>, SamplesError> {
        let rows: Vec<usize> = serde_json::from_str(self.row.get())?;
        let due: Vec<u64> = serde_json::from_str(self.due_us.get())?;
        let times = |column: &RawValue| serde_json::from_str::<Vec<Option<u64>>>(column.get());
        let (ttft, ttst, tpot) = (times(&self.ttft_us)?, times(&self.ttst_us)?, times(&self.tpot_us)?);
        let e2e: Vec<u64> = serde_json::from_str(self.e2e_us.get())?;
        let itl: Vec<Vec<u64>> = serde_json::from_str(self.itl.get())?;
        let lengths = [due.len(), ttft.len(), ttst.len(), tpot.len(), e2e.len(), itl.len()];
        if lengths.iter().any(|&length| length != rows.len()) {
            return Err(SamplesError::Lengths);
        }
        let sample = |i: usize| Sample {
            row: rows[i],
            due_us: due[i],
            ttft: ttft[i],
            ttst: ttst[i],
            tpot: tpot[i],
            e2e: e2e[i],
            itl: itl[i].chunks_exact(2).map(|pair| (pair[0] as usize, pair[1])).collect(),
        };
        Ok((0..rows.len()).map(sample).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::record::tests::good;

    #[test]
    fn columns_are_read_back() {
        let mut samples = Reservoir::default();
        for row in [3, 1, 2] {
            let mut record = good(10 * row, 10 * row, 10 * row + 7, 10 * row + 20);
            record.row = row as usize;
            samples.add(&record);
        }
        let json = serde_json::to_string(&samples.columns()).unwrap();
        let read = serde_json::from_str::<Columns>(&json).unwrap().read().unwrap();
        assert_eq!(read.iter().map(|s| s.row).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(read.iter().all(|s| (s.ttft, s.tpot, s.e2e) == (Some(7000), Some(5000), 20_000)));
        let gap = hdr::middle(read[0].itl[0].0, ITL_HALF_MAGNITUDE);
        assert!((gap - 5000.0).abs() < 20.0 && read[0].itl[0].1 == 2, "{gap}");
    }

    #[test]
    fn of_a_long_run_the_same_requests_are_kept_whatever_the_order() {
        let rows = |order: &mut dyn Iterator<Item = usize>| {
            let mut samples = Reservoir::default();
            for row in order {
                samples.add(&crate::client::record::Record { row, ..good(0, 0, 1, 2) });
            }
            assert_eq!(
                (samples.kept.len(), samples.seen),
                (limits::SAMPLES_MAX, limits::SAMPLES_MAX as u64 + 500)
            );
            samples.kept.into_keys().collect::<Vec<_>>()
        };
        let all = limits::SAMPLES_MAX + 500;
        assert_eq!(rows(&mut (0..all)), rows(&mut (0..all).rev()));
    }
}
