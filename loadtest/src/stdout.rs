//! Writing to stdout, where a reader may stop reading.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use crate::error::Error;

/// Writes to stdout; a reader that has seen enough (`| head`) is no failure.
pub fn print(text: &str) -> Result<ExitCode, Error> {
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::Write { path: "stdout".into(), source })
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}
