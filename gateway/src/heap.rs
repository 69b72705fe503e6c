//! How much free memory the allocator keeps at the heap's end. glibc gives back what is over 128 KB there and fetches it again page
//! by page: with sixteen prompts of 32 KB on their way at a time, every third request met a page fault. Allocates nothing that stays.

use std::hint::black_box;

/// What may be free at the heap's end; rooms of some thirty requests of 32 KB, as hyper makes them.
const KEPT_BYTES: usize = 2 << 20;

/// Lets the allocator keep so much. glibc keeps twice the largest block that it has had from the system by itself and given back
/// (`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` in mallopt(3)), so one such block is enough; other allocators do not mind.
pub fn keep_warm() {
    drop(black_box(Vec::<u8>::with_capacity(KEPT_BYTES / 2)));
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
}
