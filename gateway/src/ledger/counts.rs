//! What a row has: whose it is, and its sums. All sums are integers, so that adding loses nothing.

use std::{fmt, time::Duration};

use keyway_core::Money;

/// How a request ended, for accounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BilledEnd {
    /// With all of its answer.
    Completed,
    /// Its client left before its end.
    Cancelled,
    /// By the workers' fault, or the gateway's.
    Failed,
    /// Refused, as the tenant is over a limit or its budget.
    OverLimit,
    /// Refused, as there was no room for it.
    NoCapacity,
    /// Refused, as the request itself cannot be served.
    Invalid,
}

impl BilledEnd {
    /// By what was written of it: its outcome in a word, and the status that the client saw.
    pub fn of(outcome: &str, status: u16) -> Self {
        match (outcome, status) {
            ("complete", _) => Self::Completed,
            ("client_gone", _) => Self::Cancelled,
            ("rate_limit_exceeded" | "insufficient_quota", _) => Self::OverLimit,
            (_, 429 | 503 | 529) => Self::NoCapacity,
            (_, 400..500) => Self::Invalid,
            _ => Self::Failed,
        }
    }
}

/// Tokens of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Of its prompt, those included that were cached.
    pub prompt: u64,
    /// Of its prompt, those that a worker had in its cache.
    pub cached: u64,
    /// Of its answer, thoughts included.
    pub generated: u64,
}

impl Tokens {
    /// Prompt and answer together.
    pub fn total(&self) -> u64 {
        self.prompt.saturating_add(self.generated)
    }
}

/// The sums of a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts([u64; Counts::SUMS]);

impl Counts {
    /// Names of the sums, as answers have them. What is in the file goes by their order: new ones come last.
    pub const NAMES: [&str; 16] = [
        "requests",
        "completed",
        "cancelled",
        "failed",
        "refused_limit",
        "refused_capacity",
        "refused_invalid",
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "estimated_requests",
        "estimated_prompt_tokens",
        "estimated_generated_tokens",
        "ttft_count",
        "ttft_us_sum",
        "unpriced_tokens",
    ];

    /// Those, and last the cost in nano-units.
    const SUMS: usize = Self::NAMES.len() + 1;
    const PROMPT: usize = 7;
    const GENERATED: usize = 9;
    const UNPRICED: usize = Self::SUMS - 2;
    const COST: usize = Self::SUMS - 1;

    /// Those of one request, which has no price. `estimated`: the part of its tokens that no worker has
    /// reported.
    pub fn of(end: BilledEnd, tokens: Tokens, estimated: Tokens, ttft: Option<Duration>) -> Self {
        let is = |other: BilledEnd| u64::from(end == other);
        let micros = ttft.map_or(0, |ttft| u64::try_from(ttft.as_micros()).unwrap_or(u64::MAX));
        Self([
            1,
            is(BilledEnd::Completed),
            is(BilledEnd::Cancelled),
            is(BilledEnd::Failed),
            is(BilledEnd::OverLimit),
            is(BilledEnd::NoCapacity),
            is(BilledEnd::Invalid),
            tokens.prompt,
            tokens.cached,
            tokens.generated,
            u64::from(estimated != Tokens::default()),
            estimated.prompt,
            estimated.generated,
            u64::from(ttft.is_some()),
            micros,
            tokens.total(),
            0,
        ])
    }

    /// Those of a request that costs so much.
    #[must_use]
    pub fn priced(mut self, cost: Money) -> Self {
        (self.0[Self::UNPRICED], self.0[Self::COST]) = (0, cost.nanos());
        self
    }

    /// Adds another row's.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.0.iter_mut().zip(other.0) {
            *sum = sum.saturating_add(more);
        }
    }

    /// How many requests they are of.
    pub fn requests(&self) -> u64 {
        self.0[0]
    }

    /// All tokens of prompts and answers.
    pub fn tokens(&self) -> u64 {
        self.0[Self::PROMPT].saturating_add(self.0[Self::GENERATED])
    }

    /// What they cost, but for `unpriced_tokens`.
    pub fn cost(&self) -> Money {
        Money::of_nanos(self.0[Self::COST])
    }

    /// Name and sum of each; not what they cost.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::NAMES.into_iter().zip(self.0)
    }

    /// As the file has them.
    pub(super) fn to_bytes(self) -> Vec<u8> {
        self.0.iter().flat_map(|sum| sum.to_le_bytes()).collect()
    }

    /// Out of the file; sums that an older version did not know are 0, and tokens had no prices then.
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut counts = Self::default();
        for (sum, bytes) in counts.0.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *sum = u64::from_le_bytes(*bytes);
        }
        if bytes.len() <= 8 * Self::UNPRICED {
            counts.0[Self::UNPRICED] = counts.tokens();
        }
        counts
    }
}

