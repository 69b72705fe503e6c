//! How much free memory the allocator keeps at the heap's end. glibc gives back what is over 128 KB there and
//! fetches it again page by page: with sixteen prompts of 32 KB on their way at a time, every third request
//! met a page fault. Allocates nothing that stays.

use std::hint::black_box;

/// What may be free at the heap's end; rooms of some thirty requests of 32 KB, as hyper makes them.
const KEPT_BYTES: usize = 2 << 20;

/// Lets the allocator keep so much. glibc keeps twice the largest block that it has had from the system by
/// itself and given back (`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` in mallopt(3)), so one such block is
/// enough; other allocators do not mind.
pub fn keep_warm() {
    drop(black_box(Vec::<u8>::with_capacity(KEPT_BYTES / 2)));
}

/// Largest block that is taken from the heap.
const HEAP_BYTES_MAX: usize = KEPT_BYTES / 2;

/// What a block of more has at least. glibc's heap keeps what is given back to it: once a block of up to 32
/// MB that came from the system has gone back there, blocks of that size come from the heap
/// (`M_MMAP_THRESHOLD`), and with some of 20 MB on their way the process stayed at twice what was in use. A
/// larger one always comes from the system and goes back to it; what is not written of it takes no memory.
const SYSTEM_BYTES_MIN: usize = (32 << 20) + (4 << 10);

/// The room to make for `bytes`, so that it goes back to the system afterwards.
pub fn room_for(bytes: usize) -> usize {
    if bytes > HEAP_BYTES_MAX { bytes.max(SYSTEM_BYTES_MIN) } else { bytes }
}

#[cfg(test)]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;

    /// Page faults of this thread so far.
    fn faults() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, behind_name) = stat.rsplit_once(") ").unwrap();
        behind_name.split(' ').nth(7).unwrap().parse().unwrap()
    }

    #[test]
    fn rooms_of_requests_are_not_fetched_page_by_page_again() {
        let sixteen_requests = || {
            let rooms: Vec<Vec<u8>> = (0..16).map(|_| black_box(vec![1; 64 << 10])).collect();
            drop(rooms);
        };
        keep_warm();
        sixteen_requests();
        let before = faults();
        (0..100).for_each(|_| sixteen_requests());
        // A megabyte fetched anew each time would be 256 each.
        assert!(faults() - before < 100, "{} page faults", faults() - before);
    }

    /// Memory that the process has.
    fn resident_bytes() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }

    #[test]
    fn what_was_large_goes_back_to_the_system_whatever_comes_behind_it() {
        const BYTES: usize = 20 << 20;
        let written = || {
            let mut block = Vec::with_capacity(room_for(BYTES));
            block.resize(BYTES, 1_u8);
            block
        };
        // From now on glibc would take such blocks from the heap.
        drop(black_box(written()));
        let goes_back = || {
            let before = resident_bytes();
            let (blocks, behind): (Vec<_>, Vec<_>) = (0..4).map(|_| (written(), vec![1_u8; 4 << 10])).unzip();
            let written = resident_bytes();
            drop(blocks);
            let after = resident_bytes();
            drop(behind);
            written > before + 3 * BYTES && after < before + BYTES
        };
        // Other tests of this process take memory meanwhile, so not every try shows it.
        assert!((0..50).any(|_| goes_back()), "of four blocks most is always still there");
    }
}
