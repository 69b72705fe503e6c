//! Who may come in, and how much each may take: tenants, places, memory for bodies.

pub mod admission;
pub mod body_memory;
pub mod oidc;
pub mod tenants;