/// A key without the key: the beginning of its SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId([u8; 6]);

impl KeyId {
    /// Of a key with this SHA-256.
    pub fn of(sha256: &[u8; 32]) -> Self {
        let mut id = [0; 6];
        id.copy_from_slice(&sha256[..6]);
        Self(id)
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Whose a row is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Series {
    /// Name of the tenant; empty where there are none.
    pub tenant: Box<str>,
    /// Id of its key; empty where there are none.
    pub key: Box<str>,
    /// The model, as metrics name it.
    pub model: Box<str>,
}

/// The same, out of the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) tenant: &'a str,
    pub(super) key: &'a str,
    pub(super) model: &'a str,
}

impl Series {
    /// Of a request: its tenant's name and key, if it has one, and its model.
    pub fn new(whose: Option<(&str, KeyId)>, model: &str) -> Self {
        let (tenant, key) = whose.map_or_else(Default::default, |(name, key)| (name.into(), key.to_string()));
        Self { tenant, key: key.into(), model: model.into() }
    }

    /// What is beyond the bound of an hour.
    pub(super) fn other() -> Self {
        Self { tenant: "other".into(), key: "".into(), model: "other".into() }
    }

    pub(super) fn as_row(&self) -> Row<'_> {
        Row { tenant: &self.tenant, key: &self.key, model: &self.model }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_end_is_one_of_them() {
        for (outcome, status, end) in [
            ("complete", 200, BilledEnd::Completed),
            ("client_gone", 200, BilledEnd::Cancelled),
            ("client_gone", 0, BilledEnd::Cancelled),
            ("rate_limit_exceeded", 429, BilledEnd::OverLimit),
            ("share_taken", 429, BilledEnd::NoCapacity),
            ("worker_status", 429, BilledEnd::NoCapacity),
            ("worker_status", 400, BilledEnd::Invalid),
            ("worker_status", 500, BilledEnd::Failed),
            ("model_not_found", 404, BilledEnd::Invalid),
            ("stream_lost", 200, BilledEnd::Failed),
            ("worker_error_event", 200, BilledEnd::Failed),
            ("overloaded", 503, BilledEnd::NoCapacity),
            ("worker_lost", 502, BilledEnd::Failed),
        ] {
            assert_eq!(BilledEnd::of(outcome, status), end, "{outcome} {status}");
            let counts = Counts::of(end, Tokens::default(), Tokens::default(), None);
            let ends: u64 = counts.named().skip(1).take(6).map(|(_, sum)| sum).sum();
            assert_eq!((counts.requests(), ends), (1, 1));
        }
    }

    #[test]
    fn what_an_older_version_wrote_is_read() {
        let tokens = Tokens { prompt: 7, cached: 3, generated: 2 };
        let counts =
            Counts::of(BilledEnd::Completed, tokens, Tokens::default(), Some(Duration::from_millis(5)));
        let named = |name: &str| Counts::NAMES.iter().position(|other| *other == name).unwrap();
        assert_eq!((named("prompt_tokens"), named("generated_tokens")), (Counts::PROMPT, Counts::GENERATED));
        assert_eq!(named("unpriced_tokens"), Counts::UNPRICED);
        let counts = counts.priced(Money::of_nanos(77));
        let bytes = counts.to_bytes();
        assert_eq!((Counts::from_bytes(&bytes), counts.cost().nanos(), counts.tokens()), (counts, 77, 9));
        let older = Counts::from_bytes(&bytes[..8 * 10]);
        assert_eq!((older.0[9], older.0[14]), (2, 0));
        // Before there were prices, nothing had one.
        let unpriced = Counts::from_bytes(&bytes[..8 * 15]);
        assert_eq!((unpriced.0[Counts::UNPRICED], unpriced.cost().nanos()), (9, 0));
        let newer = [&bytes[..], &[1; 8]].concat();
        assert_eq!(Counts::from_bytes(&newer), counts);
    }

    proptest! {
        /// In whatever order and grouping rows are added, the sums are the same.
        #[test]
        fn sums_do_not_depend_on_the_order(rows in prop::collection::vec(prop::array::uniform17(0..u64::MAX / 64), 1..32), cut in any::<prop::sample::Index>()) {
            let rows: Vec<Counts> = rows.into_iter().map(Counts).collect();
            let sum = |rows: &mut dyn Iterator<Item = &Counts>| {
                let mut sum = Counts::default();
                rows.for_each(|row| sum.add(row));
                sum
            };
            let (a, b) = rows.split_at(cut.index(rows.len()));
            let mut parts = sum(&mut b.iter());
            parts.add(&sum(&mut a.iter()));
            prop_assert_eq!(parts, sum(&mut rows.iter().rev()));
            prop_assert_eq!(Counts::from_bytes(&parts.to_bytes()), parts);
        }
    }
}
