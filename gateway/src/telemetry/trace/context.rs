//! W3C Trace Context: reading `traceparent` from clients and writing it for workers, and which traces are
//! recorded (<https://www.w3.org/TR/trace-context/>). `tracestate` passes as it came.

use http::{HeaderMap, HeaderName, HeaderValue};

pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(super) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Whether the trace is recorded.
const SAMPLED: u8 = 1;
/// Whether the trace's id is random (level 2); says nothing here, and passes.
const RANDOM: u8 = 2;
/// `00-` + 32 digits + `-` + 16 digits + `-` + 2 digits.
const HEADER_BYTES: usize = 55;

/// A span's id; never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpanId(pub(super) u64);

impl SpanId {
    pub(super) fn new() -> Self {
        Self(fastrand::u64(1..))
    }
}

/// A trace, and the span of it that a request came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Context {
    pub(super) trace: u128,
    pub(super) parent: Option<SpanId>,
    pub(super) sampled: bool,
    random: bool,
}

impl Context {
    /// A new trace, one of this share of those that are recorded.
    pub(super) fn new(share: f64) -> Self {
        let mut context = Self { trace: fastrand::u128(1..), parent: None, sampled: false, random: true };
        context.sampled = context.is_within(share);
        context
    }

    /// The trace that a request's headers name; `None` where they name none, or not rightly, or twice.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next().filter(|_| values.next().is_none())?;
        Self::parse(value.as_bytes())
    }

    fn parse(value: &[u8]) -> Option<Self> {
        // Later versions may add fields behind these, after another dash; 255 is none.
        let (head, rest) = value.split_at_checked(HEADER_BYTES)?;
        let version = digits(&head[..2])? as u8;
        let whole = if version == 0 { rest.is_empty() } else { rest.is_empty() || rest[0] == b'-' };
        if version == 255 || !whole || [2, 35, 52].iter().any(|&at| head[at] != b'-') {
            return None;
        }
        let (trace, span) = (digits(&head[3..35])?, digits(&head[36..52])? as u64);
        let flags = digits(&head[53..])? as u8;
        (trace != 0 && span != 0).then_some(Self {
            trace,
            parent: Some(SpanId(span)),
            sampled: flags & SAMPLED != 0,
            random: flags & RANDOM != 0,
        })
    }

    /// Whether a trace is of this share of all: by its id's random end, so that every gateway decides alike.
    pub(super) fn is_within(&self, share: f64) -> bool {
        const RANDOM_BITS: u32 = 56;
        let place = (self.trace as u64) & ((1 << RANDOM_BITS) - 1);
        (place as f64) < share * (1_u64 << RANDOM_BITS) as f64
    }

    /// The flags as `traceparent` carries them.
    pub(super) fn flags(&self) -> u8 {
        u8::from(self.sampled) * SAMPLED + u8::from(self.random) * RANDOM
    }

    /// `traceparent` for what this span calls.
    pub(super) fn header(&self, span: SpanId) -> HeaderValue {
        let text = format!("00-{:032x}-{:016x}-{:02x}", self.trace, span.0, self.flags());
        // Digits and dashes are always a header's value.
        HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
    }
}

/// Hexadecimal digits, small letters only, as the standard wants.
fn digits(text: &[u8]) -> Option<u128> {
    text.iter().try_fold(0_u128, |value, byte| {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn read(value: &str) -> Option<Context> {
        Context::parse(value.as_bytes())
    }

    #[test]
    fn a_client_s_trace_goes_on() {
        let context = read(GIVEN).unwrap();
        assert_eq!(context.parent, Some(SpanId(0xb7ad_6b71_6920_3331)));
        let next = context.header(SpanId(0x00f0_67aa_0ba9_02b7));
        assert_eq!(next, "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01");
        assert!(read("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes").is_some());
        assert_eq!(read(&GIVEN.replace("-01", "-02")).unwrap().flags(), 2);
    }

    #[test]
    fn what_is_no_context_begins_a_trace_of_its_own() {
        for wrong in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00_0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.more",
        ] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
        let mut twice = HeaderMap::new();
        twice.append(TRACEPARENT, HeaderValue::from_static(GIVEN));
        assert!(Context::of(&twice).is_some());
        twice.append(TRACEPARENT, HeaderValue::from_static(GIVEN));
        assert_eq!(Context::of(&twice), None);
    }

    #[test]
    fn a_share_of_the_traces_is_recorded() {
        let of = |share: f64| (0..20_000).filter(|_| Context::new(share).sampled).count();
        assert_eq!((of(0.0), of(1.0)), (0, 20_000));
        assert!((1_700..2_300).contains(&of(0.1)), "{}", of(0.1));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused_and_what_is_written_is_read(
            bytes in prop::collection::vec(any::<u8>(), 0..80), trace in 1_u128.., span in 1_u64.., flags in 0_u8..4
        ) {
            let _ = Context::parse(&bytes);
            let of = |bit| flags & bit != 0;
            let context = Context { trace, parent: Some(SpanId(span)), sampled: of(SAMPLED), random: of(RANDOM) };
            prop_assert_eq!(Context::parse(context.header(SpanId(span)).as_bytes()), Some(context));
        }
    }
}
