//! `keyway-loadtest trace convert` and `slice`: a trace, or a stretch of it, written in another format.
//! Blocks are cut anew where the formats' sizes differ, so that equal prefixes stay equal. Sends nothing.

use std::{
    collections::HashMap,
    io::{BufWriter, Write as _},
    path::Path,
};

use keyway_wire::block_hash::{BlockHash, Chain, HashKey};
use serde::Serialize;

use crate::{
    args::trace::Target,
    error::Error,
    schedule::Due,
    trace::{BLOCK_TOKENS, Trace, formats::SMALL_BLOCK_TOKENS},
    workload::{Ask, scale::Block},
};

#[derive(Serialize)]
struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_id: Option<usize>,
    timestamp: serde_json::Value,
    input_length: u64,
    output_length: u64,
    hash_ids: &'a [u32],
}

/// Cuts prompts into blocks of one size and numbers the prefixes, the first seen first.
#[derive(Debug)]
struct Cutter {
    block_tokens: u32,
    numbers: HashMap<BlockHash, u32>,
}

// === impl Target ===

impl Target {
    /// The format in which blocks of `block_tokens` keep their size, or else the one with the smaller blocks.
    pub fn of(block_tokens: u32) -> Self {
        if block_tokens == BLOCK_TOKENS { Self::Mooncake } else { Self::VllmTimed }
    }

    fn block_tokens(self) -> u32 {
        if self == Self::Mooncake { BLOCK_TOKENS } else { SMALL_BLOCK_TOKENS }
    }

    fn timestamp(self, ns: u64) -> serde_json::Value {
        let ms = (ns + 500_000) / 1_000_000;
        if self == Self::Mooncake { ms.into() } else { (ms as f64 / 1e3).into() }
    }
}

// === impl Cutter ===

impl Cutter {
    /// The numbers of a prompt's blocks, the last, partial one among them.
    fn cut(&mut self, prompt: &[Block]) -> Vec<u32> {
        let mut chain = Chain::new(HashKey::new(0), b"");
        let (mut ids, mut piece, mut missing) = (Vec::new(), Vec::new(), self.block_tokens);
        for &Block { id, tokens } in prompt {
            let mut from = 0;
            while from < tokens {
                let taken = missing.min(tokens - from);
                for part in [id, u64::from(from), u64::from(taken)] {
                    piece.extend_from_slice(&part.to_le_bytes());
                }
                (from, missing) = (from + taken, missing - taken);
                if missing == 0 {
                    ids.push(self.number(chain.push(&piece)));
                    piece.clear();
                    missing = self.block_tokens;
                }
            }
        }
        if !piece.is_empty() {
            ids.push(self.number(chain.push(&piece)));
        }
        ids
    }

    fn number(&mut self, prefix: BlockHash) -> u32 {
        let next = self.numbers.len() as u32;
        *self.numbers.entry(prefix).or_insert(next)
    }
}

/// Writes what is asked, and when, to `path`; gives the number of rows.
pub fn write(
    path: &Path,
    target: Target,
    schedule: &[Due],
    ask: impl Fn(usize) -> Ask,
) -> Result<usize, Error> {
    let failed = |source| Error::Write { path: path.into(), source };
    let mut file = BufWriter::new(std::fs::File::create(path).map_err(failed)?);
    let mut cutter = Cutter { block_tokens: target.block_tokens(), numbers: HashMap::new() };
    for (i, due) in schedule.iter().enumerate() {
        let ask = ask(due.row);
        let hash_ids = cutter.cut(&ask.blocks);
        let line = Line {
            chat_id: (target == Target::Bailian).then_some(i),
            timestamp: target.timestamp(due.intended_ns),
            input_length: ask.prompt_tokens(),
            output_length: ask.output_tokens,
            hash_ids: &hash_ids,
        };
        // Numbers always serialise.
        writeln!(file, "{}", serde_json::to_string(&line).unwrap_or_default()).map_err(failed)?;
    }
    file.flush().map_err(failed)?;
    Ok(schedule.len())
}

/// The rows of `trace` with their own times, counted from the first of them.
pub fn own_times(trace: &Trace, rows: std::ops::Range<usize>) -> Vec<Due> {
    let first_ms = trace.rows.get(rows.start).map_or(0, |row| row.timestamp_ms);
    let due = |row: usize| Due { intended_ns: (trace.rows[row].timestamp_ms - first_ms) * 1_000_000, row };
    rows.map(due).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        oracle::Oracle,
        workload::{scale::Scale, trace_ask},
    };

    fn converted(trace: &Trace, target: Target) -> Trace {
        let file = tempfile::NamedTempFile::new().unwrap();
        let scale = Scale::of(1.0, trace.block_tokens);
        let schedule = own_times(trace, 0..trace.rows.len());
        write(file.path(), target, &schedule, |row| trace_ask(trace, scale, row)).unwrap();
        Trace::load(file.path()).unwrap()
    }

    /// Tokens that one unbounded cache could reuse.
    fn reusable(trace: &Trace) -> u64 {
        let scale = Scale::of(1.0, trace.block_tokens);
        let mut oracle = Oracle::new(trace.block_tokens, None);
        let rows = trace.rows.iter().enumerate();
        rows.map(|(i, row)| oracle.ask(scale.blocks(i, row)).unbounded).sum()
    }

    #[test]
    fn a_trace_there_and_back_is_the_same_but_for_its_numbers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/mooncake_slice.jsonl");
        let trace = Trace::load(path.as_ref()).unwrap();
        let small = converted(&trace, Target::VllmTimed);
        assert_eq!((small.block_tokens, small.rows.len()), (16, 798));
        let bailian = converted(&trace, Target::Bailian);
        assert_eq!((&bailian.rows[5].blocks, bailian.block_tokens), (&small.rows[5].blocks, 16));
        let back = converted(&small, Target::Mooncake);
        for (a, b) in trace.rows.iter().zip(&back.rows) {
            assert_eq!(
                (a.input_tokens, a.output_tokens, a.blocks.len()),
                (b.input_tokens, b.output_tokens, b.blocks.len())
            );
            assert_eq!(a.timestamp_ms - trace.rows[0].timestamp_ms, b.timestamp_ms);
        }
        assert_eq!(super::super::info::prefix_violations(&back.rows), 0);
        // A partial block of the one is in no block of the other, so a little less than a block a row can
        // differ.
        let (want, got) = (reusable(&trace), reusable(&back));
        assert!(
            want.abs_diff(got) <= 798 * 512 && want.abs_diff(reusable(&small)) <= 798 * 512,
            "{want} {got}"
        );
    }

    #[test]
    fn equal_prefixes_have_equal_numbers() {
        let mut cutter = Cutter { block_tokens: 16, numbers: HashMap::new() };
        let block = |id, tokens| Block { id, tokens };
        let first = cutter.cut(&[block(1, 24), block(2, 20)]);
        assert_eq!(first, [0, 1, 2]);
        assert_eq!(cutter.cut(&[block(1, 24), block(3, 8)]), [0, 3]);
        // The same text behind another prefix is another prefix.
        assert_eq!(cutter.cut(&[block(9, 24), block(2, 20)]), [4, 5, 6]);
    }
}
