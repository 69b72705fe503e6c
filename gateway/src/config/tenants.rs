//! What `[auth]` says of all tenants; each one's own limits are in the file of tenants.

/// What holds for the requests of all tenants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantRules {
    /// Whether their prompts share no cache.
    pub isolate: bool,
    /// Fields and headers by which they may steer engines.
    pub steering: Vec<String>,
}
