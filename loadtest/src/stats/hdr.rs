//! HdrHistograms of microseconds, three significant digits, in the text form that HdrHistogram's libraries
//! exchange (V2, compressed, base64); and the buckets in which a report keeps times between tokens.

use base64::{DecodeError, Engine as _, engine::general_purpose::STANDARD};
use hdrhistogram::{
    Histogram,
    serialization::{DeserializeError, Deserializer, Serializer as _, V2DeflateSerializer},
};

const SIGNIFICANT_DIGITS: u8 = 3;
/// One hour in microseconds; what is longer counts as this.
const HIGHEST_US: u64 = 3_600_000_000;

/// Why a text is no histogram.
#[derive(Debug, thiserror::Error)]
pub enum HdrError {
    /// Its letters are none of base64's, or some are missing.
    #[error("no base64: {0}")]
    Text(#[from] DecodeError),
    /// Its bytes are no histogram.
    #[error("no HdrHistogram: {0}")]
    Histogram(#[from] DeserializeError),
}

/// Index of the log-linear bucket of `value`: 2^(half_magnitude + 1) buckets of width 1, and then
/// 2^half_magnitude for each doubling.
pub fn bucket(value: u64, half_magnitude: u32) -> usize {
    let mask = (2u64 << half_magnitude) - 1;
    let shift = 63 - half_magnitude - (value | mask).leading_zeros();
    ((shift as usize + 1) << half_magnitude) + (value >> shift) as usize - (1 << half_magnitude)
}

/// The middle of bucket number `index`.
pub fn middle(index: usize, half_magnitude: u32) -> f64 {
    let half = 1usize << half_magnitude;
    if index < 2 * half {
        return index as f64;
    }
    let shift = index / half - 1;
    let low = ((index % half + half) as f64) * (1u64 << shift) as f64;
    low + (1u64 << shift) as f64 / 2.0
}

/// Encodes microseconds and how often each occurred.
pub fn encode(counts: impl Iterator<Item = (u64, u64)>) -> String {
    // These bounds are ones that it takes, and a list in memory does not fail.
    let Ok(mut histogram) = Histogram::<u64>::new_with_bounds(1, HIGHEST_US, SIGNIFICANT_DIGITS) else {
        return String::new();
    };
    for (us, count) in counts {
        histogram.saturating_record_n(us.min(HIGHEST_US), count);
    }
    let mut bytes = Vec::new();
    match V2DeflateSerializer::new().serialize(&histogram, &mut bytes) {
        Ok(_) => STANDARD.encode(bytes),
        Err(_) => String::new(),
    }
}

/// What [`encode`] wrote, or another HdrHistogram library: microseconds, within 0.05 %, and how often each
/// occurred, in ascending order.
///
/// # Errors
/// What is no such text.
pub fn decode(text: &str) -> Result<Vec<(u64, u64)>, HdrError> {
    let bytes = STANDARD.decode(text)?;
    let histogram: Histogram<u64> = Deserializer::new().deserialize(&mut bytes.as_slice())?;
    let recorded = histogram.iter_recorded();
    let middle = |us: u64| histogram.median_equivalent(us);
    Ok(recorded.map(|value| (middle(value.value_iterated_to()), value.count_at_value())).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_no_histogram_is_refused() {
        assert!(matches!(decode("not base64!"), Err(HdrError::Text(_))));
        assert!(matches!(decode("aGVsbG8="), Err(HdrError::Histogram(_))));
        assert_eq!(decode(&encode([].into_iter())).unwrap(), []);
    }

    #[test]
    fn what_is_longer_than_an_hour_counts_as_an_hour() {
        let read = decode(&encode([(HIGHEST_US * 3, 2)].into_iter())).unwrap();
        let [(us, 2)] = read[..] else { unreachable!("{read:?}") };
        assert!(us.abs_diff(HIGHEST_US) <= HIGHEST_US / 1000, "{us}");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back_within_a_two_thousandth(
            mut us in prop::collection::vec(0u64..3_000_000_000, 1..300)
        ) {
            us.sort_unstable();
            let read = decode(&encode(us.iter().map(|&us| (us, 1)))).unwrap();
            let all: Vec<u64> = read.iter().flat_map(|&(us, n)| std::iter::repeat_n(us, n as usize)).collect();
            prop_assert_eq!(all.len(), us.len());
            for (got, want) in all.into_iter().zip(us) {
                prop_assert!(got.abs_diff(want) as f64 <= want as f64 / 2000.0 + 1.0, "{} for {}", got, want);
            }
        }

        #[test]
        fn the_middle_of_a_bucket_is_near_every_value_in_it(value in 0u64..1 << 40) {
            let got = middle(bucket(value, 7), 7);
            prop_assert!((got - value as f64).abs() <= value as f64 / 256.0 + 1e-9, "{value}: {got}");
            prop_assert!(bucket(value, 7) <= bucket(value + 1, 7));
        }
    }
}
