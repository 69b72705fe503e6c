//! Lines for a file that may be slow, full or a pipe that no process reads: a thread of its own writes them,
//! what it cannot keep up with is dropped, and what becomes of each is told. The thread that logs a line
//! waits for nothing. The logs of gateway and worker are such.
//!
//! The thread is there while there are lines: a process of one thread takes less for each system call and for
//! each block of memory, and one that logs nothing need not have another.

use std::{
    io::{self, Write},
    mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Lines that wait are written together, up to about so many bytes.
const TOGETHER_BYTES: usize = 64 << 10;

/// How long the thread waits for another line.
const IDLE: Duration = Duration::from_secs(5);

/// Time between two writes, in which lines gather: to wake the thread for each costs more than all else that
/// a line does. The first line after a pause is written at once.
const GATHER: Duration = Duration::from_millis(50);

/// What becomes of lines.
#[derive(Debug)]
pub enum Fate<'a> {
    /// They are in the file.
    Written,
    /// They did not fit into the bytes that may wait, and are lost.
    Dropped,
    /// They could not be written.
    Failed(&'a io::Error),
}

/// Is told what becomes of how many lines.
type Tell = Box<dyn Fn(Fate<'_>, u64) + Send + Sync>;

/// Takes lines for one file, from any thread. Clones share what waits, and its bound.
#[derive(Clone)]
pub struct Lines(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    more: Condvar,
    name: String,
    bytes_max: usize,
    idle: Duration,
    gather: Duration,
    tell: Tell,
}

struct State {
    /// Lines with their ends.
    waiting: Vec<u8>,
    /// Of those that wait or are being written.
    bytes: usize,
    /// The thread has just written, and lets lines gather.
    gathers: bool,
    /// What waits is not to gather.
    hurries: bool,
    /// Dropped once all that waits has been written, as far as it could be.
    flushes: Vec<Sender<()>>,
    /// There while no thread has it.
    writer: Option<Writer<Box<dyn Write + Send>>>,
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.flushes.is_empty()
    }
}

impl Lines {
    /// Writes lines to `file` on a thread of this name; `bytes_max` of them may wait.
    pub fn to(
        name: &str,
        file: impl Write + Send + 'static,
        bytes_max: usize,
        tell: impl Fn(Fate<'_>, u64) + Send + Sync + 'static,
    ) -> Self {
        Self::with_times((IDLE, GATHER), name, file, bytes_max, tell)
    }

    fn with_times(
        (idle, gather): (Duration, Duration),
        name: &str,
        file: impl Write + Send + 'static,
        bytes_max: usize,
        tell: impl Fn(Fate<'_>, u64) + Send + Sync + 'static,
    ) -> Self {
        let writer = Some(Writer { file: Box::new(file) as Box<dyn Write + Send>, torn: false });
        let state = Mutex::new(State {
            waiting: Vec::new(),
            bytes: 0,
            gathers: false,
            hurries: false,
            flushes: Vec::new(),
            writer,
        });
        let (name, tell) = (name.to_owned(), Box::new(tell));
        Self(Arc::new(Shared { state, more: Condvar::new(), name, bytes_max, idle, gather, tell }))
    }

    /// Takes a line with its end, if there is room for it. It is written within some 50 ms.
    pub fn send(&self, line: &[u8]) {
        self.take(line, false);
    }

    /// As [`Lines::send`], for a line that is to be written at once, with those before it.
    pub fn send_now(&self, line: &[u8]) {
        self.take(line, true);
    }

    fn take(&self, line: &[u8], hurries: bool) {
        let mut state = self.0.state();
        if state.bytes + line.len() > self.0.bytes_max {
            drop(state);
            (self.0.tell)(Fate::Dropped, 1);
            return;
        }
        state.bytes += line.len();
        state.waiting.extend_from_slice(line);
        // Before there is no room for more.
        state.hurries |= hurries || state.bytes > self.0.bytes_max / 2;
        if let Some(writer) = state.writer.take() {
            drop(state);
            self.begin(writer);
        } else if state.hurries || !state.gathers {
            drop(state);
            self.0.more.notify_one();
        }
    }

    /// Has a thread write what waits.
    fn begin(&self, writer: Writer<Box<dyn Write + Send>>) {
        let shared = Arc::clone(&self.0);
        // What could not be started gives back what it was to take along.
        let (given, taken) = channel();
        let run = move || {
            if let Ok(writer) = taken.recv() {
                shared.write(writer);
            }
        };
        match thread::Builder::new().name(self.0.name.clone()).spawn(run) {
            Ok(_) => drop(given.send(writer)),
            Err(error) => {
                let mut state = self.0.state();
                let lost = mem::take(&mut state.waiting);
                (state.bytes, state.hurries) = (0, false);
                state.flushes.clear();
                state.writer = Some(writer);
                drop(state);
                (self.0.tell)(Fate::Failed(&error), lines_in(&lost));
            }
        }
    }

    /// Waits until what was sent has been written, or could not be; for no longer than this. Whether it has.
    pub fn flush(&self, patience: Duration) -> bool {
        let (flush, written) = channel();
        let mut state = self.0.state();
        if state.bytes == 0 {
            return true;
        }
        state.flushes.push(flush);
        drop(state);
        self.0.more.notify_one();
        // It says nothing, and is dropped.
        written.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected)
    }
}

impl Shared {
    /// Nothing that panics is done while it is held.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes until no line has come for a while.
    fn write(&self, mut writer: Writer<Box<dyn Write + Send>>) {
        loop {
            let waited = self
                .more
                .wait_timeout_while(self.state(), self.idle, |state| state.is_idle())
                .unwrap_or_else(PoisonError::into_inner);
            let mut state = waited.0;
            if state.is_idle() {
                state.writer = Some(writer);
                return;
            }
            let (lines, flushes) = (mem::take(&mut state.waiting), mem::take(&mut state.flushes));
            state.hurries = false;
            drop(state);
            let mut rest = &lines[..];
            while !rest.is_empty() {
                let from = rest.len().min(TOGETHER_BYTES) - 1;
                let end = memchr::memchr(b'\n', &rest[from..]).map_or(rest.len(), |more| from + more + 1);
                let (together, others) = rest.split_at(end);
                writer.write(together, &*self.tell);
                self.state().bytes -= together.len();
                rest = others;
            }
            drop(flushes);
            self.let_gather();
        }
    }

    /// Waits for lines, for those that hurry no longer than until they come.
    fn let_gather(&self) {
        let mut state = self.state();
        state.gathers = true;
        let waits = |state: &mut State| !state.hurries && state.flushes.is_empty();
        let waited = self.more.wait_timeout_while(state, self.gather, waits);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.gathers = false;
    }
}

fn lines_in(bytes: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', bytes).count() as u64
}

/// The lines of a log: warnings and errors do not gather, since the process may be about to end.
impl<'a> MakeWriter<'a> for Lines {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter { lines: self, hurries: false }
    }

    fn make_writer_for(&'a self, line: &Metadata<'_>) -> LineWriter<'a> {
        LineWriter { lines: self, hurries: *line.level() <= Level::WARN }
    }
}

/// Writes to [`Lines`]: what is written at once is a line with its end.
#[derive(Debug)]
pub struct LineWriter<'a> {
    lines: &'a Lines,
    hurries: bool,
}

impl Write for LineWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.lines.take(line, self.hurries);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("bytes", &self.0.state().bytes).finish_non_exhaustive()
    }
}

struct Writer<F> {
    file: F,
    /// The file ends within a line, as there was no room for the rest.
    torn: bool,
}

impl<F: Write> Writer<F> {
    /// Writes whole lines. What there is no room for is lost: there would be more and more of it.
    fn write(&mut self, lines: &[u8], tell: &dyn Fn(Fate<'_>, u64)) {
        let (written, result) = self.write_up_to(lines);
        let (whole, rest) = lines.split_at(written);
        if written > 0 {
            self.torn = !whole.ends_with(b"\n");
        }
        tell(Fate::Written, lines_in(whole));
        if let Err(error) = result {
            tell(Fate::Failed(&error), lines_in(rest));
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
