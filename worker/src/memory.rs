//! How much memory there is, how much this process holds, and sizes as people write them. What is done with
//! it is `worker.rs`'s business. Linux only; elsewhere the answers are `None`.

use std::fs;
use std::str::FromStr;

/// A number of bytes, read from text such as `2GiB`, `512M` or `1000000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub usize);

/// Text that is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a size; write it as 2GiB, 512MiB or a number of bytes")]
pub struct BadByteSize(String);

impl FromStr for ByteSize {
    type Err = BadByteSize;

    /// `K`, `M`, `G`, `T` and `KiB` … count in powers of 1024, `KB` … in powers of 1000; case does not
    /// matter.
    fn from_str(text: &str) -> Result<Self, BadByteSize> {
        let bad = || BadByteSize(text.to_owned());
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: f64 = number.parse().map_err(|_| bad())?;
        let unit = unit.trim().to_ascii_lowercase();
        let (prefix, base) = match unit.strip_suffix("ib") {
            Some(prefix) => (prefix, 1024.0_f64),
            None => match unit.strip_suffix('b') {
                Some(prefix) => (prefix, 1000.0),
                None => (unit.as_str(), 1024.0),
            },
        };
        let power = ["", "k", "m", "g", "t"].iter().position(|known| *known == prefix).ok_or_else(bad)?;
        let bytes = number * base.powi(power as i32);
        // Above 2^52 a float is no exact number of bytes, and no machine's memory.
        if (1.0..=4_503_599_627_370_496.0).contains(&bytes) { Ok(Self(bytes as usize)) } else { Err(bad()) }
    }
}

/// Bytes that this process may still take without swapping: what the system has available, or what is left of
/// the control group's limit (v2, as containers have), whichever is less.
pub(crate) fn available_bytes() -> Option<usize> {
    let system = meminfo_bytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let group = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let number = |name: &str| group(name)?.trim().parse::<usize>().ok();
    let left = number("memory.max").zip(number("memory.current")).map(|(max, now)| max.saturating_sub(now));
    Some(left.map_or(system, |left| left.min(system)))
}

/// Bytes of memory that this process holds (its resident set).
pub(crate) fn resident_bytes() -> Option<usize> {
    meminfo_bytes(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// The value of a line such as `MemAvailable:  123 kB`, in bytes.
fn meminfo_bytes(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let of = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
        for (text, bytes) in [
            ("1", 1),
            ("1000000", 1_000_000),
            ("2GiB", 2 << 30),
            ("2g", 2 << 30),
            ("1.5 MiB", 3 << 19),
            ("512M", 512 << 20),
            ("3kb", 3000),
            ("1TB", 1_000_000_000_000),
        ] {
            assert_eq!(of(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "2 furlongs", "0", "1e3", "1..2", "99999999TiB"] {
            assert!(of(text).unwrap_err().to_string().contains("is not a size"), "{text}");
        }
    }

    #[test]
    fn the_systems_numbers_are_read() {
        let text = "MemTotal:       24689856 kB\nMemFree:  1 kB\nMemAvailable:   23689856 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable:"), Some(23_689_856 << 10));
        assert_eq!(meminfo_bytes(text, "Cached:"), None);
        if cfg!(target_os = "linux") {
            let held = resident_bytes().unwrap();
            assert!(held > 1 << 20 && available_bytes().unwrap() > 0);
        }
    }
}
