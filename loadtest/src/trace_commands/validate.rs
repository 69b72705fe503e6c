//! `keyway-loadtest trace validate`: everything that is wrong with a trace, not only the first, and what is
//! only odd. Changes nothing.

use std::{collections::HashSet, fmt::Write as _, path::Path};

use serde::Serialize;

use crate::trace::{Lines, Row, Trace, TraceError, agents, checked, formats::TraceFormat, weka};

/// Mistakes shown; the rest is counted.
const SHOWN_MAX: usize = 20;

/// What was found in a trace: mistakes, and what is only odd.
#[derive(Debug, Default, Serialize)]
pub struct Findings {
    /// The format by its first line.
    pub format: String,
    /// Rows that can be replayed.
    pub rows: usize,
    /// Lines that cannot be replayed; at 0 the trace is valid.
    pub bad_lines: usize,
    /// The first of them, each with its number and the reason.
    pub mistakes: Vec<String>,
    /// Blocks whose id the trace left out.
    pub blocks_without_id: u64,
    /// Ids that stand behind different prefixes, so that they are no prefix hashes.
    pub prefix_violations: u64,
    /// Ids of a prompt's last, partial block that elsewhere are a whole one.
    pub partial_and_whole: u64,
    /// Rows whose timestamp another row has too.
    pub equal_timestamps: usize,
    /// Rows that generate nothing: they generate one token when replayed.
    pub without_output: usize,
}

/// Looks through `path`; an error only if it cannot be read at all.
pub fn validate(path: &Path) -> Result<Findings, TraceError> {
    let mut findings = Findings::default();
    let (rows, block_tokens) = if weka::is_weka(path) {
        findings.format = "weka".into();
        let Trace { rows, block_tokens, .. } = weka::load(path)?;
        (rows, block_tokens)
    } else if agents::is_agents(path) {
        findings.format = "agents".into();
        let Trace { rows, block_tokens, .. } = agents::load(path)?;
        (rows, block_tokens)
    } else {
        lines(path, &mut findings)?
    };
    findings.rows = rows.len();
    findings.without_output = rows.iter().filter(|row| row.output_tokens == 0).count();
    findings.equal_timestamps =
        rows.chunk_by(|a, b| a.timestamp_ms == b.timestamp_ms).map(<[Row]>::len).filter(|&n| n > 1).sum();
    findings.prefix_violations = super::info::prefix_violations(&rows);
    (findings.blocks_without_id, findings.partial_and_whole) = blocks(&rows, block_tokens);
    Ok(findings)
}

fn lines(path: &Path, findings: &mut Findings) -> Result<(Vec<Row>, u32), TraceError> {
    let mut lines = Lines::open(path)?;
    let (mut rows, mut last_ms) = (Vec::new(), 0);
    while let Some((line, row)) = lines.next_row()? {
        match row.and_then(|row| checked(row, lines.block_tokens(), last_ms)) {
            Ok(row) => {
                last_ms = row.timestamp_ms;
                rows.push(row);
            }
            Err(reason) => {
                findings.bad_lines += 1;
                if findings.mistakes.len() < SHOWN_MAX {
                    findings.mistakes.push(format!("line {line}: {reason}"));
                }
            }
        }
    }
    if rows.is_empty() && findings.bad_lines == 0 {
        return Err(TraceError::Empty(path.into()));
    }
    findings.format = lines.format.as_ref().map_or("unknown", TraceFormat::name).into();
    Ok((rows, lines.block_tokens()))
}

/// Blocks without an id, and ids that are both a whole block and a partial one.
fn blocks(rows: &[Row], block_tokens: u32) -> (u64, u64) {
    let (mut missing, mut partial, mut whole) = (0, HashSet::new(), HashSet::new());
    for row in rows {
        let count = row.input_tokens.div_ceil(block_tokens) as usize;
        missing += (count - row.blocks.len()) as u64;
        for (i, &id) in row.blocks.iter().enumerate() {
            if i + 1 == count && !row.input_tokens.is_multiple_of(block_tokens) {
                partial.insert(id);
            } else {
                whole.insert(id);
            }
        }
    }
    (missing, partial.intersection(&whole).count() as u64)
}

impl Findings {
    /// Whether every line can be replayed.
    pub fn is_valid(&self) -> bool {
        self.bad_lines == 0
    }

    /// The findings as text for a person.
    pub fn render(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "{}: {} rows can be replayed, {} lines cannot",
            self.format, self.rows, self.bad_lines
        )?;
        self.mistakes.iter().try_for_each(|mistake| writeln!(out, "  {mistake}"))?;
        if self.bad_lines > self.mistakes.len() {
            writeln!(out, "  … and {} more", self.bad_lines - self.mistakes.len())?;
        }
        let notes: [(u64, &str); 5] = [
            (self.prefix_violations, "ids stand behind different prefixes: they are no prefix hashes"),
            (self.blocks_without_id, "blocks without an id: they get text that no other row shares"),
            (self.partial_and_whole, "ids are a partial block in one row and a whole one in another"),
            (self.equal_timestamps as u64, "rows share their timestamp with another: see --spread-bursts"),
            (self.without_output as u64, "rows generate nothing: they generate one token when replayed"),
        ];
        notes.iter().filter(|(n, _)| *n > 0).try_for_each(|(n, note)| writeln!(out, "note: {n} {note}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Findings {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        validate(file.path()).unwrap()
    }

    #[test]
    fn every_mistake_is_told() {
        let found = findings(
            r#"{"timestamp": 5, "input_length": 600, "output_length": 0, "hash_ids": [1, 2]}
nonsense
{"timestamp": 5, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}
{"timestamp": 4, "input_length": 1024, "output_length": 4, "hash_ids": []}
{"timestamp": 9, "input_length": 1024, "output_length": 4, "hash_ids": [2]}
"#,
        );
        assert_eq!((found.format.as_str(), found.rows, found.bad_lines), ("mooncake", 3, 2));
        assert!(
            found.mistakes[0].starts_with("line 2: ") && found.mistakes[1].starts_with("line 4: timestamp")
        );
        assert_eq!((found.prefix_violations, found.blocks_without_id, found.partial_and_whole), (1, 1, 1));
        assert_eq!((found.equal_timestamps, found.without_output, found.is_valid()), (2, 1, false));
        let text = found.render();
        assert!(text.contains("2 lines cannot") && text.contains("note: 1 ids stand behind"), "{text}");
    }

    #[test]
    fn the_public_trace_has_no_mistakes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/mooncake_slice.jsonl");
        let found = validate(path.as_ref()).unwrap();
        assert!(found.is_valid() && found.prefix_violations == 0 && found.rows == 798, "{found:?}");
    }
}
