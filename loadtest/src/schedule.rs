//! When each request of an open loop is due: computed once, ahead of the run, from a seed and the trace's
//! times or a rate. Nothing that happens during the run can move it. Sends nothing.

pub mod arrivals;
pub mod flow;
pub mod pacer;
pub mod rate;

use std::time::Duration;

use crate::{
    limits,
    random::splitmix,
    schedule::{
        arrivals::{Arrival, arrivals},
        rate::RateShape,
    },
    trace::Trace,
    units::Span,
};

/// One request and when it is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// Nanoseconds after the run's zero.
    pub intended_ns: u64,
    /// The request's number in its workload: of a trace, its row.
    pub row: usize,
}

/// How trace time becomes run time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// This many seconds of trace time in one second.
    TimeScale(f64),
    /// Whatever makes the slice's mean this many requests a second.
    Rate(f64),
}

/// Everything that decides a schedule besides the trace.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Stretch of trace time to replay.
    pub slice: Span,
    /// How fast trace time passes in the run.
    pub pace: Pace,
    /// Whether requests with equal timestamps are spread over the gap to the next timestamp.
    pub spread_bursts: bool,
    /// Seed of the jitter inside a spread burst.
    pub seed: u64,
    /// Run time at which the schedule is cut.
    pub duration: Option<Duration>,
    /// Requests after which the schedule is cut.
    pub requests: Option<usize>,
}

/// Why there can be no such schedule.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// No request of the trace arrives in the slice.
    #[error("--slice {slice} holds no requests: the trace lasts from 0s to {end_s}s")]
    EmptySlice {
        /// The stretch of trace time that was asked for.
        slice: Span,
        /// Where the trace ends, in seconds.
        end_s: f64,
    },
    /// A rate is a mean over time, and all requests of the slice arrive at once.
    #[error("--rate needs a slice with more than one timestamp")]
    OneTimestamp,
    /// It would be cut before its first request.
    #[error("--duration ends before the first request is due")]
    TooShort,
    /// It would have more requests than memory is kept for.
    #[error(
        "more than {most} requests: shorten --duration or lower the rate",
        most = limits::SCHEDULE_REQUESTS_MAX
    )]
    TooLong,
}

/// Makes the schedule, in order of time; an error says why it would be empty.
pub fn plan(trace: &Trace, timing: &Timing) -> Result<Vec<Due>, ScheduleError> {
    let rows = trace.slice(&timing.slice);
    if rows.is_empty() {
        let end_s = trace.end_ms() as f64 / 1e3;
        return Err(ScheduleError::EmptySlice { slice: timing.slice, end_s });
    }
    let start_ms = timing.slice.start.as_secs_f64() * 1e3;
    let end_ms =
        timing.slice.end.map_or(f64::INFINITY, |end| end.as_secs_f64() * 1e3).min(trace.end_ms() as f64);
    let speed = match timing.pace {
        Pace::TimeScale(speed) => speed,
        Pace::Rate(rate) => rate * (end_ms - start_ms) / 1e3 / rows.len() as f64,
    };
    if speed <= 0.0 {
        return Err(ScheduleError::OneTimestamp);
    }
    let cut_ns = timing.duration.map_or(u128::MAX, |d| d.as_nanos());
    let schedule: Vec<_> = rows
        .clone()
        .zip(arrivals_ms(trace, rows, timing))
        .map(|(row, ms)| Due { intended_ns: ((ms - start_ms) / speed * 1e6).round() as u64, row })
        .take_while(|due| u128::from(due.intended_ns) < cut_ns)
        .take(timing.requests.unwrap_or(usize::MAX))
        .collect();
    if schedule.is_empty() { Err(ScheduleError::TooShort) } else { Ok(schedule) }
}

/// Arrivals of a process, in place of recorded ones.
#[derive(Debug, Clone)]
pub struct Process {
    /// Requests a second, over time.
    pub shape: RateShape,
    /// How the gaps between requests vary around the rate.
    pub arrival: Arrival,
    /// Shape of gamma gaps.
    pub burstiness: f64,
    /// Decides every gap: equal seeds give equal times.
    pub seed: u64,
    /// Run time at which the schedule is cut.
    pub duration: Option<Duration>,
}

/// Makes a schedule of the requests `rows`, in order, at a process's arrivals.
pub fn draw(process: &Process, rows: std::ops::Range<usize>) -> Result<Vec<Due>, ScheduleError> {
    let cut_ns = process.duration.map_or(u128::MAX, |d| d.as_nanos());
    let times = arrivals(&process.shape, process.arrival, process.burstiness, process.seed);
    let schedule: Vec<_> = times
        .take_while(|&ns| u128::from(ns) < cut_ns)
        .zip(rows)
        .map(|(intended_ns, row)| Due { intended_ns, row })
        .take(limits::SCHEDULE_REQUESTS_MAX + 1)
        .collect();
    match schedule.len() {
        0 => Err(ScheduleError::TooShort),
        n if n > limits::SCHEDULE_REQUESTS_MAX => Err(ScheduleError::TooLong),
        _ => Ok(schedule),
    }
}

