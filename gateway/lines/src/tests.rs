//! Lines for files that are full, slow or not read: each has one fate, and whole lines stay whole.

use std::sync::Mutex;

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
    let lines = Lines::start("test", Stopped(stopped), 100, tell).unwrap();
    for _ in 0..50 {
        lines.send(b"ten bytes\n".to_vec());
        assert!(lines.bytes.load(Relaxed) <= 100);
    }
    assert_eq!(*fates.0.lock().unwrap(), [0, 40, 0]);
    assert!(!lines.flush(Duration::from_millis(1)), "nothing is written");
    // As it is read again, all that waited is written, and there is room.
    drop(goes_on);
    assert!(lines.flush(PATIENCE));
    lines.send(b"ten bytes\n".to_vec());
    assert!(lines.flush(PATIENCE));
    assert_eq!(*fates.0.lock().unwrap(), [11, 40, 0]);
}
