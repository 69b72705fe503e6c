//! `keyway-loadtest trace info`: what a slice of a trace holds and what caches of several sizes could reuse
//! of it, so that people and scripts can size a test. Sends nothing.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
};

use serde::Serialize;

use crate::{
    oracle::Oracle,
    schedule::Due,
    sums::{Sums, sums},
    trace::{Row, Trace, links::Link},
    units::Span,
    workload::{self, scale::Scale},
};

/// Cache sizes to report, as percentages of the distinct blocks.
const POOLED_PERCENT: [usize; 4] = [10, 25, 60, 100];

/// What a slice holds. Lengths are scaled, times are the trace's own.
#[derive(Debug, Serialize)]
pub struct Info {
    /// Rows of the slice.
    pub requests: u64,
    /// Its first arrival, in seconds.
    pub first_s: f64,
    /// Its last arrival, in seconds.
    pub last_s: f64,
    /// How many different arrival times the rows have.
    pub distinct_timestamps: u64,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Tokens and blocks of all rows, scaled.
    #[serde(flatten)]
    pub sums: Sums,
    /// Tokens of the longest prompt.
    pub prompt_tokens_max: u64,
    /// Share of prompt tokens that one unbounded cache could reuse.
    pub possible: f64,
    /// The same for one LRU cache of each size.
    pub pooled_lru: Vec<Pooled>,
    /// Sessions that have a turn in the slice; none of a trace that does not say what follows what.
    pub sessions: Option<usize>,
    /// Their agents, sub-agents among them.
    pub agents: Option<usize>,
    /// Blocks whose id the trace left out.
    pub blocks_without_id: u64,
    /// Blocks whose id stood behind another prefix before: 0 if ids are prefix hashes, as they should be.
    pub prefix_violations: u64,
}

/// One size of an LRU cache.
#[derive(Debug, Serialize)]
pub struct Pooled {
    /// How many blocks it holds, at least 1.
    pub blocks: usize,
    /// Share of prompt tokens it would hold.
    pub reused: f64,
}

impl Info {
    /// Looks at `span` of `trace`, which must hold at least one row.
    pub fn new(trace: &Trace, span: &Span, scale: Scale) -> Option<Self> {
        let range = trace.slice(span);
        let rows = &trace.rows[range.clone()];
        let (first, last) = (rows.first()?, rows.last()?);
        let links = trace.links.as_ref().map(|links| &links[range.clone()]);
        let different =
            |of: fn(&Link) -> (u32, u32)| Some(links?.iter().map(of).collect::<HashSet<_>>().len());
        let schedule: Vec<_> = range.clone().map(|row| Due { intended_ns: 0, row }).collect();
        let asks = || schedule.iter().map(|due| workload::trace_ask(trace, scale, due.row));
        let sums = sums(trace, &schedule, scale);
        let reuse = |blocks: Option<usize>| {
            let mut oracle = Oracle::new(scale.block_tokens(), blocks);
            let reused = asks().map(|ask| oracle.ask(ask.blocks.into_iter()));
            let tokens: u64 = reused.map(|r| r.pooled.unwrap_or(r.unbounded)).sum();
            tokens as f64 / sums.prompt_tokens as f64
        };
        let distinct = sums.distinct_blocks as usize;
        let pooled = |percent: usize| (distinct * percent / 100).max(1);
        let missing = |row: &Row| row.input_tokens.div_ceil(trace.block_tokens) as usize - row.blocks.len();
        Some(Self {
            requests: rows.len() as u64,
            first_s: first.timestamp_ms as f64 / 1e3,
            last_s: last.timestamp_ms as f64 / 1e3,
            distinct_timestamps: rows.chunk_by(|a, b| a.timestamp_ms == b.timestamp_ms).count() as u64,
            block_tokens: scale.block_tokens(),
            sums,
            prompt_tokens_max: rows.iter().map(|row| scale.prompt_tokens(row)).max()?,
            possible: reuse(None),
            pooled_lru: POOLED_PERCENT
                .map(|percent| Pooled { blocks: pooled(percent), reused: reuse(Some(pooled(percent))) })
                .into(),
            sessions: different(|link| (link.session, 0)),
            agents: different(|link| (link.session, link.agent)),
            blocks_without_id: rows.iter().map(|row| missing(row) as u64).sum(),
            prefix_violations: prefix_violations(rows),
        })
    }

