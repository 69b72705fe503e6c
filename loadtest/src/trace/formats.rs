//! The formats of public traces: which one a file has, and what a line of it says. Reads no file, scales
//! nothing.
//!
//! - Mooncake (JSON lines): `timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512 tokens. R. Qin
//!   et al., "Mooncake: Trading More Storage for Less Computation", USENIX FAST 2025.
//! - Bailian (JSON lines): the same with `chat_id`, `timestamp` in seconds and `hash_ids` of 16 tokens.
//!   github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
//! - vLLM's timed traces (JSON lines): Mooncake's fields, `timestamp` in seconds and `hash_ids` of 16 tokens,
//!   the defaults of `vllm bench serve --dataset-name timed_trace`. Told from Mooncake's by more ids than
//!   blocks of 512 tokens.
//! - Azure (CSV): `TIMESTAMP,ContextTokens,GeneratedTokens`, a date with up to seven digits of a second.
//!   github.com/Azure/AzurePublicDataset.
//! - BurstGPT (CSV): `Timestamp` in seconds, `Request tokens`, `Response tokens`, ….
//!   github.com/HPMLL/BurstGPT.

use serde::Deserialize;

use crate::trace::{BLOCK_TOKENS, Row, RowError};

/// Tokens of one hash id of Bailian's and vLLM's.
pub const SMALL_BLOCK_TOKENS: u32 = 16;

/// Ids that a row of a trace may lack and still be told by how many it has.
const LEFT_OUT_MAX: u64 = 4;

/// What a file's lines are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceFormat {
    /// Mooncake's JSON lines: times in milliseconds, one id for each 512 tokens.
    Mooncake,
    /// Bailian's JSON lines, told by `chat_id`: times in seconds, one id for each 16 tokens.
    Bailian,
    /// vLLM's timed JSON lines, told by their many ids: times in seconds, one id for each 16 tokens.
    VllmTimed,
    /// See the module. Times count from the first row's, in milliseconds since 1970.
    Azure {
        /// The first row's time, once it is known.
        first_ms: Option<u64>,
    },
    /// See the module. The places of the three columns.
    BurstGpt {
        /// Place of the column `Timestamp`, from 0.
        timestamp: usize,
        /// Place of the column `Request tokens`, from 0.
        input: usize,
        /// Place of the column `Response tokens`, from 0.
        output: usize,
    },
}

#[derive(Deserialize)]
struct JsonRow {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Box<[u64]>,
}

impl TraceFormat {
    /// The format of a file that begins with `line`, and whether that line is a header. A line of no known
    /// format is taken for Mooncake's, whose reader then says what is missing.
    pub fn detect(line: &str) -> (Self, bool) {
        let line = line.trim().trim_start_matches('\u{feff}');
        if line.starts_with('{') {
            return (Self::of_json(line), false);
        }
        let columns: Vec<_> = line.split(',').map(|name| name.trim().to_ascii_lowercase()).collect();
        let place = |name: &str| columns.iter().position(|column| column == name);
        if columns == ["timestamp", "contexttokens", "generatedtokens"] {
            return (Self::Azure { first_ms: None }, true);
        }
        match (place("timestamp"), place("request tokens"), place("response tokens")) {
            (Some(timestamp), Some(input), Some(output)) => {
                (Self::BurstGpt { timestamp, input, output }, true)
            }
            _ => (Self::Mooncake, false),
        }
    }

    fn of_json(line: &str) -> Self {
        if line.contains("\"chat_id\"") {
            return Self::Bailian;
        }
        // Some traces leave out a few of the last ids.
        let is_finer = |row: &JsonRow| {
            let (ids, tokens) = (row.hash_ids.len() as u64, row.input_length);
            let reach = (ids + LEFT_OUT_MAX) * u64::from(SMALL_BLOCK_TOKENS);
            ids > u64::from(tokens.div_ceil(BLOCK_TOKENS)) && reach >= u64::from(tokens)
        };
        let finer = serde_json::from_str(line).is_ok_and(|row| is_finer(&row));
        if finer { Self::VllmTimed } else { Self::Mooncake }
    }

