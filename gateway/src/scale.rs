//! How many workers there should be, and who is told.

pub mod autoscale;
pub mod external_scaler;
