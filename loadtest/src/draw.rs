//! Pages and plots, without anything from elsewhere.

pub mod page;
pub mod svg;
