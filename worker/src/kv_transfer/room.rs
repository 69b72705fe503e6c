//! Memory that two workers of one machine share for a transfer. The importer makes it, as a file without a
//! name that its process alone has open (`memfd_create`), and says where: its process, and the number of the
//! file there. An exporter that may open it, as one of the same user may, writes each block into it and says
//! so in a frame that has the block's sum instead of its bytes. So a block is neither cut into packets nor
//! tagged whole: who could change it could change this process itself.
//!
//! A room has places for a few megabytes of blocks, which are filled in turn. The importer says how many it
//! has read; the exporter writes no block where one lies that was not read.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, memfd_create};
use xxhash_rust::xxh3::xxh3_128;

use super::fault::Fault;

/// What the file is called where the system lists open files.
const NAME: &str = "keyway-kv";
/// Bytes before the first place: the mark, which shows that it is this connection's room.
const HEAD: u64 = 4096;
/// Places begin at multiples of this, as lines of a cache do.
const LINE: usize = 64;

/// What the two ends of a connection alone can know.
pub(super) type Mark = [u8; 32];

/// A block's sum, in a frame.
pub(super) type Sum = [u8; 16];

/// Where another process of this machine finds a room; no places: there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Spot {
    pub(super) process: u32,
    pub(super) file: u32,
    pub(super) places: u32,
}

/// One end of a room.
#[derive(Debug)]
pub(super) struct Room {
    file: File,
    place_bytes: usize,
    places: u32,
    /// Blocks that this end has written or read.
    done: u32,
    /// At the exporter: how many of them the importer has read, by its word.
    read: u32,
}

