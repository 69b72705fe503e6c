//! Reads a request trace, in any of the formats of `formats.rs`, `weka.rs` and `agents.rs`. Scales and
//! schedules nothing.
//!
//! Each row is a whole prompt, never a delta. Ids are prefix hashes: an id stands for its block and all
//! before it. The commands `trace …` are in `trace_commands.rs`.

pub(crate) mod agents;
mod follow;
pub mod formats;
pub mod links;
mod sessions;
pub(crate) mod weka;

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _},
    ops::Range,
    path::{Path, PathBuf},
};

pub use self::{agents::AgentsError, weka::SessionError};
use crate::{
    trace::{follow::Chat, formats::TraceFormat, links::Link},
    units::Span,
};

/// Prompt tokens that one hash id stands for, in Mooncake's traces.
pub const BLOCK_TOKENS: u32 = 512;

/// Bytes of a file in which its format shows.
const HEAD_BYTES: u64 = 64 << 10;

/// Why a trace was refused.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace {path}: {source}")]
    Io {
        /// The file or folder that could not be read.
        path: PathBuf,
        /// The system's own error, with which the message ends.
        source: std::io::Error,
    },
    /// A line is not a request.
    #[error("{path}, line {line}: {source}")]
    Line {
        /// The trace's file or folder that holds the line.
        path: PathBuf,
        /// The line's number, counted from 1, empty lines and headers included.
        line: usize,
        /// What is wrong with it.
        source: RowError,
    },
    /// A file of sessions is not one, or does not fit the others.
    #[error("{path}, line {line}: {source}")]
    Session {
        /// The trace's file or folder.
        path: PathBuf,
        /// The line in it, counted from 1; 1 for all of it.
        line: usize,
        /// What is wrong there.
        source: SessionError,
    },
    /// There is not one request in it.
    #[error("the trace {0} holds no requests")]
    Empty(PathBuf),
}

/// What is wrong with a row of a trace.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// The line is no JSON, or lacks a field of a request.
    #[error("not a request of a trace: {0}")]
    Json(#[from] serde_json::Error),
    /// Its JSON has a timestamp below 0.
    #[error("timestamp {0} is below 0")]
    Negative(f64),
    /// The column of the date, whose text this is, holds none.
    #[error("`{0}` is no date")]
    Date(String),
    /// The column of the time, whose text this is, holds no number.
    #[error("`{0}` is no time in seconds")]
    Seconds(String),
    /// A column of tokens, whose text this is, holds no count.
    #[error("`{0}` is no number of tokens")]
    Tokens(String),
    /// Times count from the first row's, and this one is before it.
    #[error("its date is before the first row's: sort the trace")]
    BeforeFirst,
    /// A prompt without a token.
    #[error("input_length is 0: a prompt has at least one token")]
    NoPrompt,
    /// There are more ids than blocks of the prompt.
    #[error("{ids} hash_ids for {tokens} prompt tokens: at most one for each {block_tokens} ({most})")]
    TooManyIds {
        /// How many ids the row has.
        ids: usize,
        /// Tokens of its prompt.
        tokens: u32,
        /// Prompt tokens that one id stands for.
        block_tokens: u32,
        /// How many ids it may have.
        most: usize,
    },
    /// It arrives before the row in front of it.
    #[error("timestamp {at_ms} goes back behind {last_ms}: sort the trace by timestamp")]
    Backwards {
        /// When it arrives, in milliseconds.
        at_ms: u64,
        /// When the row in front of it does.
        last_ms: u64,
    },
}

/// One request of the trace, in the trace's own lengths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Arrival, in milliseconds since the trace began.
    pub timestamp_ms: u64,
    /// Tokens of the whole prompt, at least 1.
    pub input_tokens: u32,
    /// Tokens that were generated.
    pub output_tokens: u32,
    /// One id for each block; some exports leave out the last ones, some traces all.
    pub blocks: Box<[u64]>,
}

/// A trace in memory: about 8 bytes a block. Arrivals never go back.
#[derive(Debug, Clone)]
pub struct Trace {
    /// The requests in order of arrival; at least one.
    pub rows: Vec<Row>,
    /// Prompt tokens that one id stands for.
    pub block_tokens: u32,
    /// For each row what it follows, if the trace tells.
    pub links: Option<Vec<Link>>,
}

