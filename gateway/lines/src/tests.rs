//! Lines for files that are full, slow or not read: each has one fate, and whole lines stay whole.

use std::sync::mpsc::Receiver;

use proptest::prelude::*;

use super::*;

/// How many lines were written, dropped and could not be written.
#[derive(Debug, Default)]
struct Fates(Mutex<[u64; 3]>);

impl Fates {
    fn tell(&self, fate: &Fate<'_>, lines: u64) {
        let place = match fate {
            Fate::Written => 0,
            Fate::Dropped => 1,
            Fate::Failed(_) => 2,
        };
        self.0.lock().unwrap()[place] += lines;
    }
}

/// Has room for so many bytes, and takes a few at a time.
struct Disk {
    room: usize,
    held: Vec<u8>,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(self.room).min(7);
        if taken == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.room -= taken;
        self.held.extend(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

proptest! {
    /// A disk that is full now and then: each line is told of once, what is told to be written is, and a line
    /// that is cut spoils none.
    #[test]
    fn what_is_told_to_be_written_is_in_the_file(steps in prop::collection::vec((1_usize..4, 0_usize..40), 1..30)) {
        let fates = Fates::default();
        let mut writer = Writer { file: Disk { room: 0, held: Vec::new() }, torn: false };
        let mut sent = 0;
        for (lines, room) in steps {
            let together: Vec<u8> =
                (sent..sent + lines).flat_map(|line| format!("{{\"n\":{line}}}\n").into_bytes()).collect();
            sent += lines;
            writer.file.room = room;
            writer.write(&together, &|fate, lines| fates.tell(&fate, lines));
        }
        let [written, _, failed] = *fates.0.lock().unwrap();
        prop_assert_eq!(written + failed, sent as u64);
        let text = String::from_utf8(writer.file.held).unwrap();
        let is_whole = |line: &&str| line.starts_with("{\"n\":") && line.ends_with("}\n");
        let whole = text.split_inclusive('\n').filter(is_whole).count() as u64;
        // One that lacked only its end has that by the next one.
        prop_assert!(whole >= written && whole <= written + failed, "{}", text);
    }
}

/// Takes a piece each time that it is let, and anything once nobody lets it any more.
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

#[test]
fn a_reader_that_has_stopped_holds_up_nobody_and_what_waits_is_bounded() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let (goes_on, stopped) = channel();
    let fates = Arc::new(Fates::default());
    let told = Arc::clone(&fates);
    let tell = move |fate: Fate<'_>, lines| told.tell(&fate, lines);
    let lines = Lines::to("test", Stopped(stopped), 100, tell);
    for _ in 0..50 {
        lines.send(b"ten bytes\n");
        assert!(lines.0.state().bytes <= 100);
    }
    assert_eq!(*fates.0.lock().unwrap(), [0, 40, 0]);
    assert!(!lines.flush(Duration::from_millis(1)), "nothing is written");
    // As it is read again, all that waited is written, and there is room.
    drop(goes_on);
    assert!(lines.flush(PATIENCE));
    lines.send(b"ten bytes\n");
    assert!(lines.flush(PATIENCE));
    assert_eq!(*fates.0.lock().unwrap(), [11, 40, 0]);
}

/// Keeps what it takes.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn there_is_a_thread_only_while_there_are_lines_and_none_is_lost_between_two() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let kept = Kept::default();
    let lines = Lines::with_times((Duration::ZERO, Duration::ZERO), "test", kept.clone(), 1 << 20, |_, _| {});
    let has_thread = || lines.0.state().writer.is_none();
    assert!(!has_thread() && lines.flush(PATIENCE));
    let mut sent = String::new();
    for line in 0..100 {
        let text = format!("{line}\n");
        lines.send(text.as_bytes());
        sent += &text;
        if line % 10 == 0 {
            assert!(lines.flush(PATIENCE));
            while has_thread() {
                thread::yield_now();
            }
        }
    }
    assert!(lines.flush(PATIENCE));
    assert_eq!(String::from_utf8(kept.0.lock().unwrap().clone()).unwrap(), sent);
}

#[test]
fn lines_longer_than_what_is_written_together_stay_whole() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let kept = Kept::default();
    let fates = Arc::new(Fates::default());
    let told = Arc::clone(&fates);
    let lines = Lines::to("test", kept.clone(), 8 << 20, move |fate, lines| told.tell(&fate, lines));
    let long = [vec![b'a'; 3 * TOGETHER_BYTES], vec![b'\n']].concat();
    for _ in 0..10 {
        lines.send(&long);
        lines.send(b"short\n");
    }
    assert!(lines.flush(PATIENCE));
    assert_eq!(*fates.0.lock().unwrap(), [20, 0, 0]);
    assert_eq!(kept.0.lock().unwrap().len(), 10 * (long.len() + 6));
}

/// Lines that gather for ever, behind one that was written: how many writes there were.
fn gathering() -> (Lines, Arc<Mutex<Vec<Vec<u8>>>>) {
    #[derive(Clone, Default)]
    struct Writes(Arc<Mutex<Vec<Vec<u8>>>>);
    impl Write for Writes {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().push(bytes.to_vec());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let writes = Writes::default();
    let lines = Lines::with_times((Duration::MAX, Duration::MAX), "test", writes.clone(), 1_000, |_, _| {});
    lines.send(b"first\n");
    until_written(&lines);
    (lines, writes.0)
}

/// Until all is written and more would gather; fails after a minute.
fn until_written(lines: &Lines) {
    for _ in 0..60_000 {
        let state = lines.0.state();
        if state.waiting.is_empty() && state.gathers {
            return;
        }
        drop(state);
        thread::park_timeout(Duration::from_millis(1));
    }
    panic!("nothing is written");
}

#[test]
fn lines_gather_until_one_hurries() {
    let (lines, writes) = gathering();
    for line in [b"a\n", b"b\n", b"c\n"] {
        lines.send(line);
    }
    assert_eq!(lines.0.state().waiting, b"a\nb\nc\n", "none is written yet");
    lines.send_now(b"d\n");
    until_written(&lines);
    assert_eq!(*writes.lock().unwrap(), [&b"first\n"[..], b"a\nb\nc\nd\n"]);
    // As before.
    lines.send(b"e\n");
    assert_eq!(lines.0.state().waiting, b"e\n");
    assert!(lines.flush(Duration::from_secs(60)));
    assert_eq!(writes.lock().unwrap().len(), 3);
}

#[test]
fn lines_that_gather_are_written_before_there_is_no_room() {
    let (lines, writes) = gathering();
    for _ in 0..100 {
        lines.send(b"ten bytes\n");
        // The thread may be slower than this one.
        while lines.0.state().bytes > 900 {
            thread::yield_now();
        }
    }
    assert!(lines.flush(Duration::from_secs(60)));
    assert_eq!(writes.lock().unwrap().concat().len(), 1_006);
}

#[test]
fn warnings_and_errors_of_a_log_hurry() {
    let (lines, writes) = gathering();
    let log = tracing_subscriber::fmt().with_writer(lines.clone()).without_time().with_ansi(false).finish();
    tracing::subscriber::with_default(log, || {
        tracing::info!("one");
        assert_eq!(writes.lock().unwrap().len(), 1, "it gathers");
        tracing::warn!("two");
        until_written(&lines);
        tracing::error!("three");
        until_written(&lines);
    });
    let writes: Vec<_> = writes.lock().unwrap().iter().map(|write| lines_in(write)).collect();
    assert_eq!(writes, [1, 2, 1]);
}