/// Arrivals in trace time. A spread burst of k lies in k equal parts of its gap, one request in each, at a
/// place the seed chooses: order is kept, and the mean rate within the gap is even.
fn arrivals_ms(trace: &Trace, rows: std::ops::Range<usize>, timing: &Timing) -> Vec<f64> {
    let mut arrivals = Vec::with_capacity(rows.len());
    let mut first = rows.start;
    for burst in trace.rows[rows.clone()].chunk_by(|a, b| a.timestamp_ms == b.timestamp_ms) {
        let at_ms = burst[0].timestamp_ms as f64;
        let next_ms = trace.rows.get(first + burst.len()).map_or(trace.end_ms(), |row| row.timestamp_ms);
        let part_ms = (next_ms as f64 - at_ms) / burst.len() as f64;
        for i in 0..burst.len() {
            let place = i as f64 + unit(splitmix(timing.seed ^ splitmix((first + i) as u64)));
            arrivals.push(if timing.spread_bursts { at_ms + place * part_ms } else { at_ms });
        }
        first += burst.len();
    }
    arrivals
}

/// 53 bits as a number in [0, 1).
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trace::Row;

    fn trace(timestamps: &[u64]) -> Trace {
        let row =
            |&timestamp_ms| Row { timestamp_ms, input_tokens: 1, output_tokens: 1, blocks: Box::default() };
        Trace::from(timestamps.iter().map(row).collect::<Vec<_>>())
    }

    fn timing(slice: &str, pace: Pace, spread_bursts: bool) -> Timing {
        let slice = slice.parse().unwrap();
        Timing { slice, pace, spread_bursts, seed: 42, duration: None, requests: None }
    }

    fn due_ms(schedule: &[Due]) -> Vec<u64> {
        schedule.iter().map(|due| due.intended_ns / 1_000_000).collect()
    }

    #[test]
    fn slice_and_speed() {
        let trace = trace(&[0, 0, 3000, 6000, 9000]);
        let schedule = plan(&trace, &timing("3s..9s", Pace::TimeScale(10.0), false)).unwrap();
        assert_eq!(due_ms(&schedule), [0, 300]);
        assert_eq!(schedule[0].row, 2);
    }

    #[test]
    fn a_rate_is_the_mean_over_the_slice() {
        let trace = trace(&[0, 0, 3000, 6000, 9000]);
        // Five requests in 0s..12s, the last gap counted: at 2 requests/s they take 2.5 s.
        let schedule = plan(&trace, &timing("..", Pace::Rate(2.0), false)).unwrap();
        assert_eq!(due_ms(&schedule), [0, 0, 625, 1250, 1875]);
        let one = plan(&self::trace(&[5, 5]), &timing("..", Pace::Rate(2.0), false));
        assert!(one.is_ok(), "{one:?}");
        let one = plan(&self::trace(&[0, 0]), &timing("..", Pace::Rate(2.0), false));
        assert_eq!(one, Err(ScheduleError::OneTimestamp));
    }

    #[test]
    fn cuts() {
        let trace = trace(&[0, 1000, 2000, 3000]);
        let base = timing("..", Pace::TimeScale(1.0), false);
        let cut = Timing { duration: Some(Duration::from_secs(2)), ..base };
        assert_eq!(due_ms(&plan(&trace, &cut).unwrap()), [0, 1000]);
        let cut = Timing { requests: Some(3), ..base };
        assert_eq!(due_ms(&plan(&trace, &cut).unwrap()), [0, 1000, 2000]);
        let error = plan(&trace, &timing("1h..2h", Pace::TimeScale(1.0), false)).unwrap_err().to_string();
        assert!(error.contains("from 0s to 4s"), "{error}");
    }

    proptest! {
        #[test]
        fn a_spread_burst_keeps_order_and_stays_in_its_gap(
            gaps in prop::collection::vec(prop_oneof![Just(0u64), 1u64..5000], 1..60),
            seed: u64,
        ) {
            let stamps: Vec<u64> = gaps.iter().scan(0, |at, gap| { *at += gap; Some(*at) }).collect();
            let trace = trace(&stamps);
            let timing = Timing { seed, ..timing("..", Pace::TimeScale(1.0), true) };
            let schedule = plan(&trace, &timing).unwrap();
            prop_assert_eq!(schedule.len(), stamps.len());
            prop_assert!(schedule.is_sorted_by_key(|due| due.intended_ns));
            for due in &schedule {
                let from = stamps[due.row];
                let to = stamps.iter().copied().find(|&at| at > from).unwrap_or(trace.end_ms());
                // Half a nanosecond of rounding at most.
                prop_assert!((from * 1_000_000..=to * 1_000_000).contains(&due.intended_ns));
            }
            // Each of a burst's k requests lies in its own k-th of the gap.
            for (i, due) in schedule.iter().enumerate() {
                let burst: Vec<_> = (0..stamps.len()).filter(|&j| stamps[j] == stamps[i]).collect();
                let to = stamps.iter().copied().find(|&at| at > stamps[i]).unwrap_or(trace.end_ms());
                let part = (to - stamps[i]) as f64 * 1e6 / burst.len() as f64;
                let low = stamps[i] as f64 * 1e6 + part * (i - burst[0]) as f64;
                prop_assert!((low - 1.0..=low + part + 1.0).contains(&(due.intended_ns as f64)));
            }
        }

        #[test]
        fn the_seed_alone_decides(seed: u64) {
            let trace = trace(&[0, 0, 0, 0, 3000]);
            let timing = Timing { seed, ..timing("..", Pace::TimeScale(1.0), true) };
            prop_assert_eq!(plan(&trace, &timing).unwrap(), plan(&trace, &timing).unwrap());
            let other = Timing { seed: seed ^ 1, ..timing };
            prop_assert_ne!(plan(&trace, &timing).unwrap(), plan(&trace, &other).unwrap());
        }
    }
}
