//! The names of what can be asked for and of why a worker was chosen, as users type and read them.

use std::fmt;
use std::str::FromStr;

/// How a worker is chosen.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// The lowest predicted cost, cached prefix included. Written `prefix`; `keyway` is an alias.
    Prefix,
    /// The fewest requests in flight.
    LeastLoaded,
    /// Each in turn, one with a greater weight more often.
    RoundRobin,
    /// One drawn at random, in proportion to the weights.
    Random,
    /// The less loaded of two at random (Mitzenmacher 2001).
    PowerOfTwo,
    /// Consistent hashing of the prompt's beginning, with bounded loads (arXiv 1608.01350).
    Chwbl,
}

impl Policy {
    /// Every policy, in the order in which they are listed to users.
    pub const ALL: [Self; 6] =
        [Self::Prefix, Self::LeastLoaded, Self::RoundRobin, Self::Random, Self::PowerOfTwo, Self::Chwbl];

    /// Its name on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::LeastLoaded => "least-loaded",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power-of-two",
            Self::Chwbl => "chwbl",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let name = if name == "keyway" { "prefix" } else { name };
        Self::ALL
            .into_iter()
            .find(|policy| policy.as_str() == name)
            .ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// A policy's name that is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPolicy(String);

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown policy {:?}; use one of {}", self.0, Policy::ALL.map(Policy::as_str).join(", "))
    }
}

impl std::error::Error for UnknownPolicy {}

/// Why a worker was chosen.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It holds the longest cached prefix, or as good as that.
    Prefix,
    /// Another holds a longer prefix, but waiting there costs more than computing it here.
    Spread,
    /// No worker holds a prefix worth going to: rendezvous hashing among the cheapest.
    New,
    /// As new, and the request says its session: rendezvous hashing of that among the cheapest.
    Session,
    /// It has the fewest requests in flight.
    LeastLoaded,
    /// It was its turn.
    RoundRobin,
    /// It was drawn at random, in proportion to the weights.
    Random,
    /// The less loaded of two.
    PowerOfTwo,
    /// First in the prompt's own order with load to spare.
    Chwbl,
    /// There is no other. The last one, by which they are counted.
    Only,
}

impl Reason {
    /// How many there are.
    pub const COUNT: usize = Self::Only as usize + 1;

    /// Its name in headers, logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Spread => "spread",
            Self::New => "new",
            Self::Session => "session",
            Self::LeastLoaded => "least-loaded",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power-of-two",
            Self::Chwbl => "chwbl",
            Self::Only => "only",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_and_keyway_means_prefix() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert_eq!("keyway".parse(), Ok(Policy::Prefix));
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "fastest".parse::<Policy>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown policy \"fastest\"; use one of prefix, least-loaded, round-robin, random, power-of-two, chwbl"
        );
    }
}