impl Room {
    /// Makes one of about so many bytes for blocks of at most so many. `None` where the system has no such
    /// files, or no more of them: blocks then go in frames.
    pub(super) fn make(mark: &Mark, bytes: usize, block_bytes: usize) -> Option<Self> {
        let place_bytes = block_bytes.next_multiple_of(LINE).max(LINE);
        let places = u32::try_from((bytes / place_bytes).max(2)).ok()?;
        let file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC).ok()?);
        file.set_len(HEAD + u64::from(places) * place_bytes as u64).ok()?;
        file.write_all_at(mark, 0).ok()?;
        Some(Self { file, place_bytes, places, done: 0, read: 0 })
    }

    /// Where the other end finds it.
    pub(super) fn spot(&self) -> Spot {
        let file = u32::try_from(self.file.as_raw_fd()).unwrap_or_default();
        Spot { process: std::process::id(), file, places: self.places }
    }

    /// Opens the one at a spot, if there is one with that mark: in another container, or of another user,
    /// there is not. No other file is written to, whatever a spot names.
    pub(super) fn open(spot: Spot, mark: &Mark, block_bytes: usize) -> Option<Self> {
        let Spot { process, file, places } = spot;
        let path = format!("/proc/{process}/fd/{file}");
        // Before it is opened: to open a device or a pipe may do something.
        let link = std::fs::read_link(&path).ok()?;
        if places < 2 || !link.to_str()?.starts_with(&format!("/memfd:{NAME} ")) {
            return None;
        }
        let file = File::options().read(true).write(true).open(path).ok()?;
        let mut found = Mark::default();
        file.read_exact_at(&mut found, 0).ok()?;
        let place_bytes = block_bytes.next_multiple_of(LINE).max(LINE);
        let bytes = HEAD + u64::from(places) * place_bytes as u64;
        let is_it = found == *mark && file.metadata().ok()?.len() == bytes;
        is_it.then_some(Self { file, place_bytes, places, done: 0, read: 0 })
    }

    /// Whether the next block has a place.
    pub(super) fn has_place(&self) -> bool {
        self.done - self.read < self.places
    }

    /// Notes that the importer has read so many blocks.
    pub(super) fn was_read(&mut self, blocks: u32) -> Result<(), Fault> {
        if !(self.read..=self.done).contains(&blocks) {
            return Err(Fault::Protocol);
        }
        self.read = blocks;
        Ok(())
    }

    /// Writes the next block, for which there [is a place](Self::has_place).
    pub(super) fn put(&mut self, kv: &[u8]) -> io::Result<Sum> {
        self.file.write_all_at(kv, self.place())?;
        self.done += 1;
        Ok(xxh3_128(kv).to_le_bytes())
    }

    /// Reads the next block, of so many bytes, if that is its sum.
    pub(super) fn take(&mut self, bytes: usize, sum: Sum) -> Result<Vec<u8>, Fault> {
        let mut kv = vec![0; bytes.min(self.place_bytes)];
        self.file.read_exact_at(&mut kv, self.place()).map_err(|_| Fault::Corrupt)?;
        self.done += 1;
        if xxh3_128(&kv).to_le_bytes() == sum { Ok(kv) } else { Err(Fault::Corrupt) }
    }

    /// What the importer has to say of what it has read: now and then, so that places never run out for long.
    pub(super) fn says(&self) -> Option<u32> {
        self.done.is_multiple_of(self.places / 2).then_some(self.done)
    }

    fn place(&self) -> u64 {
        HEAD + u64::from(self.done % self.places) * self.place_bytes as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: Mark = [7; 32];
    const BYTES: usize = 1000;

    fn both(block_bytes: usize) -> (Room, Room) {
        let importer = Room::make(&MARK, BYTES, block_bytes).unwrap();
        let exporter = Room::open(importer.spot(), &MARK, block_bytes).unwrap();
        (importer, exporter)
    }

    fn block(i: u32, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at as u32 * 31 + i) as u8).collect()
    }

    #[test]
    fn blocks_come_as_they_were_written_however_often_places_are_used_again() {
        // Larger than a line, and larger than half of the room.
        for bytes in [100, BYTES / 2 + 1, 5 * BYTES] {
            let (mut importer, mut exporter) = both(bytes);
            let (mut sums, mut taken) = (std::collections::VecDeque::new(), 0);
            let count = importer.places * 3 + 1;
            for i in 0..count {
                while !exporter.has_place() {
                    let sum = sums.pop_front().expect("a full room has blocks to be read");
                    assert_eq!(importer.take(bytes, sum).unwrap(), block(taken, bytes));
                    taken += 1;
                    if let Some(read) = importer.says() {
                        exporter.was_read(read).unwrap();
                    }
                }
                sums.push_back(exporter.put(&block(i, bytes)).unwrap());
            }
            for sum in sums {
                assert_eq!(importer.take(bytes, sum).unwrap(), block(taken, bytes));
                taken += 1;
            }
            assert_eq!(taken, count);
        }
    }

    #[test]
    fn what_was_changed_or_made_shorter_is_not_taken() {
        let (mut importer, mut exporter) = both(100);
        let sum = exporter.put(&block(0, 100)).unwrap();
        exporter.file.write_all_at(&[0xff], HEAD + 40).unwrap();
        assert_eq!(importer.take(100, sum), Err(Fault::Corrupt));
        let sum = exporter.put(&block(1, 100)).unwrap();
        exporter.file.set_len(HEAD).unwrap();
        assert_eq!(importer.take(100, sum), Err(Fault::Corrupt));
        // More than was written was not read.
        assert_eq!(exporter.was_read(3), Err(Fault::Protocol));
        exporter.was_read(2).unwrap();
        assert_eq!(exporter.was_read(1), Err(Fault::Protocol), "what was read stays so");
    }

    #[test]
    fn nothing_else_is_opened() {
        let importer = Room::make(&MARK, BYTES, 100).unwrap();
        let spot = importer.spot();
        assert!(Room::open(spot, &MARK, 100).is_some());
        assert!(Room::open(spot, &[8; 32], 100).is_none(), "another connection's");
        assert!(Room::open(spot, &MARK, 200).is_none(), "of other blocks");
        assert!(Room::open(Spot { places: spot.places + 1, ..spot }, &MARK, 100).is_none());
        assert!(Room::open(Spot { process: u32::MAX, ..spot }, &MARK, 100).is_none());
        assert!(Room::open(Spot::default(), &MARK, 100).is_none());
        // A file of this process that begins so, but was made by another hand.
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&MARK, 0).unwrap();
        file.set_len(importer.file.metadata().unwrap().len()).unwrap();
        let other = Spot { file: file.as_raw_fd() as u32, ..spot };
        assert!(Room::open(other, &MARK, 100).is_none());
    }

    #[test]
    fn a_room_is_gone_with_its_ends() {
        // Of its own: another test's room may get the number of its file.
        let mark = [9; 32];
        let importer = Room::make(&mark, BYTES, 100).unwrap();
        let spot = importer.spot();
        drop(importer);
        assert!(Room::open(spot, &mark, 100).is_none());
    }
}
