//! Lines for a file that may be slow, full or a pipe that nobody reads: a thread of its own writes them, what
//! it cannot keep up with is dropped, and what becomes of each is told. Whoever has a line waits for nothing.
//! The logs of gateway and worker are such.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Duration,
};

/// Lines that wait are written together, up to about so many bytes.
const TOGETHER_BYTES: usize = 64 << 10;

/// What becomes of lines.
#[derive(Debug)]
pub enum Fate<'a> {
    /// They are in the file.
    Written,
    /// Too many waited.
    Dropped,
    /// They could not be written.
    Failed(&'a io::Error),
}

/// Is told what becomes of how many lines.
type Tell = Arc<dyn Fn(Fate<'_>, u64) + Send + Sync>;

/// Takes lines.
#[derive(Clone)]
pub struct Lines {
    queue: Sender<Waiting>,
    /// Of those that wait, and how many may.
    bytes: Arc<AtomicUsize>,
    bytes_max: usize,
    tell: Tell,
}

enum Waiting {
    /// One, with its end.
    Line(Vec<u8>),
    /// Dropped once all before it has been written, as far as it could be.
    Flush(Sender<()>),
}

impl Lines {
    /// Writes lines to `file` on a thread of this name; `bytes_max` of them may wait.
    pub fn start(
        name: &str,
        file: impl Write + Send + 'static,
        bytes_max: usize,
        tell: impl Fn(Fate<'_>, u64) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let (queue, waiting) = channel();
        let (bytes, tell): (Arc<AtomicUsize>, Tell) = (Arc::default(), Arc::new(tell));
        let (of_writer, tells) = (Arc::clone(&bytes), Arc::clone(&tell));
        let mut writer = Writer { file, torn: false };
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || writer.run(&waiting, &of_writer, &*tells))?;
        Ok(Self { queue, bytes, bytes_max, tell })
    }

    /// Takes a line with its end, if there is room for it.
    pub fn send(&self, line: Vec<u8>) {
        let bytes = line.len();
        let before = self.bytes.fetch_add(bytes, Relaxed);
        if before + bytes > self.bytes_max || self.queue.send(Waiting::Line(line)).is_err() {
            self.bytes.fetch_sub(bytes, Relaxed);
            (self.tell)(Fate::Dropped, 1);
        }
    }

    /// For whoever wants something to write to, as `tracing-subscriber` does.
    pub fn writer(&self) -> LineWriter {
        LineWriter(self.clone())
    }

    /// Waits until what was sent has been written, or could not be; for no longer than this. Whether it has.
    pub fn flush(&self, patience: Duration) -> bool {
        let (flush, written) = channel();
        // It says nothing, and is dropped.
        self.queue.send(Waiting::Flush(flush)).is_ok()
            && written.recv_timeout(patience) == Err(std::sync::mpsc::RecvTimeoutError::Disconnected)
    }
}

/// Writes to [`Lines`]: what is written at once is a line with its end.
#[derive(Debug, Clone)]
pub struct LineWriter(Lines);

impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.send(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

struct Writer<F> {
    file: F,
    /// The file ends within a line, as there was no room for the rest.
    torn: bool,
}

impl<F: Write> Writer<F> {
    /// Until nobody has any more lines.
    fn run(&mut self, waiting: &Receiver<Waiting>, bytes: &AtomicUsize, tell: &dyn Fn(Fate<'_>, u64)) {
        let mut together = Vec::new();
        while let Ok(first) = waiting.recv() {
            let mut flushes = Vec::new();
            let mut next = Some(first);
            while let Some(one) = next.take() {
                match one {
                    Waiting::Line(line) => together.extend(line),
                    Waiting::Flush(flush) => flushes.push(flush),
                }
                next = if together.len() < TOGETHER_BYTES { waiting.try_recv().ok() } else { None };
            }
            self.write(&together, tell);
            bytes.fetch_sub(together.len(), Relaxed);
            together.clear();
        }
    }

    /// Writes whole lines. What there is no room for is lost: there would be more and more of it.
    fn write(&mut self, lines: &[u8], tell: &dyn Fn(Fate<'_>, u64)) {
        let (written, result) = self.write_up_to(lines);
        let (whole, rest) = lines.split_at(written);
        if written > 0 {
            self.torn = !whole.ends_with(b"\n");
        }
        let count = |bytes| memchr::memchr_iter(b'\n', bytes).count() as u64;
        tell(Fate::Written, count(whole));
        if let Err(error) = result {
            tell(Fate::Failed(&error), count(rest));
        }
    }

    /// Writes as much as there is room for, behind the end of a torn line; how many of the bytes that is.
    fn write_up_to(&mut self, bytes: &[u8]) -> (usize, io::Result<()>) {
        if self.torn
            && let Err(error) = self.file.write_all(b"\n")
        {
            return (0, Err(error));
        }
        let mut written = 0;
        while written < bytes.len() {
            match self.file.write(&bytes[written..]) {
                Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
                Ok(more) => written += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (written, Err(error)),
            }
        }
        (written, Ok(()))
    }
}

#[cfg(test)]
mod tests;
