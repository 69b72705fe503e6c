//! Where clients come in: listener, tower stack, and what is refused before a request is read.

pub mod admin_guard;
pub mod around;
pub mod cors;
pub mod live;
pub mod models;
pub mod server;
pub mod stack;
pub mod well_formed;
