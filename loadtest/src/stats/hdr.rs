//! HdrHistograms in the text form that the HdrHistogram libraries read (V2, compressed, base64). Encodes
//! only.
//!
//! Format: github.com/HdrHistogram/HdrHistogram, `EncodableHistogram` and `AbstractHistogram`: a cookie, the
//! settings and the counts as ZigZag LEB128 numbers, a negative one standing for a run of zeros; around it
//! zlib (RFC 1950). The counts are short already, so the zlib stream holds them in stored blocks (RFC 1951,
//! 3.2.4).

/// Three significant digits: 2 · 10^3 rounded up to a power of two, halved, as an exponent.
const HALF_MAGNITUDE: u32 = 10;
const SIGNIFICANT_DIGITS: i32 = 3;
/// One hour in microseconds; what is longer counts as this.
const HIGHEST_US: u64 = 3_600_000_000;

const COOKIE_V2: u32 = 0x1c84_9303 | 0x10;
const COOKIE_V2_COMPRESSED: u32 = 0x1c84_9304 | 0x10;

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

/// Encodes microseconds and how often each occurred, in ascending order.
pub fn encode(counts: impl Iterator<Item = (u64, u64)>) -> String {
    let mut payload = Vec::new();
    let mut pending: Option<(usize, u64)> = None;
    let mut next = 0;
    for (us, count) in counts {
        let index = bucket(us.min(HIGHEST_US), HALF_MAGNITUDE);
        match &mut pending {
            Some((at, sum)) if *at == index => *sum += count,
            _ => {
                flush(&mut pending, &mut next, &mut payload);
                pending = Some((index, count));
            }
        }
    }
    flush(&mut pending, &mut next, &mut payload);

    let mut histogram = Vec::with_capacity(payload.len() + 40);
    histogram.extend(COOKIE_V2.to_be_bytes());
    histogram.extend((payload.len() as u32).to_be_bytes());
    histogram.extend(0i32.to_be_bytes()); // offset by which indices are rotated
    histogram.extend(SIGNIFICANT_DIGITS.to_be_bytes());
    histogram.extend(1u64.to_be_bytes()); // lowest discernible value
    histogram.extend(HIGHEST_US.to_be_bytes());
    histogram.extend(1f64.to_be_bytes()); // ratio of stored to real values
    histogram.extend(payload);

    let compressed = zlib_stored(&histogram);
    let mut out = Vec::with_capacity(compressed.len() + 8);
    out.extend(COOKIE_V2_COMPRESSED.to_be_bytes());
    out.extend((compressed.len() as u32).to_be_bytes());
    out.extend(compressed);
    base64(&out)
}

fn flush(pending: &mut Option<(usize, u64)>, next: &mut usize, payload: &mut Vec<u8>) {
    let Some((index, count)) = pending.take() else { return };
    if index > *next {
        zigzag_leb128(-((index - *next) as i64), payload);
    }
    zigzag_leb128(count as i64, payload);
    *next = index + 1;
}

/// Numbers here are far below 2^56, where the format's 9-byte limit begins to matter.
fn zigzag_leb128(value: i64, out: &mut Vec<u8>) {
    let mut rest = ((value << 1) ^ (value >> 63)) as u64;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

fn zlib_stored(data: &[u8]) -> Vec<u8> {
    let mut out = vec![0x78, 0x01];
    let mut pieces = data.chunks(usize::from(u16::MAX)).peekable();
    while let Some(piece) = pieces.next() {
        let length = piece.len() as u16;
        out.push(u8::from(pieces.peek().is_none()));
        out.extend(length.to_le_bytes());
        out.extend((!length).to_le_bytes());
        out.extend(piece);
    }
    // Adler-32 (RFC 1950, 9).
    let (mut a, mut b) = (1u32, 0u32);
    for &byte in data {
        a = (a + u32::from(byte)) % 65521;
        b = (b + a) % 65521;
    }
    out.extend((b << 16 | a).to_be_bytes());
    out
}

fn base64(data: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(data.len().div_ceil(3) * 4);
    for group in data.chunks(3) {
        let bits =
            group.iter().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - group.len()));
        for i in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * i)) as usize & 63];
            out.push(if i <= group.len() { char::from(letter) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use hdrhistogram::serialization::Deserializer;
    use proptest::prelude::*;

    use super::*;

    fn decoded(us: &[u64]) -> hdrhistogram::Histogram<u64> {
        let text = encode(us.iter().map(|&us| (us, 1)));
        let bytes = base64_decoded(&text);
        Deserializer::new().deserialize(&mut bytes.as_slice()).unwrap()
    }

    fn base64_decoded(text: &str) -> Vec<u8> {
        use base64::Engine as _;
        base64::engine::general_purpose::STANDARD.decode(text).unwrap()
    }

    #[test]
    fn many_values_need_several_stored_blocks() {
        let us: Vec<u64> = (0..100_000).map(|i| i * 30_011).collect();
        let read = decoded(&us);
        assert_eq!(read.len(), 100_000);
    }

    proptest! {
        #[test]
        fn the_public_library_reads_what_we_write(mut us in prop::collection::vec(0u64..10_000_000_000, 1..300)) {
            us.sort_unstable();
            let read = decoded(&us);
            let mut want = hdrhistogram::Histogram::<u64>::new_with_bounds(1, HIGHEST_US, 3).unwrap();
            for &us in &us {
                want.record(us.min(HIGHEST_US)).unwrap();
            }
            prop_assert_eq!(read.len(), us.len() as u64);
            for quantile in [0.0, 0.5, 0.9, 0.99, 1.0] {
                prop_assert_eq!(read.value_at_quantile(quantile), want.value_at_quantile(quantile));
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
