//! The built-in model against its handbook (`worker/handbook`): what it answers, and whether the answers are true.

mod answers;
mod entries;
mod facts;
mod worker;
