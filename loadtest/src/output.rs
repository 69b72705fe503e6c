//! The files of a run: `run.json` and `requests.jsonl`. Opened before the run, so that a mistake costs no
//! measurement.

use std::{
    fs::{self, File},
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{args::run::OutputArgs, client::record::Record, error::Error};

/// The files that grow during a run.
#[derive(Debug)]
pub struct Output {
    records: Option<(PathBuf, BufWriter<File>)>,
}

impl Output {
    /// Makes the folder and opens what `args` ask for.
    pub fn open(args: &OutputArgs) -> Result<Self, Error> {
        let Some(dir) = &args.dir else { return Ok(Self { records: None }) };
        make_dir(dir)?;
        let path = dir.join("requests.jsonl");
        let open = || File::create(&path).map_err(|source| Error::Write { path: path.clone(), source });
        let file = args.records.then(open).transpose()?;
        Ok(Self { records: file.map(|file| (path, BufWriter::new(file))) })
    }

    /// Writes one request's line.
    pub fn record(&mut self, record: &Record) -> Result<(), Error> {
        let Some((path, file)) = &mut self.records else { return Ok(()) };
        let line = serde_json::to_string(&record.line()).unwrap_or_default();
        writeln!(file, "{line}").map_err(|source| Error::Write { path: path.clone(), source })
    }

    /// Writes what is still held back.
    pub fn close(mut self) -> Result<(), Error> {
        let Some((path, file)) = &mut self.records else { return Ok(()) };
        file.flush().map_err(|source| Error::Write { path: path.clone(), source })
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