    /// Prompt tokens of one hash id.
    pub fn block_tokens(&self) -> u32 {
        match self {
            Self::Bailian | Self::VllmTimed => SMALL_BLOCK_TOKENS,
            _ => BLOCK_TOKENS,
        }
    }

    /// As people call it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::Bailian => "bailian",
            Self::VllmTimed => "vllm-timed",
            Self::Azure { .. } => "azure",
            Self::BurstGpt { .. } => "burstgpt",
        }
    }

    /// What `line` says. Azure's and BurstGPT's rows have no ids: nothing of their prompts is shared.
    pub fn read(&mut self, line: &str) -> Result<Row, RowError> {
        let fields: Vec<&str> = line.trim().split(',').map(str::trim).collect();
        let field = |place: usize| *fields.get(place).unwrap_or(&"");
        match self {
            Self::Mooncake => json(line, 1.0),
            Self::Bailian | Self::VllmTimed => json(line, 1e3),
            Self::Azure { first_ms } => {
                let ms = date_ms(field(0)).ok_or_else(|| RowError::Date(field(0).into()))?;
                let first_ms = *first_ms.get_or_insert(ms);
                let since_ms = ms.checked_sub(first_ms).ok_or(RowError::BeforeFirst)?;
                Ok(plain(since_ms, tokens(field(1))?, tokens(field(2))?))
            }
            Self::BurstGpt { timestamp, input, output } => {
                let text = field(*timestamp);
                let seconds: f64 = text.parse().map_err(|_| RowError::Seconds(text.into()))?;
                Ok(plain((seconds * 1e3).max(0.0) as u64, tokens(field(*input))?, tokens(field(*output))?))
            }
        }
    }
}

fn plain(timestamp_ms: u64, input_tokens: u32, output_tokens: u32) -> Row {
    Row { timestamp_ms, input_tokens, output_tokens, blocks: Box::default() }
}

/// `unit_ms`: milliseconds of the timestamp's unit.
fn json(line: &str, unit_ms: f64) -> Result<Row, RowError> {
    let raw: JsonRow = serde_json::from_str(line)?;
    if !raw.timestamp.is_finite() || raw.timestamp < 0.0 {
        return Err(RowError::Negative(raw.timestamp));
    }
    Ok(Row {
        timestamp_ms: (raw.timestamp * unit_ms).round() as u64,
        input_tokens: raw.input_length,
        output_tokens: raw.output_length,
        blocks: raw.hash_ids,
    })
}

fn tokens(text: &str) -> Result<u32, RowError> {
    // BurstGPT writes some counts as `472.0`.
    let count = text.parse::<f64>().ok().filter(|n| n.fract() == 0.0 && (0.0..4e9).contains(n));
    count.map(|n| n as u32).ok_or_else(|| RowError::Tokens(text.into()))
}