impl From<Vec<Row>> for Trace {
    /// A trace with Mooncake's blocks.
    fn from(rows: Vec<Row>) -> Self {
        Self { rows, block_tokens: BLOCK_TOKENS, links: None }
    }
}

impl Trace {
    /// Reads `path`. Empty lines are skipped; anything else that is not a request is an error that names its
    /// line.
    pub fn load(path: &Path) -> Result<Self, TraceError> {
        if weka::is_weka(path) {
            return weka::load(path);
        }
        if agents::is_agents(path) {
            return agents::load(path);
        }
        let mut lines = Lines::open(path)?;
        let (mut rows, mut chats, mut last_ms) = (Vec::new(), Vec::new(), 0);
        while let Some((line, row)) = lines.next_row()? {
            chats.push(lines.chat());
            let row = row.and_then(|row| checked(row, lines.block_tokens(), last_ms));
            let row = row.map_err(|source| TraceError::Line { path: path.to_owned(), line, source })?;
            last_ms = row.timestamp_ms;
            rows.push(row);
        }
        if rows.is_empty() {
            Err(TraceError::Empty(path.to_owned()))
        } else {
            let block_tokens = lines.block_tokens();
            let links = match lines.format {
                Some(TraceFormat::Bailian) => Some(follow::of_chats(&rows, &chats)),
                Some(TraceFormat::Mooncake | TraceFormat::VllmTimed) => {
                    Some(follow::of_blocks(&rows, block_tokens))
                }
                _ => None,
            };
            Ok(Self { rows, block_tokens, links })
        }
    }

    /// A hash of all rows: equal traces have equal hashes, wherever their files lie.
    pub fn hash(&self) -> u64 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(&self.block_tokens.to_le_bytes());
        for row in &self.rows {
            hash.update(&row.timestamp_ms.to_le_bytes());
            hash.update(&row.input_tokens.to_le_bytes());
            hash.update(&row.output_tokens.to_le_bytes());
            hash.update(&(row.blocks.len() as u64).to_le_bytes());
            row.blocks.iter().for_each(|id| hash.update(&id.to_le_bytes()));
        }
        hash.digest()
    }

    /// The rows whose arrival lies in `span`; equal arrivals are never torn apart.
    pub fn slice(&self, span: &Span) -> Range<usize> {
        let before = |limit: std::time::Duration| {
            self.rows.partition_point(|row| u128::from(row.timestamp_ms) * 1_000_000 < limit.as_nanos())
        };
        before(span.start)..span.end.map_or(self.rows.len(), before)
    }

    /// Where the trace ends: the last arrival and the gap before it, in milliseconds, so that the last burst
    /// lasts as long as the one before.
    pub fn end_ms(&self) -> u64 {
        let last = self.rows.last().map_or(0, |row| row.timestamp_ms);
        let earlier = self.rows.iter().rev().map(|row| row.timestamp_ms).find(|&ms| ms < last);
        last + earlier.map_or(0, |ms| last - ms)
    }
}

/// A line's number, and its row or what is wrong with it.
type Numbered = (usize, Result<Row, RowError>);

/// The rows of a file of lines, one after the other.
pub(crate) struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    text: String,
    line: usize,
    /// Known from the first line on.
    pub(crate) format: Option<TraceFormat>,
}

// === impl Lines ===

impl Lines {
    pub(crate) fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Io { path: path.to_owned(), source })?;
        let (path, reader) = (path.to_owned(), BufReader::new(file));
        Ok(Self { path, reader, text: String::new(), line: 0, format: None })
    }

    /// The next line that is neither empty nor a header: its number, and what it says.
    pub(crate) fn next_row(&mut self) -> Result<Option<Numbered>, TraceError> {
        loop {
            self.text.clear();
            let read = self.reader.read_line(&mut self.text);
            if read.map_err(|source| TraceError::Io { path: self.path.clone(), source })? == 0 {
                return Ok(None);
            }
            self.line += 1;
            if self.text.trim().is_empty() {
                continue;
            }
            if self.format.is_none() {
                let (detected, is_header) = TraceFormat::detect(&self.text);
                self.format = Some(detected);
                if is_header {
                    continue;
                }
            }
            let format = self.format.get_or_insert(TraceFormat::Mooncake);
            return Ok(Some((self.line, format.read(&self.text))));
        }
    }

    /// Who the line says that it is, and whom it follows.
    fn chat(&self) -> Option<Chat> {
        (self.format == Some(TraceFormat::Bailian)).then(|| serde_json::from_str(&self.text).ok()).flatten()
    }

    pub(crate) fn block_tokens(&self) -> u32 {
        self.format.as_ref().map_or(BLOCK_TOKENS, TraceFormat::block_tokens)
    }
}

