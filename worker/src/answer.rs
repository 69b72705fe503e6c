//! An answer on its way to its client: tokens as text, what of it is thought, called or said, and where it
//! stops.

pub(crate) mod answer_format;
pub(crate) mod output;
pub(crate) mod reader;
pub(crate) mod stop;
