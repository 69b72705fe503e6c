//! One model on several engines or processes: data-parallel attention, and experts that ranks share.

pub(crate) mod data_parallel;
pub(crate) mod expert_parallel;
