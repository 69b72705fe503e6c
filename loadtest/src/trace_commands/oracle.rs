//! `keyway-loadtest trace oracle`: what caches of given sizes could reuse of a trace, over all of it or by
//! row. A bound; it models no worker.

use std::fmt::Write as _;

use serde::Serialize;

use crate::{oracle::Oracle, trace::Trace, units::Span, workload::scale::Scale};

/// What could be reused.
#[derive(Debug, Serialize)]
pub struct Reuse {
    /// Rows of the slice.
    pub requests: usize,
    /// Prompt tokens of all rows, scaled.
    pub prompt_tokens: u64,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// One for each size, and last the unbounded cache.
    pub caches: Vec<CacheReuse>,
}

/// One reference cache, and what it could reuse.
#[derive(Debug, Serialize)]
pub struct CacheReuse {
    /// Its blocks; none if it is unbounded.
    pub blocks: Option<usize>,
    /// Prompt tokens it held already.
    pub reused_tokens: u64,
    /// `reused_tokens` over all prompt tokens, 0 to 1.
    pub reused: f64,
}

impl Reuse {
    /// Asks caches of `sizes` blocks, and an unbounded one, about the rows of `span`; `None` if there are
    /// none.
    pub fn new(trace: &Trace, span: &Span, scale: Scale, sizes: &[usize]) -> Option<Self> {
        let rows = trace.slice(span);
        let prompt_tokens: u64 = trace.rows[rows.clone()].iter().map(|row| scale.prompt_tokens(row)).sum();
        let cache = |blocks: Option<usize>| {
            let mut oracle = Oracle::new(scale.block_tokens(), blocks);
            let asked = rows.clone().map(|i| oracle.ask(scale.blocks(i, &trace.rows[i])));
            let reused_tokens: u64 =
                asked.map(|reusable| reusable.pooled.unwrap_or(reusable.unbounded)).sum();
            CacheReuse { blocks, reused_tokens, reused: reused_tokens as f64 / prompt_tokens as f64 }
        };
        let caches = sizes.iter().map(|&blocks| cache(Some(blocks))).chain([cache(None)]).collect();
        let (requests, block_tokens) = (rows.len(), scale.block_tokens());
        (requests > 0).then_some(Self { requests, prompt_tokens, block_tokens, caches })
    }

    /// The figures as text for a person.
    pub fn render(&self) -> String {
        let mut out = format!(
            "{} requests, {} prompt tokens, blocks of {} tokens\n{:>12}{:>14}{:>16}{:>9}\n",
            self.requests,
            self.prompt_tokens,
            self.block_tokens,
            "blocks",
            "KV tokens",
            "reused tokens",
            "share"
        );
        for cache in &self.caches {
            let blocks = cache.blocks.map_or_else(|| "unbounded".into(), |blocks| blocks.to_string());
            let tokens =
                cache.blocks.map_or_else(|| "-".into(), |n| (n * self.block_tokens as usize).to_string());
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "{blocks:>12}{tokens:>14}{:>16}{:>7.2} %",
                cache.reused_tokens,
                cache.reused * 100.0
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_caches_reuse_more_and_none_more_than_the_unbounded_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/mooncake_slice.jsonl");
        let trace = Trace::load(path.as_ref()).unwrap();
        let reuse = Reuse::new(&trace, &Span::default(), Scale::new(1.0), &[500, 5000, 50_000]).unwrap();
        let shares: Vec<f64> = reuse.caches.iter().map(|cache| cache.reused).collect();
        assert!(shares.is_sorted() && shares[0] < shares[2], "{shares:?}");
        assert_eq!(reuse.caches[3].reused_tokens, 2_113_443);
        assert!(reuse.render().contains("unbounded"));
        assert!(Reuse::new(&trace, &"9h..".parse().unwrap(), Scale::new(1.0), &[1]).is_none());
    }
}
