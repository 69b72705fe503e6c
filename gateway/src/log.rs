//! The log on stderr. A thread of its own writes it, so that a pipe that nobody reads or a disk that hangs holds up no request: what it
//! cannot keep up with is dropped, a line at a time, and counted.

use std::{
    io::{self, IsTerminal, Write},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Duration,
};

use prometheus::IntCounter;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use crate::{config::LogFormat, limits::LOG_QUEUE_BYTES};

/// How long the end of the process waits for the last lines.
const LAST_LINES_PATIENCE: Duration = Duration::from_secs(1);

/// The process's, whichever gateway it happened to.
static LOST: LazyLock<Option<IntCounter>> = LazyLock::new(|| {
    IntCounter::new(
        "keyway_log_lines_lost_total",
        "Lines of the log that were not written: it was read too slowly, or could not be written to.",
    )
    .ok()
});

/// The count of lost lines, to be shown.
pub fn counter() -> prometheus::Result<IntCounter> {
    LOST.clone().ok_or_else(|| prometheus::Error::Msg("lost lines cannot be counted".to_owned()))
}

fn lose() {
    if let Some(lost) = &*LOST {
        lost.inc();
    }
}

/// Logs from now on; once what is returned is dropped, the last lines have been written, if that took no more than a second.
pub fn to_stderr(format: LogFormat) -> io::Result<Lines> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let colour = io::stderr().is_terminal();
    let lines = Lines::to(io::stderr())?;
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(lines.queue.clone()).with_ansi(colour);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(lines)
}

/// The log's lines on their way.
#[derive(Debug)]
pub struct Lines {
    queue: Queue,
}

/// Takes lines. What it is written at once is one.
#[derive(Debug, Clone)]
pub struct Queue {
    lines: Sender<Waiting>,
    /// Of those that wait.
    bytes: Arc<AtomicUsize>,
}

#[derive(Debug)]
enum Waiting {
    Line(Vec<u8>),
    /// Dropped once all before it is written.
    Last(Sender<()>),
}

impl Lines {
    /// Writes lines there.
    fn to(file: impl Write + Send + 'static) -> io::Result<Self> {
        let ((lines, waiting), bytes) = (channel(), Arc::default());
        let queue = Queue { lines, bytes: Arc::clone(&bytes) };
        thread::Builder::new().name("log".to_owned()).spawn(move || write_all(file, &waiting, &bytes))?;
        Ok(Self { queue })
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let (last, written) = channel();
        if self.queue.lines.send(Waiting::Last(last)).is_ok() {
            // It says nothing, and is dropped.
            let _ = written.recv_timeout(LAST_LINES_PATIENCE);
        }
    }
}

impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let before = self.bytes.fetch_add(line.len(), Relaxed);
        let has_room = before + line.len() <= LOG_QUEUE_BYTES;
        if !has_room || self.lines.send(Waiting::Line(line.to_vec())).is_err() {
            self.bytes.fetch_sub(line.len(), Relaxed);
            lose();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Queue {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// Writes lines until nobody has any more. One that cannot be written is lost, and the next one begins a line.
fn write_all(mut file: impl Write, waiting: &Receiver<Waiting>, bytes: &AtomicUsize) {
    let mut torn = false;
    for waiting in waiting {
        let line = match waiting {
            Waiting::Line(line) => line,
            Waiting::Last(written) => {
                drop(written);
                continue;
            }
        };
        let begun = if torn { file.write_all(b"\n") } else { Ok(()) };
        torn = begun.and_then(|()| file.write_all(&line)).is_err();
        bytes.fetch_sub(line.len(), Relaxed);
        if torn {
            lose();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc::sync_channel};

    use super::*;

    /// Tests that count run one after the other: there is one count.
    static ALONE: Mutex<()> = Mutex::new(());

    /// Has room for so many bytes each time that it is asked.
    struct Disk {
        rooms: Vec<usize>,
        held: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.rooms.pop().unwrap_or(usize::MAX));
            self.held.lock().unwrap().extend(&bytes[..taken]);
            if taken == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(taken) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lost() -> u64 {
        counter().unwrap().get()
    }

    #[test]
    fn a_line_that_finds_no_room_is_counted_and_the_next_one_is_whole() {
        let _alone = ALONE.lock().unwrap();
        let (before, held) = (lost(), Arc::default());
        // The second line is cut after a byte.
        let lines = Lines::to(Disk { rooms: vec![0, 1, 4], held: Arc::clone(&held) }).unwrap();
        for line in ["one\n", "two\n", "three\n"] {
            lines.queue.clone().write_all(line.as_bytes()).unwrap();
        }
        drop(lines);
        assert_eq!(String::from_utf8(held.lock().unwrap().clone()).unwrap(), "one\nt\nthree\n");
        assert_eq!(lost() - before, 1);
    }

    #[test]
    fn a_reader_that_has_stopped_holds_up_nobody_and_what_waits_is_bounded() {
        struct Stopped(Receiver<()>);
        impl Write for Stopped {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let _ = self.0.recv();
                Ok(bytes.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let _alone = ALONE.lock().unwrap();
        let (goes_on, stopped) = sync_channel(0);
        let lines = Lines::to(Stopped(stopped)).unwrap();
        let (before, line) = (lost(), vec![b'x'; 1 << 20]);
        let count = 2 * LOG_QUEUE_BYTES / line.len();
        for _ in 0..count {
            lines.queue.clone().write_all(&line).unwrap();
            assert!(lines.queue.bytes.load(Relaxed) <= LOG_QUEUE_BYTES);
        }
        assert_eq!(lost() - before, count as u64 / 2);
        // As it goes on, there is room again.
        drop(goes_on);
        while lines.queue.bytes.load(Relaxed) > 0 {
            thread::yield_now();
        }
        lines.queue.clone().write_all(&line).unwrap();
        assert_eq!(lost() - before, count as u64 / 2);
    }
}
