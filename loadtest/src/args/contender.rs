//! The ways to choose a worker that `simulate` knows, by their names on the command line.

use std::{fmt, str::FromStr};

use keyway_core::pick::Policy;

/// A way to choose a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    /// One of the gateway's own policies, chosen by the gateway's own code.
    Ours(Policy),
    /// Prefill to come times batch size (arXiv 2603.15202; as Dynamo ships it, prefill under way included).
    LMetric,
    /// Prefill blocks to come plus blocks decoded from (ai-dynamo, `docs/components/router`, default
    /// weights).
    Dynamo,
    /// The longest match, unless load differs too much; then the least load (sglang-router `cache_aware`).
    Threshold,
}

impl Contender {
    const PEERS: [(&'static str, Self); 3] =
        [("lmetric", Self::LMetric), ("dynamo", Self::Dynamo), ("threshold", Self::Threshold)];

    /// Its name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ours(policy) => policy.as_str(),
            Self::LMetric => "lmetric",
            Self::Dynamo => "dynamo",
            Self::Threshold => "threshold",
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Contender {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if let Some((_, peer)) = Self::PEERS.iter().find(|(known, _)| *known == name) {
            return Ok(*peer);
        }
        let names = Self::PEERS.map(|(known, _)| known).join(", ");
        name.parse().map(Self::Ours).map_err(|unknown: keyway_core::UnknownPolicy| {
            format!("{unknown}, or of {names} to compare with")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_unknown_ones_list_all() {
        for (name, peer) in Contender::PEERS {
            assert_eq!((name.parse(), peer.as_str()), (Ok(peer), name));
        }
        assert_eq!("keyway".parse(), Ok(Contender::Ours(Policy::Prefix)));
        let error = "best".parse::<Contender>().unwrap_err();
        assert!(error.contains("chwbl") && error.contains("lmetric"), "{error}");
    }
}