/// The text with which a file begins, as far as its format shows in it; empty if it cannot be read.
fn beginning(path: &Path) -> String {
    let mut head = Vec::new();
    // Whoever reads all of it says what is wrong.
    let _ = File::open(path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head));
    head.utf8_chunks().next().map_or_else(String::new, |chunk| chunk.valid().to_owned())
}

/// What must hold in every format.
pub(crate) fn checked(row: Row, block_tokens: u32, last_ms: u64) -> Result<Row, RowError> {
    let most = row.input_tokens.div_ceil(block_tokens) as usize;
    let (ids, tokens, at_ms) = (row.blocks.len(), row.input_tokens, row.timestamp_ms);
    if tokens == 0 {
        Err(RowError::NoPrompt)
    } else if ids > most {
        Err(RowError::TooManyIds { ids, tokens, block_tokens, most })
    } else if at_ms < last_ms {
        Err(RowError::Backwards { at_ms, last_ms })
    } else {
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn load(text: &str) -> Result<Trace, TraceError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        Trace::load(file.path())
    }

    const GOOD: &str = r#"{"timestamp": 0, "input_length": 513, "output_length": 3, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]}

{"timestamp": 3000, "input_length": 9, "output_length": 1, "hash_ids": []}
{"timestamp": 6000, "input_length": 9, "output_length": 1, "hash_ids": [7], "extra": null}
"#;

    #[test]
    fn rows_and_slices() {
        let trace = load(GOOD).unwrap();
        assert_eq!(trace.rows.len(), 4);
        assert_eq!(*trace.rows[0].blocks, [0, 1]);
        assert_eq!(trace.end_ms(), 9000);
        for (span, range) in
            [("..", 0..4), ("0s..3s", 0..1), ("3s..", 1..4), ("1s..3001ms", 1..3), ("7s..", 4..4)]
        {
            assert_eq!(trace.slice(&span.parse().unwrap()), range, "{span}");
        }
    }

    #[test]
    fn bailian_s_chats_and_mooncake_s_prompts_are_linked() {
        let chat = |id: u32, parent: i32, at: u32| {
            format!(
                r#"{{"chat_id": {id}, "parent_chat_id": {parent}, "timestamp": {at}, "input_length": 40, "output_length": 1, "turn": 1, "hash_ids": [{id}]}}"#
            )
        };
        let links = load(&[chat(3, -1, 0), chat(4, 3, 2)].join("\n")).unwrap().links.unwrap();
        assert_eq!((links[1].session, links[1].turn, &*links[1].after), (0, 1, &[0][..]));
        assert_eq!(links[1].wait, std::time::Duration::from_secs(2));
        let links = load(GOOD).unwrap().links.unwrap();
        assert!(links.iter().all(|link| link.after.is_empty()));
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10";
        assert_eq!(load(azure).unwrap().links, None);
    }

    #[test]
    fn a_bad_line_is_named_with_the_reason() {
        for (text, want) in [
            ("", "holds no requests"),
            ("{}", "line 1: not a request of a trace: missing field `timestamp`"),
            ("\nnonsense", "line 2: not a request"),
            (r#"{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]}"#, "input_length is 0"),
            (
                r#"{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1,2]}"#,
                "at most one for each 512 (1)",
            ),
            (&format!("{GOOD}{}", GOOD.lines().next().unwrap()), "line 6: timestamp 0 goes back behind 6000"),
        ] {
            let error = load(text).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
        let error = Trace::load(Path::new("/nonexistent/trace")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read the trace"), "{error}");
    }
}
