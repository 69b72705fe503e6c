//! For operators: the admin listener, why a request would go where, the configuration read again.

pub mod admin;
pub mod check;
pub mod explain;
pub mod history;
pub mod reload;
