//! The built-in model against its handbook (`worker/handbook`): what it answers, and whether the answers are
//! true.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

mod answers;
mod entries;
mod facts;
mod worker;
