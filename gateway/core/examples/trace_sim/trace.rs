//! Reads a request trace in Mooncake's JSON lines: `timestamp` (ms), `input_length`, `output_length` (tokens) and
//! `hash_ids`, one for each 512 tokens, where an equal id means an equal prefix up to there.

use std::collections::HashSet;

use keyway_wire::block_hash::BlockHash;

/// Prompt tokens of one block of the trace.
const TRACE_BLOCK_TOKENS: u64 = 512;

/// One request.
#[derive(Debug)]
pub(crate) struct Row {
    /// Arrival since the trace began.
    pub(crate) arrival_us: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    /// Full blocks only.
    pub(crate) chain: Vec<BlockHash>,
}

/// The rows of the first `minutes`, each burst of equal timestamps spread evenly up to the next one, their blocks
/// cut into smaller ones of `block_tokens` (a divisor of the trace's own 512).
pub(crate) fn read(text: &str, minutes: u64, block_tokens: u64) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let row =
            parse(line, block_tokens).ok_or_else(|| format!("line {} is not a row of the trace", n + 1))?;
        if row.arrival_us >= minutes * 60_000_000 {
            break;
        }
        rows.push(row);
    }
    if rows.is_empty() {
        return Err("the trace has no row in the time asked for".to_owned());
    }
    spread(&mut rows);
    Ok(rows)
}

/// Distinct full blocks: what an endless cache would hold in the end.
pub(crate) fn distinct_blocks(rows: &[Row]) -> usize {
    rows.iter().flat_map(|row| &row.chain).collect::<HashSet<_>>().len()
}

fn parse(line: &str, block_tokens: u64) -> Option<Row> {
    let number = |name: &str| -> Option<u64> {
        let rest = after(line, name)?;
        rest[..rest.find([',', '}'])?].trim().parse().ok()
    };
    let ids = after(line, "hash_ids")?.trim_start().strip_prefix('[')?;
    let ids = ids[..ids.find(']')?].split(',').map(|id| id.trim().parse::<u64>().ok());
    let pieces = TRACE_BLOCK_TOKENS / block_tokens;
    let mut chain = Vec::new();
    for id in ids {
        let first = id?.checked_mul(pieces)?;
        // Consecutive numbers become hashes spread over 64 bits, as real ones are.
        chain.extend(
            (first..first.saturating_add(pieces))
                .map(|piece| BlockHash(piece.wrapping_mul(0x9E37_79B9_7F4A_7C15))),
        );
    }
    let prompt_tokens = number("input_length").filter(|&tokens| tokens > 0)?;
    chain.truncate((prompt_tokens / block_tokens) as usize);
    let (arrival_us, output_tokens) = (number("timestamp")?.checked_mul(1000)?, number("output_length")?);
    Some(Row { arrival_us, prompt_tokens, output_tokens, chain })
}

fn after<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let rest = &line[line.find(&format!("\"{name}\""))? + name.len() + 2..];
    rest.trim_start().strip_prefix(':')
}

fn spread(rows: &mut [Row]) {
    let mut start = 0;
    while start < rows.len() {
        let at = rows[start].arrival_us;
        let end = rows[start..].iter().position(|row| row.arrival_us != at).map_or(rows.len(), |n| start + n);
        let gap = rows.get(end).map_or(0, |next| next.arrival_us - at);
        let burst = (end - start) as u64;
        for (i, row) in rows[start..end].iter_mut().enumerate() {
            row.arrival_us += gap * i as u64 / burst;
        }
        start = end;
    }
}
