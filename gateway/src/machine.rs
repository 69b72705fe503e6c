//! What the process takes of its machine: cores, threads, heap, descriptors, the log on stderr.

pub mod cores;
pub mod descriptors;
pub mod heap;
pub mod log;
pub mod panics;
pub(crate) mod threads;
pub mod turns;