    /// The figures as text for a person.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let Sums { prompt_tokens, output_tokens, blocks, distinct_blocks } = self.sums;
        let n = self.requests as f64;
        writeln!(out, "requests          {} from {} s to {} s", self.requests, self.first_s, self.last_s)?;
        writeln!(out, "timestamps        {} distinct", self.distinct_timestamps)?;
        if let (Some(sessions), Some(agents)) = (self.sessions, self.agents) {
            let turns = n / sessions as f64;
            writeln!(out, "sessions          {sessions} with {agents} agents, mean {turns:.1} turns")?;
        }
        writeln!(
            out,
            "prompt tokens     {prompt_tokens}, mean {:.1}, max {}",
            prompt_tokens as f64 / n,
            self.prompt_tokens_max
        )?;
        writeln!(out, "output tokens     {output_tokens}, mean {:.1}", output_tokens as f64 / n)?;
        writeln!(
            out,
            "blocks            {blocks} of {} tokens, {distinct_blocks} distinct",
            self.block_tokens
        )?;
        writeln!(out, "reusable          {:.2} % of prompt tokens (unbounded cache)", self.possible * 100.0)?;
        for Pooled { blocks, reused } in &self.pooled_lru {
            writeln!(out, "                  {:.2} % (LRU cache of {blocks} blocks)", reused * 100.0)?;
        }
        if self.blocks_without_id > 0 {
            writeln!(out, "without an id     {} blocks; they get text of their own", self.blocks_without_id)?;
        }
        if self.prefix_violations > 0 {
            writeln!(
                out,
                "WARNING           {} ids stand behind different prefixes",
                self.prefix_violations
            )?;
        }
        Ok(())
    }
}

/// Ids that stand behind another prefix than when they were first seen.
pub(super) fn prefix_violations(rows: &[Row]) -> u64 {
    let (mut parents, mut violations) = (HashMap::new(), 0);
    for row in rows {
        let mut parent = None;
        for &id in &row.blocks {
            violations += u64::from(*parents.entry(id).or_insert(parent) != parent);
            parent = Some(id);
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(timestamp_ms: u64, input_tokens: u32, blocks: &[u64]) -> Row {
        Row { timestamp_ms, input_tokens, output_tokens: 512, blocks: blocks.into() }
    }

    #[test]
    fn a_small_slice() {
        let rows =
            vec![row(0, 1024, &[0, 1]), row(0, 1536, &[0, 1, 2]), row(3000, 1024, &[0]), row(9000, 9, &[5])];
        let info = Info::new(&Trace::from(rows), &"0s..5s".parse().unwrap(), Scale::new(0.03125)).unwrap();
        assert_eq!((info.requests, info.distinct_timestamps, info.prompt_tokens_max), (3, 2, 48));
        assert_eq!((info.sums.prompt_tokens, info.sums.output_tokens), (112, 48));
        assert_eq!((info.sums.blocks, info.sums.distinct_blocks), (7, 4));
        assert_eq!(info.possible, 48.0 / 112.0);
        assert_eq!((info.blocks_without_id, info.prefix_violations), (1, 0));
        assert!(info.render().contains("7 of 16 tokens, 4 distinct"));
        let empty = Info::new(&Trace::from(vec![row(0, 1, &[])]), &"1s..".parse().unwrap(), Scale::new(1.0));
        assert!(empty.is_none());
    }

    #[test]
    fn the_public_traces_figures() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/mooncake_slice.jsonl");
        let trace = Trace::load(path.as_ref()).unwrap();
        let info = Info::new(&trace, &Span::default(), Scale::new(1.0)).unwrap();
        assert_eq!((info.requests, info.sums.blocks, info.sums.distinct_blocks), (798, 21_914, 17_782));
        assert_eq!((info.sums.prompt_tokens, info.sums.output_tokens), (11_019_809, 277_336));
        assert_eq!(info.possible, 2_113_443.0 / 11_019_809.0);
        assert_eq!((info.blocks_without_id, info.prefix_violations), (0, 0));
        // Of these minutes' prompts 115 go on from another one.
        assert_eq!((info.sessions, info.agents), (Some(798 - 115), Some(798 - 115)));
        assert!(info.pooled_lru.is_sorted_by(|small, large| small.reused <= large.reused));
    }

    #[test]
    fn an_id_behind_two_prefixes_is_reported() {
        assert_eq!(prefix_violations(&[row(0, 1024, &[0, 1]), row(0, 1024, &[2, 1])]), 1);
    }
}
