//! The files of a run: `run.json`, and `requests.jsonl` or `requests.csv`. Opened before the run, so that a
//! mistake costs no measurement.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    args::run::{OutputArgs, RecordFormat},
    client::record::Record,
    error::Error,
};

/// The files that grow during a run.
#[derive(Debug)]
pub struct Output {
    records: Option<(PathBuf, Lines)>,
}

/// A file of single requests.
#[derive(Debug)]
enum Lines {
    Jsonl(BufWriter<File>),
    Csv(Box<csv::Writer<File>>),
}

impl Lines {
    fn create(path: &Path, format: RecordFormat) -> io::Result<Self> {
        let file = File::create(path)?;
        Ok(match format {
            RecordFormat::Jsonl => Self::Jsonl(BufWriter::new(file)),
            RecordFormat::Csv => Self::Csv(Box::new(csv::Writer::from_writer(file))),
        })
    }

    fn add(&mut self, record: &Record) -> io::Result<()> {
        match self {
            Self::Jsonl(file) => writeln!(file, "{}", serde_json::to_string(&record.line())?),
            Self::Csv(file) => file.serialize(record.line()).map_err(io::Error::from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Jsonl(file) => file.flush(),
            Self::Csv(file) => file.flush(),
        }
    }
}

impl Output {
    /// Makes the folder and opens what `args` ask for.
    pub fn open(args: &OutputArgs) -> Result<Self, Error> {
        let Some(dir) = &args.dir else { return Ok(Self { records: None }) };
        make_dir(dir)?;
        let open = |format| {
            let name = match format {
                RecordFormat::Jsonl => "requests.jsonl",
                RecordFormat::Csv => "requests.csv",
            };
            let path = dir.join(name);
            match Lines::create(&path, format) {
                Ok(lines) => Ok((path, lines)),
                Err(source) => Err(Error::Write { path, source }),
            }
        };
        Ok(Self { records: args.records.map(open).transpose()? })
    }

    /// Writes one request's line.
    pub fn record(&mut self, record: &Record) -> Result<(), Error> {
        let Some((path, lines)) = &mut self.records else { return Ok(()) };
        lines.add(record).map_err(|source| Error::Write { path: path.clone(), source })
    }

    /// Writes what is still held back.
    pub fn close(mut self) -> Result<(), Error> {
        let Some((path, lines)) = &mut self.records else { return Ok(()) };
        lines.flush().map_err(|source| Error::Write { path: path.clone(), source })
    }
}

/// Makes a folder and those above it.
pub fn make_dir(dir: &Path) -> Result<(), Error> {
    fs::create_dir_all(dir).map_err(|source| Error::Write { path: dir.into(), source })
}

/// Writes `value` as JSON to `dir/name`: beside and renamed, so that a reader never sees half of it.
pub fn write_json(dir: &Path, name: &str, value: &impl Serialize) -> Result<(), Error> {
    let json = serde_json::to_string_pretty(value).unwrap_or_default();
    write_text(&dir.join(name), &(json + "\n"))
}

/// Writes a file: beside and renamed.
pub fn write_text(path: &Path, text: &str) -> Result<(), Error> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    fs::write(&partial, text)
        .and_then(|()| fs::rename(&partial, path))
        .map_err(|source| Error::Write { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::{
        args::{Args, Command},
        client::record::{Outcome, tests::good},
    };

    fn written(records: &str, name: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let line = format!("keyway-loadtest run --url http://h {records} -o {}", dir.path().display());
        let Command::Run(args) = Args::try_parse_from(line.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        let mut output = Output::open(&args.output).unwrap();
        let mut record = good(0, 1, 10, 20);
        record.exchange.worker = Some("http://w:1, the \"first\"".into());
        output.record(&record).unwrap();
        (record.exchange.outcome, record.exchange.usage) = (Outcome::Cancelled, None);
        (record.exchange.first_ns, record.exchange.worker) = (None, None);
        output.record(&record).unwrap();
        output.close().unwrap();
        fs::read_to_string(dir.path().join(name)).unwrap()
    }

    #[test]
    fn each_request_has_a_line_in_either_shape() {
        let lines = written("--records", "requests.jsonl");
        let lines: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines.len(), &lines[0]["first_ms"]), (2, &serde_json::json!(10.0)));
        let table = written("--records=csv", "requests.csv");
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[0],
            "row,intended_ms,queued_ms,sent_ms,head_ms,first_ms,end_ms,outcome,worker,prompt_tokens,cached_tokens,\
             completion_tokens,possible_tokens,pooled_lru_tokens,warmup,session,agent,turn"
        );
        assert_eq!(
            lines[1],
            "0,0.0,0.0,1.0,1.0,10.0,20.0,ok,\"http://w:1, the \"\"first\"\"\",40,,3,0,,false,,,"
        );
        assert_eq!(lines[2], "0,0.0,0.0,1.0,1.0,,20.0,cancelled,,,,,0,,false,,,");
    }
}
