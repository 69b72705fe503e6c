//! A hash map for keys that are hashes already, or numbers that count, and that no client chooses: spreading
//! their bits is enough, and takes a tenth of the time of a hash that withstands an attacker.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A [`HashMap`] that only spreads its keys' bits. Not for keys that clients choose.
pub(crate) type SpreadMap<K, V> = HashMap<K, V, Spread>;

/// What makes its hashes.
pub(crate) type Spread = BuildHasherDefault<SpreadHasher>;

/// Spreads the bits of a number with one multiplication and one shift.
#[derive(Debug, Default)]
pub(crate) struct SpreadHasher(u64);

impl Hasher for SpreadHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        // The map looks at the upper and the lower bits: 2^64 divided by the golden ratio fills the upper
        // ones, the shift brings them down.
        let spread = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = spread ^ (spread >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