/// Milliseconds since 1970 of `2023-11-16 18:17:03.9799600`; a zone behind it is left out.
fn date_ms(text: &str) -> Option<u64> {
    let (date, time) = text.trim_matches('"').split_once([' ', 'T'])?;
    let mut date = date.split('-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let time = time.split(['+', 'Z']).next()?;
    let mut time = time.split(':');
    let (hour, minute) = (time.next()?.parse::<u64>().ok()?, time.next()?.parse::<u64>().ok()?);
    let seconds: f64 = time.next()?.parse().ok().filter(|s| (0.0..61.0).contains(s))?;
    if !(1970..10_000).contains(&year)
        || !(1..=12).contains(&month)
        || !(1..=31).contains(&day)
        || hour > 23
        || minute > 59
    {
        return None;
    }
    // Days by counting years from March, so that the leap day is a year's last: H. Hinnant,
    // "chrono-Compatible Low-Level Date Algorithms", 2013.
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468;
    Some((days as u64 * 86_400 + hour * 3600 + minute * 60) * 1000 + (seconds * 1e3).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Result<Vec<Row>, RowError> {
        let mut lines = text.lines();
        let first = lines.next().unwrap();
        let (mut format, header) = TraceFormat::detect(first);
        let first = (!header).then_some(first);
        first.into_iter().chain(lines).map(|line| format.read(line)).collect()
    }

    #[test]
    fn azure() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n\
                    2023-11-16 18:17:04.0319600,3180,8\n2023-11-17T00:00:00+00:00,110,27";
        let rows = rows(text).unwrap();
        let shown: Vec<_> = rows.iter().map(|r| (r.timestamp_ms, r.input_tokens, r.output_tokens)).collect();
        let midnight_ms = (5 * 3600 + 42 * 60 + 56) * 1000 + 20;
        assert_eq!(shown, [(0, 4808, 10), (52, 3180, 8), (midnight_ms, 110, 27)]);
    }

    #[test]
    fn dates() {
        for (text, ms) in [
            ("1970-01-01 00:00:00", 0),
            ("2000-02-29 12:00:00.5", 951_825_600_500),
            ("2024-03-01T00:00:00Z", 1_709_251_200_000),
            ("2023-12-31 23:59:59.9996", 1_704_067_200_000),
        ] {
            assert_eq!(date_ms(text), Some(ms), "{text}");
        }
        for bad in ["", "2023-11-16", "2023-13-01 00:00:00", "2023-11-16 25:00:00", "x-y-z 1:2:3"] {
            assert_eq!(date_ms(bad), None, "{bad}");
        }
    }

    #[test]
    fn burstgpt_with_and_without_sessions() {
        let text = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                    5.5,1,2,GPT-4,472,18.0,490,Conversation log";
        let old = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5.5,GPT-4,472,18,490,API log";
        let want = plain(5500, 472, 18);
        assert_eq!(
            (rows(text).unwrap().as_slice(), rows(old).unwrap().as_slice()),
            (&[want][..], &[plain(5500, 472, 18)][..])
        );
    }

    #[test]
    fn bailian_counts_seconds_and_blocks_of_sixteen() {
        let line = r#"{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [7, 8]}"#;
        let (mut format, header) = TraceFormat::detect(line);
        assert_eq!((&format, header, format.block_tokens()), (&TraceFormat::Bailian, false, 16));
        let row = format.read(line).unwrap();
        assert_eq!((row.timestamp_ms, &*row.blocks), (61_114, &[7, 8][..]));
    }

    #[test]
    fn vllm_s_timed_traces_are_told_by_their_many_ids() {
        let line = r#"{"timestamp": 1.5, "input_length": 40, "output_length": 3, "hash_ids": [7, 8, 9]}"#;
        let (mut format, _) = TraceFormat::detect(line);
        assert_eq!(
            (&format, format.block_tokens(), format.name()),
            (&TraceFormat::VllmTimed, 16, "vllm-timed")
        );
        assert_eq!(format.read(line).unwrap().timestamp_ms, 1500);
        let line = r#"{"timestamp": 1, "input_length": 513, "output_length": 3, "hash_ids": [7, 8]}"#;
        assert_eq!(TraceFormat::detect(line).0, TraceFormat::Mooncake);
    }

    #[test]
    fn bad_lines_say_why() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        for (text, want) in [
            (format!("{azure}yesterday,1,1"), "`yesterday` is no date"),
            (format!("{azure}2023-11-16 18:17:03,many,1"), "`many` is no number of tokens"),
            (format!("{azure}2023-11-16 18:17:03,1,1\n2023-11-16 18:17:02,1,1"), "sort the trace"),
            (
                r#"{"timestamp": -4, "input_length": 1, "output_length": 1, "hash_ids": []}"#.into(),
                "is below 0",
            ),
            ("a,b,c".into(), "not a request of a trace"),
        ] {
            let error = rows(&text).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
